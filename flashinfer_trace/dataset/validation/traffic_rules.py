"""Rules on workloads/: traffic.json, whose numbers are computed from traces that are not kept here, and the rest."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.digests import lengths_sha256
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.dataset.validation.schemas import check_schema
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.format.json_source import JsonSourceError, load_object

__all__ = ["check_traffic", "check_workloads", "traffic_names"]

_FIX = "restore it from version control, or compute it again in a checkout: python -m tools.traffic_statistics TRACE"


def check_traffic(data: Any, schema: Any, findings: Findings) -> None:
    """Checks that quantiles ascend, that their digest is of them, and that traffic has a profile that exists.

    Args:
        data: the JSON of workloads/traffic.json.
        schema: the compiled schema of traffic.
        findings: those of the file.
    """
    if check_schema(schema, data, findings, "traffic-invalid"):
        return
    for name, profile in data["profiles"].items():
        for kind in ("prompts", "running", "positions"):
            for place, (lower, upper) in enumerate(itertools.pairwise(profile.get(kind, ()))):
                if upper < lower:
                    message = f"the quantile {upper} is less than {lower}, the one before it"
                    findings.add("traffic-invalid", message, _FIX, pointer_of("profiles", name, kind, place + 1))
        if profile["lengths_sha256"] != lengths_sha256(profile):
            message = f"the digest of the profile {quote(name)} is of other lengths"
            findings.add("traffic-invalid", message, _FIX, pointer_of("profiles", name, "lengths_sha256"))
    for kind in ("tokens", "requests"):
        for place, entry in enumerate(data[kind]):
            if (profile := entry.get("profile")) is not None and profile not in data["profiles"]:
                message = f"there is no profile {quote(profile)}"
                findings.add("traffic-invalid", message, "name one of profiles", pointer_of(kind, place, "profile"))


def traffic_names(data: Any) -> set[str]:
    """The names of all traffic of workloads/traffic.json, if the schema holds."""
    return {entry["name"] for kind in ("tokens", "requests") for entry in data[kind]}


def check_workloads(path: Path, data: Any, schema: Any, traffic: Collection[str], findings: Findings) -> None:
    """Checks that a file of workloads is for its Definition, with the axes and inputs of this, and traffic that exists.

    Args:
        path: workloads/<op_type>/<name>.json.
        data: its JSON.
        schema: the compiled schema of workloads.
        traffic: names of all traffic.
        findings: those of the file.
    """
    if check_schema(schema, data, findings, "workloads-invalid"):
        return
    fix = f"record it again in a checkout: python -m tools.record_workloads {path.stem}"
    place = Path("definitions", path.parent.name, path.name)
    try:
        definition = Definition.from_dict(load_object(path.parents[2] / place))
    except (JsonSourceError, InputError):
        message = f"there is no Definition that can be read at {place.as_posix()}"
        findings.add("workloads-invalid", message, "correct that one, or remove the workloads")
        return
    if data["definition"] != path.stem:
        findings.add("workloads-invalid", f"it is for {quote(data['definition'])}", fix, "/definition")
    for name, entry in data["workloads"].items():
        pointer = pointer_of("workloads", name)
        if name not in traffic:
            findings.add("workloads-invalid", "workloads/traffic.json has no such traffic", fix, pointer)
        for kind, known in (("axes", set(definition.var_axes)), ("inputs", definition.inputs.keys())):
            if (given := entry[kind].keys()) != known and (given or kind == "axes"):
                message = f"the {kind} are {_list(given)}, and those of the Definition {_list(known)}"
                findings.add("workloads-invalid", message, fix, f"{pointer}/{kind}")


def _list(names: Collection[str]) -> str:
    return ", ".join(map(quote, sorted(names))) or "none"
