"""The facts in flashinfer-bench's dataset about its Definitions, and how this dataset compares."""
