"""Functions of torch that make tensors: from sizes, from plain data, or from other tensors."""

from __future__ import annotations

from typing import Any

from tools.kernel_tracing.evaluator.selections import SELECTIONS
from tools.kernel_tracing.evaluator.tensors import MAX_DATA, METHODS, SAME, is_dtype, of_size
from tools.kernel_tracing.evaluator.values import UNKNOWN, External, Tensor, Value

_WIDE = tuple(External(f"torch.{name}") for name in ("bfloat16", "float16", "float32"))
_MAKERS = {"tensor", "as_tensor", "from_numpy", "arange", "cat", "concat", "stack"}
_FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "empty_strided"}
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "relu", "tanh"}


def product(left: Tensor, right: Tensor, given: list[Value]) -> Tensor:
    """What a kernel for `x @ w` or `x @ w.T` returns; of quantised operands, the dtype is known if it is given."""
    dtype = next((one for one in given if is_dtype(one)), left.dtype if left.dtype in _WIDE else None)
    if not left.shape or right.shape is None or len(right.shape) != 2:
        return Tensor(None, dtype)
    columns = (
        right.shape[0] if right.shape[1] == left.shape[-1] and right.shape[0] != left.shape[-1] else right.shape[1]
    )
    return Tensor((*left.shape[:-1], columns), dtype)


def is_factory(path: str) -> bool:
    """Whether a function of torch makes a tensor from plain data."""
    return path.rpartition(".")[2] in _FACTORIES | _MAKERS


def _nested_shape(value: Any) -> tuple[Value, ...]:
    if isinstance(value, (list, tuple)):
        return (len(value), *(_nested_shape(value[0]) if value else ()))
    if isinstance(value, Tensor):
        return value.shape or ()
    return ()


def _joined(parts: list[Value], dim: Value) -> Tensor:
    """`torch.cat`; sizes that one part lacks are those of the others, and empty parts add nothing."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    filled = [one for one in tensors if not one.shape or one.shape[0] != 0]
    if len(filled) == 1 and len(tensors) == len(parts):
        return filled[0]
    dtype = next((one.dtype for one in tensors if one.dtype is not None), None)
    shapes = [one.shape for one in tensors if one.shape is not None]
    if not shapes or not isinstance(dim, int) or len({len(shape) for shape in shapes}) != 1:
        return Tensor(None, dtype)
    at = dim % len(shapes[0])
    shape = [next((size for size in sizes if isinstance(size, int)), UNKNOWN) for sizes in zip(*shapes, strict=True)]
    known = len(shapes) == len(parts) and all(isinstance(one[at], int) for one in shapes)
    shape[at] = sum(one[at] for one in shapes) if known else UNKNOWN
    return Tensor(tuple(shape), dtype)


def made(path: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """What a function of torch returns."""
    name = path.rpartition(".")[2]
    given = next((one for one in (*args, *kwargs.values()) if is_dtype(one)), None)
    first = args[0] if args else None
    if name in _FACTORIES:
        return of_size(args, kwargs)
    if name in ("tensor", "as_tensor", "from_numpy"):
        known = isinstance(first, (list, tuple, int, float, Tensor))
        numbers = isinstance(first, list) and 0 < len(first) <= MAX_DATA and all(type(one) is int for one in first)
        return Tensor(_nested_shape(first) if known else None, given, tuple(first or ()) if numbers else None)
    if name == "arange":
        bounds = [one for one in args if isinstance(one, int)]
        length = UNKNOWN if len(bounds) != len(args) or not bounds else len(range(*bounds))
        return Tensor((length,), given or External("torch.int64"))
    if isinstance(first, Tensor) and (name in _LIKE or name in SAME):
        return Tensor(first.shape, given or first.dtype)
    if name == "embedding" and len(args) > 1 and isinstance(args[1], Tensor) and isinstance(first, Tensor):
        index, weight = (first, args[1]) if path.endswith("functional.embedding") else (args[1], first)
        if index.shape is not None and weight.shape is not None:
            return Tensor((*index.shape, weight.shape[-1]), weight.dtype)
    if name == "linear" and isinstance(first, Tensor) and len(args) > 1 and isinstance(args[1], Tensor):
        weight_shape = args[1].shape
        if first.shape is not None and weight_shape:
            return Tensor((*first.shape[:-1], weight_shape[0]), first.dtype)
    if name in ("cat", "concat"):
        return _joined(list(first) if isinstance(first, (list, tuple)) else [], kwargs.get("dim", (*args, 0, 0)[1]))
    if (name in ("split", "chunk") or name in SELECTIONS) and isinstance(first, Tensor):
        return METHODS[name](first, args[1:], kwargs)
    if name in ("bmm", "matmul", "mm") and isinstance(first, Tensor) and first.shape and len(args) > 1:
        other = args[1].shape if isinstance(args[1], Tensor) else None
        return Tensor((*first.shape[:-1], other[-1] if other else UNKNOWN), first.dtype)
    dtype = first.dtype if isinstance(first, Tensor) else None
    return Tensor(None, given or dtype)
