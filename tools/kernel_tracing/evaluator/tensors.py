"""Tensors: what their attributes, methods and the functions of torch say about shape and dtype."""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable

from tools.kernel_tracing.evaluator import aten
from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.selections import SELECTIONS
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    SIZE,
    UNKNOWN,
    Builtin,
    External,
    Opaque,
    Tensor,
    Unknown,
    Value,
)

# The contents of longer tensors are not kept.
MAX_DATA = 16
# Methods that return a tensor of the same shape.
SAME = {
    "contiguous",
    "clone",
    "detach",
    "cuda",
    "cpu",
    "pin_memory",
    "requires_grad_",
    "fill_",
    "zero_",
    "copy_",
    "data",
}
SAME |= {
    "add_",
    "mul_",
    "clamp",
    "clamp_",
    "abs",
    "neg",
    "sigmoid",
    "softmax",
    "add",
    "mul",
    "div",
    "div_",
    "sub",
    "float",
}
SAME |= {
    "half",
    "bfloat16",
    "int",
    "long",
    "cumsum",
    "to",
    "type",
    "masked_fill",
    "masked_fill_",
    "normal_",
    "uniform_",
    "bool",
    "exp",
    "log",
    "log_softmax",
}
_CASTS = {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int": "int32",
    "long": "int64",
    "bool": "bool",
}
_NUMBERS = {
    "item",
    "tolist",
    "data_ptr",
    "storage_offset",
    "nbytes",
    "untyped_storage",
    "numpy",
    "any",
    "all",
}
# The shape of a tensor whose rank is not known.
UnknownShape = Opaque("torch.Size")
_KEPT = {"contiguous", "clone", "detach", "cuda", "cpu", "pin_memory", "int", "long", "to"}


def attribute(tensor: Tensor, name: str) -> Value:
    """`tensor.name`."""
    if name in tensor.fields:
        return tensor.fields[name]
    if name == "shape":
        return tuple(_or_size(one) for one in tensor.shape) if tensor.shape is not None else UnknownShape
    if name == "dtype":
        return tensor.dtype if tensor.dtype is not None else UNKNOWN
    if name in ("data", "T", "mT"):
        return _transpose(tensor, [], {}) if name != "data" else Tensor(tensor.shape, tensor.dtype)
    if name == "device":
        return External("torch.device()")
    if name in ("is_cuda", "requires_grad", "is_meta", "is_cpu", "is_sparse", "is_npu", "is_xpu", "is_hip"):
        return name == "is_cuda"
    if name == "ndim":
        return len(tensor.shape) if tensor.shape is not None else UNKNOWN
    if name == "grad":
        return None
    if name in METHODS:
        return Builtin(f"Tensor.{name}", lambda core, args, kwargs: METHODS[name](tensor, args, kwargs))
    if name in ("item", "tolist") and tensor.data is not None:
        found = tensor.data[0] if name == "item" else list(tensor.data)
        return Builtin(f"Tensor.{name}", lambda core, args, kwargs: found)
    if name == "stride":
        return Builtin("Tensor.stride", lambda core, args, kwargs: 1 if args and args[0] == -1 else UNKNOWN)
    if name == "is_contiguous":
        known = UNKNOWN if tensor.transposed is None else not tensor.transposed
        return Builtin("Tensor.is_contiguous", lambda core, args, kwargs: known)
    if name == "mean":
        return Builtin("Tensor.mean", lambda core, args, kwargs: _mean(core, tensor, args, kwargs))
    if name in _NUMBERS or name.startswith("is_"):
        return Builtin(f"Tensor.{name}", lambda core, args, kwargs: UNKNOWN)
    return Builtin(f"Tensor.{name}", lambda core, args, kwargs: _method(tensor, name, args, kwargs))


def _mean(core: Core, tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    found = aten.mean(core, tensor, args, kwargs)
    return _method(tensor, "mean", args, kwargs) if found is MISSING else found


def _or_size(size: Value) -> Value:
    return SIZE if isinstance(size, Unknown) else size


def _method(tensor: Tensor, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if name in SAME:
        dtype = next((one for one in (*args, *kwargs.values()) if is_dtype(one)), None)
        if name in _CASTS:
            dtype = External(f"torch.{_CASTS[name]}")
        return Tensor(tensor.shape, dtype or tensor.dtype, tensor.data if name in _KEPT else None)
    if tensor.data and name in ("sum", "max", "min") and not args:
        return Tensor((), tensor.dtype, (getattr(builtins, name)(tensor.data),))
    return Tensor(None, tensor.dtype)


def is_dtype(value: Value) -> bool:
    """Whether a value is a dtype of torch."""
    return (
        isinstance(value, External)
        and value.path.startswith("torch.")
        and value.path[6:]
        .rstrip("0123456789_efmnuzb")
        .startswith(("float", "bfloat", "int", "uint", "bool", "half", "long", "doubl"))
    )


def item_size(dtype: External) -> int:
    """Bytes of one element."""
    digits = re.search(r"\d+", dtype.path)
    return max(1, int(digits[0]) // 8) if digits else 1


def _size(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if tensor.shape is None:
        return SIZE if args else UnknownShape
    if not args:
        return tensor.shape
    return (
        _or_size(tensor.shape[args[0]])
        if isinstance(args[0], int) and -len(tensor.shape) <= args[0] < len(tensor.shape)
        else UNKNOWN
    )


def _dim(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return len(tensor.shape) if tensor.shape is not None else UNKNOWN


def _strided(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    size = args[0] if args else kwargs.get("size")
    return Tensor(tuple(size) if isinstance(size, (list, tuple)) else None, tensor.dtype)


def _element_size(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return item_size(tensor.dtype) if isinstance(tensor.dtype, External) else UNKNOWN


def _numel(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    total = 1
    for size in tensor.shape if tensor.shape is not None else (UNKNOWN,):
        if not isinstance(size, int):
            return SIZE
        total *= size
    return total


def _view(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if len(args) == 1 and is_dtype(args[0]):
        return Tensor(tensor.shape, args[0])
    shape = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)
    total = _numel(tensor, [], {})
    if -1 in [size for size in shape if isinstance(size, int)]:
        rest: Value = 1
        for size in shape:
            if not isinstance(size, int) or isinstance(rest, Unknown):
                rest = UNKNOWN
            elif size != -1:
                rest *= size
        at = [isinstance(size, int) and size == -1 for size in shape].index(True)
        if isinstance(total, int) and isinstance(rest, int) and rest:
            shape[at] = UNKNOWN if total % rest else total // rest
        else:
            shape[at] = tensor.shape[0] if tensor.shape and at == 0 and _keeps_rows(tensor, rest) else UNKNOWN
    return Tensor(tuple(shape), tensor.dtype)


def _keeps_rows(tensor: Tensor, rest: Value) -> bool:
    """Whether `tensor.view(-1, ...)`, where sizes are missing, is taken to keep the first dimension, the tokens.

    Not if the new sizes, whose product is `rest`, leave nothing for the unknown ones among the old.
    """
    if not isinstance(rest, int):
        return True
    sizes = (tensor.shape or ())[1:]
    known = math.prod(size for size in sizes if isinstance(size, int))
    if all(isinstance(size, int) for size in sizes):
        return rest == known
    return known > 0 and rest % known == 0 and rest > known


def _new(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return of_size(args, {"dtype": tensor.dtype} | kwargs)


def of_size(args: list[Value], kwargs: dict[str, Value]) -> Tensor:
    """What `torch.empty` and the like return."""
    given = next((one for one in (*args, *kwargs.values()) if is_dtype(one)), External("torch.bfloat16"))
    size = kwargs.get("size", args[0] if args else None)
    if (size is UNKNOWN and len(args) == 1) or size is UnknownShape:
        return Tensor(None, given)
    listed = list(size) if isinstance(size, (list, tuple)) else [one for one in args if isinstance(one, (int, Unknown))]
    return Tensor(tuple(listed), given)


def _transpose(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if tensor.shape is None or not all(isinstance(one, int) for one in args):
        return Tensor(None, tensor.dtype)
    shape = list(tensor.shape)
    try:
        first, second = args if len(args) == 2 else (0, 1)
        shape[first], shape[second] = shape[second], shape[first]
    except (IndexError, ValueError):
        return Tensor(None, tensor.dtype)
    turned = len(shape) == 2 and tensor.transposed is not None
    return Tensor(tuple(shape), tensor.dtype, transposed=not tensor.transposed if turned else None)


def _unsqueeze(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if tensor.shape is None or not args or not isinstance(args[0], int):
        return Tensor(None, tensor.dtype)
    at = args[0] if args[0] >= 0 else len(tensor.shape) + 1 + args[0]
    return Tensor((*tensor.shape[:at], 1, *tensor.shape[at:]), tensor.dtype)


def _flatten(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    if tensor.shape is None or not args or not isinstance(args[0], int):
        return Tensor(None, tensor.dtype)
    at = args[0] if args[0] >= 0 else len(tensor.shape) + args[0]
    return Tensor((*tensor.shape[:at], _numel(Tensor(tensor.shape[at:]), [], {})), tensor.dtype)


def _split(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    sizes = args[0] if args else None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if isinstance(sizes, (list, tuple)):
        return tuple(_with(tensor, dim, size) for size in sizes)
    return UNKNOWN


def _chunk(tensor: Tensor, args: list[Value], kwargs: dict[str, Value]) -> Value:
    return tuple(Tensor(None, tensor.dtype) for _ in range(args[0])) if args and isinstance(args[0], int) else UNKNOWN


def _with(tensor: Tensor, dim: Value, size: Value) -> Tensor:
    if tensor.shape is None or not isinstance(dim, int) or not -len(tensor.shape) <= dim < len(tensor.shape):
        return Tensor(None, tensor.dtype)
    shape = list(tensor.shape)
    shape[dim] = size
    return Tensor(tuple(shape), tensor.dtype)


METHODS: dict[str, Callable[[Tensor, list[Value], dict[str, Value]], Value]] = {
    "element_size": _element_size,
    "as_strided": _strided,
    "size": _size,
    "dim": _dim,
    "numel": _numel,
    "nelement": _numel,
    "view": _view,
    "reshape": _view,
    "expand": lambda tensor, args, kwargs: Tensor(None, tensor.dtype),
    "new_empty": _new,
    "new_zeros": _new,
    "new_ones": _new,
    "new_full": _new,
    "transpose": _transpose,
    "t": _transpose,
    "unsqueeze": _unsqueeze,
    "flatten": _flatten,
    "split": _split,
    "chunk": _chunk,
    **SELECTIONS,
}


def indexed(tensor: Tensor, key: Value) -> Value:
    """`tensor[key]`."""
    if tensor.shape is None:
        return Tensor(None, tensor.dtype)
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [one for one in keys if not isinstance(one, (Tensor, Unknown))]:
        at = [one is Ellipsis for one in keys].index(True)
        keys[at : at + 1] = [slice(None)] * (len(tensor.shape) - len(keys) + 1)
    shape: list[Value] = []
    rest = list(tensor.shape)
    for one in keys:
        if one is None:
            shape.append(1)
            continue
        if not rest:
            return Tensor(None, tensor.dtype)
        size = rest.pop(0)
        if isinstance(one, slice):
            shape.append(_sliced(size, one))
        elif isinstance(one, Tensor):
            shape += one.shape if one.shape is not None else (UNKNOWN,)
        elif not isinstance(one, int):
            return Tensor(None, tensor.dtype)
    leading = len(keys) == 1 and isinstance(keys[0], (int, slice))
    return Tensor((*shape, *rest), tensor.dtype, transposed=tensor.transposed if leading else None)


def _sliced(size: Value, key: slice) -> Value:
    if key == slice(None):
        return size
    if isinstance(size, int) and all(part is None or isinstance(part, int) for part in (key.start, key.stop, key.step)):
        return len(range(*key.indices(size)))
    if key.start is None and isinstance(key.stop, int) and key.stop >= 0:
        return key.stop
    return UNKNOWN
