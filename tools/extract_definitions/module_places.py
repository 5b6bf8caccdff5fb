"""The names of a model's modules, in SGLang and in the files of a checkpoint, for each op and layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tools.extract_definitions.models import Model
from tools.extract_definitions.needs import Request

EXPERTS = "experts"
ATTENTION, MLP, MIXTURE = "self_attn", "mlp", "block_sparse_moe"
#: Linear layers of the attention.
PROJECTIONS = (
    *("qkv_proj", "o_proj", "q_proj", "q_b_proj", "kv_b_proj"),
    *("kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa"),
)
FEED_FORWARD = ("gate_up_proj", "down_proj")
SHARED = ("shared_experts", "shared_expert")
#: Op -> what it is in the files of a checkpoint, if that is not one module of this name.
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
#: Modules that SGLang never quantises, by the module that holds them; "" is the layer.
NEVER = {
    "": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ATTENTION: ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm", "rotary_emb", "sinks"),
    MLP: ("gate", "gate.e_score_correction_bias", "router", "shared_expert_gate"),
    MIXTURE: ("gate",),
}
OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
#: Fields that give a mixture of experts dense layers between the others.
MIXED = ("mlp_only_layers", "decoder_sparse_step", "moe_layer_freq")


@dataclass(frozen=True)
class Place:
    """A module of SGLang's model, and the modules of a checkpoint's files that it is made of."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Modules:
    """The modules of a model.

    Attributes:
        of: op -> its modules, one for each layer that runs it.
        names: the names of all modules, in SGLang and in a checkpoint's files, one per line.
        layers: the number of layers.
        problem: why the modules are not known; "" if they are.
    """

    of: Mapping[str, Sequence[Place]] = field(default_factory=dict)
    names: str = ""
    layers: int = 0
    problem: str = ""


def placed_modules(request: Request, model: Model, entries: Sequence[str]) -> Modules:
    """The modules of a model, to which `entries` refer.

    Args:
        request: the model's code.
        model: the whole model.
        entries: names of modules. If one names a layer by its number, the number of layers must be known.
    """
    first = model.count("first_k_dense_replace")
    layers = model.count("num_hidden_layers")
    if not layers:
        if any(re.search(r"\d", one) for one in entries):
            return Modules(problem="the configuration lacks the field num_hidden_layers; add it")
        layers = first + 1  # each layer is like another
    places: dict[str, list[Place]] = {}
    for op, place in _places(request, model, layers):
        places.setdefault(op, []).append(place)
    names = [*OUTSIDE, *_never(layers)]
    names += [name for of_op in places.values() for place in of_op for name in (place.name, *place.parts)]
    return Modules(places, "\n".join(names), layers)


def _places(request: Request, model: Model, layers: int) -> Iterator[tuple[str, Place]]:
    """Each op with its place in a layer, where the code shows that modules have their attributes' names."""
    dense, sparse = _dense_and_sparse(model, layers)
    mixture = MIXTURE if MIXTURE in request.usage.code.modules else MLP
    shared = [f"{mixture}.{one}" for one in SHARED if _has_shared(model) and _is_named(request, one)]
    for layer in range(layers):
        holders = [ATTENTION, *([MLP] if layer in dense else []), *(shared if layer in sparse else [])]
        for holder in holders:
            for op in PROJECTIONS if holder == ATTENTION else FEED_FORWARD:
                if all(_is_named(request, attribute) for attribute in (holder.rpartition(".")[2], op)):
                    yield op, _place(f"model.layers.{layer}.{holder}", op, PARTS.get(op, (op,)))
        if layer in sparse and _is_named(request, mixture) and _is_named(request, EXPERTS):
            yield (
                EXPERTS,
                _place(f"model.layers.{layer}.{mixture}", EXPERTS, _parts_of_experts(request, mixture, shared)),
            )


def _place(holder: str, op: str, parts: Iterable[str]) -> Place:
    return Place(f"{holder}.{op}", tuple(f"{holder}.{part}" for part in parts))


def _parts_of_experts(request: Request, mixture: str, shared: Sequence[str]) -> Iterator[str]:
    """The projections of the first expert, and those of the shared experts where SGLang may make them one of these."""
    names = ("w1", "w2", "w3") if mixture == MIXTURE else ("gate_proj", "up_proj", "down_proj")
    yield from (f"{EXPERTS}.0.{name}" for name in names)
    if any("num_fused_shared_experts" in text for text in request.usage.code.modules[EXPERTS]):
        yield from (f"{one.rpartition('.')[2]}.{name}" for one in shared for name in names)


def _has_shared(model: Model) -> bool:
    return any(model.count(name) for name in ("n_shared_experts", "shared_expert_intermediate_size"))


def _is_named(request: Request, attribute: str) -> bool:
    texts = request.usage.code.modules.get(attribute, ())
    return bool(texts) and all(f"add_prefix('{attribute}', prefix)" in text for text in texts)


def _dense_and_sparse(model: Model, layers: int) -> tuple[range, range]:
    """The layers with a dense feed-forward network, and those with experts; all are both where that is not clear."""
    if model.experts is None:
        return range(layers), range(0)
    if any(model.config.get(name) not in (None, 0, 1, []) for name in MIXED):
        return range(layers), range(layers)
    first = model.count("first_k_dense_replace")
    return range(first), range(first, layers)


def _never(layers: int) -> Iterator[str]:
    for layer in range(layers):
        for holder, names in NEVER.items():
            yield from (".".join(filter(None, ("model.layers", str(layer), holder, name))) for name in names)
