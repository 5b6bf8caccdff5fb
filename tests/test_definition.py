"""Definition: shapes, binding, constraints on actual inputs, running, and small twins."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import time

import pytest
import torch
from whole_dataset import FIRST

import flashinfer_trace
from flashinfer_trace import Definition, InputError
from flashinfer_trace.format.reference import (
    ReferenceSourceError,
    compile_reference,
    load_run,
    render,
    substitute_constants,
)
from flashinfer_trace.judging.user_inputs import explained

pytestmark = pytest.mark.quick

SCALE = {
    "name": "scale_h4",
    "op_type": "scale",
    "description": "Rows times a factor.",
    "tags": ["status:unverified", "stage:decode"],
    "axes": {
        "rows": {"type": "var", "description": "Rows."},
        "ends": {"type": "var", "description": "Offsets: one more than rows."},
        "hidden_size": {"type": "const", "value": 4, "description": "Features."},
    },
    "constraints": ["ends == rows + 1", "offsets[-1].item() == rows"],
    "inputs": {
        "x": {"shape": ["rows", "hidden_size"], "dtype": "float32", "description": "Values."},
        "offsets": {"shape": ["ends"], "dtype": "int32", "description": "Offsets."},
        "factor": {"shape": None, "dtype": "float32", "description": "Factor."},
    },
    "outputs": {"y": {"shape": ["rows", "hidden_size"], "dtype": "float32", "description": "Scaled."}},
    "reference": "HIDDEN_SIZE = 4\n\n\ndef run(x, offsets, factor):\n    return x * factor\n",
}


@pytest.fixture
def scale() -> Definition:
    return Definition.from_dict(SCALE)


def inputs_for(rows: int) -> dict:
    return {"x": torch.ones(rows, 4), "offsets": torch.arange(rows + 1, dtype=torch.int32), "factor": 2.0}


def test_round_trip(scale):
    assert scale.to_dict() == SCALE


def test_shapes_need_every_variable_axis(scale):
    assert scale.output_shapes({"rows": 3}) == {"y": (3, 4)}
    assert scale.input_shapes({"rows": 3, "ends": 4}) == {"x": (3, 4), "offsets": (4,), "factor": None}
    with pytest.raises(InputError, match="offsets needs a value for axis ends"):
        scale.input_shapes({"rows": 3})


def test_bind_axes(scale):
    assert scale.bind_axes(inputs_for(3)) == {"rows": 3, "ends": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 5)}, r"input x has 5 in dimension 1; axis hidden_size is 4 \(a constant\)"),
        ({"x": torch.ones(3)}, r"input x has shape \(3,\); expected 2 dimensions"),
        ({"x": torch.ones(3, 4, dtype=torch.float64)}, "input x is float64; the Definition says float32"),
        ({"x": torch.ones(2, 4)}, "ends == rows \\+ 1.*ends = 4.*rows = 2"),
        ({"offsets": torch.tensor([0, 1, 2, 9], dtype=torch.int32)}, "offsets\\[-1\\]"),
        ({"extra": 1}, r"unknown inputs \['extra'\]"),
    ],
)
def test_inputs_that_do_not_fit(scale, change, message):
    with pytest.raises(InputError, match=message):
        scale.check_inputs({**inputs_for(3), **change})


def test_missing_input_is_named(scale):
    with pytest.raises(InputError, match=r"missing inputs \['factor'\]"):
        scale.run(x=torch.ones(1, 4), offsets=torch.tensor([0, 1], dtype=torch.int32))


def test_axis_that_two_inputs_disagree_on():
    data = {**SCALE, "constraints": [], "axes": {**SCALE["axes"]}}
    data["inputs"] = {**SCALE["inputs"], "offsets": {**SCALE["inputs"]["offsets"], "shape": ["rows"]}}
    data["axes"].pop("ends")
    with pytest.raises(InputError, match=r"input offsets has 4 in dimension 0; axis rows is 3 .from input x."):
        Definition.from_dict(data).bind_axes(inputs_for(3))


def test_axis_that_only_a_constraint_determines():
    data = {**SCALE, "constraints": ["ends == rows + 1"]}
    data["inputs"] = {name: spec for name, spec in SCALE["inputs"].items() if name != "offsets"}
    inputs = {"x": torch.ones(3, 4), "factor": 2.0}
    assert Definition.from_dict(data).bind_axes(inputs) == {"rows": 3, "ends": 4}
    with pytest.raises(InputError, match="nothing determines the axes"):
        Definition.from_dict({**data, "constraints": []}).bind_axes(inputs)


def test_run_takes_positions_and_names(scale):
    inputs = inputs_for(2)
    assert torch.equal(scale.run(**inputs), torch.full((2, 4), 2.0))
    assert torch.equal(scale.run(inputs["x"], inputs["offsets"], factor=3.0), torch.full((2, 4), 3.0))


def test_not_a_definition(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(InputError, match=r"broken\.json: cannot be read"):
        Definition.from_file(path)
    with pytest.raises(InputError, match="not a Definition"):
        Definition.from_dict({"name": "x"})


def test_small_twin_replaces_axes_and_constants():
    definition = flashinfer_trace.load("rmsnorm_h7168")
    twin = definition.with_const_axes({"hidden_size": 8})
    assert twin.const_axes == {"hidden_size": 8}
    assert "HIDDEN_SIZE = 8\n" in twin.reference
    assert twin.run(torch.ones(2, 8).bfloat16(), torch.ones(8).bfloat16()).shape == (2, 8)
    with pytest.raises(InputError, match="not const axes"):
        definition.with_const_axes({"batch_size": 8})


@pytest.mark.parametrize("definition", FIRST.values(), ids=lambda definition: definition.name)
def test_make_inputs_is_deterministic_and_leaves_global_random_state_alone(definition):
    from flashinfer_trace.families import family_of

    family = family_of(definition)
    twin = definition.with_const_axes({a: v for a, v in family.twin.items() if a in definition.const_axes})
    state = torch.get_rng_state()
    first, second = (flashinfer_trace.make_inputs(twin, seed=5) for _ in range(2))
    other = flashinfer_trace.make_inputs(twin, seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    twin.check_inputs(first)
    assert list(first) == list(definition.inputs)
    same = [bits(first[name]) == bits(second[name]) for name in first]
    assert all(same)
    assert any(bits(first[name]) != bits(other[name]) for name in first)


def bits(value) -> object:
    return value.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value


def test_a_definition_knows_the_root_it_came_from(tmp_path, monkeypatch):
    root = flashinfer_trace.find_root()
    loaded = flashinfer_trace.load("rmsnorm_h512")
    assert loaded.root == root
    assert loaded.path is not None and Definition.from_file(loaded.path).root == root
    assert loaded.with_const_axes({"hidden_size": 8}).root == root
    assert next(flashinfer_trace.definitions()).root == root
    monkeypatch.chdir(loaded.path.parent)
    assert Definition.from_file(loaded.path.name).root == root
    alone = tmp_path / "rmsnorm_h512.json"
    alone.write_text(loaded.path.read_text())
    assert Definition.from_file(alone).root is None
    assert Definition.from_dict(SCALE).root is None
    assert Definition.from_file(alone) == loaded, "the location of a Definition must not affect equality"


def test_the_family_is_that_of_the_root_a_definition_came_from(tmp_path):
    from flashinfer_trace.families import FamilyError, family_of

    naming = json.loads((flashinfer_trace.find_root() / "schema" / "naming.json").read_text())
    naming["families"] = {"rmsnorm_eps1e5": {**naming["families"]["rmsnorm"]}}
    target = tmp_path / "definitions" / "rmsnorm" / "rmsnorm_h512.json"
    target.parent.mkdir(parents=True)
    (tmp_path / "schema").mkdir()
    (tmp_path / "schema" / "naming.json").write_text(json.dumps(naming))
    loaded = flashinfer_trace.load("rmsnorm_h512")
    target.write_text(loaded.path.read_text())
    copied = flashinfer_trace.load("rmsnorm_h512", tmp_path)
    assert (family_of(loaded).name, family_of(copied).name) == ("rmsnorm", "rmsnorm_eps1e5")
    naming["families"] = {}
    (tmp_path / "schema" / "naming.json").write_text(json.dumps(naming))
    with pytest.raises(FamilyError, match=r"no family in schema/naming\.json matches this name"):
        family_of(copied)


def run_in_another_process(pickled: bytes) -> bytes:
    definition = pickle.loads(pickled)
    assert definition.root is not None
    inputs = flashinfer_trace.make_inputs(definition, {"batch_size": 2}, seed=1)
    return pickle.dumps((definition, bits(definition.run(**inputs))))


def test_a_definition_is_pickled_after_it_ran():
    definition = flashinfer_trace.load("rmsnorm_h512")
    inputs = flashinfer_trace.make_inputs(definition, {"batch_size": 2}, seed=1)
    expected = bits(definition.run(**inputs))
    again = pickle.loads(pickle.dumps(definition))
    assert (again, again.path, again.root) == (definition, definition.path, definition.root)
    assert bits(again.run(**inputs)) == expected
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        returned, actual = pickle.loads(pool.apply(run_in_another_process, (pickle.dumps(definition),)))
    assert returned == definition and actual == expected
    assert "compiled" in vars(definition), "pickling must drop the compiled reference from the copy only"


def test_make_inputs_honors_axes_and_rejects_unknown_ones():
    definition = flashinfer_trace.load("rmsnorm_h512")
    assert flashinfer_trace.make_inputs(definition, {"batch_size": 3})["hidden_states"].shape == (3, 512)
    with pytest.raises(InputError, match=r"\['rows'\] are not variable axes"):
        flashinfer_trace.make_inputs(definition, {"rows": 3})


@pytest.mark.parametrize("value", [-1, 2**31, 10**20, 4.0, True, "4", None])
def test_sizes_that_are_no_sizes_are_named(value):
    with pytest.raises(InputError, match=r"^rmsnorm_h512: batch_size = .*; sizes are .* from 0 to 2147483647"):
        flashinfer_trace.make_inputs("rmsnorm_h512", {"batch_size": value})


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, None])
def test_seeds_that_are_no_seeds_are_named(seed):
    with pytest.raises(InputError, match=r"^rmsnorm_h512: seed .*; seeds are .* from 0 to 9223372036854775807"):
        flashinfer_trace.make_inputs("rmsnorm_h512", {"batch_size": 1}, seed=seed)


def test_the_largest_seed_and_integers_of_other_libraries_are_taken():
    numpy = pytest.importorskip("numpy")
    inputs = flashinfer_trace.make_inputs("rmsnorm_h512", {"batch_size": numpy.int64(2)}, seed=2**63 - 1)
    assert inputs["hidden_states"].shape == (2, 512)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("moe_shuffle_rows_h2048", {"num_rows": 0}),
        ("rope_with_cos_sin_cache_neox_style_d128_rd64", {"max_seq_len": 0}),
        ("moe_bf16_scatter_gemm_e128_n2048_k768", {"top_k": 0}),
    ],
)
def test_sizes_of_which_no_inputs_can_be_made_are_named(name, axes):
    with pytest.raises(InputError, match=rf"^{name}: no inputs can be made .*{next(iter(axes))}.*other values"):
        flashinfer_trace.make_inputs(name, axes)


def test_errors_of_a_gpu_are_not_those_of_axes():
    definition = flashinfer_trace.load("rmsnorm_h512")
    with pytest.raises(RuntimeError, match=r"^CUDA error"), explained(definition, {}):
        raise RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(InputError, match=r"out of memory.*give smaller sizes"), explained(definition, {}):
        raise RuntimeError("CUDA out of memory")


def test_a_reference_is_checked_again_where_it_is_compiled():
    with pytest.raises(ReferenceSourceError, match="hostile:2: the builtin open"):
        compile_reference("def run(x):\n    return open(x)\n", "hostile")
    with pytest.raises(ReferenceSourceError, match="hostile:1: imports os"):
        compile_reference("import os\n\n\ndef run():\n    return os\n", "hostile")
    draws = "import torch\n\n\ndef run():\n    return torch.rand(1)\n"
    assert callable(compile_reference(draws, "sampler", "sampling"))
    with pytest.raises(ReferenceSourceError, match=r"torch\.rand is not allowed"):
        compile_reference(draws, "norm", "rmsnorm")


def test_reference_namespace_is_bare():
    run = load_run("def run(x):\n    return open(x)\n", "hostile")
    with pytest.raises(NameError, match="open"):
        run("/etc/passwd")
    with pytest.raises(ImportError, match=r"may import math torch .* only, not os"):
        load_run("import os\n\n\ndef run():\n    return os\n", "hostile")
    with pytest.raises(ReferenceSourceError, match=r"defines no run\(\)"):
        compile_reference("x = 1\n", "empty")


def test_constants_are_substituted_only_where_they_name_an_axis():
    source = 'A = 1  # first\nEPS = 1e-6\nB = "x"\n\n\ndef run():\n    A = 3\n    return A\n'
    assert substitute_constants(source, {"a": 20, "c": 5}) == source.replace("A = 1 ", "A = 20 ")
    breaks = '"""A form feed \x0c and \u2028 end no line of Python."""\r\nHIDDEN_SIZE = 4\rX = 4\n'
    assert substitute_constants(breaks, {"hidden_size": 128}) == breaks.replace("SIZE = 4", "SIZE = 128")


def test_sibling_functions_are_copied_in(tmp_path):
    directory = tmp_path / "reference" / "toy"
    directory.mkdir(parents=True)
    (directory / "_shared.py").write_text(
        "import torch\n\n\ndef inner(x):\n    return x + 1\n\n\ndef unused(x):\n    return x\n\n\n"
        "def outer(x):\n    return inner(x) * 2\n"
    )
    (directory / "toy.py").write_text(
        '"""Toy."""\n\nimport torch\n\nfrom ._shared import outer\n\nN = 1\n\n\ndef run(x):\n    return outer(x) + N\n'
    )
    rendered = render(tmp_path, "toy", "toy", {"n": 7})
    assert "unused" not in rendered and "_shared" not in rendered
    assert rendered.index("def inner") < rendered.index("def outer") < rendered.index("def run")
    assert "\n\n\n\n" not in rendered
    assert compile_reference(rendered, "toy")(3) == 15


@pytest.mark.parametrize(
    ("imports", "told"),
    [
        ("from ._shared import gone", r"toy\.py:1: _shared\.py has no function gone"),
        ("from ._shared import one\nfrom ._shared import gone", r"toy\.py:2: _shared\.py has no function gone"),
        ("from ._shared import one as two", r"toy\.py:1: imports one as two; import it by its own name"),
        ("from ._absent import one", r"toy\.py:1: imports from toy/_absent\.py, which does not exist"),
    ],
)
def test_a_sibling_import_that_cannot_be_copied_in_is_named(tmp_path, imports, told):
    directory = tmp_path / "reference" / "toy"
    directory.mkdir(parents=True)
    (directory / "_shared.py").write_text("def one():\n    return 1\n")
    (directory / "toy.py").write_text(f"{imports}\n\n\ndef run():\n    return one()\n")
    with pytest.raises(ReferenceSourceError, match=told):
        render(tmp_path, "toy", "toy", {})


def test_a_function_that_many_imports_name_is_copied_in_once(tmp_path):
    directory = tmp_path / "reference" / "toy"
    directory.mkdir(parents=True)
    (directory / "_shared.py").write_text("\n\n".join(f"def f{i}():\n    return {i}\n" for i in range(2000)))
    imports = "\n".join(f"from ._shared import f{i % 3}" for i in range(3000))
    (directory / "toy.py").write_text(f"{imports}\n\n\ndef run():\n    return f1()\n")
    began = time.perf_counter()
    rendered = render(tmp_path, "toy", "toy", {})
    assert time.perf_counter() - began < 2
    assert [line for line in rendered.splitlines() if line.startswith("def ")] == [
        "def f0():",
        "def f1():",
        "def f2():",
        "def run():",
    ]
