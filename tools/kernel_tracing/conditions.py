"""Conditions: what must hold for a hop, as the sources say it.

Three kinds: the key of the registry that chooses a class or function ("attention_backend=trtllm_mla",
"quantization=fp8"), the class behind a field that may hold several ("MoE layer"), and the text of the tests
around the call.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable

from tools.kernel_tracing.index import ClassInfo, FunctionInfo
from tools.kernel_tracing.rules import registries
from tools.kernel_tracing.solver import Context, Edge, Guard, Solver
from tools.kernel_tracing.values import ClassValue, Container, Function, Instance, Method, ValueSet

# A class that many keys may choose is not distinguished by any of them.
MAX_KEYS = 3
MAX_GUARDS = 2
MAX_LENGTH = 300


class Conditions:
    """Conditions of the hops of one solved analysis."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self._names: dict[Container, str] = {}
        self.keys: dict[ClassInfo | FunctionInfo, dict[str, None]] = defaultdict(dict)
        self._callees: dict[tuple[Context, ast.AST], list[Context]] = defaultdict(list)
        for caller, call, callee in solver.edges:
            self._callees[caller, call].append(callee)
        self._read_registries()
        self._inherit()

    def _read_registries(self) -> None:
        """Keys of dicts that have a name, for what is stored under them and for what it makes."""
        for key, values in self.solver.cells():
            if isinstance(key, tuple) and key[0] in ("global", "class"):
                for value in values:
                    if isinstance(value, Container) and value.label in ("Dict", "List"):
                        self._names.setdefault(value, str(key[2]))
        returned: dict[FunctionInfo, list[ClassInfo]] = defaultdict(list)
        for context in self.solver.contexts.values():
            for value in self.solver.peek(("return", context)):
                if isinstance(value, Instance):
                    returned[context.function].append(value.info)
        for key, values in self.solver.cells():
            if isinstance(key, tuple) and key[0] == "item" and key[1] in self._names and isinstance(key[2], str):
                dimension = registries.dimension(self._names[key[1]])
                if key[2] != "*" and dimension:
                    self._label(f"{dimension}={key[2]}", values, returned)

    def _label(self, label: str, values: ValueSet, returned: dict[FunctionInfo, list[ClassInfo]]) -> None:
        for value in values:
            if isinstance(value, ClassValue):
                self.keys[value.info][label] = None
            elif isinstance(value, (Function, Method)):
                self.keys[value.info][label] = None
                for info in returned.get(value.info, []):
                    self.keys[info][label] = None

    def _inherit(self) -> None:
        """What a chosen class constructs is chosen by the same key: Fp8Config makes Fp8LinearMethod."""
        for _ in range(2):
            found: dict[ClassInfo, dict[str, None]] = defaultdict(dict)
            for info, makers in self.solver.constructed.items():
                if info in self.keys:
                    continue
                for maker in makers:
                    if isinstance(maker.receiver, (Instance, ClassValue)) and maker.receiver.info is not info:
                        found[info] |= self.keys.get(maker.receiver.info, {})
                    if maker.receiver is None and maker.function in self.keys:
                        found[info] |= self.keys[maker.function]
            for info, labels in found.items():
                if labels:
                    self.keys[info] |= labels

    def of_edge(self, edge: Edge) -> str:
        """The condition of one hop."""
        parts = [self._choice(edge)] if self._choice(edge) else []
        return _join([*parts, *guard_texts(edge.guards)])

    def _choice(self, edge: Edge) -> str:
        """What chooses this callee among those that the call may enter."""
        others = self._callees[edge.caller, edge.call]
        if len(others) < 2:
            return ""
        callee = edge.callee
        keys = self.keys.get(callee.function, {})
        receivers = {context.receiver for context in others}
        if isinstance(callee.receiver, (Instance, ClassValue)) and len(receivers) > 1:
            keys = self.keys.get(callee.receiver.info, keys)
            if not 0 < len(keys) <= MAX_KEYS:
                return (
                    registries.kind(callee.receiver.info.name)
                    or f"{_callee_name(edge.call)} of {callee.receiver.info.name}"
                )
        registered = registration(callee.function)
        if not keys and registered and len({context.function for context in others}) > 1:
            return registered
        return " or ".join(keys) if 0 < len(keys) <= MAX_KEYS else ""


def _callee_name(call: ast.AST) -> str:
    target = call.func if isinstance(call, ast.Call) else call
    if isinstance(target, ast.Attribute):
        return target.attr
    return getattr(target, "id", "call")


def registration(function: FunctionInfo) -> str:
    """`register_fused_func("none", "triton")` for a function so decorated."""
    for decorator in getattr(function.node, "decorator_list", []):
        if not isinstance(decorator, ast.Call):
            continue
        keys = [str(argument.value) for argument in decorator.args if isinstance(argument, ast.Constant)]
        name = ast.unparse(decorator.func).rpartition(".")[2]
        if keys and len(keys) == len(decorator.args) and name.startswith("register"):
            return f"{name.removeprefix('register_')}={', '.join(keys)}"
    return ""


def guard_texts(guards: Iterable[Guard]) -> list[str]:
    """The innermost tests around a call, as source text."""
    texts = []
    for guard in list(guards)[-MAX_GUARDS:]:
        text = re.sub(r"\s+", " ", ast.unparse(guard.test))
        if guard.negated:
            text = text.removeprefix("not ") if text.startswith("not ") and " " not in text[4:] else f"not ({text})"
        texts.append(text if len(text) <= 90 else text[:87] + "...")
    return texts


def _join(parts: list[str]) -> str:
    text = " and ".join(dict.fromkeys(parts))
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 3] + "..."
