"""Whether a call can enter a function, according to evidence in the sources.

Two questions are answered, both backwards from the call. Which definition does a plain name lead to (scopes, imports,
re-exports)? And which expressions may have supplied a value (assignments, attributes of that name anywhere, arguments,
defaults, returns, registries, decorators)? Types are not inferred: a class counts as a value's class if some expression
that supplies the value names the class, a subclass that inherits the method, or an annotated base.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from tools.kernel_tracing.verify.check_arguments import given, is_number
from tools.kernel_tracing.verify.check_classes import Classes
from tools.kernel_tracing.verify.check_files import Sources
from tools.kernel_tracing.verify.check_names import Names
from tools.kernel_tracing.verify.check_source import Binding, FunctionNode, Site, SourceFile, last_name
from tools.kernel_tracing.verify.check_values import HANDS_OUT, is_value, value_parts

# Functions that are entered without being named: by calling a class or an object, or by statements and operators.
CONSTRUCTORS = frozenset(("__init__", "__new__", "__post_init__"))
CALLS = frozenset(("__call__", "forward"))
APPLIES = frozenset(("forward", "backward"))  # Class.apply(...) of a torch.autograd.Function runs these.
# What the server calls the model that it serves, which may be any that its module lists as an entry.
SERVED = "model"
# The most calls of results of calls to follow; decorator factories have three.
MOST_CALLS = 4
# Steps of evidence to follow before giving up. Beyond this, everything is connected with everything.
FARTHEST = 600
# What may be handed through a call is this doubtful.
DOUBTFUL = 5


class Target(NamedTuple):
    """The function that a call must enter.

    Attributes:
        file, function: where it is.
        name: its last name.
        owner: its class; "" if it is not a method.
    """

    file: str
    function: str
    name: str
    owner: str


class Links:
    """Answers questions about one source tree, and caches the answers."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.classes = Classes(sources)
        self.names = Names(sources)
        self._suppliers: dict[str, list[Binding]] = {}
        self._escaped: dict[str, bool] = {}
        self._expanded: dict[tuple[str, str, int, str, int], list[tuple[int, Binding]]] = {}

    def target(self, file: str, function: str) -> Target:
        """The function of a frame."""
        parent, _, name = function.rpartition(".")
        source = self.sources.get(file)
        owner = parent.rpartition(".")[2] if source is not None and source.is_class(parent) else ""
        return Target(file, function, name, owner)

    def enters(self, site: Site, file: str, target: Target) -> bool:
        """Whether the call at `site` in `file` can enter `target`."""
        node = site.node
        callee = node.func if isinstance(node, ast.Call) else node
        if isinstance(callee, ast.Attribute):
            if callee.attr == target.name and target.owner:
                if last_name(callee.value) == SERVED and self.classes.is_served(target.owner):
                    return True
                verdict = self._receiver(callee.value, site, file, target)
                if verdict is not None:
                    return verdict or self._lent(file, site.scope, target)
                found = self.reaches([Binding(file, site.scope, callee.value)], target, objects=True)
                return bool(found or self.classes.only_family(target.name, target.owner))
            if callee.attr == "apply" and target.name in APPLIES and target.owner:
                return bool(self.reaches([Binding(file, site.scope, callee.value)], target, objects=True))
            if callee.attr == "apply":
                entered = self._methods(self.names.resolve(file, site.scope, last_name(callee.value)), APPLIES)
                return bool(self.reaches(entered, target, objects=False))
            if ast.unparse(callee.value).startswith("torch.ops.") and self._registered(callee.attr, target):
                return True
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        start = [Binding(file, site.scope, callee)]
        found = self.reaches(start, target, objects=target.name in CALLS | CONSTRUCTORS)
        if found:
            return True
        own = self.classes.class_of(file, site.scope)
        if isinstance(callee, ast.Name) and callee.id == "cls" and own and target.name in CONSTRUCTORS:
            return self.classes.related(own, target.owner)
        # A callback given to the callee, if it is named and not called here.
        if any(self._is_given(Binding(file, site.scope, argument), target) for argument in arguments):
            return True
        name = last_name(callee)
        suppliers = [*self.names.resolve(file, site.scope, name), *self._attribute(name)] if name else []
        values = [one for one in suppliers if isinstance(one.node, ast.expr)]
        # An object that is called runs what was assigned to its forward.
        if values and not any(isinstance(one.node, ast.FunctionDef) for one in suppliers):
            patches = (one for one in self._attribute("forward") if isinstance(one.node, ast.expr))
            if any(self._is_given(one, target) for one in patches):
                return True
        # Callbacks may travel farther than the search for values. Then an annotation must declare a Callable.
        declared = (last_name(part) for one in values if one.file == file for part in ast.walk(one.node))
        return found is None and "Callable" in declared and self._escapes(target)

    def given_by(self, site: Site, file: str, target: Target, callers: Iterable[tuple[str, Site]]) -> bool:
        """Whether a call of a parameter enters `target` with what one of the `callers` of its function hands over."""
        source = self.sources.get(file)
        node = site.node.func if isinstance(site.node, ast.Call) else site.node
        method = node.attr if isinstance(node, ast.Attribute) else ""
        value = node.value if isinstance(node, ast.Attribute) else node
        function = source.definitions.get(site.scope) if source is not None else None
        if not isinstance(value, ast.Name) or not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if method and method != target.name:
            return False
        in_class = bool(self.classes.class_of(file, site.scope))
        start = [
            Binding(place, caller.scope, argument)
            for place, caller in callers
            if isinstance(caller.node, ast.Call)
            for argument in given(caller.node, function, value.id, in_class)
        ]
        return bool(self.reaches(start, target, objects=bool(method) or target.name in CALLS | CONSTRUCTORS))

    def _registered(self, operator: str, target: Target) -> bool:
        """Whether a call or a decorator registers the target as the torch operator of that name."""
        source = self.sources.get(target.file)
        definition = source.definitions.get(target.function) if source else None
        if source is None or definition is None:
            return False
        for call in (call for calls in source.calls.values() for _, call in calls):
            parts = [*call.args, *(keyword.value for keyword in call.keywords)]
            texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
            if any(text == operator or text.endswith(f"::{operator}") for text in texts) and (
                call in definition.decorator_list or target.name in map(last_name, parts)
            ):
                return True
        # Registered by a decorator under its own name.
        return target.name == operator and bool(definition.decorator_list)

    def _is_given(self, argument: Binding, target: Target) -> bool:
        if self._names(argument.node, argument, target):
            return True
        names = [part.id for part, more, _ in value_parts(argument.node) if isinstance(part, ast.Name) and not more]
        found = [one for name in names for one in self.names.resolve(argument.file, argument.scope, name)]
        return any(self._defines(one, target) for one in found)

    def _defines(self, binding: Binding, target: Target) -> bool:
        node = binding.node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or binding.parameter or binding.calls:
            return False
        return (binding.file, ".".join(filter(None, (binding.scope, node.name)))) == (target.file, target.function)

    def _escapes(self, target: Target) -> bool:
        """Whether the target function is used as a value somewhere: stored, passed or returned instead of called."""
        if target.name in CALLS | CONSTRUCTORS:
            return False
        if target.name not in self._escaped:
            self._escaped[target.name] = any(
                is_value(source, target.name) for source in self.sources.mentioning(target.name)
            )
        return self._escaped[target.name]

    @staticmethod
    def _methods(bindings: Iterable[Binding], names: frozenset[str]) -> list[Binding]:
        """Methods with these names of the classes in `bindings`, whose decorators a call may enter."""
        return [
            Binding(one.file, f"{one.scope}.{one.node.name}".lstrip("."), part)
            for one in bindings
            if isinstance(one.node, ast.ClassDef)
            for part in one.node.body
            if isinstance(part, ast.FunctionDef) and part.name in names
        ]

    def _lent(self, file: str, scope: str, target: Target) -> bool:
        """Whether the method around `scope` is called as `Class.method(self)` by a class related to the target's."""
        own = self.classes.class_of(file, scope)
        method = scope.partition(f"{own}.")[2].partition(".")[0]
        for source in self.sources.calling(method, f"{own}.{method}"):
            for place, call in source.calls[method]:
                given = call.args[:1]
                if isinstance(call.func, ast.Attribute) and last_name(call.func.value) == own and given:
                    owner = self.classes.class_of(source.name, place)
                    if last_name(given[0]) == "self" and owner and self.classes.related(owner, target.owner):
                        return True
        return False

    # A method called on self, super or a class: the classes must be related.

    def _receiver(self, receiver: ast.expr, site: Site, file: str, target: Target) -> bool | None:
        own = self.classes.class_of(file, site.scope)
        if isinstance(receiver, ast.Name) and receiver.id in ("self", "cls") and own:
            return self.classes.related(own, target.owner)
        if isinstance(receiver, ast.Call) and last_name(receiver.func) == "super" and own:
            return own != target.owner and self.classes.related(own, target.owner)
        return None

    # Values.

    def reaches(self, start: Iterable[Binding], target: Target, objects: bool) -> bool | None:
        """Whether `start` may evaluate to the target function or, if `objects`, to an object of its class.

        None if there are more than FARTHEST steps to follow.
        """
        # The least doubtful steps come first, so that FARTHEST only cuts off doubtful ones.
        waiting = [(0, number, binding) for number, binding in enumerate(start)]
        seen: set[tuple[str, str, int, str, int]] = set()
        added = len(waiting)
        while waiting:
            if len(seen) >= FARTHEST:
                return None
            cost, _, binding = heappop(waiting)
            key = (binding.file, binding.scope, id(binding.node), binding.parameter, binding.calls)
            if key in seen:
                continue
            seen.add(key)
            node = binding.node
            if self._defines(binding, target):
                return True
            if isinstance(node, ast.ClassDef):
                # A class is constructed and an object of it is called: there is a call in between.
                constructed = target.name not in CONSTRUCTORS or binding.calls == 0
                if objects and constructed and target.owner and self._inherits(node.name, target):
                    return True
                continue
            elif isinstance(node, ast.expr) and self._names(node, binding, target):
                return True
            if key not in self._expanded:
                self._expanded[key] = list(self._expand(binding))
            for step, further in self._expanded[key]:
                added += 1
                heappush(waiting, (cost + step + self._frequency(further.node), added, further))
        return False

    def _frequency(self, node: ast.AST) -> int:
        """How doubtful an attribute is because of its name, and how long it takes to look into it."""
        if not isinstance(node, ast.Attribute) or (isinstance(node.value, ast.Name) and node.value.id == "self"):
            return 0
        return _doubt(self.sources.mentions(node.attr))

    def _inherits(self, name: str, target: Target) -> bool:
        # A subclass has the target's method; an annotation may name a base instead of the class.
        return name in self.classes.descendants(target.owner) or target.owner in self.classes.descendants(name)

    def _names(self, node: ast.AST, binding: Binding, target: Target) -> bool:
        """Whether an expression names the target itself: a bound method, a lambda, a method's name as a string."""
        for part, more, _ in value_parts(node):
            if binding.calls + more:
                continue
            if isinstance(part, ast.Lambda) and target.name == "<lambda>" and binding.file == target.file:
                return True
            if isinstance(part, ast.Attribute) and part.attr == target.name and target.owner:
                if last_name(part.value) == SERVED and self.classes.is_served(target.owner):
                    return True
                if not isinstance(part.value, ast.Name) or part.value.id not in ("self", "cls"):
                    return target.name not in CALLS | CONSTRUCTORS
                own = self.classes.class_of(binding.file, binding.scope)
                if self.classes.related(own, target.owner):
                    return True
            if isinstance(part, ast.Constant) and part.value == target.name and target.name not in CALLS:
                return True
            if isinstance(part, ast.JoinedStr) and part.values and isinstance(part.values[0], ast.Constant):
                prefix = str(part.values[0].value)
                if len(prefix) > 3 and target.name.startswith(prefix):
                    return True
        return False

    def _expand(self, binding: Binding) -> Iterator[tuple[int, Binding]]:
        """What may have supplied a binding's value, and how doubtful that is."""
        node, file, scope, calls = binding.node, binding.file, binding.scope, binding.calls
        source = self.sources.get(file)
        if source is None:
            return
        if binding.parameter and is_number(node, binding.parameter):
            return
        if binding.parameter:
            yield from ((2, one._replace(calls=calls)) for one in self._arguments(source, binding))
        elif isinstance(node, ast.Import):
            return
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = f"{scope}.{node.name}" if scope else node.name
            reading = any(last_name(decorator).endswith("property") for decorator in node.decorator_list)
            if calls or reading:
                for part in ast.walk(node):
                    if isinstance(part, (ast.Return, ast.Yield, ast.YieldFrom)) and part.value is not None:
                        yield 1, Binding(file, inside, part.value, "", calls - (not reading))
                if node.returns is not None:
                    yield 2, Binding(file, scope, node.returns)
            for decorator in node.decorator_list:
                yield 1, Binding(file, scope, decorator, "", min(calls + 1, MOST_CALLS))
        elif isinstance(node, ast.expr):
            for part, more, step in value_parts(node):
                number = min(calls + more, MOST_CALLS)
                if step >= DOUBTFUL and part is not node:
                    yield step - 1, Binding(file, scope, part, "", number)  # looked into if need be
                elif isinstance(part, ast.Name):
                    found = self.names.resolve(file, scope, part.id) + self._own_class(file, scope, part.id)
                    for place in {file: 0, **{one.file: 0 for one in found}}:
                        container = self.sources.get(place)
                        found = found + (container.contents.get(part.id, []) if container else [])
                    yield from ((step, one._replace(calls=number)) for one in found)
                elif isinstance(part, ast.Attribute):
                    if self.names.is_outside(file, scope, part) or (number and part.attr in HANDS_OUT):
                        continue  # what such a method returns is among the parts
                    members = list(self.names.member(file, scope, part)) or self._of_object(part, file, scope)
                    # A value given to an attribute of some object may belong to another object.
                    own = isinstance(part.value, ast.Name) and part.value.id in ("self", "cls")
                    step += 1 if own else 2
                    near = self._owners(part.value, file, scope)
                    for one in members:
                        far = 0 if self.classes.class_of(one.file, one.scope) in near else _doubt(len(members))
                        yield step + far, one._replace(calls=number)
                elif isinstance(part, ast.Lambda) and number:
                    yield step, Binding(file, f"{scope}.<lambda>".lstrip("."), part.body, "", number - 1)

    def _own_class(self, file: str, scope: str, name: str) -> list[Binding]:
        """The class of `self`, where `self` is handed over."""
        source, own = self.sources.get(file), self.classes.class_of(file, scope)
        qualified = scope.partition(f"{own}.")[0] + own
        node = source.definitions.get(qualified) if source is not None and name == "self" and own else None
        return [Binding(file, qualified.rpartition(".")[0], node)] if isinstance(node, ast.ClassDef) else []

    def _of_object(self, node: ast.Attribute, file: str, scope: str) -> list[Binding]:
        """What an attribute is given: for self, by the related classes if they assign it; otherwise anywhere."""
        own = self.classes.class_of(file, scope)
        own_object = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if own and own_object and (near := self.classes.given_in_family(own, node.attr)):
            return near
        # Suppliers in the same file come first, so that the search ends sooner.
        return sorted(self._attribute(node.attr), key=lambda one: one.file != file)

    def _owners(self, owner: ast.expr, file: str, scope: str) -> set[str]:
        """Classes that the expression before a dot is an object of, as far as the nearest assignments name them."""
        if isinstance(owner, ast.Name):
            found = [] if owner.id in ("self", "cls") else self.names.resolve(file, scope, owner.id)
        else:
            found = self._of_object(owner, file, scope) if isinstance(owner, ast.Attribute) else []
        made = {last_name(one.node.func) for one in found if isinstance(one.node, ast.Call)}
        return {base for name in made for base in self.classes.bases(name)}

    def _attribute(self, name: str) -> list[Binding]:
        """What attributes, keywords, fields and methods called `name` are given, anywhere."""
        if name not in self._suppliers:
            found = []
            for source in self.sources.giving(name):
                found += source.attributes[name]
            self._suppliers[name] = found
        return self._suppliers[name]

    def _arguments(self, source: SourceFile, binding: Binding) -> Iterator[Binding]:
        """What a parameter is given: by calls of its function, found by the function's name, and by decoration."""
        node = binding.node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        parts = [part for part in binding.scope.split(".") if part != "<lambda>"]
        method = bool(self.classes.class_of(source.name, binding.scope))
        name = self._called_name(node, parts)
        found = False
        for other in self.sources.calling(name) if name else ():
            for scope, call in other.calls[name]:
                found = True
                yield from (Binding(other.name, scope, value) for value in given(call, node, binding.parameter, method))
        if isinstance(node, ast.FunctionDef) and node.name in CONSTRUCTORS and method:
            for place, scope, call in self.classes.calls_of_super(parts[-2], node.name):
                yield from (Binding(place, scope, value) for value in given(call, node, binding.parameter, method))
        if not found or node.name in CONSTRUCTORS if isinstance(node, ast.FunctionDef) else not found:
            # It is called under another name, such as super().__init__; arguments can still be found by keyword.
            if binding.parameter in ("self", "cls"):
                return
            yield from (supply for supply in self._attribute(binding.parameter) if isinstance(supply.node, ast.expr))
        # A decorator, or the function inside a decorator factory, is given what it decorates.
        for decorator in parts[-2:]:
            for other in self.sources.decorating(decorator):
                yield from other.decorated[decorator]

    @staticmethod
    def _called_name(node: FunctionNode | ast.Lambda, parts: list[str]) -> str:
        if isinstance(node, ast.Lambda):
            return ""
        # Calling the class calls its constructor.
        return parts[-2] if node.name in CONSTRUCTORS and len(parts) > 1 else node.name


def _doubt(many: int) -> int:
    """How doubtful it is that one of many places is the one: hundreds of objects have an attribute `value`."""
    return max(many.bit_length() - 3, 0)
