"""Statements of workloads/ about traces that are not here, and about Definitions: an edited file is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from flashinfer_trace.dataset.digests import lengths_sha256
from flashinfer_trace.judging.traffic.profiles import TrafficError, load_traffic

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


def of_decode(**fields: Any) -> Callable[[Json], object]:
    return lambda data: data["workloads"]["decode-1"].update(fields)


WRONG_WORKLOADS: dict[str, tuple[Callable[[Json], object], str, str]] = {
    "a list": (lambda data: data.update(workloads=[]), "/workloads", "object"),
    "none": (lambda data: data.update(workloads={}), "/workloads", ""),
    "no seed": (lambda data: data["workloads"]["decode-1"].pop("seed"), "/workloads/decode-1", "'seed'"),
    "no digest": (of_decode(inputs={"weight": "xyz"}), "/workloads/decode-1/inputs/weight", "xyz"),
    "another Definition": (lambda data: data.update(definition="rmsnorm_h1"), "/definition", 'it is for "rmsnorm_h1"'),
    "unknown traffic": (
        lambda data: data["workloads"].update({"decode-9": data["workloads"]["decode-1"]}),
        "/workloads/decode-9",
        "no such traffic",
    ),
    "other axes": (of_decode(axes={"rows": 1}), "/workloads/decode-1/axes", 'those of the Definition "batch_size"'),
    "fewer inputs": (of_decode(inputs={"weight": "0" * 64}), "/workloads/decode-1/inputs", '"hidden_states", "weight"'),
}


@pytest.mark.parametrize("name", WRONG_WORKLOADS)
def test_workloads_of_something_else_are_refused(dataset: Dataset, name: str) -> None:
    file = "workloads/rmsnorm/rmsnorm_h3072.json"
    definition = json.loads((REPOSITORY / "definitions/rmsnorm/rmsnorm_h3072.json").read_text(encoding="utf-8"))
    definition["tags"] = ["status:unverified", *(tag for tag in definition["tags"] if tag.startswith("stage:"))]
    data = json.loads((REPOSITORY / file).read_text(encoding="utf-8"))
    dataset.write(TRAFFIC, json.loads((REPOSITORY / TRAFFIC).read_text(encoding="utf-8")))
    dataset.write("definitions/rmsnorm/rmsnorm_h3072.json", definition)
    dataset.write(file, data)
    assert [problem for problem in dataset.problems() if problem.file == file] == []
    change, pointer, message = WRONG_WORKLOADS[name]
    change(data)
    dataset.write(file, data)
    (problem,) = (problem for problem in dataset.problems() if problem.file == file)
    assert (problem.rule, problem.pointer) == ("workloads-invalid", pointer)
    assert message in problem.message


def test_workloads_of_no_definition_are_refused(dataset: Dataset) -> None:
    for name in (TRAFFIC, "workloads/rmsnorm/rmsnorm_h3072.json"):
        dataset.write(name, json.loads((REPOSITORY / name).read_text(encoding="utf-8")))
    (problem,) = dataset.problems()
    assert problem.rule == "workloads-invalid" and "definitions/rmsnorm/rmsnorm_h3072.json" in problem.message
