"""Libraries of kernels: packages whose functions are called but not entered, and how traces name them."""

LIBRARIES = {"sgl_kernel": "sgl-kernel", "flashinfer": "flashinfer"}
