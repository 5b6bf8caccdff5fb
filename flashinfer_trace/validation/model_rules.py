"""Rules on what a Definition says about models and sizes: model: tags, and the numbers of its description."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterator

from flashinfer_trace.model_claims import ModelClaims
from flashinfer_trace.validation.candidate import Candidate
from flashinfer_trace.validation.problems import Findings, pointer_of, quote

__all__ = ["check_models", "check_numbers"]

#: Integers of two digits or more, and not a part of a word, a decimal number or a version.
_NUMBER = re.compile(r"(?<![\w.,^-])\d{2,}(?![\w^]|[.,]\d)")
#: Words that end in digits or begin with them: names of models, dtypes, formats, Definitions; blocks such as 128x128.
_WORD = re.compile(r"[A-Za-z][\w.-]*\d[\w.-]*|\d+x\d+")
_PARENTHESES = re.compile(r"\((?:[^()]|\([^()]*\))*\)")
#: Factors between sizes: halves of a pair, and parallel sizes.
_FACTORS = (1, 2, 3, 4, 8)


def check_models(candidate: Candidate, claims: ModelClaims, findings: Findings) -> None:
    """Each model: tag follows from models/ or is curated with a source."""
    for index, tag in candidate.tags:
        namespace, _, model = tag.partition(":")
        if namespace != "model" or claims.allows(str(candidate.name), model):
            continue
        if model not in claims.models:
            message, hint = f"there is no models/{model}.json", "add the model, or remove the tag"
        else:
            message = f"models/ does not say that {quote(model)} needs this Definition"
            hint = "generate models/needs/, claim it with its source in models/curated/claims.json, or remove the tag"
        findings.add("tag-model", message, hint, pointer_of("tags", index))


def check_numbers(candidate: Candidate, findings: Findings) -> None:
    """Sizes in the description are those of the Definition.

    A number may be a const axis, a sum, difference, product or quotient of two, or a number of the reference, the
    constraints or a tag. In parentheses, arithmetic whose result is such a number may have any operands.
    """
    text = candidate.data.get("description")
    if not isinstance(text, str) or not candidate.const_axes or len(candidate.const_axes) > 32:
        return
    own = set(_own_numbers(candidate))
    text = _PARENTHESES.sub(lambda match: "" if _value(match[0]) in own else match[0], text)
    wrong = sorted({int(number) for number in _NUMBER.findall(_WORD.sub(" ", text))} - own)
    if wrong:
        sizes = ", ".join(f"{axis} {value}" for axis, value in candidate.const_axes.items())
        message = f"the description says {', '.join(map(str, wrong[:5]))}, but the sizes are {sizes}"
        findings.add("description-number", message, "correct the description", "/description")


def _own_numbers(candidate: Candidate) -> Iterator[int]:
    sizes = sorted(set(candidate.const_axes.values()))
    for a, b in itertools.product(sizes, [*sizes, *_FACTORS]):
        yield from (a, a * b, a + b, abs(a - b))
        if a % b == 0:
            yield a // b
    others = [candidate.reference or "", *(text for _, text in candidate.constraints)]
    others += [tag.replace(":", " ") for _, tag in candidate.tags]
    yield from (int(number) for text in others for number in re.findall(r"(?<![\w.])\d{1,9}(?![\w.])", text))


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: operator.add, ast.Mult: operator.mul}


def _value(text: str) -> int | None:
    """The value of an expression such as ``((64 query + 2 x 8 key-value heads) x 128)``; None if it is none."""
    plain = re.sub(r"(?<=[\d)])\s*( x | of | heads of )", " * ", re.sub(r",[^()]*(?=\)$)", "", text))
    plain = re.sub(r"[A-Za-z_-]+(\s+x\s+)", r"* ", plain)
    plain = re.sub(r"[A-Za-z_][\w-]*", " ", plain)
    try:
        return _evaluate(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, KeyError, TypeError):
        return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**31:
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right)) % 2**62
    raise ValueError(ast.dump(node)[:80])
