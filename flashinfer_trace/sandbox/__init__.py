"""References are strangers' code, and run in a process of their own (`worker`). SECURITY.md says what that promises."""
