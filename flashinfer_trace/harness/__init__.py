"""Proves references against float64 oracles and real kernels. Generic: it knows no kernel by name."""
