from .gqa_extend_causal import run as run

LOGITS_SOFT_CAP = 50
WINDOW_SIZE = 4096
FLOAT64 = None
