"""Guards: what the tests around a call require, in terms that users of the framework know if they test a choice.

Recognises enum members (compared directly or tested by a predicate of the enum, also through a local name, a module's
flag or a one-line function), settings compared with strings, and GPU generations. All other tests keep the text of the
source.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Sequence

from tools.kernel_tracing.configuration.condition_text import SPECULATIVE, Part, member, merge, named, setting
from tools.kernel_tracing.configuration.enumerations import is_enum, is_plain_enum, members_of, returned, true_members
from tools.kernel_tracing.configuration.names import Names, symbols
from tools.kernel_tracing.engine.solver import Context, Guard, Solver
from tools.kernel_tracing.engine.values import Instance
from tools.kernel_tracing.rules import gpu_generations, registries
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo
from tools.kernel_tracing.source.syntax import dotted_name

# The most other tests shown per hop; the innermost ones say most.
MAX_GUARDS = 2
# The most characters of a test; longer ones are cut.
MAX_TEST = 90
# With more values than this, the name of the predicate says more.
MAX_MEMBERS = 6
MAX_NAMED = 3
_MAX_DEPTH = 4
_INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
}
_INVERSE |= {after: before for before, after in _INVERSE.items()}


class GuardReader:
    """Reads tests, using what the solved analysis knows about the functions that they call."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.index = solver.index
        self.callees: dict[tuple[Context, ast.AST], list[Context]] = defaultdict(list)
        for caller, call, callee in solver.edges:
            self.callees[caller, call].append(callee)
        self.settings = {
            name: annotation
            for module in self.index.parsed()
            for info in module.classes.values()
            if info.name == registries.SETTINGS_CLASS
            for name, annotation in info.annotations.items()
        }
        self.names = Names(solver)
        self._predicates: dict[str, list[FunctionInfo]] = defaultdict(list)
        for module in self.index.parsed():
            for info in module.classes.values():
                if is_plain_enum(info):
                    for name, method in info.methods.items():
                        self._predicates[name].append(method)
        self._contexts: dict[FunctionInfo, list[Context]] = defaultdict(list)
        for context in solver.contexts.values():
            self._contexts[context.function].append(context)

    def parts(self, guards: Sequence[Guard], context: Context) -> list[Part]:
        """What the guards of a call in this context require: every choice, and the innermost other tests."""
        chosen: list[Part] = []
        around: list[list[Part]] = []
        before: list[list[Part]] = []
        for guard in guards:
            found = self.read(guard.test, guard.negated, context.function, context)
            chosen += [part for part in found if part.dimension]
            if guard.early != "raise":
                texts = [part for part in found if not part.dimension]
                (before if guard.early else around).append(texts)
        kept = [texts for texts in around if texts][-MAX_GUARDS:]
        early = [texts for texts in before if texts][len(kept) - MAX_GUARDS :] if len(kept) < MAX_GUARDS else []
        return merge([*chosen, *(part for texts in (*early, *kept) for part in texts)])

    def read(
        self, test: ast.expr, negated: bool, function: FunctionInfo, context: Context | None, depth: int = 0
    ) -> list[Part]:
        """Parts that must all hold for a test to hold (or, if negated, to fail); none if the platform decides it."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.read(test.operand, not negated, function, context, depth)
        if isinstance(test, ast.BoolOp):
            # Operands that the platform decides carry no further information.
            operands = [operand for operand in test.values if self.names.decided(operand, function) is None]
            if isinstance(test.op, ast.Or) == negated:
                return [part for operand in operands for part in self.read(operand, negated, function, context, depth)]
            if len(operands) == 1:
                return self.read(operands[0], negated, function, context, depth)
            either = [self.read(operand, negated, function, context, depth) for operand in operands]
            return _united(either) or [_text(ast.BoolOp(test.op, operands) if operands else test, negated)]
        if self.names.decided(test, function) is not None:
            return []
        return self._choice(test, negated, function, context, depth) or [_text(test, negated)]

    def _choice(
        self, test: ast.expr, negated: bool, function: FunctionInfo, context: Context | None, depth: int
    ) -> list[Part]:
        """What one comparison, call or name requires of a choice; empty if it does not test one."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._comparison(test, negated, function)
        asked = test.func if isinstance(test, ast.Call) else test
        name = asked.attr if isinstance(asked, ast.Attribute) else asked.id if isinstance(asked, ast.Name) else ""
        generation = gpu_generations.generation(name)
        if generation:
            return [named("GPU", generation, f"GPU: {generation}", negated)]
        if isinstance(test, ast.Name):
            return self._named(test, negated, function, context, depth)
        if isinstance(test, ast.Attribute):
            return self._flag(test, negated) or self._field(test, negated, function, context, depth)
        if not isinstance(test, ast.Call):
            return []
        called = self._called(test, function, context)
        if called is None:
            return []
        subject = ast.unparse(test.func.value) if isinstance(test.func, ast.Attribute) else ""
        if called.owner is not None and is_enum(self.index, called.owner):
            members = true_members(self.names, called, test)
            return self._enum(called.owner, members, subject, negated, called) if members else []
        return self._one_line(test, called, negated, function, context, depth)

    def _called(self, call: ast.Call, function: FunctionInfo, context: Context | None) -> FunctionInfo | None:
        """The one function that a call in a test enters."""
        found = {callee.function for callee in self.callees.get((context, call), [])} if context else set()
        if len(found) == 1:
            return found.pop()
        if found or not isinstance(call.func, ast.Attribute):
            return None
        if dotted_name(call.func.value) == "self" and function.owner:
            return function.owner.methods.get(call.func.attr)
        # Nothing enters a predicate of another platform, but its name may occur in only one enumeration.
        predicates = self._predicates.get(call.func.attr, [])
        return predicates[0] if len(predicates) == 1 else None

    def _named(
        self, test: ast.Name, negated: bool, function: FunctionInfo, context: Context | None, depth: int
    ) -> list[Part]:
        """A name that is assigned once is read as its value, if that tests a choice."""
        if depth >= _MAX_DEPTH:
            return []
        given = self.names.given(test.id, function)
        if given is None:
            return []
        value, owner = given
        found = self.read(value, negated, owner, context if owner is function else None, depth + 1)
        return found if all(part.dimension for part in found) else []

    def _flag(self, test: ast.Attribute, negated: bool) -> list[Part]:
        """`server_args.enable_x`: a setting that is on or off."""
        annotation = self.settings.get(test.attr)
        held = dotted_name(test.value.func if isinstance(test.value, ast.Call) else test.value)
        if annotation is None or ast.unparse(annotation) != "bool" or not held.endswith(registries.SETTINGS_HOLDER):
            return []
        return [setting(test.attr, ["false" if negated else "true"])]

    def _field(
        self, test: ast.Attribute, negated: bool, function: FunctionInfo, context: Context | None, depth: int
    ) -> list[Part]:
        """`self.enabled` is read as what its class assigns to it, if that is one choice and nothing else."""
        receiver = context.receiver if context is not None else None
        if depth >= _MAX_DEPTH or dotted_name(test.value) != "self" or not isinstance(receiver, Instance):
            return []
        given = [one for info in self.index.mro(receiver.info) for one in self.names.fields_of(info).get(test.attr, [])]
        if len(given) != 1 or isinstance(given[0][1], ast.Constant):
            return []
        method, value = given[0]
        inside = next((one for one in self._contexts.get(method, []) if one.receiver is receiver), None)
        found = self.read(value, negated, method, inside, depth + 1)
        return found if found and all(part.dimension for part in found) else []

    def _one_line(
        self,
        call: ast.Call,
        called: FunctionInfo,
        negated: bool,
        function: FunctionInfo,
        context: Context | None,
        depth: int,
    ) -> list[Part]:
        """A call of a function that only returns a test is read as that test, if it tests a choice."""
        value = returned(called)
        callees = self.callees.get((context, call), []) if context else []
        if value is None or depth >= _MAX_DEPTH or not callees:
            return []
        found = self.read(value, negated, called, callees[0], depth + 1)
        if len(found) != 1 or not found[0].dimension:
            return []
        arguments = ", ".join(ast.unparse(argument) for argument in call.args)
        part = found[0]
        return [Part(part.text, part.rank, part.dimension, part.values, f"{part.subject}({arguments})", part.negated)]

    def _comparison(self, test: ast.Compare, negated: bool, function: FunctionInfo) -> list[Part]:
        operator, right = test.ops[0], test.comparators[0]
        negated ^= isinstance(operator, (ast.NotEq, ast.IsNot, ast.NotIn))
        subject = ast.unparse(test.left)
        if isinstance(operator, (ast.Eq, ast.Is, ast.NotEq, ast.IsNot)):
            choices: Sequence[ast.expr] = [right]
        elif isinstance(operator, (ast.In, ast.NotIn)):
            choices = self.names.elements(right, function)
        else:
            choices = []
        owners = {self._enum_of(choice, function) for choice in choices}
        if len(owners) == 1 and (owner := owners.pop()) is not None:
            members = [choice.attr for choice in choices if isinstance(choice, ast.Attribute)]
            return self._enum(owner, members, subject, negated)
        if registries.is_configuration(subject) and ast.unparse(right) == "None":
            return [setting("quantization", ["none"], f"{subject}.get_name()", negated)]
        literals = [choice.value for choice in choices if isinstance(choice, ast.Constant)]
        texts = [literal for literal in literals if isinstance(literal, str)]
        dimension = registries.asked(subject, self.settings) if 0 < len(texts) <= MAX_MEMBERS else ""
        if dimension and len(texts) == len(choices):
            return [setting(dimension, self._native(texts), subject, negated)]
        return self._capability(test, negated ^ isinstance(operator, (ast.NotEq, ast.IsNot, ast.NotIn)))

    def _capability(self, test: ast.Compare, negated: bool) -> list[Part]:
        left, right = test.left, test.comparators[0]
        operator = _OPERATORS.get(_INVERSE.get(type(test.ops[0]), ast.Eq) if negated else type(test.ops[0]), "")
        major = isinstance(left, ast.Subscript) and isinstance(left.slice, ast.Constant) and left.slice.value == 0
        target = left.value if isinstance(left, ast.Subscript) else left
        name = dotted_name(target.func if isinstance(target, ast.Call) else target).rpartition(".")[2]
        if not isinstance(right, ast.Constant) or not isinstance(right.value, int):
            return []
        text = gpu_generations.compared(name, operator, right.value, major)
        return [named("GPU", text, f"GPU: {text}")] if text else []

    def _enum_of(self, node: ast.expr, function: FunctionInfo) -> ClassInfo | None:
        """The enumeration E in `E.MEMBER`."""
        if not isinstance(node, ast.Attribute):
            return None
        for symbol in symbols(self.index, function, node.value):
            if isinstance(symbol, ClassInfo) and is_enum(self.index, symbol) and node.attr in members_of(symbol):
                return symbol
        return None

    def _native(self, values: Sequence[str]) -> Sequence[str]:
        """The values, without those for other platforms."""
        return [value for value in values if not self.solver.platform.name_is_foreign(value)] or values

    def _enum(
        self,
        owner: ClassInfo,
        members: Sequence[str],
        subject: str,
        negated: bool,
        predicate: FunctionInfo | None = None,
    ) -> list[Part]:
        """Members as a part: `moe_runner_backend=triton` for a setting, otherwise `AttnForwardMethod.MLA`.

        For many members, the predicate's name says more: `ForwardMode.is_extend()`.
        """
        if len(members) > MAX_MEMBERS and predicate is None:
            return []
        values = members_of(owner)
        if "from_string" in owner.methods or all(isinstance(value, str) for value in values.values()):
            dimension = registries.enum_dimension(owner.name, self.settings)
            spelled = [value if isinstance(value := values.get(name), str) else name for name in members]
            return [setting(dimension, spelled, subject, negated)]
        named_by = predicate.node.name if predicate and len(members) > MAX_NAMED else ""  # type: ignore[union-attr]
        parts = [member(owner.name, members, subject, negated, named_by)]
        if not negated and registries.is_speculative(owner.name, members):
            parts.append(SPECULATIVE)
        return parts


_OPERATORS = {ast.GtE: ">=", ast.Gt: ">", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "=="}


def _united(either: Sequence[list[Part]]) -> list[Part]:
    """One part for alternatives that are all values of the same choice; empty if they are not."""
    firsts = [parts[0] for parts in either if len(parts) == 1]
    keys = {(part.dimension, part.subject, part.rank) for part in firsts}
    if len(firsts) != len(either) or len(keys) != 1 or any(part.negated for part in firsts):
        return []
    dimension, subject, _ = keys.pop()
    values = [value for part in firsts for value in part.values]
    if not dimension or dimension == "GPU" or len(values) > MAX_MEMBERS:
        return []
    return [(member if "." in firsts[0].text.partition("=")[0] else setting)(dimension, values, subject)]


def _text(test: ast.expr, negated: bool) -> Part:
    """A test as written in the source, on one line."""
    if negated and isinstance(test, ast.Compare) and len(test.ops) == 1:
        test, negated = ast.Compare(test.left, [_INVERSE[type(test.ops[0])]()], test.comparators), False
    text = re.sub(r"\s+", " ", ast.unparse(test))
    if len(text) > MAX_TEST:
        text = _cut(text)
    if negated:
        text = f"not {text}" if re.fullmatch(r"[\w.]+(\([\w., ]*\))?", text) else f"not ({text})"
    elif isinstance(test, (ast.BoolOp, ast.IfExp)):
        text = f"({text})"
    return Part(text)


def _cut(text: str) -> str:
    """A text, cut if it is long, with its brackets and quotes closed."""
    closers, quote = "", ""
    for character in text[: MAX_TEST - 3]:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            closers = ")]}"["([{".index(character)] + closers
        elif character in ")]}":
            closers = closers[1:]
    return text[: MAX_TEST - 3] + "..." + quote + closers
