"""Which needs of a request may be claimed in tags: those that models/needs/ of the dataset will give.

models/needs/<model>.json holds what the file of the model needs at the default sizes. A configuration that no file of
models/ holds, and other sizes, give Definitions, but no tag model:, tp: or ep:.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tools.extract_definitions.models import available, load_model
from tools.extract_definitions.needs import Need, Options, Recipe, Request
from tools.extract_definitions.traces import STAGES, usage_of

#: How descriptions call the models whose names they may not claim.
UNNAMED = "models of these sizes"

Found = list[tuple[Recipe, Need]]


def mark_claims(root: Path, request: Request, found: Found, needs: Callable[[Request], Found]) -> Found:
    """The needs of a request, of which those that models/needs/ will not give claim no model.

    Args:
        root: the dataset root.
        request: what was asked for; it gains a note on what is not claimed.
        found: its needs.
        needs: finds the needs of a request.
    """
    model = request.model
    path = root / "models" / f"{model.name}.json"
    if model.path == path and request.options.has_default_sizes:
        return found
    given = set()
    if model.name in available(root):
        of_file = load_model(root, model.name)
        given = {_place(need) for _, need in needs(Request(of_file, usage_of(of_file.architecture, None), Options()))}
    marked = [(recipe, need if _place(need) in given else _unclaimed(need)) for recipe, need in found]
    if any(not need.claimed for _, need in marked):
        request.left_out[_note(model.name, path.relative_to(root).as_posix(), exists=bool(given))] = None
    return marked


def describing(needs: Sequence[Need]) -> list[Need]:
    """The needs that decide tags and description of a new Definition: those that are claimed, if any are."""
    return [need for need in needs if need.claimed] or list(needs)


def all_stages(requests: Iterable[Request]) -> bool:
    """Whether a stage that calls a kernel of these models cannot have been left out."""
    return all(one.options.stages == STAGES and one.options.ranks is None for one in requests)


def _place(need: Need) -> tuple[object, ...]:
    return need.key, need.use.tp, need.use.ep


def _unclaimed(need: Need) -> Need:
    model = replace(need.use.model, title=UNNAMED)
    return replace(need, claimed=False, use=replace(need.use, model=model))


def _note(name: str, path: str, exists: bool) -> str:
    if exists:
        return (
            f"model:, tp: and ep: tags for what {name} needs at other sizes than {path} gives by default; "
            "existing Definitions stay as they are"
        )
    return (
        f"model:, tp: and ep: tags, as there is no {path}; existing Definitions stay as they are. "
        f"To claim the model, add {path} and extract it without --config"
    )
