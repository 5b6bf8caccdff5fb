"""A small dataset that hostile files are put into, and the commands that read each kind of file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace import find_root
from flashinfer_trace.dataset import ROOT_VARIABLE
from tools.kernel_tracing.report.trace_files import load_traces, packed

__all__ = ["KINDS", "Command", "Kind", "Sandbox"]

#: A Definition of each structure: a scalar constant, a shared reference, a sampler, page tables, optional tags.
DEFINITIONS = (
    "rmsnorm_h512",
    "gqa_paged_decode_h32_kv8_d128_ps1",
    "top_k_sampling_from_probs_v128256",
    "gemm_bf16_n1024_k6144",
)
MODEL = "deepseek-v3"
ARCHITECTURE = "DeepseekV3ForCausalLM"

#: The name of a tool, and its arguments. ``NAME`` stands for the Definition, ``FILE`` for the hostile file.
Command = tuple[str, ...]

VALIDATE, EMBED = ("cli", "validate"), ("cli", "embed", "--check")
VALIDATE_ONE, EMBED_ONE = (*VALIDATE, "FILE"), (*EMBED, "NAME")
LIST, SHOW = ("cli", "list"), ("cli", "show", "NAME")
VERIFY = ("cli", "verify", "NAME", "--examples", "1")
COVERAGE = (("cli", "coverage"), ("cli", "coverage", "--model", MODEL))
EXTRACT = ("extract", "--model-name", MODEL, "--dry-run", "--sources", "absent")


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        name: of the kind.
        share: how many of 1,000 files of its group are of this kind.
        commands: what reads such a file.
        sometimes: what reads it too, but takes long: one file in `every` is given to these.
        every: see `sometimes`.
    """

    name: str
    share: int
    commands: Sequence[Command]
    sometimes: Sequence[Command] = ()
    every: int = 100


#: Definitions and their references are one group, everything else the other.
KINDS: dict[str, Sequence[Kind]] = {
    "definitions": (
        Kind("definition", 850, (VALIDATE_ONE, EMBED_ONE, LIST, SHOW), (VALIDATE, EMBED, VERIFY, EXTRACT, *COVERAGE)),
        Kind("reference", 150, (VALIDATE, EMBED), (VERIFY,)),
    ),
    "others": (
        Kind("evidence", 250, (VALIDATE, EMBED, VERIFY, EXTRACT)),
        Kind("naming", 150, (VALIDATE, EMBED, VERIFY, EXTRACT)),
        Kind("records", 100, (VALIDATE, EMBED, VERIFY)),
        Kind("schema", 100, (VALIDATE, EMBED)),
        Kind("model", 100, (EXTRACT, ("extract", "--config", "FILE", *EXTRACT[1:]))),
        Kind("needs", 100, COVERAGE),
        Kind("digest", 100, (EXTRACT,)),
        Kind(
            "trace", 100, (("trace", "--diff", "FILE", "GOOD"), ("trace", "--verify", "FILE", "--sources", "SOURCES"))
        ),
    ),
}


class Sandbox:
    """The dataset below a temporary directory. `restore` undoes whatever was done to it.

    Attributes:
        root: the dataset root.
    """

    def __init__(self, directory: Path) -> None:
        self.root = directory / "dataset"
        self.pristine = directory / "pristine"
        build(self.pristine, find_root())
        self.restore()
        os.environ[ROOT_VARIABLE] = str(self.root)

    def restore(self) -> None:
        """Makes the dataset anew."""
        if self.root.exists():
            shutil.rmtree(self.root)
        shutil.copytree(self.pristine, self.root)

    def bases(self, kind: str) -> list[Path]:
        """The valid files of a kind, sorted."""
        patterns = {
            "definition": "definitions/*/*.json",
            "reference": "reference/*/*.py",
            "evidence": "evidence/*/*.json",
            "naming": "schema/naming.json",
            "records": "schema/records.json",
            "schema": "schema/*.schema.json",
            "model": "models/*.json",
            "needs": "models/needs/*.json",
            "digest": "traces/digests/*.json",
            "trace": "traces/bad.json",
        }
        found = sorted(self.root.glob(patterns[kind]))
        if kind == "reference":  # extraction reads those of every family, but only those of a Definition are rendered
            found = [path for path in found if (self.root / "definitions" / path.parent.name).is_dir()]
        return found

    def arguments(self, command: Command, path: Path) -> list[str]:
        """The arguments of a command for a hostile file at `path`."""
        known = {
            "NAME": path.stem if path.stem in DEFINITIONS else DEFINITIONS[0],
            "FILE": str(path),
            "GOOD": str(self.root / "traces" / "good.json"),
            "SOURCES": str(self.root / "sources"),
        }
        return [known.get(word, word) for word in command[1:]]


def build(root: Path, source: Path) -> None:
    """Copies a few files of the dataset at `source` to `root`, and makes what else the commands read."""
    names = shutil.ignore_patterns("tests")
    for part in ("schema", "reference"):
        shutil.copytree(source / part, root / part, ignore=names)
    for name in DEFINITIONS:
        (path,) = source.glob(f"definitions/*/{name}.json")
        for part in ("definitions", "evidence"):
            copy(source, root, f"{part}/{path.parent.name}/{name}.json")
    for name in (f"models/{MODEL}.json", f"models/needs/{MODEL}.json", f"traces/digests/{ARCHITECTURE}.json"):
        copy(source, root, name)
    trace = json.dumps(small_trace(source), indent=1)
    for name in ("good", "bad"):
        (root / "traces" / f"{name}.json").write_text(trace, encoding="utf-8")
    package = root / "sources" / "sglang" / "srt" / "models"
    package.mkdir(parents=True)
    (package.parent / "layers").mkdir()
    (package / "deepseek.py").write_text("def forward(self):\n    return self.act(1)\n", encoding="utf-8")


def copy(source: Path, root: Path, name: str) -> None:
    if (source / name).is_file():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, root / name)


def small_trace(source: Path) -> dict[str, Any]:
    """Kernel traces with three kernels and two chains each: whole, but readable in a millisecond."""
    document = load_traces(source / "traces" / "kernel_traces.json")
    document["kernels"] = [{**kernel, "chains": kernel["chains"][:2]} for kernel in document["kernels"][:3]]
    return packed(document)
