from .gqa_extend_causal import run as run

LOGITS_SOFT_CAP = 50
FLOAT64 = None
