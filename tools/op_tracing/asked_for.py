"""docs/coverage.md: the kernels and models that the dataset should cover, by name, and what it has of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashinfer_trace import Definition
from flashinfer_trace.dataset.evidence import RECORDED_ON, proofs
from flashinfer_trace.format.json_source import TRACES, load_object
from flashinfer_trace.kernels import TABLE
from flashinfer_trace.kernels.names import CALLED, KINDS
from flashinfer_trace.kernels.table import facts_of
from tools.shared.markdown import code, escape, table

__all__ = ["ASKED", "AskedKernel", "asked_for", "asked_kernels", "models_not_claimed"]

#: What was asked for, of schema/asked_for.schema.json.
ASKED = "traces/asked_for.json"
#: The most Definitions named in one cell; the rest are counted.
MAX_NAMES = 2
#: Configurations that are kept as fixtures, with the plan that a person read in the model's code.
PLANS = Path("tests", "extract", "published")

KERNELS = """## Kernels of DeepSeek models

The kernels that SGLang calls for DeepSeek models, as the project's issue lists them (`traces/asked_for.json`), by the
last component of their dotted path: Definitions whose tags name them, and how many of these have a run of the kernel
itself on which GPU. Kernels that need compute capability {capability} are tagged `called_as:`, because a tag names a
kernel by its library (`fi_api:`, `sgl_api:`, `triton_api:`) only once a run on a GPU of its own is recorded.

{count} of the kernels have no Definition that is tagged with DeepSeek-V3, DeepSeek-R1 or DeepSeek-V3.2, because by
default these models call others: their weights are in another format, they have another activation, route in another
way, or merge states in another base. Each of the kernels has a Definition of DeepSeek-V3's sizes all the same, as
`topk_softmax` has `moe_topk_softmax_topk8_e256`, although that model routes by sigmoid and groups of experts:
{names}.
"""
#: The models for which the kernels were asked for, as tags name them.
DEEPSEEK = {"deepseek-v3", "deepseek-r1", "deepseek-v3.2"}

MODELS = """## Models that are not claimed

Models that the project's issue asks for and that `models/` does not have, so that no tag names them. *Exist* counts the
Definitions of the plan that a person read in the model's code, for models whose published configuration is a fixture of
the tests of extraction (`tests/extract/published/`): these must not be in `models/`.
"""


_NEEDS = "Needs compute capability "
#: Why a kernel has no run that runs where evidence is recorded: none fits its Definitions as they stand.
AWAITS = "Awaits a GPU run."


@dataclass
class AskedKernel:
    """A kernel that the dataset should cover.

    Attributes:
        name: the last component of its dotted paths.
        tagged: names of the Definitions that have a tag of it.
        models: the models with which these are tagged.
        ran: whether a tag names it by its library.
        runs: GPU -> names of the Definitions that have a run of it there.
        reason: why there is no tag, or no run.
    """

    name: str
    tagged: list[str] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    ran: bool = False
    runs: dict[str, set[str]] = field(default_factory=dict)
    reason: str = ""


def asked_kernels(
    root: Path, dataset: Iterable[Definition], asked: Mapping[str, Any], without: Mapping[str, Any]
) -> list[AskedKernel]:
    """What the dataset has of each kernel, in the order of the list.

    Args:
        root: the dataset root.
        dataset: its Definitions.
        asked: traces/asked_for.json.
        without: traces/kernels_without_definition.json.
    """
    found = {name: AskedKernel(name) for names in asked["kernels"].values() for name in names}
    for path, reason in without["kernels"].items():
        if (known := found.get(_name(path))) is not None:
            known.reason = reason
    also = {one.path: one.launches for one in TABLE}
    in_table = {_name(path) for one in TABLE for path in (one.path, *one.launches)}
    for one in dataset:
        for tag in one.tags:
            namespace, _, path = tag.partition(":")
            kernel = found.get(_name(path))
            if kernel is not None and namespace in KINDS:
                kernel.ran |= namespace != CALLED
                kernel.models.update(one.tag_values("model"))
                if one.name not in kernel.tagged:
                    kernel.tagged.append(one.name)
        for entry in proofs(root, one):
            for name in {_name(entry.path), *(_name(path) for path in also.get(entry.path, ()))} & found.keys():
                found[name].runs.setdefault(entry.run.gpu, set()).add(one.name)
    needed = _capabilities()
    for kernel in found.values():
        if not kernel.runs and not kernel.reason and kernel.name in needed:
            kernel.reason = f"{_NEEDS}{needed[kernel.name]}."
        elif not kernel.runs and not kernel.reason and kernel.name in in_table:
            kernel.reason = AWAITS
    return list(found.values())


def asked_for(kernels: Iterable[AskedKernel]) -> str:
    """The part of the document about the kernels."""
    found = list(kernels)
    headings = ["Kernel", "Definitions with a tag", "Definitions with its own run", "Why there is none"]
    gpus = Counter(gpu for one in found for gpu in one.runs)
    rows = [[code(one.name), _names(one), ", ".join(_runs(one)), escape(one.reason)] for one in found]
    named = [one for one in found if one.tagged and not one.runs]
    needed = Counter(one.reason[len(_NEEDS) : -1] for one in named if one.reason.startswith(_NEEDS))
    waiting = sum(one.reason == AWAITS for one in named)
    others = [one.name for one in found if one.tagged and not one.models & DEEPSEEK]
    text = KERNELS.format(capability=" or ".join(sorted(needed)), count=len(others), names=", ".join(map(code, others)))
    missing = [f"{count} need compute capability {least}" for least, count in sorted(needed.items())]
    missing += [f"{waiting} await{'s' if waiting == 1 else ''} a GPU run"] if waiting else []
    missing.append(f"{sum(not one.tagged for one in found)} without a Definition")
    ran = f"{sum(bool(one.runs) for one in found)} that ran, {len(named)} that are only named"
    total = [f"**all {len(found)} kernels**", ran, ", ".join(_counted(gpus.items())), ", ".join(missing)]
    return "\n".join(["", text, *table(headings, [*rows, total])]) + "\n"


def models_not_claimed(root: Path, asked: Mapping[str, Any], dataset: Iterable[Definition]) -> str:
    """The part of the document about models."""
    known = {one.name for one in dataset}
    rows = []
    for model, reason in sorted(asked["models"].items()):
        path = root / PLANS / f"{model}.json"
        names = set(_planned(load_object(path, TRACES))) if path.exists() else set()
        rows.append([code(model), f"{len(names & known)} of {len(names)}" if names else "", escape(reason)])
    return "\n".join(["", MODELS, *table(["Model", "Exist", "Why it is not claimed"], rows)]) + "\n"


def _planned(fixture: Mapping[str, Any]) -> Iterable[str]:
    return (name for op in fixture["ops"].values() for names in op.values() for name in names)


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _capabilities() -> dict[str, str]:
    """Name of each kernel that does not run on the GPUs of the evidence -> the least compute capability for it."""
    return {
        _name(path): ".".join(map(str, kernel.min_capability))
        for kernels in facts_of(TABLE).values()
        for kernel in kernels.values()
        if not kernel.runs_on(RECORDED_ON)
        for path in (kernel.path, *kernel.tags)
    }


def _names(one: AskedKernel) -> str:
    """The Definitions of a kernel, those first for which it ran itself."""
    ran = {name for names in one.runs.values() for name in names}
    ordered = sorted(one.tagged, key=lambda name: name not in ran)
    more = len(ordered) - MAX_NAMES
    return ", ".join([*map(code, ordered[:MAX_NAMES]), *([f"{more} more"] if more > 0 else [])])


def _runs(one: AskedKernel) -> list[str]:
    return _counted((gpu, len(names)) for gpu, names in one.runs.items())


def _counted(gpus: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{count} on {gpu}" for gpu, count in sorted(gpus)]
