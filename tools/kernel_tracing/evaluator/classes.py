"""Classes: made from their definitions."""

from __future__ import annotations

import ast

from tools.kernel_tracing.evaluator.core import Core, Frame
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    Builtin,
    Class,
    External,
    Function,
    Instance,
    Opaque,
    Property,
    Return,
    Scope,
    Value,
    Wrapped,
)

_ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
# Classes of libraries that derive from torch.nn.Module.
_MODULES = {"PreTrainedModel"}


def fields_of(core: Core, info: Class) -> list[str]:
    """The annotated fields of a dataclass or named tuple, base classes first."""
    found = (core.index.fact(_annotated, cls.node) for cls in reversed(info.order))
    return list(dict.fromkeys(name for names in found for name in names))


def _annotated(node: ast.ClassDef) -> list[str]:
    return [
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        if "ClassVar" not in ast.unparse(part.annotation)
    ]


def _merge(lists: list[list[Class]]) -> list[Class]:
    """C3 linearisation."""
    result: list[Class] = []
    while any(lists):
        lists = [one for one in lists if one]
        head = next((one[0] for one in lists if not any(one[0] in other[1:] for other in lists)), lists[0][0])
        result.append(head)
        lists = [[cls for cls in one if cls is not head] for one in lists]
    return result


class Classes(Core):
    """Classes: made from their definitions."""

    def make_class(self, node: ast.ClassDef) -> Class:
        frame = self.frame
        bases: list[Value] = []
        for base in node.bases:
            value = self.evaluate(base)
            bases += value if isinstance(value, tuple) else [value]
        qualname = f"{frame.qualname}.{node.name}" if frame.qualname else node.name
        info = Class(node.name, qualname, frame.module, node, bases)
        self.classes.append(info)
        parents = [base for base in bases if isinstance(base, Class)]
        info.order = [info, *_merge([list(parent.order) for parent in parents] + [parents])]
        externals = {base.path for base in bases if isinstance(base, External)}
        if any(path.rpartition(".")[2] in _MODULES for path in externals):
            externals.add("torch.nn.Module")
        externals |= {f"builtins.{base.__name__}" for base in bases if isinstance(base, type)}
        info.externals = frozenset(externals.union(*(parent.externals for parent in parents)))
        if any(path.rpartition(".")[2] in _ENUMS for path in info.externals):
            info.kind = "enum"
        elif any(parent.kind for parent in parents):
            info.kind = next(parent.kind for parent in parents if parent.kind)
        elif "typing.NamedTuple" in info.externals:
            info.kind = "namedtuple"
        elif any(path in ("msgspec.Struct", "pydantic.BaseModel") for path in info.externals):
            info.kind = "dataclass"
        self._class_body(info, node, frame)
        return info

    def _class_body(self, info: Class, node: ast.ClassDef, frame: Frame) -> None:
        scope = Scope(info.names, frame.scope, frame.module)
        self.stack.append(Frame(frame.module, info.qualname, scope, line=node.lineno))
        depth = len(self.stack)
        try:
            self.run(node.body)
        except Return:
            pass
        finally:
            del self.stack[depth - 1 :]
        info.names = scope.names
        for value in info.names.values():
            self._adopt(info, value)
        if info.kind == "enum":
            self._members(info)
        for name, value in list(info.names.items()):
            if isinstance(value, Instance) and value.cls.find("__set_name__") is not MISSING:
                self.call(self.load(value, "__set_name__"), [info, name], {})

    def _adopt(self, info: Class, value: Value) -> None:
        """Functions of a class know their class, and their free variables are those around the class."""
        for function in (
            value,
            getattr(value, "function", None),
            getattr(value, "getter", None),
            getattr(value, "setter", None),
        ):
            if (
                isinstance(function, Function)
                and function.owner is None
                and function.qualname.startswith(info.qualname)
            ):
                function.owner = info
                if function.scope.names is info.names and function.scope.parent is not None:
                    function.scope = function.scope.parent

    def _members(self, info: Class) -> None:
        number = 0
        for name, value in list(info.names.items()):
            if name.startswith("_") or isinstance(value, (Function, Property, Wrapped, Class, Builtin)):
                continue
            if isinstance(value, Opaque) and value.path.startswith("enum.auto"):
                number += 1
                value = name.lower() if any("Str" in path for path in info.externals) else number
            elif isinstance(value, int):
                number = value
            alias = next((one for one in info.members.values() if one.fields["value"] == value), None)
            member = alias or Instance(info, {"name": name, "value": value, "_value_": value})
            info.members[name] = info.names[name] = member
