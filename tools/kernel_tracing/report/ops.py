"""Ops: what a model calls on the way to a kernel.

The op of a chain is named after its frame nearest to the kernel in the model's own files: `self.q_b_proj(q)` is the op
`q_b_proj`. If the model calls the kernel directly, the weight that it passes shows whose work the kernel does:

- `dsv3_fused_a_gemm(x, self.fused_qkv_a_proj_with_mqa.weight.T)` is a way to compute `fused_qkv_a_proj_with_mqa`;
- `dsv3_router_gemm(x, self.weight)` does the work of the module itself, so the op is the call that entered it: `gate`;
- so is `F.linear(x, self.weight)`, where the sources replace torch's product by a kernel of their own;
- a kernel that is given no weight of a module is a separate op: `merge_state_v2`.

What runs outside the model's forward (sampling, loading, scheduling) is named after what the chain's root calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.kernel_tracing.evaluator.core import Hop
from tools.kernel_tracing.rules import runtime_roots, serving_steps

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
    """The attribute of self whose weight a call is given; OWN_WEIGHT for self's own weight, "" if there is none."""
    if isinstance(call, ast.Call):
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            found = _WEIGHT.fullmatch(ast.unparse(argument)) if _may_be_weight(argument) else None
            if found:
                return found["module"] or OWN_WEIGHT
    return ""


def _may_be_weight(node: ast.expr) -> bool:
    return isinstance(node, (ast.Attribute, ast.Call))


@dataclass(frozen=True)
class Use:
    """The op of one chain: which call it is, and where it is made.

    Attributes:
        op: the op's name.
        position: the frame that calls it, counted from the kernel.
        group, when: outside the model's forward, what the work belongs to and when it is done; "" inside.
    """

    op: str
    position: int
    group: str = ""
    when: str = ""


def use(chain: Sequence[Hop], kernel: str) -> Use:
    """The op of one chain, as described above; outside the model's forward, what the root calls."""
    calls = [hop.call if hop.call is not None else ast.Name(hop.function) for hop in chain]
    inside = [at for at, hop in enumerate(chain) if in_model(hop.file)]
    if inside and chain[inside[-1]].function.endswith(".forward"):
        return Use(*_in_forward(calls, inside[0], kernel))
    position = len(calls) - 1
    root = chain[-1]
    owner, _, method = root.function.rpartition(".")
    group, when = runtime_roots.occasion(root.file.removesuffix(".py").replace("/", "."), owner, method)
    return Use(called_name(calls[position]) if position else _last(kernel), position, group, when)


def _in_forward(calls: Sequence[ast.AST], nearest: int, kernel: str) -> tuple[str, int]:
    """Name and position of the op; `nearest` is the position of the call nearest to the kernel in the model's files."""
    if nearest > 0 and not _is_torch(calls[nearest]):
        return called_name(calls[nearest]), nearest
    owner = weight_owner(calls[nearest])
    if owner == OWN_WEIGHT and len(calls) > nearest + 1:
        return called_name(calls[nearest + 1]), nearest + 1
    named = called_name(calls[nearest]) if nearest else _last(kernel)
    return (owner if owner and owner != OWN_WEIGHT else named), nearest


def _is_torch(call: ast.AST) -> bool:
    """Whether a function of torch is called, which a kernel may replace: `F.linear(x, self.weight)`."""
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("F.linear", "torch.nn.functional.linear")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def in_model(file: str) -> bool:
    """Whether a file is one of the models'."""
    return file.startswith(serving_steps.MODEL_FILES)
