from .gqa_paged_decode import run as run

WINDOW_SIZE = 4096
