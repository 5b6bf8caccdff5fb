"""Documents: the trace, its text, and what a reader asks about it."""
