"""Needs: what tells the configurations of a chain from all others, as a text."""

from __future__ import annotations

from tools.trace.needs import OTHERWISE, needs

SETTINGS = {
    "plain": {"tp_size": "1"},
    "wide": {"tp_size": "8"},
    "shared": {"tp_size": "8", "dp_size": "8"},
    "both": {"tp_size": "8", "dp_size": "4"},
}


def test_values_and_settings_that_are_not_set():
    assert needs(["plain"], SETTINGS) == "tp_size=1"
    assert needs(["plain", "wide"], SETTINGS) == "dp_size not set"
    assert needs(["wide"], SETTINGS) == "dp_size not set and tp_size=8"
    assert needs(["plain", "wide", "both"], SETTINGS) == "dp_size=4 or not set"
    assert needs(["shared", "both"], SETTINGS) == "dp_size=4 or 8"


def test_all_configurations_and_those_that_nothing_tells_apart():
    assert needs(SETTINGS, SETTINGS) == ""
    assert needs(["a"], {"a": {"tp_size": "1"}, "b": {"tp_size": "1"}}) == OTHERWISE
