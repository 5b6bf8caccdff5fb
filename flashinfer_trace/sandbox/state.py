"""State that a reference must leave as it finds it: torch's global state, the functions of torch, and its inputs."""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import os
import random
import threading
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

#: Whose attributes are compared: the namespaces that a reference computes with.
_NAMESPACES: dict[str, Any] = {
    "builtins": builtins,
    "math": math,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.linalg": torch.linalg,
    "torch.nn.functional": torch.nn.functional,
}


#: Columns of a checksum: a prime, because the rows of tensors are not.
COLUMNS = 61
#: Bytes from which on a checksum is of sums.
LARGE = 1 << 16


@contextlib.contextmanager
def numbers_drawn(uniform: torch.Tensor | None) -> Iterator[None]:
    """torch.rand returns these numbers, in the shape and dtype that it is asked for; with None it draws."""
    if uniform is None:
        yield
        return
    rand, namespace = torch.rand, vars(torch)

    def given(*size: int, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
        return uniform.to(dtype).reshape(size)

    namespace["rand"] = given
    try:
        yield
    finally:
        namespace["rand"] = rand


def settings() -> dict[str, object]:
    """Global settings of torch and of the process, by name."""
    backends = torch.backends
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "the number of inter-op threads": torch.get_num_interop_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "warnings": torch.is_warn_always_enabled(),
        "mkldnn": (torch._C._get_mkldnn_enabled(), torch._C._get_mkldnn_deterministic()),
        "the flags of cuDNN": (backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark),
        "print options": tuple(sorted(vars(torch._tensor_str.PRINT_OPTS).items(), key=lambda item: item[0])),
        "denormal numbers": float(torch.full((), 2.0**-130).mul(1.0)) != 0.0,
        "running threads": threading.active_count(),
        "environment variables": hash(frozenset(os.environ.items())),
    }


def changed_settings(before: Mapping[str, object]) -> list[str]:
    now = settings()
    return [name for name, value in before.items() if now[name] != value]


def random_state() -> tuple[bytes, object]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def functions() -> dict[str, tuple[tuple[str, ...], tuple[object, ...]]]:
    """Names and values of the namespaces that a reference computes with."""
    return {name: (tuple(vars(owner)), tuple(vars(owner).values())) for name, owner in _NAMESPACES.items()}


def changed_functions(before: Mapping[str, tuple[tuple[str, ...], tuple[object, ...]]]) -> list[str]:
    """Dotted names of what was replaced or removed since `before`; what torch loads late may be added."""
    found = []
    for name, (keys, values) in before.items():
        now = vars(_NAMESPACES[name])
        # Names keep their order, and new ones come last: the same values in the same order are the usual case.
        if not all(map(operator.is_, now.values(), values)) or len(now) < len(values):
            found += [
                f"{name}.{key}" for key, value in zip(keys, values, strict=True) if now.get(key, now) is not value
            ]
    return found


class InputGuard:
    """Sees writes to inputs, also those that are undone: by torch's version counters, and by checksums of their bits.

    A copy to compare with would take several times as long as most references do.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self._versions = {name: value._version for name, value in self._tensors.items()}
        self._checksums = {name: _checksum(value) for name, value in self._tensors.items()}

    def changed(self) -> list[str]:
        return [name for name, value in self._tensors.items() if _checksum(value) != self._checksums[name]]

    def written(self) -> list[str]:
        """Names of the inputs that an operation wrote to, whatever they hold now."""
        return [name for name, value in self._tensors.items() if value._version != self._versions[name]]


def _checksum(value: torch.Tensor) -> tuple[int, ...]:
    """A checksum of all bytes of a tensor's memory, including those between the elements of a strided one.

    It is a CRC. For large tensors it is the sums of every COLUMNS-th word, which take a fraction of the time: exchanged
    rows show in them, unless they are a multiple of COLUMNS words apart.
    """
    data = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    whole = data.numel() // (8 * COLUMNS) * 8 * COLUMNS if data.numel() >= LARGE else 0
    sums = data[:whole].view(torch.int64).view(-1, COLUMNS).sum(dim=0).tolist() if whole else ()
    rest: Any = data[whole:].numpy()
    return *sums, zlib.crc32(rest)
