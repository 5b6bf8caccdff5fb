"""What the harness records say of their kernels, as data for whatever imports no torch: ``schema/records.json``.

`python -m tools.generate_docs` writes that file from the records, and a test keeps it current.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace import json_source, json_values

__all__ = ["KernelFacts", "Records", "RecordsError", "load_records", "records_path"]

_FIX = "in a checkout, run python -m tools.generate_docs"


class RecordsError(ValueError):
    """schema/records.json is missing or malformed. The message says why."""


@dataclass(frozen=True)
class KernelFacts:
    """One kernel of a family's record.

    Attributes:
        label: its unique name within the family.
        library, path, variant: what ships it, its dotted path, and which use of it.
        min_capability, max_capability: inclusive range of CUDA compute capabilities.
        policies: output -> text of the policy by which this kernel is compared.
        unsupported: Definitions of the family that it does not compute.
    """

    label: str
    library: str
    path: str
    variant: str
    min_capability: tuple[int, int]
    max_capability: tuple[int, int]
    policies: Mapping[str, str]
    unsupported: frozenset[str]

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it runs on a GPU of this compute capability."""
        return self.min_capability <= capability <= self.max_capability


@dataclass(frozen=True)
class Records:
    """The facts of all records.

    Attributes:
        families: family -> its kernels by label.
        modules: family -> the module that has its record, relative to the package.
        contracts: family -> what all of its Definitions have in common; none of a family without Definitions.
    """

    families: Mapping[str, Mapping[str, KernelFacts]]
    modules: Mapping[str, str]
    contracts: Mapping[str, Mapping[str, Any]]

    def kernels_of(self, family: str, definition: str) -> dict[str, KernelFacts]:
        """The kernels that compute a Definition, by label; none if the family has no record."""
        kernels = self.families.get(family, {})
        return {label: kernel for label, kernel in kernels.items() if definition not in kernel.unsupported}


def records_path(root: Path) -> Path:
    """Where the facts of a dataset's records lie."""
    return root / "schema" / "records.json"


def load_records(root: Path) -> Records:
    """Reads ``schema/records.json`` under a dataset root (cached until the file changes).

    Raises:
        RecordsError: it is missing, not JSON, or malformed.
    """
    path = records_path(Path(root))
    try:
        return _load(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise RecordsError(f"{path}: cannot be read ({error.strerror}); {_FIX}") from None


@functools.lru_cache(maxsize=8)
def _load(path: Path, _modified: int) -> Records:
    try:
        document = json_source.load_object(path)
        families = document["families"]
        return Records(
            {name: _kernels(family) for name, family in families.items()},
            {name: str(family["module"]) for name, family in families.items()},
            {name: _contract(family["contract"]) for name, family in families.items() if "contract" in family},
        )
    except json_source.JsonSourceError as error:
        raise RecordsError(f"{path}: {error}; {_FIX}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordsError(f"{path}: malformed ({error!r}); {_FIX}") from None


def _kernels(family: Mapping[str, Any]) -> dict[str, KernelFacts]:
    kernels = {}
    for data in family["kernels"]:
        low, high = (_capability(data[key]) for key in ("min_capability", "max_capability"))
        texts = json_values.strings([data[key] for key in ("label", "library", "path", "variant")])
        label, library, path, variant = texts
        if label in kernels:
            raise ValueError(f"two kernels have the label {label}")
        kernels[label] = KernelFacts(
            label=label,
            library=library,
            path=path,
            variant=variant,
            min_capability=low,
            max_capability=high,
            policies={**family["policies"], **data["policies"]},
            unsupported=frozenset(json_values.strings(data["unsupported"])),
        )
    return kernels


def _contract(data: Mapping[str, Any]) -> dict[str, Any]:
    """A contract as `validation.contract_rules.contract_of` gives it; its texts are checked, and its order is kept."""
    return {
        "axes": dict(zip(data["axes"], json_values.strings([*data["axes"].values()]), strict=True)),
        "constraints": list(json_values.strings(data["constraints"])),
        **{
            section: {
                name: {
                    "shape": None if one["shape"] is None else list(json_values.strings(one["shape"])),
                    "dtype": json_values.strings([one["dtype"]])[0],
                }
                for name, one in data[section].items()
            }
            for section in ("inputs", "outputs")
        },
    }


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
