"""Checks the file of a model before anything is derived from it."""

from __future__ import annotations

from pathlib import Path

from flashinfer_trace.dataset.validation import Result, format_text
from flashinfer_trace.dataset.validation.data_rules import check_names
from flashinfer_trace.dataset.validation.problems import Findings
from flashinfer_trace.dataset.validation.schemas import SchemaFileError, Schemas, check_schema
from flashinfer_trace.format.json_source import load
from tools.extract_definitions.errors import ExtractionError

__all__ = ["check_file"]


def check_file(root: Path, path: Path) -> None:
    """Checks models/<name>.json, which can be read, by schema/model.schema.json, and its name and title.

    Raises:
        ExtractionError: it has problems; the message has a line for each, as `flashinfer-trace validate` prints it.
    """
    document = load(path)
    findings = Findings(path, root, document)
    try:
        check_schema(Schemas(root).of("model"), document.data, findings, "dataset-schema")
    except SchemaFileError as error:
        raise ExtractionError(f"{error.path}: {error.reason}; restore it from version control") from error
    check_names(path, "model", document.data, {}, findings)
    if findings.problems:
        raise ExtractionError(f"{path} is not valid; nothing was written\n{format_text(Result(0, findings.problems))}")
