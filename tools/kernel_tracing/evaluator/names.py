"""Names: of modules, libraries and scopes."""

from __future__ import annotations

import ast

from tools.kernel_tracing.evaluator import builtin_functions as natives
from tools.kernel_tracing.evaluator.core import Core, Frame
from tools.kernel_tracing.evaluator.standard_library import STANDARD
from tools.kernel_tracing.evaluator.tensors import is_dtype, item_size
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Builtin,
    External,
    Function,
    Kernel,
    Lazy,
    LibraryClass,
    LibraryFunction,
    LibraryModule,
    ModuleObject,
    Raised,
    Return,
    Scope,
    Unknown,
    Value,
)
from tools.kernel_tracing.rules import boundaries, environments
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo, Module
from tools.kernel_tracing.source.libraries import LIBRARIES

_ALIASES = {"torch.float": "torch.float32", "torch.half": "torch.float16", "torch.double": "torch.float64"}
_ALIASES |= {"torch.long": "torch.int64", "torch.int": "torch.int32", "torch.short": "torch.int16"}

#: How often a name may be imported from a module that itself imports it.
MOST_RENAMED = 30


class Names(Core):
    """Names: of modules, libraries and scopes."""

    def module(self, name: str) -> ModuleObject | None:
        known = self.modules.get(name)
        if known is None and name in self.index.sources.modules and name.partition(".")[0] not in LIBRARIES:
            file = self.index.sources.files[name]
            known = self.modules[name] = ModuleObject(name, file)
            known.scope.module = known
        return known

    def start(self, module: ModuleObject) -> None:
        """Runs a module's body, once."""
        if module.started:
            return
        module.started = True
        try:
            tree = self.index.sources.tree(module.name)
        except SyntaxError:
            return
        module.scope.names |= {"__name__": module.name, "__file__": module.file, "__doc__": None}
        outer, tests = self.stack, self.region
        self.stack, self.region = [Frame(module, "", module.scope)], 0
        try:
            for statement in tree.body:
                self._guarded(statement)
        finally:
            self.stack, self.region = outer, tests

    def _guarded(self, statement: ast.stmt) -> None:
        try:
            self.run([statement])
        except Raised as raised:
            del self.stack[1:]
            self.problem(f"module raises {raised.value!r}"[:160])
        except Return:
            del self.stack[1:]

    def imported(self, module: str, name: str) -> Value:
        known = self.module(module)
        if known is not None:
            if name not in known.scope.names:
                self.start(known)
            value = known.scope.names.get(name, MISSING)
            if value is not MISSING:
                return self.resolve(value)
            if f"{module}.{name}" in self.index.sources.modules:
                return self.import_module(f"{module}.{name}")
            for star in known.stars:
                if star != module and (found := self._starred_name(star, name)) is not MISSING:
                    return found
            hook = known.scope.names.get("__getattr__")
            if isinstance(hook, Function):
                return self.call(hook, [name], {})
            if self.stack and self.frame.handlers:
                raise self.error(ImportError, name)
            return UNKNOWN
        if module.partition(".")[0] in LIBRARIES:
            return self._of_library(module, name)
        if f"{module}.{name}" in self.index.sources.modules:  # of a package without __init__.py
            return self.import_module(f"{module}.{name}")
        if environments.is_absent(f"{module}.{name}"):
            raise self.error(ImportError, module)
        if module in environments.KERNEL_MODULES:
            return Kernel(name, environments.KERNEL_MODULES[module])
        return self.external(f"{module}.{name}")

    def _starred_name(self, module: str, name: str) -> Value:
        """A name that `from module import *` binds, which may be set only later if modules import each other."""
        known = self.module(module)
        if known is None or name.startswith("_"):
            return MISSING
        self.start(known)
        if name in known.scope.names or known.stars:
            value = known.scope.names.get(name, MISSING)
            if value is not MISSING:
                return self.resolve(value)
            return next(
                (one for one in (self._starred_name(star, name) for star in known.stars) if one is not MISSING), MISSING
            )
        return MISSING

    def import_module(self, name: str) -> Value:
        known = self.module(name)
        if known is not None:
            self.start(known)
            return known
        top = name.partition(".")[0]
        if top in LIBRARIES:
            if self.index.module(name) is None:
                raise self.error(ImportError, name)
            return LibraryModule(name)
        if environments.is_absent(name):
            raise self.error(ImportError, name)
        return natives.NATIVE_MODULES.get(name, External(name))

    def import_all(self, source: str) -> None:
        self.frame.module.stars.append(source)

    def resolve(self, value: Value) -> Value:
        if value.__class__ is Lazy:
            for _ in range(MOST_RENAMED):
                value = self.imported(value.module, value.name)
                if value.__class__ is not Lazy:
                    break
        return value

    def lookup(self, name: str) -> Value:
        scope: Scope | None = self.stack[-1].scope
        while scope is not None:
            value = scope.names.get(name, MISSING)
            if value is not MISSING:
                if value.__class__ is Lazy:
                    value = self.resolve(value)
                    if not isinstance(value, Unknown):
                        scope.names[name] = value
                return value
            scope = scope.parent
        for star in self.frame.module.stars:
            if (found := self._starred_name(star, name)) is not MISSING:
                return found
        found = natives.builtin(name)
        if found is MISSING:
            if name == "__class__":
                return self.frame.function.owner if self.frame.function is not None else UNKNOWN
            self.problem(f"unknown name {name}")
            return UNKNOWN
        return found

    def bind(self, name: str, value: Value) -> None:
        frame = self.stack[-1]
        if name in frame.globals:
            names = frame.module.scope.names
            names[name] = self.merged(names, name, value, -1)
            return
        if name in frame.nonlocals:
            scope = frame.scope.parent
            while scope is not None:
                if name in scope.names:
                    scope.names[name] = self.merged(scope.names, name, value, -1)
                    return
                scope = scope.parent
        frame.scope.names[name] = value

    def external(self, path: str) -> Value:
        """A name of a library that is not evaluated."""
        path = _ALIASES.get(path, path.replace("torch.torch.", "torch."))
        if path in self.answers and not callable(self.answers[path]):
            value = self.answers[path]
            return (
                value
                if not path.rpartition(".")[2].startswith(("get_", "is_", "device_count", "current_", "mem_"))
                else External(path)
            )
        top, _, rest = path.partition(".")
        if top in natives.NATIVE_MODULES and rest:
            return getattr(natives.NATIVE_MODULES[top], rest, UNKNOWN) if path not in STANDARD else External(path)
        return External(path)

    def external_attribute(self, owner: External, name: str) -> Value:
        path = f"{owner.path}.{name}"
        if path == "os.environ":
            return self.environment
        if path in ("torch.hpu", "torch.npu", "torch.musa", "torch.mtia", "torch.xpu._is"):
            return MISSING
        if owner.path.startswith("torch.ops."):
            parts = path.split(".")
            if len(parts) == 4:
                return self._operator(parts[2], name)
        if name in ("__name__", "__qualname__"):
            return owner.path.rpartition(".")[2]
        if name == "itemsize" and is_dtype(owner):
            return item_size(owner)
        if name in ("exists", "is_file", "is_dir") and "()" in path:
            return Builtin(path, lambda core, args, kwargs: False)
        if "()." in path and path not in self.answers and owner.path != "torch.library.Library()":
            return Builtin(path, lambda core, args, kwargs: UNKNOWN) if name.islower() else UNKNOWN
        return self.external(path)

    def _operator(self, namespace: str, name: str) -> Value:
        registered = self.operators.get(name)
        if registered is not None:
            return registered
        if namespace == "torch":
            return External(f"torch.{name}")
        if boundaries.is_query_name(name):
            return External(f"torch.ops.{namespace}.{name}")
        return Kernel(name, LIBRARIES.get(namespace, "torch.ops"))

    def _of_library(self, module: str, name: str) -> Value:
        known = self.index.module(module)
        found = self.index.lookup(known, name) if known is not None else []
        for symbol in found:
            if isinstance(symbol, FunctionInfo):
                if boundaries.alive(self.index, self.platform, symbol):
                    return LibraryFunction(symbol)
            elif isinstance(symbol, ClassInfo):
                return LibraryClass(symbol)
            elif isinstance(symbol, Module):
                return LibraryModule(symbol.name)
            else:
                parts = symbol.split(".")
                return self._operator(parts[2], parts[3]) if symbol.startswith("torch.ops.") else External(symbol)
        if self.index.module(f"{module}.{name}") is not None:
            return LibraryModule(f"{module}.{name}")
        if known is None or (not known.stars and name not in known.bindings):
            raise self.error(ImportError, f"{module}.{name}")
        return UNKNOWN
