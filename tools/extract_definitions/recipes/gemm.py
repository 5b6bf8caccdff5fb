"""Linear layers in bf16, and in fp8 blocks: projections of attention and feed-forward layers, router, output head."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.models import QUANTIZATION
from tools.extract_definitions.needs import Need, Recipe, Request, Use, kernel_name
from tools.extract_definitions.recipes.feed_forward import dense_widths
from tools.extract_definitions.recipes.fields import GROUPED, LATENT, WIDTHS
from tools.extract_definitions.recipes.unread import of_heads, reported, unread
from tools.extract_definitions.understanding import is_quantised
from tools.extract_definitions.words import const, document, plural, tensor, uses, var

TENSOR_PARALLEL = (1, 8)
#: Kernels for fixed shapes that SGLang uses for few rows.
SPECIAL = ("sgl-kernel:dsv3_fused_a_gemm", "sgl-kernel:dsv3_router_gemm")

BF16, BIAS, FP8 = "gemm_bf16", "gemm_bf16_bias", "fp8_blockwise_scaled_mm"
#: What the code calls a router that is a linear layer with a bias.
ROUTER = "router"
#: The projections of attention, whose bias and size of heads fields may give.
PROJECTIONS = ("qkv_proj", "o_proj")
#: Kernels that compute it; SGLang runs the second where a size of the weights is no multiple of 128 (2,112 in MLA).
BLOCK_SCALED = ("sgl-kernel:fp8_blockwise_scaled_mm", "triton:_w8a8_block_fp8_matmul")
#: Features that share one scale; for weights, in both directions.
BLOCK = 128
#: Layers whose output features ranks share, beside merged ones.
SHARED = ("q_proj", "q_b_proj", "kv_b_proj")

#: op, output features, input features, role
Layer = tuple[str, int, int, str]


def needs(request: Request) -> Iterator[Need]:
    for size in request.tensor_parallel(TENSOR_PARALLEL):
        for op, n, k, role in _layers(request, size):
            found = request.usage.op(op)
            request.expect(op, role)
            if reported(request, [op], *_unread(request, op)):
                continue
            if is_quantised(request, op):
                yield from _block_scaled(request, op, n, k, Use(request.model, op, role, tp=size))
                continue
            if found is None or not (stages := request.stages(op)):
                continue
            for family in _families(request, op, size):
                yield Need(family, {"n": n, "k": k}, Use(request.model, op, role, tp=size), stages)


def _families(request: Request, op: str, size: int) -> tuple[str, ...]:
    """The families of a layer in bf16. Ranks that add up the products of o_proj share a bias, which the first adds."""
    if not _has_bias(request, op):
        return (BF16,)
    return (BIAS, BF16) if op == "o_proj" and size > 1 else (BIAS,)


def _has_bias(request: Request, op: str) -> bool:
    """Whether a linear layer adds a bias: as configured where the code leaves it open, else as the code says."""
    given = _biases(request, op)
    if field := _bias_field(given):
        config, defaults = request.model.config, request.usage.code.reads.get(field, ())
        return bool(config.get(field, "True" in defaults))
    return op in (*PROJECTIONS, ROUTER) and "True" in given


def _biases(request: Request, op: str) -> set[str]:
    """What the code passes as `bias` where it builds a linear layer, which has one by default."""
    calls = (ast.parse(text, mode="eval").body for text in request.usage.code.modules.get(op, ()))
    given = [call.keywords for call in calls if isinstance(call, ast.Call)]
    return {
        next((ast.unparse(one.value) for one in keywords if one.arg == "bias"), "True").rpartition(".")[2]
        for keywords in given
    }


def _bias_field(given: Collection[str]) -> str:
    """The field that decides a bias; "" if the code does, with a literal.

    Where a class derives from another, the code builds a layer in both ways; a class that reads attention_bias derives
    from one with qkv_bias or a literal.
    """
    if {"attention_bias", "bias"} & set(given):
        return "attention_bias"
    return "qkv_bias" if "qkv_bias" in given else ""


def _unread(request: Request, op: str) -> Iterator[str]:
    """Fields that give another layer than the code builds."""
    if op not in PROJECTIONS:
        return
    if not request.model.is_latent:
        yield of_heads(request)
    field, has_bias = _bias_field(_biases(request, op)), _has_bias(request, op)
    if field != "attention_bias":
        yield unread(request, "attention_bias", [has_bias])
    if op == "qkv_proj" and field != "qkv_bias" and request.model.config.get("qkv_bias") not in (None, has_bias):
        yield f"the code does not choose the bias of {op} by qkv_bias, which the configuration gives"


def _block_scaled(request: Request, op: str, n: int, k: int, use: Use) -> Iterator[Need]:
    """A layer whose weights are fp8 in blocks."""
    found = request.usage.op(op)
    if found and request.options.ranks is None and not set(map(kernel_name, found.kernels)) & set(BLOCK_SCALED):
        traced = f"no traced configuration of {request.usage.architecture} runs fp8 block weights"
        request.uncovered[op] = f"{traced} by a kernel that {FP8} covers"
    if not (stages := request.stages(op, BLOCK_SCALED)):
        return
    if k % BLOCK or any(part % BLOCK for part in _parts(request, op, n, use.tp or 1)):
        problem = f"blocks of {BLOCK} features do not fit"
        request.left_out[f"{use.role} of {request.model.name}, TP {use.tp}: {problem}"] = None
        if use.tp == 1:  # then they fit no share either
            request.uncovered[op] = f"{problem} into {use.role}"
        return
    blocks = {"num_n_blocks": -(-n // BLOCK), "num_k_blocks": k // BLOCK}
    yield Need(FP8, {"n": n, "k": k, **blocks}, use, stages)


def _parts(request: Request, op: str, n: int, size: int) -> tuple[int, ...]:
    """The output features of a rank that SGLang loads only in whole blocks (fp8.py: validate_block_quant_shapes).

    These are the parts of merged layers, and what ranks have of a layer that they share. What each rank holds as a
    whole, such as the first projections of latent attention, may end in a smaller block.
    """
    if op == "qkv_proj":
        dim, kv_heads = request.model.head_dim, max(1, request.model.size("num_key_value_heads") // size)
        return n - 2 * kv_heads * dim, kv_heads * dim
    if op == "gate_up_proj":
        return (n // 2,)
    return (n,) if op in SHARED and size > 1 else ()


def _layers(request: Request, size: int) -> Iterator[Layer]:
    model = request.model
    hidden = model.size("hidden_size")
    heads = model.size("num_attention_heads") // size
    yield from _latent_layers(request, heads) if model.is_latent else _attention_layers(request, heads, size)
    for width, where in dense_widths(request, ("gate_up_proj", "down_proj")):
        if request.divides(width, size, "the width"):
            share, of = width // size, f" of {where}" if where else ""
            yield "gate_up_proj", 2 * share, hidden, f"gate_up_proj{of} (2 x {share})"
            yield "down_proj", hidden, share, f"down_proj{of}"
    vocabulary = model.size("vocab_size")
    if request.divides(vocabulary, size, "vocab_size"):
        share = vocabulary // size
        capped = ""
        if cap := model.config.get("final_logit_softcapping"):
            capped = ", before the logits are capped"
            request.uncovered["logits_processor"] = (
                f"no family covers the cap of the final logits (final_logit_softcapping {cap})"
            )
        text = "vocabulary" if size == 1 else f"{share} tokens of the vocabulary"
        yield "logits_processor", share, hidden, f"lm_head ({text}{capped})"
    if model.experts is not None:
        if request.usage.op(ROUTER):
            yield ROUTER, model.experts, hidden, f"router ({model.experts} experts)"
        else:
            yield "gate", model.experts, hidden, f"router (gate, {model.experts} experts)"
    if model.count("shared_expert_intermediate_size"):
        gate = "shared_expert_gate (weight of the shared expert)"
        yield "gate" if request.usage.op("gate_up_proj") else "shared_expert_gate", 1, hidden, gate


def _latent_layers(request: Request, heads: int) -> Iterator[Layer]:
    """Layers of multi-head latent attention; without q_lora_rank the query is not compressed."""
    model = request.model
    hidden, latent = model.size("hidden_size"), model.size("kv_lora_rank")
    nope, rope, value = model.size("qk_nope_head_dim"), model.size("qk_rope_head_dim"), model.size("v_head_dim")
    if "q_lora_rank" in model:
        query = model.size("q_lora_rank")
        parts = f"q_lora_rank {query} + kv_lora_rank {latent} + rope {rope}"
        yield "fused_qkv_a_proj_with_mqa", query + latent + rope, hidden, f"fused_qkv_a_proj_with_mqa ({parts})"
        yield "q_b_proj", heads * (nope + rope), query, f"q_b_proj ({heads} heads x {nope + rope})"
        unused = {"q_proj": "q_lora_rank is set", "kv_a_proj_with_mqa": "q_lora_rank is set"}
    else:
        parts = f"kv_lora_rank {latent} + rope {rope}"
        yield "kv_a_proj_with_mqa", latent + rope, hidden, f"kv_a_proj_with_mqa ({parts})"
        yield "q_proj", heads * (nope + rope), hidden, f"q_proj ({heads} heads x {nope + rope})"
        unused = {"q_b_proj": "q_lora_rank is not set", "fused_qkv_a_proj_with_mqa": "q_lora_rank is not set"}
    request.unused.update({op: why for op, why in unused.items() if request.usage.op(op)})
    yield "kv_b_proj", heads * (nope + value), latent, f"kv_b_proj ({heads} heads x {nope + value})"
    yield "o_proj", hidden, heads * value, f"o_proj ({heads} heads x {value})"


def _attention_layers(request: Request, heads: int, size: int) -> Iterator[Layer]:
    model = request.model
    hidden, dim = model.size("hidden_size"), model.head_dim
    kv_heads = max(1, model.size("num_key_value_heads") // size)
    text = f"qkv_proj (({heads} query + 2 x {kv_heads} key-value heads) x {dim})"
    yield "qkv_proj", (heads + 2 * kv_heads) * dim, hidden, text
    yield "o_proj", hidden, heads * dim, f"o_proj ({heads} heads x {dim})"


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    n, k = axes["n"], axes["k"]
    sizes = f"with {k} input and {plural(n, 'output feature')} per rank. {uses(needs)}"
    dimensions = {
        "m": var("Number of rows: all tokens of the batch."),
        "n": const(n, "Output features."),
        "k": const(k, "Input features, which the product sums over."),
    }
    if family == FP8:
        return _describe_block_scaled(sizes, axes, needs, dimensions)
    inputs = {
        "A": tensor(["m", "k"], "bfloat16", "Activations, one row per token."),
        "B": tensor(["n", "k"], "bfloat16", "Weights as nn.Linear stores them, one row per output feature."),
    }
    what, product, result = "Linear layer", "A @ B.T", "Product A @ B.T."
    if family == BIAS:
        what, product, result = "Linear layer with bias", "A @ B.T + bias", "A @ B.T + bias."
        inputs["bias"] = tensor(["n"], "bfloat16", "Added to every row of the product, before it is rounded.")
    outputs = {"C": tensor(["m", "n"], "bfloat16", result)}
    return document(f"{what} in bf16, C = {product}, {sizes}", needs, (), dimensions, inputs, outputs)


def _describe_block_scaled(
    sizes: str, axes: Mapping[str, int], needs: Sequence[Need], dimensions: dict[str, Any]
) -> dict[str, Any]:
    codes, scales = "float8_e4m3fn", "Scales of the {}, positive; one for each {}. sgl-kernel takes {}."
    dimensions = {
        **dimensions,
        "num_n_blocks": const(axes["num_n_blocks"], "Blocks of 128 output features; the last may be smaller."),
        "num_k_blocks": const(axes["num_k_blocks"], "Blocks of 128 input features."),
    }
    of_token = ("activations", "128 consecutive features of a token", "them column by column: stride(0) is 1")
    of_block = ("weights", "block of 128 x 128", "this memory as [num_k_blocks, num_n_blocks], column by column")
    inputs = {
        "A": tensor(["m", "k"], codes, "Activations as codes, one row per token."),
        "B": tensor(["n", "k"], codes, "Weights as codes, one row per output feature."),
        "A_scale": tensor(["m", "num_k_blocks"], "float32", scales.format(*of_token)),
        "B_scale": tensor(["num_n_blocks", "num_k_blocks"], "float32", scales.format(*of_block)),
    }
    outputs = {"C": tensor(["m", "n"], "bfloat16", "Product of the scaled matrices.")}
    description = f"Linear layer in block-scaled fp8, C = (A A_scale) @ (B B_scale).T, {sizes}"
    constraints = ("k == num_k_blocks * 128", "num_n_blocks == (n + 127) // 128")
    return document(description, needs, ("quantization:fp8_block_scale",), dimensions, inputs, outputs, constraints)


BIASES = {"attention_bias", "qkv_bias"}
FIELDS = GROUPED | LATENT | WIDTHS | BIASES | {"vocab_size", "final_logit_softcapping", *QUANTIZATION}
RECIPE = Recipe("gemm", (BF16, BIAS, FP8), frozenset({*BLOCK_SCALED, *SPECIAL}), FIELDS, needs, describe)
