"""Judges mutants in processes of their own, each with a limit of time and memory, and remembers what it found."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashinfer_trace import find_root
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import write_text
from flashinfer_trace.harness.family import Family
from tools.mutate.judge import Verdict
from tools.shared.limited_pool import Ended, limit_memory, outcomes

#: Where verdicts are kept between runs, under the checkout; out of git.
CACHE = ".mutate"

#: Seconds that a mutant may take, the first one of a family in a process with the time of preparing the cases, and
#: memory beyond a worker's own. On an idle machine it takes a few seconds; a busy one must not decide a verdict.
SECONDS = 180
GIBIBYTES = 6


class Store:
    """Verdicts of one family by source of the mutant, in a file that only grows; a torn last line is dropped.

    The file's name holds the digest of all that verdicts depend on but the mutants, so a change starts a new file.
    """

    def __init__(self, directory: Path, family: str, digest: str) -> None:
        self.path = directory / f"{family}-{digest[:16]}.jsonl"
        self.known: dict[str, Verdict] = {}
        if self.path.is_file():
            text = self.path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                write_text(self.path, whole)
            for line in whole.splitlines():
                entry = json.loads(line)
                source = entry.pop("source")
                self.known[source] = Verdict(**entry)

    def add(self, key: str, verdict: Verdict) -> None:
        self.known[key] = verdict
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"source": key, **verdict.to_dict()}) + "\n")


def source_key(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def code_digest(family: Family, definition: Definition) -> str:
    """Hash of what a verdict depends on but the mutant: the contract, the harness, the family's record, the judge."""
    from flashinfer_trace.harness import binding  # imports torch, which a worker sets up first

    files = [*Path(binding.__file__).parent.glob("*.py")]
    files += [Path(__file__).with_name(name) for name in ("cases.py", "judge.py")]
    record = binding.Closure(family, family.twin, family.plan, family.checks, family.faults)
    total = hashlib.sha256(json.dumps([definition.to_dict(), record.sha256], sort_keys=True).encode())
    for path in sorted(files, key=lambda path: (path.parent.name, path.name)):
        total.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes())
    return total.hexdigest()


def start_worker(gibibytes: float) -> None:
    """Runs once in each process, before torch is imported there."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    import warnings

    warnings.simplefilter("ignore")  # what a mutant warns of is not this project's warning
    limit_memory(int(gibibytes * 2**30))


@lru_cache(maxsize=4)
def worker_bench(load: Callable[[str, bool], Any], family: str, more: bool) -> Any:
    return load(family, more)


def load_bench(family: str, more: bool) -> Any:
    from tools.mutate.cases import bench_of, known_families, representative

    record = known_families()[family]
    return bench_of(record, representative(record), more)


def work(load: Callable[[str, bool], Any], family: str, source: str, check: str) -> Any:
    """In a worker: the verdict of one mutant, or, with a check, where one that is called equivalent differs."""
    if check:
        from tools.mutate.equivalence import first_difference

        # The verdict tells whether the bits are the same in the cases that judge.
        parts = (True,) if check == "bits" else (False, True)
        found = (first_difference(worker_bench(load, family, more), source, check) for more in parts)
        return next((line for line in found if line), "")
    from tools.mutate.judge import judge

    return judge(worker_bench(load, family, False), source)


def judge_all(
    tasks: Sequence[tuple[str, str, str]],
    *,
    processes: int = 2,
    seconds: float = SECONDS,
    gibibytes: float = GIBIBYTES,
    load: Callable[[str, bool], Any] = load_bench,
) -> Iterator[tuple[int, Any]]:
    """Judges (family, source, check) triples; yields (number of the task, verdict) in their order.

    Args:
        tasks: those of one family one after another: a process keeps the cases of few families. With a check, one of
            `equivalence.CHECKS`, the outcome is the line of `equivalence.first_difference` instead, or an `Ended`.
        processes: how many at once.
        seconds, gibibytes: limits of each process.
        load: (family, more) -> its bench, called in the process.
    """
    found = outcomes(
        work,
        [(load, *task) for task in tasks],
        processes=processes,
        seconds=seconds,
        start=start_worker,
        started_with=[gibibytes],
    )
    for number, (outcome, task) in enumerate(zip(found, tasks, strict=True)):
        judged = not task[2]
        yield number, Verdict(outcome.how, 1, outcome.detail) if judged and isinstance(outcome, Ended) else outcome


def default_store(family: Family, definition: Definition) -> Store:
    return Store(find_root() / CACHE, family.name, code_digest(family, definition))


def check_store(family: Family, definition: Definition) -> Store:
    """As `default_store`, of the outcomes of checks."""
    code = Path(__file__).with_name("equivalence.py").read_bytes()
    digest = hashlib.sha256(code_digest(family, definition).encode() + code).hexdigest()
    return Store(find_root() / CACHE, f"{family.name}.checks", digest)
