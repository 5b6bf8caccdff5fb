"""In which numbers a checkpoint's weights are: its dtype, and which of its layers are quantised.

A checkpoint lists the modules that it does not quantise by the names of its own files, in which `q_proj`, `k_proj` and
`v_proj` are apart. SGLang compares the list with the names of its modules, by another rule for each kind of checkpoint.
An op is claimed only where both agree for all layers that run it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import regex

from flashinfer_trace.format.patterns import SECONDS
from tools.extract_definitions.model_code import built_by, call_of
from tools.extract_definitions.models import DeclaredFields, Model
from tools.extract_definitions.module_places import EXPERTS, Place, placed_modules
from tools.extract_definitions.needs import Request
from tools.extract_definitions.settings import LINEAR
from tools.extract_definitions.words import short

DTYPES = ("dtype", "torch_dtype")
#: Classes that SGLang serves in bfloat16 whatever the configuration says.
BFLOAT16 = ("MistralLarge3ForCausalLM",)
FP8_BLOCKS = [128, 128]
HEAD, ROUTING = "logits_processor", "topk"
#: What says in which numbers keys and values are stored.
KV_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")
#: Values of a key at which it changes nothing; other keys that are listed below may have any.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "ue8m0"),
    "dynamic": (None, {}),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
Rule = Callable[[str, Sequence[str]], bool]


def _by_text(path: str, entries: Sequence[str]) -> bool:
    return any(entry in path for entry in entries)


def _by_text_or_halves(path: str, entries: Sequence[str]) -> bool:
    """Also a gate_up_proj of which both halves are listed by their whole names."""
    halves = [path.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")]
    return _by_text(path, entries) or (halves[0] != path and set(halves) <= set(entries))


def _without_model(path: str, entries: Sequence[str]) -> bool:
    return _by_text_or_halves(path, [entry.replace("model.", "") for entry in entries])


def _by_component(path: str, entries: Sequence[str]) -> bool:
    return any(entry in path.split(".") or f"{path}.".startswith(f"{entry}.") for entry in entries)


def _by_pattern(path: str, entries: Sequence[str]) -> bool:
    return any(
        regex.match(entry[3:], path, timeout=SECONDS) is not None
        if entry.startswith("re:")
        else entry.lower() in path.lower()
        for entry in entries
    )


@dataclass(frozen=True)
class Method:
    """How SGLang 0.5.8 reads a checkpoint with one `quant_method`.

    Attributes:
        skips: whether SGLang leaves a linear layer unquantised: by its name, and the list of the configuration.
        lists: the keys that may hold this list; the first that is there counts, even if it is null.
        keys: the other keys that are understood.
        has_head: whether such checkpoints may hold a quantised output head, so that the configuration must say.
    """

    skips: Rule
    lists: tuple[str, ...]
    keys: frozenset[str]
    has_head: bool = True


_CONVERTED = ("modules_to_not_convert",)
METHODS: Mapping[str, Method] = {
    "fp8": Method(
        _without_model,
        ("ignored_layers", *_CONVERTED),
        frozenset({"activation_scheme", "weight_block_size", "fmt", "scale_fmt"}),
    ),
    "fbgemm_fp8": Method(_by_text_or_halves, _CONVERTED, frozenset({"activation_scale_ub"}), has_head=False),
    "mxfp4": Method(lambda path, entries: True, _CONVERTED, frozenset(), has_head=False),
    "awq": Method(
        _by_text,
        _CONVERTED,
        frozenset(
            {
                *("bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "lm_head", "backend"),
                *("do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"),
            }
        ),
        has_head=False,
    ),
    "gptq": Method(
        _by_text,
        (),
        frozenset(
            {
                *("bits", "group_size", "desc_act", "sym", "lm_head", "damp_percent", "static_groups", "dynamic"),
                *("true_sequential", "model_name_or_path", "model_file_base_name", "checkpoint_format", "meta"),
                *("dataset", "batch_size", "block_name_to_quantize", "cache_block_outputs", "exllama_config"),
                *("max_input_length", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
                *("pad_token_id", "tokenizer", "use_cuda_fp16", "use_exllama", "is_marlin_format", "pack_dtype"),
            }
        ),
    ),
    "bitsandbytes": Method(
        _by_component,
        ("llm_int8_skip_modules",),
        frozenset(
            {
                *("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype"),
                *("bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
                *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_threshold"),
            }
        ),
    ),
    "compressed-tensors": Method(
        _by_pattern,
        ("ignore",),
        frozenset(
            {
                *("config_groups", "format", "quantization_status", "global_compression_ratio", "version"),
                *("sparsity_config", "transform_config"),
            }
        ),
    ),
}


@dataclass(frozen=True)
class Numbers:
    """Whether an op's weights are fp8 with block scales rather than bf16, and why neither can be claimed."""

    quantised: bool
    reasons: tuple[str, ...] = ()


def other_dtypes(model: Model) -> Iterator[str]:
    """Why a model is not served in bfloat16."""
    given = [field for field in DTYPES if field in model]
    for field in given:
        if model.config[field] != "bfloat16":
            yield f"the families are for bfloat16 ({field} {model.config[field]})"
    if not given and not _is_bfloat16_by_default(model):
        yield (
            "the configuration gives no torch_dtype or dtype, and SGLang then serves the model in float16; the "
            "families are for bfloat16, so add the field if it is published or the server sets it"
        )


def _is_bfloat16_by_default(model: Model) -> bool:
    """Whether SGLang takes bfloat16 where the configuration gives no dtype: Gemma, and gpt-oss in mxfp4."""
    architecture = model.architecture
    if architecture == "GptOssForCausalLM":
        return (model.quantization or {}).get("quant_method") == "mxfp4"
    return architecture in BFLOAT16 or str(model.config.get("model_type", architecture.lower())).startswith("gemma")


def not_classified(model: Model) -> list[str]:
    """The parts of `quantization_config` that nobody has classified, or that SGLang refuses."""
    field, quantization = model.quantization_field, model.quantization
    if quantization is None:
        return []
    name = str(quantization.get("quant_method", ""))
    if (method := METHODS.get(name)) is None:
        given = f"{field} {name}" if name else f"{field} {short(model.config[field])} gives no quant_method"
        return [f"no family covers the numbers of this checkpoint ({given})"]
    known = method.keys | {"quant_method", *method.lists, *KV_CACHE}
    found = [
        f"nobody has classified {key} {short(value)} of {field} ({Path(__file__).name})"
        for key, value in quantization.items()
        if key not in known or value not in NEUTRAL.get(key, (value,))
    ]
    scheme = quantization.get("activation_scheme", "dynamic")
    if quantization.get("weight_block_size") is not None and scheme != "dynamic":
        found.append(f"SGLang refuses activation_scheme {scheme} with weights in blocks ({field})")
    return found


def numbers(request: Request, op: str) -> Numbers:
    """In which numbers the weights of an op are, in every layer that runs it.

    Args:
        request: the model, as a recipe or as a whole, and its code.
        op: a linear layer, the output head, the choice of experts, or the experts.
    """
    model = _whole(request.model)
    quantization = model.quantization
    if quantization is None or _is_built_without(request, op):
        return Numbers(False)
    if reasons := not_classified(model):
        return Numbers(False, tuple(reasons))
    method = METHODS[quantization["quant_method"]]
    said = f"{model.quantization_field} {quantization['quant_method']}"
    key, entries = _listed(quantization, method)
    if not _is_list_of_names(entries):
        return Numbers(False, (f"{key} of {said} is {short(entries)}; it must be a list of names",))
    try:
        return _by_list(request, model, op, (key, tuple(entries)))
    except TimeoutError:
        return Numbers(False, (f"{key} of {said} has an expression that takes too long: {short(entries)}",))


def _by_list(request: Request, model: Model, op: str, listed: tuple[str, tuple[str, ...]]) -> Numbers:
    """The numbers of an op, by what the configuration leaves unquantised.

    Raises:
        TimeoutError: an expression takes too long.
    """
    quantization, (_, entries) = model.quantization, listed
    assert quantization is not None
    method = METHODS[quantization["quant_method"]]
    said = f"{model.quantization_field} {quantization['quant_method']}"
    if op == HEAD:
        return Numbers(False, tuple(_of_head(quantization, method, entries, said)))
    is_fp8 = (quantization["quant_method"], quantization.get("weight_block_size")) == ("fp8", FP8_BLOCKS)
    not_covered = Numbers(False, (f"no family covers the numbers of this checkpoint ({said})",))
    if op == ROUTING or not entries or (op == EXPERTS and not is_fp8):
        left = method.skips("", ()) and op not in (ROUTING, EXPERTS)
    else:
        left, reasons = _is_left(request, model, op, listed, method)
        if reasons:
            return Numbers(False, tuple(reasons))
    if left:
        return Numbers(False)
    return Numbers(True) if is_fp8 else not_covered


def _whole(model: Model) -> Model:
    """The model with all fields, if a recipe sees only those that it declares: these decide no sizes."""
    config = model.config
    return replace(model, config=config.config) if isinstance(config, DeclaredFields) else model


def _is_built_without(request: Request, op: str) -> bool:
    """Whether the code builds a layer so that it is never quantised: without that setting, or as no linear layer."""
    built = request.usage.code.modules.get(op, ())
    if op in (HEAD, ROUTING, EXPERTS) or not built:
        return False
    return all("quant_config=None" in text or built_by(call_of(text)) not in LINEAR for text in built)


def _listed(quantization: Mapping[str, Any], method: Method) -> tuple[str, Any]:
    """The key with the modules that are not quantised, and its list."""
    key = next((one for one in method.lists if one in quantization), "")
    return key, quantization.get(key) or []


def _is_list_of_names(entries: Any) -> bool:
    return isinstance(entries, list) and all(isinstance(one, str) and one and _pattern((one,)) for one in entries)


def _of_head(quantization: Mapping[str, Any], method: Method, entries: Sequence[str], said: str) -> Iterator[str]:
    """Why the output head may be quantised. SGLang leaves it as it is unless `lm_head` says otherwise."""
    if quantization.get("lm_head"):
        yield f"the output head is quantised (lm_head in {said})"
    elif method.has_head and quantization.get("weight_block_size") is None:
        pattern = _pattern(tuple(entries))
        is_listed = bool(entries) and pattern is not None and _finds(pattern, "lm_head")
        if not is_listed and quantization.get("lm_head") is not False:
            yield f"nothing says that the output head is not quantised (no lm_head in {said})"


def _is_left(
    request: Request, model: Model, op: str, listed: tuple[str, tuple[str, ...]], method: Method
) -> tuple[bool, list[str]]:
    """Whether a list leaves an op unquantised in all layers; reasons if it does so in some, or nobody can tell."""
    key, entries = listed
    modules = placed_modules(request, model, entries)
    if modules.problem:
        return False, [f"{modules.problem} ({key})"]
    if unknown := _unknown(entries, modules.names, modules.layers):
        return False, [f"{key} lists {unknown[0]}, which is no module that extraction knows"]
    if not (places := modules.of.get(op)):
        return False, [f"nothing shows where the code places {op}, and {key} leaves modules unquantised"]
    pattern = _pattern(entries)
    assert pattern is not None
    left = []
    for place in places:
        parts = [_finds(pattern, part) for part in place.parts]
        is_left = all(parts) or _finds(pattern, place.name)
        if any(parts) and not is_left:
            return False, [f"only a part of {place.name} is not quantised: {key} lists {_first(place, pattern)}"]
        skipped = op != EXPERTS and method.skips(place.name, entries)
        if is_left and not skipped:
            return False, [f"SGLang 0.5.8 quantises {place.name}, which {key} leaves out"]
        if skipped and not is_left:
            return False, [f"SGLang 0.5.8 takes {place.name} for one that {key} names, which it is not"]
        left.append(place.name if is_left else "")
    some = [name for name in left if name]
    if some and len(some) < len(left):
        return False, [f"some layers of {op} are not quantised: {len(some)} of {len(left)}, as {some[0]} ({key})"]
    return bool(some), []


def _first(place: Place, pattern: Any) -> str:
    return next(part for part in place.parts if _finds(pattern, part))


@cache
def _unknown(entries: tuple[str, ...], names: str, layers: int) -> list[str]:
    """The entries that name no module of the model; those of layers behind its last do not count."""
    found = []
    for entry in entries:
        number = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", entry)
        pattern = _pattern((entry,))
        if not (number and int(number[1]) >= layers) and not (pattern and _finds(pattern, names)):
            found.append(entry)
    return found


@cache
def _pattern(entries: tuple[str, ...]) -> Any:
    """What finds the modules that the entries name, or that are within these; None if one is no pattern."""
    plain = [re.escape(one).replace(r"\*", "[^.\n]*") for one in entries if not one.startswith("re:")]
    texts = [f"(?:^|\\.)(?:{'|'.join(plain)})(?:\\.|$)"] if plain else []
    texts += [f"^(?:{one[3:]})" for one in entries if one.startswith("re:")]
    try:
        return regex.compile("|".join(texts), regex.MULTILINE)
    except (regex.error, RecursionError, OverflowError):
        return None


_too_slow: set[Any] = set()


def _finds(pattern: Any, text: str) -> bool:
    """Whether a pattern is found in a text; raises TimeoutError if that, or an earlier text, took over `SECONDS`."""
    if pattern in _too_slow:
        raise TimeoutError
    try:
        return pattern.search(text, timeout=SECONDS) is not None
    except TimeoutError:
        _too_slow.add(pattern)
        raise
