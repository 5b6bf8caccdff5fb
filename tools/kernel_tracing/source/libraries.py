"""Kernel libraries: packages whose functions are called but not entered, and their names in traces."""

LIBRARIES = {"sgl_kernel": "sgl-kernel", "flashinfer": "flashinfer"}
