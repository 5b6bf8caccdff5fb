"""Experts in nvfp4 behind DeepSeek's router: what Blackwell's kernel rounds, and how it is called, on an emulation."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from emulated_runs import assert_adapter_passes, install

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.moe import deepseek
from flashinfer_trace.families.moe.nvfp4 import LEVELS
from flashinfer_trace.families.moe.oracle import expert_outputs, route
from flashinfer_trace.harness.inputs import Draws

DEFINITION = flashinfer_trace.load("moe_nvfp4_ds_routing_topk8_ng8_kg4_e32_h7168_i2048")
FAMILY = family_of(DEFINITION)
TWIN = DEFINITION.with_const_axes(FAMILY.twin)


def requantized(y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """y rounded to e2m1 in blocks of 16, with e4m3 scales that are off by a factor."""
    blocks = y.view(*y.shape[:-1], y.shape[-1] // 16, 16)
    scales = (blocks.abs().amax(dim=-1, keepdim=True) / 6).clamp_max(448).to(torch.float8_e4m3fn).double()
    quotient = torch.where(scales > 0, blocks / scales, 0.0).clamp(-6, 6)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    nearest = levels[(quotient.abs().unsqueeze(-1) - levels).abs().argmin(dim=-1)]
    return (nearest * quotient.sign() * scales * factor).flatten(-2)


def as_blackwell(inputs, factor=1.0):
    """The output with the activation requantized and the result of each expert rounded to bf16."""

    def down(given, experts, y):
        result = requantized(y, factor) @ deepseek.down_matrix(given, experts).mT
        return result.to(torch.bfloat16).double()

    arithmetic = dataclasses.replace(deepseek.NVFP4, down=down)
    return expert_outputs(arithmetic, TWIN, inputs, route(TWIN, inputs))["output"].value.to(torch.bfloat16)


def case(values: str, seed: int):
    plan = {**FAMILY.plan_for_axes(TWIN, {"seq_len": 24}, Draws(0, "cpu")), "values": values, "routing": "local"}
    inputs = FAMILY.inputs(TWIN, plan, seed, "cpu")
    return inputs, FAMILY.oracle(TWIN, inputs)["output"]


@pytest.mark.parametrize("values", ["normal", "large", "tiny"])
@pytest.mark.parametrize("seed", range(3))
def test_requantized_activations_pass_and_a_wrong_scale_of_them_does_not(values: str, seed: int) -> None:
    inputs, expected = case(values, seed)
    policy = deepseek.FP4_BLACKWELL
    assert policy.compare(as_blackwell(inputs), expected).passed
    assert not policy.compare(as_blackwell(inputs, 1.25), expected).passed
    assert not policy.passes_zero(expected, torch.bfloat16)


def fake_moe(**given):
    codes = ("hidden_states", "gemm1_weights", "gemm2_weights")
    assert all(given[name].dtype == torch.uint8 for name in codes)
    assert all(given[f"{name}_scale"].dtype == torch.float8_e4m3fn for name in codes)
    assert all(given[name] is None for name in given if name.startswith("gemm") and not name.endswith(("s", "scale")))
    names = ("routing_logits", "routing_bias", *codes, *(f"{name}_scale" for name in codes))
    inputs = {name: given[name] for name in (*names, "local_expert_offset", "routed_scaling_factor")}
    inputs |= {name: given[name] for name in given if name.startswith("output")}
    inputs |= {name: inputs[name].view(torch.int8) for name in codes}
    assert given["local_num_experts"] == 8
    return [as_blackwell(inputs)]


def test_the_kernel_is_called_as_its_library_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are not permuted and scales not tiled here: both orders are checked for the sizes that they are asked of."""
    asked = []

    def rows_of(cache, matrix, epilogue_rows, num_elts_per_sf=None):
        asked.append((epilogue_rows, num_elts_per_sf, matrix.shape[1]))
        return torch.arange(len(matrix))

    stand_ins = {
        "block_scale_interleave": torch.clone,
        "fused_moe.RoutingMethodType": SimpleNamespace(DeepSeekV3=SimpleNamespace(value=2)),
        "fused_moe.trtllm_fp4_block_scale_moe": fake_moe,
        "fused_moe.core._maybe_get_cached_w3_w1_permute_indices": rows_of,
        "fused_moe.core.get_w2_permute_indices_with_cache": rows_of,
    }
    install(monkeypatch, {f"flashinfer.{path}": value for path, value in stand_ins.items()})
    assert_adapter_passes(DEFINITION.name, FAMILY.kernels[0].label, examples=10)
    assert set(asked) == {(128, None, 80), (128, 16, 10), (128, None, 48), (128, 16, 6)}
