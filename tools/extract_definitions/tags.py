"""Tags in one order, so that merging them changes as few lines as can be."""

from __future__ import annotations

from collections.abc import Iterable

from flashinfer_trace.naming import Naming


def ordered(tags: Iterable[str], naming: Naming) -> list[str]:
    """Tags by namespace, in the order of schema/naming.json, then flags; each once.

    Within a namespace: in the order of its listed values, else numbers by value and texts by the alphabet.
    """
    namespaces = list(naming.namespaces)

    def key(tag: str) -> tuple[int, int, int, str]:
        namespace, colon, value = tag.partition(":")
        if not colon or namespace not in naming.namespaces:
            return len(namespaces), 0, 0, tag
        values = naming.namespaces[namespace].values
        position = values.index(value) if value in values else len(values)
        return namespaces.index(namespace), position, int(value) if value.isdecimal() else 0, value

    return sorted(set(tags), key=key)


def merged(existing: list[str], new: Iterable[str], naming: Naming) -> list[str]:
    """`existing` itself if `new` adds nothing to it, else both in order; the status is `existing`'s."""
    added = [tag for tag in new if tag not in existing and not tag.startswith("status:")]
    return ordered([*existing, *added], naming) if added else existing
