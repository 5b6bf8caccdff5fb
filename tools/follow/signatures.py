"""Signatures of functions, classes and torch ops, read from sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.follow.resolve import Found, find
from tools.follow.stacks import Stack

#: A parameter -> how it is passed and its default, as source; of a class, names begin with the method.
Signature = Mapping[str, str]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
OPS = "torch.ops."


@dataclass(frozen=True)
class Site:
    """Where a path is defined, and its signature; no signature if it is not Python."""

    path: str
    signature: Signature | None


def site_of(stack: Stack, path: str) -> Site | None:
    """The object that a path names in a stack; None if it names nothing there."""
    if path.startswith(OPS):
        calls = _calls(stack, path)
        return Site(path, calls) if calls is not None else None
    found = find(stack.roots, path)
    if found is None:
        return None
    return Site(f"{found.module}.{getattr(found.node, 'name', path.rpartition('.')[2])}", signature_of(found))


def signature_of(found: Found) -> Signature | None:
    """The signature of a function, or of the constructor and the public methods of a class."""
    if isinstance(found.node, ast.ClassDef):
        methods = {one.name: one for one in found.node.body if isinstance(one, ast.FunctionDef)}  # the last one counts
        return {
            f"{name}.{parameter}": text
            for name, method in methods.items()
            if name in ("__init__", "__call__") or not name.startswith("_")
            for parameter, text in {"": "method", **_parameters(method.args)}.items()
        }
    if isinstance(found.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _parameters(found.node.args)
    return None


def _parameters(arguments: ast.arguments) -> dict[str, str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = {one.arg: _default("", value) for one, value in zip(positional, defaults, strict=True)}
    if arguments.vararg:
        found[f"*{arguments.vararg.arg}"] = ""
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[one.arg] = _default("keyword ", value)
    if arguments.kwarg:
        found[f"**{arguments.kwarg.arg}"] = ""
    found.pop("self", None)
    return found


def _default(kind: str, value: ast.expr | None) -> str:
    return kind + ("" if value is None else f"={ast.unparse(value)}")


def _calls(stack: Stack, path: str) -> dict[str, str] | None:
    """How the library's Python calls a torch op: the number of positional arguments, and the keywords."""
    package = path.removeprefix(OPS).split(".")[0]
    calls = set[str]()
    for file in python_files(stack.roots.joinpath(package), re.compile(rf"\b{re.escape(path.rpartition('.')[2])}\b")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).removesuffix(".default") == path:
                calls.add(", ".join(["_"] * len(node.args) + [one.arg or "**" for one in node.keywords]))
    return {f"({one})": "" for one in sorted(calls)} or None


def python_files(directory: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """The Python files below a directory whose text the pattern matches, sorted."""
    for path in sorted(directory.rglob("*.py")):
        if pattern.search(path.read_text(encoding="utf-8", errors="replace")):
            yield path


def changes(old: Signature, new: Signature) -> list[str]:
    """The changes of the parameters; added methods do not count."""
    methods = {name for name in new if name.endswith(".")} - set(old)
    kept = {name: text for name, text in new.items() if f"{name.partition('.')[0]}." not in methods}
    found = [f"without {name}" for name in old if name not in kept]
    found += [
        f"added {name}{_spaced(text)}{_before(name, old, kept)}" for name, text in kept.items() if name not in old
    ]
    both = [name for name in old if name in kept]
    different = [name for name in both if old[name] != kept[name]]
    found += [f"{name}: {old[name] or 'required'} -> {kept[name] or 'required'}" for name in different]
    if both != [name for name in kept if name in old] and not _same_within_methods(both, kept):
        found.append("another order")
    return found


def _before(added: str, old: Signature, kept: Signature) -> str:
    """The old positional parameter that one was put before, as it takes its place in calls; empty if there is none."""
    names = list(kept)
    after = [name for name in names[names.index(added) + 1 :] if _owner(name) == _owner(added) and name in old]
    positional = [name for name in (added, *after[:1]) if not kept[name].startswith("keyword") and "*" not in name]
    return f" before {after[0]}" if len(positional) == 2 else ""


def _owner(name: str) -> str:
    return name.partition(".")[0] if "." in name else ""


def _spaced(text: str) -> str:
    return f" ({text.strip()})" if text.startswith("keyword") else text


def _same_within_methods(both: list[str], kept: Signature) -> bool:
    """Whether the parameters of each method are in the same order, though the methods are not."""
    owner = {name: _owner(name) for name in both}
    new = [name for name in kept if name in owner]
    return all(
        [name for name in both if owner[name] == one] == [name for name in new if owner[name] == one]
        for one in set(owner.values())
    )


def similarity(old: Signature | None, new: Signature | None) -> float:
    """The share of the old parameters that the new signature has; 0 if one is unknown."""
    if old is None or new is None:
        return 0.0
    return len(set(old) & set(new)) / len(old) if old else 1.0


def named(stack: Stack, names: set[str]) -> dict[str, list[Site]]:
    """Name -> functions and classes at the top level of any module, tests aside, whose name is or contains it."""
    found: dict[str, list[Site]] = {name: [] for name in names}
    choice = re.compile("|".join(sorted(map(re.escape, names))) or "$^")
    wanted = re.compile(rf"^(?:async )?(?:def|class) \w*(?:{choice.pattern})", re.MULTILINE)
    for package in stack.packages:
        base = stack.roots.joinpath(package)
        for path in python_files(base, wanted):
            if "test" in path.relative_to(base).parts:
                continue
            module = ".".join((package, *path.relative_to(base).with_suffix("").parts)).removesuffix(".__init__")
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, DEFINITIONS) and choice.search(node.name):
                    site = Site(f"{module}.{node.name}", signature_of(Found(module, node)))
                    for name in names:
                        if name in node.name:
                            found[name].append(site)
    return found
