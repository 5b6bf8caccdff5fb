"""Which of the kernel paths that tags name exist in the pinned packages."""
