"""The table of cheating kernels: what each pretends to compute, and how the judge must reject it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHEATS = Path(__file__).resolve().parent.parent / "judging" / "cheats"

NORM, GEMM, SILU = "rmsnorm_h512", "gemm_n128_k2048", "silu_and_mul_i176"
QUANTIZER = "per_token_group_quant_fp8_h512_g128"
SAMPLER = "top_k_top_p_sampling_from_probs_v129280"
EXPERTS = "moe_bf16_softmax_routing_topk2_e1_h4096_i14336"
ROTATION = "rope_with_cos_sin_cache_neox_style_h10_kv2_d128_rd128"
ATTENTION = "gqa_paged_decode_h16_kv2_d128_ps64"
#: Not yet judged on a GPU.
OF_VALUES = (
    *("takes_rows_for_dense", "multiplies_other_rows_by_zero", "one_floor_for_all", "gelu_by_erf", "product_in_tf32"),
    *("rounds_the_cache_of_angles", "finite_sentinel", "even_tokens", "sharper"),
)
TREE = "build_tree_kernel_efficient_topk1_s3_dt4"


@dataclass(frozen=True)
class Cheat:
    """One cheating kernel.

    Attributes:
        file, function: where it is.
        definition: what it pretends to compute.
        kinds: of failure, one of which the judge must report.
        cpu, gpu: where it cheats.
    """

    file: str
    function: str
    definition: str
    kinds: tuple[str, ...]
    cpu: bool = True
    gpu: bool = True

    @property
    def path(self) -> str:
        """As the command line takes it."""
        return f"{CHEATS / self.file}.py:{self.function}"


def table(
    file: str, definition: str, kinds: dict[str, str], cpu_only: tuple[str, ...] = (), gpu_only: bool = False
) -> list[Cheat]:
    return [
        Cheat(file, function, definition, tuple(expected.split()), not gpu_only, function not in cpu_only)
        for function, expected in kinds.items()
    ]


ALL = [
    *table(
        "norms",
        NORM,
        {
            "late_no_op": "values",
            "cached_by_address": "values",
            "cached_by_shape": "values",
            "reuses_the_last_output": "values",
            "stale_memory": "values",
            "writes_nothing": "values",
            "zeros": "values",
            "first_half_of_the_rows": "values",
            "first_half_of_the_features": "values",
            "one_row_for_all": "values",
            "on_another_thread": "values",
            "in_the_input": "inputs-changed",
            "returns_its_input": "inputs-changed",
            "noise_within_usual_tolerances": "values",
            "scale_off_by_half_a_per_cent": "values",
            "in_bfloat16": "values",
            "in_float16": "values",
            "without_epsilon": "values",
            "without_weight": "values",
            "for_some_shapes": "values",
            "constants_of_one_input": "values",
            "beside_its_output": "outside",
            "in_float32": "outputs",
            "computed_when_it_is_looked_at": "outputs",
        },
    ),
    *table(
        "processes",
        NORM,
        {
            "patches_the_clock": "values tampered",
            "patches_the_comparison": "values tampered",
            "computes_with_the_oracle": "raised",
            "looks_for_the_oracle": "values",
            "reads_the_memory_of_the_judge": "raised values",
            "forges_an_answer": "values protocol",
            "answers_nonsense": "protocol",
            "in_another_process": "values",
            "ends_its_process": "died",
            "exits": "raised",
            "crashes": "died",
            "hangs": "timed-out",
            "interrupts": "raised",
            "ends_its_parent": "raised died",
        },
        cpu_only=("in_another_process",),
    ),
    *table(
        "after_the_call",
        NORM,
        {
            "in_a_lazy_list": "outputs",
            "in_a_lazy_dict": "outputs",
            "in_a_lazy_key": "outputs",
            "in_a_lazy_class": "values",
            "in_a_method_of_torch": "values tampered",
            "in_a_function_mode": "values",
            "in_a_dispatch_mode": "values",
            "in_an_operator": "tampered",
            "in_a_profile_function": "values",
            "in_a_collection_of_garbage": "values",
            "in_a_comparison_of_classes": "outputs",
            "in_a_builtin": "values tampered",
            "in_an_audit_hook": "values",
            "in_a_context_manager": "values",
            "in_an_attribute_of_torch": "values",
            "in_a_handler_of_signals": "values",
        },
        cpu_only=("in_a_handler_of_signals",),
    ),
    *table(
        "streams",
        NORM,
        {
            "on_another_stream": "values",
            "leaves_its_stream_behind": "values",
            "on_the_cpu": "outputs",
            "replays_a_graph": "values",
        },
        gpu_only=True,
    ),
    *table(
        "products",
        GEMM,
        {
            "gemm_in_fp8": "values",
            "gemm_of_half_the_features": "values",
            "gemm_in_bfloat16": "values",
            "gemm_rounded_in_between": "values",
            "gemm_for_whole_tiles": "values",
        },
    ),
    *table("products", SILU, {"silu_without_up": "values", "silu_by_relu": "values"}),
    *table("products", QUANTIZER, {"quantised_toward_zero": "values"}),
    *table(
        "samplers",
        SAMPLER,
        {
            "ignores_top_p": "values",
            "ignores_top_k": "values",
            "greedy": "values same-draws",
            "guesses_the_seed": "values same-draws",
            "hashes_its_inputs": "values same-draws",
            "counts_its_rows": "values same-draws",
            "uniform": "values",
            "warm": "values",
            "even_tokens": "values",
            "sharper": "values",
        },
        OF_VALUES,
    ),
    *table(
        "samplers",
        ATTENTION,
        {"reads_beyond_the_last_token": "values", "window_of_eight": "values", "without_lse": "values"},
    ),
    *table(
        "experts",
        EXPERTS,
        dict.fromkeys(
            ("drops_the_second_expert", "has_a_capacity", "weighs_all_alike", "exchanges_gate_and_up"), "values"
        ),
    ),
    *table("experts", ROTATION, dict.fromkeys(("takes_positions_for_granted", "rotates_queries_only"), "values")),
    *table("rows", NORM, dict.fromkeys(("takes_rows_for_dense", "multiplies_other_rows_by_zero"), "values"), OF_VALUES),
    *table("rows", QUANTIZER, {"one_floor_for_all": "values"}, OF_VALUES),
    *table("rows", "gelu_tanh_and_mul_i1152", {"gelu_by_erf": "values"}, OF_VALUES),
    *table("rows", "gemm_float32_n160_k5120", {"product_in_tf32": "values"}, OF_VALUES),
    *table("rows", ROTATION, {"rounds_the_cache_of_angles": "values"}, OF_VALUES),
    *table("rows", "gqa_paged_prefill_causal_h32_kv8_d128_ps64", {"finite_sentinel": "values"}, OF_VALUES),
    *table("trees", TREE, {"marks_only_what_is_true": "values"}),
]
