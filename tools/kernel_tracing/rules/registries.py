"""Names of registries: how a dict's name becomes the name of the choice that its keys make."""

from __future__ import annotations

from tools.kernel_tracing.rules.platforms import name_words

# Words that say that a name is a registry, not what it chooses.
_FILLER = {"base", "registry", "methods", "method", "handlers", "map", "mapping", "dict", "table", "classes", "to"}
_KINDS = {"moe": "MoE layer", "mlp": "dense layer"}


def dimension(name: str) -> str:
    """ATTENTION_BACKENDS -> attention_backend, BASE_QUANTIZATION_METHODS -> quantization; "" if nothing is left."""
    words = [word for word in name_words(name) if word not in _FILLER]
    if not words:
        return ""
    words[-1] = words[-1].removesuffix("s") if not words[-1].endswith("ss") else words[-1]
    return "_".join(words)


def kind(class_name: str) -> str:
    """What a layer's class name says about the layer: "MoE layer"."""
    words = name_words(class_name)
    mixed = class_name[-3:].lower()
    if mixed in _KINDS and not {"method", "config"} & set(words):
        return _KINDS[mixed]
    return ""
