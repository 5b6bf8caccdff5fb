"""Checks the file of a model before anything is derived from it."""

from __future__ import annotations

from pathlib import Path

from flashinfer_trace.json_source import load
from flashinfer_trace.validation import Result, format_text
from flashinfer_trace.validation.problems import Findings, quote
from flashinfer_trace.validation.schemas import SchemaFileError, Schemas, check_schema
from tools.extract_definitions.errors import ExtractionError

__all__ = ["check_file"]


def check_file(root: Path, path: Path) -> None:
    """Checks models/<name>.json, which can be read, by schema/model.schema.json, and that it has its own name.

    Raises:
        ExtractionError: it has problems; the message has a line for each, as `flashinfer-trace validate` prints it.
    """
    document = load(path)
    findings = Findings(path, root, document)
    try:
        check_schema(Schemas(root).of("model"), document.data, findings, "dataset-schema")
    except SchemaFileError as error:
        raise ExtractionError(f"{error.path}: {error.reason}; restore it from version control") from error
    if (name := document.data.get("name", path.stem)) != path.stem:
        message = f"name is {quote(name)}, but the file is {path.name}"
        findings.add("dataset-schema", message, "rename the file, or correct the field", "/name")
    if findings.problems:
        raise ExtractionError(f"{path} is not valid; nothing was written\n{format_text(Result(0, findings.problems))}")
