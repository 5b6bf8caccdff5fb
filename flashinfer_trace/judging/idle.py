"""Processes that ran known kernels and wait for the next one."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Idle", "Waiting", "has_room", "library_of"]

#: The part of a GPU's memory that must be free for a process to be kept: libraries leave up to 7 GiB in each.
FREE = 0.5


def library_of(request: Mapping[str, Any]) -> str:
    """The package that the known kernel of a request is imported from; empty of anybody else's kernel."""
    return str(request["kernel"]).partition(".")[0] if request["kind"] == "known" else ""


def has_room(device: str) -> bool:
    """Whether so much of a device's memory is free that processes may wait there."""
    if torch.device(device).type == "cpu":
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free >= FREE * total


@dataclass(frozen=True)
class Idle:
    """A process that waits.

    Attributes:
        pipe, pid: of it.
        device: that it has used.
        libraries: that it has imported.
    """

    pipe: socket.socket
    pid: int
    device: str
    libraries: frozenset[str]


class Waiting:
    """The processes that wait."""

    def __init__(self) -> None:
        self._idle: list[Idle] = []

    def keep(self, one: Idle) -> None:
        """Has a process wait."""
        self._idle.append(one)

    def take(self, library: str, device: str) -> Idle | None:
        """A process for a kernel of that library: best of all one that has imported it. None if none waits."""
        fitting = [one for one in self._idle if library and one.device == device]
        if not fitting:
            return None
        chosen = max(fitting, key=lambda one: library in one.libraries)
        self._idle.remove(chosen)
        return chosen

    def close(self) -> None:
        """Closes the pipes."""
        for one in self._idle:
            one.pipe.close()
        self._idle.clear()
