"""Runs a model with few layers and random weights in an installed SGLang, and records which kernels ran, from where."""
