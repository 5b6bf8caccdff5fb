"""The Definitions that recorded runs of a model call are those that a call computes, and no other could be meant."""

from __future__ import annotations

import json

import jsonschema
import pytest

from flashinfer_trace import find_root, load
from flashinfer_trace.dataset.model_claims import recorded_path, recorded_paths
from tools.runtime_tracing.matching import Evidence, computes
from tools.runtime_tracing.model_calls import called, models_of
from tools.runtime_tracing.recording import RecordedCall, RecordedLaunch, Recording

ROOT = find_root()
SUM = "moe_sum_reduce_topk8_h2048"
LATENT = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
DECODE, PREFILL = "mla_paged_decode_h128_ckv512_kpe64_ps1", "mla_paged_prefill_causal_h128_ckv512_kpe64_ps1"
QUERIES = "q_nope: bfloat16[8,128,512], q_pe: bfloat16[8,128,64]"
PAGES = "ckv_cache: bfloat16[99,1,512], kpe_cache: bfloat16[99,1,64]"
SCATTER = "moe_bf16_scatter_gemm_e128_n2048_k768"
MATMUL = "triton_kernels.matmul.matmul"
QUANTIZED = "x: bfloat16[8,1536], q: {0}[8,1536], s: float32[8,12], group_size: 128, scale_ue8m0: False"
SORTED = "topk_ids: int32[8,6], num_experts: 65, block_size: 16, sorted_token_ids: int32[768], cumsum: int32[66]"
INT8 = "mat_a: int8[8,14336], mat_b: int8[14336,4096], scales_a: float32[8,1], scales_b: float32[4096,1]"


def call(kernel: str, arguments: str, library: str = "flashinfer", launched: bool = True) -> RecordedCall:
    launches = (RecordedLaunch("k", 0, 1, 5.0),) if launched else ()
    return RecordedCall("decode", library, kernel, (), arguments, 1, (), launches)


def recording(*calls: RecordedCall, model: str = "toy", **config: object) -> Recording:
    return Recording({"configuration": "run", "model": model, "model_config": config, "server": {}}, calls)


def test_what_the_committed_files_say():
    """That the committed runs give them, `sync --check` of the whole dataset shows, which is a test of its own."""
    texts = {path: path.read_text(encoding="utf-8") for path in recorded_paths(ROOT)}
    schema = json.loads((ROOT / "schema" / "recorded_calls.schema.json").read_text(encoding="utf-8"))
    found = {path: json.loads(text)["recorded"] for path, text in texts.items()}
    for text in texts.values():
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    groups = [one["models"] for entries in found.values() for one in entries]
    assert len({model for group in groups for model in group}) > 10
    assert all(("deepseek-r1" in group) == ("deepseek-v3" in group) for group in groups)
    runs_of = {model: one["runs"] for one in found[recorded_path(ROOT, SUM)] for model in one["models"]}
    assert runs_of["qwen3-30b-a3b"] == [
        "qwen3_30b_a3b-bf16-flashinfer",
        "qwen3_30b_a3b-bf16-flashinfer-ep2",
        "qwen3_30b_a3b-fp8-triton",
    ]


def test_a_call_that_two_definitions_describe_claims_neither():
    """FlashInfer's class is told only by its plan whether queries are new tokens or those of a prefill."""
    run = recording(call(f"{LATENT}.run", f"{QUERIES}, {PAGES}"))
    both = [load(DECODE), load(PREFILL)]
    assert called(run, Evidence(both, {one.name: [LATENT] for one in both})) == set()
    assert called(run, Evidence(both[:1], {DECODE: [LATENT]})) == {DECODE}
    assert called(recording(call(f"{LATENT}.plan", QUERIES)), Evidence(both, {DECODE: [LATENT]})) == set()


def test_what_launched_nothing_or_only_sums_claims_nothing():
    known = Evidence([load(DECODE), load(SCATTER)], {DECODE: [LATENT], SCATTER: [MATMUL]})
    idle = call(f"{LATENT}.run", f"{QUERIES}, {PAGES}", launched=False)
    rest = call("matmul_ogs_dflt_dflt._reduce_grouped", "X: bfloat16[1,1,64,2048], Out: bfloat16[1,8,2048]", "triton")
    assert known.of(rest)[1] == (SCATTER,)
    assert called(recording(idle, rest), known) == set()


@pytest.mark.parametrize(
    ("kernel", "arguments", "computed", "other"),
    [
        ("q", QUANTIZED.format("float8_e4m3fn"), "per_token_group_quant_fp8_h1536_g128", "..._int8_h1536_g128"),
        ("q", QUANTIZED.format("float8_e4m3fn"), "per_token_group_quant_fp8_h1536_g128", "..._fp8_ue8m0_h1536_g128"),
        ("q", QUANTIZED.format("int8"), "per_token_group_quant_int8_h1536_g128", "..._fp8_h1536_g128"),
        ("x.moe_align_block_size", SORTED, "moe_align_block_size_topk6_e64_b16", "..._topk8_e64_b16"),
        ("x.moe_align_block_size", SORTED, "moe_align_block_size_topk6_e64_b16", "..._topk6_e64_b64"),
        ("mm", INT8, "int8_scaled_mm_n4096_k14336", "..._n4096_k4096"),
    ],
)
def test_a_call_tells_apart_what_differs_in_codes_scales_or_numbers(
    kernel: str, arguments: str, computed: str, other: str
):
    stem = next(
        name for name in ("per_token_group_quant", "moe_align_block_size", "int8_scaled_mm") if name in computed
    )
    assert computes(call(kernel, arguments), load(computed))
    assert not computes(call(kernel, arguments), load(other.replace("...", stem)))


def test_a_run_is_one_of_the_model_that_it_names_and_of_those_with_the_same_constants():
    """Layers may differ; sizes and the format of the weights may not."""
    own = {"hidden_size": 96, "first_k_dense_replace": 3}
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    constants = {"b-1": own, "a-1": dict(own), "c-1": {**own, "hidden_size": 97}, "e-1": {**own, **fp8}}
    models = {name: {"config": config} for name, config in constants.items()}
    models["b-1"]["quantized"] = [fp8]
    config = {"hidden_size": 96, "first_k_dense_replace": 1, "num_hidden_layers": 2}
    assert models_of(recording(model="B_1", **config), models) == ("a-1", "b-1")
    assert models_of(recording(model="b_1", **config, **fp8), models) == ("a-1", "b-1")
    for other in (recording(model="a_1", **config, **fp8), *(recording(model=f"{c}_1", **config) for c in "cde")):
        assert models_of(other, models) == ()
