"""What the tracer knows of frameworks, one rule a file. Nothing here names a model, a kernel or a call chain."""
