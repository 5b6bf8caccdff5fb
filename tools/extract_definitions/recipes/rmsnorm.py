"""RMSNorm of the hidden state, of latents and of each head, alone or after the residual addition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.recipes.fields import GROUPED
from tools.extract_definitions.recipes.unread import of_heads, reported, unread
from tools.extract_definitions.settings import over_all_heads
from tools.extract_definitions.words import alike, const, document, listed, models, plural, tensor, users, var

#: Families -> the kernels that normalise, and the ones that add the residual before.
KERNELS = {
    ("rmsnorm", "fused_add_rmsnorm_residual_out"): ("sgl-kernel:rmsnorm", "sgl-kernel:fused_add_rmsnorm"),
    ("gemma_rmsnorm", "gemma_fused_add_rmsnorm"): ("sgl-kernel:gemma_rmsnorm", "sgl-kernel:gemma_fused_add_rmsnorm"),
}
NORM = "sgl-kernel:rmsnorm"
#: What normalises instead of it with `--enable-deterministic-inference`, where one kernel for all heads is not used.
BATCH_INVARIANT = "triton:_rms_norm_kernel"
HIDDEN = (
    *("input_layernorm", "post_attention_layernorm", "norm", "prepare_attn", "prepare_mlp"),
    *("prepare_attn_and_capture_last_layer_outputs", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
LATENT = {
    "q_a_layernorm": ("q_lora_rank", "the compressed query (q_lora_rank)"),
    "kv_a_layernorm": ("kv_lora_rank", "the compressed key-value latent (kv_lora_rank)"),
}
HEAD, FUSED_HEADS = ("q_norm", "k_norm"), "fused_inplace_qknorm"
OF_HEADS = (*HEAD, FUSED_HEADS)
#: Ops of layers that call their norms themselves. Where the trace also has the other op, it is of the layers that the
#: model builds, which leave their norms to a LayerCommunicator; these are of the class that it derives from.
OF_LAYERS, COMMUNICATED = ("input_layernorm", "post_attention_layernorm"), "prepare_attn"
#: Epsilon -> suffix of the family's name. Epsilon is a constant of the reference.
EPSILONS = {1e-6: "", 1e-5: "_eps1e5"}
HEADS_FUSED = "fused_qknorm"
TENSOR_PARALLEL = (1, 2, 4, 8)
WITH_EPSILON = (*next(iter(KERNELS)), HEADS_FUSED)
FAMILIES = (*(f"{name}{suffix}" for name in WITH_EPSILON for suffix in EPSILONS.values()), *list(KERNELS)[1])


def needs(request: Request) -> Iterator[Need]:
    model = request.model

    def need(family: str, size: int, op: str, role: str, stages: tuple[str, ...]) -> Iterator[Need]:
        if name := _with_epsilon(request, family, op):
            yield Need(name, {"hidden_size": size}, Use(model, op, role), stages)

    if reported(request, (*HIDDEN, *LATENT, *OF_HEADS), unread(request, "residual_multiplier", [1])):
        return
    inherited = OF_LAYERS if request.usage.op(COMMUNICATED) else ()
    request.unused.update(dict.fromkeys(inherited, f"its layers call this norm in {COMMUNICATED} or prepare_mlp"))
    for (plain, fused), (norm, add_norm) in KERNELS.items():
        for op in HIDDEN:
            if op in inherited:
                continue
            if stages := request.stages(op, [norm]):
                yield from need(plain, model.size("hidden_size"), op, "the hidden state", stages)
            if stages := request.stages(op, [add_norm]):
                yield from need(fused, model.size("hidden_size"), op, "", stages)
    for op, (field, role) in LATENT.items():
        if field in model:
            request.expect(op, role)
        if not (stages := request.stages(op, [NORM])):
            continue
        if field in model:
            yield from need("rmsnorm", model.size(field), op, role, stages)
        else:
            request.unused[op] = f"{field} is not set"
    if "use_qk_norm" in request.usage.code.reads and not model.config.get("use_qk_norm"):
        request.unused.update(dict.fromkeys(OF_HEADS, "use_qk_norm is not set"))
        return
    if any(map(request.usage.op, OF_HEADS)) and reported(request, OF_HEADS, of_heads(request)):
        return
    for op in HEAD:
        if stages := request.stages(op, [NORM, BATCH_INVARIANT]):
            size, role = _of_heads(request, op)
            yield from need("rmsnorm", size, op, role, stages)
    yield from _fused_heads(request)


def _with_epsilon(request: Request, family: str, op: str) -> str:
    """The family with the epsilon of the model. If there is none, the op is reported as not covered, and it is ""."""
    model, field = request.model, "rms_norm_eps"
    if field not in model:
        request.uncovered[op] = f"the code needs the field {field}, which the configuration does not give"
        return ""
    epsilon = model.number(field)
    if (name := family + EPSILONS.get(epsilon, "_")) in FAMILIES:
        return name
    known = " and ".join(f"{one:g}" for one, suffix in EPSILONS.items() if family + suffix in FAMILIES)
    request.uncovered[op] = f"the families of {family} have an epsilon of {known}, and {field} is {epsilon:g}"
    return ""


def _fused_heads(request: Request) -> Iterator[Need]:
    """The norms of all heads of queries and keys in one kernel."""
    model, op = request.model, FUSED_HEADS
    if not (stages := request.stages(op)):
        return
    if not (name := _with_epsilon(request, HEADS_FUSED, op)):
        return
    for size in request.tensor_parallel(TENSOR_PARALLEL):
        axes = {
            "num_qo_heads": model.size("num_attention_heads") // size,
            "num_kv_heads": max(1, model.size("num_key_value_heads") // size),
            "head_dim": model.head_dim,
        }
        yield Need(name, axes, Use(model, op, tp=size), stages)


def _of_heads(request: Request, op: str) -> tuple[int, str]:
    """Features and role of a norm of queries or keys: of each head, or of all heads together where the code says so."""
    model = request.model
    if over_all_heads(request.usage.code.modules.get(op, ())):
        heads = model.size("num_attention_heads" if op == "q_norm" else "num_key_value_heads")
        return heads * model.head_dim, "all query heads (q_norm) or all key heads (k_norm) of a token together"
    return model.head_dim, "each head's query and key (q_norm, k_norm)"


def _describe_fused_heads(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    heads, kv_heads, size = axes["num_qo_heads"], axes["num_kv_heads"], axes["head_dim"]
    epsilon = "1e-5" if family.endswith("_eps1e5") else "1e-6"
    description = (
        f"RMSNorm of each head of queries and keys in bf16, epsilon {epsilon}, in one kernel. "
        f"{plural(heads, 'query head')} and {plural(kv_heads, 'key head')} of {size} features. {users(needs)}"
    )
    dimensions = {
        "num_tokens": var("Number of tokens of the batch."),
        "num_qo_heads": const(heads, "Query heads per rank."),
        "num_kv_heads": const(kv_heads, "Key heads per rank."),
        "head_dim": const(size, "Features that are normalised together."),
    }
    query, key = (["num_tokens", of, "head_dim"] for of in ("num_qo_heads", "num_kv_heads"))
    inputs = {
        "q": tensor(query, "bfloat16", "Queries."),
        "k": tensor(key, "bfloat16", "Keys."),
        "q_weight": tensor(["head_dim"], "bfloat16", "Weight of queries."),
        "k_weight": tensor(["head_dim"], "bfloat16", "Weight of keys."),
    }
    outputs = {
        "q_out": tensor(query, "bfloat16", "Normalised queries."),
        "k_out": tensor(key, "bfloat16", "Normalised keys."),
    }
    return document(description, needs, ("fused",), dimensions, inputs, outputs)


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    if family.startswith(HEADS_FUSED):
        return _describe_fused_heads(family, axes, needs)
    size, epsilon = axes["hidden_size"], "1e-5" if family.endswith("_eps1e5") else "1e-6"
    of_heads = all(need.use.op in HEAD and size == need.use.model.head_dim for need in needs)
    rows = (
        "Number of rows: all heads of all tokens of the batch."
        if of_heads
        else "Number of rows: all tokens of the batch."
    )
    dimensions = {
        "batch_size": var(rows),
        "hidden_size": const(size, "Features per row; the norm runs over all of them."),
    }
    matrix = ["batch_size", "hidden_size"]
    weight = {"weight": tensor(["hidden_size"], "bfloat16", "Learned scale of each feature.")}
    name, scale = "RMSNorm", "weight"
    if gemma := family.startswith("gemma"):
        name, scale = "RMSNorm of the Gemma models", "1 + weight"
        weight = {"weight": tensor(["hidden_size"], "bfloat16", "Learned scale of each feature, less 1.")}
    if "fused" in family:
        description = (
            f"Residual addition and {name} over {size} features in bf16, eps {epsilon}: residual_out is the sum, "
            f"output its norm{', scaled by 1 + weight' if gemma else ''}. The norm reads the sum before rounding. The "
            f"kernels write both results over their inputs. Used between the blocks of {models(needs)}."
        )
        inputs = {
            "hidden_states": tensor(matrix, "bfloat16", "Output of the previous block, one row per token."),
            "residual": tensor(matrix, "bfloat16", "Residual stream before the addition."),
        }
        outputs = {
            "output": tensor(matrix, "bfloat16", f"Norm of the sum, scaled by {scale}."),
            "residual_out": tensor(
                matrix, "bfloat16", "Residual stream after the addition: hidden_states + residual, rounded once."
            ),
        }
        return document(description, needs, (), dimensions, inputs | weight, outputs)
    description = (
        f"{name} over {size} features in bf16, {'scaled by 1 + weight, ' if gemma else ''}eps {epsilon}, rounded once, "
        "at the end. "
        f"It normalises {'; '.join(f'{listed(roles)} in {names}' for names, roles in alike(needs))}."
    )
    row = "Activations, one row per head of each token." if of_heads else "Activations, one row per token."
    inputs = {"hidden_states": tensor(matrix, "bfloat16", row)}
    outputs = {"output": tensor(matrix, "bfloat16", "Normalised and scaled activations.")}
    return document(description, needs, (), dimensions, inputs | weight, outputs)


RECIPE = Recipe(
    op_type="rmsnorm",
    families=FAMILIES,
    kernels=frozenset({"jit:qknorm", *(kernel for kernels in KERNELS.values() for kernel in kernels)}),
    fields=GROUPED | {"rms_norm_eps", "q_lora_rank", "use_qk_norm", "residual_multiplier"},
    needs=needs,
    document=describe,
)
