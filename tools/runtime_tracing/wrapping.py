"""Replaces the entry points of the kernel libraries, wherever a module holds them, by functions that log each call."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tools.runtime_tracing.arguments import arguments_text, parameter_names
from tools.runtime_tracing.call_log import CallLog

Function = Callable[..., Any]
#: Library -> its modules that its package does not import by itself.
LIBRARIES = {
    "sgl_kernel": ("flash_attn", "flash_mla", "sparse_flash_attn", "spatial", "kvcacheio"),
    "flashinfer": (
        *("activation", "cascade", "comm", "concat_ops", "decode", "fp8_quantization", "fused_moe", "gemm", "mla"),
        *("norm", "page", "prefill", "quantization", "rope", "sampling", "sparse", "topk"),
    ),
    "deep_gemm": ("utils",),
}
#: Parts of dotted paths whose functions compile, log or look up, and launch nothing.
HELPERS = {"utils", "jit", "load_utils", "debug_utils", "api_logging", "trace", "artifacts", "autotuner", "aot"}
#: The methods of the libraries' classes that launch kernels.
METHODS = ("run", "forward", "plan", "begin_forward", "forward_return_lse", "run_return_lse", "__call__")
#: Namespaces of torch.ops that are PyTorch itself.
PYTORCH = {
    *("_native", "aten", "prim", "prims", "profiler", "_quantized", "inductor", "c10d", "c10d_functional"),
    "higher_order",
}


@dataclass
class Wrapping:
    """The wrappers of one process.

    Attributes:
        log: where calls are recorded.
        problems: what could not be wrapped, and why.
    """

    log: CallLog
    problems: list[str] = field(default_factory=list)
    _replaced: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def logged(self, function: Function, library: str, kernel: str, names: tuple[str, ...] | None = None) -> Function:
        """The function, with a log entry for each call; `names` are those of its parameters, if they are not known."""
        labels = parameter_names(function) if names is None else names

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _compiling():
                return function(*args, **kwargs)
            with self.log.call(library, kernel, lambda: arguments_text(labels, args, kwargs)):
                return function(*args, **kwargs)

        return call

    def packages(self, libraries: Iterable[str] = tuple(LIBRARIES)) -> None:
        """Imports the libraries, and wraps their functions and the methods that launch kernels."""
        for library in libraries:
            for name in (library, *(f"{library}.{part}" for part in LIBRARIES.get(library, ()))):
                try:
                    importlib.import_module(name)
                except Exception as error:  # whatever a library's import raises where a part of it is missing
                    self.problems.append(f"{name}: {type(error).__name__}: {error}")
            for module in _modules(library):
                self._wrap_module(module, library)

    def rewire(self, package: str = "sglang") -> int:
        """Points names that were imported before the wrapping at the wrappers, and returns their number."""
        count = 0
        for module in _modules(package):
            for name, value in list(vars(module).items()):
                original, wrapper = self._replaced.get(id(value), (None, None))
                if original is value and original is not None:
                    setattr(module, name, wrapper)
                    count += 1
        return count

    def _wrap_module(self, module: types.ModuleType, library: str) -> None:
        for name, value in list(vars(module).items()):
            home = getattr(value, "__module__", None) or ""
            if name.startswith("_") or not f"{home}.".startswith(f"{library}."):
                continue
            if not HELPERS.isdisjoint(home.split(".")):
                continue
            if isinstance(value, types.FunctionType):
                if id(value) not in self._replaced:
                    wrapper = self.logged(value, library, f"{home}.{name}")
                    self._replaced[id(value)] = (value, wrapper)
                setattr(module, name, self._replaced[id(value)][1])
            elif isinstance(value, type) and id(value) not in self._replaced:
                self._replaced[id(value)] = (value, value)
                self._wrap_methods(value, library, f"{home}.{value.__name__}")

    def _wrap_methods(self, owner: type, library: str, path: str) -> None:
        for name in METHODS:
            function = owner.__dict__.get(name)
            if isinstance(function, types.FunctionType):
                setattr(owner, name, self.logged(function, library, f"{path}.{name}"))

    def triton(self, jit_function: Any) -> None:
        """Wraps ``triton.runtime.jit.JITFunction``: every launch of a Triton kernel."""
        run = jit_function.run

        def logged_run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("warmup") or _compiling():
                return run(kernel, *args, **kwargs)
            # A specialized kernel of triton_kernels has a name of its own, but the qualified name of its template.
            path = f"{getattr(kernel.fn, '__module__', '?')}.{getattr(kernel.fn, '__name__', kernel.fn)}"
            names = tuple(kernel.arg_names)
            given = {name: value for name, value in kwargs.items() if name in names}
            with self.log.call("triton", path, lambda: arguments_text(names, args, given, numbers=False)):
                return run(kernel, *args, **kwargs)

        jit_function.run = logged_run

    def operators(self, classes: Iterable[Any]) -> None:
        """Wraps ``OpOverloadPacket`` and ``OpOverload``, and with them every ``torch.ops.<namespace>.<op>(...)``."""
        for one in classes:
            one.__call__ = self._operator_call(one.__call__)

    def _operator_call(self, real: Function) -> Function:
        def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
            path = str(getattr(operator, "_qualified_op_name", "") or operator._name)
            namespace, _, name = path.partition("::")
            if namespace in PYTORCH or _compiling():
                return real(operator, *args, **kwargs)
            names = functools.partial(_operator_names, operator)
            with self.log.call("torch.ops", f"{namespace}.{name}", lambda: arguments_text(names(), args, kwargs)):
                return real(operator, *args, **kwargs)

        return call

    def compiled_module(self, module: Any, name: str) -> LoggedModule:
        """A module that SGLang compiled at run time, with its functions logged."""
        return LoggedModule(self, module, name)


class LoggedModule:
    """A compiled module whose functions are logged. Other attributes pass through."""

    def __init__(self, wrapping: Wrapping, module: Any, name: str) -> None:
        self._wrapping, self._module, self._name = wrapping, module, name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._module, attribute)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._wrapping.log.call("jit", f"{self._name}.{attribute}", lambda: arguments_text((), args, kwargs)):
                return value(*args, **kwargs)

        self.__dict__[attribute] = call
        return call


def torch_functions(log: CallLog) -> Any:
    """A ``TorchFunctionMode`` that logs PyTorch's own functions (``mm``, ``linear``, ``copy_``, ...)."""
    import torch
    from torch.overrides import TorchFunctionMode, resolve_name

    @functools.cache
    def name_of(function: Any) -> str:
        own = getattr(function, "__name__", str(function))
        path = resolve_name(function) or own
        if path.endswith(".__get__"):
            return ""
        return f"{path.rpartition('.')[0]}.{own}" if "." in path else own

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            is_operator = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
            name = "" if is_operator or log.phase is None else name_of(func)
            if not name:
                return func(*args, **kwargs)
            with log.call("torch", name, lambda: arguments_text((), args, kwargs)):
                return func(*args, **kwargs)

    return Mode()


def _operator_names(operator: Any) -> tuple[str, ...]:
    """The names of an operator's parameters; of a packet, those of its first overload."""
    overload = operator if hasattr(operator, "_schema") else getattr(operator, operator.overloads()[0])
    return tuple(argument.name for argument in overload._schema.arguments)


def _modules(package: str) -> list[types.ModuleType]:
    found = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]
    return [module for module in found if hasattr(module, "__dict__")]


def _compiling() -> bool:
    """Whether torch.compile is tracing, which must not see the log."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())
