"""Functions of the sources that replace torch's own: `library.impl("aten::mm", function)`."""

from __future__ import annotations

from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.values import MISSING, Function, Value

_PREFIX = "aten::"
#: Functions and methods of torch -> the operator that they run.
_OPERATORS = {
    "torch.mm": "mm",
    "torch.matmul": "mm",
    "torch.addmm": "addmm",
    "torch.bmm": "bmm",
    "torch.log_softmax": "_log_softmax",
    "torch.nn.functional.log_softmax": "_log_softmax",
}


def register(core: Core, name: Value, function: Value) -> bool:
    """Notes a replacement; False if it is none."""
    if isinstance(name, str) and name.startswith(_PREFIX) and isinstance(function, Function):
        core.aten[name.removeprefix(_PREFIX)] = function
        return True
    return False


def replaced(core: Core, path: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """The result of a function of torch that the sources replace; MISSING for all others."""
    if not core.aten:
        return MISSING
    if path == "torch.nn.functional.linear":
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        operands = [given.get("input"), core.call(core.load(given.get("weight"), "t"), [], {})]
        bias = given.get("bias")
        function = core.aten.get("mm" if bias is None else "addmm", MISSING)
        return MISSING if function is MISSING else core.call(function, [bias, *operands][bias is None :], {})
    function = core.aten.get(_OPERATORS.get(path, ""), MISSING)
    return MISSING if function is MISSING else core.call(function, args, kwargs)


def mean(core: Core, tensor: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """`tensor.mean(dim=...)`, if the sources replace it; MISSING otherwise."""
    function = core.aten.get("mean.dim", MISSING)
    dim = kwargs.get("dim", args[0] if args else None)
    if function is MISSING or dim is None:
        return MISSING
    rest = {name: value for name, value in kwargs.items() if name != "dim"}
    return core.call(function, [tensor, [dim] if isinstance(dim, int) else dim], rest)
