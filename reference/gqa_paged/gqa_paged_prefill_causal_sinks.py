from .gqa_paged_prefill_causal import run as run

SINKS = True
