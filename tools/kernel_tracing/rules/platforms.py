"""Platforms: which predicates hold.

Serving frameworks guard code with functions such as `is_cuda()`, whose results they store in names such as `_is_cuda`.
Only the functions are known here; the names get their values by evaluating the sources.
"""

from __future__ import annotations

from dataclasses import dataclass

# Predicates of the platform, by the name of the function.
_PREDICATES = {
    "cuda": {"is_cuda", "is_cuda_alike", "is_sm80_supported"},
    "hip": {"is_hip", "is_cuda_alike", "is_gfx95_supported"},
    "npu": {"is_npu"},
    "cpu": {"is_cpu", "cpu_has_amx_support", "use_intel_amx_backend"},
    "xpu": {"is_xpu"},
    "hpu": {"is_hpu"},
    "musa": {"is_musa", "is_cuda_alike"},
    "mps": {"is_mps"},
}
_KNOWN = frozenset().union(*_PREDICATES.values(), {"is_cpu_arm64", "is_host_cpu_arm64"}) - {"is_sm80_supported"}


@dataclass(frozen=True)
class Platform:
    """The platform to trace for."""

    name: str

    def predicate(self, function: str) -> bool | None:
        """What a predicate function returns on this platform; None for any other function."""
        return function in _PREDICATES[self.name] if function in _KNOWN else None

    def constant(self, path: str) -> bool | None:
        """The truth of a constant of torch on this platform; None for any other path."""
        if path == "torch.version.hip":
            return self.name == "hip"
        if path in ("torch.version.cuda", "torch.cuda.is_available"):
            return True if self.name == "cuda" else None
        return None
