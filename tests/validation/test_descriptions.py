"""Axes, inputs and outputs mean the same in every Definition of a family, and their descriptions say the same."""

from __future__ import annotations

import json
import re
from collections import defaultdict

import pytest

from flashinfer_trace import definitions
from flashinfer_trace.dataset.model_claims import load_model_claims
from flashinfer_trace.format.naming import family_name, load_naming

from .conftest import REPOSITORY

pytestmark = pytest.mark.quick


def test_no_definition_describes_alone_what_its_siblings_describe_otherwise() -> None:
    """Numbers apart. What models need is compared with the recipes, byte for byte, in tests/extract."""
    claims, naming = load_model_claims(REPOSITORY), load_naming(REPOSITORY)
    assert claims is not None
    wordings: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in definitions(root=REPOSITORY):
        assert one.path is not None
        data = json.loads(one.path.read_text(encoding="utf-8"))
        for section in ("axes", "inputs", "outputs"):
            for name, entry in data[section].items():
                # "in these models" where a recipe knows them, "in models" where people wrote the Definition.
                text = re.sub(r"\d+", "#", entry["description"]).replace("in these models", "in models")
                wordings[str(family_name(one, naming)), section, name][text].append(one.name)
    compared = 0
    alone: dict[str, set[str]] = defaultdict(set)
    for (_, section, name), found in wordings.items():
        compared += sum(map(len, found.values())) > 1
        for names in found.values() if len(found) > 1 else ():
            if len(names) == 1 and names[0] not in claims.needed:
                alone[names[0]].add(f"/{section}/{name}/description")
    assert compared > 800
    assert alone == {}, "describe them as their siblings do"
