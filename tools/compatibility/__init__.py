"""What flashinfer-bench's dataset says about its Definitions, and how this dataset compares."""
