"""flashinfer-trace cost, the table of GPUs, and costs at sizes whose inputs are never made in full."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys

import jsonschema
import pytest
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import InputError
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import ROW_AXES
from flashinfer_trace.judging.costs import cost_of, shapes
from flashinfer_trace.judging.costs.work import Cost, GpusError, Roofline, load_gpus, roofline

ROOT = flashinfer_trace.find_root()


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["cost", *arguments])


def test_costs_are_there_after_the_package_is_imported_and_torch_only_then():
    """As docs/costs.md writes it."""
    code = (
        "import sys, flashinfer_trace\n"
        "assert 'torch' not in sys.modules\n"
        "definition = flashinfer_trace.load('rmsnorm_h512')\n"
        "inputs = flashinfer_trace.make_inputs(definition, {'batch_size': 2})\n"
        "print(flashinfer_trace.costs.cost_of(definition, inputs).bytes)"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout) > 0


@pytest.mark.parametrize("rate", [0, -1, "nan", 1e999])
def test_a_rate_by_which_nothing_can_be_divided_is_malformed(tmp_path, rate):
    data = json.loads((ROOT / "schema" / "gpus.json").read_text())
    data["gpus"]["H200"]["bandwidth"] = rate
    (tmp_path / "schema").mkdir()
    (tmp_path / "schema" / "gpus.json").write_text(json.dumps(data).replace("Infinity", "1e999"))
    with pytest.raises(GpusError, match=r"gpus\.json: "):
        load_gpus(tmp_path)


def test_the_table_of_gpus_follows_its_schema():
    data, schema = (json.loads((ROOT / "schema" / f"gpus{kind}.json").read_text()) for kind in ("", ".schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(data)
    assert {"H100 SXM", "H200", "B200"} <= load_gpus(ROOT).keys()


def test_the_least_time_is_that_of_memory_or_of_arithmetic():
    h200 = load_gpus(ROOT)["H200"]
    assert roofline(Cost(4_800_000, 0, {}), h200) == Roofline("H200", 1e-6, 0.0)
    time = roofline(Cost(1, 1, {"bfloat16": 9_894_000_000, "float32": 669_000}), h200)
    assert time.seconds == pytest.approx(10e-6) and time.bound == "arithmetic"
    assert roofline(Cost(1, 1, {"float4_e2m1fn": 1}), h200) is None


def test_a_cost_as_text_and_as_json():
    result = invoke("rmsnorm_h7168", "--axes", "batch_size=64")
    assert result.exit_code == 0, result.output
    assert "reads 931,840 bytes, writes 917,504" in result.output
    assert "1,835,008 in float32; 0.992 per byte" in result.output
    data = json.loads(invoke("rmsnorm_h7168", "--axes", "batch_size=64", "--format", "json").stdout)
    assert data["bytes_read"] == 64 * 7168 * 2 + 7168 * 2 and data["axes"] == {"batch_size": 64}
    assert data["seconds"]["H200"] == pytest.approx((931840 + 917504) / 4.8e12)


def test_axes_may_be_given_one_by_one():
    name, each = "gqa_ragged_prefill_causal_h32_kv8_d128", ("total_q=3", "total_kv=5")
    together = invoke(name, "--axes", ",".join(each))
    assert "total_q = 3, total_kv = 5" in together.output, together.output
    assert invoke(name, "--axes", each[0], "--axes", each[1], "--axes", each[0]).output == together.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rmsnorm_h7168", "--axes", "tokens=3"), "not variable axes"),
        (
            ("rmsnorm_h7168", "--axes", "batch_size=2147483647"),
            "from 8 GiB at most; give smaller sizes",
        ),
        (("rmsnorm_h7168", "--axes", "batch_size=99999999999999999999"), "whole numbers from 0 to 2147483647"),
        (("rmsnorm_h7168", "--axes", "batch_size=1,batch_size=2"), "two values of batch_size"),
        (("moe_shuffle_rows_h2048", "--axes", "num_rows=0"), "no inputs can be made with axes {'num_rows': 0}"),
        (("rmsnorm_h7168", "--seed", "18446744073709551616"), "is not in the range"),
        (("rmsnorm_h7169",), "rmsnorm_h7168"),
        (("rmsnorm_h7168", "--workload", "decode-63"), "rmsnorm_h7168 has no workload ['decode-63']; it has decode-1,"),
        (("rmsnorm_h7168", "--workload", "decode-64", "--seed", "0"), "leave out --axes and --seed"),
    ],
)
def test_wrong_usage(arguments, message):
    result = invoke(*arguments, "--format", "json")
    assert result.exit_code == 2
    assert message in json.loads(result.stdout)["error"]


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("rmsnorm_h512", "decode-64"),
        ("gqa_paged_decode_h8_kv1_d128_ps64", "chat-decode-64"),
        ("moe_topk_softmax_topk8_e128", "prefill-512"),
    ],
)
def test_the_cost_of_a_workload_is_that_of_its_inputs(name, workload):
    definition = flashinfer_trace.load(name)
    (chosen,) = [one for one in flashinfer_trace.workloads(definition) if one.name == workload]
    data = json.loads(invoke(name, "--workload", workload, "--format", "json").stdout)
    cost = cost_of(definition, chosen.inputs())
    assert (data["bytes_read"], data["bytes_written"], data["axes"]) == (
        cost.bytes_read,
        cost.bytes_written,
        chosen.axes,
    )
    assert data["operations"] == cost.operations


def test_thin_inputs_have_the_cost_of_whole_ones(monkeypatch):
    monkeypatch.setattr(shapes, "SMALL", 0)
    definition = flashinfer_trace.load("gemm_n128_k2048")
    thin, axes = shapes.cost_at(definition, {"M": 5})
    assert axes == {"M": 5}
    assert thin == cost_of(definition, flashinfer_trace.make_inputs(definition, {"M": 5}))


#: Families that draw features before routing, so a seed has another routing at other sizes.
FEATURES_FIRST = {
    "moe_bf16_expert_gemm",
    "moe_fp8_block_scale_expert_gemm",
    "moe_nvfp4_ds_routing",
}


def test_families_with_another_routing_are_documented():
    text = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8").partition("draws features first")[2]
    named = re.findall(r"`([^`]+)`", text.partition(")")[0])
    assert all(any(fnmatch.fnmatchcase(name, pattern) for pattern in named) for name in FEATURES_FIRST)


def definitions_by_family():
    naming, found = load_naming(ROOT), {}
    for definition in flashinfer_trace.definitions():
        found.setdefault(family_name(definition, naming), []).append(definition)
    return found


def test_the_smallest_definition_of_each_family_costs_the_same_without_features(monkeypatch):
    compared = 0
    for name, some in definitions_by_family().items():
        definition = min(some, key=weights)
        whole, axes = shapes.cost_at(definition, {}, seed=3)
        if shapes.input_bytes(definition, axes) <= shapes.SMALL and name not in FEATURES_FIRST:
            with monkeypatch.context() as patched:
                patched.setattr(shapes, "SMALL", 0)
                assert shapes.cost_at(definition, {}, seed=3) == (whole, axes), name
            compared += 1
    assert compared > 100


def test_a_rotation_counts_the_heads_of_its_definition(monkeypatch):
    """A workload's inputs have the heads of the twin; the cost does not."""
    monkeypatch.setattr(shapes, "SMALL", 0)
    definition = flashinfer_trace.load("rope_with_cos_sin_cache_neox_style_h128_kv8_d128_rd128")
    cost, _ = shapes.cost_at(definition, {"num_tokens": 5})
    assert cost.operations == {"float32": 3 * 5 * (128 + 8) * 128}
    workload = flashinfer_trace.workloads(definition)[0]
    rows = workload.axes["num_tokens"]
    assert workload.cost().operations == {"float32": 3 * rows * (128 + 8) * 128}


@pytest.mark.parametrize(
    ("name", "axes", "bytes_read"),
    [
        ("rmsnorm_h7168", {"batch_size": 400_000}, 400_000 * 7168 * 2 + 7168 * 2),
        ("gqa_paged_decode_h32_kv8_d128_ps64", {"batch_size": 64, "num_pages": 6000}, None),
    ],
)
def test_the_axes_decide_whether_features_are_made(monkeypatch, name, axes, bytes_read):
    """With few weights too, inputs may be large."""
    made, requested = [], shapes.requested_inputs
    monkeypatch.setattr(shapes, "requested_inputs", lambda one, *given: made.append(one) or requested(one, *given))
    definition = flashinfer_trace.load(name)
    cost, _ = shapes.cost_at(definition, axes)
    assert [one.const_axes for one in made] == [shapes.without_features(definition).const_axes]
    assert bytes_read in (None, cost.bytes_read)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("gqa_paged_decode_h40_kv8_d128_ps64", {"batch_size": 100}),
        ("gqa_paged_decode_h40_kv8_d128_ps64", {"len_indptr": 101}),
        ("gqa_extend_causal_h8_kv1_qk128_vo128", {"len_indptr": 101}),
        ("gqa_ragged_prefill_causal_h32_kv8_d128", {"len_indptr": 101}),
        ("fast_topk_v2_topk2048", {"num_tokens": 100}),
    ],
)
def test_sizes_that_the_family_chooses_count_before_inputs_are_made(monkeypatch, name, axes):
    monkeypatch.setattr(shapes, "MOST", 1 << 20)
    monkeypatch.setattr(shapes, "requested_inputs", None)
    with pytest.raises(InputError, match=re.escape(f"{name}: axes {axes} need 0 GiB of indices and rows")):
        shapes.cost_at(flashinfer_trace.load(name), axes)


def test_what_inputs_need_is_known_from_plans():
    for name, (definition, *_) in definitions_by_family().items():
        thin, family = shapes.without_features(definition), family_of(definition)
        axes = {next(axis for axis in (*ROW_AXES, "len_indptr", "total_seq_len") if axis in thin.var_axes): 100}
        plan = family.plan_for_axes(thin, axes, Draws(0, "cpu"))
        needed = shapes.input_bytes(thin, thin.bind_axes(family.make_inputs(thin, plan, Draws(0, "cpu"))))
        planned = shapes.input_bytes(thin, {**shapes.planned_axes(thin, plan), **axes})
        assert 0.5 <= planned / needed <= 1.25, name


def weights(definition):
    return shapes.input_bytes(definition, dict.fromkeys(definition.var_axes, 1))


def largest_of_each_family():
    """Of each family the Definition with the largest inputs, where these are too large to be made."""
    largest = {name: max(some, key=weights) for name, some in definitions_by_family().items()}
    return {name: one for name, one in largest.items() if weights(one) > shapes.SMALL}


def test_the_largest_definition_of_each_family_has_a_cost():
    for name, definition in largest_of_each_family().items():
        cost, axes = shapes.cost_at(definition, {})
        assert cost.bytes_written > 0, name
        assert axes.keys() == set(definition.var_axes)
        assert family_of(definition).name == name


@pytest.mark.parametrize(
    ("name", "axes"),
    [("gemm_n4096_k4096", {"M": 0}), ("rmsnorm_h512", {"batch_size": 0}), ("fp8_mqa_logits_h64_d128", {"num_keys": 0})],
)
def test_nothing_is_read_or_computed_for_a_result_without_elements(name, axes):
    cost, _ = shapes.cost_at(flashinfer_trace.load(name), axes)
    assert cost == Cost(0, 0, {})
