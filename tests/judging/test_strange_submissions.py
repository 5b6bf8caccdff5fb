"""Files with strange names, and kernels whose errors and results are strange: the verdict says what each one is."""

from __future__ import annotations

import os
import subprocess

import pytest
from cheating_kernels import NORM

from flashinfer_trace.format.definition import InputError
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.submission import SubmissionError, from_path
from flashinfer_trace.judging.verdict import Grade

RIGHT = """
import torch

class Norm(torch.nn.Module):
    def forward(self, hidden_states, weight):
        f = hidden_states.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).bfloat16()

def run(hidden_states, weight):
    return Norm()(hidden_states, weight)
"""
BODIES = {
    "class E(Exception):\n  def __str__(self): raise SystemExit(0)\ndef run(x, w): raise E()": (
        "raised",
        "E: its message cannot be read: __str__ raises SystemExit (mine.py:3)",
    ),
    "def run(x, w): return {'x' * 5_000_000: x}": ("outputs", "x is not one of the Definition's: ['output']"),
    "def run(x, w): return type('x' * 5_000_000, (), {})()": ("outputs", "is a xxxxx"),
    "def run(x, w): return 10**5000": ("raised", "ValueError: Exceeds the limit"),
    "exec(compile('def run(x, w): raise ValueError(3)', 'x' * 5_000_000, 'exec'))": ("raised", "ValueError: 3 (xxx"),
}


@pytest.mark.parametrize("name", ["torch.py", "json.py", "collections.py", "triton.py", "my.kernel.py"])
def test_a_file_may_have_the_name_of_a_package(name, tmp_path, server):
    path = tmp_path / name
    path.write_text(RIGHT)
    verdict = judge(str(path), NORM, examples=1, server=server)
    assert verdict.grade == Grade.REFERENCE, verdict


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_what_cannot_be_told_is_told_in_short(number, tmp_path, server):
    body, (kind, message) = list(BODIES.items())[number]
    path = tmp_path / "mine.py"
    path.write_text(body)
    verdict = judge(str(path), NORM, examples=1, server=server)
    assert verdict.failure is not None and verdict.failure.kind == kind, verdict
    assert message in verdict.failure.message, verdict


def test_what_is_there_and_no_file_is_not_said_to_be_missing(tmp_path):
    (tmp_path / "directory.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("directory.py", "pipe.py:run"):
        with pytest.raises(SubmissionError, match=r"\.py: not a regular file; give the path of FILE\.py"):
            from_path(str(tmp_path / name))


def test_a_colon_needs_a_function(tmp_path):
    (tmp_path / "mine.py").write_text(RIGHT)
    with pytest.raises(SubmissionError, match="names no function after the colon"):
        from_path(f"{tmp_path / 'mine.py'}:")


@pytest.mark.parametrize("definition", [5, None])
def test_what_is_no_definition_is_refused(definition):
    with pytest.raises(InputError, match="is not a Definition; give one, or its name"):
        judge(lambda x, w: x, definition)


@pytest.mark.parametrize("kind", ["module", "decorator"])
def test_the_place_of_an_error_is_the_submission_and_not_torch(kind, tmp_path, server):
    """Modules are called by torch, and so are functions that it has decorated."""
    function = "import torch\n\n@torch.no_grad()\ndef run(x, w):\n    raise ValueError(3)"
    module = (
        "from torch import nn\n\nclass ModelNew(nn.Module):\n    def forward(self, x, w):\n        raise ValueError(3)"
    )
    path = tmp_path / "mine.py"
    path.write_text(module if kind == "module" else function)
    verdict = judge(str(path), NORM, examples=1, server=server)
    assert verdict.failure is not None and verdict.failure.message == "ValueError: 3 (mine.py:5)", verdict


@pytest.mark.parametrize("name", [b"bad\xff.py", b"esc\x1b[31m.py", "\u202ename'.py".encode()])
def test_a_name_that_no_terminal_shows_is_told_in_characters_that_it_does(name, tmp_path, server):
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), name))
    with open(path, "w") as file:
        file.write(RIGHT)
    verdict = judge(path, NORM, examples=1, server=server)
    assert verdict.passed and str(verdict).encode("utf-8").decode("utf-8").replace("\n", "").isprintable(), verdict
    shown = subprocess.run(["bash", "-c", f"printf %s {verdict.replay.split()[2]}"], capture_output=True, check=True)
    assert os.path.abspath(shown.stdout) == os.fsencode(path)


@pytest.mark.parametrize("length", [1, 300])
def test_a_program_is_no_path_of_one(length):
    text = "import torch\n\n" * length
    with pytest.raises(SubmissionError, match=r"^import torch.*(not a path|no such file); give the path of") as error:
        judge(text, NORM)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
