"""The needs of a model, by op, and the calls of its code: which Definitions and which evidence there are. Imports no
torch.

Both are data in ``models/needs/<model>.json``, which `flashinfer-trace sync` derives from the traces of the model's
code and the constants in ``models/<model>.json``. A kernel (``source:name``) has the Definitions for which it runs
where evidence is recorded, according to their tags or the table of kernels; those that only name it do not count.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.evidence import RECORDED_ON, VERIFIED, proofs
from flashinfer_trace.dataset.store import DatasetError, definitions
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.json_values import strings
from flashinfer_trace.format.naming import MAX_NAME, family_name, load_naming
from flashinfer_trace.kernels import TABLE, kernels_of
from flashinfer_trace.kernels.names import KINDS, RUN, key_of

#: Longest reason why no family covers an op: it lists the kernels.
MAX_REASON = 4000


@dataclass(frozen=True)
class OpCoverage:
    """The Definitions of one op_type that one op of a model needs.

    Attributes:
        name: the op's name in the model's code.
        op_type: their op_type.
        exists: names of those in the dataset, verified or not.
        verified: names of those that evidence verifies.
        missing: names of those that the dataset lacks.
    """

    name: str
    op_type: str
    exists: tuple[str, ...]
    verified: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class ModelCoverage:
    """One model: its ops that have Definitions, and its gaps.

    Attributes:
        model: name of the model.
        ops: ops with a family, in order of their names and op_types.
        unsupported: op -> why no Definition of it follows from the model.
    """

    model: str
    ops: tuple[OpCoverage, ...]
    unsupported: dict[str, str]


def model_coverages(
    root: Path, model: str | None = None, needs: Mapping[str, Mapping[str, Any]] | None = None
) -> list[ModelCoverage]:
    """Coverage of one model, or of every model under ``models/needs/``.

    Raises:
        DatasetError: the model does not exist (the message suggests the closest name), or a file is malformed.
    """
    known = {one.name: one for one in definitions(root=root)}
    found = []
    for name, needed in (load_needs(root, model) if needs is None else needs).items():
        try:
            found.append(_coverage(name, needed, known))
        except (KeyError, TypeError, AttributeError) as error:
            place = f"models/needs/{name}.json: malformed ({error!r})"
            raise DatasetError(f"{place}; in a checkout, `flashinfer-trace sync` rewrites it") from None
    return found


def _coverage(name: str, needed: Mapping[str, Any], known: Mapping[str, Definition]) -> ModelCoverage:
    ops = []
    for op in needed["ops"]:
        for op_type, names in op["definitions"].items():
            if not all(isinstance(text, str) and len(text) <= MAX_NAME for text in (op["name"], op_type, *names)):
                raise TypeError(f"a name is not a string of at most {MAX_NAME} characters")
            exists = tuple(one for one in names if one in known)
            verified = tuple(one for one in exists if VERIFIED in known[one].tags)
            missing = tuple(one for one in names if one not in known)
            ops.append(OpCoverage(op["name"], op_type, exists, verified, missing))
    unsupported = {op["name"]: op["reason"] for op in needed["unsupported"]}
    if not all(isinstance(text, str) and len(text) <= MAX_REASON for pair in unsupported.items() for text in pair):
        raise TypeError(f"name or reason of an unsupported op is not a string of at most {MAX_REASON} characters")
    return ModelCoverage(name, tuple(ops), unsupported)


def load_needs(root: Path, model: str | None = None) -> dict[str, dict[str, Any]]:
    """The contents of ``models/needs/`` by model; schema/model_needs.schema.json describes them.

    Args:
        root: the dataset root.
        model: only this model; `_`, `.`, `-`, blanks and case in its name are ignored. Or a config.json: the model
            that has its constants.

    Raises:
        DatasetError: the files do not exist, the model is not among them, or a file cannot be read.
    """
    directory = root / "models" / "needs"
    paths = {path.stem: path for path in sorted(directory.glob("*.json"), key=lambda path: path.stem)}
    if not paths:
        raise DatasetError(f"no model needs in {directory}; in a checkout, `flashinfer-trace sync` writes them")
    if model is not None and model.endswith(".json"):
        model = model_of_config(root, Path(model))
    if model is not None:
        names = {plain_name(name): name for name in paths}
        if plain_name(model) not in names:
            close = difflib.get_close_matches(plain_name(model), names, n=1, cutoff=0.3)
            hint = f"; did you mean {names[close[0]]}?" if close else "."
            raise DatasetError(f"no model named {model!r} in {directory}{hint} Available: {', '.join(paths)}")
        name = names[plain_name(model)]
        paths = {name: paths[name]}
    try:
        return {name: load_object(path) for name, path in paths.items()}
    except JsonSourceError as error:
        raise DatasetError(f"{directory}: cannot be read: {error}") from error


def model_of_config(root: Path, path: Path) -> str:
    """The model whose constants a config.json has.

    Args:
        root: the dataset root.
        path: a config.json as published; the constants may be in its text_config.

    Raises:
        DatasetError: the file cannot be read, or no model has its constants; the message names the closest one.
    """
    try:
        whole = load_object(path)
        models = {one.stem: load_object(one)["config"] for one in sorted((root / "models").glob("*.json"))}
    except (JsonSourceError, KeyError) as error:
        raise DatasetError(f"{path}: cannot be compared with models/: {error}") from None
    text = whole.get("text_config")
    config = {**whole, **text} if isinstance(text, dict) else whole
    differ = {
        name: [field for field, value in own.items() if field not in ENTERED and not _holds(config.get(field), value)]
        for name, own in models.items()
    }
    closest = min(differ, key=lambda name: len(differ[name]), default="")
    if not closest:
        raise DatasetError(f"{path}: no model in {root / 'models'} to compare it with")
    if differ[closest]:
        fields = ", ".join(differ[closest][:MOST_NAMES])
        dry = f"in a checkout, `python -m tools.extract --model-name NAME --config {path}` runs it dry"
        raise DatasetError(f"{path}: no model has its constants; {closest} differs in {fields}; {dry}")
    return closest


#: Fields of models/ that published files may lack, or have in another form.
ENTERED = {"torch_dtype", "dtype"}


def _holds(given: Any, own: Any) -> bool:
    """Whether a value is as a model has it, which keeps some members of a quantization's or a rotation's settings."""
    if isinstance(own, dict) and isinstance(given, dict):
        return all(_holds(given.get(name), value) for name, value in own.items())
    return bool(given == own)


def matrix(found: Sequence[ModelCoverage], name: str = "Model") -> list[list[str]]:
    """Rows of a table, headings first: verified / existing / needed Definitions by model and op_type."""
    op_types = sorted({op.op_type for one in found for op in one.ops})
    rows = [[name, *op_types, "all", "gaps"]]
    for one in found:
        groups = [[op for op in one.ops if op.op_type == op_type] for op_type in op_types]
        cells = [_cell(group) for group in (*groups, list(one.ops))]
        rows.append([one.model, *cells, str(len(one.unsupported))])
    return rows


def op_table(one: ModelCoverage) -> list[list[str]]:
    """Rows of a table, headings first: the ops of one model, with what is missing."""
    rows = [["Op", "op_type", "Needed", "Exists", "Verified", "Missing"]]
    for op in one.ops:
        counts = [len(op.exists) + len(op.missing), len(op.exists), len(op.verified)]
        rows.append([op.name, op.op_type, *map(str, counts), ", ".join(op.missing) or "-"])
    return rows


def plain_name(name: str) -> str:
    """The name of a model without what people write differently: `qwen3_8b`, `Qwen3-8B` and `qwen3-8b` are one."""
    return re.sub(r"[-_.\s]", "", name).lower()


def _cell(ops: Sequence[OpCoverage]) -> str:
    verified = {name for op in ops for name in op.verified}
    exists = {name for op in ops for name in op.exists}
    needed = exists | {name for op in ops for name in op.missing}
    return f"{len(verified)}/{len(exists)}/{len(needed)}" if needed else "-"


#: Kernels that get no Definition, and those that have none yet, each with the reason.
LISTED = "traces/kernels_without_definition.json"
MOST_NAMES = 3
#: Longest reason, as the list's schema has it.
LONGEST_REASON = 400


@dataclass(frozen=True)
class KernelCoverage:
    """One kernel that a model's code calls.

    Attributes:
        kernel: ``source:name``.
        ops: names of the ops that call it.
        definitions: names of its Definitions, those of the model first.
        of_model: how many of them have the model's tag.
        evidence: names of those that have evidence from this kernel.
        reason: why it has none, if it is listed.
    """

    kernel: str
    ops: tuple[str, ...]
    definitions: tuple[str, ...]
    of_model: int
    evidence: tuple[str, ...]
    reason: str


def definitions_by_kernel(root: Path, dataset: Iterable[Definition]) -> dict[str, list[str]]:
    """``source:name`` of each kernel -> sorted names of the Definitions whose tags or whose family's record name it.

    An exported function and the op that it calls are one kernel, and so are a function and the Triton kernels that it
    launches.
    """
    records = _recorded_paths(root)
    return _by_kernel(root, dataset, lambda one: _tagged(one, KINDS) | records(one, False))


def definitions_with_kernel(root: Path, dataset: Iterable[Definition]) -> dict[str, list[str]]:
    """The same without those that only say that libraries or models call the kernel, or whose GPU is another one."""
    records = _recorded_paths(root)
    return _by_kernel(root, dataset, lambda one: _tagged(one, RUN) | records(one, True))


def definitions_with_evidence(root: Path, dataset: Iterable[Definition]) -> dict[str, list[str]]:
    """The same for Definitions that have evidence from the kernel."""
    return _by_kernel(root, dataset, lambda one: {run.path for run in proofs(root, one)})


def _tagged(definition: Definition, namespaces: Iterable[str]) -> set[str]:
    tags = (tag.partition(":") for tag in definition.tags)
    return {path for namespace, _, path in tags if namespace in set(namespaces)}


def _recorded_paths(root: Path) -> Callable[[Definition, bool], set[str]]:
    """(definition, whether only kernels that ran where evidence is recorded) -> paths of its kernels."""
    naming = load_naming(root)

    def paths(definition: Definition, here: bool) -> set[str]:
        family = family_name(definition, naming)
        kernels = kernels_of(family, definition).values() if family is not None else ()
        return {kernel.path for kernel in kernels if not here or kernel.runs_on(RECORDED_ON)}

    return paths


def _by_kernel(
    root: Path, dataset: Iterable[Definition], paths_of: Callable[[Definition], set[str]]
) -> dict[str, list[str]]:
    also: dict[str, set[str]] = defaultdict(set)
    for entry in TABLE:
        also[entry.path].update((*entry.launches, *(place.path for place in entry.places)))
    found: dict[str, set[str]] = defaultdict(set)
    for definition in dataset:
        paths = paths_of(definition)
        for path in paths | {other for one in paths for other in also.get(one, ())}:
            found[key_of(path)].add(definition.name)
    return {key: sorted(names) for key, names in found.items() if key}


def kernel_coverages(root: Path, models: Iterable[Mapping[str, Any]]) -> list[KernelCoverage]:
    """Coverage of the kernels of some models, one after the other.

    Raises:
        DatasetError: a document has no kernels or is malformed, or the list of reasons cannot be read.
    """
    known = {one.name: one for one in definitions(root=root)}
    by_kernel, why = definitions_with_kernel(root, known.values()), reasons(root)
    named = definitions_by_kernel(root, known.values())
    with_evidence = definitions_with_evidence(root, known.values())
    found = []
    for tag, kernel, ops in ((f"model:{model}", *one) for model, called in map(_called, models) for one in called):
        terminal = kernel.partition(".")[0]  # a method is covered if its class is
        names = by_kernel.get(terminal, [])
        own = [name for name in names if tag in known[name].tags]
        proven = with_evidence.get(terminal, [])
        ordered = (*own, *(name for name in names if name not in own))
        reason = "" if names else why.get(terminal, "")
        if not names and terminal in named:
            reason = f"none yet; it did not run for the {len(named[terminal])} that name it"
        found.append(KernelCoverage(kernel, ops, ordered, len(own), tuple(proven), reason))
    return found


def _called(needed: Mapping[str, Any]) -> tuple[str, list[tuple[str, tuple[str, ...]]]]:
    """A model, and the kernels that it calls, each with the names of its ops."""
    fix = "in a checkout, run `flashinfer-trace sync`"
    try:
        (model,) = strings([needed["model"]])
        strings([*needed.get("kernel_sources", {}).values()])
        if "kernels" not in needed:
            raise DatasetError(f"models/needs/{model[:100]}.json: no kernels; {fix}")
        return model, [(strings([entry["kernel"]])[0], strings(entry["ops"])) for entry in needed["kernels"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"a file in models/needs/ is malformed ({error!r}); {fix}") from None


def reasons(root: Path) -> dict[str, str]:
    """``source:name`` of kernels without a Definition -> why; empty where the list is not installed.

    Raises:
        DatasetError: the list is malformed.
    """
    path = root / LISTED
    if not path.is_file():
        return {}
    try:
        document = load_object(path)
        found = {str(kernel): _reason(why) for kernel, why in document["not_yet"].items()}
        return {**found, **{key_of(dotted): _reason(why) for dotted, why in document["kernels"].items()}}
    except (JsonSourceError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{path}: malformed ({error!r})") from None


def _reason(why: Any) -> str:
    if not isinstance(why, str) or len(why) > LONGEST_REASON:
        raise TypeError(f"a reason is a text of at most {LONGEST_REASON} characters")
    return why


def kernel_table(found: Iterable[KernelCoverage]) -> list[list[str]]:
    """Rows of a table, headings first: kernels with most Definitions of the model first."""
    rows = [["Kernel", "Definitions", "of the model", "with evidence", "Names, or why there are none"]]
    for one in sorted(found, key=lambda one: (-one.of_model, -len(one.definitions), one.kernel)):
        more = len(one.definitions) - MOST_NAMES
        names = [*one.definitions[:MOST_NAMES], *([f"{more} more"] if more > 0 else [])]
        text = ", ".join(names) or one.reason or "neither a Definition nor a reason"
        rows.append([one.kernel, str(len(one.definitions)), str(one.of_model), str(len(one.evidence)), text])
    return rows
