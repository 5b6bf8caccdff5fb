"""Names of choices: how the name of a dict, an enumeration, a parameter or a class becomes that of a choice."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tools.kernel_tracing.rules.platforms import name_words

# Words in the name of a registry that do not say what it chooses.
_FILLER = {"base", "registry", "methods", "method", "handlers", "map", "mapping", "dict", "table", "classes", "to"}
_KINDS = {"moe": "MoE layer", "mlp": "dense layer"}

# The class whose fields are the settings of the framework's users.
SETTINGS_CLASS = "ServerArgs"
# The name of what holds these settings: `self.server_args.enable_x`, `get_global_server_args().enable_x`.
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
    """The setting that a field or parameter holds: the one of the same name, or one that differs by a prefix, or "".

    `current_attention_backend` holds `attention_backend`; `runner_backend_name` holds `moe_runner_backend`.
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
    """The setting that an expression reads, as `server_args.sampling_backend` or `quant_config.get_name()`, or ""."""
    owner, _, name = path.removesuffix("()").rpartition(".")
    if name == "get_name" and "quant" in name_words(owner.rpartition(".")[2]):
        return "quantization"
    return setting_of(name, settings)


def is_configuration(path: str) -> bool:
    """Whether an expression is the quantisation configuration, which is None without quantisation."""
    return path.rpartition(".")[2] == "quant_config"


def kind(class_name: str) -> str:
    """The kind of layer according to its class name, such as "MoE layer", or ""."""
    words = name_words(class_name)
    mixed = class_name[-3:].lower()
    if mixed in _KINDS and not {"method", "config"} & set(words):
        return _KINDS[mixed]
    return ""


def is_speculative(enum: str, members: Iterable[str]) -> bool:
    """Whether these modes of a batch occur only in speculative decoding."""
    return enum == "ForwardMode" and all(_SPECULATIVE.fullmatch(member) for member in members)
