"""Token sampling: SGLang's sampler, which runs after every forward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.words import const, document, tensor, var

#: Family -> the sampler's kernel that it belongs to. SGLang's sampler passes filter_apply_order="joint" for every
#: batch; the families of other orders, and of top-k or top-p alone, are for other callers.
SAMPLERS = {
    "min_p_sampling_from_probs": "min_p_sampling_from_probs",
    "top_k_top_p_joint_sampling_from_probs": "top_k_top_p_sampling_from_probs",
}
RENORMALISERS = {name: name for name in ("top_k_renorm_probs", "top_p_renorm_probs")}
DESCRIPTIONS = {
    "min_p_sampling_from_probs": "Min-p sampling over {v} tokens: draws one token per row from those at least min_p "
    "times as probable as the most probable token, in proportion to their probabilities.",
    "top_k_renorm_probs": "Top-k renormalisation over {v} tokens: keeps the k largest probabilities of each row and "
    "all values tied with the k-th, scales them to sum to 1 and sets the others to 0.",
    "top_k_top_p_joint_sampling_from_probs": "Top-k and top-p (nucleus) sampling over {v} tokens: draws one token per "
    "row from those that are both among the k most probable and among the most probable whose mass reaches top_p, in "
    "proportion to their probabilities. This is SGLang's order.",
    "top_p_renorm_probs": "Top-p (nucleus) renormalisation over {v} tokens: keeps the most probable tokens of each row "
    "whose mass reaches top_p, scales them to sum to 1 and sets the others to 0.",
}
#: Families whose probabilities must sum to 1.
NORMALISED = ("top_k_top_p_joint_sampling_from_probs",)
LAST_KEPT = "The token with which the mass reaches it is the last one kept, together with all tokens tied with it"
TOP_K = (
    "Number of tokens to keep in each row. All tokens tied with the last one are kept; vocab_size or more, or a "
    "negative number, keeps all; 0 keeps none."
)
MASS = "Probability mass that the kept tokens must reach, per row."
TOP_P = {
    "top_k_top_p_joint_sampling_from_probs": f"{MASS} {LAST_KEPT}; 0 or less keeps none.",
    "top_p_renorm_probs": "Share of the row's sum that the kept tokens must reach, per row. "
    f"{LAST_KEPT}; 0 keeps the largest value.",
}
MIN_P = "Smallest probability to keep, as a share of the largest in the row; 0 keeps all tokens."
SHOULD_SUM_TO_1 = (
    "Probabilities after softmax, one row per request; each row should sum to 1. If one sums to less, the missing mass "
    "goes to its last token with a positive probability; if one sums to more, the first draw reaches only tokens whose "
    "cumulative mass, by index, begins below 1. A drawn token that is not kept is replaced by one of those that are, "
    "in proportion."
)
DRAWN = "Index of the token drawn from each row, 0 to vocab_size - 1; 0 if"
INT32 = "FlashInfer returns int32."
SCALED = "Kept probabilities divided by their sum,"
#: Family -> its output.
RESULTS = {
    "min_p_sampling_from_probs": f"{DRAWN} min_p is above 1, which keeps nothing, and vocab_size - 1 for a row of "
    f"zeros. {INT32}",
    "top_k_renorm_probs": f"{SCALED} or by 1e-8 if that is larger; 0 for all other tokens.",
    "top_k_top_p_joint_sampling_from_probs": f"{DRAWN} nothing is kept. {INT32}",
    "top_p_renorm_probs": f"{SCALED} unless that is at most 1e-8; 0 for all other tokens.",
}


def needs(families: Mapping[str, str], request: Request) -> Iterator[Need]:
    for family, kernel in families.items():
        if stages := request.stages("sampler", [f"sgl-kernel:{kernel}"]):
            axes = {"vocab_size": request.model.size("vocab_size")}
            yield Need(family, axes, Use(request.model, "sampler"), stages)


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    vocabulary = axes["vocab_size"]
    dimensions = {
        "batch_size": var("Number of rows: requests that sample a token in this step."),
        "vocab_size": const(vocabulary, "Tokens in the vocabulary, including padding."),
    }
    matrix = ["batch_size", "vocab_size"]
    weights = (
        SHOULD_SUM_TO_1
        if family in NORMALISED
        else "Non-negative weights, one row per request, as softmax produces them; a row need not sum to 1."
    )
    inputs = {"probs": tensor(matrix, "float32", weights)}
    if family.startswith("top_k"):
        inputs["top_k"] = tensor(["batch_size"], "int32", TOP_K)
    if family in TOP_P:
        inputs["top_p"] = tensor(["batch_size"], "float32", TOP_P[family])
    if family.startswith("min_p"):
        inputs["min_p"] = tensor(["batch_size"], "float32", MIN_P)
    if family.endswith("renorm_probs"):
        outputs = {"renorm_probs": tensor(matrix, "float32", RESULTS[family])}
    else:
        outputs = {"samples": tensor(["batch_size"], "int64", RESULTS[family])}
    return document(DESCRIPTIONS[family].format(v=vocabulary), needs, (), dimensions, inputs, outputs)


RECIPES = tuple(
    Recipe(
        op_type,
        tuple(families),
        frozenset(f"sgl-kernel:{kernel}" for kernel in families.values()),
        frozenset({"vocab_size"}),
        functools.partial(needs, families),
        describe,
    )
    for op_type, families in (("sampling", SAMPLERS), ("renorm", RENORMALISERS))
)
