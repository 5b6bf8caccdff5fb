"""Puts tags in a fixed order, so that merging them changes as few lines as possible."""

from __future__ import annotations

from collections.abc import Iterable

from flashinfer_trace.naming import Naming


def ordered(tags: Iterable[str], naming: Naming) -> list[str]:
    """Distinct tags by namespace, in the order of schema/naming.json, then flags.

    Within a namespace, tags follow the order of its listed values; without a list, numbers are sorted by value and
    texts alphabetically.
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
    """`existing` unchanged if `new` adds nothing, otherwise both in order; the status comes from `existing`."""
    added = [tag for tag in new if tag not in existing and not tag.startswith("status:")]
    return ordered([*existing, *added], naming) if added else existing
