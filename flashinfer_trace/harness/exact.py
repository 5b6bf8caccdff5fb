"""Operations on inputs that give the same bits on every device.

`ExactOperations` is a mode of torch: while it is active, each function that IEEE 754 does not fix (exponentials, sines,
sums, the order of equal elements) is computed by additions, multiplications and divisions in float64, one after the
other. A floating-point operation that is not known to be exact is refused, so builders of inputs cannot come to depend
on a device unnoticed. Random numbers are those of `harness.inputs.Draws`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations on floating-point tensors that have one result: they move elements, round once, or compare.
_EXACT = frozenset(
    {
        *("_local_scalar_dense", "_to_copy", "_unsafe_view", "abs", "abs_", "alias", "amax", "amin", "arange", "cat"),
        *("clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "clone", "constant_pad_nd"),
        *("copy_", "detach", "diff", "empty", "empty_like", "eq", "expand", "expand_as", "fill_", "flip", "full"),
        *("full_like", "gather", "ge", "gt", "index", "index_select", "isfinite", "isnan", "le", "lift_fresh"),
        *("lt", "masked_fill", "masked_fill_", "max", "maximum", "min", "minimum", "mul", "mul_", "ne", "neg"),
        *("neg_", "nextafter", "reciprocal"),
        *("new_empty", "new_full", "new_zeros", "ones", "ones_like", "permute", "repeat", "reshape", "roll"),
        *("round", "round_", "scalar_tensor", "scatter", "scatter_", "select", "slice", "split"),
        *("split_with_sizes", "sqrt", "squeeze", "stack", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
        *("view_as", "where", "zero_", "zeros", "zeros_like"),
    }
)
#: Exact too, unless a factor of the second operand is given.
_WITHOUT_FACTOR = ("add.", "add_.", "sub.", "sub_.", "rsub.")
#: Which of several largest elements is found first is not fixed.
_ANY_LARGEST = ("max.dim", "min.dim")
#: For the 256 quantiles that fp8 codes are drawn from: on a CPU, where the rounding to e4m3 hides errors of float64.
_TABLE = "special_ndtri."

_SMALLEST_EXPONENT, _LARGEST_EXPONENT, _EXPONENT_BIAS = -1022, 1023, 1023
_TERMS_OF_EXPONENTIAL, _TERMS_OF_SINE, _TERMS_OF_LOGARITHM = 15, 22, 18


class InexactOperation(RuntimeError):
    """A builder of inputs uses an operation whose result depends on the device. The message says what to do."""


class ExactOperations(TorchDispatchMode):
    """While active, results are the same on every device."""

    #: By the address of the operation, whose hash is computed in Python.
    _rules: ClassVar[dict[int, Callable[..., Any] | None]] = {}

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first operation, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            rule = self._rules[id(func)]
        except KeyError:
            rule = self._rules[id(func)] = _rule(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, *args, **(kwargs or {}))


def _rule(func: Any) -> Callable[..., Any] | None:
    """The function to call with an operation and its arguments; None for an operation that has one result."""
    name = str(func).removeprefix("aten.")
    operation = name.split(".")[0]
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise _inexact(name)
    if operation in _EXACT and name not in _ANY_LARGEST:
        return None
    if operation in _ORDERS:
        return lambda _, *args, **kwargs: _ORDERS[operation](*args, **kwargs)
    return functools.partial(_checked, name, _REPLACED.get(name) or _REPLACED.get(operation))


def _checked(name: str, replaced: Callable[..., Any] | None, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an operation on integers, or of what replaces it for floating-point numbers."""
    if _any_float((*args, *kwargs.values())):
        if replaced is not None:
            return replaced(*args, **kwargs)
        factor = len(args) > 2 or kwargs.get("alpha", 1) != 1
        table = name.startswith(_TABLE) and all(value.device.type == "cpu" for value in args)
        if not table and (factor or not name.startswith(_WITHOUT_FACTOR)):
            raise _inexact(name)
        return func(*args, **kwargs)
    result = func(*args, **kwargs)
    if _any_float(result if isinstance(result, (list, tuple)) else [result]):
        raise _inexact(name)
    return result


def _any_float(values: Iterable[Any]) -> bool:
    return any(
        _any_float(one) if isinstance(one, (list, tuple)) else isinstance(one, torch.Tensor) and one.is_floating_point()
        for one in values
    )


def _inexact(name: str) -> InexactOperation:
    return InexactOperation(
        f"inputs are made with {name}, whose result may depend on the device; replace it in harness/exact.py "
        f"by operations that IEEE 754 fixes, or add it to the exact ones there if it is one of them"
    )


# Functions by additions, multiplications and divisions in float64. Each line is one operation of torch: no
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


def _log2(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of positive numbers in float64, by the series of the inverse hyperbolic tangent."""
    mantissa, exponent = torch.frexp(x)
    quotient = (mantissa - 1) / (mantissa + 1)
    square = quotient * quotient
    found = torch.zeros_like(quotient)
    for term in range(_TERMS_OF_LOGARITHM, -1, -1):
        found = found * square
        found = found + 1 / (2 * term + 1)
    found = found * quotient
    found = found * (2 / math.log(2))
    return found + exponent


def _power_of(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """Of numbers that are not negative, unless they are squared."""
    return base * base if exponent == 2 else _exp2(exponent * _log2(base.double())).to(base.dtype)


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


def _mean(x: torch.Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    found = _sum_of(x, dims, keepdim, dtype=torch.float64)
    return _quotient(found, x.numel() // max(1, found.numel())).to(dtype or x.dtype)


def _cumulative(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
    """A CPU adds one element after the other."""
    return x.cpu().cumsum(dim, dtype=dtype).to(x.device)


def _scattered(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return target.copy_(target.cpu().scatter_add_(dim, index.cpu(), source.cpu()))


def _added_rows(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Adds to distinct rows: a single addition has no order."""
    assert len(set(index.tolist())) == len(index), "one row is added to twice"
    return target.index_copy_(dim, index, target.index_select(dim, index) + source)


def _ordered(x: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    """Sorts stably: equal elements keep their order."""
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
    "cumsum": _cumulative,
    "cos": lambda x: _sine(x.double(), 0.25).to(x.dtype),
    "div": _quotient,
    "exp": lambda x: _exp(x.double()).to(x.dtype),
    "exp2": lambda x: _exp2(x.double()).to(x.dtype),
    "index_add_": _added_rows,
    "log": lambda x: (_log2(x.double()) * math.log(2)).to(x.dtype),
    "mean": _mean,
    "pow.Scalar": _power,
    "pow.Tensor_Scalar": _power_of,
    "scatter_add_": _scattered,
    "sigmoid": lambda x: (1.0 / (1.0 + _exp(-x.double()))).to(x.dtype),
    "sin": lambda x: _sine(x.double(), 0.0).to(x.dtype),
    "sum": _sum_of,
}
#: Of integers as well: equal elements are in no fixed order without these.
_ORDERS: dict[str, Callable[..., Any]] = {"sort": _ordered, "topk": _largest}
