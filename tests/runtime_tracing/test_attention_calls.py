"""The function of recorded attention calls: the cap, the window, the sinks, and unread inputs decide."""

from __future__ import annotations

import pytest

from flashinfer_trace import load
from tools.runtime_tracing.attention_calls import settings_of_attention
from tools.runtime_tracing.matching import computes
from tools.runtime_tracing.recording import RecordedCall

TRITON_OPS = "sglang.srt.layers.attention.triton_ops"
EXTEND = f"{TRITON_OPS}.extend_attention._fwd_kernel"
PARTS = f"{TRITON_OPS}.decode_attention._fwd_grouped_kernel_stage1"
MERGE = f"{TRITON_OPS}.decode_attention._fwd_kernel_stage2"
WINDOW = "window_kv_offset_ptr: int32[8], "
SINKS = "sink_ptr: bfloat16[64], "
GEMMA, GPT = "gqa_extend_causal_h16_kv8_qk256_vo256", "gqa_extend_causal_h64_kv8_qk64_vo64"
GEMMA_3 = "gqa_extend_causal_h8_kv4_qk256_vo256"


def call(kernel: str, arguments: str) -> RecordedCall:
    return RecordedCall("prefill", "triton", kernel, (), arguments, 1, (), ())


def extend(heads, kv_heads, dim, *, cap="0.0", more="", cache="bfloat16[99,{},{}]", cached=7):
    new = f"bfloat16[9,{kv_heads},{dim}]"
    buffer = cache.format(kv_heads, dim)
    q = f"bfloat16[9,{heads},{dim}]"
    tensors = f"Q_Extend: {q}, K_Extend: {new}, V_Extend: {new}, O_Extend: {q}, K_Buffer: {buffer}, V_Buffer: {buffer}"
    return call(EXTEND, f"{tensors}, kv_indices: int64[{cached}], {more}sm_scale: 0.1, logit_cap: {cap}")


@pytest.mark.parametrize(
    ("name", "one", "window", "computed"),
    [
        (f"{GEMMA}_softcap50", extend(16, 8, 256, cap="50.0"), 4096, True),
        (f"{GEMMA}_softcap50", extend(16, 8, 256, cap="30.0"), 4096, False),
        (f"{GEMMA}_softcap50", extend(16, 8, 256), 4096, False),
        (f"{GEMMA}_softcap50", extend(16, 8, 256, cap="50.0", more=WINDOW), 4096, False),
        (f"{GEMMA}_softcap50_window4096", extend(16, 8, 256, cap="50.0", more=WINDOW), 4096, True),
        (f"{GEMMA}_softcap50_window4096", extend(16, 8, 256, cap="50.0", more=WINDOW), 1024, False),
        (f"{GEMMA}_softcap50_window4096", extend(16, 8, 256, cap="50.0", more=WINDOW), None, False),
        (f"{GEMMA}_softcap50_window4096", extend(16, 8, 256, cap="50.0"), 4096, False),
        (GEMMA_3, extend(8, 4, 256), 1024, True),
        (GEMMA_3, extend(8, 4, 256, more=WINDOW), 1024, False),
        (f"{GEMMA_3}_window1024", extend(8, 4, 256, more=WINDOW), 1024, True),
        (f"{GPT}_sinks", extend(64, 8, 64, more=SINKS), 128, True),
        (f"{GPT}_sinks", extend(64, 8, 64), 128, False),
        (f"{GPT}_sinks_window128", extend(64, 8, 64, more=SINKS + WINDOW), 128, True),
        (f"{GPT}_sinks_window128", extend(64, 8, 64, more=WINDOW), 128, False),
    ],
)
def test_a_call_has_the_cap_the_window_and_the_sinks_of_its_definition(name, one, window, computed):
    assert computes(one, load(name), window) is computed


@pytest.mark.parametrize(("cached", "computed"), [(0, True), (7, False)])
@pytest.mark.parametrize("cache", ["bfloat16[99,1,576]", "float8_e4m3fn[99,{},{}]"])
def test_a_cache_counts_only_if_the_call_reads_it(cache, cached, computed):
    assert computes(extend(8, 4, 256, cache=cache, cached=cached), load(GEMMA_3)) is computed


def test_parts_are_computed_without_sinks_and_merged_with_them():
    plain, capped = load("gqa_paged_decode_h32_kv8_d128_ps1"), load("gqa_paged_decode_h8_kv4_d256_ps1_softcap50")
    q = "Q: bfloat16[8,{0},{2}], K_Buffer: bfloat16[99,{1},{2}], V_Buffer: bfloat16[99,{1},{2}]"
    assert computes(call(PARTS, f"{q.format(32, 8, 128)}, logit_cap: 0.0"), plain)
    assert not computes(call(PARTS, f"{q.format(32, 8, 128)}, logit_cap: 50.0"), plain)
    assert computes(call(PARTS, f"{q.format(8, 4, 256)}, logit_cap: 50.0"), capped)
    sinks = load("gqa_paged_decode_h64_kv8_d64_ps1_sinks")
    assert computes(call(PARTS, f"{q.format(64, 8, 64)}, logit_cap: 0.0"), sinks)
    merge = "Mid_O: float32[8,{0},8,{1}], Mid_O_1: float32[8,{0},8], O: bfloat16[8,{0},{1}], v_scale: 1.0"
    assert computes(call(MERGE, merge.format(32, 128)), plain)
    assert not computes(call(MERGE, merge.format(32, 64)), plain)
    assert computes(call(MERGE, merge.format(8, 256)), capped)
    assert computes(call(MERGE, f"{merge.format(64, 64)}, {SINKS}HAS_SINK: True"), sinks)
    assert not computes(call(MERGE, merge.format(64, 64)), sinks)


def test_the_window_of_a_wrapper_counts_the_keys_before_the_own_one():
    name = "gqa_paged_decode_h32_kv8_d128_ps64_window4096"
    caches = "q: bfloat16[8,32,128], kv: (bfloat16[99,64,8,128], bfloat16[99,64,8,128])"
    for left, computed in ((4095, True), (4096, False), (-1, False)):
        arguments = f"{caches}, window_left: {left}"
        assert (
            computes(call("flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.run", arguments), load(name))
            is computed
        )


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("window_size: (4095, 0), softcap: 50.0", {"logits_soft_cap": 50.0, "window_size": 4096}),
        ("window_size: (-1, -1), softcap: 0.0", {"logits_soft_cap": 0.0, "window_size": 0}),
        ("window_left: 127, logits_soft_cap: 30.0", {"logits_soft_cap": 30.0, "window_size": 128}),
    ],
)
def test_each_librarys_names_of_cap_and_window_are_known(arguments, settings):
    assert settings_of_attention(arguments, None) == settings


@pytest.mark.parametrize(("sinks", "computed"), [("bfloat16[64]", True), ("bfloat16[32]", False), ("int8[64]", False)])
def test_flash_attention_takes_sinks_in_bfloat16(sinks, computed):
    cache = "k_cache: bfloat16[99,1,8,64], v_cache: bfloat16[99,1,8,64]"
    arguments = f"q: bfloat16[8,64,64], {cache}, causal: True, window_size: (-1, -1), softcap: 0.0, sinks: {sinks}"
    one = call("sglang.jit_kernel.flash_attention.flash_attn_with_kvcache", arguments)
    assert computes(one, load("gqa_paged_decode_h64_kv8_d64_ps1_sinks")) is computed
