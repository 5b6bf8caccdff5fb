"""Ops: what a model calls on the way to a kernel.

The op of a chain is named by its frame nearest to the kernel in the model's own files: `self.q_b_proj(q)` is the op
`q_b_proj`. Where the model calls the kernel itself, the weight it hands over tells whose work the kernel does:

- `dsv3_fused_a_gemm(x, self.fused_qkv_a_proj_with_mqa.weight.T)` is a way to compute `fused_qkv_a_proj_with_mqa`;
- `dsv3_router_gemm(x, self.weight)` is the module itself, so the op is the call that entered it: `gate`;
- a kernel that is given no weight of a module is an op of its own: `merge_state_v2`.
"""

from __future__ import annotations

import ast
import re

OWN_WEIGHT = "self"
_WEIGHT = re.compile(r"self\.(?:(?P<module>\w+)\.)?weight(?:_\w+)?(?:\.T|\.t\(\))?")


def called_name(call: ast.AST) -> str:
    """The last name of what is called: `self.layers[i].mlp(x)` -> `mlp`, `experts[0](x)` -> `experts`."""
    target = call.func if isinstance(call, ast.Call) else call
    while not isinstance(target, (ast.Attribute, ast.Name)):
        inner = getattr(target, "value", None) or getattr(target, "func", None)
        if not isinstance(inner, ast.AST):
            return ast.unparse(target)
        target = inner
    return target.attr if isinstance(target, ast.Attribute) else target.id


def weight_owner(call: ast.AST) -> str:
    """The attribute of self whose weight a call is given, OWN_WEIGHT if it is self's, "" if there is none."""
    if isinstance(call, ast.Call):
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            found = _WEIGHT.fullmatch(ast.unparse(argument)) if _may_be_weight(argument) else None
            if found:
                return found["module"] or OWN_WEIGHT
    return ""


def _may_be_weight(node: ast.expr) -> bool:
    return isinstance(node, (ast.Attribute, ast.Call))


def op_name(calls: list[ast.AST], position: int, kernel: str) -> str:
    """The op of a chain.

    Args:
        calls: the calls of the chain, the kernel's first.
        position: which of them is the nearest in the model's files.
        kernel: the kernel's name.
    """
    if position > 0:
        return called_name(calls[position])
    owner = weight_owner(calls[0])
    if owner == OWN_WEIGHT and len(calls) > 1:
        return called_name(calls[1])
    return owner if owner and owner != OWN_WEIGHT else kernel.rpartition(".")[2]
