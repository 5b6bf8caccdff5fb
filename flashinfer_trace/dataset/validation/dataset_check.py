"""Checks files of a dataset: the one entry point of the validator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.evidence import Evidence, EvidenceError, file_in, read, run_file
from flashinfer_trace.dataset.evidence_run import Run
from flashinfer_trace.dataset.flashinfer_bench import CompatibilityError, compatibility_path, load_compatibility
from flashinfer_trace.dataset.kernel_tags import kernel_tags_of
from flashinfer_trace.dataset.model_claims import ModelClaims, ModelClaimsError, load_model_claims, missing_files
from flashinfer_trace.dataset.validation import definition_rules, reference_rules
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.data_rules import (
    DATA,
    check_claims_file,
    check_names,
    check_traffic,
    check_workloads,
    traffic_names,
)
from flashinfer_trace.dataset.validation.definition_rules import SIBLINGS, Contract, check_contract, contract_of
from flashinfer_trace.dataset.validation.evidence_rules import (
    check_evidence_file,
    check_machines,
    check_orphan,
    check_release,
    check_run_file,
    check_verified,
)
from flashinfer_trace.dataset.validation.files import DatasetFiles
from flashinfer_trace.dataset.validation.model_rules import check_models, check_numbers
from flashinfer_trace.dataset.validation.problems import Findings, Result, quote
from flashinfer_trace.dataset.validation.reference_rules import ReferenceMemo
from flashinfer_trace.dataset.validation.schemas import SchemaFileError, Schemas, check_schema
from flashinfer_trace.dataset.validation.tag_rules import (
    check_calls,
    check_claims,
    check_family_tags,
    check_meaning,
    check_no_kernel,
    check_tag_meanings,
)
from flashinfer_trace.format.files import UnreadableFile, read_bytes
from flashinfer_trace.format.json_source import JsonDocument, JsonSourceError, load, load_lines, parse
from flashinfer_trace.format.naming import NamePattern, Naming, NamingError, family_name, load_naming
from flashinfer_trace.format.roots import is_private
from flashinfer_trace.kernels import family_kernels, kernels_of
from flashinfer_trace.kernels.table import KernelFacts


def validate_paths(
    paths: Sequence[Path],
    root: Path,
    contents: Mapping[Path, str] | None = None,
    release: bool = False,
    advance: Callable[[str], None] = lambda name: None,
) -> Result:
    """Checks Definitions and evidence files and reports every problem at once.

    It never raises for what a file contains, runs no reference, imports no torch, and reads at most 4 MiB of each file.

    Args:
        paths: files and directories. The root (also meant by no path at all) stands for the whole dataset: Definitions,
            evidence and conventions. A file or directory outside the root is checked as Definitions.
        root: the dataset root, a directory with definitions/, schema/, reference/ and evidence/.

        contents: text that is checked instead of what a file holds: what somebody is about to write.
        release: a kernel of today's stack without a run on Hopper that today's code judged is a problem too.
        advance: is called with the name of each file that is about to be checked.

    Returns:
        Number of Definitions that were checked (and of evidence files among `paths`), and the problems in order of file
        and line.
    """
    check = _DatasetCheck(root, contents or {}, release)
    for path in paths or [root]:
        check.add(Path(path))
    return check.run(advance)


class _DatasetCheck:
    def __init__(self, root: Path, contents: Mapping[Path, str], release: bool) -> None:
        self.files = DatasetFiles(root)
        self.contents = {self.files.locate(path): text for path, text in contents.items()}
        self.root = self.files.root
        self.release = release
        self.schemas = Schemas(self.root)
        self.findings: dict[Path, Findings] = {}
        self.definition_paths: dict[Path, None] = {}
        self.evidence_paths: dict[Path, None] = {}
        self.context_paths: dict[Path, None] = {}  # evidence that nobody named: checked, but not counted
        self.first_of_name: dict[str, Path] = {}
        self.evidence: dict[Path, Evidence | None] = {}
        self.runs: dict[str, Run | None] = {}
        self.headers: dict[str, Any] = {}  # by the name of the run
        self.references = ReferenceMemo()
        self.members: dict[str, list[tuple[str, Contract]]] = {}  # the first of each family

    def findings_of(self, path: Path) -> Findings:
        """The findings of one file; the same object for every call."""
        if path not in self.findings:
            self.findings[path] = Findings(path, self.root)
        return self.findings[path]

    def add(self, path: Path) -> None:
        """Queues what `path` stands for."""
        path = self.files.locate(path)
        if path == self.root:
            self._check_conventions()
            self._check_data()
            self._check_records()
            self._check_traffic()
            for missing, fix in missing_files(self.root):
                self.findings_of(missing).add("dataset-schema", "the file is missing", fix)
            self._queue(self.files.definitions, self.definition_paths)
            if self.files.evidence.exists():
                self._queue(self.files.evidence, self.context_paths)
        elif self.files.is_below(path, self.files.evidence):
            self._queue(path, self.evidence_paths)
        elif self.files.is_below(path, self.root / "schema") and path.name in ("schema", "naming.json"):
            self._check_conventions()
        else:
            self._queue(path, self.definition_paths)

    def _queue(self, path: Path, queue: dict[Path, None]) -> None:
        queue.update(dict.fromkeys(self.files.json_files(path, self.findings_of)))

    def run(self, advance: Callable[[str], None]) -> Result:
        """Checks everything that was queued."""
        for path in self.definition_paths:
            advance(path.stem)
            self._check_definition(path)
        for path in (*self.evidence_paths, *self.context_paths):
            if path.parent == self.files.runs:
                self._run_of(path.stem)
                continue
            check_orphan(path, self.root, self.findings_of(path))
            self._evidence_of(path)
        if self.context_paths:  # one run stands out among all, not among the few of some files
            check_machines(self.evidence, self.headers, self.findings_of)
        problems = sorted(problem for findings in self.findings.values() for problem in findings.problems)
        return Result(len(self.definition_paths | self.evidence_paths), problems)

    def _load(self, path: Path) -> JsonDocument | None:
        findings = self.findings_of(path)
        try:
            if path in self.contents:
                document = parse(self.contents[path].encode())
            else:
                document = load_lines(path) if path.suffix == ".jsonl" else load(path)
        except JsonSourceError as error:
            found = error.problem
            findings.add(found.rule, found.message, found.hint, found.pointer, found.line)
            return None
        findings.document = document
        for problem in document.problems:
            findings.add(problem.rule, problem.message, problem.hint, problem.pointer, problem.line)
        return document

    def _check_definition(self, path: Path) -> None:
        document = self._load(path)
        if document is None:
            return
        findings, data = self.findings_of(path), document.data
        schema = self._schema("definition")
        if schema is not None:
            check_schema(schema, data, findings)
        candidate = Candidate(data) if isinstance(data, dict) else None
        # Beyond the schema's sizes there is nothing worth saying, and comparing all with all would take long.
        if candidate is None or not candidate.has_sane_size:
            return
        self._check_path(candidate, path, findings)
        definition_rules.check_identifiers(candidate, findings)
        definition_rules.check_descriptions(candidate, findings)
        check_numbers(candidate, findings)
        if self.model_claims is not None:
            check_models(candidate, self.model_claims, findings)
            check_calls(candidate, self.model_claims, findings)
        definition_rules.check_constraints(candidate, findings)
        family = None
        if self.naming is not None:
            family = definition_rules.check_name(candidate, self.naming, findings)
            definition_rules.check_tags(candidate, self.naming, findings)
        check_tag_meanings(candidate, findings)
        reference = self.references.parse(candidate, findings)
        constants = [name for name, _, _ in reference.constants] if reference else []
        definition_rules.check_axes(candidate, family, constants, findings)
        if reference is not None:
            self.references.check(reference, candidate, findings)
            if family is not None and not candidate.malformed_axes:
                reference_rules.check_rendering(reference.source, candidate, family, self.root, findings)
        self._check_meaning(candidate, findings)
        self._check_claims(candidate, family, findings)
        if (candidate.is_verified or self.release) and candidate.name and candidate.op_type and self.naming is not None:
            path = file_in(self.files.evidence, candidate.op_type, candidate.name)
            self._check_runs(candidate, family, path, findings)

    def _check_runs(self, candidate: Candidate, family: NamePattern | None, path: Path, findings: Findings) -> None:
        evidence = self._evidence_of(path) if os.path.lexists(path) else None
        kernels = kernels_of(family.name, candidate.definition) if family and candidate.definition else {}
        before = len(findings.problems)
        if candidate.is_verified:
            check_verified(candidate, evidence, kernels, path, self.root, findings)
        if self.release and len(findings.problems) == before:
            check_release(candidate, evidence, kernels, findings)

    def _check_claims(self, candidate: Candidate, family: NamePattern | None, findings: Findings) -> None:
        if family is None or self.naming is None:
            return
        check_contract(candidate, self._siblings(candidate, family), findings)
        definition = candidate.definition
        if definition is None:
            return
        computing = kernels_of(family.name, definition)
        if not computing and family_kernels(family.name):
            check_no_kernel(candidate, family.name, findings)
            return  # Until a kernel takes it, nobody can say which tags it should have.
        ran = self._ran(candidate, computing)
        if ran is None:
            return
        kernels = kernel_tags_of(family.name, definition, ran)
        check_claims(candidate, kernels, findings)
        if self.model_claims is not None:
            check_family_tags(candidate, family, kernels, self.naming, findings)

    def _siblings(self, candidate: Candidate, family: NamePattern) -> list[Contract]:
        """The contracts of the first other Definitions of a family."""
        if family.name not in self.members:
            found: list[tuple[str, Contract]] = []
            directory = self.files.definitions / family.op_type
            for file in sorted(os.listdir(directory)) if directory.is_dir() else ():
                name = file.removesuffix(".json")
                contract = self._contract(directory / file, family) if family.may_have(name) else None
                if contract is not None:
                    found.append((name, contract))
                if len(found) > SIBLINGS:
                    break
            self.members[family.name] = found
        return [contract for name, contract in self.members[family.name] if name != candidate.name][:SIBLINGS]

    def _contract(self, path: Path, family: NamePattern) -> Contract | None:
        """The contract of a Definition of the family; None if it is another's or malformed, which is reported there."""
        try:
            data = parse(self.contents[path].encode()).data if path in self.contents else load(path).data
        except JsonSourceError:
            return None
        one = Candidate(data) if isinstance(data, dict) else None
        if one is None or not one.has_sane_size or self.naming is None or family_name(data, self.naming) != family.name:
            return None
        return contract_of(one)

    def _ran(self, candidate: Candidate, kernels: Mapping[str, KernelFacts]) -> set[str] | None:
        """Labels of the kernels whose evidence fits a Definition; None if its evidence has problems of its own."""
        definition = candidate.definition
        if definition is None or candidate.op_type is None or candidate.name is None:
            return set()
        path = file_in(self.files.evidence, candidate.op_type, candidate.name)
        if not os.path.lexists(path):
            return set()
        try:
            evidence = self._evidence_of(path) if candidate.is_verified else read(self.root, definition)
        except EvidenceError:
            return None
        return {entry.kernel_label for entry in evidence.proofs(definition, kernels)} if evidence else None

    def _check_data(self) -> None:
        """Checks the data files that a dataset may have by their schemas, and what these cannot express."""
        titles: dict[str, Path] = {}
        for pattern, name in DATA.items():
            for path in sorted(self.root.glob(pattern)):
                document, schema = self._load(path), self._schema(name)
                if document is None or schema is None:
                    continue
                findings = self.findings_of(path)
                invalid = check_schema(schema, document.data, findings, "dataset-schema")
                check_names(path, name, document.data, titles, findings)
                if name == "curated_claims" and not invalid:
                    check_claims_file(document.data, self.files.stems, self.root, findings)

    def _check_meaning(self, candidate: Candidate, findings: Findings) -> None:
        try:
            known = load_compatibility(self.root)
        except CompatibilityError as error:
            path = compatibility_path(self.root)
            self.findings_of(path).add("dataset-schema", str(error), "see schema/compatibility.schema.json")
            return
        if known is not None:
            check_meaning(candidate, known, findings)

    def _check_traffic(self) -> None:
        """Checks workloads/traffic.json, if it is there, and then the recorded workloads."""
        path = self.root / "workloads" / "traffic.json"
        document, schema = self._load(path) if path.exists() else None, self._schema("traffic")
        if document is None or schema is None:
            return
        check_traffic(document.data, schema, self.findings_of(path))
        schema = self._schema("workloads")
        if self.findings_of(path).problems or schema is None:
            return
        names = traffic_names(document.data)
        for path in sorted(self.root.glob("workloads/*/*.json")):
            if (file := self._load(path)) is not None:
                check_workloads(path, file.data, schema, names, self.findings_of(path))

    def _check_path(self, candidate: Candidate, path: Path, findings: Findings) -> None:
        if candidate.name is None or candidate.op_type is None:
            return
        expected = Path(candidate.op_type) / f"{candidate.name}.json"
        inside = self.files.is_below(path, self.files.definitions)
        actual = path.relative_to(self.files.definitions) if inside else Path(path.parent.name) / path.name
        if actual != expected:
            message = f"the Definition belongs at definitions/{expected.as_posix()}"
            findings.add("file-path", message, "move the file, or correct op_type or name", "/name")
        others = [other for other in self.files.stems.get(candidate.name, []) if inside and other != path]
        first = self.first_of_name.setdefault(candidate.name, path)
        if first != path:
            others.insert(0, first)
        if others:
            shown = self.findings_of(others[0]).file
            findings.add("name-duplicate", f"{shown} has the name {quote(candidate.name)} too", "rename one", "/name")

    def _evidence_of(self, path: Path) -> Evidence | None:
        """Checks an evidence file once; None if it is unusable."""
        if path not in self.evidence:
            self.evidence[path] = None
            files = list(self.files.json_files(path, self.findings_of))
            document, schema = self._load(path) if files else None, self._schema("evidence")
            if document is not None and schema is not None:
                findings = self.findings_of(path)
                self.evidence[path] = check_evidence_file(path, document.data, schema, self._run_of, findings)
        return self.evidence[path]

    def _run_of(self, name: str) -> Run | None:
        """Checks the header of a run once; None if it is missing or unusable."""
        if name not in self.runs:
            self.runs[name] = None
            path = run_file(self.files.evidence, name)
            there = os.path.lexists(path) and list(self.files.json_files(path, self.findings_of))
            document, schema = self._load(path) if there else None, self._schema("evidence_run")
            if document is not None and schema is not None:
                self.headers[name] = document.data
                findings = self.findings_of(path)
                self.runs[name] = check_run_file(path, self.root, document.data, schema, findings)
        return self.runs[name]

    def _schema(self, name: str) -> Any:
        """A compiled schema, None (and one problem) if its file is unusable."""
        try:
            return self.schemas.of(name)
        except SchemaFileError as error:
            hint = "restore it from version control"
            self.findings_of(error.path).add("dataset-schema", error.reason, hint, line=error.line)
            return None

    @cached_property
    def model_claims(self) -> ModelClaims | None:
        """The claims of models/; None if it has none, or (and one problem) if it is unusable."""
        try:
            return load_model_claims(self.root)
        except ModelClaimsError as error:
            findings = self.findings_of(error.path)
            if not findings.problems:  # otherwise they say what is wrong, and where
                findings.add("dataset-schema", error.reason, error.hint, line=error.line)
            return None

    @cached_property
    def naming(self) -> Naming | None:
        """The conventions, None (and one problem) if they are unusable."""
        try:
            return load_naming(self.root)
        except NamingError as error:
            message = str(error).replace(f"{self.root}/", "")
            path = self.root / "schema" / "naming.json"
            self.findings_of(path).add("dataset-schema", message, "see schema/naming.schema.json")
            return None

    def _check_conventions(self) -> None:
        """Checks schema/naming.json by its own schema, and that every schema compiles.

        That of a private root only adds to the dataset's, with which it is read.
        """
        document = None if is_private(self.root) else self._load(self.root / "schema" / "naming.json")
        schema = self._schema("naming")
        if document is not None and schema is not None:
            check_schema(
                schema, document.data, self.findings_of(self.root / "schema" / "naming.json"), "dataset-schema"
            )
        for name in ("definition", "evidence", "evidence_run"):
            self._schema(name)
        _ = self.naming

    def _check_records(self) -> None:
        """Finds what a scaffold left to be written in the harness records; a wheel keeps them elsewhere."""
        for path in sorted((self.root / "flashinfer_trace" / "families").rglob("*.py")):
            try:
                lines = read_bytes(path).splitlines()
            except UnreadableFile as error:
                self.findings_of(path).add(error.rule, error.reason, error.hint)
                continue
            for number, line in enumerate(lines, 1):
                if b"TODO" in line:
                    message = "the harness record has a TODO"
                    self.findings_of(path).add("record-unfinished", message, "write what it asks for", line=number)
