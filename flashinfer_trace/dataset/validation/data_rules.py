"""Rules on the data next to the Definitions that a schema cannot express: names, titles, claims, traffic, workloads."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.digests import lengths_sha256
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.dataset.validation.schemas import check_schema
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.format.files import read_bytes
from flashinfer_trace.format.json_source import TRACES, JsonSourceError, load_object
from flashinfer_trace.kernels import TABLE

#: Data files that a dataset may have -> their schema. Those that it must have are checked with the conventions.
DATA = {
    "models/*.json": "model",
    "models/curated/claims.json": "curated_claims",
    "models/needs/*.json": "model_needs",
    "models/recorded/*.json": "recorded_calls",
    "schema/compatibility.json": "compatibility",
    "schema/equivalent_code.json": "equivalent_code",
    "schema/flashinfer_bench.json": "flashinfer_bench",
    "schema/flashinfer_dumps.json": "flashinfer_dumps",
    "schema/gpus.json": "gpus",
    "traces/kernels_without_definition.json": "kernels_without_definition",
}
#: Schema -> the field that is the stem of the file's name.
NAMED_BY = {"model": "name", "model_needs": "model", "recorded_calls": "definition"}


def check_names(path: Path, schema: str, data: Any, titles: dict[str, Path], findings: Findings) -> None:
    """The field that names the file does, and a model's title is its name as written by people, and of it alone."""
    field = NAMED_BY.get(schema, "")
    if not isinstance(data, dict):
        return
    if data.get(field, path.stem) != path.stem:
        message = f"{field} is {quote(data[field])}, but the file is {path.name}"
        findings.add("dataset-schema", message, "rename the file, or correct the field", f"/{field}")
    title = data.get("title")
    if schema == "model" and isinstance(title, str):
        if _plain(title) != _plain(path.stem):
            message = f"the title {quote(title)} is not the name {path.stem}, written by people"
            findings.add("dataset-schema", message, "they may differ in case and signs only", "/title")
        if (first := titles.setdefault(title, path)) != path:
            message = f"{first.name} has the title {quote(title)} too"
            findings.add("dataset-schema", message, "descriptions name models by it: correct one of the two", "/title")


def check_claims_file(data: Mapping[str, Any], names: Collection[str], root: Path, findings: Findings) -> None:
    """Each claim of models/curated/claims.json is about a Definition that exists, and names a kernel that does."""
    named = {path.rpartition(".")[2] for one in TABLE for path in (*(at.path for at in one.places), *one.launches)}
    for index, claim in enumerate(data["claims"]):
        for place, name in enumerate(claim["definitions"]):
            if name not in names and not any(map(re.compile(fnmatch.translate(name)).match, names)):
                message, hint = f"no Definition has the name {quote(name)}", _closest(name, names)
                findings.add("dataset-claim", message, hint, pointer_of("claims", index, "definitions", place))
        kernel = claim.get("kernel")
        if kernel is not None and kernel not in named and not _is_called(root, kernel):
            message = f"neither the table of kernels nor models/needs/ has the kernel {quote(kernel)}"
            findings.add("dataset-claim", message, _closest(kernel, named), pointer_of("claims", index, "kernel"))


def _is_called(root: Path, kernel: str) -> bool:
    """Whether recorded runs of a model call the kernel; looked for as text."""
    called = f':{kernel}"'.encode()
    return any(called in read_bytes(path, TRACES.bytes) for path in sorted((root / "models" / "needs").glob("*.json")))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _closest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"{f'did you mean {close[0]}? ' if close else ''}correct it, or remove it from the claim"


_FIX = "restore it from version control, or compute it again in a checkout: python -m tools.traffic_statistics TRACE"


def check_traffic(data: Any, schema: Any, findings: Findings) -> None:
    """Checks that quantiles ascend, that their digest is of them, and that traffic has a profile that exists."""
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
    """Checks that a file of workloads is for its Definition, with its axes and inputs, and traffic that exists."""
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
