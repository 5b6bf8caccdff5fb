"""Rules on the data beside the Definitions that a schema cannot express: names, titles, and what claims are about."""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.format.files import UnreadableFile, read_bytes
from flashinfer_trace.format.json_source import TRACES
from flashinfer_trace.kernels.names import load_kernel_paths

__all__ = ["DATA", "check_claims_file", "check_names"]

#: Data files that a dataset may have -> their schema. Those that it must have are checked with the conventions.
DATA = {
    "models/*.json": "model",
    "models/curated/claims.json": "curated_claims",
    "models/needs/*.json": "model_needs",
    "models/recorded/calls.json": "recorded_calls",
    "schema/compatibility.json": "compatibility",
    "schema/flashinfer_bench.json": "flashinfer_bench",
    "schema/gpus.json": "gpus",
    "schema/kernel_paths.json": "kernel_paths",
    "traces/kernels_without_definition.json": "kernels_without_definition",
}
#: Schema -> the field that is the stem of the file's name.
NAMED_BY = {"model": "name", "model_needs": "model"}


def check_names(path: Path, schema: str, data: Any, titles: dict[str, Path], findings: Findings) -> None:
    """The field that names the file does, and a model's title is its name as written by people, and of it alone.

    Args:
        path, data: the file and its JSON.
        schema: the name of its schema.
        titles: title -> the first model that has it; this one is added.
        findings: those of the file.
    """
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
    """Each claim of models/curated/claims.json is about a Definition that exists, and names a kernel that does.

    Args:
        data: its JSON, which follows its schema.
        names: the Definitions of the dataset; none if it is not known which there are.
        root: the dataset root.
        findings: those of the file.

    Raises:
        KernelPathsError: schema/kernel_paths.json is unusable.
    """
    exported = {path.rpartition(".")[2] for path in load_kernel_paths(root).paths}
    for index, claim in enumerate(data["claims"]):
        for place, name in enumerate(claim["definitions"]):
            if name not in names and not any(map(re.compile(fnmatch.translate(name)).match, names)):
                message, hint = f"no Definition has the name {quote(name)}", _closest(name, names)
                findings.add("dataset-claim", message, hint, pointer_of("claims", index, "definitions", place))
        kernel = claim.get("kernel")
        if kernel is not None and kernel not in exported and not _is_traced(root, kernel):
            message = f"neither schema/kernel_paths.json nor traces/kernel_traces.json has the kernel {quote(kernel)}"
            findings.add("dataset-claim", message, _closest(kernel, exported), pointer_of("claims", index, "kernel"))


def _is_traced(root: Path, kernel: str) -> bool:
    """Whether traces have the kernel, or are missing, as in a wheel; looked for as text, because they are long."""
    try:
        text = read_bytes(root / "traces" / "kernel_traces.json", TRACES.bytes)
    except UnreadableFile:
        return True
    return f'"name": {json.dumps(kernel)}'.encode() in text


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _closest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"{f'did you mean {close[0]}? ' if close else ''}correct it, or remove it from the claim"
