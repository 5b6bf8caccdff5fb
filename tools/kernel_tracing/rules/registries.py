"""Names of choices: how a dict, an enumeration, a parameter or a class becomes the name of what it chooses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tools.kernel_tracing.rules.platforms import name_words

# Words that say that a name is a registry, not what it chooses.
_FILLER = {"base", "registry", "methods", "method", "handlers", "map", "mapping", "dict", "table", "classes", "to"}
_KINDS = {"moe": "MoE layer", "mlp": "dense layer"}

# The class whose fields are what a user of the framework sets.
SETTINGS_CLASS = "ServerArgs"
# Names of what holds them: `self.server_args.enable_x`, `get_global_server_args().enable_x`.
SETTINGS_HOLDER = "server_args"
# Members of ForwardMode that no other batch has.
_SPECULATIVE = re.compile(r"TARGET_VERIFY|DRAFT_EXTEND\w*")


def dimension(name: str) -> str:
    """ATTENTION_BACKENDS -> attention_backend, BASE_QUANTIZATION_METHODS -> quantization; "" if nothing is left."""
    words = [word for word in name_words(name) if word not in _FILLER]
    if not words:
        return ""
    words[-1] = words[-1].removesuffix("s") if not words[-1].endswith("ss") else words[-1]
    return "_".join(words)


def enum_dimension(name: str, settings: Iterable[str]) -> str:
    """MoeA2ABackend -> moe_a2a_backend, SpeculativeAlgorithm -> speculative; spelled like a setting if there is one."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", name).lower()
    spelled = {setting.replace("_", ""): setting for setting in settings}
    return spelled.get(words.replace("_", ""), words).removesuffix("_algorithm")


def setting_of(name: str, settings: Iterable[str]) -> str:
    """The setting that a field or parameter holds: its own name, or the shortest that ends or begins alike; else "".

    `current_attention_backend` and `attention_backend`, `runner_backend_name` and `moe_runner_backend`.
    """
    bare = name.removeprefix("_").removesuffix("_name")
    known = sorted(settings, key=lambda setting: (len(setting), setting))
    if bare in known:
        return bare
    if "_" not in bare:
        return ""
    longer = [setting for setting in known if setting.endswith(f"_{bare}")]
    shorter = [setting for setting in known if "_" in setting and bare.endswith(f"_{setting}")]
    return next(iter(longer or shorter[::-1]), "")


def asked(path: str, settings: Iterable[str]) -> str:
    """The setting that an expression reads: `server_args.sampling_backend`, `quant_config.get_name()`; else ""."""
    owner, _, name = path.removesuffix("()").rpartition(".")
    if name == "get_name" and "quant" in name_words(owner.rpartition(".")[2]):
        return "quantization"
    return setting_of(name, settings)


def is_configuration(path: str) -> bool:
    """Whether an expression is the quantisation's configuration: None without one, else what has the name."""
    return path.rpartition(".")[2] == "quant_config"


def kind(class_name: str) -> str:
    """What a layer's class name says about the layer: "MoE layer"."""
    words = name_words(class_name)
    mixed = class_name[-3:].lower()
    if mixed in _KINDS and not {"method", "config"} & set(words):
        return _KINDS[mixed]
    return ""


def is_speculative(enum: str, members: Iterable[str]) -> bool:
    """Whether these modes of a batch occur in speculative decoding only."""
    return enum == "ForwardMode" and all(_SPECULATIVE.fullmatch(member) for member in members)
