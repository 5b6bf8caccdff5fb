"""Static kernel tracer: which kernels a model calls, and by which chains of calls.

sources -> index (parsed modules, classes) -> solver (values that flow, calls that they make possible)
-> kernels and chains -> a trace, as the JSON document that schema/kernel_traces.schema.json describes.
Nothing of the traced project is imported or executed. `rules/` holds what is known of frameworks, one
named place each; the tracer knows no model, no kernel and no call chain.
"""
