"""The evaluator as a whole: names, modules, libraries, and the kernels that are called."""

from __future__ import annotations

import ast
import re
from collections import deque
from typing import Any

from tools.kernel_tracing.evaluator import builtin_functions as natives
from tools.kernel_tracing.evaluator.calls import Calls
from tools.kernel_tracing.evaluator.core import Event, Frame, Hop
from tools.kernel_tracing.evaluator.expressions import Expressions, plain
from tools.kernel_tracing.evaluator.objects import Objects
from tools.kernel_tracing.evaluator.statements import Statements
from tools.kernel_tracing.evaluator.tensors import is_dtype, item_size, made, product
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
    Lazy,
    LibraryClass,
    LibraryFunction,
    LibraryModule,
    LibraryObject,
    Method,
    ModuleObject,
    NativeModule,
    Opaque,
    Partial,
    Raised,
    Return,
    Scope,
    Tensor,
    TritonKernel,
    Unknown,
    Value,
)
from tools.kernel_tracing.rules import boundaries, custom_operators as custom_ops, environments
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.source.index import ClassInfo, FunctionInfo, Index, Module
from tools.kernel_tracing.source.libraries import LIBRARIES

_TRITON = re.compile(r"triton\.(jit|autotune|heuristics)(\(\))*|triton\.runtime\.jit\.\w+")


class Machine(Statements, Expressions, Objects, Calls):
    """Evaluates the sources on one platform and GPU."""

    def __init__(self, index: Index, platform: Platform, gpu: str = "sm90", world: int = 1) -> None:
        super().__init__(index)
        self.platform = platform
        self.environment: dict[str, str] = {}
        self.answers = environments.answers(gpu, world)
        self.modules: dict[str, ModuleObject] = {}
        self.overrides: dict[str, Any] = {}  # qualified names of functions whose results are decided
        self.operators: dict[str, Value] = {}  # torch operators that the sources register

    # Modules and names

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
            tree = ast.parse(self.index.sources.text(module.name))
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
        if module.partition(".")[0] in environments.ABSENT:
            raise self.error(ImportError, module)
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
        if top in environments.ABSENT:
            raise self.error(ImportError, name)
        return natives.NATIVE_MODULES.get(name, External(name))

    def import_all(self, source: str) -> None:
        self.frame.module.stars.append(source)

    def resolve(self, value: Value) -> Value:
        depth = 0
        while isinstance(value, Lazy) and depth < 30:
            value = self.imported(value.module, value.name)
            depth += 1
        return value

    def lookup(self, name: str) -> Value:
        scope: Scope | None = self.frame.scope
        while scope is not None:
            if name in scope.names:
                value = scope.names[name]
                if isinstance(value, Lazy):
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
        frame = self.frame
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

    # Rules

    def known(self, function: Function, args: list[Value], kwargs: dict[str, Value]) -> Value:
        qualified = f"{function.module.name}.{function.qualname}"
        override = self.overrides.get(qualified, self.overrides.get(function.qualname, MISSING))
        if override is not MISSING:
            return override(self, args, kwargs) if callable(override) else override
        predicate = self.platform.predicate(function.qualname)
        if predicate is not None:
            return predicate
        if function.name == "load_jit":
            return NativeModule(self.frame.function)
        if custom_ops.is_wrapper(function.qualname) or custom_ops.is_registration(function.qualname):
            return self._operator_of(function.qualname, args, kwargs)
        return MISSING

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

    # Libraries

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
            return (
                getattr(natives.NATIVE_MODULES[top], rest, UNKNOWN) if path not in natives.STANDARD else External(path)
            )
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
        if "()." in path and path not in self.answers:
            return Builtin(path, lambda core, args, kwargs: UNKNOWN) if name.islower() else UNKNOWN
        return self.external(path)

    def _operator(self, namespace: str, name: str) -> Value:
        registered = self.operators.get(name)
        if registered is not None:
            return registered
        if namespace == "torch":
            return External(f"torch.{name}")
        return Kernel(name, LIBRARIES.get(namespace, "torch.ops"))

    def _of_library(self, module: str, name: str) -> Value:
        known = self.index.module(module)
        found = self.index.lookup(known, name) if known is not None else []
        for symbol in found:
            if isinstance(symbol, FunctionInfo):
                if boundaries.alive(self.platform, symbol):
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
        elif isinstance(function, LibraryFunction):
            name = boundaries.kernel_name(self.index, function.info)
            if name:
                library = LIBRARIES[function.info.module.name.partition(".")[0]]
                self.record(name, library, function.info.module.file, function.info.node.lineno)
            return self._result(function.info, args, kwargs)
        return Tensor()

    def _result(self, info: FunctionInfo, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What a library's function returns: for most kernels, a tensor like the first."""
        out = kwargs.get("out")
        if isinstance(out, Tensor):
            return out
        returns = getattr(info.node, "returns", None)
        text = ast.unparse(returns) if returns is not None else ""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if text.startswith(("bool", "int")) or "Tuple" in text or "tuple" in text:
            return UNKNOWN
        if tensors and "norm" in info.qualname:
            return Tensor(tensors[0].shape, tensors[0].dtype)
        if len(tensors) > 1 and {"gemm", "mm"} & set(info.qualname.split("_")):
            return product(tensors[0], tensors[1], kwargs)
        if tensors or text.endswith("Tensor"):
            first = tensors[0].shape if tensors else None
            dtype = tensors[0].dtype if tensors and "quant" not in info.qualname else None
            return Tensor((first[0], *([UNKNOWN] * (len(first) - 1))) if first else None, dtype)
        return UNKNOWN

    def record(self, name: str, source: str, file: str, line: int) -> None:
        """Notes a kernel's call, with the stack."""
        chain = tuple(
            Hop(frame.module.file, frame.line, frame.qualname, frame.call, tuple(frame.tests))
            for frame in reversed(self.stack)
        )
        event = Event(self.phase, name, source, file, line, chain)
        self.events.setdefault(event.key, event)

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
            return None if args[0].partition(".")[0] in environments.ABSENT else Opaque("spec")
        found = natives.standard(self, path, args, kwargs)
        if found is not MISSING:
            return found
        if path.endswith(".define") or path.endswith(".impl"):
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
        wrapped = [self._native_function(one) for one in args]
        try:
            result = function(*wrapped, **{key: self._native_function(one) for key, one in kwargs.items()})
        except Raised:
            raise
        except (KeyError, IndexError, ValueError, AttributeError, TypeError, StopIteration, ArithmeticError) as error:
            if self.frame.handlers:
                raise Raised(error) from None
            return UNKNOWN
        return self.resolve(result)

    def _native_function(self, value: Value) -> Value:
        if isinstance(value, (Function, Method, Builtin, Partial, Class)):
            return lambda *args, **kwargs: self.call(value, list(args), kwargs)
        return value

    # Iteration and types

    def iterate(self, value: Value) -> list[Value] | None:
        if isinstance(value, (list, tuple, set, frozenset, range, dict, deque, str)):
            return [self.resolve(one) for one in value]
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
_CALLERS = frozenset({"threading.Thread", "torch.library.register_fake", "atexit.register", "signal.signal"})
# Other names of torch's dtypes.
_ALIASES = {"torch.float": "torch.float32", "torch.half": "torch.float16", "torch.double": "torch.float64"}
_ALIASES |= {"torch.long": "torch.int64", "torch.int": "torch.int32", "torch.short": "torch.int16"}
