"""A verdict says more than the worst element, and a failing case repeats without this package."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from flashinfer_trace.cli import main
from flashinfer_trace.dataset import store
from flashinfer_trace.judging.diagnosis import which
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.output_form import PAYLOADS, filled_outputs
from flashinfer_trace.judging.submission import from_path
from flashinfer_trace.sandbox.limits import MAX_TEXT
from flashinfer_trace.verdict.errors import signed_errors
from flashinfer_trace.verdict.tensors import as_integers

NAME = "rmsnorm_h512"
NORM = """import torch

def norm(x, w):
    y = x.float()
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w.float()

"""
TRUNCATED = "(norm(x, w).view(torch.int32) & -65536).view(torch.float32).bfloat16()"


def verdict_on(tmp_path, server, text, name=NAME, **options):
    path = tmp_path / "mine.py"
    path.write_text(NORM + text)
    return judge(str(path), name, examples=2, seed=3, server=server, **options)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("def run(x, w): return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * w", "two bf16 roundings"),
        (f"def run(x, w): return {TRUNCATED}", "all toward zero"),
        ("def run(x, w, y): y[:64] = norm(x, w)[:64]", "rows 64 and up are not written"),
        ("def run(x, w, y): y[:, :500] = norm(x, w)[:, :500]", "hidden_size 500 and up are not written"),
        ("def run(x, w): return norm(x, w).bfloat16() * 1.0625", "every element is 1.06"),
        (
            "def run(x, w):\n  y = norm(x, w).bfloat16()\n  y[3::4] = float('nan')\n  return y",
            "rows every 4th from 3 are NaN",
        ),
        ("def run(x, w):\n  y = norm(x, w).bfloat16()\n  y[64:] = 0\n  return y", "rows 64 and up are zero"),
        (
            "def run(x, w):\n  y = norm(x, w).bfloat16()\n  y[:, 7] += y[:, 8] + 1\n  return y",
            "only hidden_size 7 are wrong",
        ),
    ],
)
def test_a_guess_where_one_fits(tmp_path, server, text, guess):
    failure = verdict_on(tmp_path, server, text).failure
    assert failure.kind == "values" and failure.guess.startswith(guess), (failure.guess, failure.message)
    assert 0 < failure.share <= 1 and failure.hit.keys() == {"batch_size", "hidden_size"}


def test_the_share_the_places_and_the_mean_signed_error(tmp_path, server):
    verdict = verdict_on(tmp_path, server, "def run(x, w):\n  y = norm(x, w).bfloat16()\n  y[:, 5] *= 2\n  return y")
    failure = verdict.failure
    assert failure.hit["hidden_size"] == "5" and failure.share <= 1 / 512
    assert f"  {failure.extent()[0]}\n" in str(verdict) and failure.extent()[0] in verdict.summary()
    right = torch.randn(4096, dtype=torch.float64)
    found = signed_errors(right + right.sign(), right, torch.full_like(right, 2.0))
    assert found.count == 4096 and found.outward == pytest.approx(0.5) and abs(found.mean) < 5 * found.standard_error


def test_indices_in_words():
    assert [
        which(one, 8) for one in (range(8), [3], [2, 3], range(5, 8), [1, 3, 5, 7], [0, 1, 3], [0, 1, 3, 4, 6])
    ] == [*("all", "3", "2 to 3", "5 and up", "every 2nd from 1", "0, 1, 3", "0, 1, 3, 4, ... (5 of 8)")]


def test_nan_of_a_fill_has_a_payload():
    """One that torch computes on a CPU is another."""
    definition = store.load(NAME)
    inputs = {"hidden_states": torch.zeros(2, 512).bfloat16(), "weight": torch.zeros(512).bfloat16()}
    filled = filled_outputs(definition, inputs, 0)["output"]
    assert filled.isnan().all()
    for dtype, bits in PAYLOADS.items():
        fill = as_integers(torch.zeros(1, dtype=dtype)).fill_(bits)
        assert fill.view(dtype).float().isnan() and fill != as_integers(torch.tensor([float("nan")]).to(dtype))


def test_the_traceback_of_its_own_code_and_the_end_of_what_it_printed(tmp_path, server):
    text = "def run(x, w):\n  print('y' * 9000)\n  print(len(x), 'rows')\n  return inner(x)\n"
    text += "def inner(x): return x.nothing"
    failure = verdict_on(tmp_path, server, text).failure
    assert failure.kind == "raised" and "in run" in failure.traceback and "in inner" in failure.traceback
    assert "flashinfer_trace" not in failure.traceback and "loading.py" not in failure.traceback
    assert failure.printed.endswith(" rows") and len(failure.printed) <= MAX_TEXT


def test_what_a_kernel_printed_before_it_died(tmp_path, server):
    failure = verdict_on(tmp_path, server, "import os\nprint('before\\x1b[31m the end')\nos.abort()").failure
    assert failure.kind == "died" and failure.printed == r"before\x1b[31m the end"


def test_printing_without_end_is_no_verdict(tmp_path, server, capfd):
    """More than a pipe holds, while it is loaded and called; it is passed on to standard error."""
    text = "print('z' * 500_000)\ndef run(x, w):\n  print('z' * 200_000)\n  return norm(x, w).bfloat16()"
    assert verdict_on(tmp_path, server, text).passed
    assert "z" * 500_000 in capfd.readouterr().err


def test_going_on_after_a_failure_counts_by_kind_of_case(tmp_path, server):
    """A kernel that is wrong for many rows only."""
    text = "def run(x, w):\n  y = norm(x, w).bfloat16()\n  return y if len(x) < 30 else y * 1.5"
    first = verdict_on(tmp_path, server, text)
    every = verdict_on(tmp_path, server, text, keep_going=True)
    assert first.failure.at({}, {}, 0).message == every.failure.at({}, {}, 0).message
    assert sum(first.tally["corner"]) < sum(every.tally["corner"])
    right, all_of_them = every.tally["drawn"]
    assert all_of_them >= 2 and right <= all_of_them and every.tally["values=normal"][1] >= 1
    assert every.calls == sum(every.tally[kind][1] for kind in ("corner", "drawn", "repeated") if kind in every.tally)
    assert f"{right} of {all_of_them} drawn" in str(every)


def test_a_failing_case_survives_a_process_and_has_the_tensors(tmp_path, server):
    text = "def run(x, w):\n  y = norm(x, w).bfloat16()\n  y[0, 3] = 77\n  return y"
    verdict = pickle.loads(pickle.dumps(verdict_on(tmp_path, server, text)))
    case, index = verdict.failing_case(), verdict.failure.index
    assert case.got["output"][index] == verdict.failure.got == 77
    assert case.expected["output"][index] == verdict.failure.wanted
    assert case.bound["output"].expand_as(case.got["output"])[index] == verdict.failure.bound
    assert case.inputs["weight"].shape == (512,) and verdict.to_dict().keys().isdisjoint({"kept"})
    assert verdict_on(tmp_path, server, "def run(x, w): return norm(x, w).bfloat16()").failing_case() is None


@pytest.mark.parametrize("solution", [False, True])
def test_a_saved_case_repeats_the_failure_without_this_package(tmp_path, solution):
    text = NORM + "def run(hidden_states, weight): return norm(hidden_states, weight).bfloat16() + 1"
    path = tmp_path / "mine.py"
    path.write_text(text)
    if solution:
        sources = [{"path": "a/main.py", "content": "from .own import run"}, {"path": "a/own.py", "content": text}]
        spec = {"language": "python", "entry_point": "a/main.py::run", "destination_passing_style": False}
        path = tmp_path / "solution.json"
        path.write_text(json.dumps({"name": "one", "definition": NAME, "spec": spec, "sources": sources}))
    out = tmp_path / "case"
    arguments = ["check", str(path), "-d", NAME, "--seed", "3", "--examples", "2", "--save-case", str(out)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1 and f"saved the failing case in {out}" in result.stderr, result.output
    assert {one.name for one in out.iterdir()} == {
        *(f"{part}.safetensors" for part in ("inputs", "expected", "bound", "got", "fill")),
        *("case.json", "repeat.py", "loading.py", "far_rows.py", "submission"),
    }
    path.unlink()
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    repeated = subprocess.run(
        [sys.executable, out / "repeat.py"], env=alone, cwd=tmp_path, capture_output=True, text=True
    )
    assert repeated.returncode == 1 and "elements are wrong" in repeated.stdout, repeated.stderr
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2 and "exists; name a new directory" in again.output


def test_a_saved_case_of_strided_inputs_and_a_right_kernel(tmp_path, server):
    """The script's inputs have the strides that the kernel got, and a repaired kernel is right."""
    verdict = verdict_on(tmp_path, server, "def run(x, w): return x")
    case = verdict.failing_case()
    wide = torch.full((*case.inputs["hidden_states"].shape[:-1], 600), float("nan")).bfloat16()
    wide[:, :512] = case.inputs["hidden_states"]
    strided = dict(case.inputs, hidden_states=wide[:, :512])
    out = tmp_path / "case"
    out.mkdir()
    case = type(case)(**{**vars(case), "inputs": strided})
    case.save(out, from_path(str(tmp_path / "mine.py")))
    text = "def run(x, w):\n  assert x.stride() == (600, 1)\n  return norm(x, w).bfloat16()"
    (tmp_path / "repaired.py").write_text(NORM + text)
    repeated = subprocess.run([sys.executable, out / "repeat.py", tmp_path / "repaired.py"], capture_output=True)
    assert repeated.returncode == 0, repeated.stderr
