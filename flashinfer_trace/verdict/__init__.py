"""What decides a verdict: comparison, policies, the form of outputs."""
