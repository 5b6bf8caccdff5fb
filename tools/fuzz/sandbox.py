"""A small dataset that hostile files are put into, and the commands that read each kind of file."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace import Definition, find_root, load
from flashinfer_trace.dataset.digests import lengths_sha256
from flashinfer_trace.dataset.evidence_run import fields_of
from flashinfer_trace.dataset.model_claims import recorded_path
from flashinfer_trace.dataset.store import ROOT_VARIABLE
from flashinfer_trace.format.files import write_json
from flashinfer_trace.judging.traffic import drawn, path_of
from tools import traffic_statistics
from tools.record_workloads import write

#: A Definition of each structure: a scalar constant, a shared reference, a sampler, page tables, optional tags.
DEFINITIONS = (
    "rmsnorm_h512",
    "gqa_paged_decode_h32_kv8_d128_ps1",
    "top_k_sampling_from_probs_v128256",
    "gemm_bf16_n1024_k6144",
)
MODEL = "deepseek-v3"

#: A recorded run: the smallest file among them.
RUN = "llama_3.1_8b-bf16-triton-fp8_cache"
#: Definition -> one of its workloads: one by the number of tokens, one by the lengths of requests.
WORKLOADS = {"rmsnorm_h512": "decode-64", "gqa_paged_decode_h32_kv8_d128_ps1": "chat-decode-16"}

#: Traffic of requests in the sandbox: what takes long is left out.
REQUESTS = ("chat-decode-1", "chat-decode-16", "recorded-decode", "chat-prefill-512")

#: ``cli`` or the name of a tool, and its arguments. ``NAME`` stands for the Definition, ``FILE`` for the hostile file;
#: `Sandbox.arguments` has the others.
Command = tuple[str, ...]

VALIDATE, SYNC = ("cli", "validate"), ("cli", "sync", "--check")
VALIDATE_ONE, SYNC_ONE = (*VALIDATE, "FILE"), (*SYNC, "NAME")
LIST, SHOW = ("cli", "list"), ("cli", "show", "NAME")
VERIFY = ("cli", "verify", "NAME", "--examples", "1")
COVERAGE = (("cli", "coverage"), ("cli", "coverage", "--model", MODEL))
KERNELS = (*COVERAGE[1], "--kernels")
COST, COST_OF_WORKLOAD = ("cli", "cost", "NAME"), ("cli", "cost", "NAME", "--workload", "WORKLOAD")
COST_OF_REQUESTS = ("cli", "cost", "PAGED", "--workload", "WORKLOAD_OF_PAGED")
EXTRACT = ("extract", "--record", "RUN")


#: See `Kind.sometimes`.
EVERY = 100


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        name: of the kind.
        share: how many of 1,000 files of its group are of this kind.
        commands: what reads such a file.
        sometimes: what reads it too, but takes long: one file in EVERY is given to these.
        sealed: whether such a file holds a digest of itself. Half of the hostile ones get a digest that is right, for
            what is refused by its digest shows nothing of the rest of a reader.
    """

    name: str
    share: int
    commands: Sequence[Command]
    sometimes: Sequence[Command] = ()
    sealed: bool = False


#: Definitions and their references are one group, everything else the other.
KINDS: dict[str, Sequence[Kind]] = {
    "definitions": (
        Kind("definition", 850, (VALIDATE_ONE, SYNC_ONE, LIST, SHOW), (VALIDATE, SYNC, VERIFY, EXTRACT, *COVERAGE)),
        Kind("reference", 150, (VALIDATE, SYNC), (VERIFY,)),
    ),
    "others": (
        Kind("evidence", 130, (VALIDATE, SYNC, SHOW, KERNELS, VERIFY, EXTRACT)),
        Kind("naming", 130, (VALIDATE, SYNC, LIST, SHOW, KERNELS, VERIFY, EXTRACT)),
        Kind("schema", 40, (VALIDATE, SYNC)),
        Kind("model", 100, (VALIDATE, SYNC, KERNELS)),
        Kind("needs", 40, (VALIDATE, SYNC, *COVERAGE, KERNELS)),
        Kind("claims", 40, (VALIDATE, SYNC, EXTRACT)),
        Kind("recorded", 20, (VALIDATE, SYNC, EXTRACT)),
        Kind("compatibility", 40, (VALIDATE, SYNC)),
        Kind("equivalent_code", 10, (VALIDATE, SYNC)),
        Kind("flashinfer_bench", 40, (VALIDATE, SYNC)),
        Kind("flashinfer_dumps", 40, (VALIDATE, SYNC)),
        Kind("gpus", 40, (VALIDATE, SYNC, COST)),
        Kind("traffic", 50, (VALIDATE, COST_OF_WORKLOAD, COST_OF_REQUESTS, ("statistics", "LENGTHS")), sealed=True),
        Kind("workloads", 30, (VALIDATE, COST_OF_WORKLOAD)),
        Kind("runtime", 30, (("trace", "--record", "FILE"), ("extract", "--record", "FILE")), sealed=True),
        Kind("no_definition", 10, (VALIDATE, SYNC, KERNELS)),
        Kind("times", 10, (("times", "RESULTS"),)),
    ),
}


class Sandbox:
    """The dataset below a temporary directory. `restore` undoes whatever was done to it."""

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
            "evidence": "evidence/*/*.json*",
            "naming": "schema/naming.json",
            "schema": "schema/*.schema.json",
            "model": f"models/{MODEL}.json",
            "needs": f"models/needs/{MODEL}.json",
            "claims": "models/curated/claims.json",
            "recorded": "models/recorded/*.json",
            "compatibility": "schema/compatibility.json",
            "equivalent_code": "schema/equivalent_code.json",
            "flashinfer_bench": "schema/flashinfer_bench.json",
            "flashinfer_dumps": "schema/flashinfer_dumps.json",
            "gpus": "schema/gpus.json",
            "traffic": "workloads/traffic.json",
            "workloads": "workloads/*/*.json",
            "runtime": "traces/runtime/*.json",
            "no_definition": "traces/kernels_without_definition.json",
            "times": "results/*/*/*.jsonl",
        }
        found = sorted(self.root.glob(patterns[kind]))
        if kind == "reference":  # extraction reads those of every family, but only those of a Definition are rendered
            found = [path for path in found if (self.root / "definitions" / path.parent.name).is_dir()]
        return found

    def arguments(self, command: Command, path: Path) -> list[str]:
        """The arguments of a command for a hostile file at `path`."""
        name = path.stem if path.stem in DEFINITIONS else DEFINITIONS[0]
        paged = DEFINITIONS[1]
        known = {
            "NAME": name,
            "WORKLOAD": WORKLOADS.get(name, "decode-64"),
            "PAGED": paged,
            "WORKLOAD_OF_PAGED": WORKLOADS[paged],
            "FILE": str(path),
            "RESULTS": str(self.root / "results"),
            "RUN": str(self.root / "traces" / "runtime" / f"{RUN}.json"),
            "LENGTHS": str(self.root / "sources" / "lengths.csv"),
        }
        return [known.get(word, word) for word in command[1:]]


def build(root: Path, source: Path) -> None:
    """Copies a few files of the dataset at `source` to `root`, and makes what else the commands read."""
    names = shutil.ignore_patterns("tests")
    for part in ("schema", "reference"):
        shutil.copytree(source / part, root / part, ignore=names)
    for name in DEFINITIONS:
        (path,) = source.glob(f"definitions/*/{name}.json")
        copy(source, root, f"definitions/{path.parent.name}/{name}.json")
        evidence = f"evidence/{path.parent.name}/{name}.jsonl"
        copy(source, root, evidence)
        for line in (source / evidence).read_text(encoding="utf-8").splitlines():
            copy(source, root, f"evidence/runs/{fields_of(json.loads(line))['run']}.json")
    for name in files_of_models(root):
        copy(source, root, name)
    make_claims(root)
    for name in (
        f"traces/runtime/{RUN}.json",
        "traces/kernels_without_definition.json",
        "workloads/traffic.json",
    ):
        copy(source, root, name)
    times = min(source.glob("results/*/rmsnorm/*.jsonl"))
    line = times.read_text(encoding="utf-8").splitlines()[0]  # one line is JSON, as the other files here are
    (root / times.relative_to(source)).parent.mkdir(parents=True)
    (root / times.relative_to(source)).write_text(f"{line}\n", encoding="utf-8")
    (root / "sources").mkdir()
    add_profile(root, root / "sources" / "lengths.csv")
    for name in WORKLOADS:
        add_workloads(root, load(name, root))


def files_of_models(root: Path) -> list[str]:
    """The files in models/ that the Definitions in the dataset at `root` need to be valid, relative to it."""
    tagged = {model for name in DEFINITIONS for model in load(name, root).tag_values("model")}
    return [f"{folder}/{model}.json" for folder in ("models", "models/needs") for model in sorted({MODEL, *tagged})]


def make_claims(root: Path) -> None:
    """Claims and runs that say of the Definitions at `root` what their tags do; its source has those of others."""
    claims = []
    for definition in map(functools.partial(load, root=root), DEFINITIONS):
        sizes = [tag for tag in definition.tags if tag.startswith(("tp:", "ep:"))]
        if models := definition.tag_values("model"):
            told = {"models": list(models), **({"tags": sizes} if sizes else {}), "source": "they have these tags"}
            claims.append({"definitions": [definition.name], **told})
            runs = [{"models": list(models), "runs": ["a_run"]}]
            path = recorded_path(root, definition.name)
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"definition": definition.name, "recorded": runs})
    document = {"$schema": "../../schema/curated_claims.schema.json", "claims": claims}
    (root / "models" / "curated").mkdir(exist_ok=True)
    write_json(root / "models" / "curated" / "claims.json", document)


def add_workloads(root: Path, definition: Definition) -> None:
    """Writes the workloads of a Definition, without digests of their inputs."""
    every = drawn(definition)
    write(path_of(definition, root), definition, every, {one.name: {} for one in every})


def add_profile(root: Path, trace: Path) -> None:
    """Writes a trace of two requests, and its profile into workloads/traffic.json, which keeps little traffic."""
    trace.write_text("ContextTokens,GeneratedTokens\n7,5\n20,3\n", encoding="utf-8")
    profile: dict[str, Any] = {"source": "made up", "trace_sha256": hashlib.sha256(trace.read_bytes()).hexdigest()}
    profile |= traffic_statistics.profile(traffic_statistics.requests(trace))
    path = root / "workloads" / "traffic.json"
    traffic = json.loads(path.read_text(encoding="utf-8"))
    traffic["profiles"]["made"] = {**profile, "lengths_sha256": lengths_sha256(profile)}
    traffic["requests"] = [one for one in traffic["requests"] if one["name"] in REQUESTS]
    path.write_text(json.dumps(traffic, indent=2), encoding="utf-8")


def copy(source: Path, root: Path, name: str) -> None:
    if (source / name).is_file():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, root / name)
