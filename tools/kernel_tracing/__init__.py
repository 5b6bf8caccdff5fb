"""Static kernel tracer: finds which kernels a model calls, and through which chains of calls.

sources -> index (parsed modules, classes) -> solver (values that flow, calls that they make possible)
-> kernels and chains -> a trace: the JSON document that schema/kernel_traces.schema.json describes.
Nothing of the traced project is imported or executed. `rules/` contains what is known about frameworks, with
one module for each subject. The tracer knows no model, no kernel and no call chain by name.
"""
