"""The memory of a call; the messages about results of a wrong form, whose description proves nothing."""

from __future__ import annotations

import pytest
import torch
from cheating_kernels import ATTENTION, NORM

import flashinfer_trace
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.output_form import outputs_of, wrong_form
from flashinfer_trace.judging.process import Answer, Failed, Launch, tampered_of
from flashinfer_trace.judging.submission import RunLimits, from_path
from flashinfer_trace.judging.verdict import Failure, Grade

SAYS = "the Definition says"
#: Replies of a process that are not a list of replaced names.
NO_LIST = (5, "clock", {"clock": 1}, True)
#: A result of the right form, as a process describes it.
RIGHT = {"dtype": "bfloat16", "shape": [2, 512], "device": "cpu", "layout": "torch.strided"}


@pytest.mark.parametrize("said", NO_LIST)
def test_only_a_list_names_what_was_replaced(said):
    with pytest.raises(Failed, match="its process answered no list of replaced functions") as failed:
        tampered_of({"tampered": said})
    assert failed.value.kind == "protocol" and tampered_of({"tampered": ["a\nb"]}) == ["a b"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("x.float()", f"output output is torch.float32; {SAYS} bfloat16"),
        (
            "x[:, :3].half()",
            f"has the shape [3, 3]; {SAYS} ['batch_size', 'hidden_size'], here [3, 512]; output",
        ),
        ("x.to('meta')", "output output is on meta; the inputs are on cpu"),
        ("x.float().to('meta')", f"is torch.float32; {SAYS} bfloat16; output output is on meta; the inputs are on cpu"),
        ("x.to_sparse()", "output output has the layout torch.sparse_coo; it must be a dense tensor"),
        ("3", "output output is a int; it must be a tensor"),
        ("(x, w)", "it returned 2 results; it must return the outputs ['output'], in this order"),
        ("()", "it returned 0 results; it must return the outputs ['output'], in this order"),
        ("{}", "it returned an empty dict; it must return the outputs ['output'], by name"),
        ("{'y': x}", "y is not one of the Definition's: ['output']"),
    ],
)
def test_a_result_of_a_wrong_form_is_described(result, message, tmp_path, server):
    path = tmp_path / "form.py"
    path.write_text(f"def run(x, w): return {result}")
    failure = judge(str(path), NORM, examples=1, server=server).failure
    assert failure.kind == "outputs" and message in failure.message, failure
    assert "on meta" not in failure.message or "meta" in result


def test_one_result_for_two_outputs(tmp_path, server):
    path = tmp_path / "one.py"
    path.write_text("def run(*inputs): return inputs[0]")
    failure = judge(str(path), ATTENTION, twin=True, examples=1, server=server).failure
    assert failure.kind == "outputs" and failure.message.startswith("it returned 1 result; it must return the outputs")


def misfit_of(described: object) -> Failure | None:
    definition, poisoned = flashinfer_trace.load(NORM), torch.zeros(2, 512, dtype=torch.bfloat16)
    answer = Answer({"output": poisoned}, {"output": described}, [], False, [])
    outputs = outputs_of(definition, answer, torch.device("cpu"))
    axes = {"batch_size": 2, "hidden_size": 512}
    return wrong_form(definition, axes, answer, outputs, torch.device("cpu"))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({**RIGHT, "dtype": "half"}, "is torch.float16"),
        ({**RIGHT, "shape": ["2", 512]}, "has a form that its process described as"),
        ({**RIGHT, "shape": [2**62, 2**62]}, "it must be a tensor"),
        ({**RIGHT, "shape": [2**40, 2]}, f"has the shape [{2**40}, 2]"),
        ({**RIGHT, "device": "cuda:0"}, "is on cuda:0; the inputs are on cpu"),
        ({**RIGHT, "device": None}, "is on None"),
        ({**RIGHT, "layout": "torch.sparse_csr"}, "has the layout torch.sparse_csr"),
        ({"dtype": 3, "shape": 4}, "it must be a tensor"),
        ({"type": "a\0b\ud800"}, "it must be a tensor"),
        ({}, "it must be a tensor"),
        (3, "returned None"),
    ],
)
def test_a_form_that_is_made_up_is_never_compared(described, message):
    failure = misfit_of(described)
    assert failure is not None and failure.kind == "outputs" and message in failure.message, failure


def test_a_right_form_is_none_of_these(tmp_path, server):
    assert misfit_of(RIGHT) is None
    path = tmp_path / "wrong.py"
    path.write_text("def run(x, w): return x.clone()")
    verdict = judge(str(path), NORM, examples=1, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure.kind == "values"


def test_inputs_keep_their_strides_and_lie_where_they_lay(server, tmp_path):
    path = tmp_path / "strides.py"
    path.write_text("def run(a, b, n): return (str(a.stride()), a.data_ptr() % 512, b.sum() + n)")
    submission = from_path(str(path))
    matrix = torch.arange(12.0).view(3, 4).T
    poisoned = {name: torch.zeros(()) for name in ("stride", "address", "total")}
    for value in (matrix, torch.ones(1).expand(5), torch.ones(0, 3)):
        inputs = {"a": value, "b": torch.ones(2, dtype=torch.bfloat16), "n": 3}
        with Launch(server, submission.request, list(inputs), list(poisoned), "cpu", RunLimits()).start() as process:
            answer = process.call(inputs, poisoned, 0)
        assert answer.returned["stride"] == {"type": "str"} and answer.returned["address"] == {"number": 0}
        assert answer.returned["total"]["dtype"] == "bfloat16" and not answer.changed and not answer.outside
