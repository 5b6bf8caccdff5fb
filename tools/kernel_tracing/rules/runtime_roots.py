"""Occasions: what the serving runtime does outside the model's forward, by the method with which a chain begins."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Occasion:
    """Methods of matching classes that the runtime calls."""

    module: str  # regular expression for the whole module name
    function: str  # regular expression for class and method
    group: str  # what the work belongs to
    when: str  # when the runtime calls them


OCCASIONS = (
    Occasion(
        r"sglang\.srt\.model_executor\.model_runner",
        r"ModelRunner\.sample",
        group="sampling",
        when="after every forward, on the last pipeline stage",
    ),
    Occasion(
        r"sglang\.srt\.model_executor\.model_runner",
        r"ModelRunner\.__init__",
        group="loading",
        when="once, when the server starts",
    ),
    Occasion(
        r"sglang\.srt\.model_executor\.model_runner",
        r"ModelRunner\.forward",
        group="attention metadata",
        when="in every forward, before the model runs",
    ),
    Occasion(
        r"sglang\.srt\.model_executor\.forward_batch_info",
        r"ForwardBatch\.init_new",
        group="batch",
        when="before every forward",
    ),
    Occasion(
        r"sglang\.srt\.managers\.schedule_batch",
        r"ScheduleBatch\.prepare_for_\w+",
        group="KV-cache I/O",
        when="when a batch is scheduled",
    ),
)


def occasion(module: str, class_name: str, method: str) -> tuple[str, str]:
    """The group and the time of the work that the runtime starts with this method."""
    for rule in OCCASIONS:
        if re.fullmatch(rule.module, module) and re.fullmatch(rule.function, f"{class_name}.{method}"):
            return rule.group, rule.when
    return "utilities", "as part of a step"
