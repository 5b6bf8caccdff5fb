"""Calls: functions, methods, classes, partial functions and context managers."""

from __future__ import annotations

import ast
from collections.abc import Callable

from tools.kernel_tracing.evaluator.classes import fields_of
from tools.kernel_tracing.evaluator.core import Core, Frame
from tools.kernel_tracing.evaluator.functions import Signature, signature
from tools.kernel_tracing.evaluator.objects import describe
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Builtin,
    Choice,
    Class,
    External,
    Function,
    Generator,
    Instance,
    Kernel,
    LibraryClass,
    LibraryFunction,
    LibraryObject,
    Method,
    Opaque,
    Partial,
    Raised,
    Return,
    Scope,
    Signal,
    Tensor,
    TritonKernel,
    Unknown,
    Value,
    Wrapped,
    choice,
)
from tools.kernel_tracing.rules import serving_steps

# A function may be active this often, as recursion on unknown values would not end.
MAX_ACTIVE = 12
# The longest text of what is raised: messages for users say at their end what to do instead.
MAX_MESSAGE = 1000


class Calls(Core):
    """Calls values."""

    def call(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if isinstance(function, Method):
            target = function.function
            if isinstance(target, Builtin):
                return target.run(self, [function.receiver, *args], kwargs)
            return self.call(target, [function.receiver, *args], kwargs)
        if isinstance(function, Function):
            return self._enter(function, args, kwargs)
        if isinstance(function, Builtin):
            return function.run(self, args, kwargs)
        if isinstance(function, Class):
            return self.construct(function, args, kwargs)
        if isinstance(function, Instance):
            return self._call_instance(function, args, kwargs)
        if isinstance(function, Unknown):
            return UNKNOWN
        if isinstance(function, External):
            return self.call_external(function.path, args, kwargs)
        if isinstance(function, Partial):
            return self.call(function.function, [*function.args, *args], function.kwargs | kwargs)
        if isinstance(function, Choice):
            found = []
            for one in function.values:
                if one is not None:
                    with self.uncertain():
                        found.append(self.call(one, args, kwargs))
            return choice(found)
        if isinstance(function, (Kernel, LibraryFunction, LibraryClass, LibraryObject, TritonKernel)):
            return self.call_library(function, args, kwargs)
        if isinstance(function, Wrapped):
            return self.call(function.function, args, kwargs)
        if isinstance(function, Opaque):
            return self.call_external(f"{function.path}()", args, kwargs)
        if isinstance(function, Tensor) or function is None:
            if function is None and self.frame.handlers:
                raise self.error(TypeError, "None is not callable")
            return UNKNOWN
        return self.call_native(function, args, kwargs)

    def _call_instance(self, owner: Instance, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if "torch.nn.Module" in owner.cls.externals and self.frame.module.file.startswith(serving_steps.MODEL_FILES):
            return self._call_module(owner, args, kwargs)
        return self._enter_instance(owner, args, kwargs)

    def _call_module(self, owner: Instance, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Calls a module of the model, and notes it if it runs no kernel; modules inside it are part of it."""
        launches, known = self.launches, len(self.plain_modules)
        where = owner.cls.module.file, owner.cls.node.lineno
        event = self.event(owner.cls.name, "torch", *where, launches)
        result = self._enter_instance(owner, args, kwargs)
        if self.launches == launches:
            for key in list(self.plain_modules)[known:]:
                del self.plain_modules[key]
            self.plain_modules.setdefault(event.key, event)
        return result

    def _enter_instance(self, owner: Instance, args: list[Value], kwargs: dict[str, Value]) -> Value:
        method = owner.cls.find("__call__")
        if method is MISSING:
            forward = self.find_field(owner, "forward")
            if forward is MISSING:
                return UNKNOWN
            return self.call(forward, args, kwargs)
        return self.call(Method(method, owner), args, kwargs)

    def find_field(self, owner: Instance, name: str) -> Value:
        """A field or method."""
        if name in owner.fields:
            return owner.fields[name]
        found = owner.cls.find(name)
        return Method(found, owner) if found is not MISSING else MISSING

    def _enter(self, function: Function, args: list[Value], kwargs: dict[str, Value]) -> Value:
        known = self.known(function, args, kwargs)
        if known is not MISSING:
            return known
        active = 0
        for frame in self.stack:
            if frame.function is function:
                active += 1
        if active > (2 if self.region else MAX_ACTIVE):
            return UNKNOWN
        if function.is_context and self.index.fact(signature, function.node).is_generator:
            return Generator(function, args, kwargs)
        return self.run_function(function, args, kwargs)

    def run_function(
        self,
        function: Function,
        args: list[Value],
        kwargs: dict[str, Value],
        on_yield: Callable[[Value], Value] | None = None,
    ) -> Value:
        """Runs the body of a function, without asking the rules about it."""
        spec = self.index.fact(signature, function.node)
        names = _bound(spec, function.defaults, args, kwargs)
        scope = Scope(names, function.scope, function.module)
        receiver = args[0] if function.owner is not None and args else None
        frame = Frame(function.module, function.qualname, scope, function, function.node.lineno, receiver=receiver)
        frame.on_yield = on_yield
        self.stack.append(frame)
        depth = len(self.stack)
        frame.handlers = self.stack[-2].handlers if depth > 1 else 0
        try:
            if isinstance(function.node, ast.Lambda):
                return self.evaluate(function.node.body)
            self.run(function.node.body)
            result: Value = None
        except Return as signal:
            result = signal.value
        except Raised as raised:
            if frame.returns:
                return choice(frame.returns)
            if self.stack[depth - 1].handlers or self.region:
                raise
            self.problem(f"raises {describe(raised.value)} {getattr(raised.value, 'args', '')}"[:MAX_MESSAGE])
            return UNKNOWN
        finally:
            del self.stack[depth - 1 :]
        if spec.is_generator:
            return frame.yielded
        return choice([*frame.returns, result]) if frame.returns else result

    def construct(self, info: Class, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Calls a class."""
        if info.kind == "enum":
            return self._member(info, args)
        if any(issubclass_of(path) for path in info.externals):
            return self.error(Exception, info.name).value
        if info.externals & {"torch.Tensor", "torch.nn.Parameter", "torch.nn.parameter.Parameter"}:
            return Tensor(*_shape_of(args, kwargs))
        made = info.find("__new__")
        if isinstance(made, (Function, Wrapped)):
            instance = self.call(made, [info, *args], kwargs)
            if not isinstance(instance, Instance) or instance.cls is not info:
                return instance
        else:
            instance = Instance(info, region=self.region)
        self.prepare(instance, args)
        if "types.SimpleNamespace" in info.externals:
            instance.fields |= kwargs
        initialiser = info.find("__init__")
        if isinstance(initialiser, Function):
            self.call(Method(initialiser, instance), args, kwargs)
        elif info.kind in ("dataclass", "namedtuple"):
            self._fill(instance, args, kwargs)
        return instance

    def _member(self, info: Class, args: list[Value]) -> Value:
        value = args[0] if args else UNKNOWN
        if isinstance(value, Instance):
            return value
        found = next((one for one in info.members.values() if self.equal(one.fields["value"], value) is True), None)
        if found is not None:
            return found
        hook = info.find("_missing_")
        if hook is not MISSING:
            return self.call(self.load(info, "_missing_"), [value], {})
        if isinstance(value, (Unknown, Choice)):
            return choice(list(info.members.values())) if len(info.members) < 8 else UNKNOWN
        raise self.error(ValueError, f"{value!r} is not a valid {info.name}")

    def _fill(self, instance: Instance, args: list[Value], kwargs: dict[str, Value]) -> None:
        """Sets the fields of a dataclass from arguments and defaults."""
        info = instance.cls
        given = list(args)
        later: dict[str, Value] = {}
        for name in fields_of(self, info):
            default = info.find(name)
            field = default if isinstance(default, Opaque) and default.path == "dataclasses.field" else None
            settings = field.fields.get("settings", {}) if field is not None else {}
            if name in kwargs:
                value = kwargs[name]
            elif given and settings.get("init", True) is True:
                value = given.pop(0)
            elif "default_factory" in settings:
                value = self.call(settings["default_factory"], [], {})
            elif field is not None:
                value = settings.get("default", UNKNOWN)
            else:
                value = UNKNOWN if default is MISSING else default
            later[name] = value
        instance.fields |= later
        hook = info.find("__post_init__")
        if isinstance(hook, Function):
            self.call(Method(hook, instance), [], {})

    # Context managers

    def with_manager(self, manager: Value, inside: Callable[[Value], None]) -> None:
        """Runs `inside` within a context manager."""
        if isinstance(manager, Generator):
            self._with_generator(manager, inside)
            return
        if isinstance(manager, Choice):
            instances = [one for one in manager.values if isinstance(one, (Instance, Generator))]
            manager = instances[0] if instances else UNKNOWN
            if isinstance(manager, Generator):
                self._with_generator(manager, inside)
                return
        if not isinstance(manager, Instance) or manager.cls.find("__enter__") is MISSING:
            inside(manager)
            return
        inside(self.call(self.load(manager, "__enter__"), [], {}))
        self.call(self.load(manager, "__exit__"), [None, None, None], {})

    def _with_generator(self, manager: Generator, inside: Callable[[Value], None]) -> None:
        """Runs the generator up to its first `yield`, there `inside` as what its caller does, and then the rest."""
        outer = self.stack
        self.stack = list(outer)
        entered = False
        signal: Signal | None = None

        def pause(value: Value) -> Value:
            nonlocal entered, signal
            if not entered:
                entered = True
                inner, self.stack = self.stack, outer
                try:
                    inside(value)
                except Signal as error:  # the generator goes on, and then the caller leaves its block
                    signal = error
                finally:
                    self.stack = inner
            return UNKNOWN

        failure: Signal | None = None
        try:
            self.run_function(manager.function, manager.args, manager.kwargs, pause)
        except Signal as error:
            failure = error
        finally:
            self.stack = outer
        if not entered:
            inside(UNKNOWN)
        try:
            if signal is not None:
                raise signal
            if failure is not None:
                raise failure
        finally:
            signal = failure = None  # an exception that is raised refers to the names of this function


def _bound(
    spec: Signature, defaults: dict[str, Value], args: list[Value], kwargs: dict[str, Value]
) -> dict[str, Value]:
    """The names of a function's parameters, with what a call gives them."""
    names: dict[str, Value] = dict(zip(spec.positional, args, strict=False))
    extra: dict[str, Value] = {}
    for name, value in kwargs.items():
        if name in spec.named:
            names[name] = value
        else:
            extra[name] = value
    for name in spec.named:
        if name not in names:
            names[name] = defaults.get(name, UNKNOWN)
    if spec.rest:
        names[spec.rest] = tuple(args[len(spec.positional) :])
    if spec.keywords:
        names[spec.keywords] = extra
    return names


def issubclass_of(path: str) -> bool:
    """Whether a base outside the sources is an exception."""
    return path.startswith("builtins.") and path.endswith(("Error", "Exception", "Warning", "Interrupt"))


def _shape_of(args: list[Value], kwargs: dict[str, Value]) -> tuple[tuple[Value, ...] | None, Value]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.shape, value.dtype
    return None, None
