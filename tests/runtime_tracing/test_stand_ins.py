"""Packages that are not installed, and that SGLang imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tools.runtime_tracing import stand_ins


@pytest.fixture
def absent() -> Iterator[str]:
    finders, find_spec = list(sys.meta_path), importlib.util.find_spec
    stand_ins.install(["absent_package"])
    yield "absent_package"
    sys.meta_path[:], importlib.util.find_spec = finders, find_spec
    for name in [name for name in sys.modules if name.startswith("absent_package")]:
        del sys.modules[name]


def test_any_use_of_an_absent_package_passes(absent: str):
    module = importlib.import_module(f"{absent}.inner")

    @module.register
    def function() -> int:
        return 4

    @module.nested.register(3)
    def other() -> int:
        return 5

    class Derived(module.Base):
        def __init__(self, size: int) -> None:
            self.size = size

    assert (function(), other(), Derived(3).size) == (4, 5, 3)
    with module.opened("file") as file:
        assert list(file) == [] and not file
    assert module.Kind["text"] is module.Kind and (module.Kind | None) is object


def test_it_is_not_installed(absent: str):
    importlib.import_module(absent)
    assert importlib.util.find_spec(absent) is None
    assert importlib.util.find_spec("json") is not None


def test_a_library_that_does_without_is_told_so(absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "probing.py").write_text("import absent_package\n")
    monkeypatch.syspath_prepend(str(tmp_path / "flashinfer"))
    with pytest.raises(ModuleNotFoundError, match="absent_package"):
        importlib.import_module("probing")


def test_flash_attention_gives_zeros_of_the_right_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("")
    (tmp_path / "sgl_kernel" / "flash_attn.py").write_text(
        "from sgl_kernel import flash_ops\n"
        "def flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=False): raise AssertionError\n"
        "def flash_attn_varlen_func(q, k, v, return_softmax_lse=False): raise AssertionError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    stand_ins.flash_attention_3()
    try:
        module = sys.modules["sgl_kernel.flash_attn"]
        query, value = torch.ones(5, 8, 192), torch.ones(9, 8, 128)
        assert module.flash_attn_varlen_func(query, query, value).shape == (5, 8, 128)
        output, lse = module.flash_attn_with_kvcache(query, query, v_cache=value, return_softmax_lse=True)
        assert not output.any() and lse.shape == (8, 5)
        assert module.flash_attn_varlen_func.__module__ == "sgl_kernel.flash_attn"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
            del sys.modules[name]
