from .gqa_extend_causal import run as run

SINKS = True
FLOAT64 = None
