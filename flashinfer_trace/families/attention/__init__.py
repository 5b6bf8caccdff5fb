"""What families of softmax attention share: lengths and values of cases, float64 oracle, bounds. No family itself."""
