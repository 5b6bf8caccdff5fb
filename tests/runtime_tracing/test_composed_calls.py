"""Steps of a function in PyTorch become one call of the function, if they are those of a pattern."""

from __future__ import annotations

import dataclasses

import pytest

from flashinfer_trace import find_root, load
from tools.runtime_tracing.composed_calls import PATTERNS, Pattern, composed
from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.matching import Evidence, Standing
from tools.runtime_tracing.recording import COMPOSED, RecordedCall, RecordedLaunch, read

FILE = "sglang/srt/layers/toy.py"
OUTER = Frame("sglang/srt/models/toy.py", 7, "Layer.forward")
PATTERN = Pattern(
    "sglang.srt.layers.toy.norm",
    "pow add mul",
    {"hidden_states": (0, "0"), "weight": (2, "1")},
    {"eps": (1, "1")},
    helpers=("square",),
    conditions={0: r".*1: 2$"},
)
STEPS = (
    ("pow", "0: bfloat16[8,7168], 1: 2", "square"),
    ("add", "0: float32[8,1], 1: 1e-06", ""),
    ("mul", "0: float32[8,7168], 1: bfloat16[7168]", ""),
)


def step(kernel: str, arguments: str, helper: str = "", outer: Frame = OUTER, layer: int = 0) -> RecordedCall:
    inner = (Frame(FILE, 2, helper),) if helper else ()
    stack = (*inner, Frame(FILE, 5, "norm"), outer)
    return RecordedCall(
        "decode", "torch", f"torch.Tensor.{kernel}", stack, arguments, 1, (), (RecordedLaunch("k", layer, 1, 2.0),)
    )


CALLS = [step(*one) for one in STEPS]


def test_steps_become_one_call_with_the_functions_inputs():
    (one,) = composed(CALLS, [PATTERN])
    assert (one.library, one.kernel, one.stack) == (COMPOSED, PATTERN.path, (OUTER,))
    assert one.arguments == "hidden_states: bfloat16[8,7168], weight: bfloat16[7168], eps: 1e-06"
    assert sum(launch.microseconds for launch in one.launches) == 6.0


def test_calls_from_two_places_are_two_calls():
    other = Frame(OUTER.file, 9, OUTER.function)
    found = composed([*CALLS, *(step(*one, outer=other) for one in STEPS)], [PATTERN])
    assert [one.stack for one in found] == [(OUTER,), (other,)]


@pytest.mark.parametrize(
    "calls",
    [
        CALLS[:2],
        [*CALLS, step("mul", "0: float32[8,7168], 1: 3.0")],
        [step("pow", "0: bfloat16[8,7168], 1: 3", "square"), *CALLS[1:]],
        [step("pow", "0: bfloat16[8,7168], 1: 2", "other"), *CALLS[1:]],
        [CALLS[0], step("add", "0: float32[8,1]"), CALLS[2]],
        [CALLS[0], *(dataclasses.replace(one, launches=()) for one in CALLS[1:])],
    ],
    ids=["a step is missing", "one more", "another number", "another helper", "no epsilon", "only one launched"],
)
def test_other_steps_stay_as_they_were_recorded(calls):
    assert sorted(map(str, composed(calls, [PATTERN]))) == sorted(map(str, calls))


def test_a_dry_run_launches_nothing_and_its_steps_are_one_call_all_the_same():
    (one,) = composed([dataclasses.replace(call, launches=()) for call in CALLS], [PATTERN])
    assert one.kernel == PATTERN.path and one.launches == ()


def test_a_composed_call_has_the_place_of_its_first_step():
    before, after = step("arange", "0: 1", outer=OUTER), step("ones", "0: 1", outer=OUTER)
    before, after = (dataclasses.replace(one, stack=(OUTER,)) for one in (before, after))
    assert [one.kernel for one in composed([before, *CALLS, after], [PATTERN])] == [
        *(before.kernel, PATTERN.path, after.kernel)
    ]


def test_evidence_of_the_function_counts_for_its_steps():
    norm = load("rmsnorm_h7168")
    (one,) = composed(CALLS, [PATTERN])
    assert Evidence([norm], {norm.name: [PATTERN.path]}).of(one) == (Standing.VERIFIED, (norm.name,))
    other = dataclasses.replace(PATTERN, path="sglang.srt.layers.other.norm").path
    assert Evidence([norm], {norm.name: [other]}).of(one)[0] is Standing.UNKNOWN
    for text in ("bfloat16[7168], eps: 1e-05", "bfloat16[7168], residual: bfloat16[8,7168], eps: 1e-06"):
        changed = dataclasses.replace(one, arguments=f"hidden_states: bfloat16[8,7168], weight: {text}")
        assert Evidence([norm], {norm.name: [PATTERN.path]}).of(changed)[0] is Standing.OTHER_SIZES


@pytest.mark.parametrize(("chosen", "known"), [("int16[8,8]", True), ("int16[8,4]", False)])
def test_outputs_have_their_sizes(chosen, known):
    definition = load("moe_topk_softmax_sorted_topk8_e128")
    path = "triton_kernels.routing.routing"
    arguments = f"routing_logits: bfloat16[8,128], positions: {chosen}"
    call = RecordedCall("decode", COMPOSED, path, (), arguments, 1, (), ())
    standing, _ = Evidence([definition], {definition.name: [path]}).of(call)
    assert standing is (Standing.VERIFIED if known else Standing.OTHER_SIZES)


SUM = "at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, sum_functor<c10::BFloat16, float> > >"
EXPERTS = "hidden_states: bfloat16[8,2048], w1: bfloat16[64,2816,2048], topk_ids: int32[8,6], activation: 'silu'"


@pytest.mark.parametrize(
    ("kernels", "found"),
    [
        ((SUM,), True),
        (
            (SUM, "at::native::vectorized_elementwise_kernel<8, at::native::AUnaryFunctor<x, MulFunctor<float> > >"),
            False,
        ),
        (
            (SUM, "at::native::vectorized_elementwise_kernel<8, at::native::AUnaryFunctor<x::MulFunctor<float> > >"),
            True,
        ),
        (("at::native::elementwise_kernel<128, CUDAFunctor_add>",), False),
    ],
)
def test_what_the_operator_of_experts_launches_itself_is_a_sum(kernels, found):
    launches = tuple(RecordedLaunch(kernel, 0, 1, 2.0) for kernel in kernels)
    call = RecordedCall("decode", "torch.ops", "torch.ops.sglang.inplace_fused_experts", (), EXPERTS, 1, (), launches)
    (one,) = composed([call])
    assert (one.library == COMPOSED) is found
    assert (one.arguments == "hidden_states: bfloat16[8,6,2048]") is found


def test_every_pattern_is_met_by_a_recorded_run():
    names = {
        "gemma3_4b-bf16-triton",
        "llama_3.1_8b-bf16-flashinfer-deterministic",
        "llama_3.1_8b-bf16-triton-pytorch_sampling",
        "deepseek_v2_lite-bf16-flashinfer",
        "glm4.5-bf16-flashinfer",
        "qwen3_30b_a3b-bf16-flashinfer-triton_kernel_moe",
        "0.5.23/gemma3_4b-bf16",
        "0.5.23/gpt_oss_120b-mxfp4",
    }
    runs = [read(find_root() / "traces" / "runtime" / f"{name}.json") for name in sorted(names)]
    met = [pattern for pattern in PATTERNS if any(has_steps(pattern, run.calls) for run in runs)]
    assert met == list(PATTERNS)


def has_steps(pattern: Pattern, calls: tuple[RecordedCall, ...]) -> bool:
    return any(one.library == COMPOSED and one.kernel == pattern.path for one in composed(calls, [pattern]))
