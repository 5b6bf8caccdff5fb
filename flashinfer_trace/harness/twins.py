"""Verifies each small twin once: at the sizes of the twin, all Definitions of a family are often the same one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.family import Family
from flashinfer_trace.harness.verify import Report, prepare, verify

__all__ = ["Twins"]


class Twins:
    """Runs references against the oracle on a CPU, and remembers the report of each distinct twin.

    Two Definitions have the same twin if everything that a case depends on is equal: the family, the reference with the
    twin's constants, axes, inputs, outputs and constraints. Name, description and tags are not among it.
    """

    def __init__(self) -> None:
        self._reports: dict[Hashable, Report] = {}

    def verify(self, definition: Definition, family: Family, *, examples: int, seed: int) -> Report:
        """As `harness.verify.verify` does on a CPU against the oracle, with the Definition's own name.

        The report of a twin that was verified before says so in `twin_of`, took no seconds, and repeats a failure's
        message: its line still repeats the case.
        """
        key = (twin_key(definition, family), examples, seed)
        known = self._reports.get(key)
        if known is not None:
            return dataclasses.replace(known, definition=definition.name, twin_of=known.definition, seconds=0.0)
        report = verify(definition, family, examples=examples, seed=seed)
        self._reports[key] = report
        return report


def twin_key(definition: Definition, family: Family) -> Hashable:
    """What the cases of a Definition's twin depend on."""
    twin = prepare(definition, family, "cpu", full=False)
    data = {key: value for key, value in twin.to_dict().items() if key not in ("name", "description", "tags")}
    for section in ("axes", "inputs", "outputs"):
        data[section] = [(name, {**spec, "description": ""}) for name, spec in data[section].items()]
    return family.name, json.dumps(data)
