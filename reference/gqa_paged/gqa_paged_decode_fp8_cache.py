from .gqa_paged_decode import run as run

PAGE_SIZE = 1
KV_LAST_PAGE_LEN = None
K_SCALE = True
V_SCALE = True
