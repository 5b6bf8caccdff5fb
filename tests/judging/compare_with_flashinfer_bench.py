"""Writes what flashinfer-bench's own evaluators say of the cheating kernels, for the table in docs/judge.md.

python tests/judging/compare_with_flashinfer_bench.py         # on a CPU; pip install --no-deps flashinfer-bench==0.1.2
python tests/judging/compare_with_flashinfer_bench.py --gpu   # on a GPU, those that it cannot judge on a CPU
python tests/judging/compare_with_flashinfer_bench.py --missing   # only those without a verdict of the same machine

Each kernel runs in a process of its own, with valid inputs of ours and the default configuration. It is the check of
correctness alone; on the CPU, waiting for CUDA is replaced by nothing. Samplers choose among few tokens: its evaluator
calls them for 10,000 rows at once. Date, versions and machine are written with the verdicts, of each device apart.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

from cheating_kernels import (  # noqa: E402
    ALL,
    ATTENTION,
    CHEATS,
    EXPERTS,
    GEMM,
    NORM,
    ROTATION,
    SAMPLER,
    SILU,
    Cheat,
)
from recorded_verdicts import machine  # noqa: E402

from flashinfer_trace.format.files import write_json  # noqa: E402

RESULTS = HERE / "flashinfer_bench.json"
#: Definition -> values of its variable axes. Not here: the quantizer, whose fp8 outputs its evaluator cannot look at,
#: and the builder of trees, whose outputs it cannot allocate: no input has their axis `num_nodes`.
AXES: dict[str, dict[str, int]] = {
    **{NORM: {"batch_size": 64}, GEMM: {"M": 64}, SILU: {"num_tokens": 64}},
    **{ATTENTION: {}, EXPERTS: {"seq_len": 16}},
    **{ROTATION: {"num_tokens": 16, "max_seq_len": 64}, SAMPLER: {"batch_size": 1}},
}
#: Definition -> sizes other than its own.
SIZES: dict[str, dict[str, int]] = {SAMPLER: {"vocab_size": 512}}
#: The time that flashinfer-bench waits.
SECONDS = 300
#: Processes that share a GPU.
AT_ONCE = 4


def solution(cheat: Cheat) -> dict[str, Any]:
    """The cheat as a Solution, which says itself whether it writes into its outputs."""
    text = (CHEATS / f"{cheat.file}.py").read_text()
    signature = text.split(f"def {cheat.function}(")[1].split(")")[0]
    spec = {
        **{"language": "python", "target_hardware": ["cpu"], "entry_point": f"main.py::{cheat.function}"},
        "destination_passing_style": "output" in signature,
    }
    sources = [{"path": "main.py", "content": text}]
    return {
        **{"name": cheat.function, "definition": cheat.definition, "author": "tests", "spec": spec},
        "sources": sources,
    }


def status(cheat: Cheat, device: str) -> str:
    """The verdict of flashinfer-bench, in this process."""
    import torch
    from bench_support import Bench, inputs_of
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.evaluators import resolve_evaluator
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.data import Definition, Solution

    import flashinfer_trace

    if device == "cpu":
        torch.cuda.synchronize = lambda *device: None
    ours = flashinfer_trace.load(cheat.definition).with_const_axes(SIZES.get(cheat.definition, {}))
    config = BenchmarkConfig(profile_baseline=False)
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        definition = Definition(**ours.to_dict())
        workload = bench.workload(definition, inputs_of(ours, AXES[cheat.definition]))
        evaluator = resolve_evaluator(definition)
        baseline = evaluator.build_baseline(definition, workload, config, device, Path(directory))
        runnable = BuilderRegistry.get_instance().build(definition, Solution(**solution(cheat)))
        _, evaluation = evaluator.check_correctness(
            definition, runnable, baseline.inputs, baseline.outputs, config, "", device
        )
    return "PASSED" if evaluation is None else str(evaluation.status.value)


def judged_apart(cheat: Cheat, device: str = "cpu") -> str:
    """The verdict of flashinfer-bench, in a process of its own."""
    # The shell is there for a kernel that ends its parent.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, __file__, "--one", cheat.function, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "TIMEOUT"
    lines = done.stdout.splitlines()
    return lines[-1] if done.returncode == 0 and lines else "RUNTIME_ERROR"


def recorded(device: str, before: dict[str, Any]) -> dict[str, Any]:
    """The verdicts on the kernels that its evaluators can judge on a device, with date, versions and machine.

    Args:
        device: ``cpu``, or ``cuda`` for those that need it.
        before: what was recorded; its verdicts stay if version and machine are the same.
    """
    run = {"flashinfer_bench": importlib.metadata.version("flashinfer-bench"), **machine(device)}
    same = all(before.get(key) == value for key, value in run.items() if key != "date")
    known = before["verdicts"] if same else {}
    on_a_cpu = [one for one in ALL if one.cpu and one.definition in AXES]
    on_a_gpu = [one for one in ALL if one.gpu and one.definition in AXES and one not in on_a_cpu]
    wanted = on_a_cpu if device == "cpu" else on_a_gpu
    verdicts = {one.function: known[one.function] for one in wanted if one.function in known}
    left = [one for one in wanted if one.function not in known]
    with ThreadPoolExecutor(1 if device == "cpu" else AT_ONCE) as threads:
        for cheat, said in zip(left, threads.map(lambda one: judged_apart(one, device), left), strict=True):
            verdicts[cheat.function] = said
            print(cheat.function, said, flush=True)
    return {**run, "verdicts": verdicts}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        (cheat,) = (one for one in ALL if one.function == sys.argv[2])
        print("\n" + status(cheat, sys.argv[3]))
        return
    device = "cuda" if "--gpu" in sys.argv else "cpu"
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = found.get(device, {}) if "--missing" in sys.argv else {}
    write_json(RESULTS, {**found, device: recorded(device, before)})


if __name__ == "__main__":
    main()
