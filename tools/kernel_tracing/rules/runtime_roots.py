"""Natural roots: where the serving runtime, rather than a model, starts work that reaches kernels.

They are given by patterns for modules and classes of the framework and the methods that its event loop calls. Chains
that pass through a model's forward end there; all others end at one of these roots.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class RuntimeRoot:
    """Methods of matching classes that the runtime calls."""

    module: str  # regular expression for the whole module name
    classes: str  # regular expression for the whole class name
    methods: str  # regular expression for the whole method name
    group: str  # what the work belongs to
    when: str  # when the runtime calls them
    ends_chains: bool = True  # False: chains continue to callers, if there are any


RUNTIME_ROOTS = (
    RuntimeRoot(
        r"sglang\.srt\.model_executor\.model_runner",
        r"ModelRunner",
        r"sample",
        group="sampling",
        when="after every forward, on the last pipeline stage",
    ),
    RuntimeRoot(
        r"sglang\.srt\.model_executor\.model_runner",
        r"ModelRunner",
        r"initialize",
        group="utilities",
        when="once, when the server starts",
        ends_chains=False,
    ),
    RuntimeRoot(
        r"sglang\.srt\.model_executor\.model_runner",
        r"ModelRunner",
        r"forward",
        group="utilities",
        when="around every forward",
        ends_chains=False,
    ),
    RuntimeRoot(
        r"sglang\.srt\.managers\.tp_worker",
        r"TpModelWorker",
        r"forward_batch_generation",
        group="utilities",
        when="around every batch",
    ),
    RuntimeRoot(
        r"sglang\.srt\.speculative\.\w+",
        r"\w+Worker(V2)?",
        r"forward_batch_generation",
        group="speculative decoding",
        when="every batch, with speculative decoding",
    ),
    RuntimeRoot(
        r"sglang\.srt\.managers\.schedule_batch",
        r"ScheduleBatch",
        r"prepare_for_\w+|mix_with_running|retract_decode",
        group="KV-cache I/O",
        when="when a batch is scheduled",
    ),
    RuntimeRoot(
        r"sglang\.srt\.layers\.quantization\..+",
        r"\w+Method(\w*)",
        r"process_weights_after_loading",
        group="quantisation",
        when="once, after the weights are loaded",
    ),
    RuntimeRoot(
        r"sglang\.srt\.mem_cache\.(memory_pool|allocator)",
        r"\w+(Pool|Cache|Allocator)",
        r"[a-z]\w*",
        group="KV-cache I/O",
        when="when the KV cache is allocated, read, written or freed",
        ends_chains=False,
    ),
)

# What the runtime calls on a model, in addition to its constructor.
MODEL_METHODS = r"forward\w*|load_\w+|post_load\w*|get_\w+|set_\w+|start_layer|end_layer"


def matching(module: str) -> list[RuntimeRoot]:
    """The rules that apply to a module."""
    return [rule for rule in RUNTIME_ROOTS if re.fullmatch(rule.module, module)]


def occasion(module: str, class_name: str, method: str) -> tuple[str, str]:
    """The group and the time of the work that the runtime starts with this method."""
    for rule in matching(module):
        if re.fullmatch(rule.classes, class_name) and re.fullmatch(rule.methods, method):
            return rule.group, rule.when
    if method == "__init__":
        return "utilities", "once, when the server starts"
    return "weight loading", "once, while the weights are loaded"
