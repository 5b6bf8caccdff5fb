from .gqa_paged_decode import run as run

SINKS = True
WINDOW_SIZE = 128
