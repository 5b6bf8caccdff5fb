"""Runs SGLang's own code on CUDA tensors that hold no data, without a GPU, and records which kernels it calls."""
