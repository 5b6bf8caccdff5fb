"""A GPU whose memory several pytest-xdist workers share: one that ran out of it gets the GPU for itself."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SharedGpu"]


class SharedGpu:
    """Turns on one GPU, taken by locks on two files: they end with the process that holds them, however it ends.

    Args:
        directory: that all workers see.
        device: the GPU, such as ``cuda:0``.
    """

    def __init__(self, directory: Path, device: str) -> None:
        name = device.replace(":", "")
        self._gate, self._turn = directory / f"{name}.gate", directory / f"{name}.turn"

    @contextmanager
    def together(self) -> Iterator[None]:
        """A turn beside those of other workers."""
        with _locked(self._gate, fcntl.LOCK_EX):
            turn = _lock(self._turn, fcntl.LOCK_SH)
        try:
            yield
        finally:
            os.close(turn)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A turn that begins when all others have ended, and while which none begins."""
        with _locked(self._gate, fcntl.LOCK_EX), _locked(self._turn, fcntl.LOCK_EX):
            yield


def _lock(path: Path, kind: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, kind)
    return descriptor


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    descriptor = _lock(path, kind)
    try:
        yield
    finally:
        os.close(descriptor)
