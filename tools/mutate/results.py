"""Reads what runs have recorded: the results of mutants, and those of faulty kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace.format.json_source import TRACES, JsonSourceError, load_object
from flashinfer_trace.kernels import current_label

#: Field -> kind of its value, in the summary of a family, in a survivor, and in the record of a kernel.
SUMMARY = {"definition": str, "real_size": bool, "mutants": int, "digest": str, "counts": dict, "survivors": list}
SURVIVOR = {"id": str, "content": str, "before": str, "after": str}
POWER = {"family": str, "kernel": str, "gpu": str, "faults": dict}


class MutateDataError(ValueError):
    """A recorded file that cannot be used. The message names the file, the place and the fix."""


def read_summaries(path: Path) -> dict[str, Any]:
    """Family -> its summary (`summary.family_summary`).

    Raises:
        MutateDataError: the file is unusable, or has another form.
    """
    fix = "run `python -m tools.mutate`, or restore it from version control"
    return read_checked(path, fix, lambda found: next(filter(None, map(_wrong_summary, found.items())), None))


def _wrong_summary(item: tuple[str, Any]) -> str | None:
    family, summary = item
    problem = misfit(summary, SUMMARY)
    if problem is None and not all(type(count) is int for count in summary["counts"].values()):
        problem = "counts: must be integers"
    problem = problem or next(filter(None, (misfit(one, SURVIVOR) for one in summary["survivors"])), None)
    return problem and f"{family[:80]}: {problem}"


def read_powers(directory: Path) -> list[dict[str, Any]]:
    """The records of the faulty kernels in a directory, in the order of their names; see `read_checked`."""
    fix = "record it again (docs/harness_power.md says how), or restore it from version control"
    records = [read_checked(path, fix, _wrong_power) for path in sorted(directory.glob("*.json"))]
    return [{**record, "kernel": current_label(record["kernel"])} for record in records]


def _wrong_power(record: Any) -> str | None:
    problem = misfit(record, POWER)
    if problem is None and not all(map(_is_power, record["faults"].values())):
        problem = "faults: each must have 'applied', an integer, and 'cases', an integer or null"
    return problem


def read_checked(path: Path, fix: str, wrong: Callable[[dict[str, Any]], str | None]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        MutateDataError: it cannot be read, or `wrong` says what is.
    """
    try:
        found = load_object(path, TRACES)
    except JsonSourceError as error:
        raise MutateDataError(f"{path}: {error}; {fix}") from error
    if problem := wrong(found):
        raise MutateDataError(f"{path}: {problem}; {fix}")
    return found


def misfit(value: Any, fields: Mapping[str, type]) -> str | None:
    """The error in an object that must have these fields; None if it is right."""
    if not isinstance(value, dict):
        return f"must be an object with {', '.join(fields)}"
    wrong = next((name for name, kind in fields.items() if type(value.get(name)) is not kind), None)
    return f"{wrong}: is missing or of another kind" if wrong else None


def _is_power(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("applied")) is not int or "cases" not in value:
        return False
    return value["cases"] is None or type(value["cases"]) is int
