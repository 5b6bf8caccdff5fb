"""Parts of a Definition's JSON, and sentences of its description."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tools.extract_definitions.needs import Need

#: The longest description that the schema allows; a longer one is cut between words.
MAX_DESCRIPTION = 4000


def short(value: Any) -> str:
    """A value of a configuration as JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def var(description: str) -> dict[str, Any]:
    """A variable axis."""
    return {"type": "var", "description": description}


def const(value: int, description: str) -> dict[str, Any]:
    """A constant axis."""
    return {"type": "const", "value": value, "description": description}


def tensor(shape: Sequence[str] | None, dtype: str, description: str) -> dict[str, Any]:
    """An input or output; `None` for a scalar."""
    return {"shape": None if shape is None else list(shape), "dtype": dtype, "description": description}


def document(
    description: str,
    needs: Sequence[Need],
    tags: Iterable[str],
    axes: dict[str, Any],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    constraints: Sequence[str] = (),
) -> dict[str, Any]:
    """The JSON of a Definition without name, status and reference; `tags` are the tags of its family."""
    found = dict.fromkeys(tags)
    for need in needs:
        found.update(dict.fromkeys(f"stage:{stage}" for stage in need.stages))
        if need.claimed:
            found.update(dict.fromkeys(_calls(need)))
        found.update(dict.fromkeys(need.tags))
    return {
        "description": textwrap.shorten(description, MAX_DESCRIPTION, placeholder=" ..."),
        "tags": list(found),
        "axes": axes,
        "constraints": list(constraints),
        "inputs": inputs,
        "outputs": outputs,
    }


def _calls(need: Need) -> Iterator[str]:
    """The tags that say which model calls the Definition, and at which parallel size."""
    yield f"model:{need.use.model.name}"
    if need.use.tp is not None:
        yield f"tp:{need.use.tp}"
    if need.use.ep is not None:
        yield f"ep:{need.use.ep}"


def plural(count: int, noun: str) -> str:
    """`1 head`, `2 heads`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    texts = list(words)
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def models(needs: Iterable[Need]) -> str:
    """The titles of the models, in the order of their names."""
    titles = {need.use.model.name: need.use.model.title for need in needs}
    return listed(dict.fromkeys(titles[name] for name in sorted(titles)))


def uses(needs: Iterable[Need]) -> str:
    """`In <models>: <role> at TP 1 and 8; in <models>: ...`, where models that use the kernel alike share one part."""
    parts = [f"in {names}: {listed(roles)}" for names, roles in alike(needs)]
    return f"I{'; '.join(parts)[1:]}."


def alike(needs: Iterable[Need]) -> list[tuple[str, list[str]]]:
    """Models that use a kernel alike, as text, with their roles and the claimed tensor-parallel sizes of these."""
    sizes: dict[tuple[str, str], set[int]] = defaultdict(set)
    titles: dict[str, str] = {}
    for need in needs:
        use = need.use
        titles[use.model.name] = use.model.title
        sizes[use.model.name, use.role].update([use.tp] if use.tp and need.claimed else [])
    by_model: dict[str, list[tuple[tuple[int, ...], str]]] = defaultdict(list)
    for (name, role), tps in sorted(sizes.items()):
        by_model[name].append((tuple(sorted(tps)), role))
    together: dict[tuple[tuple[tuple[int, ...], str], ...], list[str]] = defaultdict(list)
    for name, roles in by_model.items():
        together[tuple(sorted(roles))].append(titles[name])
    return [
        (
            listed(dict.fromkeys(names)),
            [" at ".join(text for text in (role, _tensor_parallel(tps)) if text) for tps, role in roles],
        )
        for roles, names in together.items()
    ]


def users(needs: Sequence[Need]) -> str:
    """`Used at TP 1 by <models>; at TP 8 by <models>.`, or without sizes where these are not claimed."""
    if not all(need.claimed for need in needs):
        return f"Used by {models(needs)}."
    found: dict[int, list[Need]] = defaultdict(list)
    for need in needs:
        found[need.use.tp or 1].append(need)
    return f"Used {'; '.join(f'at TP {tp} by {models(found[tp])}' for tp in sorted(found))}."


def _tensor_parallel(sizes: Sequence[int]) -> str:
    return f"TP {listed(map(str, sizes))}" if sizes else ""
