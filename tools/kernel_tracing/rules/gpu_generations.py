"""GPU generations: names of the predicates and numbers with which the sources test for one."""

from __future__ import annotations

import re

_PREDICATE = re.compile(
    r"_*(?:is_)?(?:cuda_|nvidia_)?(sm\d+\w?|ampere|ada|hopper|blackwell)(?:_(?:supported|with_\w+|or_\w+))?"
)
_NUMBER = re.compile(r"_?(?:get_)?(?:device_)?(?:sm|sm_version|capability)(_major)?")
_ORDER = {">=": "{} or newer", ">": "newer than {}", "<": "older than {}", "<=": "{} or older", "==": "{}"}


def generation(name: str) -> str:
    """`sm100` for `_is_sm100_supported`, `hopper` for `is_hopper_with_cuda_12_3`, "" for any other name."""
    match = _PREDICATE.fullmatch(name)
    return match[1] if match else ""


def compared(name: str, operator: str, number: int, major: bool) -> str:
    """`sm90 or newer` for `device_sm >= 90`; "" for anything else. `major`: the number is the first of a pair, 9."""
    match = _NUMBER.fullmatch(name)
    if match is None or operator not in _ORDER:
        return ""
    number = number * 10 if major or match[1] else number
    return _ORDER[operator].format(f"sm{number}") if 50 <= number < 200 else ""
