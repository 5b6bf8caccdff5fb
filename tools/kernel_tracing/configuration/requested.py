"""Configurations as they are written on the command line, and as models/ and Hugging Face describe models."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.coverage import plain_name
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from tools.kernel_tracing.evaluator.serving import Configuration
from tools.kernel_tracing.rules import environments, serving_steps
from tools.kernel_tracing.source.sources import SourceTree

MODELS = Path("models")
#: Most characters of a value that a message shows.
LONGEST_VALUE = 200
# Short names of parallel sizes.
_SHORT = {"tp": "tp_size", "ep": "ep_size", "dp": "dp_size", "pp": "pp_size"}


# Fields of a model's configuration that are sizes or numbers of something, or absent.
_SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
# The same where 0 says that the model has none.
_COUNTS = (
    *("first_k_dense_replace", "n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts"),
    *("num_experts_per_tok", "n_group", "topk_group"),
)


class ConfigurationError(ValueError):
    """A configuration, or a list of them, cannot be used. The message names the file or the part, and the fix."""


def parse(text: str, models: Path = MODELS) -> Configuration:
    """The configuration that `model=deepseek-v3,attention_backend=flashinfer,gpu=sm90,tp=8` describes.

    Args:
        text: `name=value` parts, separated by commas. `model` is a file of models/ (without `.json`; capitals, `_`,
            `.` and `-` make no difference), or the path of a Hugging Face config.json or of the directory of one;
            `gpu` is a generation; names in capitals are environment variables, all others are fields of ServerArgs.
            `quantization=none` removes the quantisation of the model's own configuration.
        models: the directory of the models.

    Raises: ConfigurationError.
    """
    parts = _parts(text)
    if "model" not in parts:
        raise ConfigurationError(f"{text!r} names no model; add model=NAME (see {models}) or model=PATH/config.json")
    model = model_config(parts.pop("model"), models)
    if parts.get("quantization") == "none":
        del parts["quantization"]
        model.pop("quantization_config", None)
    server = _server(parts)
    settings = serving_steps.SETTINGS | dict(server.settings)
    return Configuration(model, settings, server.gpu, serving_steps.ENVIRONMENT | dict(server.environment), text)


@dataclass(frozen=True)
class Server:
    """How a model is served.

    Attributes:
        settings: fields of ServerArgs.
        gpu: the generation of the GPU.
        environment: environment variables.
    """

    settings: Mapping[str, Any]
    gpu: str
    environment: Mapping[str, str]


def parse_server(text: str) -> Server:
    """The part of a configuration that is not the model: `attention_backend=flashinfer,gpu=sm90,tp=8`.

    Raises: ConfigurationError, also for a model.
    """
    parts = _parts(text)
    if "model" in parts:
        raise ConfigurationError(f"{text!r} names a model, which is given elsewhere; leave out model={parts['model']}")
    return _server(parts)


def check_fields(settings: Iterable[str], sources: SourceTree) -> None:
    """Checks that the ServerArgs of a release have these fields; those that every configuration sets are left out.

    Raises: ConfigurationError.
    """
    module = serving_steps.SERVER_ARGS.rpartition(".")[0]
    body = sources.tree(module).body if module in sources.modules else []
    declared = [
        line.target.id
        for node in body
        if isinstance(node, ast.ClassDef) and node.name == serving_steps.SERVER_ARGS.rpartition(".")[2]
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    for name in sorted(set(settings) - {*declared, *serving_steps.SETTINGS}) if declared else ():
        close = difflib.get_close_matches(name, declared, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigurationError(f"{name}: {module} of these sources has no such field{hint}")


def _parts(text: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise ConfigurationError(f"{part!r} is not name=value; separate several settings by commas")
        name = _SHORT.get(name, name)
        if name in parts:
            raise ConfigurationError(f"{part!r}: {name} is already {parts[name]!r}; give each setting once")
        parts[name] = value
    return parts


def _server(parts: Mapping[str, str]) -> Server:
    gpu = parts.get("gpu", "sm90")
    if gpu not in environments.CAPABILITIES:
        raise ConfigurationError(f"gpu={gpu} is not known; choose one of {', '.join(environments.CAPABILITIES)}")
    environment = {name: value for name, value in parts.items() if name.isupper()}
    settings = {name: _value(value) for name, value in parts.items() if name != "gpu" and name not in environment}
    return Server(settings, gpu, environment)


def model_config(name: str, models: Path = MODELS) -> dict[str, Any]:
    """A model's config.json, shortened to as many layers as it has kinds of layers.

    Raises: ConfigurationError for a file that does not exist, or describes no model of text alone.
    """
    known = {plain_name(file.stem): file for file in models.glob("*.json")}
    path = Path(name) if name.endswith(".json") else known.get(plain_name(name), models / f"{name}.json")
    if plain_name(name) not in known and Path(name).is_dir():
        path = Path(name) / "config.json"
    if not path.exists():
        names = ", ".join(sorted(file.stem for file in known.values()))
        raise ConfigurationError(f"{path}: no such file; name a config.json, or one of {names}")
    try:
        document = load_object(path)
    except JsonSourceError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    config = document.get("config", document)
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConfigurationError(f"{path}: names no architectures; give the config.json of a model")
    _check_constants(path, config)
    check_parts(config, str(path))
    return shortened(config)


def check_parts(config: Mapping[str, Any], name: str) -> None:
    """Checks that the sizes of a model are its own, not those of the text model that is a part of it.

    Raises: ConfigurationError.
    """
    parts = [field for field, value in config.items() if isinstance(value, dict) and "hidden_size" in value]
    if parts and "hidden_size" not in config:
        text = next((part for part in parts if not part.startswith(("vision", "audio"))), parts[0])
        within = config[text].get("architectures")
        whose = within[0] if isinstance(within, list) and within else "the class of the text model"
        raise ConfigurationError(
            f"{name}: the sizes of {config['architectures'][0][:LONGEST_VALUE]} are in its {_shown(text)}; models of "
            "several parts are not evaluated: give a config.json with the fields of "
            f"{_shown(text)} and 'architectures': [{str(whose)[:LONGEST_VALUE]}]"
        )


def _shown(value: Any) -> str:
    """A value of a file in a message: cut, for it may be of any length."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _check_constants(path: Path, config: Mapping[str, Any]) -> None:
    named = config["architectures"]
    if not (isinstance(named, list) and isinstance(named[0], str)):
        raise ConfigurationError(f"{path}: the field 'architectures' is {_shown(named)}; it must list one class")
    for field in (*_SIZES, *_COUNTS):
        value = config.get(field)
        least = 0 if field in _COUNTS else 1
        if value is not None and (type(value) is not int or value < least):
            kind = "an integer that is not negative" if field in _COUNTS else "a positive integer"
            raise ConfigurationError(f"{path}: the field {field!r} is {_shown(value)}; it must be {kind}")


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration, completed and with as few layers as show every kind of layer."""
    config = completed(config)
    dense = min(int(config.get("first_k_dense_replace") or 0), 1)
    return config | {"num_hidden_layers": 2, "first_k_dense_replace": dense}


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration as SGLang loads it, with what models/ and some publishers leave out."""
    named = config.get("architectures") or [""]
    config = serving_steps.MODEL_DEFAULTS | config | serving_steps.REWRITTEN.get(named[0], {})
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        defaults = serving_steps.QUANTIZATION_DEFAULTS.get(str(quantization.get("quant_method")), {})
        config = config | {"quantization_config": defaults | quantization}
    return config


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
