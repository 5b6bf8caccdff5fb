"""The dataset: finding, loading, deriving and checking Definitions, and their evidence. Free of torch."""
