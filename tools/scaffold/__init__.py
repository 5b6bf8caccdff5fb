"""Creates the files of a new family, in which `TODO` marks what the author must write."""
