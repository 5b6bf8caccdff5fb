"""Which Definitions with evidence a recorded kernel call computes: the same kernel, at the same sizes and settings."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from flashinfer_trace import Definition, TensorSpec
from flashinfer_trace.kernels import launched_by, paths_of
from flashinfer_trace.kernels.names import CALLED
from tools.runtime_tracing.attention_calls import SETTING_AXES, in_order, merges_parts, read_inputs, same_attention
from tools.runtime_tracing.composed_calls import same_inputs
from tools.runtime_tracing.expert_calls import same_experts, sums_rows
from tools.runtime_tracing.recording import COMPOSED, PREPARING, RecordedCall
from tools.runtime_tracing.recurrent_calls import PLACES, has_settings, sizes_of

#: PyTorch functions that compute a plain matrix product, for which evidence names ``torch.matmul``.
PRODUCTS = {"torch.matmul", "torch.mm", "torch.nn.functional.linear"}
#: PyTorch functions that evidence names themselves.
COUNTED = {"torch.nn.functional.linear", "torch.bmm"}
#: dtype and sizes of a tensor among recorded arguments.
_TENSOR = re.compile(r"\b([a-z]+\d\w*|bool)\[([\d,]*)\]")
#: Name and sizes of a tensor of integers with two axes or more.
_TABLE = re.compile(r"\b(\w+): int\d+\[(\d+(?:,\d+)+)\]")
_SETTING = re.compile(r"\b(\w+): ([\w.+-]+|'\w+')(?=, |$)")
_INTEGER = re.compile(r": (\d+)(?=, |$)")
#: SGLang counts the experts of other ranks as one more expert.
_EXPERTS = re.compile(r"(?<=num_experts): (\d+)")
#: Some kernels can also write what they compute to a cache.
_CACHES = re.compile(r"\bv_cache: ")
_ROPE = re.compile(r"sgl_kernel_jit_fused_rope_(true|false)_")
_EPS = re.compile(r"^EPS = (\S+)$", re.MULTILINE)
#: Compiled functions have no names of parameters: among their numbers only an epsilon has a negative exponent.
_UNNAMED_EPS = re.compile(r"\b\d+: ([\d.]+e-\d+)(?=, |$)")
_NAME = re.compile(r"\b[a-z_]\w*")
#: A remainder or a rounded quotient is that of several numbers.
_ONE_WAY = re.compile(r"//|%")
#: Settings of kernels -> the only value that Definitions describe: top-k before top-p, scales of any value.
DESCRIBED = {"filter_apply_order": "'top_k_first'", "SCALE_UE8M0": "False", "scale_ue8m0": "False"}
#: Parts of the names of Definitions -> a setting, and its value in these.
NAMED = {
    "_ue8m0_": ("scale_ue8m0", "True"),
    "_joint_": ("filter_apply_order", "'joint'"),
    "_neox_style_": ("is_neox", "True"),
    "_gptj_style_": ("is_neox", "False"),
}
#: Parts of the names of Definitions -> a setting that a call must state. Triton compiles a router for its scores.
STATED = {"_sqrtsoftplus_": "scoring_func"}

Shape = tuple[int, ...]
#: Library and last part of a dotted path: function, or class. The whole path, of a function that calls several kernels.
Key = tuple[str, str]


class Standing(enum.Enum):
    """How the dataset covers a recorded call."""

    VERIFIED = "a Definition of these sizes has evidence from this kernel"
    OTHER_SIZES = "only Definitions of other sizes or settings have evidence from this kernel"
    UNKNOWN = "no Definition has evidence from this kernel"


class Evidence:
    """The kernels from which Definitions have evidence."""

    def __init__(self, definitions: Iterable[Definition], runs: Mapping[str, Iterable[str]]) -> None:
        """
        Args:
            definitions: the dataset.
            runs: name of a Definition -> dotted paths of the kernels from which it has valid evidence.
        """
        self._known: dict[Key, list[Definition]] = defaultdict(list)
        self._named: set[Key] = set()
        self._weights: dict[str, Set[int]] = {}
        for definition in definitions:
            self._named.update((_parts(path)[0], _parts(path)[-1]) for path in definition.tag_values(CALLED))
            self._weights[definition.name] = _weights(definition)
            for path in sorted({place for run in runs.get(definition.name, ()) for place in paths_of(run)}):
                self._known[_parts(path)[0], _parts(path)[-1]].append(definition)
                self._known[COMPOSED, path].append(definition)
        # Layers make the same calls, and so do runs: some three in ten differ from all others.
        self._found: dict[tuple[object, ...], tuple[Standing, tuple[str, ...]]] = {}

    def of(self, call: RecordedCall, window: int | None = None) -> tuple[Standing, tuple[str, ...]]:
        """How the dataset covers a call, and the names of the Definitions that it computes.

        `window` is the number of keys that a query of the model sees in layers with a window, if it has any.
        """
        like = call.library, call.kernel, call.arguments, call.through, window
        if like not in self._found:
            self._found[like] = self._of(call, window)
        return self._found[like]

    def awaits(self, call: RecordedCall) -> bool:
        """Whether a Definition names a call's kernel, which has not been run for it."""
        return not self._named.isdisjoint(_keys(call))

    def definitions_of(self, call: RecordedCall) -> list[Definition]:
        """The Definitions that have evidence from a call's kernel, of whatever sizes."""
        return [one for key in _keys(call) for one in self._known.get(key, ())]

    def _of(self, call: RecordedCall, window: int | None) -> tuple[Standing, tuple[str, ...]]:
        definitions = self.definitions_of(call)
        possible = definitions
        if not (merges_parts(call) or sums_rows(call)):  # which are given outputs only
            counts = {math.prod(shape) for _, shape in tensors(call.arguments)}
            possible = [one for one in definitions if self._weights[one.name] <= counts]
        found = tuple(dict.fromkeys(one.name for one in possible if computes(call, one, window)))
        if found:
            return Standing.VERIFIED, found
        return (Standing.OTHER_SIZES if definitions else Standing.UNKNOWN), ()


def _weights(definition: Definition) -> Set[int]:
    """How many elements each input has whose sizes are all constant, of those that every call is given as they are.

    Most Definitions of a kernel have other weights than a call, which is quickly told. Sinks are not always given, and
    two inputs may be given as one.
    """
    const = definition.const_axes
    inputs = [one for name, one in definition.inputs.items() if name != "sinks" and "int" not in one.dtype]
    if definition.name.startswith(tuple(PLACES)):  # some calls are given what follows from their weights
        return set()
    if any(_joined([one, other], const) for one, other in itertools.permutations(inputs, 2)):
        return set()
    shapes = [one.shape for one in inputs if one.shape and const.keys() >= set(one.shape)]
    return {math.prod(const[axis] for axis in shape) for shape in shapes}


def computes(call: RecordedCall, definition: Definition, window: int | None = None) -> bool:
    """Whether a call of one of the Definition's kernels has the sizes and the settings of that Definition."""
    arguments = call.arguments
    if not same_attention(call, definition, window):
        return False
    if not same_experts(call, definition) or not same_inputs(call, definition):
        return False
    if call.kernel.endswith(".moe_align_block_size"):
        arguments = _EXPERTS.sub(lambda count: f": {int(count[1]) - 1}", arguments)
    chosen = {**settings(arguments), **_compiled_settings(call.through)}
    eps, given_eps = _eps_of(definition.reference), chosen.get("eps") or _unnamed_eps(arguments)
    if eps is not None and given_eps and float(given_eps) != eps:
        return False
    tensors_given = in_order(call.arguments)
    if _has_caches(tensors_given) and "v_cache" not in definition.inputs:
        return False
    if chosen.get("causal") == "False" and "causal" in definition.tags:
        return False
    routes = call.kernel.endswith(".moe_fused_gate") and "HAS_BIAS" in chosen
    if routes and (chosen["HAS_BIAS"] == "True") != ("routing_bias" in definition.inputs):
        return False
    if any(part in definition.name and name not in chosen for part, name in STATED.items()):
        return False
    described = {**DESCRIBED, **dict(setting for part, setting in NAMED.items() if part in definition.name)}
    if any(chosen.get(name, value) != value for name, value in described.items()):
        return False
    if "out_dtype" in chosen and chosen["out_dtype"] not in {one.dtype for one in definition.outputs.values()}:
        return False
    const = definition.const_axes
    if (given_sizes := sizes_of(call, definition)) is not None:
        return has_settings(chosen, definition) and {axis: given_sizes.get(axis) for axis in const} == dict(const)
    if any(chosen[name].isdigit() and int(chosen[name]) != const[name] for name in const.keys() & chosen.keys()):
        return False
    if not _same_codes(call, definition) or not _same_tables(call, definition):
        return False
    only_output = merges_parts(call) or sums_rows(call)
    taken = [definition.outputs["output"]] if only_output else read_inputs(call, definition.inputs)
    given = tensors(tensors_given)
    inputs = [one for one in taken if is_sized(one, const, given)]
    # A size that no input has, such as the number of chosen experts, is one of an output, or a number.
    named = {axis for one in inputs for axis in one.shape or ()}
    named |= {name for name in const for rule in definition.constraints if rule.startswith(f"{name} ==")}
    among = numbers(call.arguments, arguments)
    found = {name for name, value in const.items() if name in named | SETTING_AXES or value in among}
    if not only_output and not const.keys() <= found | _determined(definition, found):
        return False
    codes = next((one.dtype for one in inputs if one.dtype.startswith("float8")), None)
    # Kernels take scales after the codes that they belong to, or after all codes.
    inputs.sort(key=lambda one: one.dtype == "float32")
    ordered = sorted(given, key=lambda one: one[0] == "float32")
    return _assigned(inputs, ordered, const, {}, codes)


@functools.cache
def _eps_of(reference: str) -> float | None:
    """The epsilon of a reference that has one."""
    found = _EPS.search(reference)
    return float(found[1]) if found else None


@functools.cache
def _unnamed_eps(arguments: str) -> str:
    """An epsilon among arguments without names, or an empty string."""
    found = _UNNAMED_EPS.search(arguments)
    return found[1] if found else ""


@functools.cache
def _has_caches(arguments: str) -> bool:
    return bool(_CACHES.search(arguments))


@functools.cache
def settings(arguments: str) -> Mapping[str, str]:
    """Names and plain values among recorded arguments."""
    return dict(_SETTING.findall(arguments))


def _compiled_settings(through: Iterable[str]) -> dict[str, str]:
    """The settings that the name of a module has that was compiled for them: which features of a head are a pair."""
    found = (_ROPE.match(path) for path in through)
    return next(({"is_neox": one[1].capitalize()} for one in found if one), {})


@functools.cache
def numbers(given: str, meant: str = "") -> Set[int]:
    """1, the sizes of tensors among the arguments as recorded, and the whole numbers among those as they are meant."""
    return {1, *(size for _, shape in tensors(given) for size in shape), *map(int, _INTEGER.findall(meant or given))}


@functools.cache
def tensors(arguments: str) -> tuple[tuple[str, Shape], ...]:
    """dtype and shape of each tensor among recorded arguments, in order."""
    found = _TENSOR.findall(arguments)
    return tuple((dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, sizes in found)


def _determined(definition: Definition, found: Set[str]) -> set[str]:
    """The axes of no tensor that constraints give from constant axes that were found: a group's size from their number.

    Triton compiles a kernel for such a number, which recordings then lack. They have the sizes of tensors: an output
    that is not among them is that of another Definition, even if its size follows from that of an input.
    """
    sizes = {axis for one in (*definition.inputs.values(), *definition.outputs.values()) for axis in one.shape or ()}
    determined: set[str] = set()
    for rule in definition.constraints:
        unknown = [name for name in _NAME.findall(rule) if name not in found]
        if "==" in rule and not _ONE_WAY.search(rule) and len(unknown) == 1:
            determined.update(unknown)
    return determined - sizes


def _same_codes(call: RecordedCall, definition: Definition) -> bool:
    """Whether the codes that a Definition returns are among those of a call, if the call is given any."""
    codes = {dtype for dtype, _ in tensors(call.arguments) if _is_code(dtype)}
    return not codes or {one.dtype for one in definition.outputs.values() if _is_code(one.dtype)} <= codes


def _same_tables(call: RecordedCall, definition: Definition) -> bool:
    """Whether tables of integers that a call names as a Definition does, such as topk_ids, have its constant sizes."""
    const = definition.const_axes
    for name, sizes in _tables(call.arguments):
        if name == "out_indices_ptr" and const.get("top_k", sizes[-1]) != sizes[-1]:
            return False
        axes = (definition.inputs[name].shape if name in definition.inputs else None) or ()
        if len(axes) == len(sizes) and any(const.get(a, size) != size for a, size in zip(axes, sizes, strict=True)):
            return False
    return True


@functools.cache
def _tables(arguments: str) -> tuple[tuple[str, Shape], ...]:
    """Names and shapes of the tables of integers among recorded arguments."""
    return tuple((name, tuple(map(int, sizes.split(",")))) for name, sizes in _TABLE.findall(arguments))


def _is_code(dtype: str) -> bool:
    return dtype == "int8" or dtype.startswith("float8")


def is_sized(tensor: TensorSpec, const: Mapping[str, int], given: Sequence[tuple[str, Shape]]) -> bool:
    """Whether it is a tensor of numbers with at least one constant size: no index, which a plan may have taken.

    Packed codes, which Definitions have in int8 and calls in another dtype, are none either.
    """
    if not any(axis in const for axis in tensor.shape or ()):
        return False
    return "int" not in tensor.dtype or (tensor.dtype == "int8" and any(dtype == "int8" for dtype, _ in given))


def _assigned(
    inputs: Sequence[TensorSpec],
    given: Sequence[tuple[str, Shape]],
    const: Mapping[str, int],
    bound: Mapping[str, int],
    codes: str | None,
) -> bool:
    """Whether each input can be given a tensor with its dtype and sizes, in the order of both.

    `codes` is the dtype of quantized weights, if there are any. An operation that has them may quantize its activations
    itself: its kernel is then given codes where the Definition has bfloat16.
    """
    if not inputs:
        return True
    first, *rest = inputs
    dtypes = {first.dtype, codes} if first.dtype == "bfloat16" else {first.dtype}
    for index, (dtype, shape) in enumerate(given):
        if dtype in dtypes:
            for sizes in _fits(first.shape or (), shape, const, bound):
                if _assigned(rest, given[index + 1 :], const, {**bound, **sizes}, codes):
                    return True
    joined = _joined(inputs, const)
    return joined is not None and _assigned([joined[0], *inputs[2:]], given, joined[1], bound, codes)


def _joined(inputs: Sequence[TensorSpec], const: Mapping[str, int]) -> tuple[TensorSpec, Mapping[str, int]] | None:
    """The first two inputs as one whose last axis has the features of both, as kernels of latent attention take them.

    With the constant sizes, among them the sum; None if these inputs differ in more than their last, constant axes.
    """
    if len(inputs) < 2:
        return None
    (*axes, last), (*others, other) = (one.shape or ("",) for one in inputs[:2])
    if inputs[0].dtype != inputs[1].dtype or not axes or axes != others or last == other:
        return None
    if last not in const or other not in const:
        return None
    both = f"{last} and {other}"
    return dataclasses.replace(inputs[0], shape=(*axes, both)), {**const, both: const[last] + const[other]}


def _fits(
    axes: Sequence[str], shape: Shape, const: Mapping[str, int], bound: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """The sizes of variable axes for each way in which a shape fits.

    It may be as it is, with or without axes of size 1, with rows of several per token in one axis, or with rows in
    several axes. Only weights, whose sizes are all constant, may be transposed: their last two axes.
    """
    if len(shape) > len(axes):
        shape = tuple(size for size in shape if size != 1)
    ways = [tuple(axes), tuple(axis for axis in axes if const.get(axis) != 1)]
    if len(axes) >= 2 and all(axis in const for axis in axes):
        ways.append((*axes[:-2], axes[-1], axes[-2]))
    known = {**const, **bound}
    for way in dict.fromkeys(ways):
        pairs = dict(zip(way, shape, strict=False))
        if len(way) == len(shape) and all(known.get(axis, size) == size for axis, size in pairs.items()):
            yield {axis: size for axis, size in pairs.items() if axis not in const}
    extra = len(shape) - len(axes)
    if extra > 0 and axes and axes[0] not in const and {*axes[1:]} <= const.keys():
        rows = math.prod(shape[: extra + 1])
        fits = all(const[axis] == size for axis, size in zip(axes[1:], shape[extra + 1 :], strict=True))
        if fits and known.get(axes[0], rows) == rows:
            yield {axes[0]: rows}
    if len(axes) == 3 and len(shape) == 2 and axes[0] not in const and {*axes[1:]} <= const.keys():
        tokens, rest = divmod(shape[0], const[axes[1]])
        if rest == 0 and shape[1] == const[axes[2]] and known.get(axes[0], tokens) == tokens:
            yield {axes[0]: tokens}


def _keys(call: RecordedCall) -> list[Key]:
    if call.library == COMPOSED:
        return [(COMPOSED, call.kernel)]
    if call.library == "torch":
        given = tensors(call.arguments)
        if call.kernel in PRODUCTS and len(given) == 2 and given[0][0] != "float32":
            return [("torch", "matmul")]
        return [("torch", call.kernel.rpartition(".")[2])] if call.kernel in COUNTED else []
    if call.kernel.rpartition(".")[2] in PREPARING:
        return []
    return [
        (parts[0], part)
        for parts in map(_parts, (launched_by().get(call.kernel, call.kernel), *call.through))
        for part in (*(name for name in parts[-2:-1] if name.lstrip("_")[:1].isupper()), parts[-1])
    ]


def _parts(path: str) -> list[str]:
    """The names in a dotted path. A module that SGLang compiles for its arguments stands for SGLang."""
    first, *rest = path.removeprefix("torch.ops.").split(".")
    return ["sglang" if first.startswith("sgl_kernel_jit_") else first, *rest]
