"""The public kernels of a stack: SGLang's registry, what sgl_kernel, DeepGEMM and FlashMLA export, FlashInfer's API."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.follow.resolve import callers_of_ops, public_names
from tools.follow.signatures import python_files
from tools.follow.stacks import Stack

#: The decorator of FlashInfer's public functions.
_API = re.compile(r"(?:\w+\.)*flashinfer_api\b")
#: Packages whose public kernels are the functions that they export.
_EXPORTING = ("deep_gemm", "flash_mla", "sgl_kernel")

#: Methods of strings that the registry calls.
_TEXT: Mapping[str, Callable[..., str | bool]] = {"lstrip": str.lstrip, "startswith": str.startswith}


def public_kernels(stack: Stack) -> tuple[dict[str, list[str]], list[str]]:
    """Public kernels -> the paths that they stand for, and places in SGLang's registry that cannot be read.

    A kernel of the registry is named by its op (``activation.silu_and_mul``); the others, and torch ops, by their path.
    """
    found: dict[str, list[str]] = {}
    for package in _EXPORTING:
        if package in stack.owners:
            paths = [f"{package}.{name}" for name in public_names(stack.roots, package)]
            found |= {path: [path] for path in paths}
    if "sgl_kernel" in stack.owners:
        found |= {op: [op, *sorted(callers)] for op, callers in callers_of_ops(stack.roots, "sgl_kernel").items()}
    if "flashinfer" in stack.owners:
        found |= {path: [path] for path in _decorated(stack.roots.joinpath("flashinfer"))}
    unread: list[str] = []
    if "sglang" in stack.owners:
        for op, target in _registered(stack.roots.joinpath("sglang"), unread):
            found.setdefault(op, []).append(target)
    return found, unread


def _decorated(base: Path) -> Iterator[str]:
    """Functions, and classes with a method, that FlashInfer declares as its API."""
    for path in python_files(base, re.compile(r"^\s*@(?:\w+\.)*flashinfer_api\b", re.MULTILINE)):
        module = ".".join(("flashinfer", *path.relative_to(base).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            functions = [one for one in inside if isinstance(one, ast.FunctionDef)]
            marked = any(_API.match(ast.unparse(mark)) for one in functions for mark in one.decorator_list)
            if marked and isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                yield f"{module}.{node.name}"


def _registered(base: Path, unread: list[str]) -> Iterator[tuple[str, str]]:
    """(op, path of its function) of every `KernelSpec`; loops over literals are followed."""
    for path in python_files(base / "kernels", re.compile(r"\bKernelSpec\(")):
        place = path.relative_to(base.parent).as_posix()
        yield from _specs(ast.parse(path.read_text(encoding="utf-8")).body, {}, place, unread)


def _specs(body: list[ast.stmt], values: dict[str, Any], place: str, unread: list[str]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if len(targets) == 1 and isinstance(targets[0], ast.Name):
                values[targets[0].id] = _value(node.value, values)
        if isinstance(node, ast.For):
            items = _value(node.iter, values)
            for item in items if isinstance(items, (list, tuple)) else [None]:
                yield from _specs(node.body, values | _bound(node.target, item), place, unread)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _specs([*node.body, *getattr(node, "orelse", [])], values, place, unread)
        else:
            for one in ast.walk(node):
                if isinstance(one, ast.Call) and ast.unparse(one.func).split(".")[-1] == "KernelSpec":
                    fields = {word.arg: _value(word.value, values) for word in one.keywords}
                    op, target = fields.get("op"), fields.get("target")
                    if isinstance(op, str) and isinstance(target, str):
                        yield op, target.replace(":", ".")
                    else:
                        unread.append(f"{place}:{one.lineno}")


def _bound(target: ast.expr, item: Any) -> dict[str, Any]:
    if isinstance(target, ast.Tuple):
        known = isinstance(item, (list, tuple)) and len(item) == len(target.elts)
        bound: dict[str, Any] = {}
        for index, one in enumerate(target.elts):
            bound |= _bound(one, item[index] if known else None)
        return bound
    return {ast.unparse(target): item}


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """The value of what registries build texts from: literals, known names, f-strings, choices; None of the rest."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values.get(node.id)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(one, values) for one in node.elts]
    if isinstance(node, ast.JoinedStr):
        parts = [_value(one.value if isinstance(one, ast.FormattedValue) else one, values) for one in node.values]
        return "".join(map(str, parts)) if None not in parts else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left, values), _value(node.right, values)
        return left + right if isinstance(left, str) and isinstance(right, str) else None
    if isinstance(node, ast.IfExp):
        condition = _value(node.test, values)
        return None if condition is None else _value(node.body if condition else node.orelse, values)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        return _value(node.left, values) == _value(node.comparators[0], values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT:
        text, words = _value(node.func.value, values), [_value(one, values) for one in node.args]
        return _TEXT[node.func.attr](text, *words) if all(isinstance(one, str) for one in (text, *words)) else None
    return None
