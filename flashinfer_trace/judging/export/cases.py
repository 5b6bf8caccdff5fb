"""The workloads of a Definition as evaluators take them, and where their inputs come from.

flashinfer-bench draws tensors of normal values, of fp8 codes up to 2, of integers up to 1024 and of any bytes. Inputs
that can have any values are left to it, so an export stays small. Structured inputs are given: offsets, pages,
positions and routes by the family, scales and probabilities by a formula.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.judging.costs.shapes import without_features
from flashinfer_trace.judging.costs.work import tensor_bytes
from flashinfer_trace.judging.traffic import Workload, WorkloadError, digest, workloads
from flashinfer_trace.verdict.tensors import torch_dtype

#: 16-bit and 8-bit inputs that have structure: scales, zero points, sums, and scores without ties.
_STRUCTURED = frozenset({"a_scales", "a_sums", "routing_logits", "scales", "w_scales", "w_szeros", "zeros"})
#: 8-bit inputs whose bytes are not codes: exponents; and codes, float32 scales and bfloat16 features side by side.
_NO_CODES = frozenset({"kv_cache", "weights_scale"})
#: float32 inputs that may be anything: matrices, weights, rotations, and logarithms of sums.
_ANY_FLOAT32 = frozenset(
    {"A", "B", "bias", "cos_sin_cache", "input", "logits", "s_a", "s_b", "sinks", "topk_weights", "weight"}
)
#: Scales -> the codes that they belong to, and whether these are weights: products with them are sums of k terms.
_SCALES = {"A_scale": ("A", False), "a_scale": ("a", False), "B_scale": ("B", True), "b_scale": ("b", True)}
_WEIGHTS = frozenset(codes for codes, are_weights in _SCALES.values() if are_weights)
#: Standard deviation of the codes that flashinfer-bench draws: normal ones cut at 2, and uniform ones; of two 4-bit
#: codes in a byte, each is uniform in -8..7.
_FP8_SIGMA, _INT8_SIGMA, _INT4_SIGMA = 0.88, 73.9, 4.6
#: For the logits of a row of probabilities: nine tenths of the mass are on some hundreds of tokens, as in a model.
_LOGIT_SIGMA = 4.0


@dataclass(frozen=True)
class Random:
    """Any values of the dtype; floating-point ones are normal.

    `sigma` is their standard deviation where a formula draws them: flashinfer-bench draws them itself, with 1.
    """

    shape: tuple[int, ...]
    dtype: str
    sigma: float = 1.0

    @property
    def code(self) -> str:
        shape = list(self.shape)
        if self.dtype == "int8":
            return f"torch.randint(-128, 128, {shape}, dtype=torch.int8)"
        if self.dtype.startswith("float8"):
            return f"torch.randn({shape}).clamp_(-2, 2).to(torch.{self.dtype})"
        drawn = f"torch.randn({shape}, dtype=torch.{self.dtype})"
        return drawn if self.sigma == 1 else f"{drawn} * {self.sigma:.6g}"


@dataclass(frozen=True)
class Scales:
    """Positive scales, log-uniform within a factor of 4 of `typical`; products are then on the order of 1."""

    shape: tuple[int, ...] | None
    dtype: str
    typical: float

    @property
    def code(self) -> str:
        drawn = f"torch.exp2(4 * torch.rand({list(self.shape or ())}) - 2) * {self.typical:.6g}"
        return f"({drawn}).to(torch.{self.dtype})" if self.shape is not None else f"({drawn}).item()"

    def value(self, draws: Draws) -> torch.Tensor | float:
        drawn = torch.exp2(draws.uniform(self.shape or (), -2.0, 2.0)) * self.typical
        return drawn.item() if self.shape is None else drawn.to(torch_dtype(self.dtype))


@dataclass(frozen=True)
class Probabilities:
    """float32 rows that sum to 1: the softmax of normal logits."""

    shape: tuple[int, ...]

    @property
    def code(self) -> str:
        return f"torch.softmax({_LOGIT_SIGMA} * torch.randn({list(self.shape)}), dim=-1)"

    def value(self, draws: Draws) -> torch.Tensor:
        return torch.softmax(draws.normal(self.shape, scale=_LOGIT_SIGMA), dim=-1)


#: A formula, or what a family gives: a tensor, or a number.
Source = Random | Scales | Probabilities | torch.Tensor | bool | int | float


def source(definition: Definition, name: str, shape: tuple[int, ...] | None) -> Random | Scales | Probabilities | None:
    """The formula of an input, or None if the family has to give it."""
    spec = definition.inputs[name]
    if name in _SCALES:
        return _scales(definition, name, shape)
    if shape is None:
        return None
    if name == "temperature":  # of logits that are normal: as if those of a model were divided by 1 or so
        return Scales(shape, spec.dtype, 1 / _LOGIT_SIGMA)
    if name == "probs":
        return Probabilities(shape)
    if not _may_be_anything(name, spec.dtype, len(shape)):
        return None
    no_codes = torch_dtype(spec.dtype).itemsize > 1  # those have scales
    return Random(shape, spec.dtype, shape[-1] ** -0.5 if no_codes and name in _WEIGHTS else 1.0)


def _may_be_anything(name: str, dtype: str, dimensions: int) -> bool:
    if dtype == "float32" and name == "A" and dimensions == 1:
        return False  # rates of decays, which are negative: with others, states grow from token to token
    if dtype == "float32":
        return name in _ANY_FLOAT32
    if name in _NO_CODES and torch_dtype(dtype).itemsize == 1:
        return False
    if dtype == "int8":
        return dimensions > 1 and name not in _STRUCTURED
    return dtype.startswith(("bfloat", "float")) and name not in _STRUCTURED


def _scales(definition: Definition, name: str, shape: tuple[int, ...] | None) -> Scales:
    codes, are_weights = _SCALES[name]
    dtype = definition.inputs[codes].dtype
    packed = "k_bytes" in (definition.inputs[codes].shape or ())
    sigma = _INT4_SIGMA if packed else _FP8_SIGMA if dtype.startswith("float8") else _INT8_SIGMA
    terms = definition.const_axes["k"] if are_weights else 1
    return Scales(shape, definition.inputs[name].dtype, terms**-0.5 / sigma)


@dataclass(frozen=True)
class Case:
    """One workload, with a positive value of every variable axis."""

    name: str
    axes: Mapping[str, int]
    inputs: Mapping[str, Source]

    def draws(self, definition: Definition) -> Draws:
        """The generator of its formulas' values: the same in every export."""
        return Draws(zlib.crc32(f"{definition.name} {self.name}".encode()), "cpu")


@dataclass(frozen=True)
class Unsuitable:
    """A workload that an evaluator cannot take, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class EvaluatorLimits:
    """The most rows of op_type sampling that an evaluator judges in time, and large inputs that are stored for it
    although they have a formula."""

    rows: int | None = None
    stored: frozenset[str] = frozenset()


#: The sampling evaluator of flashinfer-bench 0.1.2 has 300 seconds; a TraceSet has no formulas.
FLASHINFER_BENCH = EvaluatorLimits(rows=4, stored=frozenset({"probs"}))
#: It draws no samples, and a problem has formulas.
KERNELBENCH = EvaluatorLimits()

_FRACTIONS = ("bfloat", "float")
#: Inputs that no element decides on, unlike routes.
_INDICES = frozenset({"kv_indices", "kv_indptr", "kv_last_page_len", "page_table", "qo_indptr", "seq_lens"})
#: Most bytes of the tensors of one workload.
_MOST_STORED = 16 << 20
#: Bytes of inputs that are made to see a number among them.
_MOST_MADE = 1 << 28
#: Tokens that the sampling evaluator of flashinfer-bench draws for each row.
_DRAWS = 500_000


def cases(
    definition: Definition, every: bool = False, limits: EvaluatorLimits = FLASHINFER_BENCH
) -> Iterator[Case | Unsuitable]:
    """The workloads of a Definition: every one, or those of a short benchmark.

    If an evaluator can take none of these, the first other one that it can take comes after them.
    """
    known = workloads(definition)
    found = False
    for workload in known:
        if every or workload.quick:
            case = _case(workload, limits)
            found = found or isinstance(case, Case)
            yield case
    for workload in () if every else known:
        if not found and not workload.quick:
            case = _case(workload, limits)
            found = isinstance(case, Case)
            yield case


def _case(workload: Workload, limits: EvaluatorLimits = FLASHINFER_BENCH) -> Case | Unsuitable:
    definition, axes = workload.definition, workload.axes
    shapes = definition.input_shapes(axes)
    formulas = {name: source(definition, name, shapes[name]) for name in definition.inputs}
    names = [name for name, formula in formulas.items() if formula is None]
    reason = _too_large(definition, axes, names, limits)
    given = _given(workload, names) if names and not reason else {}
    reason = reason or _unsuitable(definition, given, axes)
    if reason:
        return Unsuitable(workload.name, reason)
    inputs = {name: given[name] if formula is None else formula for name, formula in formulas.items()}
    return Case(workload.name, axes, inputs)


def _given(workload: Workload, names: Collection[str]) -> dict[str, Any]:
    """Some inputs of a workload, those that have structure; what its file records is compared.

    Raises:
        WorkloadError: an input is not the one that was recorded.
    """
    definition = workload.definition
    numbers = [name for name in names if definition.inputs[name].shape is None]
    own, thin = (one.input_shapes(workload.axes) for one in (definition, without_features(definition)))
    whole = all(
        not definition.inputs[name].dtype.startswith(_FRACTIONS) and own[name] == thin[name]  # scales have features
        for name in names
        if name not in numbers
    )
    found = _structure(workload, names, numbers) if whole else workload.inputs("cpu")
    given = {name: found[name] for name in names}
    wrong = [name for name, value in given.items() if workload.digests.get(name, digest(value)) != digest(value)]
    if wrong:
        raise WorkloadError(f"{workload.path}: workload {workload.name}: {wrong} are others than those that it records")
    return given


def _structure(workload: Workload, names: Collection[str], numbers: Collection[str]) -> dict[str, Any]:
    """Offsets, pages and routes without gigabytes of elements.

    Numbers do not depend on the traffic, but may depend on the features: those of the family's usual case are right.
    Where that has gigabytes of weights, it is made at the sizes of the twin: no number depends on those of experts.
    """
    definition = workload.definition
    found = workload.structure(elements=not {*names} - {*numbers} <= _INDICES)
    shapes = definition.input_shapes(workload.axes)
    assert all(shapes[name] in (None, tuple(found[name].shape)) for name in names if name not in numbers)
    fractions = [name for name in numbers if isinstance(found[name], float)]
    small = definition if input_bytes(definition) <= _MOST_MADE else without_features(definition)
    usual = family_of(definition).inputs_for_axes(small, {}, 0, "cpu") if fractions else {}
    return {**found, **{name: usual[name] for name in fractions}}


def _too_large(
    definition: Definition, axes: Mapping[str, int], names: Collection[str], limits: EvaluatorLimits
) -> str | None:
    """Why inputs are more than an export stores or an evaluator judges in time, or None."""
    if definition.op_type == "sampling" and limits.rows is not None and axes["batch_size"] > limits.rows:
        return f"{_DRAWS} tokens are drawn for each row, one by one, so more than {limits.rows} rows time out"
    shapes = definition.input_shapes(axes)
    structured = {*names} | (limits.stored & definition.inputs.keys())
    stored = tensor_bytes(definition.inputs, {name: shapes[name] for name in structured})
    return (
        f"its tensors would take {stored >> 20} MiB, more than {_MOST_STORED >> 20}" if stored > _MOST_STORED else None
    )


def _unsuitable(definition: Definition, given: Mapping[str, Any], axes: Mapping[str, int]) -> str | None:
    """Why an evaluator cannot take a workload with these inputs, or None."""
    empty = [axis for axis, size in axes.items() if size == 0]
    if empty:
        return f"{empty[0]} is 0, and evaluators take positive sizes only"
    if "lse" in definition.outputs and _has_blind_query(definition, given):
        return "a query sees no key, so its lse is -inf, and the evaluators reject infinities"
    return None


def _has_blind_query(definition: Definition, inputs: Mapping[str, Any]) -> bool:
    if "sparse_indices" in inputs:
        return bool((inputs["sparse_indices"] < 0).all(dim=1).any())
    keys = inputs["kv_indptr"].diff()
    if "kv_indices" in inputs:
        last = inputs.get("kv_last_page_len", torch.ones_like(keys))
        keys = torch.where(keys > 0, (keys - 1) * definition.const_axes["page_size"] + last, 0)
    queries = inputs["qo_indptr"].diff() if "qo_indptr" in inputs else torch.ones_like(keys)
    return bool(((queries > 0) & (keys < queries)).any())
