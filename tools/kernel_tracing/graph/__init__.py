"""The solved call graph: its roots, kernels, chains and ops."""
