"""From a model to the Definitions that it needs: traces say which kernels, its configuration which sizes."""
