"""Source files: where they are, their syntax, and an index of what they define."""
