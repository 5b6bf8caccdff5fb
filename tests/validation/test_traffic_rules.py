"""What workloads/traffic.json says of traces that are not here: an edited number is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from flashinfer_trace.digests import lengths_sha256
from flashinfer_trace.traffic.profiles import TrafficError, load_traffic

from .conftest import REPOSITORY, Dataset

Json = dict[str, Any]
TRAFFIC = "workloads/traffic.json"


def of_chat(**fields: Any) -> Callable[[Json], object]:
    return lambda data: data["profiles"]["chat"].update(fields)


def descending(data: Json) -> None:
    """A profile whose digest was made again, but whose quantiles cannot be quantiles."""
    chat = data["profiles"]["chat"]
    chat["running"][3] = 1
    chat["lengths_sha256"] = lengths_sha256(chat)


FALSIFIED: dict[str, tuple[Callable[[Json], object], str, str]] = {
    "a quantile": (
        lambda data: data["profiles"]["chat"]["prompts"].__setitem__(30, 1002),
        "/profiles/chat/lengths_sha256",
        'the digest of the profile "chat" is of other lengths',
    ),
    "a shared prefix": (
        lambda data: data["profiles"]["agentic"].update(prefix=512),
        "/profiles/agentic/lengths_sha256",
        "of other lengths",
    ),
    "the source": (of_chat(source="https://example.org"), "/profiles/chat/lengths_sha256", "of other lengths"),
    "the trace": (of_chat(trace_sha256="0" * 64), "/profiles/chat/lengths_sha256", "of other lengths"),
    "the digest": (of_chat(lengths_sha256="0" * 64), "/profiles/chat/lengths_sha256", "of other lengths"),
    "no digest": (
        lambda data: data["profiles"]["chat"].pop("lengths_sha256"),
        "/profiles/chat",
        "lacks the field 'lengths_sha256'",
    ),
    "quantiles that descend": (descending, "/profiles/chat/running/3", "the quantile 1 is less than 235"),
    "an unknown profile": (
        lambda data: data["requests"][0].update(profile="voice"),
        "/requests/0/profile",
        'there is no profile "voice"',
    ),
}


@pytest.mark.parametrize("name", FALSIFIED)
def test_an_edited_file_is_refused(dataset: Dataset, name: str) -> None:
    data = json.loads((REPOSITORY / TRAFFIC).read_text(encoding="utf-8"))
    dataset.write(TRAFFIC, data)
    assert dataset.problems() == []
    change, pointer, message = FALSIFIED[name]
    change(data)
    dataset.write(TRAFFIC, data)
    (problem,) = dataset.problems()
    assert (problem.rule, problem.file, problem.pointer) == ("traffic-invalid", TRAFFIC, pointer)
    assert message in problem.message and problem.hint


def test_traffic_is_not_drawn_from_an_edited_quantile(dataset: Dataset) -> None:
    data = json.loads((REPOSITORY / TRAFFIC).read_text(encoding="utf-8"))
    data["profiles"]["long"]["positions"][40] += 1
    dataset.write(TRAFFIC, data)
    with pytest.raises(TrafficError, match=r"traffic\.json: profiles\.long: .* of other lengths; .*traffic_statistics"):
        load_traffic(dataset.root)
