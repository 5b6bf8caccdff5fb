from .gqa_extend_causal import run as run

WINDOW_SIZE = 4096
FLOAT64 = None
