from .gqa_ragged_prefill_causal import run as run

WINDOW_SIZE = 4096
