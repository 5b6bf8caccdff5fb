"""The parts of Python that an embedded reference may use, as data. Everything else is refused.

A reference is mathematics on tensors. It runs in other people's processes, so it must not read files, start compilers,
keep state or draw random numbers unless it is a sampler. Each group below says what its names are for.

To propose an addition: put the name into the group that fits (or a new one, with a reason), see that
`tests/sandbox/test_allow_list.py` passes, and name the reference that needs it in the pull request. A name may be
added if, with any arguments, it computes only: it reads and writes no file, starts nothing, changes nothing that
outlives the call, calls no function that it finds by a string, and gives defined values (so not `torch.empty`).
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(groups: Mapping[str, str], prefix: str = "") -> frozenset[str]:
    return frozenset(prefix + name for names in groups.values() for name in names.split())


#: Nodes of Python's syntax tree (module `ast`), by what they are for.
_NODES = {
    "the module and its imports": "Module Import ImportFrom alias",
    "functions, also small ones inside others": "FunctionDef arguments arg Return Lambda",
    "assignments": "Assign AugAssign AnnAssign Name Load Store Starred Del Delete",
    "control flow; the worker process stops a loop that does not end": "If For While Break Continue Pass IfExp",
    "checks of the contract": "Assert Raise",
    "a context: torch.no_grad, and no other": "With withitem",
    "a docstring, or a call that writes to a tensor of the reference's own": "Expr",
    "calls, attributes and indices; names are checked one by one": "Call keyword Attribute Subscript Slice",
    "values": "Constant Tuple List Dict JoinedStr FormattedValue",
    "comprehensions": "ListComp GeneratorExp DictComp comprehension",
    "arithmetic": "BinOp Add Sub Mult Div FloorDiv Mod Pow MatMult UnaryOp USub UAdd",
    "bit operations, for masks and packed formats": "BitAnd BitOr BitXor Invert LShift RShift",
    "comparisons and logic": "Compare Eq NotEq Lt LtE Gt GtE Is IsNot In NotIn BoolOp And Or Not",
}
NODES = _names(_NODES)

#: Builtins: values, iteration and errors; nothing that reaches files, modules, attributes by name, or frames.
_BUILTINS = {
    "numbers": "abs bool divmod float int max min pow round sum",
    "containers and slices": "dict len list slice tuple",
    "iteration": "all any enumerate filter iter map next range reversed sorted zip",
    "what an argument is: a tensor or a number": "isinstance",
    "errors": "ArithmeticError AssertionError IndexError KeyError TypeError ValueError ZeroDivisionError",
}
BUILTINS = _names(_BUILTINS)

#: Modules that an import may name. They may only stand before a dot, so no alias hides what is called.
MODULES = frozenset({"math", "torch", "torch.nn", "torch.nn.functional", "torch.linalg"})

_MATH = {
    "constants": "e inf nan pi tau",
    "functions of Python numbers": "ceil comb copysign cos erf exp exp2 expm1 fabs floor fmod fsum gcd isclose",
    "more of them": "isfinite isinf isnan isqrt ldexp frexp log log10 log1p log2 pow prod sin sqrt tan tanh trunc",
}

_TORCH = {
    "dtypes": "bool uint8 int8 int16 int32 int int64 long float16 half bfloat16 float32 float float64 double",
    "narrow dtypes: fp8 values, their power-of-two scales, packed fp4": "float8_e4m3fn float8_e5m2 float8_e4m3fnuz "
    "float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 uint16 uint32 uint64",
    "constants": "e inf nan pi",
    "a type for annotations and isinstance only: a call of it gives undefined values, and is refused": "Tensor",
    "other types; ranges of dtypes": "Size dtype device finfo iinfo",
    "gradients switched off inside the call": "no_grad",
    "tensors with defined values": "arange eye full full_like linspace ones ones_like scalar_tensor tensor "
    "tril_indices triu_indices zeros zeros_like",
    "arithmetic": "abs add addcdiv addcmul clamp div floor_divide fmod lerp mul neg pow reciprocal remainder sign sub "
    "true_divide",
    "exponentials and logarithms: softmax, lse, gates": "exp exp2 expm1 log log10 log1p log2 logaddexp logaddexp2 "
    "logsumexp softmax log_softmax sigmoid",
    "roots and squares: norms": "rsqrt sqrt square hypot",
    "trigonometry: rotary embeddings; tanh, erf and relu: activations": "cos sin tan tanh atan2 erf erfc relu",
    "rounding, and the parts of a floating-point number: quantizers": "ceil floor frac frexp ldexp round trunc "
    "copysign signbit nextafter",
    "bits: int4 and fp4 unpacking, hashes": "bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift "
    "bitwise_xor",
    "comparisons and choices": "eq ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt "
    "maximum minimum nan_to_num ne where masked_fill",
    "reductions": "all amax amin any argmax argmin aminmax count_nonzero max mean min prod std sum var var_mean",
    "running reductions: samplers, state-space models, offsets of groups": "bincount cummax cummin cumprod cumsum diff "
    "logcumsumexp",
    "products: gemm, grouped gemm, attention": "addmm baddbmm bmm dot einsum kron matmul mm mv outer tensordot",
    "order: routing, top-k, samplers": "argsort bucketize searchsorted sort topk unique unique_consecutive",
    "gathering and scattering: caches, experts, trees": "gather index_add index_copy index_fill index_select "
    "masked_select nonzero scatter scatter_add scatter_reduce take take_along_dim",
    "shapes": "broadcast_tensors broadcast_to cat chunk concat diagonal diag diag_embed flatten flip hstack meshgrid "
    "movedim narrow permute repeat_interleave reshape roll select split squeeze stack swapaxes tensor_split tile "
    "transpose tril triu unbind unflatten unsqueeze vstack",
}

_FUNCTIONAL = {
    "activations": "gelu leaky_relu logsigmoid relu sigmoid silu softplus tanh",
    "softmax": "softmax log_softmax",
    "norms, to compare with one's own": "layer_norm normalize rms_norm",
    "layers": "conv1d embedding linear one_hot pad",
}

#: Dotted paths that begin at a module.
PATHS = (
    _names(_MATH, "math.")
    | _names(_TORCH, "torch.")
    | _names(_FUNCTIONAL, "torch.nn.functional.")
    | _names({"norms": "matrix_norm norm vector_norm"}, "torch.linalg.")
)

#: Random numbers come from torch's global generator, which the harness seeds, and only where an operation draws.
DRAWING_OP_TYPES = frozenset({"sampling", "speculative"})
DRAWING_PATHS = _names(
    {
        "draws": "bernoulli multinomial rand rand_like",
        "memory that exponential_ or uniform_ fills": "empty empty_like",
    },
    "torch.",
)
DRAWING_ATTRIBUTES = _names({"draws": "bernoulli exponential_ multinomial uniform_"})

_ATTRIBUTES = {
    "what a tensor is": "shape dtype device ndim size dim numel element_size is_contiguous is_cuda is_floating_point",
    "what finfo and iinfo tell": "bits eps max min smallest_normal tiny",
    "conversions": "bfloat16 bool double float half int item long short to tolist type_as",
    "memory of one's own": "clone contiguous detach",
    "new tensors with defined values": "new_full new_ones new_tensor new_zeros",
    "shapes": "T mT t broadcast_to chunk diag diagonal diag_embed expand expand_as flatten flip movedim narrow permute "
    "ravel repeat repeat_interleave reshape reshape_as roll select split squeeze swapaxes tensor_split tile transpose "
    "tril triu unbind unflatten unfold unsqueeze view view_as",
    "arithmetic": "abs add clamp clamp_max clamp_min div fmod lerp maximum minimum mul neg pow reciprocal remainder "
    "sign sub",
    "functions of elements": "ceil copysign cos erf exp exp2 expm1 floor frac frexp ldexp log log10 log1p log2 "
    "nan_to_num nextafter round rsqrt sigmoid signbit sin sqrt square tan tanh trunc",
    "bits": "bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor",
    "comparisons and choices": "eq equal ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor "
    "lt masked_fill ne where",
    "reductions": "all amax amin aminmax any argmax argmin bincount count_nonzero cummax cummin cumprod cumsum diff "
    "log_softmax logcumsumexp logsumexp mean norm prod softmax std sum var",
    "products": "addmm baddbmm bmm dot matmul mm mv outer",
    "order": "argsort sort topk unique unique_consecutive",
    "gathering and scattering": "gather index_add index_copy index_fill index_select masked_select nonzero scatter "
    "scatter_add scatter_reduce take take_along_dim",
    "writes to a tensor of the reference's own": "add_ clamp_ clamp_max_ clamp_min_ copy_ div_ exp_ fill_ index_add_ "
    "index_copy_ index_fill_ index_put_ log_ masked_fill_ mul_ neg_ pow_ round_ rsqrt_ scatter_ scatter_add_ "
    "scatter_reduce_ sigmoid_ sqrt_ sub_ zero_",
    "fields of results, and of slices": "values indices",
    "Python's own containers and numbers": "append bit_length extend get insert items keys pop start step stop",
}
#: Attributes and methods of whatever is not a module.
ATTRIBUTES = _names(_ATTRIBUTES)
