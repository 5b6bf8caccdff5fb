"""Functions of SGLang that compute an operation step by step in PyTorch, each as one call.

Such a function launches a kernel for each of its steps, and evidence names the function. A pattern lists the steps by
which a call of it is known, in the order in which recordings list them, and says which of their arguments are its
inputs and settings. Calls that do not follow a pattern to the letter stay as they were recorded.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashinfer_trace import Definition
from tools.runtime_tracing.expert_calls import sum_of_rows
from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.recording import COMPOSED, RecordedCall

_ARGUMENT = re.compile(r"(\w+): (\((?:[^()]|\([^()]*\))*\)|\w+\[[\d,]*\]|[^,]+)(?:, |$)")
_NAMED_TENSOR = re.compile(r"\b(\w+): [a-z]+\d\w*\[([\d,]*)\]")
_FIRST_TWO = re.compile(r"\[(\d+),(\d+),")
_SIZES = re.compile(r"\w+\[(\d+),(\d+)\]$")
_EXPERTS = "torch.ops.sglang.inplace_fused_experts"
_FUSED_MOE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.moe_sum_reduce_torch_compile"
_SUM = re.compile(r"at::native::reduce_kernel<.*sum_functor<c10::BFloat16, ")
_FACTOR = re.compile(r"at::native::vectorized_elementwise_kernel<\d+, at::native::AUnaryFunctor<.*::MulFu")
_LAYERNORM = "sglang.srt.layers.layernorm"
_SAMPLER = "sglang.srt.layers.sampler"
_TOPK = "sglang.srt.layers.moe.topk"
#: The beginning of both ways of sampling: top-k by rank, then top-p by the sum of the probabilities before a token.
_FILTERS = "sort cumsum arange ge __setitem__ sub gt __setitem__"
_ROTATED = {"q": (0, "0"), "k": (1, "0"), "cos": (2, "0"), "sin": (3, "0")}
_FILTERED = {"probs": (0, "0"), "top_k": (3, "1"), "top_p": (6, "1")}

#: A step, by its number, and the name of one of its arguments.
Place = tuple[int, str]


@dataclass(frozen=True)
class Pattern:
    """One way in which a function runs.

    Attributes:
        path: how evidence names it: the function, its class, or a function of PyTorch that it consists of.
        steps: the last part of each kernel's name, one for each kind of arguments that a line passes.
        inputs, settings: name -> the argument of a step that it is. An output may be among the inputs, for its sizes.
        helpers: functions that it calls, which take steps.
        exchanged: inputs whose first two axes Definitions have in the other order.
        conditions: regular expressions that the arguments of steps must match from their beginning.
        module, function: where its code is, if `path` does not say so.
    """

    path: str
    steps: str
    inputs: Mapping[str, Place]
    settings: Mapping[str, Place] = field(default_factory=dict)
    helpers: tuple[str, ...] = ()
    conditions: Mapping[int, str] = field(default_factory=dict)
    exchanged: tuple[str, ...] = ()
    module: str = ""
    function: str = ""

    @property
    def code(self) -> tuple[str, str]:
        """File and qualified name of the function, as frames have them."""
        module, _, name = self.path.rpartition(".")
        return (self.module or module).replace(".", "/") + ".py", self.function or name


PATTERNS = (
    Pattern(
        f"{_LAYERNORM}.Gemma3RMSNorm",
        "float pow mean add rsqrt mul float add mul type_as",
        {"hidden_states": (0, "0"), "weight": (6, "0")},
        {"eps": (3, "1")},
        helpers=("Gemma3RMSNorm._norm",),
        function="Gemma3RMSNorm.forward_native",
        conditions={7: r"0: float32\[\d+\], 1: 1\.0$"},
    ),
    # In batch-invariant mode, in which a Triton kernel takes the mean.
    Pattern(
        f"{_LAYERNORM}.RMSNorm",
        "to to add to pow mean_kernel add rsqrt mul mul to",
        {"hidden_states": (0, "0"), "residual": (1, "0"), "weight": (9, "1")},
        {"eps": (6, "1")},
        helpers=("mean_batch_invariant", "mean_dim"),
        function="RMSNorm.forward_native",
    ),
    # 0.5.23 calls it without an axis of sequences, tokens before heads.
    Pattern(
        "sglang.srt.layers.rotary_embedding.utils.apply_rotary_pos_emb_native",
        "float float float float mul neg cat mul add mul neg cat mul add to to",
        _ROTATED,
        helpers=("apply_rotary_pos_emb_native_eager", "rotate_half"),
        conditions={2: r"0: \w+\[\d+,1,\d+\]"},
        exchanged=("q", "k"),
    ),
    Pattern(
        "sglang.srt.layers.rotary_embedding.utils.apply_rotary_pos_emb_native",
        "float float float float mul neg cat mul add mul neg cat mul add to to",
        _ROTATED,
        helpers=("rotate_half",),
    ),
    # One group of experts, and no renormalization.
    Pattern(
        f"{_TOPK}.grouped_topk_gpu",
        "softmax max topk zeros_like scatter_ bool __invert__ masked_fill topk to to",
        {"routing_logits": (0, "0")},
        {"top_k": (8, "k")},
        conditions={1: r"0: \w+\[\d+,1,\d+\]"},
    ),
    # One group of experts, and one shared expert after those that are chosen, whose weight is a part of their sum.
    Pattern(
        f"{_TOPK}.biased_grouped_topk_impl",
        "sigmoid add topk sum topk zeros_like scatter_ bool __invert__ masked_fill topk gather randint __setitem__ "
        "sum div __setitem__ sum div to",
        {"routing_logits": (0, "0"), "routing_bias": (1, "1")},
        {"top_k": (10, "k")},
        conditions={2: r"0: \w+\[\d+,1,\d+\]", 13: r"0: int64\[\d+,\d+\], 2: int64\[\d+\]$"},
    ),
    Pattern(f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch", f"{_FILTERS} multinomial to gather", _FILTERED),
    # With a seed for each request.
    Pattern(
        f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch",
        f"{_FILTERS} to log_ to arange murmur_hash32_kernel to div log_ clamp_ neg_ log_ neg_ add_ argmax to gather",
        _FILTERED,
        helpers=("multinomial_with_seed", "murmur_hash32"),
    ),
    # Weights are normalized over the chosen experts, which the kernel chooses itself.
    Pattern(
        "triton_kernels.routing.routing",
        "_topk_forward _sum_bitmatrix_rows _combined_routing_memset _combined_routing_compute",
        {"routing_logits": (0, "X"), "positions": (0, "Yi")},
        helpers=(
            *("topk", "TopK.forward", "topk_forward", "routing_from_bitmatrix", "sort_tokens", "SortTokens.forward"),
            *("Bitmatrix.sum", "sum_bitmatrix_rows"),
        ),
        conditions={0: r".*USE_PROVIDED_INDX: False.*APPLY_SOFTMAX: True$"},
    ),
    # Its successor. The division of the sorted rows into blocks follows it and is not part of it.
    Pattern(
        "triton_kernels.topk.topk",
        "_topk_forward zeros _sum_bitmatrix_rows _bitmatrix_metadata_compute_stage1 _bitmatrix_metadata_compute_stage2",
        {"routing_logits": (0, "X"), "positions": (4, "NonzeroIndx")},
        helpers=(
            *("topk_forward", "TopK.forward", "SparseMatrix.__post_init__", "make_bitmatrix_metadata"),
            "sum_bitmatrix_rows",
        ),
        conditions={0: r".*USE_PROVIDED_INDX: False.*APPLY_SOFTMAX: True$"},
    ),
    Pattern(
        "torch.softmax",
        "div_ softmax __setitem__",
        {"logits": (0, "0"), "temperature": (0, "1")},
        module=_SAMPLER,
        function="Sampler.forward",
        helpers=("softmax",),
        conditions={1: r"0: float32\[\d+,\d+\], dim: -1$"},
    ),
)


def composed(calls: Iterable[RecordedCall], patterns: Sequence[Pattern] = PATTERNS) -> list[RecordedCall]:
    """The calls, with those that a function's steps made as one call of the function, in the place of the first."""
    by_code: dict[tuple[str, str], list[Pattern]] = defaultdict(list)
    for pattern in patterns:
        by_code[pattern.code].append(pattern)
    every = list(calls)
    measured = any(call.launches for call in every)
    kept: list[tuple[int, RecordedCall]] = []
    groups: dict[tuple[str, tuple[str, str], tuple[Frame, ...]], list[tuple[int, RecordedCall]]] = defaultdict(list)
    for at, call in enumerate(every):
        found = _function_of(call, by_code) if call.launches or not measured else None
        if found is None:
            kept.append((at, sum_of_experts(call) or sum_of_rows(call) or call))
        else:
            code, outer = found
            groups[call.phase, code, outer].append((at, call))
    for (_, code, outer), steps in groups.items():
        made = (_call(pattern, outer, [step for _, step in steps]) for pattern in by_code[code])
        one = next((each for each in made if each is not None), None)
        kept += steps if one is None else [(steps[0][0], one)]
    return [call for _, call in sorted(kept, key=lambda pair: pair[0])]


def sum_of_experts(call: RecordedCall) -> RecordedCall | None:
    """The sum over the experts of each token, if it is all that SGLang's operator launches itself; None otherwise.

    Its other calls, such as the products, are recorded by themselves. It compiles the sum with PyTorch, which logs
    nothing: a sum of bfloat16 rows, and perhaps the product with a factor.
    """
    given = dict(_ARGUMENT.findall(call.arguments))
    kernels = {launch.cuda_kernel for launch in call.launches}
    if call.kernel != _EXPERTS or not kernels or not all(_SUM.match(one) or _FACTOR.match(one) for one in kernels):
        return None
    hidden, ids = (_SIZES.match(given.get(name, "")) for name in ("hidden_states", "topk_ids"))
    if hidden is None or ids is None or not any(map(_SUM.match, kernels)):
        return None
    rows = f"bfloat16[{hidden[1]},{ids[2]},{hidden[2]}]"
    return dataclasses.replace(call, library=COMPOSED, kernel=_FUSED_MOE, arguments=f"hidden_states: {rows}")


def same_inputs(call: RecordedCall, definition: Definition) -> bool:
    """Whether a Definition has every tensor that a composed call names, outputs of their sizes; True of other calls."""
    if call.library != COMPOSED:
        return True
    given = dict(_NAMED_TENSOR.findall(call.arguments))
    const = definition.const_axes
    for name in given.keys() & definition.outputs.keys():
        axes, sizes = definition.outputs[name].shape or (), [int(size) for size in given[name].split(",")]
        if len(axes) != len(sizes) or any(const.get(a, size) != size for a, size in zip(axes, sizes, strict=True)):
            return False
    return given.keys() <= {*definition.inputs, *definition.outputs}


def _function_of(
    call: RecordedCall, by_code: Mapping[tuple[str, str], Sequence[Pattern]]
) -> tuple[tuple[str, str], tuple[Frame, ...]] | None:
    """The function of which a call is a step, the outermost if there are several, and the frames that called it."""
    for index, frame in reversed([*enumerate(call.stack)]):
        code = (frame.file, frame.function)
        if code in by_code:
            inner = {one.function for one in call.stack[:index]} - {frame.function}
            if any(inner <= {*pattern.helpers} for pattern in by_code[code]):
                return code, call.stack[index + 1 :]
    return None


def _call(pattern: Pattern, outer: tuple[Frame, ...], steps: Sequence[RecordedCall]) -> RecordedCall | None:
    """The steps as one call; None if they are not those of the pattern."""
    if [step.kernel.rpartition(".")[2] for step in steps] != pattern.steps.split():
        return None
    if not all(re.match(rule, steps[index].arguments) for index, rule in pattern.conditions.items()):
        return None
    given = [dict(_ARGUMENT.findall(step.arguments)) for step in steps]
    places = {**pattern.inputs, **pattern.settings}
    values = {name: given[index].get(argument) for name, (index, argument) in places.items()}
    if None in values.values():
        return None
    for name in pattern.exchanged:
        values[name] = _FIRST_TWO.sub(r"[\2,\1,", values[name] or "")
    return RecordedCall(
        phase=steps[0].phase,
        library=COMPOSED,
        kernel=pattern.path,
        stack=outer,
        arguments=", ".join(f"{name}: {value}" for name, value in values.items()),
        count=steps[0].count,
        through=(),
        launches=tuple(launch for step in steps for launch in step.launches),
    )
