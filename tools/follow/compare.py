"""Finds out what became of the kernels of one stack in another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.follow.signatures import Site, changes, named, similarity, site_of
from tools.follow.stacks import Stack

UNCHANGED, SIGNATURE, MOVED, GONE, OTHER = STATES = ("unchanged", "signature", "moved", "gone", "not compared")
#: The share of parameters that a function of the same name elsewhere must take to be the same kernel.
SIMILAR = 0.5


@dataclass(frozen=True)
class Outcome:
    """The fate of one kernel path.

    Attributes:
        state: one of `STATES`.
        now: where it is in the other stack; "" if it is gone or not compared.
        changes: what changed in its parameters, or why that is not known; of one that is gone, a function of
            another name with similar parameters.
    """

    path: str
    state: str
    now: str = ""
    changes: tuple[str, ...] = field(default=())


def compare(old: Stack, new: Stack, paths: list[str]) -> list[Outcome]:
    """The outcome of every path, sorted by path."""
    before = {path: site_of(old, path) for path in paths if package_of(path) in old.owners}
    now = {path: site_of(new, path) for path in before}
    elsewhere = named(new, {_name(path) for path, site in now.items() if site is None and before[path] is not None})
    others = {_name(site.path) for name, sites in elsewhere.items() for site in sites if _name(site.path) != name}
    fresh = others - {_name(site.path) for sites in named(old, others).values() for site in sites}
    return [
        _outcome(path, before[path], now[path], elsewhere, fresh)
        if path in before
        else Outcome(path, OTHER, changes=("its sources are not read",))
        for path in sorted(paths)
    ]


def _outcome(
    path: str, before: Site | None, now: Site | None, elsewhere: Mapping[str, list[Site]], fresh: set[str]
) -> Outcome:
    """`fresh`: names that no function of the base stack has; one with exactly a kernel's parameters is its new name."""
    if before is None:
        return Outcome(path, OTHER, changes=("not in the base stack",))
    if now is not None:
        different = _changes(before, now)
        return Outcome(path, SIGNATURE if different else UNCHANGED, path, different)
    similar = [
        site
        for site in elsewhere[_name(path)]
        if similarity(before.signature, site.signature) >= SIMILAR and _offered(path, site.path)
    ]
    ranked = sorted(similar, key=lambda site: _rank(path, before, site))
    for site in ranked:
        renamed = _name(site.path) in fresh and not _changes(before, site)
        if (_name(site.path) == _name(path) or renamed) and _same_project(path, site.path):
            return Outcome(path, MOVED, site.path, _changes(before, site))
    return Outcome(path, GONE, changes=tuple(f"resembles {site.path}" for site in ranked[:1]))


def _same_project(path: str, other: str) -> bool:
    """Kernels move between SGLang's packages; what FlashInfer calls by their name is another kernel."""
    return (package_of(path) == "flashinfer") == (package_of(other) == "flashinfer")


def _offered(path: str, other: str) -> bool:
    """Whether a user may call it there: a package that stopped exporting a kernel does not offer it elsewhere."""
    return path.count(".") > 1 or package_of(path) != package_of(other)


def _rank(path: str, before: Site, site: Site) -> tuple[bool, bool, float, bool, bool, str]:
    """The same package first, then what is public, then the most similar, then what SGLang keeps as a kernel."""
    return (
        package_of(site.path) != package_of(path),
        "._" in site.path,
        -similarity(before.signature, site.signature),
        not site.path.startswith("sglang.kernels."),
        not site.path.endswith(f".{_name(path)}.{_name(path)}"),
        site.path,
    )


def _changes(old: Site, new: Site) -> tuple[str, ...]:
    if old.signature is None or new.signature is None:
        compiled = [name for name, site in (("old", old), ("new", new)) if site.signature is None]
        return () if len(compiled) == 2 else (f"the {compiled[0]} parameters are compiled code",)
    return tuple(changes(old.signature, new.signature))


def package_of(path: str) -> str:
    """The package that a kernel path, or a torch op, belongs to."""
    return path.removeprefix("torch.ops.").split(".")[0]


def _name(path: str) -> str:
    return path.rpartition(".")[2]
