"""Platforms: which predicates hold, and which parts of the sources belong to another platform.

Serving frameworks guard code with functions such as `is_cuda()`, whose results they store in names such as `_is_cuda`.
Only the functions are known here; the names get their values by evaluating the sources.
"""

from __future__ import annotations

import re
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

# Packages that exist on one platform only. A module that imports one unconditionally belongs to that platform.
_PACKAGES = {
    "aiter": "hip",
    "torch_npu": "npu",
    "sgl_kernel_npu": "npu",
    "habana_frameworks": "hpu",
    "intel_extension_for_pytorch": "xpu",
    "wave_lang": "hip",
}
# Words in names of files and classes that indicate a platform in the same way.
_WORDS = {
    "aiter": "hip",
    "hip": "hip",
    "rocm": "hip",
    "wave": "hip",
    "ascend": "npu",
    "npu": "npu",
    "hpu": "hpu",
    "amx": "cpu",
    "cpu": "cpu",
    "xpu": "xpu",
    "musa": "musa",
    "mlx": "mps",
    "mps": "mps",
}
PLATFORMS = tuple(sorted(_PREDICATES))


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

    def package_is_foreign(self, path: str) -> bool:
        """Whether importing `path` succeeds only on another platform."""
        return _PACKAGES.get(path.partition(".")[0], self.name) != self.name

    def name_is_foreign(self, *names: str) -> bool:
        """Whether the name of a file or class indicates another platform."""
        words = {word for name in names for word in name_words(name)}
        platforms = {_WORDS[word] for word in words if word in _WORDS}
        return bool(platforms) and self.name not in platforms

    def function_is_foreign(self, name: str) -> bool:
        """Like `name_is_foreign`, for a function, where `cpu` may mean that it copies to the host or counts there."""
        words = set(name_words(name)) - {"cpu", "wave"}
        platforms = {_WORDS[word] for word in words if word in _WORDS}
        return bool(platforms) and self.name not in platforms


def name_words(name: str) -> list[str]:
    """Words of a dotted, snake_case or CamelCase name, in lower case: IntelAMXAttnBackend -> intel, amx, attn, ..."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
