"""The tags that follow from models/: which models call a Definition, and at which sizes.

``models/needs/<model>.json`` is derived from traces and ``models/``; ``models/recorded/<definition>.json`` from runs
that were recorded on a GPU. ``models/curated/claims.json`` holds what people found elsewhere: Definitions, the models
and parallel sizes that they are for, and where that can be seen. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashinfer_trace.format.json_source import TRACES, JsonSourceError, load, load_object
from flashinfer_trace.format.json_values import strings


class ModelClaimsError(ValueError):
    """A file under models/ is malformed. The message names it relative to the dataset root."""

    def __init__(self, path: Path, root: Path, reason: str, hint: str, line: int = 1) -> None:
        place = f"{path.relative_to(root).as_posix()}{f':{line}' if line > 1 else ''}"
        super().__init__(f"{place}: {reason}; {hint}")
        self.path, self.reason, self.hint, self.line = path, reason, hint, line


@dataclass(frozen=True)
class ModelClaims:
    """The claims of models/.

    Attributes:
        models: the models that have constants in models/.
        needed: Definition -> tags (model:, tp:, ep:) of the models that need it.
        curated: (names or globs, tags) of models/curated/claims.json.
        titles: the name of each model as its authors write it -> the model.
        recorded: Definition -> tags (model:) of the models of which a recorded run calls it.
        by_model: (Definition, model) -> the parallel sizes (tp:, ep:) at which the model needs it.
    """

    models: frozenset[str]
    needed: Mapping[str, frozenset[str]]
    curated: tuple[tuple[tuple[str, ...], frozenset[str]], ...]
    titles: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    by_model: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    _known: dict[str, frozenset[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def calls(self, definition: str) -> frozenset[str]:
        """The tags (model:, tp:, ep:) that say which models call a Definition, and at which sizes."""
        if definition not in self._known:
            curated = (tags for names, tags in self.curated if _pattern(names).fullmatch(definition))
            derived = (source.get(definition, frozenset()) for source in (self.needed, self.recorded))
            self._known[definition] = frozenset[str]().union(*derived, *curated)
        return self._known[definition]

    def sizes(self, definition: str, model: str) -> frozenset[str]:
        """The sizes (tp:, ep:) at which a model calls a Definition; empty if they make no difference to it."""
        found = self.by_model.get((definition, model), frozenset())
        for names, tags in self.curated:
            models = {tag for tag in tags if tag.startswith("model:")}
            if (not models or f"model:{model}" in models) and _pattern(names).fullmatch(definition):
                found |= tags - models
        return found

    def allows(self, definition: str, model: str) -> bool:
        """Whether a Definition may carry ``model:<model>``."""
        return f"model:{model}" in self.calls(definition)


@functools.lru_cache(maxsize=1024)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Finds these names and globs."""
    return re.compile("|".join(map(fnmatch.translate, names)))


def curated_path(root: Path) -> Path:
    """Where the curated marks of a dataset lie."""
    return root / "models" / "curated" / "claims.json"


def recorded_path(root: Path, definition: str) -> Path:
    """Where it lies which recorded runs of models call a Definition."""
    return root / "models" / "recorded" / f"{definition}.json"


def recorded_paths(root: Path) -> list[Path]:
    """The files of every Definition that recorded runs call, sorted."""
    return sorted((root / "models" / "recorded").glob("*.json"))


def load_model_claims(root: Path) -> ModelClaims | None:
    """The claims of models/; None if the root has no models/needs/, and so nothing to derive claims from.

    Raises:
        ModelClaimsError: a file is missing, cannot be read or is malformed.
    """
    constants = sorted((root / "models").glob("*.json"))
    needs = sorted((root / "models" / "needs").glob("*.json"))
    if not needs:
        return None
    models = frozenset(one.stem for one in constants)
    path = curated_path(root)
    try:
        marks = load_object(path)["claims"] if path.exists() else []
        curated = tuple((strings(mark["definitions"]), frozenset(_claimed(mark))) for mark in marks)
        pairs: list[tuple[str, str]] = []
        by_model: dict[tuple[str, str], frozenset[str]] = {}
        for path in needs:
            document = load_object(path, TRACES)
            pairs += _needed(document)
            for size in document["sizes"]:
                for one in ((name, document["model"]) for name in size["definitions"]):
                    by_model[one] = by_model.get(one, frozenset()) | {size["tag"]}
        runs = {}
        for path in recorded_paths(root):
            runs[path] = load_object(path)["recorded"]
        recorded = _gathered((path.stem, tag) for path, ones in runs.items() for one in ones for tag in _claimed(one))
        titles = {}
        for path in constants:
            if title := load_object(path).get("title"):
                titles[strings([title])[0]] = path.stem
    except (JsonSourceError, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{error}" if isinstance(error, JsonSourceError) else f"malformed ({error!r})"
        is_derived = path.parent.name in ("needs", "recorded")
        derived = "; in a checkout, `flashinfer-trace sync` writes it" if is_derived else ""
        hint = f"correct it, or restore it from version control{derived}"
        raise ModelClaimsError(path, root, reason, hint) from None
    known = {*models, *(one.stem for one in needs)}
    _check_models(curated_path(root), "claims", marks, known, root)
    for path, ones in runs.items():
        _check_models(path, "recorded", ones, known, root)
    return ModelClaims(models, _gathered(pairs), curated, titles, recorded, by_model)


def missing_files(root: Path) -> list[tuple[Path, str]]:
    """The files that belong to those in models/ and are missing, each relative to the root and with what brings it."""
    constants = {one.stem for one in (root / "models").glob("*.json")}
    needs = {one.stem for one in (root / "models" / "needs").glob("*.json")}
    derive, restore = "run `flashinfer-trace sync` in a checkout", "restore it from version control"
    missing = [(root / "models" / "needs" / f"{name}.json", derive) for name in constants - needs]
    missing += [(root / "models" / f"{name}.json", restore) for name in needs - constants]
    if constants:
        missing += [(curated_path(root), restore)] if not curated_path(root).exists() else []
        missing += [(root / "models" / "recorded", derive)] if not recorded_paths(root) else []
    return sorted(missing)


def _check_models(
    path: Path, member: str, marks: Sequence[Mapping[str, Any]], known: Collection[str], root: Path
) -> None:
    """Refuses claims about models that models/ does not have: no tag can say what they do."""
    for index, mark in enumerate(marks):
        for place, name in enumerate(mark.get("models", [])):
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                reason = f"it claims Definitions for the model {name[:80]!r}, but there is no models/{name[:80]}.json"
                hint = f"{f'did you mean {close[0]}? ' if close else ''}correct the name, or add the model"
                line = load(path).line_of(f"/{member}/{index}/models/{place}")
                raise ModelClaimsError(path, root, reason, hint, line)


def _claimed(mark: Mapping[str, Any]) -> Iterable[str]:
    yield from (f"model:{name}" for name in strings(mark.get("models", [])))
    yield from strings(mark.get("tags", []))


def _gathered(pairs: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    """Pairs of a Definition and a tag as Definition -> tags."""
    found: dict[str, set[str]] = {}
    for name, tag in pairs:
        found.setdefault(name, set()).add(tag)
    return {name: frozenset(tags) for name, tags in found.items()}


def _needed(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Pairs of a Definition and a tag, from one file of models/needs/."""
    for op in document["ops"]:
        for names in op["definitions"].values():
            yield from ((name, f"model:{document['model']}") for name in strings(names))
    for size in document["sizes"]:
        (tag,) = strings([size["tag"]])
        yield from ((name, tag) for name in strings(size["definitions"]))
