"""Which functions can be judged, how they are called, the grades, and that a verdict can be repeated."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import textwrap
from importlib.util import find_spec

import hypothesis
import pytest
import torch
from cheating_kernels import CHEATS, SAMPLER
from hypothesis import strategies as st
from whole_dataset import FIRST

import flashinfer_trace
from flashinfer_trace.families import all_families, family_of
from flashinfer_trace.format.definition import InputError
from flashinfer_trace.harness.verify import prepare
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.server import Server
from flashinfer_trace.judging.submission import SubmissionError, from_path, known
from flashinfer_trace.judging.user_inputs import LARGEST_SEED
from flashinfer_trace.judging.verdict import Grade

NAME = "rmsnorm_h512"
NORM = """
import torch

def norm(x, w):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)

"""
FORMS = {
    "inputs by name, returned": "def run(weight, hidden_states): return norm(hidden_states, weight)",
    "inputs by position, returned": "def run(x, w): return norm(x, w)",
    "outputs by name": "def run(output, hidden_states, weight): output.copy_(norm(hidden_states, weight))",
    "outputs by position": "def run(x, w, y): y.copy_(norm(x, w))",
    "any arguments": "def run(*inputs): return norm(*inputs)",
    "any names": "def run(**inputs): return norm(inputs['hidden_states'], inputs['weight'])",
    "some names, and any": "def run(weight, **rest): return norm(rest['hidden_states'], weight)",
    "outputs by name, and any": "def run(output, weight, **x): output.copy_(norm(x['hidden_states'], weight))",
    "own names, and any": "def run(x, w=None, **options): return norm(x, w)",
    "options with defaults": "def run(x, w, eps=1e-6): return norm(x, w)",
    "a dict": "def run(x, w): return {'output': norm(x, w)}",
    "a list": "def run(x, w): return [norm(x, w)]",
    "a tuple": "def run(x, w): return (norm(x, w),)",
    "strided": "def run(x, w): return norm(x, w).T.contiguous().T",
    "KernelBench's model": """
        class ModelNew(torch.nn.Module):
            def __init__(self, eps):
                super().__init__()
                self.eps = torch.nn.Parameter(torch.tensor(eps))
            def forward(self, hidden_states, weight):
                y = hidden_states.float()
                y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
                return (y * weight.float()).to(hidden_states.dtype)
        def get_init_inputs(): return [1e-6]
    """,
}


@pytest.fixture
def kernel(tmp_path):
    """Writes a kernel's file, which begins with `norm`."""

    def write(text: str) -> str:
        path = tmp_path / "my_kernel.py"
        path.write_text(NORM + textwrap.dedent(text))
        return str(path)

    return write


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_may_be_called_in_many_ways(form, kernel, server):
    verdict = judge(kernel(FORMS[form]), NAME, examples=2, server=server)
    assert verdict.grade == Grade.REFERENCE, verdict


def test_the_only_function_of_a_file_needs_no_name(tmp_path, server):
    path = tmp_path / "one.py"
    path.write_text(NORM)
    assert judge(str(path), NAME, examples=2, server=server).passed


@pytest.mark.parametrize("destination", [True, False])
def test_a_solution_of_flashinfer_bench(destination, tmp_path, server):
    body = "from .parts.norms import norm\n"
    body += "def main(a, b, c): c.copy_(norm(a, b))" if destination else "def main(a, b): return norm(a, b)"
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(solution(body, destination=destination)))
    verdict = judge(str(path), NAME, examples=2, server=server)
    assert verdict.grade == Grade.REFERENCE, verdict
    assert verdict.submission == "mine"


def solution(
    body: str, language: str = "python", entry: str = "main.py::main", destination: object = True, file: str = "main.py"
) -> dict:
    spec = {"language": language, "target_hardware": ["cpu"], "entry_point": entry}
    return {
        **{"name": "mine", "definition": NAME, "author": "me"},
        "spec": {**spec, "destination_passing_style": destination},
        "sources": [{"path": file, "content": body}, {"path": "parts/norms.py", "content": NORM}],
    }


def test_a_solution_of_flashinfer_bench_is_valid_for_it():
    data = pytest.importorskip("flashinfer_bench.data", reason="pip install --no-deps flashinfer-bench==0.1.2")
    data.Solution(**solution("pass"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language": "tilelang"}, "a Solution in tilelang; those in python, triton, cpp, cuda can be judged"),
        ({"entry": "other.py::main"}, "must be FILE::FUNCTION"),
        ({"entry": "main.py"}, "must be FILE::FUNCTION"),
        ({"entry": 3}, "names, paths and contents are strings"),
        ({"file": "parts/norms.py"}, "two sources have the same path"),
        ({"destination": "false"}, "destination_passing_style is true or false"),
        ({"destination": None}, "destination_passing_style is true or false"),
        ({"file": "main.cu", "entry": "main.cu::run"}, r"'main.cu::run' is in no Python file"),
        ({"file": "a.b.py", "entry": "a.b.py::run"}, r"'a.b.py::run' is in no Python file"),
    ],
)
def test_a_solution_that_cannot_be_judged_is_refused(change, message, tmp_path):
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(solution("def main(): ...", **change)))
    with pytest.raises(SubmissionError, match=message):
        from_path(str(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(where=st.sampled_from([(), ("spec",), ("sources",), ("sources", 0), ("sources", 1)]), data=st.data())
def test_a_hostile_solution_is_refused_or_read(where, data, tmp_path):
    """Any part of a Solution may be anything: it is refused with one error, or it is a submission."""
    document = place = solution("def main(): ...")
    for step in where:
        place = place[step]
    key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(JSON)
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(document))
    try:
        with from_path(str(path)).on_disk() as request:
            assert os.path.isfile(request["path"])
    except SubmissionError as error:
        assert str(path) in str(error) or "cannot be written" in str(error)


def test_what_is_missing_is_named(tmp_path, kernel, server):
    path = tmp_path / "solution.json"
    path.write_text(json.dumps({"name": "mine"}))
    with pytest.raises(
        SubmissionError, match=r"solution\.json: not a Solution of flashinfer-bench: it has no entry 'spec'"
    ):
        from_path(str(path))
    verdict = judge(f"{kernel('def run(x, w): return norm(x, w)')}:norms", NAME, server=server)
    assert "my_kernel.py has no norms; it has ['norm', 'run']: FILE:FUNCTION" in verdict.failure.message


def test_a_source_outside_of_the_solution_is_refused(tmp_path):
    data = solution("def main(): ...")
    data["sources"].append({"path": "../outside.py", "content": "x = 1"})
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(data))
    with pytest.raises(SubmissionError, match=r"'../outside.py' lies outside"):
        from_path(str(path))


@pytest.mark.parametrize("text", ["no_such.py", "no_such.py:run", "README.md", "[]"])
def test_what_is_no_kernel_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("text")
    with pytest.raises(SubmissionError, match=r"no such file|not a Python file"):
        from_path(text)


@pytest.mark.parametrize("file", ["./main.py", "pkg/./main.py"])
def test_a_source_may_lie_in_a_directory(file, tmp_path, server):
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(solution(NORM, file=file, entry=f"{file}::norm", destination=False)))
    assert judge(str(path), NAME, examples=1, server=server).grade == Grade.REFERENCE


def test_a_solution_of_another_definition_is_refused(tmp_path, server):
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(solution("def main(): ...")))
    with pytest.raises(SubmissionError, match="mine is for rmsnorm_h512, not for rmsnorm_h128"):
        judge(str(path), "rmsnorm_h128", server=server)


def test_a_callable_cannot_be_judged_on_a_gpu():
    with pytest.raises(SubmissionError, match=r"write it to a file"):
        judge(lambda x: x, NAME, device="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": 0}, "examples=0: give a whole number of 1 or more"),
        ({"examples": -3}, "examples=-3: give a whole number of 1 or more"),
        ({"examples": 2.5}, r"examples=2\.5: give a whole number"),
        ({"seed": -1}, "seed=-1: give a whole number from 0 to 9223372036854775807"),
        ({"seed": 2**63}, "seed=9223372036854775808: give a whole number from 0"),
        ({"device": "foo"}, "device 'foo': there is no such device; give cpu, cuda or cuda:N"),
        ({"device": None}, "device 'None': there is no such device; give cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device 'meta': it runs on cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "device 'cuda:99': torch sees .* CUDA device"),
        ({"device": torch.device("cuda:99")}, "device 'cuda:99': torch sees .* CUDA device"),
    ],
)
def test_what_no_judgment_can_use_is_refused(change, message, kernel, server):
    with pytest.raises(InputError, match=message):
        judge(kernel("def run(x, w): return x"), NAME, server=server, **change)


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu")])
def test_a_cpu_has_one_name(device, kernel, server):
    verdict = judge(kernel(FORMS["a list"]), NAME, device=device, examples=1, server=server)
    assert verdict.passed and verdict.device == "cpu" and " --device cpu " in verdict.replay


def test_the_largest_seed_draws_the_inputs_of_a_sampler(server):
    verdict = judge(f"{CHEATS}/samplers.py:honest", SAMPLER, twin=True, examples=1, seed=LARGEST_SEED, server=server)
    assert verdict.passed and verdict.seed == LARGEST_SEED, verdict


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def run(x): return x", r"it takes \['x'\]; it must take the inputs \['hidden_states', 'weight'\]"),
        ("def run(a, b, c, d): return a", r"it takes \['a', 'b', 'c', 'd'\]"),
        ("run = 3", "it is a int, which cannot be called"),
        ("import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module' \(my_kernel.py:\d+\)"),
        ("def a(x, w): ...\ndef b(x, w): ...", "name the one to judge: FILE:FUNCTION"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_is_not_judged(text, message, kernel, server):
    verdict = judge(kernel(text), NAME, server=server)
    assert verdict.grade == Grade.NOT_JUDGED
    assert verdict.failure.kind == "not-loaded"
    assert re.search(message, verdict.failure.message), verdict.failure.message


def test_a_package_that_is_missing_when_the_kernel_runs_is_named(kernel, server):
    verdict = judge(kernel("def run(x, w):\n  import no_such_package.kernels\n  return x"), NAME, server=server)
    assert verdict.grade == Grade.NOT_JUDGED
    assert "the package no_such_package is not installed here" in str(verdict)


@pytest.mark.parametrize(
    ("error", "judged"),
    [
        ("torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')", False),
        ("type('AcceleratorError', (RuntimeError,), {})('CUDA error: out of memory')", False),
        ("RuntimeError('Triton Error [CUDA]: out of memory')", False),
        ("RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')", False),
        ("RuntimeError('Triton Error [CUDA]: an illegal memory access was encountered')", True),
        ("RuntimeError('out of resource: shared memory, Required: 262144, Hardware limit: 232448')", True),
    ],
)
def test_a_kernel_without_memory_on_its_gpu_is_not_judged(error, judged, kernel, server):
    verdict = judge(kernel(f"def run(x, w):\n  raise {error}"), NAME, server=server)
    assert verdict.grade == (Grade.WRONG if judged else Grade.NOT_JUDGED)
    assert ("the GPU had no memory left" in str(verdict)) != judged


@pytest.mark.parametrize(
    "text",
    [
        "def run(x, w): return norm(x.cuda(), w.cuda()).cpu()",
        "y = torch.empty(9, device='cuda')\ndef run(x, w): return norm(x, w)",
        "import triton.language\ndef run(x, w): return norm(x, w)",
        "def run(x, w): raise RuntimeError('0 active drivers ([]). There should only be one.')",
        "def run(x, w): raise ValueError('Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)')",
        "def run(x, w): raise RuntimeError('Found no NVIDIA driver on your system. Please check that you have one')",
    ],
)
def test_a_kernel_for_a_gpu_is_not_judged_without_one(text, kernel, server):
    if (torch.cuda.is_available() and ".cuda()" in text) or (find_spec("triton") and "import triton" in text):
        pytest.skip("here is what this kernel needs")
    verdict = judge(kernel(text), NAME, server=server)
    assert verdict.grade == Grade.NOT_JUDGED and verdict.code == "needs-cuda", verdict
    assert str(verdict).startswith(f"my_kernel.py for {NAME} on cpu: not judged: needs --device cuda\n")


def test_this_package_is_not_missing_but_refused(kernel, server):
    verdict = judge(kernel("def run(x, w):\n  import flashinfer_trace\n  return x"), NAME, server=server)
    assert verdict.grade == Grade.WRONG and not verdict.failure.missing


def test_a_kernel_that_returns_nothing_is_told_what_to_return(kernel, server):
    verdict = judge(kernel("def run(x, w):\n  norm(x, w)"), NAME, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure.kind == "outputs"
    assert verdict.failure.message.startswith("returned None; it must return `output`")


def test_the_worst_element_is_named(kernel, server):
    """One element of one row is wrong: the verdict says which, what it is, and what it may be."""
    verdict = judge(
        kernel("def run(x, w):\n  y = norm(x, w)\n  y[-1:, 7] = 77\n  return y"), NAME, seed=1, server=server
    )
    failure = verdict.failure
    assert failure.kind == "values" and failure.output == "output"
    assert failure.index[1] == 7 and failure.got == 77.0 and abs(failure.wanted - 77) > failure.bound
    assert failure.ratio > 1 and failure.axes["batch_size"] == failure.index[0] + 1
    assert "at [" in str(verdict) and "one bf16 rounding" in str(verdict)


def test_a_callable_of_this_process_and_its_state():
    """Closures and module objects run as they are here; what they do to themselves stays in the other process."""
    eps, seen = 1e-6, []

    def norm(hidden_states, weight):
        seen.append(1)
        x = hidden_states.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(torch.bfloat16)

    verdict = flashinfer_trace.judge(norm, NAME, examples=2)
    assert verdict.grade == Grade.REFERENCE, verdict
    assert not seen
    assert verdict.alike == ["flashinfer.norm.rmsnorm", "torch.ops.sgl_kernel.rmsnorm"]


def test_a_callable_is_trusted_and_a_file_is_not(kernel, server):
    """As docs/judge.md says: a callable keeps what its process has imported, and a file gets none of it."""
    reference = flashinfer_trace.load(NAME)

    def cheat(hidden_states, weight):
        return reference.run(hidden_states, weight)

    assert judge(cheat, NAME, examples=1).passed
    text = f"def run(x, w):\n  import flashinfer_trace\n  return flashinfer_trace.load({NAME!r}).run(x, w)"
    assert judge(kernel(text), NAME, examples=1, server=server).failure.kind == "raised"


def test_a_kernel_that_cancels_has_the_grade_of_the_kernels_that_do(server, tmp_path):
    """1 + erf loses the small tails of gelu, as the real kernels do. Their bound allows for it."""
    path = tmp_path / "gelu.py"
    path.write_text(
        "import torch\n"
        "def run(gate_up):\n"
        "    gate, up = gate_up.float().chunk(2, dim=-1)\n"
        f"    return (0.5 * gate * (1 + torch.erf(gate * {math.sqrt(0.5)})) * up).to(gate_up.dtype)\n"
    )
    verdict = judge(str(path), "gelu_and_mul_i2048", seed=5, twin=True, server=server)
    assert verdict.grade == Grade.KERNEL, verdict
    assert "flashinfer.activation.gelu_and_mul" in verdict.alike
    assert "within the bounds stated for flashinfer.activation.gelu_and_mul" in str(verdict)
    assert "1 + erf" in verdict.outputs["output"].policy


def test_a_known_kernel_is_judged_by_its_own_bounds(server):
    definition = flashinfer_trace.load("gemm_n128_k2048")
    (kernel,) = family_of(definition).kernels_of(definition)
    verdict = judge(known(definition, kernel.label), definition, examples=2, server=server)
    assert verdict.passed, verdict
    assert kernel.label in verdict.alike


GREEDY = """
import torch
def run(hidden_states, weight):
    memory = {}
    x = hidden_states.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)
"""


@pytest.mark.parametrize("memory", ["bytearray(3 << 30)", "torch.ones(3 << 30, dtype=torch.uint8)"])
def test_memory_and_time_have_limits_in_python_too(memory, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GREEDY.format(memory))
    verdict = flashinfer_trace.judge(path, NAME, examples=1, seed=3, timeout=20, memory=2)
    assert verdict.grade == Grade.WRONG and re.match("MemoryError|RuntimeError: .*memory", verdict.failure.message)
    assert verdict.replay.endswith(" --seed 3 --timeout 20 --memory 2.0")
    path.write_text(GREEDY.format("1"))
    assert flashinfer_trace.judge(path, NAME, examples=1, memory=2).passed
    path.write_text("import time\ndef run(x, w): time.sleep(9)")
    assert flashinfer_trace.judge(path, NAME, timeout=0.3).failure.kind == "timed-out"


def test_a_verdict_can_be_repeated_and_is_fresh_otherwise(kernel, server):
    path = kernel("def run(x, w): return norm(x, w)")
    first, fresh = (judge(path, NAME, examples=3, server=server) for _ in range(2))
    again = judge(path, NAME, examples=3, seed=first.seed, server=server)
    assert first.seed != fresh.seed
    assert (again.outputs, again.cases, again.vacuous) == (first.outputs, first.cases, first.vacuous)
    assert f"--seed {first.seed}" in first.replay and os.path.relpath(path) in first.replay


def test_a_submission_may_move_files_as_compilers_do(kernel, server, tmp_path):
    """From one directory into another: Triton and DeepGEMM compile into one of their own, then move it."""
    old, new = tmp_path / "compiling", tmp_path / "cache"
    old.mkdir()
    new.mkdir()
    (old / "code").touch()
    text = f"import os\nos.replace({str(old / 'code')!r}, {str(new / 'code')!r})\ndef run(x, w): return norm(x, w)"
    assert judge(kernel(text), NAME, examples=1, server=server).passed
    assert (new / "code").exists()


def test_that_its_server_was_ended_is_a_verdict_too(kernel):
    with Server(fork=True) as ended:
        os.kill(ended._pid, signal.SIGKILL)
        verdict = judge(kernel("def run(x, w): return norm(x, w)"), NAME, server=ended)
    assert verdict.grade == Grade.NOT_JUDGED and verdict.failure.kind == "died", verdict
    assert not ended.alive


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_every_reference_is_within_its_own_bounds(family, server, tmp_path):
    """An honest kernel of each family passes: its reference, as a file, at the sizes of the twin."""
    definition = FIRST[family.name]
    sized = prepare(definition, family, "cpu", False)
    path = tmp_path / "reference.py"
    path.write_text(sized.reference)
    verdict = judge(str(path), definition, twin=True, examples=1, server=server)
    assert verdict.capped and verdict.alike == [one.label for one in family.kernels_of(definition)], verdict
