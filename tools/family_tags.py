"""Adds new families to models/curated/family_tags.json, from the tags of their Definitions.

python -m tools.family_tags

A family that the file has already stays as it is: edit it there, then run `flashinfer-trace embed`.

Exit status: 0 success, 2 a file cannot be read, or the Definitions of a new family name neither stages nor kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from flashinfer_trace import DatasetError, Definition, InputError, definitions, find_root
from flashinfer_trace.files import Lines, laid_out, write_text
from flashinfer_trace.json_source import JsonSourceError, load_object
from flashinfer_trace.kernel_paths import KINDS
from flashinfer_trace.model_claims import family_tags_path
from flashinfer_trace.naming import Naming, NamingError, family_name, load_naming, ordered
from tools.shared.command import end_with

#: Namespaces that do not follow from the family.
OTHERS = ("status", "model", "tp", "ep")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    root = find_root()
    path = family_tags_path(root)
    try:
        naming, document = load_naming(root), load_object(path)
        members: dict[str, list[Definition]] = defaultdict(list)
        for one in definitions(root=root):
            members[family_name(one, naming) or ""].append(one)
    except JsonSourceError as error:
        print(f"{path}: {error}; restore it from version control", file=sys.stderr)
        return 2
    except (DatasetError, InputError, NamingError) as error:
        print(error, file=sys.stderr)
        return 2
    known = document.get("families")
    if not isinstance(known, dict):
        print(f"{path}: 'families' must be an object; restore it from version control", file=sys.stderr)
        return 2
    added = [name for name in naming.families if name in members and name not in known]
    if untagged := [name for name in added if lacks_tags(members[name], naming)]:
        print(
            f"{', '.join(untagged)}: the Definitions name no stage and no kernel, or one that schema/naming.json does "
            "not allow; add stage:prefill or stage:decode, or both, and called_as:PATH for each kernel to their tags",
            file=sys.stderr,
        )
        return 2
    known |= {name: groups(members[name], naming) for name in added}
    document["families"] = {name: known[name] for name in naming.families if name in known}
    write_text(path, laid_out(document, _lines))
    print(f"{path}: {', '.join(added) or 'no family'} added")
    return 0


def lacks_tags(members: Sequence[Definition], naming: Naming) -> bool:
    """Whether the Definitions of a family name neither a stage nor a kernel, or one by a value that is none."""
    parts = [tag.partition(":") for one in members for tag in one.tags]
    found = [naming.namespaces[space].accepts(value) for space, _, value in parts if space in ("stage", *KINDS)]
    return not (found and all(found))


def groups(members: Sequence[Definition], naming: Naming) -> list[dict[str, Any]]:
    """The kernels and tags of a family by the Definitions that have them, those of all Definitions first."""
    having: dict[tuple[str, str], set[str]] = defaultdict(set)
    for one in members:
        for tag in one.tags:
            namespace, _, value = tag.partition(":")
            if namespace not in OTHERS:
                having["kernels" if namespace in KINDS else "tags", value if namespace in KINDS else tag].add(one.name)
    parts: dict[frozenset[str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (key, value), names in having.items():
        parts[frozenset(names)][key].append(value)
    found = []
    for sharing, part in sorted(parts.items(), key=lambda item: (-len(item[0]), sorted(item[0]))):
        group: dict[str, Any] = {} if len(sharing) == len(members) else {"only": sorted(sharing)}
        group |= {key: sorted(part[key]) if key == "kernels" else ordered(part[key], naming) for key in sorted(part)}
        found.append(group)
    return found


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    return {0: Lines(2, closing=0), 1: Lines(4, closing=2), 2: Lines(6, closing=4)}.get(len(path))


if __name__ == "__main__":
    end_with(main)
