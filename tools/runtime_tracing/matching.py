"""Which Definitions with evidence a recorded kernel call computes: the same kernel, at the same sizes and settings."""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flashinfer_trace import Definition, TensorSpec
from tools.runtime_tracing.recording import PREPARING, RecordedCall

#: PyTorch functions that compute a plain matrix product, for which evidence names ``torch.matmul``.
PRODUCTS = {"torch.matmul", "torch.mm", "torch.nn.functional.linear"}
#: dtype and sizes of a tensor among recorded arguments.
_TENSOR = re.compile(r"\b([a-z]+\d\w*|bool)\[([\d,]*)\]")
_SETTING = re.compile(r"\b(\w+): ([\w.+-]+|'\w+')(?=, |$)")
_INTEGER = re.compile(r": (\d+)(?=, |$)")
_EPS = re.compile(r"^EPS = (\S+)$", re.MULTILINE)
#: Settings of kernels -> the only value that Definitions describe: no cap, no window, top-k before top-p.
DESCRIBED = {"logits_soft_cap": "0.0", "window_left": "-1", "filter_apply_order": "'top_k_first'"}

Shape = tuple[int, ...]
#: Library and last part of a dotted path: function, or class.
Key = tuple[str, str]


class Standing(enum.Enum):
    """What the dataset says about a recorded call."""

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
        for definition in definitions:
            for path in sorted(set(runs.get(definition.name, ()))):
                self._known[_parts(path)[0], _parts(path)[-1]].append(definition)

    def of(self, call: RecordedCall) -> tuple[Standing, tuple[str, ...]]:
        """What the dataset says of a call, and the names of the Definitions that it computes."""
        definitions = [one for key in _keys(call) for one in self._known.get(key, ())]
        found = tuple(dict.fromkeys(one.name for one in definitions if computes(call, one)))
        if found:
            return Standing.VERIFIED, found
        return (Standing.OTHER_SIZES if definitions else Standing.UNKNOWN), ()


def computes(call: RecordedCall, definition: Definition) -> bool:
    """Whether a call of one of the Definition's kernels has the sizes and the settings of that Definition."""
    settings = dict(_SETTING.findall(call.arguments))
    eps = _EPS.search(definition.reference)
    if eps and "eps" in settings and float(settings["eps"]) != float(eps[1]):
        return False
    if settings.get("causal") == "False" and "causal" in definition.tags:
        return False
    if any(settings.get(name, value) != value for name, value in DESCRIBED.items()):
        return False
    if "out_dtype" in settings and settings["out_dtype"] not in {one.dtype for one in definition.outputs.values()}:
        return False
    const = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
    inputs = [one for one in definition.inputs.values() if _is_sized(one, const)]
    given = tensors(call.arguments)
    # A size that no input has, such as the number of chosen experts, is one of an output, or a number.
    elsewhere = {value for name, value in const.items() if not any(name in (one.shape or ()) for one in inputs)}
    numbers = {size for _, shape in given for size in shape} | set(map(int, _INTEGER.findall(call.arguments)))
    return elsewhere <= numbers | {1} and _assigned(inputs, given, const, {})


def tensors(arguments: str) -> list[tuple[str, Shape]]:
    """dtype and shape of each tensor among recorded arguments, in order."""
    return [(dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, sizes in _TENSOR.findall(arguments)]


def _is_sized(tensor: TensorSpec, const: Mapping[str, int]) -> bool:
    """Whether it is a tensor of numbers with at least one constant size: no index, which a plan may have taken."""
    return bool(tensor.shape) and "int" not in tensor.dtype and any(axis in const for axis in tensor.shape or ())


def _assigned(
    inputs: Sequence[TensorSpec],
    given: Sequence[tuple[str, Shape]],
    const: Mapping[str, int],
    bound: Mapping[str, int],
) -> bool:
    """Whether each input can be given a tensor with its dtype and sizes, in the order of both."""
    if not inputs:
        return True
    first, *rest = inputs
    for index, (dtype, shape) in enumerate(given):
        if dtype == first.dtype:
            for sizes in _fits(first.shape or (), shape, const, bound):
                if _assigned(rest, given[index + 1 :], const, {**bound, **sizes}):
                    return True
    return False


def _fits(
    axes: Sequence[str], shape: Shape, const: Mapping[str, int], bound: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """The sizes of variable axes for each way in which a shape fits: as it is, transposed, or without axes of size 1.

    Only a matrix whose sizes are both constant, a weight, may be transposed.
    """
    ways = [tuple(axes), tuple(axis for axis in axes if const.get(axis) != 1)]
    if len(axes) == 2 and all(axis in const for axis in axes):
        ways.append((axes[1], axes[0]))
    for way in dict.fromkeys(ways):
        pairs = dict(zip(way, shape, strict=False))
        known = {**const, **bound}
        if len(way) == len(shape) and all(known.get(axis, size) == size for axis, size in pairs.items()):
            yield {axis: size for axis, size in pairs.items() if axis not in const}


def _keys(call: RecordedCall) -> list[Key]:
    if call.library == "torch":
        is_product = call.kernel in PRODUCTS and len(tensors(call.arguments)) == 2
        return [("torch", "matmul")] if is_product else []
    if call.kernel.rpartition(".")[2] in PREPARING:
        return []
    return [(parts[0], part) for parts in map(_parts, (call.kernel, *call.through)) for part in parts[-2:]]


def _parts(path: str) -> list[str]:
    return path.removeprefix("torch.ops.").split(".")
