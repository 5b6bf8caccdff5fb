"""A model's ops in execution order, each with the kernels that can implement it."""
