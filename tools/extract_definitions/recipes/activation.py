"""The gated activation of SwiGLU layers: dense, shared and routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.recipes.feed_forward import dense_widths
from tools.extract_definitions.recipes.fields import HEADS, WIDTHS
from tools.extract_definitions.recipes.unread import of_experts, reported
from tools.extract_definitions.words import const, document, tensor, uses, var

TENSOR_PARALLEL = (1, 2, 4, 8)
#: Names of the activation in model configurations -> its family.
FAMILIES = {"silu": "silu_and_mul", "swish": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}
#: Family -> the activation in words, and as a formula.
WORDS = {
    "silu_and_mul": ("Gated activation of SwiGLU", "silu(gate) * up"),
    "gelu_tanh_and_mul": ("Gated activation of GeGLU with the approximation of GELU by tanh", "gelu_tanh(gate) * up"),
}
#: The kernels read 16 bytes at a time: eight bf16 features.
ALIGNMENT = 8


def needs(request: Request) -> Iterator[Need]:
    model = request.model
    activation = model.text("hidden_act") if "hidden_act" in model else "silu"
    if (family := FAMILIES.get(activation)) is None:
        for op in ("act_fn", "experts"):
            if request.usage.op(op):
                request.uncovered[op] = f"extraction derives no activation of hidden_act {activation!r}"
        return
    widths = [
        ("act_fn", width, where or "the feed-forward layers") for width, where in dense_widths(request, ("act_fn",))
    ]
    if model.experts is not None:
        request.expect("experts", "the routed experts")
        if not reported(request, ["experts"], of_experts(request)):
            widths.append(("experts", model.expert_size, "the routed experts"))
    for size in request.tensor_parallel(TENSOR_PARALLEL):
        for op, width, role in widths:
            stages = request.stages(op, [f"sgl-kernel:{family}"])
            if not stages or not request.divides(width, size, "the width"):
                continue
            if width // size % ALIGNMENT:
                request.left_out[f"{width} features over TP {size}: the kernels need multiples of {ALIGNMENT}"] = None
                continue
            share = width // size
            axes = {"intermediate_size": share, "gate_up_size": 2 * share}
            yield Need(family, axes, Use(model, op, role, tp=size), stages)


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    width, (what, formula) = axes["intermediate_size"], WORDS[family]
    description = (
        f"{what} in bf16, {formula}, with {width} features per rank. Gate and up lie side by "
        f"side in each row, as one projection produces them. Rounded once, at the end. {uses(needs)}"
    )
    rows = "Number of rows: all tokens of the batch; for routed experts, one row per token and chosen expert."
    dimensions = {
        "num_tokens": var(rows),
        "intermediate_size": const(width, "Features of the gate, of up, and of the output."),
        "gate_up_size": const(2 * width, "Features of gate and up together."),
    }
    text = "Output of the gate and up projections: in each row, first the gate, then up."
    inputs = {"gate_up": tensor(["num_tokens", "gate_up_size"], "bfloat16", text)}
    text = f"{formula}, the input of the down projection."
    outputs = {"output": tensor(["num_tokens", "intermediate_size"], "bfloat16", text)}
    constraints = ["gate_up_size == 2 * intermediate_size"]
    return document(description, needs, (), dimensions, inputs, outputs, constraints)


RECIPE = Recipe(
    op_type="activation",
    families=tuple(WORDS),
    kernels=frozenset(f"sgl-kernel:{family}" for family in WORDS),
    fields=HEADS | WIDTHS | {"hidden_act"},
    needs=needs,
    document=describe,
)
