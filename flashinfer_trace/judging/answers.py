"""What is asked of a submission's process, and what it answers. Its words are checked, and proven by nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.judging.submission import printable

__all__ = ["OF_CALLS", "Answer", "Failed", "Limits", "Timed", "Timing", "returned_of", "tampered_of", "times_of"]


#: Seconds that loading a submission has at least, whatever its calls may take.
LEAST_LOAD = 30.0

#: Kinds of failures that a process may say a call has instead of having raised an error.
OF_CALLS = ("outputs", "tampered")


class Failed(Exception):
    """A submission that gave no outputs.

    Attributes:
        kind: ``not-loaded``, ``raised``, ``outputs``, ``tampered``, ``timed-out``, ``died`` or ``protocol``.
        message: one line of printable characters.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        self.message = printable(message)
        super().__init__(kind, self.message)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Limits:
    """How long a submission may take, in seconds: to be loaded, for its first call, which compiles, and for others."""

    load: float = 120.0
    first_call: float = 300.0
    call: float = 60.0

    @classmethod
    def of(cls, seconds: float) -> Limits:
        """What `flashinfer-trace check --timeout` says: libraries for CUDA take seconds to import, however fast calls
        are."""
        return cls(max(seconds, LEAST_LOAD), seconds, seconds)


@dataclass(frozen=True)
class Answer:
    """What one call left.

    Attributes:
        outputs: by name, as they were in the memory when the call returned.
        returned: what the submission says of each value that it returned, by name; empty if it returned nothing.
        changed: inputs that hold other bits than before.
        outside: whether it wrote beside the tensors that it was given.
        tampered: functions that it replaced, as its process says.
    """

    outputs: dict[str, torch.Tensor]
    returned: dict[str, Any]
    changed: list[str]
    outside: bool
    tampered: list[str]


@dataclass(frozen=True)
class Timing:
    """How calls are timed.

    Attributes:
        repeats: calls.
        flush: bytes that are written before each call, so that the cache holds nothing of its inputs; 0 not to.
        warm_up: how often they are written before the first call, for clocks to rise.
        graph: whether calls are captured, and replayed as a CUDA graph.
    """

    repeats: int
    flush: int = 0
    warm_up: int = 0
    graph: bool = False


@dataclass(frozen=True)
class Timed:
    """What timed calls left.

    Attributes:
        answers: of each call.
        calls: seconds of each call by phase: ``total``, and ``plan`` and ``run`` of a kernel that has both; and
            ``ahead``: 1 if all of it was launched before the GPU began it, else 0.
        outside: seconds of all of them together, flushes included, by the judge's clock.
    """

    answers: list[Answer]
    calls: list[dict[str, float]]
    outside: float


def returned_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a process says of the values that were returned."""
    returned = answer.get("returned")
    return returned if isinstance(returned, dict) else {}


def tampered_of(answer: Mapping[str, Any]) -> list[str]:
    """The functions that a process says were replaced in it.

    Raises:
        Failed: it says so in no list.
    """
    names = answer.get("tampered") or []
    if not isinstance(names, list):
        raise Failed("protocol", "its process answered no list of replaced functions")
    return [printable(str(name)) for name in names]


def times_of(answer: Mapping[str, Any], repeats: int) -> list[dict[str, float]]:
    """The times of some calls. They come from a stranger, so that nothing but positive numbers is one.

    Raises:
        Failed: they are none, or not as many as there were calls.
    """
    times = answer.get("times")
    try:
        found = [{str(name): float(value) for name, value in call.items()} for call in times or []]
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise Failed("protocol", "its process answered times that are none") from error
    right = all(0 < call.get("total", 0) < float("inf") and call.get("ahead") in (0, 1) for call in found)
    if len(found) != repeats or not right:
        raise Failed("protocol", f"its process answered {len(found)} times of {repeats}, or one that is not positive")
    return found
