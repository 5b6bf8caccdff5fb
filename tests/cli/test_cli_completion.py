"""Completion of commands, names, op_types, tags and models."""

from __future__ import annotations

import pytest
from click.shell_completion import get_completion_class

import flashinfer_trace
from flashinfer_trace.cli import main

VARIABLE = "_FLASHINFER_TRACE_COMPLETE"


def completed(shell: str, *words: str) -> list[str]:
    """What the shell suggests for the last of these words."""
    completion = get_completion_class(shell)(main, {}, "flashinfer-trace", VARIABLE)
    return [item.value for item in completion.get_completions(list(words[:-1]), words[-1])]


STATUS = sorted({f"status:{value}" for one in flashinfer_trace.definitions() for value in one.tag_values("status")})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sho"], ["show"]),
        (["show", "rmsnorm_h71"], ["rmsnorm_h7168"]),
        (["verify", "rmsnorm_h7168", "rmsnorm_h15"], ["rmsnorm_h1536"]),
        (["sync", "rmsnorm_h15"], ["rmsnorm_h1536"]),
        (["list", "--op-type", "gem"], ["gemm"]),
        (["list", "--tag", "status:ver"], ["status:verified"]),
        (["coverage", "--model", "deepseek-v3"], ["deepseek-v3", "deepseek-v3.2"]),
        (["coverage", "--format", "j"], ["json"]),
        (["show", "nothing"], []),
    ],
)
def test_words_are_completed(words, expected):
    assert completed("zsh", *words) == expected


def test_every_name_and_op_type_is_offered():
    definitions = list(flashinfer_trace.definitions())
    assert completed("fish", "show", "") == sorted(one.name for one in definitions)
    assert completed("fish", "list", "--op-type", "") == sorted({one.op_type for one in definitions})
    assert completed("fish", "list", "--tag", "") == sorted({tag for one in definitions for tag in one.tags})


STATUS = sorted({f"status:{value}" for one in flashinfer_trace.definitions() for value in one.tag_values("status")})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["list", "--tag", "status", ":", "ver"], "plain,verified"),
        (["list", "--tag", "model", ":", "deepseek-v3.2"], "plain,deepseek-v3.2"),
        (["list", "--tag", "status:ver"], "plain,verified"),
        (["list", "--tag", "stat"], "\n".join(f"plain,{tag}" for tag in STATUS)),
        (["show", "rmsnorm_h71"], "plain,rmsnorm_h7168"),
    ],
)
def test_bash_takes_a_colon_for_the_end_of_a_word(monkeypatch, words, expected):
    """bash passes ``status:ver`` as three words, and replaces only the last of them."""
    monkeypatch.setenv("COMP_WORDS", "\n".join(["flashinfer-trace", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    completion = get_completion_class("bash")(main, {}, "flashinfer-trace", VARIABLE)
    assert completion.complete() == expected


@pytest.mark.parametrize(
    "words", [["show", ""], ["list", "--tag", ""], ["list", "--op-type", ""], ["coverage", "--model", ""]]
)
def test_a_dataset_that_cannot_be_read_completes_nothing(monkeypatch, tmp_path, words):
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    assert completed("zsh", *words) == []
