"""Constants of a model, from `models/<name>.json` or from a configuration as Hugging Face publishes it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from flashinfer_trace.dataset.coverage import plain_name
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.naming import MAX_NAME
from tools.extract_definitions.errors import ExtractionError
from tools.kernel_tracing.configuration.checks import EXPERTS

TAG = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
#: Where the configuration of a model for images or speech, too, has that of its language model.
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
#: The fields that say how weights are quantised; SGLang reads the second where the first is absent.
QUANTIZATION = ("quantization_config", "compression_config")


class DeclaredFields(Mapping[str, Any]):
    """The part of a configuration that a recipe declares. Reading another field is a defect of the recipe.

    Args:
        config: the whole configuration.
        fields: the fields that may be read.
        reader: names the recipe in the error.
    """

    def __init__(self, config: Mapping[str, Any], fields: frozenset[str], reader: str) -> None:
        self.config, self.fields, self.reader = config, fields, reader

    def __getitem__(self, field: str) -> Any:
        if field not in self.fields:
            raise ExtractionError(
                f"the recipe {self.reader} reads {field!r}, which its `fields` do not declare; add it"
            )
        return self.config[field]

    def __iter__(self) -> Iterator[str]:
        return (field for field in self.config if field in self.fields)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Model:
    """The constants that decide the sizes of a model's kernels.

    Attributes:
        name: value of the tag `model:<name>`.
        title: the name as its authors write it.
        config: the fields of its configuration.
        path: the file that they come from.
        quantised: the `quantization_config` of each repository that publishes the model in other numbers.
        same_as: the name of another model with the same configuration; "" if the file names none.
    """

    name: str
    title: str
    config: Mapping[str, Any]
    path: Path
    quantised: tuple[Mapping[str, Any], ...] = ()
    same_as: str = ""

    def __post_init__(self) -> None:
        """A window that no position exceeds is none."""
        if isinstance(self.config, dict):
            window, positions = (self.config.get(field) for field in ("sliding_window", "max_position_embeddings"))
            if isinstance(window, int) and isinstance(positions, int) and window >= positions:
                object.__setattr__(self, "config", {**self.config, "sliding_window": None})

    def __contains__(self, field: str) -> bool:
        return self.config.get(field) is not None

    def size(self, field: str) -> int:
        """A field that must be a positive integer."""
        value = self._require(field)
        if type(value) is not int or value < 1:
            raise ExtractionError(f"{self.path}: the field {field!r} is {shown(value)}; it must be a positive integer")
        return value

    def count(self, field: str) -> int:
        """The size or number of something that a model may lack: 0 where the field is 0, null or absent."""
        value = self.config.get(field)
        return 0 if value is None or (type(value) is int and value == 0) else self.size(field)

    def number(self, field: str) -> float:
        """A field that must be a positive number."""
        value = self._require(field)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ExtractionError(f"{self.path}: the field {field!r} is {shown(value)}; it must be a positive number")
        return float(value)

    def text(self, field: str) -> str:
        """A field that must be a string."""
        value = self._require(field)
        if not isinstance(value, str):
            raise ExtractionError(f"{self.path}: the field {field!r} is {shown(value)}; it must be a string")
        return value

    def _require(self, field: str) -> Any:
        if self.config.get(field) is None:
            raise ExtractionError(f"{self.path}: the configuration of {self.name} lacks the field {field!r}; add it")
        return self.config[field]

    def restricted(self, fields: frozenset[str], reader: str) -> Model:
        """This model, as a recipe sees it that understands these fields."""
        return replace(self, config=DeclaredFields(self.config, fields | {"architectures"}, reader))

    @property
    def architecture(self) -> str:
        """The class that implements the model."""
        named = self._require("architectures")
        if not (isinstance(named, list) and named and isinstance(named[0], str) and len(named[0]) <= MAX_NAME):
            raise ExtractionError(f"{self.path}: the field 'architectures' is {shown(named)}; it must list one class")
        return named[0]

    @property
    def quantization_field(self) -> str:
        """The field that says how the weights are quantised; "" if none does."""
        return next((field for field in QUANTIZATION if field in self), "")

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """How the weights are quantised; None if they are not, empty if the field does not hold an object."""
        if not (field := self.quantization_field):
            return None
        value = self.config[field]
        return value if isinstance(value, Mapping) else {}

    @property
    def head_dim(self) -> int:
        """Features of an attention head: `head_dim`, or hidden_size / num_attention_heads if that is absent."""
        if "head_dim" in self:
            return self._even(self.size("head_dim"), "head_dim")
        hidden_size, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden_size % heads:
            raise ExtractionError(
                f"{self.path}: num_attention_heads {heads} does not divide hidden_size {hidden_size}; add 'head_dim'"
            )
        return self._even(hidden_size // heads, "hidden_size / num_attention_heads")

    def _even(self, size: int, field: str) -> int:
        """The size of a head, which must be even, because the rotary embedding rotates pairs of features."""
        if size % 2:
            raise ExtractionError(f"{self.path}: {field} is {size}; heads have an even number of features, correct it")
        return size

    @property
    def experts(self) -> int | None:
        """Experts that routing chooses from; None for a dense model."""
        for field in EXPERTS:
            if self.count(field):
                return self.size(field)
        return None

    @property
    def chosen_experts(self) -> int:
        """Experts that routing chooses for each token."""
        chosen, experts = self.size("num_experts_per_tok"), self.experts
        if experts is not None and chosen > experts:
            raise ExtractionError(
                f"{self.path}: num_experts_per_tok {chosen} exceeds the number of experts, {experts}; correct it"
            )
        return chosen

    @property
    def is_latent(self) -> bool:
        """Whether its attention is multi-head latent attention."""
        return "kv_lora_rank" in self

    @property
    def is_sparse(self) -> bool:
        """Whether its attention reads only the keys that an indexer chooses."""
        return "index_topk" in self

    @property
    def expert_size(self) -> int:
        """Features between the projections of a routed expert."""
        return self.size("moe_intermediate_size" if "moe_intermediate_size" in self else "intermediate_size")


def available(root: Path) -> list[str]:
    """Names of the models under `models/`, sorted."""
    return sorted(path.stem for path in (root / "models").glob("*.json"))


def load_model(root: Path, name: str) -> Model:
    """The model of that name; `_`, `.` and `-` count as the same.

    Raises:
        ExtractionError: there is no such model (the message lists those there are), or its file is malformed.
    """
    names = available(root)
    known = {plain_name(one): one for one in names}
    if plain_name(name) not in known:
        close = difflib.get_close_matches(plain_name(name), known, n=1, cutoff=0.3)
        hint = f"; did you mean {known[close[0]]}?" if close else "."
        listed = ", ".join(names) or f"none, {root / 'models'} is empty"
        raise ExtractionError(f"no model named {name!r}{hint} Available: {listed}")
    path = root / "models" / f"{known[plain_name(name)]}.json"
    data = _read(path)
    config, title = data.get("config"), data.get("title")
    if not isinstance(config, dict) or not isinstance(title, str):
        raise ExtractionError(f"{path}: lacks 'title' or 'config'; schema/model.schema.json describes the format")
    try:
        quantised = tuple(one["quantization_config"] for one in data.get("quantised", ()))
    except (TypeError, KeyError) as error:
        raise ExtractionError(f"{path}: 'quantised' is malformed; schema/model.schema.json describes it") from error
    return Model(path.stem, title, config, path, quantised, str(data.get("same_as", "")))


def load_config(root: Path, path: Path, name: str) -> Model:
    """A model from a Hugging Face configuration; `name` becomes its tag.

    Raises:
        ExtractionError: the file is missing or is not a configuration, or `name` cannot be a tag.
    """
    plain = {plain_name(one): one for one in available(root)}
    tag = plain.get(plain_name(name), name.lower().replace("_", "-"))
    if not TAG.fullmatch(tag):
        raise ExtractionError(
            f"--model-name {name!r}: cannot be the value of a model: tag; use letters, digits, - and ."
        )
    config = _read(path)
    if isinstance(config.get("config"), dict) and "architectures" not in config:
        config = config["config"]  # a file of models/
    for part in PARTS:
        if isinstance(config.get(part), dict) and "hidden_size" not in config:
            raise ExtractionError(
                f"{path}: a model of several parts; write the object of {part!r}, with the class of that part as its "
                "'architectures', to a file of its own and extract that"
            )
    return Model(tag, name, config, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return load_object(path)
    except JsonSourceError as error:
        raise ExtractionError(f"{path}: {error}") from error
