"""The checker rejects wrong frames, definitions, call sites, sources and documents, and says where they are."""

from __future__ import annotations

import copy
import textwrap

import pytest
from check_package import CHAIN, FILES, KERNEL, LAYER, LINEAR, MIXED, MODEL, RIGHT, frame, make_trace, write

from tools.kernel_tracing.verify.check import check
from tools.shared.source_packages import package_hash


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    write(root, FILES)
    return root


def mutate(sources, chain, position, **changes):
    trace = make_trace(sources, copy.deepcopy(chain))
    frame = trace["frames"][trace["kernels"][0]["chains"][0]["frames"][position]]
    for field, value in changes.items():
        frame[("file", "line", "function", "call").index(field)] = value
    return check(trace, sources)


@pytest.mark.parametrize("position", range(len(CHAIN)))
@pytest.mark.parametrize("step", [-2, -1, 1, 2])
def test_a_frame_moved_to_another_line(sources, position, step):
    line = CHAIN[position]["line"]
    (problem,) = mutate(sources, CHAIN, position, line=line + step)
    assert f"{CHAIN[position]['file']}:{line + step}: no call `" in problem
    assert f"begins on this line; it is on line {line}" in problem


@pytest.mark.parametrize("position", range(len(CHAIN)))
@pytest.mark.parametrize(
    "function", ["forward", "Linear", "Linear.backward", "Layer.__init__", "<module>", "Nowhere.f"]
)
def test_a_function_renamed(sources, position, function):
    problems = mutate(sources, CHAIN, position, function=function)
    assert any(f"is not in {function}, but in {CHAIN[position]['function']}" in problem for problem in problems)


@pytest.mark.parametrize("position", range(len(CHAIN)))
def test_another_call_or_file(sources, position):
    (problem,) = mutate(sources, CHAIN, position, call="self.nothing(x)")
    assert "no call `self.nothing(x)` begins on this line" in problem
    (problem,) = mutate(sources, CHAIN, position, file="sglang/srt/none.py")
    assert "sglang/srt/none.py" in problem and "no such file" in problem


def test_a_call_must_be_complete_or_marked_as_cut(sources):
    (problem,) = mutate(sources, CHAIN, 0, call="gemm( x,")
    assert "no call" in problem
    (problem,) = mutate(sources, CHAIN, 0, call="gemm( x,...")
    assert "no call" in problem, "too short to have been cut"


def test_a_long_call_that_is_cut(tmp_path):
    names = ", ".join(f"argument_{number}" for number in range(20))
    model = f"from sgl_kernel import fp8_gemm\ndef f({names}):\n    return fp8_gemm({names})\n"
    write(tmp_path, {KERNEL: FILES[KERNEL], "sgl_kernel/__init__.py": "from sgl_kernel.gemm import fp8_gemm\n"})
    write(tmp_path, {MODEL: model})
    call = f"fp8_gemm({names})"
    first = {"file": MODEL, "line": 3, "function": "f", "call": call[:97] + "...", "condition": ""}
    assert check(make_trace(tmp_path, [first]), tmp_path) == []
    first["call"] = call[:90] + "other..."
    assert len(check(make_trace(tmp_path, [first]), tmp_path)) == 1


def test_the_kernel_itself(sources):
    (problem,) = check(make_trace(sources, CHAIN, name="bf16_gemm"), sources)[:1]
    assert f"{KERNEL}:3: does not define bf16_gemm" in problem
    problems = check(make_trace(sources, CHAIN[1:]), sources)
    assert any("`self.linear(x)` does not call fp8_gemm" in problem for problem in problems)
    alias = make_trace(sources, CHAIN, name="alias", definition={"file": KERNEL, "line": 6})
    problems = check(alias, sources)
    assert len(problems) == 1 and "`gemm( x, self.weight, )` does not call alias" in problems[0]
    assert check(make_trace(sources, CHAIN, definition={"file": KERNEL, "line": 99}), sources)
    native = {"name": "custom_op", "source": "torch.ops", "definition": {"file": "", "line": 0}}
    chain = [frame(MODEL, "Layer.forward", "torch.ops.sglang.custom_op(x)"), LAYER]
    assert check(make_trace(sources, chain, **native), sources) == []


def test_a_chain_is_listed_once(sources):
    twice = make_trace(sources, CHAIN, RIGHT["partial"])
    twice["kernels"][0]["chains"] *= 2
    assert any("a chain from here is listed twice" in problem for problem in check(twice, sources))


def test_other_sources_are_reported(sources):
    trace = make_trace(sources, CHAIN)
    trace["sources"]["sglang"]["sha256"] = "0" * 64
    (problem,) = check(trace, sources)
    assert "not the sglang 1.0 that was traced" in problem and "or trace again" in problem


def test_missing_sources(sources, tmp_path):
    trace = make_trace(sources, CHAIN)
    (problem,) = check(trace, tmp_path / "none")
    assert "no such directory; fetch it with `python -m tools.fetch_sources --dest" in problem
    problems = check(trace, tmp_path)
    assert "sglang is missing" in problems[0] and any("no such file" in problem for problem in problems)


def test_a_file_that_is_not_python(tmp_path):
    write(tmp_path, FILES | {MODEL: "def broken(:\n"})
    (problem,) = check(make_trace(tmp_path, [LINEAR, MIXED]), tmp_path)
    assert "the file is not valid Python" in problem


def test_a_path_that_leads_out(sources):
    (problem,) = mutate(sources, CHAIN, 1, file="sglang/../sgl_kernel/gemm.py")
    assert "does not match" in problem or "no such file" in problem


def test_checkouts(tmp_path):
    layout = {"sglang/": "sglang/python/sglang/", "sgl_kernel/": "sglang/sgl-kernel/python/sgl_kernel/"}
    for name, text in (FILES | {"sglang/__init__.py": ""}).items():
        prefix = name.split("/")[0] + "/"
        path = tmp_path / name.replace(prefix, layout[prefix], 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    trace = make_trace(tmp_path, CHAIN)
    trace["sources"] = {"sglang": {"version": "1", "sha256": package_hash(tmp_path / "sglang/python/sglang")}}
    assert check(trace, tmp_path) == []


@pytest.mark.parametrize(
    ("pointer", "change"),
    [
        ("/kernels/0/source", lambda trace: trace["kernels"][0].update(source="cuda")),
        ("/frames/0/1", lambda trace: trace["frames"][0].__setitem__(1, "5")),
        ("/frames: has no entry 99", lambda trace: trace["kernels"][0]["chains"][0]["frames"].append(99)),
        ("/tests/0: nothing refers", lambda trace: trace["tests"].append("x > 1")),
        ("/kernels/0/chains", lambda trace: trace["kernels"][0].update(chains=[])),
        ("/kernels/0/chains", lambda trace: trace["kernels"][0].update(chains=[[]])),
        ("/kernels/0/chains", lambda trace: trace["kernels"][0].update(chains=5)),
        ("/kernels/0", lambda trace: trace["kernels"][0].pop("chains")),
        ("/kernels/0/definition", lambda trace: trace["kernels"][0]["definition"].update(file="")),
        ("/", lambda trace: trace.pop("not_evaluated")),
        ("/", lambda trace: trace.update(more=1)),
        ("/sources/sglang/sha256", lambda trace: trace["sources"]["sglang"].update(sha256="AB")),
        ("/kernels", lambda trace: trace.update(kernels=None)),
    ],
)
def test_the_schema_comes_first(sources, pointer, change):
    trace = make_trace(sources, CHAIN)
    change(trace)
    problems = check(trace, sources)
    assert problems and all(problem.startswith(pointer) for problem in problems)


@pytest.mark.parametrize("document", [None, [], "text", 5])
def test_no_trace_at_all(sources, document):
    assert check(document, sources)
