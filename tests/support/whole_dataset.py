"""The whole dataset as tests see it: its Definitions, and those of each family. It is read once per process.

`flashinfer-trace validate` and `flashinfer-trace verify` check every Definition, and CI runs both before the tests. A
test of what a family's record or its code does therefore takes one Definition of each family; one of what only the
whole dataset can show goes through all of them in one loop, and lists every failure.
"""

from __future__ import annotations

import functools
from collections import defaultdict

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family
from tools.extract.matched import Dataset

#: By name, in order of op_type and name.
DEFINITIONS: dict[str, Definition] = {definition.name: definition for definition in flashinfer_trace.definitions()}
#: The families that have a Definition.
FAMILIES: dict[str, Family] = {}
#: The Definitions of each family, by name.
MEMBERS: dict[str, list[Definition]] = defaultdict(list)

for _definition in DEFINITIONS.values():
    _family = family_of(_definition)
    FAMILIES.setdefault(_family.name, _family)
    MEMBERS[_family.name].append(_definition)


@functools.cache
def with_calls() -> Dataset:
    """The dataset as recorded calls are compared with it; what was found of a call is kept."""
    return Dataset(flashinfer_trace.find_root(), DEFINITIONS.values())


#: The first Definition of each family, by name.
FIRST: dict[str, Definition] = {name: members[0] for name, members in MEMBERS.items()}
