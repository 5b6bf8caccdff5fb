"""Rules on what a Definition says about models and sizes: model: tags, and models and numbers of its description."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from flashinfer_trace.dataset.model_claims import ModelClaims
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote

#: Integers of two digits or more, and not a part of a word, a decimal number or a version.
_NUMBER = re.compile(r"(?<![\w.,^-])\d{2,}(?![\w^]|[.,]\d)")
#: Commas between thousands, which `_NUMBER` would take for a list or the end of a clause.
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
#: Small numbers, such as the epsilon of a norm.
_SMALL = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?[eE]-\d+(?!\w)|(?<![\w.-])0\.0\d*(?!\w)")
_DECIMAL = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)")
#: Docstrings and comments of a reference, which may speak of other sizes.
_PROSE = re.compile(r"(?s)\"{3}.*?\"{3}|#[^\n]*")
#: Names of 16-bit formats in prose -> dtype.
_FORMATS = {"bf16": "bfloat16", "fp16": "float16", "float16": "float16", "half precision": "float16"}
#: Words with digits after a letter, and blocks such as 128x128. Neither may begin inside another: a text of one long
#: word would take minutes.
_NAME = re.compile(r"(?<![\w.-])((?:(?![A-Za-z])[\w.-])*)[A-Za-z][\w.-]*\d[\w.-]*")
_BLOCK = re.compile(r"(?<!\d)\d+x\d+")
_DIGITS = re.compile(r"\d+")
_PARENTHESES = re.compile(r"\((?:[^()]|\([^()]*\))*\)")
#: Parallel sizes of a description, such as ``TP 1, 2 and 4``.
_PARALLEL = re.compile(r"\b(TP|EP) (\d+(?:, \d+)*(?: and \d+)?)")
#: The end of a sentence in a description, and words for a model's sizes, which do not say that the model calls it.
_SENTENCE_END = re.compile(r"(?<=\.)\s+")
_OF_SIZES = re.compile(r"\b[Ss]izes\b|\b[Tt]he size (?:is|of)\b")
#: Digits of a number that are looked at, because Python refuses to convert thousands; no size has as many.
DIGITS = 18
#: Format codes and group sizes, which descriptions of tensors give, are smaller; sizes of models are not.
_LEAST_OF_TENSORS = 256
#: Phrases that give a size, with # for the number -> the axis whose value it must be: the first of these axes that the
#: Definition has. With a sign between them, two axes, or an axis and a number, stand for their difference or quotient.
_PHRASES: Mapping[str, tuple[str, ...]] = {
    "# query heads?": ("num_qo_heads",),
    "# heads, keys": ("num_qo_heads",),
    "# key(?:-value)? heads?": ("num_kv_heads",),
    "heads? of size #": ("head_dim", "head_size"),
    "keys of size #": ("qk_dim",),
    "# features of keys": ("qk_dim",),
    "values of size #": ("vo_dim",),
    "page size #": ("page_size",),
    "pages of #": ("page_size",),
    "window of #": ("window_size",),
    "capped at #": ("logits_soft_cap",),
    "all # features rotated": ("head_size", "rotary_dim"),
    "first # features": ("rotary_dim",),
    r"features i and i \+ #": ("rotary_dim / 2", "head_size / 2"),
    r"# of \d+ groups": ("topk_group",),
    "of # groups": ("n_group",),
    "# best (?:of|experts)": ("top_k - num_fused_shared_experts", "top_k"),
    "# experts (?:per|of each) token": ("top_k",),
    r"experts \(# per token": ("top_k",),
    r"\(# and the shared one\)": ("num_experts - 1",),
    "expert parallelism over # ranks": ("num_experts / num_local_experts",),
    "blocks of # rows": ("block_size",),
    "token among #": ("num_experts",),
    "best of # experts": ("num_experts",),
    "over (?:all )?# experts": ("num_experts",),
    "# local experts": ("num_local_experts",),
    "with # input(?: features| and)": ("k", "K"),
    "and # output features": ("n", "N"),
    "over # features": ("hidden_size",),
    "# features per rank": ("intermediate_size",),
    "hidden size #": ("hidden_size",),
    "over # tokens": ("vocab_size",),
    r"1/sqrt\(#\)": ("head_dim", "qk_dim"),
}


def check_models(candidate: Candidate, claims: ModelClaims, findings: Findings) -> None:
    """Each model: tag follows from models/ or is curated with a source; the description names no other models."""
    _check_described(candidate, claims, findings)
    for index, tag in candidate.tags:
        namespace, _, model = tag.partition(":")
        known = model in claims.models
        if namespace != "model" or (known and claims.allows(str(candidate.name), model)):
            continue
        if not known:
            message, hint = f"there is no models/{model}.json", "add the model, or remove the tag"
        else:
            message = f"models/ does not say that {quote(model)} needs or calls this Definition"
            hint = (
                "generate models/needs/ and models/recorded/, claim it with its source in models/curated/claims.json, "
                "or remove the tag"
            )
        findings.add("tag-model", message, hint, pointer_of("tags", index))


def untagged_models(text: str, tags: Iterable[str], titles: Mapping[str, str]) -> dict[str, str]:
    """The models, each with its title, that a description names although they are not among the model: tags.

    None without model: tags: then a description may still say whose sizes these are.
    """
    tagged = {tag.partition(":")[2] for tag in tags if tag.startswith("model:")}
    if not tagged or not titles:
        return {}
    described = {titles[title]: title for title in _titles(tuple(titles)).findall(text)}
    return {model: title for model, title in sorted(described.items()) if model not in tagged}


def untagged_sizes(text: str, tags: Iterable[str]) -> list[tuple[str, list[str]]]:
    """The parallel sizes of a description, as ``("TP", ["8"])``, that are not among the tp: and ep: tags.

    None without such tags.
    """
    tagged = {tag for tag in tags if tag.startswith(("tp:", "ep:"))}
    found = []
    for name, sizes in _PARALLEL.findall(text) if tagged else ():
        if wrong := [size for size in re.findall(r"\d+", sizes) if f"{name.lower()}:{size}" not in tagged]:
            found.append((name, wrong))
    return found


def _check_described(candidate: Candidate, claims: ModelClaims, findings: Findings) -> None:
    text, tags = candidate.data.get("description"), _tags(candidate)
    if not isinstance(text, str) or not claims.titles or not _titles(tuple(claims.titles)).search(text):
        return
    if " model:" not in " ".join(["", *tags]):
        _check_sentences(text, candidate, claims, findings)
        return
    for model, title in untagged_models(text, tags, claims.titles).items():
        message = f"the description names {title}, but there is no tag model:{model}"
        findings.add("description-model", message, "correct the description, or add the tag", "/description")


def _check_sentences(text: str, candidate: Candidate, claims: ModelClaims, findings: Findings) -> None:
    """Without model: tags, sentences name only models that are given, and others to say whose sizes these are."""
    pattern = _titles(tuple(claims.titles))
    for sentence in _SENTENCE_END.split(text):
        named = () if _OF_SIZES.search(sentence) else dict.fromkeys(pattern.findall(sentence))
        if other := [title for title in named if not claims.allows(str(candidate.name), claims.titles[title])]:
            message = f"the description says of {', '.join(other)} what models/ does not, in {quote(sentence, 160)}"
            hint = (
                "remove that from it; if the sizes are theirs, write `Sizes of ...`; if you know that they call this, "
                "claim it with its source in models/curated/claims.json"
            )
            findings.add("description-model", message, hint, "/description")


def _tags(candidate: Candidate) -> list[str]:
    return [tag for _, tag in candidate.tags]


@functools.cache
def _titles(titles: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the longest title at each place: no part of a longer name."""
    longest_first = "|".join(re.escape(title) for title in sorted(titles, key=len, reverse=True))
    return re.compile(rf"(?<![\w.-])(?:{longest_first})(?![\w-]|\.\d)")


def check_numbers(candidate: Candidate, findings: Findings) -> None:
    """Sizes, small numbers and 16-bit formats in the description are those of the Definition.

    The number in a phrase of `_PHRASES` must be the value of its own axis, also in the descriptions of axes, inputs and
    outputs. Any other size is a const axis, or a number of the reference, the constraints or a tag. In parentheses,
    arithmetic whose result is such a number may have any operands.
    """
    text = candidate.data.get("description")
    if isinstance(text, str):
        _check_formats(text, candidate, findings)
        _check_parallel(text, candidate, findings)
        _check_small(text, candidate, findings)
    if not candidate.const_axes or len(candidate.const_axes) > 32:
        return
    own, phrases = set(_own_numbers(candidate)), list(expected_phrases(candidate.const_axes))
    for place, text in _described_parts(candidate.data):
        text = _THOUSANDS.sub("", text)
        judged = _check_phrases(text, place, phrases, findings)
        least = 0 if place == ("description",) else _LEAST_OF_TENSORS
        wrong = [number for number in _strange(text, own, least) if number not in judged]
        if wrong:
            shown = ", ".join(f"{axis} {value}" for axis, value in candidate.const_axes.items())
            message = f"the description mentions numbers that do not follow from the sizes ({shown}): {_numbers(wrong)}"
            findings.add("description-number", message, "correct the description", pointer_of(*place))


def _strange(text: str, own: Set[int], least: int) -> list[int]:
    """The sizes in a description, of those that are at least so large, which are not the Definition's own."""
    if not any(int(digits[:DIGITS]) >= least for digits in _DIGITS.findall(text)):
        return []
    sizes = _PARENTHESES.sub(lambda match: "" if _value(match[0]) in own else match[0], text)
    found = {int(number[:DIGITS]) for number in _NUMBER.findall(_without_names(sizes))}
    return sorted(number for number in found - own if number >= least)


def _check_small(text: str, candidate: Candidate, findings: Findings) -> None:
    """Small numbers, such as the epsilon of a norm, are those of the reference."""
    if candidate.reference is None:
        return
    known = {float(number) for number in _DECIMAL.findall(_PROSE.sub("", candidate.reference))}
    if small := sorted({float(number) for number in _SMALL.findall(_THOUSANDS.sub("", text))} - known):
        message = f"the description mentions numbers that the reference does not use: {_numbers(small)}"
        findings.add("description-number", message, "correct the description", "/description")


def _described_parts(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Place and text of every description that has digits."""
    sections = [((name,), data.get(name)) for name in ("axes", "inputs", "outputs")]
    entries = [
        ((*place, key), one) for place, section in sections if isinstance(section, dict) for key, one in section.items()
    ]
    for place, entry in [((), data), *entries]:
        text = entry.get("description") if isinstance(entry, dict) else None
        if isinstance(text, str) and _DIGITS.search(text):
            yield (*place, "description"), text


def _check_phrases(
    text: str, place: tuple[str, ...], phrases: Iterable[tuple[re.Pattern[str], str, int]], findings: Findings
) -> set[int]:
    """Reports each phrase whose number is not the value of its axis, and returns the numbers of all phrases."""
    judged = set()
    for phrase, axis, value in phrases if _any_phrase().search(text) else ():
        for found in phrase.finditer(text):
            judged.add(number := int(found[1][:DIGITS]))
            if number != value:
                message = f"the description says {quote(found[0])}, but {axis} is {value}"
                findings.add("description-number", message, "correct the description", pointer_of(*place))
    return judged


def expected_phrases(sizes: Mapping[str, int]) -> Iterator[tuple[re.Pattern[str], str, int]]:
    """The phrases that apply to a Definition with these axes: pattern, axis, and the value that it must give."""
    for phrase, parts in _parts_of_phrases():
        for axis, first, sign, other in parts:
            second = sizes.get(other) if isinstance(other, str) else other
            if first in sizes and second is not None:
                yield phrase, axis, sizes[first] // second if sign == "/" else sizes[first] - second
                break


@functools.cache
def _parts_of_phrases() -> list[tuple[re.Pattern[str], list[tuple[str, str, str, str | int]]]]:
    """Each phrase with its axes: as they are written, and taken apart; anything but an expression takes 0 away."""
    found = []
    for phrase, axes in _phrases().items():
        parts = [(axis, *f"{axis} - 0".split(" ")[:3]) for axis in axes]
        found.append((phrase, [(axis, one, sign, int(x) if x.isdigit() else x) for axis, one, sign, x in parts]))
    return found


@functools.cache
def _phrases() -> dict[re.Pattern[str], tuple[str, ...]]:
    number = r"(?<![\w.-])(\d+)(?![\w^]|[.,]\d)"
    return {re.compile(phrase.replace("#", number)): axes for phrase, axes in _PHRASES.items()}


@functools.cache
def _any_phrase() -> re.Pattern[str]:
    return re.compile("|".join(phrase.pattern for phrase in _phrases()))


def _without_names(text: str) -> str:
    """The text without words that have digits after a letter (models, dtypes, formats, Definitions), and blocks."""
    return _NAME.sub(r"\1 ", _BLOCK.sub(" ", text))


def _numbers(found: Sequence[float]) -> str:
    return ", ".join(map(str, found[:5]))


def _check_parallel(text: str, candidate: Candidate, findings: Findings) -> None:
    """Where tags give parallel sizes, the description gives no others."""
    for name, wrong in untagged_sizes(text, _tags(candidate)):
        message = f"the description says {name} {', '.join(wrong)}, but there is no tag {name.lower()}:{wrong[0]}"
        findings.add("description-number", message, "correct the description", "/description")


def _check_formats(text: str, candidate: Candidate, findings: Findings) -> None:
    dtypes = {tensor.dtype for tensor in (*candidate.inputs.values(), *candidate.outputs.values())}
    for word, dtype in _FORMATS.items() if candidate.has_all_tensors else ():
        if dtype not in dtypes and re.search(rf"(?i)\b{word}\b", text):
            message = f"the description says {word}, but no input or output is {dtype}"
            findings.add("description-number", message, "correct the description", "/description")


def _own_numbers(candidate: Candidate) -> Iterator[int]:
    yield from candidate.const_axes.values()
    others = [candidate.reference or "", *(text for _, text in candidate.constraints)]
    others += [tag.replace(":", " ") for _, tag in candidate.tags]
    yield from (int(number) for text in others for number in re.findall(r"(?<![\w.])\d{1,9}(?![\w.])", text))


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: operator.add, ast.Mult: operator.mul}


def _value(text: str) -> int | None:
    """The value of an expression such as ``((64 query + 2 x 8 key-value heads) x 128)``; None if it is none."""
    plain = re.sub(r"(?<=[\d)])\s*( x | of | heads of )", " * ", re.sub(r"[,:][^()]*(?=\)$)", "", text))
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
