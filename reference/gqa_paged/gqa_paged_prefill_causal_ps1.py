from .gqa_paged_prefill_causal import run as run

PAGE_SIZE = 1
KV_LAST_PAGE_LEN = None
