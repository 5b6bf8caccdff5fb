"""Reads what runs have recorded: the results of mutants, and those of faulty kernels."""

from __future__ import annotations

from collections.abc import Mapping
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
    summaries = _loaded(path, fix)
    for family, summary in summaries.items():
        problem = _misfit(summary, SUMMARY)
        if problem is None and not all(type(count) is int for count in summary["counts"].values()):
            problem = "counts: must be integers"
        problem = problem or next(filter(None, (_misfit(one, SURVIVOR) for one in summary["survivors"])), None)
        if problem is not None:
            raise MutateDataError(f"{path}: {family[:80]}: {problem}; {fix}")
    return summaries


def read_powers(directory: Path) -> list[dict[str, Any]]:
    """The records of the faulty kernels in a directory, file by file in the order of their names.

    Raises:
        MutateDataError: a file is unusable, or has another form.
    """
    fix = "record it again (docs/harness_power.md says how), or restore it from version control"
    records = []
    for path in sorted(directory.glob("*.json")):
        record = _loaded(path, fix)
        problem = _misfit(record, POWER)
        if problem is None and not all(map(_is_power, record["faults"].values())):
            problem = "faults: each must have 'applied', an integer, and 'cases', an integer or null"
        if problem is not None:
            raise MutateDataError(f"{path}: {problem}; {fix}")
        records.append({**record, "kernel": current_label(record["kernel"])})
    return records


def _loaded(path: Path, fix: str) -> dict[str, Any]:
    try:
        return load_object(path, TRACES)
    except JsonSourceError as error:
        raise MutateDataError(f"{path}: {error}; {fix}") from error


def _misfit(value: Any, fields: Mapping[str, type]) -> str | None:
    """The error in an object that must have these fields; None if it is right."""
    if not isinstance(value, dict):
        return f"must be an object with {', '.join(fields)}"
    wrong = next((name for name, kind in fields.items() if type(value.get(name)) is not kind), None)
    return f"{wrong}: is missing or of another kind" if wrong else None


def _is_power(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("applied")) is not int or "cases" not in value:
        return False
    return value["cases"] is None or type(value["cases"]) is int
