"""Finds the function of a submission, and how it wants to be called. Runs in the submission's process, and where a
saved case is repeated: it imports nothing of this package.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

#: Names that are looked for in a file when none is given, in this order.
USUAL_NAMES = ("run", "ModelNew", "kernel")

#: Fewest booleans by which an untouched output is recognized: right ones equal those drawn with probability 2^-64.
BOOLEANS = 64

#: Kinds of parameters that take any number of arguments.
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

#: (inputs by name, poisoned outputs by name) -> what the submission returned, None if it wrote into the outputs.
Submitted = Callable[[dict[str, Any], dict[str, Any]], Any]


class LoadError(Exception):
    """A submission without a function that can be called. The message says what is there, and what it takes."""


@dataclass(frozen=True)
class CallForm:
    """How to call a function.

    Attributes:
        by_name: whether arguments go by name; otherwise in the Definition's order.
        writes: whether outputs are among them, to write into.
        targets: the parameters that take the outputs, in the Definition's order; empty if they have no names.
    """

    by_name: bool
    writes: bool
    targets: tuple[str, ...] = field(default=(), compare=False)


#: Index inputs that a server knows before it runs a model's layers: one plan serves all layers.
KNOWN_BEFORE = (
    *("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "page_table", "seq_lens"),
    *("cu_seqlens", "query_start_loc", "cache_indices", "conv_state_indices", "state_indices", "state_batch_indices"),
)


@dataclass(frozen=True)
class Planned:
    """A submission with `plan` and `run`, as FlashInfer's wrappers have them: a call is both, one after the other.
    `names` are the inputs that it plans with."""

    plan: Callable[[dict[str, Any]], None]
    run: Submitted
    names: tuple[str, ...]

    def __call__(self, given: dict[str, Any], poisoned: dict[str, Any]) -> Any:
        self.plan(given)
        return self.run(given, poisoned)


class ReturnError(Exception):
    """A call whose results are not the outputs, in number or in place. The message names them."""


def load(request: Mapping[str, Any], device: str, inputs: Sequence[str], outputs: Sequence[str]) -> Submitted:
    """The Python function that a request describes (see `submission.Submission`).

    Raises:
        LoadError: the function does not exist, or does not take the inputs.
        BaseException: whatever the submitted code raises while it is imported.
    """
    module = _module(request)
    return bound(_found(module, request), device, inputs, outputs, request.get("destination"), module)


def bound(
    found: Any,
    device: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    destination: bool | None = None,
    module: ModuleType | None = None,
) -> Submitted:
    """A callable, or a class of modules, as a function of inputs and outputs by name.

    Args:
        found: takes the inputs, by name if its parameters have their names or are ``**kwargs``, in the Definition's
            order otherwise; and the outputs after them if it writes into memory that it is given.
        device: where a module's parameters go.
        destination: whether it writes into outputs; None to read that from its parameters.
        module: where `get_init_inputs` is looked up, as KernelBench's problems define it.
    """
    import torch

    if inspect.isclass(found):
        found = _made(found, module)
    if isinstance(found, torch.nn.Module):
        found = found.to(device).eval()
    elif _has_plan(found):
        run = bound(found.run, device, inputs, outputs, destination)
        return _planned(found.plan, run, inputs)
    if not callable(found):
        raise LoadError(f"it is a {type(found).__name__}, which cannot be called; give a function or a class")
    how = call_form(found, inputs, outputs, destination)
    names = [*inputs, *how.targets]
    looked_at = False

    def call(given: dict[str, Any], poisoned: dict[str, Any]) -> Any:
        nonlocal looked_at
        values = [*given.values(), *(poisoned.values() if how.writes else ())]
        looking = how.writes and not looked_at and any(value.numel() for value in poisoned.values())
        before = {name: value.clone() for name, value in poisoned.items()} if looking else {}
        returned = found(**dict(zip(names, values, strict=True))) if how.by_name else found(*values)
        if not how.writes:
            return dict.fromkeys(outputs) if returned is None else returned  # None would say that outputs were written
        if looking:  # in a call that nobody times
            looked_at = True
            _refuse_ignored(returned, poisoned, before, how.targets)
        return None

    return call


def _has_plan(found: Any) -> bool:
    return callable(getattr(found, "plan", None)) and callable(getattr(found, "run", None))


def _planned(plan: Callable[..., Any], run: Submitted, inputs: Sequence[str]) -> Planned:
    """A submission that plans.

    Raises:
        LoadError: `plan` takes something else than inputs; or, when it is called, tensors that layers compute.
    """
    import torch

    names = tuple(inspect.signature(plan).parameters)
    index_inputs = [name for name in inputs if name in KNOWN_BEFORE]
    must = f"it must take, by these names, some of {index_inputs} and of the numbers among the inputs"
    if not set(names) <= set(inputs):
        raise LoadError(f"plan takes {list(names)}; {must}")

    def call(given: dict[str, Any]) -> None:
        late = [name for name in names if isinstance(given[name], torch.Tensor) and name not in KNOWN_BEFORE]
        if late:
            raise LoadError(f"plan takes {late}, which is not known before a model's layers run; {must}")
        plan(**{name: given[name] for name in names})

    return Planned(call, run, names)


def _made(found: type, module: ModuleType | None) -> Any:
    told = hasattr(module, "get_init_inputs")
    arguments = module.get_init_inputs() if module is not None and told else []
    try:
        return found(*arguments)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # by its own code: it takes the arguments
        what, file = f"the arguments of {found.__name__}", Path(str(getattr(module, "__file__", ""))).name
        hint = f"define get_init_inputs() in {file}, which returns {what}"
        if told:
            hint = f"get_init_inputs() in {file} must return {what}"
        elif module is None:
            hint = "give an object of it"
        raise LoadError(f"{error}; {hint}") from error


def _refuse_ignored(
    returned: Any, poisoned: Mapping[str, Any], before: Mapping[str, Any], targets: Sequence[str]
) -> None:
    """Refuses a result that nobody takes, because outputs were given to be written into, and hold what they held.

    Raises:
        ReturnError: there is one.
    """
    results = list(returned.values()) if isinstance(returned, dict) else returned
    found = results if isinstance(results, (tuple, list)) else [results]
    if all(one is None or any(one is value for value in poisoned.values()) for one in found):
        return
    if all(value.numel() and _as_given(value, before[name]) for name, value in poisoned.items()):
        by = {name: f" as `{target}`" for name, target in zip(poisoned, targets, strict=False) if name != target}
        taken = ", ".join(f"`{name}`{by.get(name, '')}" for name in poisoned)
        raise ReturnError(
            f"it was called with the output {taken}, wrote nothing there, and returned a "
            f"{type(returned).__name__}, which is ignored: write into the outputs, or take the inputs alone, and no "
            f"other parameter without a default"
        )


def _as_given(output: Any, before: Any) -> bool:
    """Whether an output holds the bits that the judge filled it with, which a few booleans also hold by chance."""
    import torch

    enough = output.dtype != torch.bool or output.numel() >= BOOLEANS
    return enough and torch.equal(*(value.flatten().view(torch.uint8) for value in (output, before)))


def _module(request: Mapping[str, Any]) -> ModuleType:
    """Imports the file of a request, which can import other files from its directory."""
    path = Path(request["path"])
    if request["kind"] == "package":
        sys.path.insert(0, request["root"])
        return importlib.import_module(".".join(path.relative_to(request["root"]).with_suffix("").parts))
    sys.path.insert(0, str(path.parent))
    name = f"_submitted_{path.stem}"  # a file may be called torch.py
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: triton and dataclasses look modules up there
    spec.loader.exec_module(module)
    return module


def _found(module: ModuleType, request: Mapping[str, Any]) -> Any:
    name, file = request["name"], Path(request["path"]).name
    if name is not None:
        if not hasattr(module, name):
            solution = request["kind"] == "package"
            where = "entry_point in the Solution's spec, as FILE.py::FUNCTION," if solution else "FILE:FUNCTION"
            raise LoadError(f"{file} has no {name}; it has {_public(module)}: {where} names one")
        return getattr(module, name)
    there = [one for one in USUAL_NAMES if hasattr(module, one)]
    # An imported function may only share the name, as subprocess.run does.
    usual, own = [one for one in there if not _is_imported(getattr(module, one), module)] or there, _public(module)
    # A Triton kernel may be called `kernel`: it is an object, and what launches it is the one function.
    launched = [one for one in usual if not _is_object(getattr(module, one))] or own
    if len(launched) == 1 or (usual and launched is not own):
        return getattr(module, launched[0])
    if usual:
        return getattr(module, usual[0])
    usual_names = ", ".join(USUAL_NAMES)
    if not own:
        raise LoadError(f"the file defines no function or class; define run, or another of {usual_names}")
    raise LoadError(
        f"none of {usual_names} is defined, and of {own} none is the only one; name the one to judge: FILE:FUNCTION"
    )


def _is_object(found: Any) -> bool:
    """Whether something can be called although it is neither a function, a class nor a module of torch."""
    import torch

    return callable(found) and not (
        inspect.isroutine(found) or inspect.isclass(found) or isinstance(found, torch.nn.Module)
    )


def _is_imported(found: Any, module: ModuleType) -> bool:
    return (inspect.isroutine(found) or inspect.isclass(found)) and found.__module__ != module.__name__


def _public(module: ModuleType) -> list[str]:
    """Names of the functions, and of the classes of torch's modules or with `plan` and `run`, that a file defines."""
    import torch

    return [
        key
        for key, value in vars(module).items()
        if (
            inspect.isfunction(value)
            or (inspect.isclass(value) and (issubclass(value, torch.nn.Module) or _has_plan(value)))
        )
        and not _is_imported(value, module)
        and not key.startswith("_")
    ]


def call_form(found: Any, inputs: Sequence[str], outputs: Sequence[str], destination: bool | None) -> CallForm:
    """How a function or module object is called.

    Raises:
        LoadError: it does not take the inputs and outputs.
    """
    function = found.forward if hasattr(found, "forward") else found
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return CallForm(by_name=False, writes=bool(destination))
    parameters = list(signature.parameters.values())
    own = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in _VARIADIC]
    as_many = len(needed) == len(inputs) + len(outputs)
    writes = bool(outputs) and (own.issuperset(outputs) or as_many) if destination is None else destination
    targets = tuple(outputs) if writes else ()
    others = _other_names(own, needed, inputs, outputs) if writes else ()
    for written in (targets, others):
        passed = [*inputs, *written]
        if len(written) == len(targets) and own.issuperset(passed) and _takes(signature, names=passed):
            return CallForm(True, writes, written)
    passed = [*inputs, *targets]
    if _takes(signature, count=len(passed)):
        positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        return CallForm(False, writes, tuple(positional[len(inputs) : len(passed)]))
    kinds = {one.kind for one in parameters}
    if Parameter.VAR_KEYWORD in kinds and Parameter.VAR_POSITIONAL not in kinds and _takes(signature, names=passed):
        return CallForm(True, writes, targets)
    raise LoadError(_mismatch(parameters, inputs, outputs, destination))


def _takes(signature: inspect.Signature, count: int = 0, names: Sequence[str] = ()) -> bool:
    try:
        signature.bind(*range(count), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def _other_names(
    own: Collection[str], needed: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[str, ...]:
    """The parameters that take the outputs if inputs go by name, whatever names outputs have; empty if it is not clear.

    Those of the names of outputs take these, and the others the rest, in order.
    """
    free = [name for name in needed if name not in (*inputs, *outputs)]
    unnamed = [name for name in outputs if name not in own]
    renamed = dict(zip(unnamed, free, strict=False))
    return tuple(renamed.get(name, name) for name in outputs) if len(free) == len(unnamed) else ()


def _mismatch(
    parameters: Sequence[Parameter], inputs: Sequence[str], outputs: Sequence[str], destination: bool | None
) -> str:
    stars: dict[object, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
    takes = f"it takes {[stars.get(one.kind, '') + one.name for one in parameters]}"
    if destination is None:
        first, second = list(inputs), list(outputs)
        return f"{takes}; it must take the inputs {first}, and may take the outputs {second} after them, to write into"
    if destination:
        return (
            f"{takes}; destination_passing_style is true, so it must take the inputs {list(inputs)} and after "
            f"them the outputs {list(outputs)}, to write into; if it returns the outputs, set it to false in the "
            f"Solution's spec"
        )
    return (
        f"{takes}; destination_passing_style is false, so it must take the inputs {list(inputs)} alone and return "
        f"the outputs; if it writes into outputs that it takes, set it to true in the Solution's spec"
    )
