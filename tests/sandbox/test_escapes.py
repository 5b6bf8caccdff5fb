"""Every known escape and deception is refused by the allow-list, and contained by the worker on its own too."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer_trace.format.reference import ReferenceSourceError, check_allowed
from flashinfer_trace.sandbox.confine import STRONGEST
from flashinfer_trace.sandbox.worker import ReferenceFailed, ReferenceLimits, ReferenceWorker

from .conftest import ESCAPES, HONEST, IMPATIENT, LIMITS, definition_of, x

SECRET = b"a secret that no reference may read\n"

by_name = pytest.mark.parametrize("escape", ESCAPES, ids=[escape["name"] for escape in ESCAPES])


class Surroundings:
    """Targets that an escape must not reach: a secret, a place for a file, a port."""

    def __init__(self, directory: Path) -> None:
        self.secret = directory / "secret"
        self.secret.write_bytes(SECRET)
        self.canary = directory / "canary"
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)

    def fill(self, source: str) -> str:
        port = self.server.getsockname()[1]
        return (
            source.replace("@SECRET@", str(self.secret))
            .replace("@CANARY@", str(self.canary))
            .replace("@PORT@", str(port))
        )

    def check(self) -> None:
        assert not self.canary.exists(), "a file was written"
        assert self.secret.read_bytes() == SECRET
        with pytest.raises(BlockingIOError):
            self.server.accept()


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Surroundings]:
    monkeypatch.setenv("SECRET_TOKEN", "token")
    found = Surroundings(tmp_path)
    yield found
    found.check()
    found.server.close()


def test_there_are_enough_escapes() -> None:
    assert len({escape["name"] for escape in ESCAPES}) == len(ESCAPES) >= 36
    assert all(escape["description"].endswith(".") for escape in ESCAPES)


@by_name
def test_the_allow_list_refuses(escape: dict[str, Any], surroundings: Surroundings) -> None:
    source = "import torch\n\n" + surroundings.fill(escape["source"])
    if not escape.get("refused", True):
        check_allowed(source, "stranger", "rmsnorm")
        return
    with pytest.raises(ReferenceSourceError, match=r"stranger:\d+: "):
        check_allowed(source, "stranger", "rmsnorm")


def limits_for(escape: dict[str, Any]) -> ReferenceLimits:
    """A worker that never answers is waited for only so long; a busy machine changes nothing."""
    return IMPATIENT if escape["contained"][0] == "timed-out" else LIMITS


@by_name
@pytest.mark.usefixtures("unchecked")
def test_the_worker_contains(escape: dict[str, Any], worker: ReferenceWorker, surroundings: Surroundings) -> None:
    worker.run(HONEST, x(), 0)
    worker.limits = limits_for(escape)
    if worker.level != STRONGEST:
        pytest.skip(f"this platform confines workers by {worker.level} only, which promises less")
    definition = definition_of(surroundings.fill(escape["source"]))
    before = set(os.environ.items()), torch.get_default_dtype(), torch.equal, os.getcwd()
    try:
        outputs = worker.run(definition, x(), 0)
    except ReferenceFailed as failure:
        found = failure.kind
        assert failure.message.isprintable() and len(failure.message) < 2500
    else:
        found = "harmless" if torch.equal(outputs["y"], 2 * x()["x"]) else "wrong"
    assert found in escape["contained"]
    assert before == (set(os.environ.items()), torch.get_default_dtype(), torch.equal, os.getcwd())


@by_name
def test_what_passes_the_allow_list_is_contained(
    escape: dict[str, Any], worker: ReferenceWorker, surroundings: Surroundings
) -> None:
    """As users run it: both together let nothing pass."""
    definition = definition_of(surroundings.fill(escape["source"]))
    worker.limits = limits_for(escape)
    with pytest.raises(ReferenceFailed) as failure:
        worker.run(definition, x(), 0)
    assert failure.value.kind == "refused" if escape.get("refused", True) else failure.value.kind in escape["contained"]
