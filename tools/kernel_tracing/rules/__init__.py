"""What the tracer knows about frameworks, one rule per file. Nothing here names a model, a kernel or a call chain."""
