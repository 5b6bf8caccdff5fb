"""The configurations that are run, dry or on a GPU: ``configurations.json``, and for today ``dry_run/set.json``.

They list models with few layers and, for each configuration, the settings of the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashinfer_trace.format import json_source

#: The list of this checkout.
PATH = Path(__file__).with_name("configurations.json")
#: Models and configurations of today's release that it lacks: ``set`` names what is run dry, ``gpu`` what is recorded.
SET = Path(__file__).parents[1] / "dry_run" / "set.json"
MODELS = Path(__file__).resolve().parents[2] / "models"
#: Lengths of the prompts of one batch, unless a configuration has its own.
PROMPTS = (700, 512, 300, 256, 129, 64, 17, 1)
#: Fields of a model's configuration that say how many experts routing chooses from.
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


class ConfigurationError(ValueError):
    """A configuration, or a list of them, cannot be used. The message names the file or the part, and the fix."""


@dataclass(frozen=True)
class Model:
    """A model with few layers.

    Attributes:
        name: name in ``configurations.json``.
        config: the content of its ``config.json``: real sizes, few layers.
        layers: for each layer that is run, how many layers of the whole model are like it.
        published: the architecture that the model's publisher names, if SGLang is given another one.
        beside: other files of its folder, such as ``hf_quant_config.json``.
    """

    name: str
    config: Mapping[str, Any]
    layers: tuple[int, ...]
    published: str = ""
    beside: Sequence[Path] = ()

    @property
    def architecture(self) -> str:
        """The architecture as the model's publisher names it."""
        return self.published or str(self.config["architectures"][0])


@dataclass(frozen=True)
class Configuration:
    """One configuration.

    Attributes:
        name: its name in a trace, and that of its recording in ``traces/runtime/``.
        model: what is run.
        server: SGLang's server arguments that differ from this tool's.
        environment: environment variables that are set.
        gpu: the generation of the GPU.
        recorded: whether it is also run on a GPU.
        prompts: length of each prompt of the batch, in tokens.
        phases: what is recorded: prefill, decode, and extend (a prefill of which half is cached).
        gpus: how many GPUs it needs; one process runs on each.
        memory_gib: GPU memory that it uses, per GPU.
        limit_s: seconds after which it is ended.
        stand_ins: kernels that are replaced by functions that return zeros.
    """

    name: str
    model: Model
    server: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu: str = "sm90"
    recorded: bool = True
    prompts: tuple[int, ...] = PROMPTS
    phases: tuple[str, ...] = ("prefill", "decode")
    gpus: int = 1
    memory_gib: int = 16
    limit_s: int = 240
    stand_ins: tuple[str, ...] = ()

    @property
    def quantization(self) -> str:
        """The format of the weights: of the server arguments, or of the model; "none" for 16 bits."""
        config = self.model.config.get("quantization_config") or {}
        return str(self.server.get("quantization") or config.get("quant_method") or "none")

    def about(self, gpus: int, resolved: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
        """The description of a run: every field of schema/runtime_trace.schema.json but the tables and the calls."""
        return {
            "configuration": self.name,
            "model": self.model.name,
            "model_config": dict(self.model.config),
            "layers": list(self.model.layers),
            "server": dict(self.server),
            "environment": dict(self.environment),
            "prompts": list(self.prompts),
            "gpus": gpus,
            "stand_ins": list(self.stand_ins),
            "resolved": dict(resolved),
            "versions": dict(versions),
        }


def models(path: Path = PATH) -> dict[str, Model]:
    """The models of a list, by name.

    Raises:
        ConfigurationError: the list is malformed.
    """
    return _loaded(path)[0]


def configurations(path: Path = PATH) -> dict[str, Configuration]:
    """The configurations of a list, by name.

    Raises:
        ConfigurationError: the list is malformed.
    """
    return _loaded(path)[1]


def listed(name: str) -> Configuration:
    """A configuration of either list.

    Raises:
        ConfigurationError: neither has one of this name, or a list is malformed.
    """
    known = configurations() | configurations(SET)
    if name not in known:
        raise ConfigurationError(f"no configuration {name!r}; there are {', '.join(known)}")
    return known[name]


def named(key: str) -> list[str]:
    """The names of a list of `SET`: "set", or "gpu"."""
    found: list[str] = json_source.load_object(SET)[key]
    return found


def made(model: str, settings: Mapping[str, Any], path: Path = PATH) -> Configuration:
    """A configuration that no list has: a model of the list with server arguments.

    Raises:
        ConfigurationError: the model is unknown, or its experts cannot be divided over `ep_size` ranks.
    """
    known = models(path)
    if model not in known:
        raise ConfigurationError(f"{path}: no model {model!r}; it has {', '.join(sorted(known))}")
    given = dict(settings)
    one = known[model]
    if given.get("quantization") == "fp8":  # as in a checkpoint that is stored in fp8, with blocks of 128 x 128
        del given["quantization"]
        one = replace(one, config={**one.config, "quantization_config": FP8_BLOCKS})
    if isinstance(given.get("ep_size"), int):
        _check_experts(one.config, given, model)
    words = [f"{key}_{value}" for key, value in settings.items()]
    gpus = max(int(given.get("tp_size", 1)), 1)
    return Configuration("-".join([model, *words]), one, given, gpus=gpus, memory_gib=0, limit_s=600)


#: Weights in fp8 with a scale for each 128 x 128 block, as DeepSeek publishes them.
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _check_experts(config: Mapping[str, Any], settings: Mapping[str, Any], model: str) -> None:
    """Checks that the expert-parallel size divides the ranks, and the experts with their redundant copies.

    Raises: ConfigurationError.
    """
    size, ranks = settings["ep_size"], settings.get("tp_size", 1)
    if size <= 1:
        return
    if ranks % size:
        raise ConfigurationError(f"ep_size={size}: EP {size} does not divide tp_size={ranks}; {_choices(ranks)}")
    experts = next((config[field] for field in EXPERTS if config.get(field)), None)
    if experts is None:
        raise ConfigurationError(f"ep_size={size}: {model} has no experts; leave it out")
    experts += settings.get("ep_num_redundant_experts", 0)
    if experts % size:
        what = f"EP {size} does not divide the {experts} experts of {model}"
        raise ConfigurationError(f"ep_size={size}: {what}; {_choices(experts)}")


def _choices(number: int) -> str:
    return f"choose from {', '.join(str(size) for size in range(1, number + 1) if number % size == 0)}"


def _loaded(path: Path) -> tuple[dict[str, Model], dict[str, Configuration]]:
    try:
        document = json_source.load_object(path)
        known = dict(models(PATH)) if path == SET else {}
        known |= {name: _model(name, data) for name, data in document["models"].items()}
        runs = {name: _configuration(name, data, known) for name, data in document["configurations"].items()}
    except (json_source.JsonSourceError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path}: malformed ({error!r}); compare it with a neighboring entry") from None
    return known, runs


def _model(name: str, data: Mapping[str, Any]) -> Model:
    constants = json_source.load_object(MODELS / f"{data['constants']}.json")["config"] if "constants" in data else {}
    layers = tuple(data["layers"])
    common = {"num_hidden_layers": len(layers), "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    sizes = {key: value for key, value in constants.items() if key != "quantization_config"}
    published = constants.get("architectures", [""])[0]
    return Model(name, {**common, **sizes, **data["config"]}, layers, published)


def _configuration(name: str, data: Mapping[str, Any], known: Mapping[str, Model]) -> Configuration:
    model = known[data["model"]]
    changes = dict(data.get("config", {}))
    if data.get("weights") == "fp8_blocks":
        changes["quantization_config"] = FP8_BLOCKS
    plain = ("server", "environment", "gpu", "recorded", "gpus", "memory_gib", "limit_s")
    lists = ("prompts", "phases", "stand_ins")
    rest: dict[str, Any] = {key: data[key] for key in plain if key in data}
    rest |= {key: tuple(data[key]) for key in lists if key in data}
    return Configuration(name, replace(model, config={**model.config, **changes}), **rest)
