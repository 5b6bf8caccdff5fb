"""Where tracing stops: functions whose implementation is native.

sgl_kernel and flashinfer are kernel libraries. One of their functions is a kernel if its body, or a function of the
library that it refers to, ends in a native call (`torch.ops`, a Triton launch, a loaded module), and if it works on
tensors. Other functions (queries, helpers, planning) are neither kernels nor entered. A native function that takes only
plain data, or returns a number, queries or configures the host: a workspace size, a handle, a registered buffer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tools.kernel_tracing.rules import data_types
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.libraries import LIBRARIES
from tools.kernel_tracing.source.syntax import dotted_name, walk

# Names that load or build native code, in any library.
_NATIVE = {"build_and_load", "load_inline", "load_module", "cdll", "CDLL", "compile_ops"}
# Methods of wrapper classes that plan on the host or manage workspaces.
_PLANNING = ("plan", "begin_forward", "end_forward", "reset_workspace", "__init__", "get_", "set_", "is_", "estimate")
# Functions that query or build something but launch nothing.
_QUERIES = ("is_", "can_", "has_", "gen_", "supports_", "should_", "_get_", "_is_", "set_")
# What a function named `get_...` computes on the GPU, if its signature does not say what it takes.
_COMPUTED = ("_tensor", "_metadata")


def is_library(module: str) -> bool:
    """Whether a module belongs to a kernel library."""
    return module.partition(".")[0] in LIBRARIES


def kernel_name(index: Index, function: FunctionInfo) -> str:
    """The name of a library's function if calling it calls a kernel, otherwise ""."""
    if index.fact(_is_kept, function) and is_native(index, function):
        return function.qualname
    return ""


def _is_kept(function: FunctionInfo) -> bool:
    """Whether a function neither plans, asks nor works on the host, judging from its name and signature."""
    terminal = function.qualname.rpartition(".")[2]
    if function.owner is not None and terminal.startswith(_PLANNING):
        return False
    return not (_is_query(function, terminal) or terminal.endswith("_plan") or is_host(function))


def _is_query(function: FunctionInfo, name: str) -> bool:
    """Whether a function only asks or builds something. `get_mla_metadata(cache_seqlens: Tensor)` computes."""
    annotations = " ".join(ast.unparse(annotation) for annotation in function.annotations.values())
    return is_query_name(name) and not (name.startswith("get_") and "Tensor" in annotations)


def is_query_name(name: str) -> bool:
    """Whether a native function of this name only asks or builds something, judging from the name alone."""
    return (name.startswith("get_") and not name.endswith(_COMPUTED)) or name.startswith(_QUERIES)


def is_host(function: FunctionInfo) -> bool:
    """Whether a library's function works on the host alone, judging from its signature."""
    if isinstance(function.node, ast.Lambda):
        return False
    returns = function.node.returns
    if isinstance(returns, ast.Name) and returns.id in data_types.NUMBERS:
        return True
    spec = function.node.args
    names = [argument.arg for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    given = names[1:] if function.owner is not None and "staticmethod" not in function.decorators else names
    open_ended = spec.vararg is not None or spec.kwarg is not None or function.owner is not None
    return not open_ended and not any(data_types.may_hold_tensor(function.annotations.get(name)) for name in given)


def alive(index: Index, platform: Platform, function: FunctionInfo) -> bool:
    """Whether the platform uses this definition: `if torch.version.hip is not None:` may contain another one."""
    return function.node not in index.fact(_dead, (platform, function.module.tree))


def _dead(subject: tuple[Platform, ast.Module]) -> frozenset[ast.stmt]:
    platform, tree = subject
    return frozenset(_dead_statements(platform, tree.body))


def _dead_statements(platform: Platform, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
            constant = platform.constant(dotted_name(node.test.left))
            right = node.test.comparators[0]
            if constant is not None and isinstance(right, ast.Constant) and right.value is None:
                taken = constant == isinstance(node.test.ops[0], ast.IsNot)
                yield from node.orelse if taken else node.body


def is_native(index: Index, function: FunctionInfo) -> bool:
    """Whether a library function's implementation is native, directly or through what it refers to."""
    if function not in index.natives:
        index.natives[function] = False  # recursion ends here
        index.natives[function] = _is_native(index, function)
    return index.natives[function]


def _is_native(index: Index, function: FunctionInfo) -> bool:
    references: dict[str, ast.Name | ast.Attribute] = {}
    local_imports: dict[str, tuple[str, str]] = {}
    for node in walk(function.node):
        if isinstance(node, ast.Attribute):
            path = dotted_name(node)
            if node.attr in _NATIVE or path.startswith(_NATIVE_PATHS):
                return True
            if path:
                references[path] = node
        elif isinstance(node, ast.Name):
            references[node.id] = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            return True  # kernel[grid](...)
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                local_imports[item.asname or item.name] = (function.module.absolute(node), item.name)
    for path, reference in references.items():
        for symbol in _symbols(index, function, path, reference, local_imports):
            if isinstance(symbol, FunctionInfo):
                if is_library(symbol.module.name) and is_native(index, symbol):
                    return True
            elif isinstance(symbol, ClassInfo) and is_library(symbol.module.name):
                methods = [method for name, method in symbol.methods.items() if name != "__init__"]
                if any(is_native(index, method) for method in methods):
                    return True
    return False


_NATIVE_PATHS = ("torch.ops.", "torch.torch.ops.", "self._cached_module", "cute.")


def _symbols(
    index: Index,
    function: FunctionInfo,
    path: str,
    node: ast.Name | ast.Attribute,
    local_imports: dict[str, tuple[str, str]],
) -> list[object]:
    """What a library function refers to: something of its module, a local import, or a method of its own class."""
    first, _, rest = path.partition(".")
    if first in ("self", "cls") and function.owner is not None:
        method = class_attribute(function.owner, rest) if "." not in rest else None
        return [method] if method else []
    if first in local_imports:
        return list(index.imported(*local_imports[first])) if not rest else []
    return list(index.resolve(function.module, node)) if first in function.module.bindings else []


def class_attribute(info: ClassInfo, name: str) -> FunctionInfo | None:
    """A method of a library class, which may be assigned in the class: `run_return_lse = partialmethod(run, ...)`."""
    if name in info.methods:
        return info.methods[name]
    for statement in info.node.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in statement.targets
        ):
            for node in walk(statement):
                if isinstance(node, ast.Name) and node.id in info.methods:
                    return info.methods[node.id]
    return None


def is_constant(info: ClassInfo, name: str) -> bool:
    """Whether a library class assigns the name in its body, as enumerations do."""
    targets = (target for node in info.node.body if isinstance(node, ast.Assign) for target in node.targets)
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)
