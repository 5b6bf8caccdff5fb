"""Every way into a compiled kernel, replaced by a function that computes nothing and returns tensors without data.

Which calls are logged is not decided here: `tools.runtime_tracing.wrapping` wraps the same entry points on a GPU.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tools.dry_run import device, findings, outputs, tensors
from tools.runtime_tracing import sglang_runner

_libraries: list[Any] = []
#: FlashInfer's functions that fetch kernels which only a compiled module reads, and what they return.
_DOWNLOADED = {
    **{"get_artifact": b"-", "get_cubin": b"-", "get_meta_hash": "-"},
    **dict.fromkeys(("setup_cubin_loader", "ensure_symlink", "verify_symlinked_headers", "write_filtered_metainfo")),
}
_KERNEL_PACKAGES = ("/sgl_kernel/", "/deep_gemm/", "/flash_mla/", "/flashinfer/", "/deep_ep/", "/sglang/")


def define(namespace: str, schemas: Iterable[str]) -> None:
    """Declares operators in ``torch.ops``; those that Python declared first stay."""
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    for text in schemas:
        schema = text.strip().replace("Tensor ?", "Tensor?").rpartition("::")[2]
        with contextlib.suppress(RuntimeError):  # declared before, or text that only looks like a schema
            library.define(schema)


def of_operator(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operator that is not PyTorch's: see `tensors.other_operator`."""
    schema = func._schema
    namespace = schema.name.partition("::")[0]
    if namespace in ("profiler", "inductor", "debugprims"):
        return func(*args, **kwargs)
    if namespace in ("c10d", "_c10d_functional", "c10d_functional", "symm_mem"):
        return outputs.communicated(func, args, kwargs)
    with tensors.Mode():
        own = tensors.python_kernels.get(schema.name)
        return own(*args, **kwargs) if own is not None else _compiled(func, args, kwargs)


def _compiled(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    schema = func._schema
    given = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    given |= dict(zip([one.name for one in schema.arguments], args, strict=False)) | kwargs
    out = _returned(func, given, args, kwargs)
    written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    for name in written if written or schema.returns else list(given):
        tensors.forget(given.get(name))
    return out


def _returned(func: Any, given: Mapping[str, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    schema = func._schema
    if not schema.returns:
        return None
    known = outputs.OPERATORS.get(schema.name)
    if known is not None:
        return known(given)
    entry = torch._library.simple_registry.singleton.find(schema.name).fake_impl.kernel
    if entry is not None:
        return entry(*args, **kwargs)
    writes = {
        mark: one.name for one in schema.arguments if one.alias_info is not None for mark in one.alias_info.before_set
    }
    names = [
        writes.get(next(iter(one.alias_info.before_set), "")) if one.alias_info else None for one in schema.returns
    ]
    if None in names:
        raise findings.fail(findings.UNKNOWN_OUTPUT, str(schema))
    out = tuple(given[str(name)] for name in names)
    return out[0] if len(out) == 1 else out


class CompiledModule(types.ModuleType):
    """A compiled module: any attribute is a function of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = CompiledFunction(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class CompiledFunction:
    """A function of a compiled module. It writes into tensors that it is given; what it returns, `outputs` knows."""

    def __init__(self, path: str) -> None:
        self.__name__ = self.__qualname__ = path
        self.__module__ = path.rpartition(".")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__name__.endswith(".init") and "fused_moe" in self.__name__:  # an object whose methods are kernels
            return CompiledFunction(self.__name__.removesuffix(".init"))
        return outputs.of_function(self.__name__, args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return CompiledFunction(f"{self.__name__}.{name}")


class _MissingLibraries(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The compiled modules of packages whose sources alone are installed."""

    MODULES = ("flash_ops", "flashmla_ops", "spatial_ops", "infllm_ops", "common_ops")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        known = (package == "sgl_kernel" and name in self.MODULES) or fullname == "deep_gemm.deep_gemm_cpp"
        return importlib.machinery.ModuleSpec(fullname, self) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return CompiledModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def install_extensions() -> None:
    """Compiled modules, and libraries with operators, that cannot be loaded without CUDA."""
    loader: Any = importlib.machinery.ExtensionFileLoader
    real_create, real_exec = loader.create_module, loader.exec_module
    real_load: Any = torch.ops.load_library

    def create(self: Any, spec: Any) -> Any:
        try:
            return real_create(self, spec)
        except ImportError:
            if not any(part in self.path for part in _KERNEL_PACKAGES):
                raise
            return CompiledModule(spec.name)

    def execute(self: Any, module: Any) -> None:
        if not isinstance(module, CompiledModule):
            real_exec(self, module)

    def load_library(path: Any) -> None:
        with contextlib.suppress(OSError):  # its operators are declared from their schemas
            real_load(path)

    loader.create_module, loader.exec_module = create, execute
    torch.ops.load_library = load_library  # type: ignore[method-assign]
    sys.meta_path.append(_MissingLibraries())


class _Launched:
    """The result of a Triton launch."""

    n_regs, n_spills = 32, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def install_triton(gpu: device.Gpu) -> None:
    """Triton's kernels: none is compiled, and of an autotuner's configurations the first is taken."""
    from triton.runtime import autotuner, driver, jit

    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        for name in _stored(kernel):
            tensors.forget(given.get(name))
        outputs.written(kernel.fn.__name__, given)
        return _Launched()

    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.configs[0].all_kwargs() if self.configs else {}
        return self.fn.run(*args, **{**config, **kwargs})

    jit.JITFunction.run = run
    autotuner.Autotuner.run = tuned
    active = getattr(driver, "driver", driver)
    active.set_active(_triton_driver(gpu))


def _triton_driver(gpu: device.Gpu) -> Any:
    import triton

    limits = {
        **{"multiprocessor_count": gpu.multiprocessors, "max_shared_mem": device.SHARED, "max_num_regs": 65536},
        **{"warpSize": 32, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1},
    }
    target = triton.backends.compiler.GPUTarget("cuda", gpu.capability[0] * 10 + gpu.capability[1], 32)
    return types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda index=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        get_benchmarker=lambda: lambda function, **kwargs: [1.0, 1.0, 1.0],
        utils=types.SimpleNamespace(get_device_properties=lambda index=0: limits),
    )


@functools.cache
def _stored(kernel: Any) -> frozenset[str]:
    """The parameters of a Triton kernel through which it writes: those that the addresses of stores derive from.

    A kernel whose source cannot be read, or that passes a parameter on to another function, may write through any of
    those.
    """
    names = frozenset(kernel.arg_names)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    except (OSError, TypeError, SyntaxError):
        return names
    origins: dict[str, set[str]] = {name: {name} for name in names}
    assigned = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))]
    for _ in range(3):  # a value may derive from one that is assigned below, in a loop
        for node in assigned:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name) and node.value is not None:
                        origins.setdefault(one.id, set()).update(_addressed(node.value, origins))
    found: set[str] = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name == "store" or name.startswith("atomic_"):
                found |= _addressed(call.args[0] if call.args else call, origins)
    return frozenset(found & names)


def _addressed(node: ast.AST, origins: Mapping[str, set[str]]) -> set[str]:
    """The parameters that an address derives from; a loaded value is none of its address."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in ("make_block_ptr", "advance", "make_tensor_descriptor", "to", "multiple_of", "cast"):
            return set()
    if isinstance(node, ast.Name):
        return origins.get(node.id, set())
    return set().union(*(_addressed(child, origins) for child in ast.iter_child_nodes(node)))


def install_modules(found: Callable[[Any, str], Any]) -> None:
    """Modules that SGLang and FlashInfer compile at first use.

    Args:
        found: is given each module of SGLang and its name, and returns what SGLang uses.
    """
    for module in sglang_runner.jit_modules():
        module.load_jit = functools.partial(_load_jit, found)
        if hasattr(module, "lazy_register_class"):
            module.lazy_register_class = lambda name, initialize: functools.partial(_compiled_class, name)
    import tvm_ffi

    tvm_ffi.load_module = lambda path, *args, **kwargs: found(CompiledModule(os.path.basename(str(path))), str(path))
    core: Any = importlib.import_module("flashinfer.jit.core")
    for cls in [one for one in vars(core).values() if isinstance(one, type) and issubclass(one, core.JitSpec)]:
        for name in ("build_and_load", "try_load", "load"):
            if hasattr(cls, name):
                setattr(cls, name, lambda self, *args, **kwargs: CompiledModule(self.name))
        cls.is_compiled = property(lambda self: True)  # type: ignore[attr-defined]
        cls.write_ninja = lambda self, *args, **kwargs: None  # type: ignore[attr-defined]
    for module in [one for name, one in sys.modules.items() if name.startswith("flashinfer.")]:
        for name, value in _DOWNLOADED.items():
            if hasattr(module, name):
                setattr(module, name, lambda *args, value=value, **kwargs: value)


def _compiled_class(name: str, cls: type) -> type:
    """A class whose constructor and methods are compiled, for one that registers them at first use."""
    own = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__", "__slots__")}
    constructed = {"__ffi_init__": lambda self, *args: None, "__getattr__": lambda self, key: _method(name, key)}
    return type(cls.__name__, (), {**own, **constructed})


def _method(name: str, key: str) -> Any:
    if key.startswith("__") or key in ("shape", "dtype"):  # it is not a tensor
        raise AttributeError(key)
    return CompiledFunction(f"{name}.{key}")


def _load_jit(found: Callable[[Any, str], Any], *args: Any, **kwargs: Any) -> Any:
    name = "_".join(str(one) for one in ("sgl_kernel_jit", *args)).replace("/", "_")
    return found(CompiledModule(name), name)


def install_cute(logged: Callable[[Any, str, str], Any]) -> None:
    """Kernels in the CuTe DSL.

    Args:
        logged: is given a function, a library and a path, and returns a function that logs its calls.
    """
    try:
        from cutlass.base_dsl import compiler
        from cutlass.cute import runtime
    except ImportError:
        return

    def compiled(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        target = getattr(function, "__func__", function if hasattr(function, "__qualname__") else type(function))
        path = f"{target.__module__}.{target.__qualname__}"
        return logged(CompiledFunction(path), "cute", path)

    class Packed:
        """A tensor as CuTe sees it; every method returns it."""

        def __init__(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
            self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: self

    compiler.CompileCallable.__call__ = compiler.CompileCallable._compile = compiled
    runtime.from_dlpack = Packed


def install_tilelang(module: Any, logged: Callable[[Any, str, str], Any]) -> None:
    """Kernels in TileLang, whose package is a stand-in: a function with tensors is one, with sizes alone makes one."""

    def jit(function: Any = None, **options: Any) -> Any:
        def decorate(made: Any) -> Any:
            path = f"{made.__module__}.{made.__qualname__}"
            kernel = logged(CompiledFunction(path), "tilelang", path)

            @functools.wraps(made)
            def call(*args: Any, **kwargs: Any) -> Any:
                given = any(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values()))
                return kernel(*args, **kwargs) if given else kernel

            return call

        return decorate(function) if callable(function) else decorate

    module.jit, module.set_log_level, module.__path__ = jit, lambda level: None, []
    sys.modules["tilelang"] = module
