"""Solutions for ``flashinfer.trace_apply``, which cannot be given to another call than they are for.

trace_apply looks a solution up by a name: the template and some sizes. Two calls that differ in dtype, epsilon, window,
cap or causality have one name. So a solution is written under a name that has all of these and that no call has, with
a guard (`apply_guard`) that registers it for the calls that it is for. Where a call does not tell what decides the
function, nothing is written.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.dumps import Dump, Match
from flashinfer_trace.dataset.finding import constants
from flashinfer_trace.format.files import read_text
from flashinfer_trace.judging.export.directory import ExportError
from flashinfer_trace.judging.export.summary import Summary

GUARD = Path(__file__).with_name("apply_guard.py")
ENTRY = "run_dumped"


def write_solutions(directory: Path, found: Iterable[tuple[Dump, Match]], kernel: Path, function: str) -> Summary:
    """Writes a solution for each dumped call into an empty directory, ``guards.json`` and ``guard.py``. The function of
    the kernel's file takes the inputs of the Definition here and returns its outputs.

    Raises:
        ExportError: the file has no such function.
    """
    source = read_text(kernel)
    try:
        names = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise ExportError(f"{kernel}:{error.lineno}: {error.msg}") from error
    if function not in names:
        raise ExportError(f"{kernel}: no function {function} at the top of it; name one: FILE.py:FUNCTION")
    summary, guards = Summary(), []
    for dump, match in found:
        arguments = _arguments(match)
        ours = _inverted(match)
        if arguments is None or ours is None or not dump.api:
            summary.leave_out(dump.name, _why(match, dump, arguments is None))
            continue
        name = "_".join([match.definition.name, "", *_told(match, arguments)])
        path = Path("solutions", match.definition.op_type, f"{name}.json")
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        document = _solution(name, source, function, match, ours)
        (directory / path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        guards.append(
            {
                **{"key": dump.name, "api": dump.api, "template": match.alias.template, "solution": path.as_posix()},
                **{"tensors": _tensors(match, ours), "arguments": arguments},
            }
        )
        summary.add(match.definition, workloads=0, solutions=1)
    (directory / "guards.json").write_text(json.dumps(guards, indent=2) + "\n", encoding="utf-8")
    (directory / "guard.py").write_text(read_text(GUARD), encoding="utf-8")
    summary.write(directory)
    return summary


def _arguments(match: Match) -> dict[str, float] | None:
    """Values of the arguments that the key leaves out; None if the Definition does not say one of them."""
    known, values = constants(match.definition), {}
    for name in match.alias.silent:
        try:
            values[name] = float(known[name])
        except (KeyError, ValueError):
            return None
    return values


def _inverted(match: Match) -> dict[str, str] | None:
    """The family's input -> the dump's name of it; None if they do not correspond one by one."""
    ours = {name: name for name in match.definition.inputs}
    for theirs, text in match.alias.inputs.items():
        if text in ours:
            ours[text] = theirs
        elif any(isinstance(node, ast.Name) and node.id in ours for node in ast.walk(ast.parse(text))):
            return None
    return ours if match.alias.result == "result" else None


def _why(match: Match, dump: Dump, silent: bool) -> str:
    if silent:
        left = ", ".join(name for name in match.alias.silent if name not in constants(match.definition))
        return f"the key {dump.name} does not tell {left}, nor does an argument that {match.definition.name} fixes"
    if not dump.api:
        return f"{dump.name} does not say by a tag fi_api: which function was called"
    return f"inputs of {match.definition.name} are not those of the call one by one"


def _told(match: Match, arguments: Mapping[str, float]) -> list[str]:
    """The dtypes and arguments that a key leaves out, as parts of a name."""
    dtypes = dict.fromkeys(spec.dtype for spec in match.definition.inputs.values() if spec.shape is not None)
    return [*dtypes, *(f"{name}{value:g}" for name, value in arguments.items())]


def _tensors(match: Match, ours: Mapping[str, str]) -> dict[str, tuple[str, list[int | None]]]:
    """By the dump's names, dtype and constant sizes of each tensor."""
    axes = match.definition.const_axes
    return {
        ours[name]: (spec.dtype, [axes.get(axis) for axis in spec.shape])
        for name, spec in match.definition.inputs.items()
        if spec.shape is not None
    }


def _solution(name: str, source: str, function: str, match: Match, ours: Mapping[str, str]) -> dict[str, Any]:
    taken = ", ".join(ours.values())
    given = ", ".join(f"{mine}={theirs}" for mine, theirs in ours.items())
    entry = f"\n\ndef {ENTRY}({taken}):\n    return {function}({given})\n"
    return {
        "name": name,
        "definition": name,
        "author": "flashinfer-trace",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": f"main.py::{ENTRY}",
            "dependencies": [],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": source.rstrip() + "\n" + entry}],
        "description": f"{function} for the calls that guards.json describes, which compute {match.definition.name}.",
    }
