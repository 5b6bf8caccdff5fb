"""Compares the kernels of two stacks of releases."""
