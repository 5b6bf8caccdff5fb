"""The evaluator as a whole: names, modules, libraries, and the kernels that are called."""

from __future__ import annotations

from collections import deque
from typing import Any

from tools.kernel_tracing.evaluator.calls import Calls
from tools.kernel_tracing.evaluator.expressions import Expressions
from tools.kernel_tracing.evaluator.libraries import Libraries
from tools.kernel_tracing.evaluator.objects import Objects
from tools.kernel_tracing.evaluator.operators import plain
from tools.kernel_tracing.evaluator.statements import Statements
from tools.kernel_tracing.evaluator.tensors import is_dtype
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Builtin,
    Choice,
    Class,
    External,
    Function,
    Instance,
    Lazy,
    NativeModule,
    Opaque,
    Tensor,
    Unknown,
    Value,
)
from tools.kernel_tracing.rules import custom_operators as custom_ops
from tools.kernel_tracing.rules import environments, serving_steps
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.source.declarations import FunctionNode
from tools.kernel_tracing.source.index import Index


class Machine(Statements, Expressions, Objects, Calls, Libraries):
    """Evaluates the sources on one platform and GPU."""

    def __init__(self, index: Index, platform: Platform, gpu: str = "sm90", world: int = 1) -> None:
        super().__init__(index, platform)
        self.answers |= environments.answers(gpu, world)
        self._forwarded: Value = MISSING
        self._plain: set[FunctionNode] = set()  # functions of which no rule says anything

    # Rules

    def known(self, function: Function, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if function.node in self._plain:
            return MISSING
        qualified = f"{function.module.name}.{function.qualname}"
        override = self.overrides.get(qualified, self.overrides.get(function.qualname, MISSING))
        if override is not MISSING:
            return override(self, args, kwargs) if callable(override) else override
        predicate = self.platform.predicate(function.qualname)
        if predicate is not None:
            return predicate
        if function.qualname == serving_steps.FORWARD:
            return self._forward(function, args, kwargs)
        if function.qualname == serving_steps.CAPTURE:
            return self._capture(function, args, kwargs)
        if function.name == "load_jit":
            return NativeModule(self.frame.function)
        if custom_ops.is_wrapper(function.qualname) or custom_ops.is_registration(function.qualname):
            return self._operator_of(function.qualname, args, kwargs)
        self._plain.add(function.node)
        return MISSING

    def _forward(self, function: Function, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """The model's forward. A phase that differs from others after it takes the result of the last one."""
        if self.phase not in serving_steps.PARTIAL or self._forwarded is MISSING:
            self._forwarded = self.run_function(function, args, kwargs)
        return self._forwarded

    def _capture(self, function: Function, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What a CUDA graph captures: an all-reduce, for instance, is only launched if torch says so."""
        before = self.answers[environments.CAPTURING]
        self.answers[environments.CAPTURING] = True
        try:
            return self.run_function(function, args, kwargs)
        finally:
            self.answers[environments.CAPTURING] = before

    def prepare(self, instance: Instance, args: list[Value]) -> None:
        if "torch.nn.Module" in instance.cls.externals:
            instance.fields |= {"training": False}
        if "torch.nn.ModuleList" in instance.cls.externals or "torch.nn.Sequential" in instance.cls.externals:
            instance.fields["elements"] = list(self.iterate(args[0]) or []) if args else []

    def inherited(self, owner: Instance, name: str) -> Value:
        if name in ("register_buffer", "register_parameter", "add_module", "__setattr__"):

            def register(core: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
                if args and isinstance(args[0], str):
                    owner.fields[args[0]] = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
                return None

            return Builtin(name, register)
        if "torch.nn.Module" in owner.cls.externals:
            if name in _MODULE_LISTS:
                return Builtin(name, lambda core, args, kwargs: self._modules(owner, name))
            if name in _MODULE_METHODS:
                return Builtin(name, lambda core, args, kwargs: owner)
            if "elements" in owner.fields and name in ("append", "insert"):
                return owner.fields["elements"].append
            return MISSING
        if any(
            path in ("typing.Generic", "abc.ABC", "typing.Protocol", "builtins.object") for path in owner.cls.externals
        ):
            return MISSING
        if name.startswith("__"):
            return MISSING
        if "transformers.PretrainedConfig" in owner.cls.externals or owner.cls.kind:
            return MISSING
        return UNKNOWN

    def _modules(self, owner: Instance, name: str) -> list[Value]:
        """The modules below one, and itself, or what `parameters()` and the like return."""
        if "parameter" in name or "buffer" in name or name == "state_dict":
            found = [(key, value) for key, value in owner.fields.items() if isinstance(value, Tensor)]
            return found if name.startswith("named") else [value for _, value in found]
        pairs: dict[int, tuple[str, Instance]] = {}
        pending: list[tuple[str, Value]] = [("", owner)]
        while pending:
            path, value = pending.pop(0)
            if isinstance(value, Instance) and "torch.nn.Module" in value.cls.externals and id(value) not in pairs:
                pairs[id(value)] = (path, value)
                inner = list(value.fields.items()) if value is owner or "children" not in name else []
            elif isinstance(value, list):
                inner = [(str(at), one) for at, one in enumerate(value)]
            elif isinstance(value, Choice):
                inner = [("", one) for one in value.values]
            else:
                continue
            pending += [
                (f"{path}.{key}".strip("."), one) for key, one in inner if isinstance(one, (Instance, list, Choice))
            ]
        every = list(pairs.values())["children" in name :]
        return [(path, one) for path, one in every] if name.startswith("named") else [one for _, one in every]

    # Iteration and types

    def iterate(self, value: Value) -> list[Value] | None:
        if isinstance(value, (list, tuple, set, frozenset, range, dict, deque, str)):
            return [self.resolve(one) if one.__class__ is Lazy else one for one in value]
        if isinstance(value, Instance):
            if value.cls.find("__iter__") is not MISSING:
                return self.iterate(self.call(self.load(value, "__iter__"), [], {}))
            if "elements" in value.fields:
                return list(value.fields["elements"])
            return list(value.fields.values()) if value.cls.kind == "namedtuple" else None
        if isinstance(value, Class) and value.kind == "enum":
            return list(value.members.values())
        if isinstance(value, Choice):
            lists = [self.iterate(one) for one in value.values if one is not None]
            return next((one for one in lists if one is not None), None)
        if isinstance(value, Tensor) and value.data is not None:
            return list(value.data)
        if isinstance(value, (Unknown, Tensor, External, Opaque)) or value is None:
            return None
        if hasattr(value, "__iter__"):
            return [one for one, _ in zip(value, range(4096), strict=False)]
        return None

    def is_instance(self, value: Value, kind: Value) -> bool | None:
        if isinstance(value, Choice):
            found = {self.is_instance(one, kind) for one in value.values}
            return found.pop() if len(found) == 1 else None
        if isinstance(kind, (tuple, list)):
            every = [self.is_instance(value, one) for one in kind]
            return True if True in every else None if None in every else False
        if isinstance(value, Unknown) or isinstance(kind, Unknown):
            return None
        if isinstance(kind, Class):
            return isinstance(value, Instance) and kind in value.cls.order if not isinstance(value, Opaque) else False
        if isinstance(kind, External):
            if kind.path == "torch.dtype":
                return is_dtype(value)
            if kind.path in ("torch.Tensor", "torch.nn.Parameter"):
                return isinstance(value, Tensor)
            if isinstance(value, Instance):
                return kind.path in value.cls.externals
            return value.path == kind.path if isinstance(value, Opaque) else False
        if isinstance(kind, type):
            value = plain(value)
            if isinstance(value, Instance):
                return f"builtins.{kind.__name__}" in value.cls.externals
            return isinstance(value, kind) if not isinstance(value, (Tensor, Opaque, External)) else False
        return None


_MODULE_LISTS = {"parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children"}
_MODULE_LISTS |= {"named_children", "state_dict"}
_MODULE_METHODS = {
    "eval",
    "train",
    "to",
    "cuda",
    "cpu",
    "half",
    "requires_grad_",
    "apply",
    "float",
    "bfloat16",
    "register_forward_pre_hook",
    "register_forward_hook",
}
