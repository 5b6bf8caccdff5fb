"""Functions and methods of torch that select elements of a tensor: by order, by index or by chance."""

from __future__ import annotations

from collections.abc import Callable

from tools.kernel_tracing.evaluator.values import UNKNOWN, External, Tensor, Value

_INDEX = External("torch.int64")


def _given(args: list[Value], kwargs: dict[str, Value], position: int, name: str, default: Value) -> Value:
    return kwargs.get(name, args[position] if len(args) > position else default)


def _resized(tensor: Tensor, dim: Value, size: Value) -> tuple[Value, ...] | None:
    """The shape with another size of one dimension; None removes the dimension."""
    if tensor.shape is None or not isinstance(dim, int) or not -len(tensor.shape) <= dim < len(tensor.shape):
        return None
    at = dim % len(tensor.shape)
    return (*tensor.shape[:at], *(() if size is None else (size,)), *tensor.shape[at + 1 :])


def _multinomial(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return Tensor(_resized(tensor, -1, _given(args, kwargs, 0, "num_samples", UNKNOWN)), _INDEX)


def _gather(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    index = _given(args, kwargs, 1, "index", None)
    return Tensor(index.shape if isinstance(index, Tensor) else None, tensor.dtype)


def _scatter(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return Tensor(tensor.shape, tensor.dtype)


def _sort(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return Tensor(tensor.shape, tensor.dtype), Tensor(tensor.shape, _INDEX)


def _topk(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    shape = _resized(tensor, _given(args, kwargs, 1, "dim", -1), _given(args, kwargs, 0, "k", UNKNOWN))
    return Tensor(shape, tensor.dtype), Tensor(shape, _INDEX)


def _argmax(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    dim = _given(args, kwargs, 0, "dim", None)
    if dim is None:
        return Tensor((), _INDEX)
    return Tensor(_resized(tensor, dim, 1 if _given(args, kwargs, 1, "keepdim", False) is True else None), _INDEX)


#: By name, for `tensor.name(...)` and `torch.name(tensor, ...)`.
SELECTIONS: dict[str, Callable[[Tensor, list[Value], dict[str, Value]], Value]] = {
    "multinomial": _multinomial,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_": _scatter,
    "sort": _sort,
    "topk": _topk,
    "argmax": _argmax,
    "argmin": _argmax,
}
