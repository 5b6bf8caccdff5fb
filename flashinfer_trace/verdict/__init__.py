"""The parts that decide a verdict: comparison, policies, the form of outputs."""
