"""Calls that leave the sources: into libraries, torch and Python itself."""

from __future__ import annotations

import ast
import re
from collections import deque

from tools.kernel_tracing.evaluator import aten
from tools.kernel_tracing.evaluator import builtin_functions as natives
from tools.kernel_tracing.evaluator.factories import made, product
from tools.kernel_tracing.evaluator.names import Names
from tools.kernel_tracing.evaluator.operators import plain
from tools.kernel_tracing.evaluator.standard_library import standard
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Builtin,
    Choice,
    Class,
    External,
    Function,
    Instance,
    Kernel,
    LibraryClass,
    LibraryFunction,
    LibraryModule,
    LibraryObject,
    Method,
    NativeModule,
    Opaque,
    Partial,
    Raised,
    Tensor,
    TritonKernel,
    Unknown,
    Value,
    is_symbolic,
)
from tools.kernel_tracing.rules import boundaries, environments
from tools.kernel_tracing.rules import custom_operators as custom_ops
from tools.kernel_tracing.source.declarations import FunctionInfo
from tools.kernel_tracing.source.libraries import LIBRARIES

_TRITON = re.compile(r"triton\.(jit|autotune|heuristics)(\(\))*|triton\.runtime\.jit\.\w+")


_CALLERS = frozenset({"threading.Thread", "torch.library.register_fake", "atexit.register", "signal.signal"})


class Libraries(Names):
    """Calls that leave the sources: into libraries, torch and Python itself."""

    def library_attribute(self, owner: LibraryModule | LibraryClass, name: str) -> Value:
        if isinstance(owner, LibraryModule):
            try:
                return self._of_library(owner.name, name)
            except Raised:
                return MISSING
        for info in self.index.mro(owner.info):
            method = boundaries.class_attribute(info, name)
            if method is not None:
                return LibraryFunction(method)
            if boundaries.is_constant(info, name):
                return External(f"{info.module.name}.{info.name}.{name}")
        return UNKNOWN

    def native_function(self, owner: NativeModule, name: str) -> Value:
        loader = owner.loader
        if loader is None:
            return Kernel(name, "jit")
        return Kernel(name, "jit", loader.module.file, loader.node.lineno)

    def call_library(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if isinstance(function, LibraryClass):
            return LibraryObject(function.info)
        if isinstance(function, TritonKernel):
            if function.launched:
                info = function.function
                self.record(info.name, "triton", info.module.file, info.node.lineno)
            return UNKNOWN
        if isinstance(function, Kernel):
            self.record(function.name, function.source, function.file, function.line)
            if function.source in environments.KERNEL_MODULES.values():
                return _made_by(function.name, [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)])
        elif isinstance(function, LibraryFunction):
            name = boundaries.kernel_name(self.index, function.info)
            if name:
                library = LIBRARIES[function.info.module.name.partition(".")[0]]
                self.record(name, library, function.info.module.file, function.info.line)
            return self._result(function.info, args, kwargs)
        return Tensor()

    def _result(self, info: FunctionInfo, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What a library's function returns: for most kernels, a tensor like the first."""
        returns = getattr(info.node, "returns", None)
        text = ast.unparse(returns) if returns is not None else ""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        out = kwargs.get("out", kwargs.get("output"))
        if (parts := _parts(text, kwargs)) is not None:
            return tuple(_made_by(info.qualname, tensors) for _ in range(parts)) if tensors and parts else UNKNOWN
        if isinstance(out, Tensor):
            return [out] if text.startswith(("List", "list")) else out
        if text.startswith(("bool", "int")):
            return UNKNOWN
        if tensors and "norm" in info.qualname:
            return Tensor(tensors[0].shape, tensors[0].dtype)
        if len(tensors) > 1 and {"gemm", "mm"} & set(info.qualname.split("_")):
            return product(tensors[0], tensors[1], [*args, *kwargs.values()])
        if tensors or text.endswith("Tensor"):
            return _made_by(info.qualname, tensors)
        return UNKNOWN

    def call_external(self, path: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if path in self.answers:
            return self.answers[path]
        if _TRITON.fullmatch(path) and args and isinstance(args[0], (Function, TritonKernel)):
            return args[0] if isinstance(args[0], TritonKernel) else TritonKernel(args[0])
        if path.startswith("torch.") and args and isinstance(args[0], (Function, Class, Method, TritonKernel, Partial)):
            return args[0] if path not in _CALLERS else None  # a decorator, or a wrapper such as torch.compile
        if path == "triton.cdiv":
            left, right = args[:2]
            return -(-left // right) if isinstance(left, int) and isinstance(right, int) and right else UNKNOWN
        if path == "triton.next_power_of_2":
            return 1 << (args[0] - 1).bit_length() if isinstance(args[0], int) else UNKNOWN
        if path == "importlib.import_module" and isinstance(args[0], str):
            return self.import_module(args[0])
        if path == "importlib.util.find_spec" and isinstance(args[0], str):
            return None if environments.is_absent(args[0]) else Opaque("spec")
        if (replacement := aten.replaced(self, path, args, kwargs)) is not MISSING:
            return replacement
        found = standard(self, path, args, kwargs)
        if found is not MISSING:
            return found
        if path.endswith(".define") or path.endswith(".impl"):
            if len(args) < 2 or not aten.register(self, args[0], args[1]):
                self._register(args)
            return None
        # A decorator: what it returns does what the function does.
        if args and isinstance(args[0], (Function, Class, Method, TritonKernel, Partial)) and path not in _CALLERS:
            return args[0]
        last = path.rstrip("()").rpartition(".")[2]
        if last[:1].isupper():
            return self._made(path, args, kwargs)
        if path.startswith("torch.ops"):
            return Tensor()
        return (
            UNKNOWN if path.startswith(("os.", "time.")) or last.startswith(("is_", "has_", "get_")) else Opaque(path)
        )

    def _operator_of(self, registration: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Registers a function as a torch operator; calls by either name enter the function."""
        if custom_ops.is_registration(registration):
            self._register(
                [args[0] if args else kwargs.get("op_name"), args[1] if len(args) > 1 else kwargs.get("op_func")]
            )
            return None
        if not args:
            return Builtin(registration, lambda core, given, named: self._operator_of(registration, given, kwargs))
        name = kwargs.get("op_name") or getattr(args[0], "name", None)
        self._register([name, args[0]])
        return args[0]

    def _register(self, args: list[Value]) -> None:
        if len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], Function):
            self.operators[args[0].rpartition("::")[2]] = args[1]

    def _made(self, path: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if path.endswith(("ModuleList", "Sequential")):
            return list(self.iterate(args[0]) or []) if args and path.endswith("List") else Opaque(path)
        if path.endswith("ModuleDict"):
            return dict(args[0]) if args and isinstance(args[0], dict) else {}
        if path.endswith("Tensor"):
            return made("torch.empty", args, kwargs)
        return Opaque(path)

    def call_native(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        maker = natives.CONSTRUCTORS.get(function) if isinstance(function, type) else None
        if maker is not None:
            return maker(self, args, kwargs)
        owner = getattr(function, "__self__", None)
        stores = isinstance(owner, (list, dict, set, deque)) or (
            isinstance(function, type) and issubclass(function, BaseException)
        )
        if isinstance(owner, dict) and args and isinstance(args[0], (Unknown, Choice, Tensor)):
            return self.item(owner, args[0]) if function.__name__ == "get" else UNKNOWN
        if not stores:
            args, kwargs = [plain(one) for one in args], {key: plain(one) for key, one in kwargs.items()}
            if any(isinstance(one, (Unknown, Tensor, Choice, Opaque, External)) for one in (*args, *kwargs.values())):
                return UNKNOWN
        if function in _BARE and isinstance(args[0], Instance):
            return _bare(args[0], *args[1:])
        wrapped = [self._native_function(one) for one in args]
        try:
            result = function(*wrapped, **{key: self._native_function(one) for key, one in kwargs.items()})
        except Raised:
            raise
        except (KeyError, IndexError, ValueError, AttributeError, TypeError, StopIteration, ArithmeticError) as error:
            given = [part for one in args for part in (one if isinstance(one, (list, tuple, dict, set)) else (one,))]
            if self.frame.handlers and not any(map(is_symbolic, given)):
                raise Raised(error) from None
            return UNKNOWN
        return self.resolve(result)

    def _native_function(self, value: Value) -> Value:
        if isinstance(value, (Function, Method, Builtin, Partial, Class)):
            return lambda *args, **kwargs: self.call(value, list(args), kwargs)
        return value


# How an object sets and reads its own attributes past the hooks of its class.
_BARE = (object.__setattr__, object.__getattribute__)


def _bare(owner: Instance, name: str, *value: Value) -> Value:
    if value:
        owner.fields[name] = value[0]
        return None
    return owner.fields.get(name, UNKNOWN)


_RETURNS_MORE = ("return_lse", "return_softmax_lse")


def _parts(text: str, kwargs: dict[str, Value]) -> int | None:
    """How many tensors a function returns as a tuple, by annotation and arguments; 0 if unknown, None for no tuple."""
    match = re.search(r"\b[Tt]uple\[(.*?)\]", text)
    if match is None:
        return 0 if "uple" in text else None
    alternatives = "Union" in text or "|" in text
    if alternatives and not any(kwargs.get(name) is True for name in _RETURNS_MORE):
        return None
    return match[1].count("Tensor")


# Attention whose result is bfloat16, whatever the dtype of the queries: flashinfer/mla/_core.py:755 allocates it, and
# FlashMLA does so for an fp8 cache.
_BFLOAT16 = {"trtllm_batch_decode_with_kv_cache_mla", "flash_mla_with_kvcache"}
# FlashAttention 3 computes fp8 queries in bfloat16 and keeps any other dtype: hopper/flash_api.cpp, `mha_fwd`:
# `auto out_type = q_type == at::ScalarType::Float8_e4m3fn ? at::ScalarType::BFloat16 : q_type`.
_BFLOAT16_FOR_FP8 = {"flash_attn_varlen_func", "flash_attn_with_kvcache"}


def _made_by(name: str, tensors: list[Tensor]) -> Tensor:
    """What a kernel makes of its arguments; a quantiser makes another dtype, with two fp4 numbers in a byte."""
    found = _like(tensors)
    if "sampling_from" in name:  # one token for each row: flashinfer/sampling.py
        return Tensor(found.shape[:1] if found.shape else None, External("torch.int32"))
    fp8 = isinstance(found.dtype, External) and found.dtype.path.startswith("torch.float8")
    if name in _BFLOAT16 or (fp8 and name in _BFLOAT16_FOR_FP8):
        found.dtype = External("torch.bfloat16")
    elif "quant" in name:
        found.dtype = External("torch.uint8") if "fp4" in name else None
    return found


def _like(tensors: list[Tensor]) -> Tensor:
    """A result with as many rows as the first argument, and otherwise unknown sizes."""
    first = tensors[0].shape if tensors else None
    dtype = tensors[0].dtype if tensors else None
    return Tensor((first[0], *([UNKNOWN] * (len(first) - 1))) if first else None, dtype)
