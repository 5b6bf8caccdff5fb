"""What calls hand to parameters; for the checker."""

from __future__ import annotations

import ast

from tools.kernel_tracing.verify.check_source import FunctionNode, last_name

NUMBERS = frozenset(("int", "float", "bool"))
Function = FunctionNode | ast.Lambda


def given(call: ast.Call, function: Function, parameter: str, method: bool) -> list[ast.expr]:
    """The arguments of a call that a parameter of the called function receives.

    Args:
        method: whether the function is in a class, so that calls do not write its first parameter, `self` or `cls`.
    """
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    index = positional.index(parameter) if parameter in positional else len(positional)
    index -= method and positional[:1] in (["self"], ["cls"])
    by_name = [keyword.value for keyword in call.keywords if keyword.arg == parameter]
    if arguments.vararg is not None and parameter == arguments.vararg.arg:
        return call.args[max(index, 0) :] + by_name
    return (call.args[index : index + 1] if index >= 0 else []) + by_name


def parameters(function: Function) -> list[ast.arg]:
    """The parameters of a function that have names of their own."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def is_number(node: ast.AST, parameter: str) -> bool:
    """Whether a parameter is annotated as a number, which calls nothing."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    every = [one for one in parameters(node) if one.arg == parameter and one.annotation is not None]
    return any(last_name(one.annotation) in NUMBERS for one in every if one.annotation)
