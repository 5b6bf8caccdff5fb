"""Why a model's op is not what a Definition says, by two witnesses: its configuration, and what its code passes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.extract_definitions.layer_sizes import other_sizes
from tools.extract_definitions.model_code import built_by, call_of
from tools.extract_definitions.models import QUANTIZATION, Model
from tools.extract_definitions.needs import Need, Request
from tools.extract_definitions.number_formats import DTYPES, KV_CACHE, not_classified, numbers, other_dtypes
from tools.extract_definitions.settings import COMMUNICATED, EXPRESSED, LINEAR, Settings, is_variant, settings
from tools.extract_definitions.words import short

FIELDS = Path(__file__).with_name("config_fields.json")
#: What the data names as a group -> op_types.
GROUPS = {
    "attention": ("gqa_paged", "gqa_ragged", "mla_paged", "mla_ragged"),
    "rope": ("rope",),
    "norm": ("rmsnorm",),
    "linear": ("gemm",),
    "activation": ("activation",),
    "moe": ("moe",),
}
#: Probabilities are float32 whatever the dtype of the weights is.
ANY_DTYPE = ("sampling", "renorm")
#: Kinds of scaling that only change the contents of the rotary cache.
CACHED_ROPE = ("default", "linear", "dynamic", "llama3", "yarn", "deepseek_yarn")
#: The share of a head's features that are rotated.
PARTIAL = "partial_rotary_factor"
#: Padding of the vocabulary of SGLang's VocabParallelEmbedding.
VOCABULARY_PADDING = 64
#: Defaults of a field that the code reads, and the question whether it is there, that switch on nothing.
SWITCHED_OFF = frozenset({"None", "False", "0", "0.0", "[]", "()", "{}", "''", "hasattr"})


@dataclass(frozen=True)
class KnownFields:
    """Fields that somebody has classified: harmless ones, and those with the values at which they change nothing."""

    harmless: frozenset[str]
    neutral: Mapping[str, Mapping[str, Any]]

    def is_neutral(self, field: str, model: Model) -> bool:
        """Whether a field has a value at which it changes nothing; an absent one has none."""
        entry, value = self.neutral[field], model.config.get(field)
        if "unless" in entry and all(model.config.get(name) == other for name, other in entry["unless"].items()):
            return True
        if "items" in entry and isinstance(value, list):
            return all(item in entry["items"] for item in value)
        if "equals" in entry and entry["equals"] in model and value == model.config[entry["equals"]]:
            return True
        return self._changes_nothing(field, value)

    def is_default_neutral(self, field: str, text: str) -> bool:
        """Whether a default in the code, or the question whether the field is there, changes nothing."""
        if text == "hasattr":
            return True
        try:
            return self._changes_nothing(field, ast.literal_eval(text))
        except (ValueError, SyntaxError):
            return False

    def _changes_nothing(self, field: str, value: Any) -> bool:
        values = self.neutral[field]["values"]
        return any(value is one or (type(value) is not bool and value == one) for one in values)


@cache
def known_fields() -> KnownFields:
    """The classified fields, from config_fields.json."""
    data = json.loads(FIELDS.read_text(encoding="utf-8"))
    return KnownFields(frozenset(name for names in data["harmless"].values() for name in names), data["neutral"])


def unclassified(model: Model, understood: frozenset[str]) -> list[str]:
    """The fields of a configuration that nobody has classified; `understood` are those that recipes declare."""
    return sorted(field for field in set(model.config) - _classified(understood) if field in model)


def _classified(understood: frozenset[str]) -> frozenset[str]:
    known = known_fields()
    return understood | known.harmless | set(known.neutral) | {*QUANTIZATION, *DTYPES}


def not_understood(request: Request, understood: frozenset[str]) -> list[str]:
    """What the model's code reads although nobody has classified it: a field of the configuration, or an absent one
    whose default might change something."""
    model, reads, classified = request.model, request.usage.code.reads, _classified(understood)
    return [
        f"the code reads {field}, which nobody has classified ({FIELDS.name})"
        for field, defaults in reads.items()
        if not field.startswith("__")
        and field not in classified
        and (field in model or not (defaults and set(defaults) <= SWITCHED_OFF))
    ]


def refusals(request: Request, op_type: str, need: Need, understood: frozenset[str]) -> list[str]:
    """Why a need must not become a Definition; empty if it may.

    Args:
        request: the model and its code.
        op_type: the op_type of the recipe that found the need.
        understood: the fields that recipes declare.
    """
    model, op = request.model, need.use.op
    if op_type in ANY_DTYPE:
        return []
    return list(
        dict.fromkeys(
            [
                *_of_fields(model, op_type, need),
                *_of_numbers(request, op_type, op),
                *_of_rotation(request, op_type),
                *_of_vocabulary(model, op),
                *not_understood(request, understood),
                *_of_code(request, op_type, need),
            ]
        )
    )


def is_called_so(request: Request, need: Need) -> bool:
    """Whether the code calls a norm as its family has it: with the residual for the fused one, else without."""
    op, calls = need.use.op, request.usage.code.calls.get(need.use.op)
    if (
        not need.family.removeprefix("gemma_").startswith(("rmsnorm", "fused_add_rmsnorm"))
        or op in COMMUNICATED
        or not calls
    ):
        return True
    numbers = {len(call.args) + len(call.keywords) for call in map(call_of, calls)}
    return (max(numbers) > 1) if "fused" in need.family else (min(numbers) == 1)


def _of_fields(model: Model, op_type: str, need: Need) -> Iterator[str]:
    expressed = EXPRESSED if is_variant(need.family) else frozenset()
    for field, entry in known_fields().neutral.items():
        if (
            field not in expressed
            and _affects(entry, op_type, need.use.op)
            and not known_fields().is_neutral(field, model)
        ):
            yield f"{entry['because']} ({field} {short(model.config[field])})"


def _affects(entry: Mapping[str, Any], op_type: str, op: str) -> bool:
    reached = {one for group in entry["affects"] for one in GROUPS.get(group, (group,))}
    return bool(reached & {"all", op_type, op})


def _of_numbers(request: Request, op_type: str, op: str) -> Iterator[str]:
    """Dtypes and quantisation."""
    model = request.model
    yield from other_dtypes(model)
    if (quantization := model.quantization) is None:
        return
    if op_type in GROUPS["attention"]:
        said = f"{model.quantization_field} {quantization.get('quant_method')}"
        yield from (f"keys and values are quantised ({name} in {said})" for name in KV_CACHE if quantization.get(name))
        yield from not_classified(model)
    elif op_type in ("moe", "gemm") or (op_type == "activation" and op != "act_fn"):
        yield from numbers(request, op).reasons


def is_quantised(request: Request, op: str) -> bool:
    """Whether the weights of a linear layer are fp8 with block scales, in all layers of the model."""
    return numbers(request, op).quantised


def _of_rotation(request: Request, op_type: str) -> Iterator[str]:
    model, reads = request.model, request.usage.code.reads
    if op_type != "rope":
        return
    if model.is_latent and "rope_scaling" not in model:
        yield "the code rotates with PyTorch where the configuration gives no rope_scaling"
    for field in ("rope_scaling", "rope_parameters"):
        scaling = model.config.get(field)
        if scaling is None:
            continue
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else scaling
        if kind not in CACHED_ROPE or "mrope_section" in scaling:
            yield f"no family covers this kind of rotation ({field} {short(scaling)})"
        elif isinstance(scaling, dict) and scaling.get(PARTIAL, 1) not in (1, model.config.get(PARTIAL, 1)):
            yield f"extraction does not know whether the code reads {PARTIAL} in {field}"
    if PARTIAL in model:
        if PARTIAL not in reads and model.config[PARTIAL] != 1:
            yield f"the code does not read {PARTIAL}, which the configuration gives"
    elif defaults := [one for one in reads.get(PARTIAL, ()) if one not in ("1", "1.0", "None", "hasattr")]:
        yield f"the configuration gives no {PARTIAL}, and the code takes {defaults[0]}"


def _of_vocabulary(model: Model, op: str) -> Iterator[str]:
    if op == "logits_processor" and (size := model.size("vocab_size")) % VOCABULARY_PADDING:
        yield f"SGLang pads the output head to a multiple of {VOCABULARY_PADDING} (vocab_size {size})"


def _of_code(request: Request, op_type: str, need: Need) -> Iterator[str]:
    """What the code builds and calls in another way than the Definition says."""
    code = request.usage.code
    one_group = request.model.config.get("topk_method") == "greedy" and request.model.count("n_group") == 1
    for attribute, expected in settings(op_type, need.family, need.use.op, one_group).items():
        if not code.modules.get(attribute):
            yield f"nothing shows how the code builds {attribute}"
        for text in code.modules.get(attribute, ()):
            if not text.startswith("PPMissingLayer("):
                yield from (
                    f"the code {reason}"
                    for reason in _of_module(call_of(text), expected, request, (op_type, need.use.op))
                )
        for text in code.calls.get(attribute, ()):
            names = {keyword.arg for keyword in call_of(text).keywords if keyword.arg is not None}
            if expected.called is not None and (others := sorted(names - expected.called)):
                yield f"the code passes {', '.join(others)} to {attribute}"
    if (op_type, need.use.op) == ("gemm", "gate"):  # its class multiplies by itself, in some releases in float32
        for text in code.products.get("linear", ()):
            if "float32" in text:
                yield f"the code multiplies in float32 ({text})"


def _of_module(call: ast.Call, expected: Settings, request: Request, claim: tuple[str, str]) -> Iterator[str]:
    name = built_by(call)
    if name not in expected.by:
        yield f"uses {name}"
        return
    given = {keyword.arg or f"**{ast.unparse(keyword.value)}": ast.unparse(keyword.value) for keyword in call.keywords}
    if name not in LINEAR or expected.required:
        yield from (f"builds {name} without {argument}" for argument in sorted(expected.required - set(given)))
    if claim[0] == "gemm":
        latent = request.model.is_latent
        yield from (f"gives {claim[1]} another size ({text})" for text in other_sizes(claim[1], call, latent))
    if expected.first and call.args and (first := ast.unparse(call.args[0])) not in expected.first:
        yield f"uses {name} over {first}"
    for argument, text in given.items():
        if argument in expected.takes or text in expected.literal.get(argument, ()):
            yield from _of_renormalising(argument, text, request.model)
        elif (fields := expected.decided.get(argument)) is None or _is_literal(text):
            yield f"passes {argument}={text} to {name}"
        else:
            yield from _of_deciding(f"{argument}={text}", fields, request, claim)


def _of_deciding(passed: str, fields: tuple[str, ...], request: Request, claim: tuple[str, str]) -> Iterator[str]:
    """Whether the fields that decide an argument have values at which it changes nothing."""
    known, reads = known_fields(), request.usage.code.reads
    for field in fields:
        if not known.is_neutral(field, request.model):
            if not _affects(known.neutral[field], *claim):  # otherwise the field itself is a reason
                yield f"passes {passed}: {known.neutral[field]['because']}"
        elif field in reads and field not in request.model.config:
            if not reads[field]:
                yield f"passes {passed} and needs the field {field}, which the configuration does not give"
            yield from (
                f"passes {passed}, by default {default}: {known.neutral[field]['because']}"
                for default in reads[field]
                if not known.is_default_neutral(field, default)
            )


def _of_renormalising(argument: str, text: str, model: Model) -> Iterator[str]:
    if argument != "renormalize":
        return
    if text == "True" and model.config.get("norm_topk_prob") is False:
        yield "scales the weights of the chosen experts, and norm_topk_prob is false"
    if text != "True" and "norm_topk_prob" not in model:
        yield "needs the field norm_topk_prob, which the configuration does not give"


def _is_literal(text: str) -> bool:
    """Whether a text names nothing, so that no field decides it."""
    return not any(isinstance(node, ast.Name) for node in ast.walk(ast.parse(text)))
