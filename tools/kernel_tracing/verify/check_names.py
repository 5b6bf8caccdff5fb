"""What plain names and dotted names of modules refer to, by scopes, imports and re-exports; for the checker."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.kernel_tracing.verify.check_files import Sources
from tools.kernel_tracing.verify.check_source import Binding


class Names:
    """Answers questions about one source tree."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def resolve(self, file: str, scope: str, name: str, depth: int = 0) -> list[Binding]:
        """What a plain name may refer to where it is used; imports are followed to definitions."""
        source = self.sources.get(file)
        if source is None or depth > 12:
            return []
        if near := self._nearest(file, scope, name):
            return [far for one in near for far in self._import(one, name, depth)]
        found = []
        for star in source.stars:
            module = self._module_name(file, star)
            if target := self.sources.module_file(module):
                found += self.resolve(target, "", name, depth + 1)
        return found

    def _nearest(self, file: str, scope: str, name: str) -> list[Binding]:
        """What binds a name in the innermost scope that does."""
        source = self.sources.get(file)
        parts = scope.split(".") if scope else []
        for end in range(len(parts), -1, -1):
            outer = ".".join(parts[:end])
            if source is None or (end < len(parts) and outer and source.is_class(outer)):
                continue  # names of a class are not visible in its methods
            if found := source.names.get((outer, name)):
                return found
        return []

    def _import(self, binding: Binding, name: str, depth: int) -> list[Binding]:
        node = binding.node
        if not isinstance(node, ast.ImportFrom):
            return [binding]
        module = self._module_name(binding.file, node)
        original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
        file = self.sources.module_file(module)
        return self.resolve(file, "", original, depth + 1) if file else []

    def _module_name(self, file: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = file.removesuffix(".py").split("/")
        parts = parts[: len(parts) - node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def member(self, file: str, scope: str, node: ast.Attribute) -> Iterator[Binding]:
        """`module.name`, if the value before the dot is an imported module."""
        names = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            value = value.value
        if not isinstance(value, ast.Name):
            return
        for module in self._modules(file, scope, value.id):
            dotted = ".".join([module, *reversed(names[1:])])
            if target := self.sources.module_file(dotted):
                yield from self.resolve(target, "", node.attr)

    def is_outside(self, file: str, scope: str, node: ast.expr) -> bool:
        """Whether a dotted name begins with something that is imported from outside the sources: `torch.nn.Module`."""
        while isinstance(node, ast.Attribute):
            node = node.value
        found = self._nearest(file, scope, node.id) if isinstance(node, ast.Name) else []
        modules = [name for one in found for name in self._imported(file, one.node)]
        packages = {name.partition(".")[0] for name in modules}
        return bool(modules) and len(modules) == len(found) and packages.isdisjoint(self.sources.packages)

    def _imported(self, file: str, node: ast.AST) -> list[str]:
        """The module that an import statement names first; none for other statements."""
        if isinstance(node, ast.ImportFrom):
            return [self._module_name(file, node)]
        return [node.names[0].name] if isinstance(node, ast.Import) else []

    def _modules(self, file: str, scope: str, name: str) -> Iterator[str]:
        source = self.sources.get(file)
        parts = scope.split(".") if scope else []
        bindings = [] if source is None else [
            binding for end in range(len(parts) + 1) for binding in source.names.get((".".join(parts[:end]), name), ())
        ]  # fmt: skip
        for binding in bindings:
            node = binding.node
            if isinstance(node, ast.Import):
                yield from (alias.name if alias.asname else alias.name.partition(".")[0] for alias in node.names
                            if (alias.asname or alias.name.partition(".")[0]) == name)  # fmt: skip
            elif isinstance(node, ast.ImportFrom):
                base = self._module_name(file, node)
                original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
                yield f"{base}.{original}"
