"""The committed record of FlashInfer 0.7.2's templates, and what classifies its dumps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashinfer_trace.dataset.dumps import TIES, Dump, dump_of
from flashinfer_trace.dataset.store import find_root
from flashinfer_trace.judging.dumped import Classified, References, classify
from flashinfer_trace.sandbox.limits import ReferenceLimits
from flashinfer_trace.sandbox.worker import ReferenceWorker
from tools.templates.record import RECORD, Record, read_record

#: Classifies a dump after texts of its reference are replaced.
Classify = Callable[..., Classified]


@pytest.fixture(scope="session")
def record() -> Record:
    return read_record(find_root() / RECORD)


@pytest.fixture(scope="session")
def references() -> Iterator[References]:
    with ReferenceWorker(ReferenceLimits(seconds=10.0), waived=TIES) as worker:
        yield References(worker)


@pytest.fixture(scope="session")
def dumps(record: Record) -> dict[str, Dump]:
    """The dumps by name; of several with one name, the first."""
    found: dict[str, Dump] = {}
    for dump in record.parsed():
        found.setdefault(dump.name, dump)
    return found


@pytest.fixture(scope="session")
def changed(record: Record, references: References) -> Classify:
    """Classifies the dump of a name after texts of its reference, or dtypes, are replaced; each text must be there."""
    by_name = {data["name"]: data for data in reversed(record.dumps)}

    def classify_changed(name: str, *texts: tuple[str, str], dtype: tuple[str, str] | None = None) -> Classified:
        data = dict(by_name[name])
        for old, new in texts:
            assert old in data["reference"]
            data["reference"] = data["reference"].replace(old, new)
        for section in ("inputs", "outputs") if dtype else ():
            assert dtype is not None
            data[section] = {
                key: {**entry, "dtype": dtype[1] if entry["dtype"] == dtype[0] else entry["dtype"]}
                for key, entry in data[section].items()
            }
        return classify(dump_of(data, Path(f"{name}.json")), record.version, references)

    return classify_changed
