"""Tensors that are CUDA tensors by name: inside, a CPU tensor while values are known, and one without data otherwise.

Known are small tensors, above all of integers: lengths, indices, page tables. Weights, activations and caches hold no
data. Elements that nothing or a kernel wrote are marked in known tensors: reading it is an error (`findings`), as is
reading a tensor without data. Nothing here knows SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.overrides
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tools.dry_run import findings

#: Elements up to which a new tensor holds values.
KNOWN_INTEGERS, KNOWN_FLOATS = 1 << 24, 1 << 16
CUDA = torch.device("cuda", 0)
#: Marks of unknown integers of a type, and the magnitude from which a value is taken to come of such a mark.
MARKS = {torch.int16: 0x5A5A, torch.int32: 0x5A5A5A5A, torch.int64: 0x5A5A5A5A5A5A}
_FROM = {torch.int16: 0x5000, torch.int32: 1 << 30, torch.int64: 1 << 40}
#: Operators that make tensors; those that are made like another one; those whose values nobody wrote.
_LIKE = {
    *("new_empty", "new_zeros", "new_full", "new_ones", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like", "new_empty_strided", "randint_like"),
}
_FACTORIES = _LIKE | {
    *("empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "empty_strided", "linspace", "eye"),
    *("scalar_tensor", "randperm", "tril_indices", "triu_indices", "logspace", "empty_permuted"),
}
_UNWRITTEN = ("empty", "new_empty")
#: Operators whose output's size depends on values.
_BY_VALUE = {
    *("nonzero", "argwhere", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "_unique", "bincount"),
    *("repeat_interleave", "histc", "equal", "allclose"),
}
#: Operators that launch nothing: views are known by their schemas.
_HOST = {"record_stream", "set_", "resize_", "lift_fresh", "is_same_size", "detach_", "_local_scalar_dense"}
#: Operators that move values, and marks with them; others may make of a mark what looks like a value.
_MOVING = (
    *("clone", "copy_", "index", "select", "slice", "cat", "stack", "gather", "where", "expand", "repeat", "view"),
    *(
        "as_",
        "permute",
        "transpose",
        "unsqueeze",
        "squeeze",
        "reshape",
        "flip",
        "roll",
        "fill_",
        "zero_",
        "masked_fill",
    ),
    *(
        "scatter",
        "unbind",
        "split",
        "alias",
        "detach",
        "diagonal",
        "unfold",
        "constant_pad",
        "_reshape",
        "_unsafe_view",
    ),
)
Operator = Callable[..., Any]
_GENERATOR = torch.Generator
#: Name of an operator -> the Python function that implements it on CUDA.
python_kernels: dict[str, Operator] = {}
#: Is called with the name of each PyTorch operator that would launch something on a GPU.
launched: Callable[[str], None] = lambda name: None  # noqa: E731
#: Computes the outputs of an operator that is not PyTorch's.
other_operator: Callable[[Any, Any, dict[str, Any]], Any] = lambda func, args, kwargs: NotImplemented  # noqa: E731
_inside: list[Any] = []


class DryTensor(torch.Tensor):
    """A tensor on a GPU that is not there."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    inner: torch.Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, requires_grad: bool = False) -> Any:
        made = _wrapped(cls, inner)
        made.inner = inner
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`__new__` did everything."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        """An address that is the same for views of one tensor, and on a page of its own."""
        if self.inner.device.type == "cpu":
            return self.inner.data_ptr()
        offset = self.inner.storage_offset() * self.inner.element_size()
        return int(0x700000000000 + (self.inner.untyped_storage()._cdata & 0xFFFFFFFF) * 256 + offset)

    def __deepcopy__(self, memo: Any) -> DryTensor:
        return DryTensor(self.inner.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (tuple(self.shape), tuple(self.stride()), self.dtype)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Dry({str(self.dtype)[6:]}{list(self.shape)})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @property
    def data(self) -> Any:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        other = other if isinstance(other, DryTensor) else DryTensor(other)
        torch._C.TensorBase.data.__set__(self, other)  # type: ignore[attr-defined]
        self.inner = other.inner

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Its values."""
        return self.to("cpu")

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Itself."""
        return self

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Its values."""
        return values(self).numpy()

    def tolist(self) -> Any:
        """Its values."""
        return values(self).tolist()

    def record_stream(self, stream: Any) -> None:
        """No allocator reuses its memory."""

    def is_shared(self) -> bool:
        """No process shares it."""
        return False

    def share_memory_(self) -> Any:
        """Itself."""
        return self


def _wrapped(cls: Any, inner: torch.Tensor) -> Any:
    return torch.Tensor._make_wrapper_subclass(
        cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=CUDA
    )


def _unpickled(shape: Any, stride: Any, dtype: Any) -> DryTensor:
    return DryTensor(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))


def is_known(tensor: Any) -> bool:
    """Whether it holds values, some of which may be marked."""
    return bool(tensor.inner.device.type == "cpu")


def values(tensor: DryTensor) -> torch.Tensor:
    """The values on the CPU.

    Raises:
        DryRunError: it has no data, or some of the values are not known.
    """
    if not is_known(tensor) or _marked(tensor.inner):
        raise findings.fail(findings.UNKNOWN_VALUE, repr(tensor))
    return tensor.inner.clone()


def _marked(inner: torch.Tensor) -> bool:
    if inner.dtype in MARKS:
        return bool((inner >= _FROM[inner.dtype]).any())
    return inner.dtype.is_floating_point and inner.dtype.itemsize > 1 and bool(inner.isnan().any())


def forget(tensor: Any) -> None:
    """Marks all values of a tensor as unknown, also for those that share its memory."""
    if not isinstance(tensor, DryTensor) or not is_known(tensor):
        return
    if tensor.dtype in MARKS:
        tensor.inner.fill_(MARKS[tensor.dtype])
    elif tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        tensor.inner.fill_(float("nan"))
    else:
        tensor.inner = without_data(tensor.inner)


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and type on the device `meta`."""
    if tensor.device.type == "meta":
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DryTensor) else value


def _meta(value: Any) -> Any:
    return without_data(_inner(value)) if isinstance(value, torch.Tensor) else value


def wrap(value: Any) -> Any:
    """A plain tensor as one on the GPU."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DryTensor)
    return DryTensor(value) if plain else value


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator on tensors, some of them possibly on the GPU."""
    schema = func._schema.name
    namespace, _, base = schema.partition("::")
    if namespace not in ("aten", "prim", "prims"):
        return other_operator(func, args, kwargs)
    if (
        schema in python_kernels and not _inside
    ):  # an operator of PyTorch that SGLang replaces (deterministic inference)
        _inside.append(func)
        try:
            with Mode():
                return python_kernels[schema](*args, **kwargs)
        finally:
            _inside.pop()
    special = base in _FACTORIES or base in ("item", "is_pinned", "pin_memory")
    if not special and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with Mode():  # in inference mode, composite operators arrive whole
            got = func.decompose(*args, **kwargs)
        if got is not NotImplemented:
            return got
    out = _aten(func, base, args, kwargs)
    if _launches(func, base, args, kwargs, out):
        launched(base)
    return out


def _launches(func: Any, base: str, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an operator would start a kernel or a copy on the GPU."""
    flat = tree_flatten((args, kwargs, out))[0]
    dry = [one for one in flat if isinstance(one, DryTensor)]
    if not dry or (base in _HOST and base != "_local_scalar_dense"):
        return False
    results = [one for one in tree_flatten(out)[0] if isinstance(one, torch.Tensor)]
    if (results and all(one.numel() == 0 for one in results)) or base.startswith((*_UNWRITTEN, "is_")):
        return False
    aliases = [one.alias_info for one in func._schema.returns]
    views = bool(aliases) and all(one is not None and not one.is_write for one in aliases)
    if base == "copy_" and len(dry) > 1 and dry[0].data_ptr() == dry[1].data_ptr():
        return False  # a part that was changed in place, and is assigned to itself
    same = bool(results) and any(one is results[0] for one in tree_flatten(args)[0])
    if same and base in ("_to_copy", "to", "_pin_memory"):
        return False
    return not views


def _aten(func: Any, base: str, args: Any, kwargs: dict[str, Any]) -> Any:
    asked = kwargs.get("device")
    asked = None if asked is None else torch.device(asked).type
    flat, _ = tree_flatten((args, kwargs))
    dry = [one for one in flat if isinstance(one, DryTensor)]
    if base in _FACTORIES:
        return _made(func, base, args, kwargs, asked)
    if base in ("_local_scalar_dense", "item"):
        if dry and not is_known(args[0]) and findings.is_assumed():
            return True
        return values(args[0]).item() if dry else func(*args, **kwargs)
    if base in ("_pin_memory", "pin_memory"):
        return args[0]
    if base in ("is_pinned", "record_stream"):
        return False if base == "is_pinned" else None
    if base in ("_to_copy", "to"):
        return _moved(func, args, kwargs, asked)
    if not dry and asked != "cuda":
        return func(*args, **kwargs)
    if base == "copy_" and not isinstance(args[0], DryTensor):
        args[0].copy_(values(args[1]))
        return args[0]
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if not isinstance(kwargs.get("generator"), _GENERATOR):
        kwargs.pop("generator", None)
    return _computed(func, base, args, kwargs, dry)


def _made(func: Any, base: str, args: Any, kwargs: dict[str, Any], asked: str | None) -> Any:
    """A new tensor: with values if it is small, marked ones if nobody wrote them."""
    on_gpu = asked == "cuda" or (asked is None and base in _LIKE and isinstance(args[0], DryTensor))
    plain = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if not on_gpu:
        if isinstance(args[0] if args else None, DryTensor):
            args, plain = tree_map(lambda one: _meta(one) if isinstance(one, DryTensor) else one, (args, plain))
        return func(*args, **plain)
    plain = {name: value for name, value in plain.items() if name != "generator"}
    args, plain = tree_map(_meta, (args, plain))
    shape = func(*args, **{**plain, "device": "meta"})
    integer = not (shape.dtype.is_floating_point or shape.dtype.is_complex)
    if shape.numel() > (KNOWN_INTEGERS if integer else KNOWN_FLOATS) or (shape.dtype.itemsize == 1 and not integer):
        return DryTensor(shape)
    if base.startswith(_UNWRITTEN):
        if integer and shape.dtype not in MARKS:
            return DryTensor(shape)
        made = DryTensor(torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype))
        forget(made)
        return made
    if base in _LIKE:
        args = (torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype), *args[1:])
    return DryTensor(func(*args, **{**plain, "device": "cpu"}))


def _moved(func: Any, args: Any, kwargs: dict[str, Any], asked: str | None) -> Any:
    """A tensor of another type or on another device."""
    source = args[0]
    plain = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "non_blocking")}
    target = asked or source.device.type
    if isinstance(source, DryTensor):
        if target == "cuda":
            marked = is_known(source) and _marked(source.inner)
            made = DryTensor(func(source.inner, **plain))
            if marked:
                forget(made)
            return made
        return func(without_data(source.inner) if target == "meta" else values(source), **plain)
    if target != "cuda":
        return func(*args, **kwargs)
    out = func(source, **plain)
    large = out.is_floating_point() and out.numel() > KNOWN_FLOATS
    return DryTensor(without_data(out) if large else out)


def _computed(func: Any, base: str, args: Any, kwargs: dict[str, Any], dry: Sequence[DryTensor]) -> Any:
    written = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if all(is_known(one) for one in dry):
        moves = base == "t" or base.startswith(_MOVING)
        marked = not moves and any(_marked(one.inner) for one in dry)
        try:
            out = _finished(func(*tree_map(_inner, args), **tree_map(_inner, kwargs)), written)
            if marked:
                for one in tree_flatten(out)[0]:
                    forget(one)
            return out
        except (IndexError, RuntimeError):
            # Values that nobody computed may be out of range, and a CPU lacks some kernels (of fp8, for example): only
            # the shape is computed then. Any other error is the model's own.
            if not any(_marked(one.inner) for one in dry) and not _has_no_cpu_kernel(dry):
                raise
    known = [one for one in written if isinstance(one, DryTensor) and is_known(one)]
    if known and not base.endswith("resize_"):
        for one in known:
            forget(one)
        return written[0] if len(written) == 1 else tuple(written)
    if base in _BY_VALUE and not (base == "repeat_interleave" and kwargs.get("output_size") is not None):
        raise findings.fail(findings.UNKNOWN_VALUE, f"aten::{base} of {', '.join(map(repr, dry))}")
    if base in ("index_put", "index_put_", "_index_put_impl_") and args[2].numel() == 1 and _is_unknown_mask(args[1]):
        return written[0] if written else DryTensor(without_data(args[0].inner))  # the mask does not decide the shape
    if base in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        args = (args[0], [one for index in args[1] for one in _indices(index)], *args[2:])
    kwargs.pop("generator", None)
    return _finished(func(*tree_map(_meta, args), **tree_map(_meta, kwargs)), written)


def _has_no_cpu_kernel(dry: Sequence[DryTensor]) -> bool:
    """Whether PyTorch computes these types on GPUs only."""
    return any(one.dtype.is_floating_point and one.dtype.itemsize == 1 for one in dry)


def _is_unknown_mask(indices: Sequence[Any]) -> bool:
    return any(isinstance(one, DryTensor) and one.dtype == torch.bool and not is_known(one) for one in indices)


def _indices(index: Any) -> Sequence[Any]:
    """A mask as the indices that it stands for, because their number decides the shape."""
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    mask = values(index) if isinstance(index, DryTensor) else index
    return mask.nonzero().unbind(1)


def _finished(out: Any, written: Sequence[Any]) -> Any:
    """The result of an operator on the inner tensors, as that of the outer ones."""
    if not written:
        return tree_map(wrap, out)
    for one in written:
        if isinstance(one, DryTensor) and (one.inner.size() != one.size() or one.inner.stride() != one.stride()):
            torch._C.TensorBase.data.__set__(one, DryTensor(one.inner))  # type: ignore[attr-defined]
    if isinstance(out, torch.Tensor) and len(written) == 1 and isinstance(written[0], torch.Tensor):
        return written[0]
    if isinstance(out, (tuple, list)) and len(out) == len(written):
        return type(out)(written)
    return None if out is None else tree_map(wrap, out)


class Mode(TorchDispatchMode):
    """Sends every operator through `dispatch`, also those that take no tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class _Accelerator(torch.overrides.TorchFunctionMode):
    """``device=0`` means the accelerator, and memory is pinned for it: a PyTorch without CUDA has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


_derived: dict[type, Any] = {}


def _derive(cls: Any) -> Any:
    """The class of parameters that are `DryTensor` and `cls` at once."""
    if cls not in _derived:
        own = cls.__init__ not in (torch.Tensor.__init__, object.__init__) and cls is not torch.nn.Parameter
        _derived[cls] = type(cls)(cls.__name__, (DryTensor, cls), {"__init__": cls.__init__} if own else {})
    return _derived[cls]


def _install_parameters() -> None:
    real = torch.nn.Parameter.__new__
    base: Any = torch._C.TensorBase.data

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if not isinstance(data, DryTensor):
            return real(cls, data, requires_grad)
        made = _wrapped(_derive(cls), data.inner)
        made.inner, made._is_param = data.inner, True
        return made

    def set_data(self: Any, other: Any) -> None:
        if isinstance(other, DryTensor) and not isinstance(self, DryTensor):
            self.__class__ = DryTensor if type(self) is torch.Tensor else _derive(type(self))
        base.__set__(self, other)
        if isinstance(other, DryTensor):
            self.inner = other.inner

    torch.nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.Tensor.data = property(lambda self: base.__get__(self), set_data)  # type: ignore[assignment]


def _install_python_kernels() -> None:
    """Remembers the Python functions that implement operators on CUDA, which PyTorch would not call for `DryTensor`."""
    from torch._library import custom_ops

    real_impl: Any = torch.library.Library.impl
    real_init: Any = custom_ops.CustomOpDef.__init__

    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **kwargs: Any) -> Any:
        key = dispatch_key or getattr(self, "dispatch_key", "")
        if key in ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "") and callable(fn):
            name = op_name if isinstance(op_name, str) else op_name._schema.name
            name = (name if "::" in name else f"{self.ns}::{name}").partition(".")[0]
            if not name.startswith("aten::") or key == "CUDA":
                python_kernels[name] = fn
        return real_impl(self, op_name, fn, dispatch_key, *args, **kwargs)

    def init(self: Any, namespace: str, name: str, schema: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
        python_kernels[f"{namespace}::{name}"] = fn
        real_init(self, namespace, name, schema, fn, *args, **kwargs)

    torch.library.Library.impl = impl  # type: ignore[method-assign]
    custom_ops.CustomOpDef.__init__ = init  # type: ignore[method-assign]


def install() -> None:
    """From now on, what is made on ``cuda`` is a `DryTensor`."""
    _install_parameters()
    _install_python_kernels()
    module: Any = torch
    real = module.from_dlpack

    def from_dlpack(one: Any, *args: Any, **kwargs: Any) -> Any:
        return one if isinstance(one, DryTensor) else real(one, *args, **kwargs)

    module.from_dlpack = module.utils.dlpack.from_dlpack = from_dlpack
    torch._C._set_only_lift_cpu_tensors(True)
    _Accelerator().__enter__()
    Mode().__enter__()
