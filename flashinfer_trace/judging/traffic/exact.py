"""Makes the inputs of a family from Philox, by operations that give the same bits on every device.

`ExactDraws` is a mode of torch: while it is active, every draw from a generator of torch comes from Philox, and each
function that IEEE 754 does not fix (exponentials, sines, sums, the order of equal elements) is computed by additions,
multiplications and divisions in float64, one after the other. A floating-point operation that is not known to be exact
is refused, so that builders of inputs cannot come to depend on a device unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashinfer_trace.judging.traffic.philox import Stream

__all__ = ["ExactDraws", "HollowDraws", "InexactOperation"]

#: Operations on floating-point tensors that have one result: they move elements, round once, or compare.
_EXACT = frozenset(
    {
        *("_local_scalar_dense", "_to_copy", "_unsafe_view", "abs", "alias", "amax", "amin", "arange", "cat"),
        *("clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "clone", "constant_pad_nd"),
        *("copy_", "detach", "diff", "empty", "empty_like", "eq", "expand", "expand_as", "fill_", "flip", "full"),
        *("full_like", "gather", "ge", "gt", "index", "index_select", "isfinite", "isnan", "le", "lift_fresh"),
        *("lt", "masked_fill", "masked_fill_", "max", "maximum", "min", "minimum", "mul", "mul_", "ne", "neg"),
        *("new_empty", "new_full", "new_zeros", "ones", "ones_like", "permute", "repeat", "reshape", "roll"),
        *("round", "round_", "scalar_tensor", "scatter", "scatter_", "select", "slice", "split"),
        *("split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
        *("view_as", "where", "zero_", "zeros", "zeros_like"),
    }
)
#: Exact too, unless a factor of the second operand is given.
_WITHOUT_FACTOR = ("add", "add_", "sub", "sub_", "rsub")
#: Of the 256 quantiles that fp8 codes are drawn from: on a CPU, where the rounding to e4m3 hides errors of float64.
_TABLES = ("special_ndtri",)

_SMALLEST_EXPONENT, _LARGEST_EXPONENT, _EXPONENT_BIAS = -1022, 1023, 1023
#: Standard deviation of the sum of four integers, each uniform in -32768..32767.
_SIGMA_OF_FOUR = math.sqrt(4 * (65536**2 - 1) / 12)
_LARGEST_INT64 = (1 << 63) - 1
_TERMS_OF_EXPONENTIAL, _TERMS_OF_SINE = 15, 22


class InexactOperation(RuntimeError):
    """A builder of inputs uses an operation whose result depends on the device. The message says what to do."""


class ExactDraws(TorchDispatchMode):
    """While active, draws come from Philox with this seed, and results are the same on every device."""

    def __init__(self, seed: int) -> None:
        TorchDispatchMode.__init__(self)
        self._stream = Stream(seed)
        self._draws: dict[str, Callable[..., torch.Tensor]] = {
            "rand.generator": self._uniform,
            "randn.generator": self._normal,
            "randint.low_generator": self._integers,
            "randperm.generator": self._permutation,
            "random_.from": self._bits,
        }

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        draw = self._draws.get(name)
        if draw is not None:
            return draw(*args, **kwargs)
        operation = name.split(".")[0]
        if operation in _ORDERS:
            return _ORDERS[operation](*args, **kwargs)
        if not any(_is_float(value) for value in tree_leaves((args, kwargs))):
            return _checked(name, func(*args, **kwargs))
        replaced = _REPLACED.get(name) or _REPLACED.get(operation)
        if replaced is not None:
            return replaced(*args, **kwargs)
        if not _is_exact(name, args, kwargs):
            raise _inexact(name)
        return func(*args, **kwargs)

    def _uniform(self, size: Sequence[int], *, device: Any = None, **options: Any) -> torch.Tensor:
        """float32 in [0, 1), multiples of 2^-24."""
        count = math.prod(size)
        words = self._stream.words(-(-count // 2), torch.device(device or "cpu")).view(torch.int32)[:count]
        return words.bitwise_right_shift(8).bitwise_and_((1 << 24) - 1).float().mul_(2.0**-24).view(tuple(size))

    def _normal(self, size: Sequence[int], *, device: Any = None, **options: Any) -> torch.Tensor:
        """float32 with mean 0 and standard deviation 1: sums of four uniform numbers, which stay within 3.47."""
        words = self._stream.words(math.prod(size), torch.device(device or "cpu"))
        sums = words.view(torch.int16).view(-1, 4).sum(dim=1, dtype=torch.int32)
        return sums.add_(2).float().mul_(1 / _SIGMA_OF_FOUR).view(tuple(size))

    def _integers(
        self, low: int, high: int, size: Sequence[int], *, dtype: Any = None, device: Any = None, **options: Any
    ) -> torch.Tensor:
        """Uniform in low..high - 1 up to 2^-63 times their number; int64 unless asked for otherwise."""
        words = self._stream.words(math.prod(size), torch.device(device or "cpu"))
        words.bitwise_and_(_LARGEST_INT64).remainder_(high - low).add_(low)
        return words.view(tuple(size)).to(dtype or torch.int64)

    def _permutation(self, n: int, *, device: Any = None, **options: Any) -> torch.Tensor:
        keys = self._stream.words(n, torch.device(device or "cpu"))
        return keys.sort(stable=True).indices

    def _bits(self, target: torch.Tensor, low: int, high: int | None, **options: Any) -> torch.Tensor:
        if target.dtype != torch.int64 or low != -(1 << 63) or high is not None:
            raise _inexact(f"random_ of {target.dtype} from {low} to {high}")
        return target.copy_(self._stream.words(target.numel(), target.device).view(target.shape))


class HollowDraws(ExactDraws):
    """The same index structures and lengths, with zeros for elements: for sizes, which depend on no element."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        if name in self._draws:
            return self._draws[name](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _uniform(self, size: Sequence[int], *, device: Any = None, **options: Any) -> torch.Tensor:
        self._stream.skip()
        return torch.zeros(tuple(size), device=device)

    _normal = _uniform

    def _bits(self, target: torch.Tensor, low: int, high: int | None, **options: Any) -> torch.Tensor:
        self._stream.skip()
        return target.zero_()


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_exact(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    operation = name.split(".")[0]
    if operation in _WITHOUT_FACTOR:
        return len(args) <= 2 and kwargs.get("alpha", 1) == 1
    if operation in _TABLES:
        return all(value.device.type == "cpu" for value in tree_leaves(args) if isinstance(value, torch.Tensor))
    # Which of several largest elements is found first is not fixed.
    return operation in _EXACT and name not in ("max.dim", "min.dim")


def _checked(name: str, result: Any) -> Any:
    """The result of an operation on integers, which may be floating-point ones only if it rounds once."""
    if any(_is_float(value) for value in tree_leaves(result)) and not _is_exact(name, (), {}):
        raise _inexact(name)
    return result


def _inexact(name: str) -> InexactOperation:
    return InexactOperation(
        f"inputs of a workload are made with {name}, whose result may depend on the device; replace it in {__name__} "
        f"by operations that IEEE 754 fixes, or add it to the exact ones there if it is one of them"
    )


# Functions by additions, multiplications and divisions in float64. Each line is one operation of torch, so that no
# compiler can join a product and a sum into one rounding.


def _exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x in float64, within some units of its last place; 0 below 2^-1022."""
    whole = x.round()
    argument = (x - whole) * math.log(2)
    terms = _TERMS_OF_EXPONENTIAL
    found = torch.full_like(argument, 1 / math.factorial(terms))
    for power in range(terms - 1, -1, -1):
        found = found * argument
        found = found + 1 / math.factorial(power)
    exponent = whole.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT).long()
    scale = ((exponent + _EXPONENT_BIAS) << 52).view(torch.float64)
    return torch.where(x < _SMALLEST_EXPONENT, 0.0, found * scale)


def _exp(x: torch.Tensor) -> torch.Tensor:
    return _exp2(x * (1 / math.log(2)))


def _sine(x: torch.Tensor, turn: float) -> torch.Tensor:
    """The sine of x + 2 pi * turn, by its series around 0."""
    turns = x * (1 / (2 * math.pi)) + turn
    angle = (turns - turns.round()) * (2 * math.pi)
    square = angle * angle
    found = torch.zeros_like(angle)
    for term in range(_TERMS_OF_SINE // 2, -1, -1):
        found = found * square
        found = found + (-1) ** term / math.factorial(2 * term + 1)
    return found * angle


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Pairwise sums in float64, always of the same pairs; keeps the dimension, with size 1."""
    x = x.double().movedim(dim, -1)
    if x.shape[-1] == 0:
        return x.new_zeros(*x.shape[:-1], 1).movedim(-1, dim)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.movedim(-1, dim)


def _quotient(x: Any, y: Any, rounding_mode: str | None = None) -> torch.Tensor:
    """Torch multiplies by the reciprocal of a number on a GPU; a tensor of one element is divided by."""
    if rounding_mode is not None:
        raise _inexact(f"div with rounding_mode={rounding_mode}")
    if not isinstance(y, torch.Tensor) or (y.ndim == 0 and y.device.type == "cpu"):
        y = torch.full((1,), float(y), dtype=x.dtype, device=x.device)
    result: torch.Tensor = torch.div(x, y)
    return result


def _power(base: float, exponent: torch.Tensor) -> torch.Tensor:
    # The logarithm in decimal arithmetic, which is the same everywhere; that of a C library may not be.
    logarithm = float(Decimal(base).ln() / Decimal(2).ln())
    return _exp2(exponent.double() * logarithm).to(exponent.dtype)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    weights = _exp(x.double() - x.double().amax(dim, keepdim=True))
    return (weights / _sum(weights, dim)).to(torch.float32 if half_to_float else x.dtype)


def _sum_of(
    x: torch.Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    found = x.double()
    named = range(x.ndim) if not dims and dims != 0 else [dims] if isinstance(dims, int) else list(dims)
    summed = sorted(dim % x.ndim for dim in named)
    for dim in summed:
        found = _sum(found, dim)
    for dim in reversed([] if keepdim else summed):
        found = found.squeeze(dim)
    return found.to(dtype or x.dtype)


def _ordered(x: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    """Stable, so that equal elements keep their order."""
    return torch.sort(x, dim=dim, descending=descending, stable=True)


def _largest(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The first k of a stable sort."""
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _batched_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _sum(x.double()[:, :, :, None] * y.double()[:, None, :, :], 2).squeeze(2).to(x.dtype)


_REPLACED: dict[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "bmm": _batched_product,
    "cos": lambda x: _sine(x.double(), 0.25).to(x.dtype),
    "div": _quotient,
    "exp": lambda x: _exp(x.double()).to(x.dtype),
    "exp2": lambda x: _exp2(x.double()).to(x.dtype),
    "pow.Scalar": _power,
    "sigmoid": lambda x: (1.0 / (1.0 + _exp(-x.double()))).to(x.dtype),
    "sin": lambda x: _sine(x.double(), 0.0).to(x.dtype),
    "sum": _sum_of,
}
#: Of integers as well: equal elements are in no fixed order without these.
_ORDERS: dict[str, Callable[..., Any]] = {"sort": _ordered, "topk": _largest}
