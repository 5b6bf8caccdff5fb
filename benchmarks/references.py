"""Times references and a baseline in the same run, and prints the ratios.

    python -m benchmarks.references                                  # the four workloads with a target, one CPU thread
    python -m benchmarks.references 'gemm*' --axes m=16 --device cuda   # any Definitions, on a GPU
    python -m benchmarks.references rmsnorm_h7168 --baseline old.json   # against an older reference
    python -m benchmarks.references --peer .flashinfer-bench         # against flashinfer-bench's

The baseline is a straightforward loop (benchmarks/loops.py), or --baseline: an older Definition (.json), or an older
reference (.py; constants named after axes take the Definition's values). Reference and baseline alternate, so that a
change of the machine's load affects both; the figures are medians. Peak memory is that of the whole process.

--peer takes a directory of Definitions in flashinfer-bench's format; `python -m tools.compatibility.published` fetches
flashinfer-bench's own. Those with our names and inputs are timed on the same inputs as ours; for the others, the reason
is printed (see benchmarks/comparison.py).
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison import Comparison, compare
from benchmarks.loops import LOOPS
from flashinfer_trace import Definition, definitions, load, make_inputs
from flashinfer_trace.families import family_of
from flashinfer_trace.format.reference import compile_reference, substitute_constants

#: A function that takes longer than this many seconds is timed once: repetitions would take minutes for no gain.
LONG = 5.0


@dataclass(frozen=True)
class Workload:
    """One Definition at one size, with the limits that it must keep (single CPU thread), if any.

    `plan` replaces what the family would choose for `axes` if the structure matters (equal lengths).
    """

    definition: str
    axes: Mapping[str, int]
    const_axes: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None
    gibibytes: float | None = None
    plan: Mapping[str, Any] | None = None


EQUAL_LENGTHS = {
    "kv_lens": [1024] * 16,
    "shared_prefix": 0,
    "num_pages": 16384,
    "logits": "normal",
    "scale": 1.0,
    "unused": "stale",
}

TARGETS = (
    Workload("rmsnorm_h7168", {"batch_size": 4096}, {"hidden_size": 4096}, seconds=0.150),
    Workload(
        "mla_paged_decode_h16_ckv512_kpe64_ps1",
        {"batch_size": 16, "num_kv_indices": 16384},
        seconds=0.037,
        plan=EQUAL_LENGTHS,
    ),
    Workload("top_k_top_p_sampling_from_probs_v129280", {"batch_size": 8}, {"vocab_size": 128256}, seconds=0.145),
    Workload("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048", {"seq_len": 8}, {}, 10.0, 6.0),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="Definitions or globs; default: the workloads with a target")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads [1]")
    parser.add_argument("--axes", default="", help="variable axes, k=v,k=v")
    parser.add_argument("--baseline", type=Path, help="an older Definition (.json) or reference (.py)")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="Definitions of another dataset with our names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ratios of --peer there, too")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no comparison with --peer after them"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="'GLOB: WHY'", help="leave Definitions out of --peer's"
    )
    parser.add_argument("--no-baseline", action="store_true", help="time the references alone")
    parser.add_argument("--repeat", type=int, default=7, help="runs of each [7]")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    axes = {name: int(value) for name, _, value in (part.partition("=") for part in options.axes.split(",") if part)}
    if options.peer is not None:
        try:
            return compare(comparison_of(options, axes))
        except FileNotFoundError as error:
            sys.exit(str(error))
    workloads = [Workload(name, axes) for name in select(options.names)] if options.names else list(TARGETS)
    print_heading()
    missed = sum(not run(workload, options) for workload in workloads)
    return 1 if missed else 0


def comparison_of(options: argparse.Namespace, axes: Mapping[str, int]) -> Comparison:
    """What --peer and the options beside it ask for."""
    without = dict(part.split(":", 1) for part in options.without if ":" in part)
    if len(without) != len(options.without):
        sys.exit(f"--without takes 'GLOB: WHY', each glob once, not {options.without}")
    return Comparison(
        directory=options.peer,
        names=set(select(options.names or ["*"])),
        axes=axes,
        device=options.device,
        repeat=options.repeat,
        out=options.json,
        budget=options.budget,
        without={glob: why.strip() for glob, why in without.items()},
    )


def print_heading() -> None:
    print(f"{'Definition and axes':92} {'reference':>10} {'baseline':>10} {'ratio':>7} {'peak GiB':>9}  target")


def run(workload: Workload, options: argparse.Namespace) -> bool:
    """Times one workload and prints its line; False if it misses its target on a CPU."""
    definition = load(workload.definition).with_const_axes(workload.const_axes)
    if workload.plan is None:
        inputs = make_inputs(definition, workload.axes, seed=0, device=options.device)
    else:
        inputs = family_of(definition).inputs(definition, dict(workload.plan), 0, options.device)
    arguments = [inputs[name] for name in definition.inputs]
    runs: list[Callable[[], Any]] = [lambda: definition.compiled(*arguments)]
    times: list[list[float]] = [[]]
    runs[0]()  # warm up; the peak is read before a baseline raises it
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    baseline = None if options.no_baseline else baseline_of(definition, options.baseline)
    if baseline is not None:
        runs.append(lambda: baseline(*arguments))
        times.append([])
    for repetition in range(options.repeat):
        for run_once, taken in zip(runs, times, strict=True):
            if repetition == 0 or taken[0] < LONG:
                taken.append(timed(run_once, options.device))
    reference, *other = (statistics.median(taken) for taken in times)
    kept = check(workload, reference, peak, options.device)
    sizes = ", ".join(f"{n}={v}" for n, v in {**workload.const_axes, **workload.axes}.items())
    columns = [f"{other[0] * 1e3:8.1f}ms", f"{other[0] / reference:6.2f}x"] if other else ["-", "-"]
    verdict = {None: "", True: f"kept: {limits(workload)}", False: f"MISSED: {limits(workload)}"}[kept]
    head = f"{definition.name + '  ' + sizes:92} {reference * 1e3:8.1f}ms"
    print(f"{head} {columns[0]:>10} {columns[1]:>7} {peak:9.2f}  {verdict}", flush=True)
    return kept is not False


def check(workload: Workload, seconds: float, gibibytes: float, device: str) -> bool | None:
    """Whether a workload keeps its limits; None if none applies here."""
    if device != "cpu" or workload.seconds is None:
        return None
    return seconds < workload.seconds and (workload.gibibytes is None or gibibytes < workload.gibibytes)


def limits(workload: Workload) -> str:
    memory = f", {workload.gibibytes:g} GiB" if workload.gibibytes else ""
    return f"{workload.seconds or 0:g} s{memory}"


def timed(function: Callable[[], Any], device: str) -> float:
    """Seconds that one call takes, including its work on a GPU."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def baseline_of(definition: Definition, path: Path | None) -> Callable[..., Any] | None:
    """The older reference at `path`, or the family's loop; None if the family has no loop."""
    if path is None:
        return LOOPS.get(family_of(definition).name)
    is_definition = path.suffix == ".json"
    source = Definition.from_file(path).reference if is_definition else path.read_text(encoding="utf-8")
    source = substitute_constants(source, definition.const_axes, str(path))
    return compile_reference(source, str(path), definition.op_type)


def select(names: Sequence[str]) -> list[str]:
    """Names of the Definitions that match the names or globs."""
    known = [definition.name for definition in definitions()]
    chosen = [match for name in names for match in fnmatch.filter(known, name)]
    if not chosen:
        sys.exit(f"no Definition matches {list(names)}; `flashinfer-trace list` shows all names")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
