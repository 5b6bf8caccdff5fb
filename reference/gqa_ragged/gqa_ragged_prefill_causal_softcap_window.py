from .gqa_ragged_prefill_causal import run as run

LOGITS_SOFT_CAP = 50
WINDOW_SIZE = 4096
