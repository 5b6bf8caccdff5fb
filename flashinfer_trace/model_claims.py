"""Which models a Definition may be tagged with: those that need it, and those that somebody named with a source.

``models/needs/<model>.json`` is derived from traces and ``models/``. ``models/curated/claims.json`` holds what people
found elsewhere: Definitions, the models that call them, and where that can be seen. Nothing here imports torch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashinfer_trace.json_source import TRACES, JsonSourceError, load_object

__all__ = ["ModelClaims", "ModelClaimsError", "curated_path", "load_model_claims"]


class ModelClaimsError(ValueError):
    """A file under models/ is malformed. The message names it."""


@dataclass(frozen=True)
class ModelClaims:
    """What models/ says.

    Attributes:
        models: the models that have constants in models/.
        needed: Definition -> the models that need it.
        curated: (names or globs, models) of models/curated/claims.json.
        titles: the name of each model as its authors write it -> the model.
    """

    models: frozenset[str]
    needed: Mapping[str, frozenset[str]]
    curated: tuple[tuple[tuple[str, ...], frozenset[str]], ...]
    titles: Mapping[str, str] = field(default_factory=dict)

    def allows(self, definition: str, model: str) -> bool:
        """Whether a Definition may carry ``model:<model>``."""
        return model in self.needed.get(definition, ()) or any(
            model in models and any(fnmatch.fnmatchcase(definition, name) for name in names)
            for names, models in self.curated
        )


def curated_path(root: Path) -> Path:
    """Where the curated marks of a dataset lie."""
    return root / "models" / "curated" / "claims.json"


def load_model_claims(root: Path) -> ModelClaims | None:
    """What models/ says; None if the root has no models/needs/, and so nothing to derive claims from.

    Raises:
        ModelClaimsError: a file cannot be read or is malformed.
    """
    needs = sorted((root / "models" / "needs").glob("*.json"))
    if not needs:
        return None
    needed: dict[str, set[str]] = {}
    path = curated_path(root)
    try:
        marks = load_object(path)["claims"] if path.exists() else []
        curated = tuple((tuple(mark["definitions"]), frozenset(mark["models"])) for mark in marks)
        for path in needs:
            document = load_object(path, TRACES)
            for op in document["ops"]:
                for names in op["definitions"].values():
                    for name in names:
                        needed.setdefault(name, set()).add(document["model"])
        titles = {}
        for path in sorted((root / "models").glob("*.json")):
            if title := load_object(path).get("title"):
                titles[str(title)] = path.stem
    except (JsonSourceError, KeyError, TypeError, AttributeError) as error:
        raise ModelClaimsError(f"{path.relative_to(root)}: malformed ({error!r})") from None
    models = frozenset(one.stem for one in (root / "models").glob("*.json"))
    return ModelClaims(models, {name: frozenset(found) for name, found in needed.items()}, curated, titles)
