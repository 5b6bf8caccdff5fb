"""Facts read from kernels' sources and libraries: schemas in bytes, and what a Triton kernel writes."""

from __future__ import annotations

import types

from tools.dry_run import caught, install, kernels


def test_schemas_stand_in_the_bytes_of_a_library_also_across_blocks():
    text = (
        b"\x00\x01fwd(Tensor q, Tensor? out=None,\n int n) -> (Tensor(a!), Tensor)\x00junk(\x00rows(int m) -> int\x00"
    )
    whole = install._texts(iter([text]))
    assert whole == ["fwd(Tensor q, Tensor? out=None, int n) -> (Tensor(a!), Tensor)", "rows(int m) -> int"]
    assert install._texts(iter([text[:20], text[20:]])) == whole


def write_pairs(out_ptr, index_ptr, length_ptr, block):
    index = tl.load(index_ptr + block)  # noqa: F821
    offset = out_ptr + index * 2
    tl.store(offset, tl.load(length_ptr))  # noqa: F821


def count(total_ptr, values_ptr):
    tl.atomic_add(total_ptr, values_ptr)  # noqa: F821


def kernel(function):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return types.SimpleNamespace(fn=function, arg_names=names, __hash__=object.__hash__)


def test_a_triton_kernel_writes_where_the_address_of_a_store_comes_from():
    assert kernels._stored.__wrapped__(kernel(write_pairs)) == {"out_ptr"}
    assert kernels._stored.__wrapped__(kernel(count)) == {"total_ptr"}


def test_a_kernel_without_source_may_write_everything():
    unreadable = types.SimpleNamespace(fn=len, arg_names=("a", "b"))
    assert kernels._stored.__wrapped__(unreadable) == {"a", "b"}


def test_kept_bytecode_of_a_site_that_was_moved_names_the_new_place(tmp_path):
    """Otherwise, the lines of calls would be looked up in files that are gone."""
    (tmp_path / "old" / "sglang").mkdir(parents=True)
    (tmp_path / "old" / "sglang" / "srt.py").write_text(
        "def f():\n    try:\n        g()\n    except OSError:\n        pass\n"
    )
    found = []
    for name in ("old", "new"):
        path = str(tmp_path / name / "sglang" / "srt.py")
        found.append(caught._Loader("sglang.srt", path).get_code("sglang.srt"))
        if name == "old":
            (tmp_path / "old").rename(tmp_path / "new")
    assert len(list((tmp_path / "new").rglob("*-reporting"))) == 1
    for code in (found[1], found[1].co_consts[0]):
        assert code.co_filename == path
    assert caught._NAME in found[1].co_consts[0].co_names
