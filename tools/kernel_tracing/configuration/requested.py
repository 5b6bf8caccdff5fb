"""Configurations as they are written on the command line, and as models/ and Hugging Face describe models."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from tools.kernel_tracing.evaluator.serving import Configuration
from tools.kernel_tracing.rules import environments, serving_steps

MODELS = Path("models")
# Short names of parallel sizes.
_SHORT = {"tp": "tp_size", "ep": "ep_size", "dp": "dp_size", "pp": "pp_size"}


class ConfigurationError(ValueError):
    """A configuration, or a list of them, cannot be used. The message names the file or the part, and the fix."""


def parse(text: str, models: Path = MODELS) -> Configuration:
    """The configuration that `model=deepseek-v3,attention_backend=flashinfer,gpu=sm90,tp=8` describes.

    Args:
        text: `name=value` parts, separated by commas. `model` is a file of models/ (without `.json`) or the path of a
            Hugging Face config.json, `gpu` a generation; names in capitals are environment variables, all others are
            fields of ServerArgs. `quantization=none` removes the quantisation of the model's own configuration.
        models: the directory of the models.

    Raises: ConfigurationError.
    """
    parts: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise ConfigurationError(f"{part!r} is not name=value; separate several settings by commas")
        parts[_SHORT.get(name, name)] = value
    if "model" not in parts:
        raise ConfigurationError(f"{text!r} names no model; add model=NAME (see {models}) or model=PATH/config.json")
    gpu = parts.pop("gpu", "sm90")
    if gpu not in environments.CAPABILITIES:
        raise ConfigurationError(f"gpu={gpu} is not known; choose one of {', '.join(environments.CAPABILITIES)}")
    model = model_config(parts.pop("model"), models)
    environment = {name: parts.pop(name) for name in list(parts) if name.isupper()}
    if parts.get("quantization") == "none":
        del parts["quantization"]
        model.pop("quantization_config", None)
    settings = serving_steps.SETTINGS | {name: _value(value) for name, value in parts.items()}
    return Configuration(model, settings, gpu, serving_steps.ENVIRONMENT | environment, text)


def model_config(name: str, models: Path = MODELS) -> dict[str, Any]:
    """A model's config.json, shortened to as many layers as it has kinds of layers.

    Raises: ConfigurationError for a file that does not exist or describes no model.
    """
    path = Path(name) if name.endswith(".json") else models / f"{name}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(sorted(file.stem for file in models.glob("*.json")))
        raise ConfigurationError(f"{path}: no such file; name a config.json, or one of {known}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: not JSON ({error})") from None
    config = document.get("config", document) if isinstance(document, dict) else {}
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConfigurationError(f"{path}: names no architectures; give the config.json of a model")
    return shortened(config)


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration, completed and with as few layers as show every kind of layer."""
    config = completed(config)
    dense = min(int(config.get("first_k_dense_replace") or 0), 1)
    return config | {"num_hidden_layers": 2, "first_k_dense_replace": dense}


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration, with what models/ and some publishers leave out."""
    config = serving_steps.MODEL_DEFAULTS | config
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
