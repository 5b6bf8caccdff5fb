"""How well the tracer resolves calls, beside other tools, on calls labelled by hand: precision and recall."""
