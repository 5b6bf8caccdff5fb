"""How a submission is called by its parameters, and the messages about one that cannot be loaded or called."""

from __future__ import annotations

import json

import pytest
from cheating_kernels import NORM, TREE

from flashinfer_trace import load
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.loading import CallForm, LoadError, call_form
from flashinfer_trace.judging.submission import SubmissionError
from flashinfer_trace.judging.verdict import Grade, Verdict

RETURNS = "def norm(x, w): return x.clone()\n"


@pytest.mark.parametrize(
    ("function", "by_name", "writes"),
    [
        (lambda **rest: 0, True, False),
        (lambda a, **rest: 0, True, False),
        (lambda eps=0, **rest: 0, True, False),
        (lambda y, **rest: 0, True, True),
        (lambda x, w, **rest: 0, False, False),
        (lambda x, w, z, **rest: 0, False, True),
        (lambda *all, **rest: 0, False, False),
        (lambda x, *all, **rest: 0, False, False),
        (lambda b, *, a: 0, True, False),
        (lambda a, b, /: 0, False, False),
        (lambda a, b, eps=0, *, more=0: 0, True, False),
        (lambda b, a, z: 0, True, True),
        (lambda b, z, a, eps=0: 0, True, True),
        (lambda b, a, *, z: 0, True, True),
        (lambda b, x, z: 0, False, True),
    ],
)
def test_arguments_go_by_name_or_by_position(function, by_name, writes):
    assert call_form(function, ["a", "b"], ["y"], None) == CallForm(by_name, writes)


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda x, **rest: 0, r"\['x', '\*\*rest'\]"),
        (lambda a, /, **rest: 0, r"\['a', '\*\*rest'\]"),
        (lambda a, *, x: 0, r"\['a', 'x'\]"),
        (lambda a, b, c, d, *rest: 0, r"\['a', 'b', 'c', 'd', '\*rest'\]"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_first_call(function, takes):
    with pytest.raises(LoadError, match=f"it takes {takes}; it must take the inputs"):
        call_form(function, ["a", "b"], ["y"], None)


@pytest.mark.parametrize(
    ("function", "targets"),
    [
        (lambda b, y, a, x: 0, ("x", "y")),
        (lambda x, z, b, a: 0, ("x", "z")),
        (lambda a, b, x, y: 0, ("x", "y")),
        (lambda m, n, x, z: 0, ("x", "z")),
        (lambda *all: 0, ()),
        (lambda b, a: 0, ()),
    ],
)
def test_outputs_go_by_the_parameters_that_are_left(function, targets):
    assert call_form(function, ["a", "b"], ["x", "y"], None).targets == targets


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ("", "define get_init_inputs() in mine.py, which returns the arguments of ModelNew"),
        ("def get_init_inputs(): return [1, 2]", "get_init_inputs() in mine.py must return the arguments of ModelNew"),
    ],
)
def test_a_class_that_takes_arguments_is_told_how_to_give_them(more, hint, tmp_path, server):
    path = tmp_path / "mine.py"
    path.write_text(f"class ModelNew:\n  def __init__(self, n): pass\n  def __call__(self, x, w): return x\n{more}")
    assert not_judged(judge(str(path), NORM, server=server)).endswith(f"; {hint}")


def test_a_class_whose_own_code_raises_is_told_where(tmp_path, server):
    path = tmp_path / "mine.py"
    path.write_text("class ModelNew:\n  def __init__(self): int([])\n  def __call__(self, x, w): return x")
    message = not_judged(judge(str(path), NORM, server=server))
    assert message.startswith("TypeError: int() ") and message.endswith(" (mine.py:2)")


def test_a_class_of_this_process_is_given_as_an_object():
    class Scaled:
        def __init__(self, by):
            self.by = by

        def __call__(self, x, w):
            return x * self.by

    assert not_judged(judge(Scaled, NORM)).endswith("'by'; give an object of it")
    assert judge(Scaled(2), NORM, examples=1).failure.kind == "values"


RIGHT = "f = x.float(); return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)"


def test_what_is_imported_by_a_usual_name_is_not_meant(tmp_path, server):
    path = tmp_path / "mine.py"
    path.write_text(
        f"import torch\nfrom subprocess import run\n\nclass ModelNew:\n  def __call__(self, x, w): {RIGHT}\n"
    )
    assert judge(str(path), NORM, examples=1, server=server).grade == Grade.REFERENCE
    (tmp_path / "other.py").write_text(f"import torch\n\ndef run(x, w): {RIGHT}\n")
    path.write_text("from other import run\n")
    assert judge(str(path), NORM, examples=1, server=server).grade == Grade.REFERENCE


def test_a_helper_beside_a_module_is_not_taken_for_the_kernel(tmp_path, server):
    path = tmp_path / "mine.py"
    module = "class Norm(torch.nn.Module):\n  def forward(self, x, w): return torch.zeros_like(x)\n"
    path.write_text(f"import torch\n\ndef helper(x, w): {RIGHT}\n\n{module}")
    message = not_judged(judge(str(path), NORM, server=server))
    assert "of ['helper', 'Norm'] none is the only one; name the one to judge: FILE:FUNCTION" in message
    assert judge(f"{path}:Norm", NORM, examples=1, server=server).grade == Grade.WRONG
    path.write_text(f"import torch\n\n{module}")
    assert judge(str(path), NORM, examples=1, server=server).grade == Grade.WRONG
    path.write_text("")
    assert "the file defines no function or class; define run" in not_judged(judge(str(path), NORM, server=server))


NORM_TEXT = "f = hidden_states.float()\n    f = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + {eps}) * weight\n"


def written(tmp_path, parameters: str, last: str, eps: str = "1e-6") -> str:
    """A kernel of these parameters, which ends with a line about `f`, its result."""
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\n\ndef run({parameters}):\n    {NORM_TEXT.format(eps=eps)}    {last}\n")
    return str(path)


def test_inputs_go_by_name_if_the_output_has_another(tmp_path, server):
    verdict = judge(written(tmp_path, "weight, hidden_states, out", "out.copy_(f)"), NORM, examples=2, server=server)
    assert verdict.grade == Grade.REFERENCE, verdict


@pytest.mark.parametrize(
    ("parameters", "last", "eps", "message"),
    [
        ("hidden_states, weight, eps", "return f.bfloat16()", "eps", "the output `output` as `eps`, wrote nothing"),
        ("hidden_states, weight, output", "return f.bfloat16()", "1e-6", "returned a Tensor, which is ignored: write"),
        ("hidden_states, weight, output", "pass", "1e-6", "it wrote nothing into `output`; output output: "),
    ],
)
def test_an_output_that_nothing_is_written_into_is_told(parameters, last, eps, message, tmp_path, server):
    verdict = judge(written(tmp_path, parameters, last, eps), NORM, examples=2, server=server)
    assert verdict.grade == Grade.WRONG and message in verdict.failure.message, verdict
    assert verdict.failure.kind == ("values" if last == "pass" else "outputs")


@pytest.mark.parametrize("returned", ["output", "(output,)", "{'output': output}", "None", "True", "object()"])
def test_what_is_returned_beside_written_outputs_does_not_matter(returned, tmp_path, server):
    kernel = written(tmp_path, "hidden_states, weight, output", f"output.copy_(f); return {returned}")
    assert judge(kernel, NORM, examples=2, server=server).grade == Grade.REFERENCE


def test_booleans_that_nothing_is_written_into_are_told_too(tmp_path, server):
    outputs = load(TREE).outputs
    path = tmp_path / "tree.py"
    path.write_text(f"def run({', '.join([*load(TREE).inputs, *outputs])}): return tree_mask.clone()")
    failure = judge(str(path), TREE, examples=1, server=server).failure
    taken = ", ".join(f"`{name}`" for name in outputs)
    assert failure.kind == "outputs" and f"with the output {taken}, wrote nothing there" in failure.message, failure


@pytest.fixture
def verdict_on(tmp_path, server):
    """Judges a Solution of these sources, by path."""

    def judged(sources: dict[str, str], entry: str = "main.py::run", destination: bool = False) -> Verdict:
        path = tmp_path / "solution.json"
        spec = {"language": "python", "entry_point": entry, "destination_passing_style": destination}
        files = [{"path": file, "content": text} for file, text in sources.items()]
        path.write_text(json.dumps({"name": "mine", "definition": NORM, "spec": spec, "sources": files}))
        return judge(str(path), NORM, examples=1, server=server)

    return judged


def not_judged(verdict: Verdict) -> str:
    """The message of a verdict on a kernel that was not judged, and misses no package."""
    assert verdict.grade == Grade.NOT_JUDGED and verdict.failure is not None, verdict
    assert "is not installed" not in str(verdict)
    return verdict.failure.message


@pytest.mark.parametrize(
    ("parameters", "destination", "wanted"),
    [
        ("a, b", True, "true, so it must take the inputs ['hidden_states', 'weight'] and after them the outputs"),
        ("a, b, c", False, "false, so it must take the inputs ['hidden_states', 'weight'] alone and return the"),
    ],
)
def test_a_solution_is_told_what_its_style_asks_for(parameters, destination, wanted, verdict_on):
    message = not_judged(verdict_on({"main.py": f"def run({parameters}): return a"}, destination=destination))
    assert f"destination_passing_style is {wanted}" in message
    assert f"set it to {'false' if destination else 'true'} in the Solution's spec" in message
    assert "may take" not in message


def test_a_solution_without_its_function_is_told_of_the_entry_point(verdict_on):
    message = not_judged(verdict_on({"main.py": "def run(x, w): return x"}, entry="main.py::nope"))
    wanted = "main.py has no nope; it has ['run']: entry_point in the Solution's spec, as FILE.py::FUNCTION,"
    assert message.startswith(wanted) and "FILE:FUNCTION" not in message
    with pytest.raises(SubmissionError, match=r"the entry point 'main.py::' must be FILE::FUNCTION"):
        verdict_on({"main.py": ""}, entry="main.py::")


IMPORTS = {
    "from helper import norm": "from .helper import norm",
    "from helper import norm as rows": "from .helper import norm as rows",
    "import helper": "from . import helper",
    "import helper as h": "from . import helper as h",
    "from helper import (\n    norm,\n)": "from .helper import ...",
}


@pytest.mark.parametrize("line", IMPORTS)
def test_an_import_of_a_source_must_be_relative(line, verdict_on):
    sources = {"main.py": f"import torch\n{line}\ndef run(x, w): return x", "helper.py": RETURNS}
    message = not_judged(verdict_on(sources))
    assert message.startswith("ImportError: helper.py is a source of the Solution, whose sources are one package: use ")
    assert message.endswith(f"use `{IMPORTS[line]}` (main.py:2)")


def test_the_import_that_is_proposed_works(verdict_on):
    sources = {"main.py": f"{IMPORTS['from helper import norm']}\ndef run(x, w): return norm(x, w)"}
    assert verdict_on({**sources, "helper.py": RETURNS}).failure.kind == "values"


def test_an_import_from_another_directory_has_more_dots(verdict_on):
    sources = {"main.py": "from .parts.norms import norm\nrun = norm", "parts/norms.py": "from helper import norm"}
    message = not_judged(verdict_on({**sources, "helper.py": RETURNS}))
    assert message.endswith("use `from ..helper import norm` (norms.py:1)")
    message = not_judged(verdict_on({"main.py": "from parts.norms import norm", "parts/norms.py": RETURNS}))
    assert message.endswith("use `from .parts.norms import norm` (main.py:1)")


def test_an_import_of_a_source_while_the_kernel_runs_is_no_missing_package_either(verdict_on):
    sources = {"main.py": "def run(x, w):\n    from helper import norm\n    return norm(x, w)", "helper.py": RETURNS}
    assert not_judged(verdict_on(sources)).endswith("use `from .helper import norm` (main.py:2)")


def test_a_package_that_is_missing_is_still_named_at_its_line(verdict_on):
    verdict = verdict_on({"main.py": "import torch\nimport no_such_package"})
    assert verdict.failure.message == "ModuleNotFoundError: No module named 'no_such_package' (main.py:2)"
    assert "the package no_such_package is not installed here" in str(verdict)
