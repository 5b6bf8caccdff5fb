from .gqa_extend_causal import run as run

SINKS = True
WINDOW_SIZE = 128
FLOAT64 = None
