"""The gated activation of SwiGLU layers: dense, shared and routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.recipes.feed_forward import dense_widths
from tools.extract_definitions.recipes.fields import HEADS, WIDTHS
from tools.extract_definitions.words import const, document, tensor, uses, var

TENSOR_PARALLEL = (1, 2, 4, 8)
#: Names of the activation in model configurations.
SILU = ("silu", "swish")
KERNEL = "sgl-kernel:silu_and_mul"
#: The kernels read 16 bytes at a time: eight bf16 features.
ALIGNMENT = 8
TAGS = ("fi_api:flashinfer.activation.silu_and_mul", "sgl_api:sgl_kernel.silu_and_mul")


def needs(request: Request) -> Iterator[Need]:
    model = request.model
    if "hidden_act" in model and model.text("hidden_act") not in SILU:
        for op in ("act_fn", "experts"):
            if request.usage.op(op):
                request.uncovered[op] = f"no family covers hidden_act {model.text('hidden_act')!r}"
        return
    widths = [("act_fn", width, where or "the feed-forward layers") for width, where in dense_widths(request)]
    if not widths and request.usage.op("act_fn"):
        request.unused["act_fn"] = "no layer of this model has a dense feed-forward network or a shared expert"
    if model.experts is not None:
        widths.append(("experts", model.expert_size, "the routed experts"))
    for size in request.tensor_parallel(TENSOR_PARALLEL):
        for op, width, role in widths:
            stages = request.stages(op, [KERNEL])
            if not stages or not request.divides(width, size, "the width"):
                continue
            if width // size % ALIGNMENT:
                request.left_out[f"{width} features over TP {size}: the kernels need multiples of {ALIGNMENT}"] = None
                continue
            share = width // size
            axes = {"intermediate_size": share, "gate_up_size": 2 * share}
            yield Need("silu_and_mul", axes, Use(model, op, role, tp=size), stages)


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    width = axes["intermediate_size"]
    description = (
        f"Gated activation of SwiGLU in bf16, silu(gate) * up, with {width} features per rank. Gate and up lie side by "
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
    text = "silu(gate) * up, the input of the down projection."
    outputs = {"output": tensor(["num_tokens", "intermediate_size"], "bfloat16", text)}
    constraints = ["gate_up_size == 2 * intermediate_size"]
    return document(description, needs, TAGS, dimensions, inputs, outputs, constraints)


RECIPE = Recipe("activation", ("silu_and_mul",), frozenset({KERNEL}), HEADS | WIDTHS | {"hidden_act"}, needs, describe)
