"""The TraceSet: every Definition is in it or left out with a reason, and flashinfer-bench loads and can run it."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from export.conftest import Exported

import flashinfer_trace
from flashinfer_trace import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.judging import traffic
from flashinfer_trace.judging.export import cases
from flashinfer_trace.judging.export.cases import Random, Scales, source
from flashinfer_trace.judging.export.judgeable import unjudged
from flashinfer_trace.judging.export.summary import size_category

ROOT = flashinfer_trace.find_root()
#: Most elements of inputs with which a reference is run here.
SMALL = 4 << 20


def files(exported: Exported, pattern: str) -> list[Path]:
    found = sorted(exported.directory.glob(pattern))
    assert found
    return found


def test_each_family_is_exported_or_left_out_with_a_reason(exported: Exported, one_each: dict[str, Definition]):
    names = {one.name for one in one_each.values()}
    assert exported.definitions.keys() | exported.left_out.keys() == names
    assert not exported.definitions.keys() & exported.left_out.keys()
    assert all(reason.strip() for reason in exported.left_out.values())
    written = json.loads((exported.directory / "left_out.json").read_text(encoding="utf-8"))
    assert written["definitions"] == exported.left_out


def test_a_family_can_be_judged_or_cannot(one_each: dict[str, Definition]):
    """So that one Definition of each family stands for all."""
    for definition in flashinfer_trace.definitions():
        family = family_of(definition)
        assert unjudged(definition, family) == unjudged(one_each[family.name], family), definition.name


def test_most_families_can_be_judged(exported: Exported, one_each: dict[str, Definition]):
    """The attention, products, norms and routers that models spend their time in."""
    judged = {family_of(one).op_type for one in exported.definitions.values()}
    assert {one.op_type for one in one_each.values()} - judged == {"quantization"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("min_p_sampling_from_probs_v32000", "knows top-k and top-p only"),
        ("softmax_temperature_v32000", "reads an input `probs`"),
        ("fast_topk_v2_topk2048", "several orders of topk_indices"),
        ("moe_align_block_size_*", "several orders of sorted_token_ids"),
        ("per_token_group_quant_int8_*", "neighboring values of codes"),
        ("per_token_quant_fp8_*", "isinf is not implemented"),
        ("moe_fp8_block_scale_ds_routing_*", "differ by more than 1e-2"),
        ("moe_nvfp4_grouped_gemm_*", "no kernel has proven it"),
        ("gqa_paged_decode_fp8_cache_*", "differ by more than 1e-2"),
        ("fp8_mqa_logits_*", "elements must be finite"),
        ("moe_bf16_scatter_gemm_*", "round each row to bfloat16 before they add up"),
    ],
)
def test_what_its_evaluators_cannot_judge_is_left_out(name: str, reason: str):
    path = next(ROOT.glob(f"definitions/*/{name}.json"), None)
    if path is None:
        path = next(ROOT.glob(f"definitions/*/{name.rpartition('_')[0]}*.json"))
    definition = Definition.from_file(path)
    assert reason in str(unjudged(definition, family_of(definition)))


def test_flashinfer_bench_loads_it(exported: Exported):
    data = pytest.importorskip("flashinfer_bench.data", reason="pip install --no-deps flashinfer-bench==0.1.2")
    loaded = data.TraceSet.from_path(str(exported.directory))
    assert loaded.definitions.keys() == exported.definitions.keys() == loaded.workloads.keys()
    assert loaded.solutions.keys() <= exported.definitions.keys()


def test_its_inputs_are_valid_and_results_can_be_compared(exported: Exported):
    """flashinfer-bench makes the inputs; our references take them, and give finite results that are not all zero."""
    utils = pytest.importorskip("flashinfer_bench.bench.utils", reason="pip install --no-deps flashinfer-bench==0.1.2")
    from flashinfer_bench.data import TraceSet

    torch.manual_seed(0)
    loaded = TraceSet.from_path(str(exported.directory))
    ran = 0
    for name, definition in exported.definitions.items():
        if name.startswith(("gdn_prefill", "kda_prefill")):
            continue  # states grow beyond float32 with keys that are not normalized, as flashinfer-bench draws them
        workload = loaded.workloads[name][0].workload
        shapes = definition.input_shapes(workload.axes)
        if sum(math.prod(shape) for shape in shapes.values() if shape is not None) > SMALL:
            continue
        tensors = utils.load_safetensors(loaded.definitions[name], workload, exported.directory)
        inputs = utils.gen_inputs(loaded.definitions[name], workload, "cpu", tensors)
        assert definition.bind_axes(dict(zip(definition.inputs, inputs, strict=True))) == workload.axes
        results = definition.name_outputs(definition.run(*inputs))
        assert all(bool(one.isfinite().all()) for one in results.values()), name
        assert any(bool((one.float().abs() > 0.05).any()) for one in results.values()), f"{name}: zeros would pass"
        ran += 1
    assert ran > 60


def test_each_solution_calls_an_existing_kernel(exported: Exported):
    for file in files(exported, "solutions/baseline/*/*/*.json"):
        document = json.loads(file.read_text(encoding="utf-8"))
        assert (document["name"], document["definition"]) == (file.stem, file.parent.name)
        content = document["sources"][0]["content"]
        path = document["description"].split("[")[0].split(" of ")[0]
        tree = ast.parse(content)
        assert ast.get_docstring(tree, clean=False).split(": ")[1].startswith(path)
        # The name that is called: an attribute, an imported name, or a string that getattr() reads. The launcher of a
        # Triton kernel has a name that ends with the kernel's.
        assert re.search(rf"{path.rpartition('.')[2]}\b", content.partition('"""\n')[2]), path
        assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)][-1] == "run"


def test_names_of_solutions_are_unique_and_fit_into_names_of_files(exported: Exported):
    names = [file.stem for file in files(exported, "solutions/*/*/*/*.json")]
    assert len(names) == len(set(names))
    assert max(map(len, names)) < 200


def test_stored_tensors_are_used(exported: Exported):
    st = pytest.importorskip("safetensors.torch", reason="pip install 'flashinfer-trace[verify]'")
    stored = {
        (file.relative_to(exported.directory).as_posix(), name)
        for file in files(exported, "blob/**/*.safetensors")
        for name in st.load_file(file)
    }
    used = {
        (given["path"], given["tensor_key"])
        for file in files(exported, "workloads/*/*.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
        for given in json.loads(line)["workload"]["inputs"].values()
        if given["type"] == "safetensors"
    }
    assert stored == used


def test_two_exports_are_equal(exported: Exported, first_workload: None, tmp_path: Path):
    from flashinfer_trace.judging.export.trace_set import write_trace_set

    (definition,) = (one for one in exported.definitions.values() if family_of(one).name == "fp8_scaled_mm")
    write_trace_set(tmp_path, [definition], lambda done: None)
    assert list((tmp_path / "blob").rglob("*.safetensors"))
    for file in sorted((tmp_path / "blob").rglob("*.safetensors")) + sorted((tmp_path / "workloads").rglob("*.jsonl")):
        assert file.read_bytes() == (exported.directory / file.relative_to(tmp_path)).read_bytes()


def test_the_card_counts(exported: Exported):
    text = (exported.directory / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\nlicense: apache-2.0\n")
    assert f"| Definitions | {len(files(exported, 'definitions/*/*.json'))} |" in text
    assert f"| Solutions | {len(files(exported, 'solutions/*/*/*/*.json'))} |" in text
    index = [json.loads(line) for line in (exported.directory / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["name"] for row in index} == exported.definitions.keys()
    assert len({tuple(row) for row in index}) == 1, "all rows have the same columns"
    assert [size_category(rows) for rows in (82, 1000, 99_999, 100_000)] == [
        "n<1K",
        "1K<n<10K",
        "10K<n<100K",
        "100K<n<1M",
    ]


def test_scales_belong_to_codes(one_each: dict[str, Definition]):
    """Scales are made for the codes that flashinfer-bench draws, in each family that has both."""
    found: dict[str, Any] = {}
    for family, definition in one_each.items():
        for name, spec in definition.inputs.items():
            shape = None if spec.shape is None else (4,) * len(spec.shape)
            if isinstance(source(definition, name, shape), Scales):
                found.setdefault(family, set()).add(name)
    judged = {
        family: names for family, names in found.items() if not unjudged(one_each[family], family_of(one_each[family]))
    }
    assert judged == {
        "bmm_fp8": {"A_scale", "B_scale"},
        "fp8_blockwise_scaled_mm": {"A_scale", "B_scale"},
        "fp8_scaled_mm": {"A_scale", "B_scale"},
        "int8_scaled_mm": {"A_scale", "B_scale"},
        "moe_fp8_block_scale_grouped_gemm": {"a_scale", "b_scale"},
        "moe_w4a8_grouped_gemm": {"a_scale", "b_scale"},
    }


def test_bytes_that_are_drawn_are_codes(one_each: dict[str, Definition]):
    """An evaluator draws any bytes: as exponents, or parts of other numbers, they would be infinite."""
    drawn: dict[str, set[str]] = {}
    for family, definition in one_each.items():
        for name, spec in definition.inputs.items():
            shape = None if spec.shape is None else (4,) * len(spec.shape)
            byte = spec.dtype == "int8" or spec.dtype.startswith("float8")
            judged = not unjudged(definition, family_of(definition))
            if byte and judged and isinstance(source(definition, name, shape), Random):
                drawn.setdefault(name, set()).add(family)
    assert drawn.keys() == {"A", "B", "a", "b", "weights"}
    assert drawn["weights"] == {"moe_mxfp4_gather_gemm_swiglu"}


def is_judged(name: str) -> bool:
    definition = flashinfer_trace.load(name)
    return unjudged(definition, family_of(definition)) is None


RECORDED = [path for path in sorted((ROOT / "workloads").glob("*/*.json")) if is_judged(path.stem)]


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_stored_inputs_are_those_of_recorded_workloads(path: Path):
    """An export makes offsets and routes without the weights; their digests are those of the whole workload."""
    definition = flashinfer_trace.load(path.stem)
    recorded = traffic._recorded(definition, path)
    case = cases._case(next(iter(recorded.values())))
    if isinstance(case, cases.Unsuitable):
        reasons = ("tokens are drawn for each row", "sees no key", "is 0", "its tensors would take")
        assert any(reason in case.reason for reason in reasons), case.reason
        return
    assert case.axes == next(iter(recorded.values())).axes
    assert list(case.inputs) == list(definition.inputs)
