"""Digests of data: of what a Definition promises, and of content that nobody can compute again. Imports no torch.

`content_sha256` is that of data whose numbers nobody can compute again from what is kept here: an edit is noticed.

The reference's own digest is `reference.sha256`. Those of the code that judges are in `harness.binding`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashinfer_trace.format.reference import sha256

if TYPE_CHECKING:
    from flashinfer_trace.format.definition import Definition


#: Digest of a reference, by its text: those of a dataset are asked for many times.
_reference_sha256 = functools.lru_cache(maxsize=1 << 13)(sha256)
#: Hexadecimal digits of the digests in evidence: 48 bits, which nobody meets by chance.
DIGITS = 12


def short(sha256: str) -> str:
    """A digest as evidence has it."""
    return sha256[:DIGITS]


def definition_sha256(definition: Definition) -> str:
    """SHA-256 of what a Definition promises: its reference, name, op_type, axes, constraints, inputs and outputs.

    Dtypes and the order of inputs and outputs are part of it. Descriptions and tags are not.
    """
    promised = {
        "reference": _reference_sha256(definition.reference),
        "name": definition.name,
        "op_type": definition.op_type,
        "axes": [[axis.name, axis.value] for axis in definition.axes.values()],
        "constraints": list(definition.constraints),
        "inputs": [[one.name, one.shape, one.dtype] for one in definition.inputs.values()],
        "outputs": [[one.name, one.shape, one.dtype] for one in definition.outputs.values()],
    }
    return hashlib.sha256(json.dumps(promised, sort_keys=True).encode()).hexdigest()


def content_sha256(data: Mapping[str, Any], *without: str) -> str:
    """SHA-256 of a JSON object but for some of its fields, such as the one that holds this digest."""
    content = {name: value for name, value in data.items() if name not in without}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def lengths_sha256(profile: Mapping[str, Any]) -> str:
    """SHA-256 of all that a profile of workloads/traffic.json says, but for this digest itself."""
    return content_sha256(profile, "lengths_sha256")
