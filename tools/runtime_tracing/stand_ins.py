"""Stand-ins for packages that SGLang imports and that a bare forward pass never uses, and for FlashAttention 3.

A package that is installed always wins. A stand-in answers every attribute with a class that can be called, subclassed,
subscripted and used as a decorator. To a library that can do without such a package, it looks as if the package were
not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: Servers, grammars, tokenizers, images and sound: nothing that a forward pass of a text model needs.
UNUSED = (
    *("IPython", "anthropic", "blobfile", "datasets", "decord", "easydict", "gguf", "interegular", "llguidance"),
    *("loguru", "mistral_common", "modelscope", "openai", "openai_harmony", "opentelemetry", "outlines", "py_spy"),
    *("smg_grpc_servicer", "soundfile", "torch_memory_saver", "torchcodec", "uvicorn", "watchfiles", "xgrammar"),
)

#: Packages that try to import some of these, and do without.
DOING_WITHOUT = {"flashinfer", "torch", "transformers"}


class AnyAttribute(type):
    """The metaclass of stand-ins: any attribute is another one, and as a decorator it returns what it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if is_special(name):
            raise AttributeError(name)
        return cls.another(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_stand_in" not in cls.__dict__:  # a class that somebody derived
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType)):
            return args[0]
        cls.called(cls.__qualname__)
        return super().__call__()

    def another(cls, path: str) -> Any:
        """A stand-in of the same kind for an attribute of an absent package."""
        base = next(one for one in cls.__mro__ if "_kind" in one.__dict__)
        return type(cls)(path.rpartition(".")[2], (base,), {"__qualname__": path, "_stand_in": True})

    def called(cls, path: str) -> None:
        """A stand-in was called, by the caller of its caller."""

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())


class StandIn(metaclass=AnyAttribute):
    """The instances of stand-ins: empty, false, and their own context and result."""

    _kind = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the real one takes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Takes what a typed dictionary takes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], (type, types.FunctionType)):
            return args[0]
        type(self).called(f"{type(self).__qualname__}()")
        return self

    def __getattr__(self, name: str) -> Any:
        if is_special(name):
            raise AttributeError(name)
        return type(self).another(f"{type(self).__qualname__}.{name}")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, item: Any) -> Any:
        return self

    def __setitem__(self, item: Any, value: Any) -> None:
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, *args: Any) -> dict[str, str]:
        return {"type": "any"}


def is_special(name: str) -> bool:
    """Whether Python itself asks for this attribute."""
    return name.startswith("__") and name.endswith("__")


class StandInModule(types.ModuleType):
    """An absent package, or a module of it. Its attributes are stand-ins of a kind."""

    def __init__(self, name: str, kind: type[StandIn] = StandIn) -> None:
        super().__init__(name)
        self.__dict__["_kind_of_stand_in"] = kind

    def __getattr__(self, name: str) -> Any:
        if is_special(name):
            raise AttributeError(name)
        value = self._kind_of_stand_in.another(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for some packages.

    Attributes:
        packages: their names.
        kind, version: of the stand-ins, and what they say of theirs.
    """

    kind: type[StandIn] = StandIn
    version = "0.0.0"

    def __init__(self, packages: Iterable[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages or not self.serves(fullname, asking_file()):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def serves(self, fullname: str, asking: str) -> bool:
        """Whether the file that asks gets a stand-in for a module of these packages."""
        return DOING_WITHOUT.isdisjoint(asking.split("/"))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StandInModule(spec.name, self.kind)
        module.__path__ = []
        module.__dict__["__version__"] = self.version
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def asking_file() -> str:
    """The file whose import statement is running."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename


def install(packages: Sequence[str] = UNUSED) -> None:
    """Serves `packages` where nothing real is installed."""
    finder = Finder(packages)
    sys.meta_path.append(finder)
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        """Answers whether a package is installed: a stand-in is not."""
        if isinstance(sys.modules.get(name), StandInModule):
            return None
        sys.meta_path.remove(finder)
        try:
            return real(name, package)
        finally:
            sys.meta_path.append(finder)

    importlib.util.find_spec = find_spec


def flash_attention_3() -> None:
    """Replaces the entry points of FlashAttention 3 by functions that return zeros of the right shape.

    Its library is much larger than the others together, and may be left out. The chains of calls that reach it are
    real, the kernel is not: a recording names it among its stand-ins, and no figure counts it.
    """
    sys.modules["sgl_kernel.flash_ops"] = types.ModuleType("sgl_kernel.flash_ops")
    import sgl_kernel
    from sgl_kernel import flash_attn

    sgl_kernel.flash_ops = sys.modules["sgl_kernel.flash_ops"]
    for name, values in (("flash_attn_with_kvcache", "v_cache"), ("flash_attn_varlen_func", "v")):
        setattr(flash_attn, name, _zeros(getattr(flash_attn, name), values))
    flash_attn.get_scheduler_metadata = _no_metadata
    for checked in vars(flash_attn).values():  # what it found out before the library was there
        if hasattr(checked, "cache_clear"):
            checked.cache_clear()


def _no_metadata(*args: Any, **kwargs: Any) -> None:
    return None


def _zeros(real: Callable[..., Any], values: str) -> Callable[..., Any]:
    signature = inspect.signature(real)

    def attention(*args: Any, **kwargs: Any) -> Any:
        import torch

        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        query, value = given.arguments["q"], given.arguments[values]
        output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        if not given.arguments["return_softmax_lse"]:
            return output
        rows = query.shape[:-2].numel()
        return output, torch.zeros(query.shape[-2], rows, dtype=torch.float32, device=query.device)

    attention.__module__, attention.__name__, attention.__qualname__ = real.__module__, real.__name__, real.__name__
    return attention
