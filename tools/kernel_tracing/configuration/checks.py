"""What a release and a model allow: values of ServerArgs, classes of models, and parallel sizes."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tools.kernel_tracing.configuration.requested import ConfigurationError, check_fields
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.sources import SourceTree

#: Annotations of ServerArgs -> the types that a value may have, and these in words.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}
_POSITIVE = (
    *("tp_size", "ep_size", "dp_size", "pp_size"),
    *("page_size", "context_length", "max_total_tokens", "max_running_requests"),
)
#: Fields of a model's configuration that say how many experts routing chooses from.
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_CLASS = re.compile(r"^class (\w+)", re.M)


def check_settings(settings: Mapping[str, Any], sources: SourceTree) -> None:
    """Checks that a release has these fields of ServerArgs, and that it takes these values.

    Raises: ConfigurationError, which names the setting, the value and what is allowed.
    """
    check_fields(settings, sources)
    module = serving_steps.SERVER_ARGS.rpartition(".")[0]
    if module not in sources.modules:
        return
    tree = sources.tree(module)
    types, choices = _annotations(tree), _choices(tree)
    for name, value in settings.items():
        if name in serving_steps.SETTINGS and serving_steps.SETTINGS[name] is value:  # what every configuration sets
            continue
        text = str(value).lower() if isinstance(value, bool) else value
        annotation = types.get(name, "")
        plain = annotation.removeprefix("Optional[").removesuffix("]")
        if value is None and plain != annotation:
            continue
        allowed, words = _TYPES.get(plain, ((object,), ""))
        if not isinstance(value, allowed) or (isinstance(value, bool) and words and bool not in allowed):
            raise ConfigurationError(f"{name}={text}: must be {words}")
        if name in _POSITIVE and settings[name] < 1:
            raise ConfigurationError(f"{name}={text}: must be a positive integer")
        if name in choices and value not in choices[name]:
            raise ConfigurationError(f"{name}={text}: choose one of {', '.join(map(str, choices[name]))}")


def check_model(config: Mapping[str, Any], settings: Mapping[str, Any], sources: SourceTree) -> None:
    """Checks that a release has the class of a model, and that its heads and experts can be divided over the ranks.

    Raises: ConfigurationError.
    """
    name = config["architectures"][0]
    modules = [one for one in sources.modules if one.startswith(serving_steps.MODELS)]
    classes = {found for module in modules for found in _CLASS.findall(sources.text(module))}
    if name not in classes:
        close = difflib.get_close_matches(name, sorted(classes), 1)
        hint = f"; did you mean {close[0]}?" if close else "; name the class of a model in 'architectures'"
        raise ConfigurationError(f"architectures={name}: no file in {serving_steps.MODEL_FILES} defines it{hint}")
    check_experts(config, settings, name)
    heads = config.get("num_attention_heads")
    if heads is None:
        return
    shared = settings.get("dp_size", 1) if settings.get("enable_dp_attention") else 1
    ranks = max(settings.get("tp_size", 1) // shared, 1)
    kv_heads = None if config.get("kv_lora_rank") else config.get("num_key_value_heads") or heads
    if problem := misfit(heads, kv_heads, ranks, name):
        others = listed(size for size in range(1, heads + 1) if not misfit(heads, kv_heads, size, name))
        raise ConfigurationError(f"tp_size={settings['tp_size']}: {problem}; choose from {others}")


def check_experts(config: Mapping[str, Any], settings: Mapping[str, Any], model: str) -> None:
    """Checks that the expert-parallel size divides the ranks, and the experts with their redundant copies.

    Raises: ConfigurationError.
    """
    size, ranks = settings.get("ep_size", 1), settings.get("tp_size", 1)
    if size <= 1:
        return
    if ranks % size:
        others = listed(divisors(ranks))
        raise ConfigurationError(f"ep_size={size}: EP {size} does not divide tp_size={ranks}; choose from {others}")
    experts = next((config[field] for field in EXPERTS if config.get(field)), None)
    if experts is None:
        raise ConfigurationError(f"ep_size={size}: {model} has no experts; leave it out")
    experts += settings.get("ep_num_redundant_experts", 0)
    if problem := expert_misfit(experts, size, model):
        raise ConfigurationError(f"ep_size={size}: {problem}")


def expert_misfit(experts: int, size: int, model: str) -> str:
    """Why the experts of a model cannot be divided over `size` ranks, and which sizes can; "" if they can."""
    if experts % size == 0:
        return ""
    return f"EP {size} does not divide the {experts} experts of {model}; choose from {listed(divisors(experts))}"


def divisors(number: int) -> list[int]:
    """The sizes that divide a number, in order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def listed(sizes: Iterable[int]) -> str:
    """Sizes as text."""
    return ", ".join(map(str, sizes))


def misfit(heads: int, kv_heads: int | None, size: int, model: str) -> str:
    """Why the heads of a model cannot be divided over `size` ranks; "" if they can.

    Args:
        heads: query heads.
        kv_heads: key-value heads, which are divided or copied; None for latent attention, which has none.
        size: the tensor-parallel size.
        model: the name of the model, for the reason.
    """
    if heads % size:
        return f"TP {size} does not divide the {heads} query heads (num_attention_heads) of {model}"
    if kv_heads is not None and kv_heads % size and size % kv_heads:
        return f"TP {size} does not fit the {kv_heads} key-value heads (num_key_value_heads) of {model}"
    return ""


def _annotations(tree: ast.Module) -> dict[str, str]:
    """Field of ServerArgs -> its annotation."""
    name = serving_steps.SERVER_ARGS.rpartition(".")[2]
    return {
        line.target.id: ast.unparse(line.annotation)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _choices(tree: ast.Module) -> dict[str, list[Any]]:
    """Field of ServerArgs -> what its option may be, where the source lists that."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: dict[str, list[Any]] = {}
    for option, value in _options(tree):
        listed = constants.get(value.id, value) if isinstance(value, ast.Name) else value
        try:
            found[option] = list(ast.literal_eval(listed))
        except (ValueError, TypeError):  # computed when the server starts
            continue
    return found


def _options(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Name and `choices=` of each option of the command line; the others take any value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            for keyword in node.keywords:
                if keyword.arg == "choices":
                    yield from ((name.lstrip("-").replace("-", "_"), keyword.value) for name in names)
