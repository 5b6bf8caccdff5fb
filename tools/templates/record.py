"""The record of a FlashInfer's templates: a dump of each, and of some at sizes that models have."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.dumps import Dump, dump_of

#: The committed record. Packed, because templates repeat each other: it is 3 MB of text.
RECORD = Path("tests/dumps/flashinfer-0.7.2.json.xz")


class RecordError(ValueError):
    """A record cannot be read. The message names the file and the fix."""


@dataclass(frozen=True)
class Record:
    """The findings in one release.

    Attributes:
        version: of FlashInfer.
        dumps: as FlashInfer wrote them, with the prefix of their names, `template`.
        helpers: by template, source of what its reference calls and its dumps lack; by FlashInfer, not by its dumps.
        checks: by template, what its comparison accepts that is wrong: ``nan``, ``zeros``, ``x100``; or ``raises``.
            Templates whose outputs are not all of one usual dtype are not here.
    """

    version: str
    dumps: tuple[Mapping[str, Any], ...]
    helpers: Mapping[str, str]
    checks: Mapping[str, tuple[str, ...]]

    def parsed(self) -> list[Dump]:
        """The dumps."""
        return [dump_of(data) for data in self.dumps]


def packed(record: Record) -> bytes:
    """The bytes of a record, the same each time."""
    return lzma.compress(json.dumps(asdict(record), ensure_ascii=False).encode(), preset=9)


def read_record(path: Path) -> Record:
    """The record in a file.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        data = json.loads(lzma.decompress(path.read_bytes()))
        checks = {name: tuple(found) for name, found in data["checks"].items()}
        return Record(data["version"], tuple(data["dumps"]), data["helpers"], checks)
    except (OSError, lzma.LZMAError, ValueError, KeyError) as error:
        raise RecordError(f"{path}: no record: {error}; write one with `python -m tools.templates --record`") from error
