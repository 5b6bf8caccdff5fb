"""Measures precision and recall of the tracer and of other tools on calls labelled by hand."""
