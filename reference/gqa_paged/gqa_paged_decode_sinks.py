from .gqa_paged_decode import run as run

SINKS = True
