"""The last line of a verdict repeats it, and the walk-through of docs/judge.md is what the commands print."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cheating_kernels import ATTENTION, CHEATS, NORM
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.harness.twins import has_real_size
from flashinfer_trace.judging.judge import replay_line
from flashinfer_trace.judging.submission import RunLimits, from_callable, from_path
from flashinfer_trace.judging.verdict import Verdict

RIGHT = f"{CHEATS}/norms.py:right"
#: Judged at the sizes of its small twin on a CPU.
LARGE = "gemm_n28672_k4096"


def line(name: str, sizes: str = "own", limits: RunLimits | None = None, device: str = "cpu") -> str:
    """The line of a verdict on the right norm, whatever it was judged against."""
    verdict = Verdict(name, "right", device, sizes, seed=5)
    return replay_line(from_path(RIGHT), verdict, flashinfer_trace.load(name), 3, limits or RunLimits())


@pytest.mark.parametrize(
    ("name", "sizes", "device", "options"),
    [
        (NORM, "own", "cpu", "--device cpu --examples"),
        (NORM, "twin", "cpu", "--device cpu --twin --examples"),
        (LARGE, "twin", "cpu", "--device cpu --twin --examples"),
        (LARGE, "own", "cpu", "--device cpu --full --examples"),
        (LARGE, "own", "cuda", "--device cuda --examples"),
    ],
)
def test_sizes_that_are_not_the_usual_ones_are_an_option(name, sizes, device, options):
    assert has_real_size(flashinfer_trace.load(NORM)) and not has_real_size(flashinfer_trace.load(LARGE))
    assert f"-d {name} {options} 3 --seed 5" in line(name, sizes, device=device)


def test_limits_of_the_command_are_an_option():
    assert line(NORM).endswith("--seed 5")
    assert line(NORM, limits=RunLimits.of(2.5)).endswith("--seed 5 --timeout 2.5")
    assert line(NORM, limits=RunLimits.of(None, 1.5)).endswith("--seed 5 --memory 1.5")


@pytest.mark.parametrize(
    "limits",
    [
        RunLimits(call=2.0),
        RunLimits(load=9.0),
        RunLimits(30.0, 2.0, 3.0),
        RunLimits.of(1e5),
    ],
)
def test_limits_without_an_option_are_a_call(limits):
    """It is Python that gives the same verdict."""
    call = line(NORM, limits=limits)
    imports, _, expression = call.rpartition("; ")
    names: dict[str, object] = {}
    exec(imports, names)
    again = eval(expression, names)
    assert again.seed == 5 and again.definition == NORM and again.replay == call


def test_a_file_is_no_option(tmp_path, monkeypatch):
    (tmp_path / "-norm.py").write_text("def run(x, w): return x")
    monkeypatch.chdir(tmp_path)
    verdict = Verdict(NORM, "norm", "cpu", "own", seed=5)
    found = replay_line(from_path("./-norm.py"), verdict, flashinfer_trace.load(NORM), 3, RunLimits())
    assert found.startswith("flashinfer-trace check ./-norm.py -d ")


def test_a_callable_is_repeated_by_a_call():
    verdict = Verdict(NORM, "norm", "cpu", "own", seed=5)
    call = replay_line(from_callable(print), verdict, flashinfer_trace.load(NORM), 3, RunLimits())
    assert call == f"flashinfer_trace.judge(kernel, {NORM!r}, device='cpu', examples=3, seed=5, twin=False)"


def test_the_command_prints_its_own_options():
    arguments = ["check", f"{CHEATS}/samplers.py:honest_attention", "-d", ATTENTION, "--examples", "1"]
    arguments += ["--twin", "--timeout", "45"]
    first = CliRunner().invoke(main, arguments).output.splitlines()
    command = first[-1].removeprefix("  repeat: flashinfer-trace ")
    assert " --twin " in command and command.endswith(" --timeout 45.0")
    again = CliRunner().invoke(main, shlex.split(command)).output.splitlines()
    assert again[0] == first[0] and again[-1] == first[-1]


def test_full_judges_at_the_own_sizes_where_a_twin_is_usual(tmp_path):
    path = tmp_path / "zeros.py"
    path.write_text("import torch\ndef run(A, B): return torch.zeros(len(A), len(B), dtype=A.dtype)")
    arguments = ["check", str(path), "-d", LARGE, "--examples", "1", "--verbose"]
    small, full = (CliRunner().invoke(main, arguments + more).output for more in ([], ["--full"]))
    assert "at the sizes of a twin, the default here: N 304\n" in small and " --twin " not in small
    assert "at the sizes of a twin" not in full and " --full " in full
    assert full.startswith(f"zeros.py for {LARGE} on cpu: wrong")
    both = CliRunner().invoke(main, [*arguments, "--full", "--twin"])
    assert both.exit_code == 2 and "--twin and --full are different sizes; give one of them" in both.output


DRAW = """
import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job
from flashinfer_trace.judging.more_plans import judged_cases

definition = flashinfer_trace.load("rmsnorm_h512")
drawn = judged_cases(Job(definition, family_of(definition), device="cuda"), 0, lambda: 100)
print(*(next(drawn) for _ in range(130)), sep="\\n")
"""


def test_draws_do_not_follow_from_what_a_program_imports(tmp_path):
    """hypothesis takes numbers for interesting that stand in any module of the program."""
    (tmp_path / "mine.py").write_text(f"NUMBERS = [{', '.join(map(str, range(1000, 4000, 7)))}]\n")
    drawn = [
        subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        for text in (DRAW, f"import mine\n{DRAW}")
    ]
    assert drawn[0] == drawn[1] and drawn[0].count("kind='drawn'") > 90


TEXT = (Path(__file__).resolve().parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = re.findall(
    r"^```console\n\$ (flashinfer-trace check (?![^\n]*--save-case).*?)\n(.*?)^```", TEXT, re.M | re.S
)
((PLOT, _),) = re.findall(r"^```console\n\$ (flashinfer-trace bench .*?)\n(.*?)^```", TEXT, re.M | re.S)


def walk(command: str, file: str, directory: Path) -> list[str]:
    """Writes the file that a command judges; what the command prints, by lines."""
    (directory / command.split()[2]).write_text(file)
    return CliRunner().invoke(main, command.split()[1:]).output.splitlines()


def test_the_walk_through_on_a_cpu(tmp_path, monkeypatch):
    """Line by line; `...` stands for any text."""
    monkeypatch.chdir(tmp_path)
    on_a_cpu = [(command, shown, file) for (command, shown), file in zip(COMMANDS, FILES, strict=True) if shown]
    assert len(on_a_cpu) == 2
    for command, shown, file in on_a_cpu:
        printed = walk(command, file, tmp_path)
        for line in (line for line in shown.splitlines() if line != "..."):
            start = line.removesuffix("...").rstrip()
            assert any(one.startswith(start) for one in printed), f"{line!r} is not in {printed}"


@pytest.mark.gpu_harness
def test_the_walk_through_on_a_gpu(tmp_path, monkeypatch, cuda_device):
    monkeypatch.chdir(tmp_path)
    (command, _), file = COMMANDS[0], FILES[0]
    assert walk(command, file, tmp_path)[0] == "my_norm.py for rmsnorm_h512 on cuda: reference-grade"
    walk(PLOT, file, tmp_path)
    assert (tmp_path / "roofline.svg").read_text().count("<circle") > 2


def test_a_plot_needs_a_gpu(tmp_path, monkeypatch):
    """Without one, the command says so in one line, and draws nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (line,) = walk(PLOT, FILES[0], tmp_path)
    assert "GPU" in line and not (tmp_path / "roofline.svg").exists()
