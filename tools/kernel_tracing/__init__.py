"""Static kernel tracer: finds which kernels a configuration of SGLang calls, and through which chains of calls.

source (files, syntax trees, an index) <- rules (facts of the frameworks) <- evaluator (runs the traced Python on its
syntax trees, with one configuration) <- configuration (what is listed or asked for) <- report (the trace: the JSON
document that schema/kernel_traces.schema.json describes). verify checks a trace with `source` alone. The contract in
pyproject.toml holds these arrows. Nothing of the traced project is imported or executed. The tracer knows no model and
no call chain by name.
"""
