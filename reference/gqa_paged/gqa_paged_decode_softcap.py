from .gqa_paged_decode import run as run

LOGITS_SOFT_CAP = 50
