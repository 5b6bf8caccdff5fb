"""Recorded calls are matched with Definitions, and their time is added up for the whole model."""

from __future__ import annotations

import dataclasses

import pytest
from built_pages import coverage_page

from flashinfer_trace import find_root, load
from tools.runtime_tracing.matching import Evidence, Standing, computes, tensors
from tools.runtime_tracing.recording import RecordedCall, RecordedLaunch, Recording
from tools.runtime_tracing.time_coverage import kernel_name, step_times, time_coverage

NORM = "input: bfloat16[8,7168], weight: bfloat16[7168], eps: 1e-06"
DECODE = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.forward"
RAGGED = "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.forward"
SAMPLING = "flashinfer.sampling.top_k_top_p_sampling_from_probs"

CODES = ("float8_e4m3fn[8,7168]", "float8_e4m3fn[2112,7168]")
SCALES = ("float32[8,56]", "float32[17,56]")
ROPE = "sglang.jit_kernel.rope"
PLAIN = "rope_with_cos_sin_cache_neox_style_h16_kv2_d128_rd128"
FUSED = "rope_with_cos_sin_cache_neox_style_store_h16_kv2_d128"
ROTATED = "q: bfloat16[8,16,128], k: bfloat16[8,2,128]"
CACHES = "v: bfloat16[8,256], k_cache: bfloat16[99,256], v_cache: bfloat16[99,256]"
ANGLES = "cos_sin_cache: float32[40960,128], positions: int64[8]"
STORED = f"{ROTATED}, {CACHES}, {ANGLES}, out_loc: int64[8], is_neox: True, rope_dim: 0"
SCALED_MM = "a: float8_e4m3fn[8,4096], b: float8_e4m3fn[4096,28672]"
DOWN = "b: bfloat16[257,7168,2048], c: bfloat16[8,9,7168], weights: float32[8,9]"


def call(
    kernel: str, arguments: str, *times: tuple[int | None, float], library: str = "flashinfer", phase: str = "decode"
) -> RecordedCall:
    launches = tuple(RecordedLaunch("k", layer, 1, time) for layer, time in times)
    return RecordedCall(phase, library, kernel, (), arguments, 1, (), launches)


def recording(*calls: RecordedCall, name: str = "toy", stand_ins: tuple[str, ...] = ()) -> Recording:
    about = {"configuration": name, "layers": [3, 58], "versions": {"sglang": "0.5.11", "gpu": "NVIDIA H200"}}
    return Recording({**about, "stand_ins": list(stand_ins)}, calls)


@pytest.mark.parametrize(
    ("definition", "arguments"),
    [
        ("rmsnorm_h7168", NORM),
        ("gemm_bf16_n129280_k7168", "0: bfloat16[8,7168], 1: bfloat16[7168,129280]"),  # a weight, transposed
        ("gemm_bf16_n256_k7168", "a: bfloat16[8,7168], b: bfloat16[256,7168], out_dtype: bfloat16"),
        (
            "gqa_paged_decode_h32_kv8_d128_ps1",
            "q: bfloat16[8,32,128], paged_kv_cache: (bfloat16[99,8,128], bfloat16[99,8,128]), logits_soft_cap: 0.0",
        ),
        (
            "mla_paged_decode_h128_ckv512_kpe64_ps1",
            "q_nope: bfloat16[8,128,512], q_pe: bfloat16[8,128,64], ckv: bfloat16[99,1,512], kpe: bfloat16[99,1,64]",
        ),
        (  # FlashAttention's order
            "mla_paged_decode_h128_ckv512_kpe64_ps1",
            "q: bfloat16[8,128,64], k_cache: bfloat16[99,1,1,64], v_cache: bfloat16[99,1,1,512], "
            "qv: bfloat16[8,128,512], causal: True",
        ),
        (
            "gqa_ragged_prefill_causal_h32_kv8_d128",
            "q: bfloat16[9,32,128], k: bfloat16[9,8,128], v: bfloat16[9,8,128], causal: True",
        ),
        ("top_k_top_p_sampling_from_probs_v129280", "probs: float32[8,129280], top_k: int32[8], top_p: float32[8]"),
        ("moe_topk_softmax_topk8_e64", "weights: float32[9,8], ids: int32[9,8], gating: bfloat16[9,64]"),
        ("moe_topk_softmax_topk8_e64", "gating: bfloat16[9,64], topk: 8"),
        (
            "top_k_top_p_joint_sampling_from_probs_v129280",
            "probs: float32[8,129280], top_k: int32[8], top_p: float32[8], filter_apply_order: 'joint'",
        ),
        (
            "moe_fp8_block_scale_grouped_gemm_e257_n4096_k7168",
            "0: (float8_e4m3fn[257,256,7168], float32[257,256,56]), "
            "1: (float8_e4m3fn[257,4096,7168], float32[257,32,56]), 2: bfloat16[257,256,4096], 3: int32[257]",
        ),
        (
            "dsa_sparse_attention_h128_ckv512_kpe64_topk2048_ps1",
            "q: bfloat16[9,128,576], kv: bfloat16[999,1,576], indices: int32[9,1,2048], sm_scale: 0.1, d_v: 512",
        ),
        (PLAIN, f"{ROTATED}, {ANGLES}, is_neox: True"),
        (FUSED, STORED),
        # Both parts of queries and of keys in one tensor each.
        (
            "mla_paged_decode_h128_ckv512_kpe64_ps64",
            "q: bfloat16[8,1,128,576], k_cache: bfloat16[257,64,1,576], table: int32[8,11], softmax_scale: 0.1",
        ),
        (
            "mla_paged_decode_h128_ckv512_kpe64_ps1",
            "Q: bfloat16[8,128,576], K_Buffer: bfloat16[99,1,576], V_Buffer: bfloat16[99,1,512]",
        ),
        # DeepGEMM takes pairs of codes and scales; CUTLASS takes weights and their scales transposed, scales last.
        ("fp8_blockwise_scaled_mm_n2112_k7168", f"0: ({CODES[0]}, {SCALES[0]}), 1: ({CODES[1]}, {SCALES[1]})"),
        (
            "fp8_blockwise_scaled_mm_n2112_k7168",
            f"a: {CODES[0]}, b: float8_e4m3fn[7168,2112], a_scale: {SCALES[0]}, b_scale: float32[56,17]",
        ),
        ("fp8_scaled_mm_n28672_k4096", f"{SCALED_MM}, sa: float32[8,1], sb: float32[1,28672], out_dtype: bfloat16"),
        (
            "moe_fp8_block_scale_grouped_gemm_e257_n4096_k7168",
            "out: bfloat16[72,4096], p: int64[257], a: float8_e4m3fn[72,7168], b: float8_e4m3fn[257,7168,4096], "
            "sa: float32[72,56], sb: float32[257,56,32]",
        ),
        # Rows of nine choices per token in one axis; activations that the wrapper quantized.
        ("moe_bf16_expert_gemm_topk9_r9_e257_n7168_k2048", f"a: bfloat16[72,2048], {DOWN}"),
        (
            "moe_fp8_block_scale_expert_gemm_topk9_r9_e257_n7168_k2048",
            "a: float8_e4m3fn[72,2048], b: float8_e4m3fn[257,7168,2048], c: bfloat16[8,9,7168], "
            "sa: float32[72,16], sb: float32[257,56,16], weights: float32[8,9]",
        ),
    ],
)
def test_a_call_of_the_same_sizes_computes_a_definition(definition: str, arguments: str):
    assert computes(call("x", arguments), load(definition))


@pytest.mark.parametrize(
    ("definition", "arguments"),
    [
        ("rmsnorm_h7168", NORM.replace("7168", "4096")),
        ("rmsnorm_h7168", NORM.replace("bfloat16", "float16")),
        ("rmsnorm_h7168", NORM.replace("1e-06", "1e-05")),
        ("rmsnorm_h7168", "input: bfloat16[8,7168]"),  # no weight
        ("mla_paged_decode_h128_ckv512_kpe64_ps64", "q: bfloat16[8,1,128,512], k: bfloat16[257,64,1,576]"),
        ("fp8_blockwise_scaled_mm_n2112_k7168", f"0: ({CODES[0]}, {SCALES[1]}), 1: ({CODES[1]}, {SCALES[0]})"),
        ("fp8_scaled_mm_n28672_k4096", f"{SCALED_MM}, sa: float32[8,1], sb: float32[1,4096]"),
        ("moe_bf16_expert_gemm_topk9_r9_e257_n7168_k2048", f"a: bfloat16[71,2048], {DOWN}"),
        ("moe_bf16_expert_gemm_topk9_r9_e257_n7168_k2048", f"a: float8_e4m3fn[72,2048], {DOWN}"),
        ("gemm_bf16_n129280_k7168", "0: bfloat16[8,7168], 1: bfloat16[7168,4096]"),
        ("gemm_bf16_n256_k7168", "a: bfloat16[8,7168], b: bfloat16[256,7168], out_dtype: float32"),
        ("gemm_bf16_n8_k4096", "0: bfloat16[8,4096], 1: bfloat16[256,4096]"),  # the weight comes second
        ("moe_topk_softmax_topk8_e64", "weights: float32[9,6], ids: int32[9,6], gating: bfloat16[9,64]"),
        (
            "top_k_top_p_sampling_from_probs_v129280",
            "probs: float32[8,129280], top_k: int32[8], top_p: float32[8], filter_apply_order: 'joint'",
        ),
        ("gemm_bf16_n256_k7168", "0: bfloat16[4,8,7168], 1: bfloat16[4,256,7168]"),  # a batch of products
        (
            "gqa_paged_decode_h32_kv8_d128_ps1",
            "q: bfloat16[8,32,128], kv: (bfloat16[99,8,128], bfloat16[99,8,128]), logits_soft_cap: 30.0",
        ),
        (
            "gqa_ragged_prefill_causal_h32_kv8_d128",
            "q: bfloat16[9,32,128], k: bfloat16[9,8,128], v: bfloat16[9,8,128], causal: False",
        ),
        (PLAIN, STORED),
        (
            "rope_with_cos_sin_cache_gptj_style_h64_kv1_d64_rd64",
            "q: bfloat16[8,64,64], k: bfloat16[8,1,64], cos_sin_cache: float32[99,64], is_neox: True",
        ),
        (FUSED, f"{ROTATED}, {ANGLES}, is_neox: True"),
        (FUSED, STORED.replace("True", "False")),
        ("rope_with_cos_sin_cache_neox_style_store_h32_kv4_d128", STORED),
        (
            "gqa_ragged_prefill_causal_h32_kv8_d128",  # keys and values of different lengths
            "q: bfloat16[9,32,128], k: bfloat16[9,8,128], v: bfloat16[7,8,128], causal: True",
        ),
    ],
)
def test_a_call_of_other_sizes_or_settings_does_not(definition: str, arguments: str):
    assert not computes(call("x", arguments), load(definition))


def test_only_a_kernel_with_evidence_is_verified():
    norm, product = load("rmsnorm_h7168"), load("gemm_bf16_n256_k7168")
    runs = {norm.name: ["torch.ops.sgl_kernel.rmsnorm", "flashinfer.norm.rmsnorm"], product.name: ["torch.matmul"]}
    evidence = Evidence([norm, product], runs)
    assert evidence.of(call("sgl_kernel.elementwise.rmsnorm", NORM)) == (Standing.VERIFIED, ("rmsnorm_h7168",))
    assert evidence.of(call("flashinfer.norm.rmsnorm", NORM.replace("7168", "96"))) == (Standing.OTHER_SIZES, ())
    # A kernel of that name in another library, and one whose tag alone names it.
    assert evidence.of(call("sglang.jit_kernel.norm.rmsnorm", NORM)) == (Standing.UNKNOWN, ())
    assert Evidence([norm], {}).of(call("flashinfer.norm.rmsnorm", NORM)) == (Standing.UNKNOWN, ())
    matrices = "0: bfloat16[8,7168], 1: bfloat16[256,7168]"
    for name, arguments, standing in (
        ("torch.nn.functional.linear", matrices, Standing.VERIFIED),
        ("torch.nn.functional.linear", f"{matrices}, 2: bfloat16[256]", Standing.UNKNOWN),
        ("torch.bmm", matrices, Standing.UNKNOWN),
        ("torch.nn.functional.linear", matrices.replace("bfloat16", "float32"), Standing.UNKNOWN),
        ("torch.Tensor.matmul", "0: float32[1,128,1], 1: float32[1,1,8]", Standing.UNKNOWN),
    ):
        assert evidence.of(call(name, arguments, library="torch"))[0] is standing, name


def test_a_rotation_that_writes_a_cache_needs_evidence_of_its_own():
    """SGLang has one function for both, which calls another one if it is given a cache."""
    name, store = "apply_rope_with_cos_sin_cache_inplace", "apply_rope_inplace_with_kvcache"
    plain, fused = load(PLAIN), load(FUSED)
    made = dataclasses.replace(call(f"{ROPE}.{name}", STORED), through=(f"torch.ops.sglang.{store}",))
    runs = {PLAIN: [f"{ROPE}.{name}"]}
    assert Evidence([plain, fused], runs).of(made) == (Standing.OTHER_SIZES, ())
    assert Evidence([plain, fused], {**runs, FUSED: [f"{ROPE}.{store}"]}).of(made) == (Standing.VERIFIED, (FUSED,))


def test_products_with_bias_and_of_batches_have_their_own_evidence():
    biased, batch = load("gemm_bf16_bias_n4608_k3584"), load("bmm_bf16_b16_n512_k128")
    evidence = Evidence([biased, batch], {biased.name: ["torch.nn.functional.linear"], batch.name: ["torch.bmm"]})
    linear = "0: bfloat16[8,3584], 1: bfloat16[4608,3584]"
    for name, arguments, standing in (
        ("torch.nn.functional.linear", f"{linear}, 2: bfloat16[4608]", Standing.VERIFIED),
        ("torch.nn.functional.linear", linear, Standing.UNKNOWN),
        ("torch.bmm", "0: bfloat16[16,8,128], 1: bfloat16[16,128,512]", Standing.VERIFIED),
        ("torch.bmm", "0: bfloat16[16,8,512], 1: bfloat16[16,512,128]", Standing.OTHER_SIZES),
    ):
        assert evidence.of(call(name, arguments, library="torch"))[0] is standing, (name, arguments)


def test_a_class_is_found_by_its_methods():
    decode = load("gqa_paged_decode_h32_kv8_d128_ps1")
    evidence = Evidence([decode], {decode.name: ["flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"]})
    arguments = "q: bfloat16[8,32,128], kv: (bfloat16[99,8,128], bfloat16[99,8,128])"
    assert evidence.of(call(DECODE, arguments))[0] is Standing.VERIFIED
    assert evidence.of(call(RAGGED, arguments))[0] is Standing.UNKNOWN
    assert evidence.of(call(DECODE.replace("forward", "plan"), arguments))[0] is Standing.UNKNOWN


@pytest.mark.parametrize(("experts", "computed"), [(258, True), (257, False)])
def test_sglang_sorts_the_experts_of_other_ranks_as_one_more(experts: int, computed: bool):
    arguments = f"ids: int32[8,9], num_experts: {experts}, block_size: 64"
    sort = call("sgl_kernel.moe.moe_align_block_size", arguments)
    assert computes(sort, load("moe_align_block_size_topk9_e257_b64")) is computed


#: Triton compiles the kernel for the number of features in a group: it is in no recording.
PACKED = "codes: float8_e4m3fn[3,512], scales: float32[3,4], rope: bfloat16[3,64], "
NEW_KEYS = "k_nope: bfloat16[3,512], k_rope: bfloat16[3,64]"


@pytest.mark.parametrize(
    ("definition", "arguments", "computed"),
    [
        ("quantize_k_cache_ckv512_kpe64_g128", PACKED + NEW_KEYS, True),
        ("quantize_k_cache_ckv512_kpe64_g128", PACKED.replace("[3,4]", "[3,8]") + NEW_KEYS, False),  # 64 features
        ("quantize_k_cache_ckv512_kpe64_g128", NEW_KEYS, False),
        # The sizes of outputs follow from those of inputs, but they also have to be there.
        ("silu_and_mul_i1408", "input: bfloat16[8,2816], out: bfloat16[8,1408]", True),
        ("silu_and_mul_i704", "input: bfloat16[8,2816], out: bfloat16[8,1408]", False),
        # Nor does the number of choices follow from rows of any number.
        ("moe_topk_softmax_sorted_topk8_e128", "logits: bfloat16[9,128], pairs: int32[72]", False),
        ("moe_topk_softmax_sorted_topk8_e128", "logits: bfloat16[9,128], pairs: int32[72], k: 8", True),
    ],
)
def test_a_size_that_follows_from_others_may_be_missing_unless_a_tensor_has_it(
    definition: str, arguments: str, computed: bool
):
    assert computes(call("x", arguments), load(definition)) is computed


def test_evidence_names_what_launches_a_triton_kernel():
    write = load("set_mla_kv_buffer_ckv512_kpe64")
    evidence = Evidence([write], {write.name: ["sglang.srt.mem_cache.utils.set_mla_kv_buffer_triton"]})
    arguments = "kv: bfloat16[99,1,576], k: bfloat16[8,1,512], r: bfloat16[8,1,64], loc: int64[8]"
    kernel = "sglang.srt.mem_cache.utils.set_mla_kv_buffer_kernel"
    assert evidence.of(call(kernel, arguments, library="triton"))[0] is Standing.VERIFIED
    assert evidence.of(call(f"{kernel}_fp8", arguments, library="triton"))[0] is Standing.UNKNOWN


def test_tensors_are_read_from_arguments():
    text = "a: (float8_e4m3fn[2,3], float32[]), eps: 1e-06, shape: (2, 3), name: 'x', m: bool[4]"
    assert tensors(text) == (("float8_e4m3fn", (2, 3)), ("float32", ()), ("bool", (4,)))


def test_the_time_of_a_layer_counts_for_all_layers_like_it():
    norm = load("rmsnorm_h7168")
    evidence = Evidence([norm], {norm.name: ["flashinfer.norm.rmsnorm"]})
    run = recording(
        call("flashinfer.norm.rmsnorm", NORM, (0, 1.0), (1, 1.0), (None, 1.0)),
        call("x.fused_moe_kernel", "", (1, 2.0), library="triton"),
        call("x.other_phase", "", (1, 9.0), phase="extend"),
    )
    (step,) = step_times(run, evidence)
    assert (step.phase, step.microseconds) == ("decode", 3 + 58 + 1 + 2 * 58)
    assert step.share(Standing.VERIFIED) == pytest.approx(62 / 178)
    assert step.missing == {"fused_moe_kernel (triton)": 116}


def test_every_gap_is_named_and_every_run_without_a_row():
    calls = [call(f"a.b.kernel{number}", "", (None, 1.0), library="triton") for number in range(50)]
    runs = [
        recording(*calls, name="one"),
        recording(*calls, name="replaced", stand_ins=("sgl_kernel.flash_attn",)),
        recording(call("", "", (None, 5.0), library=""), name="graph"),
    ]
    text = time_coverage(runs, Evidence([], {}))
    assert all(f"| `kernel{number} (triton)` | 0.00% | 2.00% | 2.00% |" in text for number in range(50))
    assert "- `replaced`: stand-ins ran for `sgl_kernel.flash_attn`\n" in text
    assert "- `graph`: CUDA graphs, " in text
    assert "- `one`" not in text


def test_runs_whose_kernels_are_unknown_have_no_row():
    evidence = Evidence([], {})
    known = call("flashinfer.norm.rmsnorm", NORM, (0, 1.0))
    assert step_times(recording(known, stand_ins=("sgl_kernel.flash_attn",)), evidence) == []
    assert step_times(recording(known, call("", "", (None, 5.0), library="")), evidence) == []


def test_the_document_says_what_misses_most():
    norm = load("rmsnorm_h7168")
    runs = [
        recording(
            call("flashinfer.norm.rmsnorm", NORM, (None, 3000.0)), call("a.b.kernel", "", (None, 1000.0)), name="one"
        ),
        recording(call(SAMPLING, "", (None, 500.0)), name="two"),
    ]
    text = time_coverage(runs, Evidence([norm], {norm.name: ["flashinfer.norm.rmsnorm"]}))
    assert "| `one` |  |  |  | 4.0 | 75% | 0% |" in text
    assert "| **mean** |  | **0%** | **0%** |  | **38%** | **0%** |" in text
    order = [text.index(name) for name in ("`top_k_top_p_sampling_from_probs (flashinfer)`", "`kernel (flashinfer)`")]
    assert order == sorted(order)
    assert "| 0.00% | 50.00% | 100.00% | `two`, decode | 1 |  |" in text


def test_classes_keep_their_name():
    assert kernel_name(call(DECODE, "")) == "BatchDecodeWithPagedKVCacheWrapper.forward (flashinfer)"


def test_the_committed_document_is_of_the_committed_runs():
    text = coverage_page()
    for path in sorted((find_root() / "traces" / "runtime").rglob("*.json")):
        measured = "graph" not in path.stem and "stand_in" not in path.stem
        assert (f"| `{path.stem}` |" in text) is measured, path.stem
        assert (f"\n- `{path.stem}`: " in text) is not measured, path.stem


def test_what_exchanges_data_between_gpus_is_told_apart():
    """So are copies of a call that exchanges; what else it computes is time of this GPU, as is every other copy."""
    norm = load("rmsnorm_h7168")
    known = call("flashinfer.norm.rmsnorm", NORM, (1, 2.0))
    copy = RecordedLaunch("Memcpy DtoD", 1, 1, 1.0)
    reduced = (
        copy,
        RecordedLaunch("sglang::cross_device_reduce_1stage<x, 2>", 1, 1, 7.0),
        RecordedLaunch("norm", 1, 1, 0.5),
    )
    gathered = (RecordedLaunch("ncclDevKernel_AllGather_x", None, 1, 4.0),)
    exchange = [
        RecordedCall("decode", "torch.ops", f"torch.ops.sgl_kernel.{name}", (), "", 1, (), launches)
        for name, launches in (("all_reduce", reduced), ("all_gather", gathered), ("clone", (copy,)))
    ]
    run = recording(known, *exchange)
    (step,) = step_times(run, Evidence([norm], {norm.name: ["flashinfer.norm.rmsnorm"]}))
    assert (step.microseconds, step.between_gpus) == ((2.0 + 0.5 + 1.0) * 58, 8.0 * 58 + 4.0)
    assert set(step.missing) == {"all_reduce (torch.ops)", "clone (torch.ops)"}
    assert "### Exchange between GPUs" in time_coverage([run], Evidence([], {}))
    assert "### Exchange between GPUs" not in time_coverage([recording(known)], Evidence([], {}))
