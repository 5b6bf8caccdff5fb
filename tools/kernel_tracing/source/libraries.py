"""Kernel libraries: packages whose functions are called but not entered, and their names in traces."""

LIBRARIES = {
    "sgl_kernel": "sgl-kernel",
    "flashinfer": "flashinfer",
    "deep_gemm": "deep-gemm",
    "triton_kernels": "triton-kernels",
}
