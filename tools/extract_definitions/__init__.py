"""Extracts the Definitions that a model needs: traces give the kernels, the model's configuration gives the sizes."""
