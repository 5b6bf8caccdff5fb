"""Class hierarchies for the checker, by bare names over all sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.kernel_tracing.verify.check_files import WORD, Sources
from tools.kernel_tracing.verify.check_source import Binding, last_name

# The name under which a module of SGLang lists the models that it defines.
ENTRY = "EntryClass"
ENTRIES = re.compile(rf"^{ENTRY}\b[^=\n]*=\s*(\[[^\]]*\]|\([^)]*\)|\w+)", re.M)


class Classes:
    """Answers questions about one source tree, and caches the answers."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._families: dict[str, set[str]] = {}
        self._ancestors: dict[str, set[str]] = {}
        self._served: set[str] = set()

    def class_of(self, file: str, scope: str) -> str:
        """The innermost class around a scope."""
        source = self.sources.get(file)
        parts = scope.split(".")
        for end in range(len(parts), 0, -1):
            if source is not None and source.is_class(".".join(parts[:end])):
                return parts[end - 1]
        return ""

    def related(self, one: str, other: str) -> bool:
        """Whether some class has both in its hierarchy, as for a mixin and its host."""
        return bool(self.descendants(one) & self.descendants(other))

    def descendants(self, name: str) -> set[str]:
        """The class and everything that inherits from it, by bare names."""
        if name not in self._families:
            family, waiting = {name}, [name]
            while waiting:
                for derived in self.sources.derived(waiting.pop()) - family:
                    family.add(derived)
                    waiting.append(derived)
            self._families[name] = family
        return self._families[name]

    def bases(self, name: str) -> set[str]:
        """The class and all from which it inherits, by bare names; empty if no source defines it."""
        if name not in self._ancestors:
            found: set[str] = set()
            waiting = [name]
            while waiting:
                one = waiting.pop()
                classes = self.sources.bases(one) if one and one not in found else []
                if classes:
                    found.add(one)
                    waiting += [base for bases in classes for base in bases]
            self._ancestors[name] = found
        return self._ancestors[name]

    def given_in_family(self, own: str, attribute: str) -> list[Binding]:
        """What an attribute is given by a class, by those that inherit from it, and by all others of their bases."""
        family = {base for one in self.descendants(own) for base in self.bases(one)}
        files = {source.name: source for one in family for source in self.sources.giving(attribute, f"class {one}")}
        return [
            given
            for source in files.values()
            for given in source.attributes[attribute]
            if self.class_of(given.file, given.scope) in family
        ]

    def calls_of_super(self, name: str, method: str) -> Iterator[tuple[str, str, ast.Call]]:
        """File, scope and call of each `super().method(...)` in a class that inherits from the class `name`."""
        family = self.descendants(name) - {name}
        files = {
            source.name: source for one in family if one.isidentifier() for source in self.sources.calling(method, one)
        }
        for source in files.values():
            for scope, call in source.calls[method]:
                owner = call.func.value if isinstance(call.func, ast.Attribute) else None
                is_super = isinstance(owner, ast.Call) and last_name(owner.func) == "super"
                if is_super and self.class_of(source.name, scope) in family:
                    yield source.name, scope, call

    def is_served(self, name: str) -> bool:
        """Whether a class, or one that inherits from it, is listed as the entry of its module: `EntryClass = Model`."""
        if not self._served:
            for text in self.sources.texts_with(ENTRY):
                self._served |= {word for entries in ENTRIES.findall(text) for word in WORD.findall(entries)}
        return bool(self.descendants(name) & self._served)

    def only_family(self, method: str, owner: str) -> bool:
        """Whether only the class hierarchy of `owner` has a method of that name."""
        for source in self.sources.mentioning(f"def {method}"):
            for qualified in source.definitions:
                parent, _, name = qualified.rpartition(".")
                if name == method and not self.related(parent.rpartition(".")[2] or qualified, owner):
                    return False
        return True
