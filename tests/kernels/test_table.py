"""The table of kernels: one entry for each, torch-free, by release; and the kernels and families of other packages."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest

import flashinfer_trace
from flashinfer_trace.families import FamilyError, all_families, families_of_op_type, family_of
from flashinfer_trace.harness.family import Kernel, private_kernel
from flashinfer_trace.kernels import TABLE, family_kernels, kernels_of, launched_by, named_kernels, private
from flashinfer_trace.kernels.private import PrivateKernelsError
from flashinfer_trace.kernels.table import HOPPER, KernelFacts, Place, facts_of, kernel, use

NORM = "rmsnorm_h512"


def test_the_table_needs_no_torch():
    code = "import sys, flashinfer_trace.kernels; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_each_kernel_has_one_entry_in_the_order_of_its_library():
    paths = [entry.path for entry in TABLE]
    assert len(set(paths)) == len(paths) > 130
    by_library = {}
    for path in paths:
        name = path.removeprefix("torch.ops.")
        by_library.setdefault(name.partition(".")[0], []).append(name)
    assert all(names == sorted(names) for names in by_library.values())


def test_every_family_calls_exactly_the_kernels_that_the_table_has_for_it():
    families = all_families()
    assert {one.name for one in families} == {name for entry in TABLE for one in entry.uses for name in one.families}
    for family in families:
        assert {one.label for one in family.kernels} == set(family_kernels(family.name)), family.name


@pytest.mark.parametrize(
    ("stage", "page_size", "takes"),
    [("prefill_causal", 64, True), ("prefill_causal", 128, False), ("decode", 128, True)],
)
def test_flash_attention_loads_pages_of_whole_tiles_with_what_follows_the_last_key(stage, page_size, takes):
    name = f"gqa_paged_{stage}_h8_kv1_d128_ps{page_size}"
    found = kernels_of(f"gqa_paged_{stage}", flashinfer_trace.load(name))
    assert ("sgl_kernel.flash_attn.flash_attn_with_kvcache" in found) == takes


def test_what_kernels_launch_belongs_to_one_function():
    launched = "sglang.srt.layers.attention.triton_ops.decode_attention._fwd_kernel_stage2"
    assert launched_by()[launched] == "sglang.kernels.ops.attention.decode_attention.decode_attention_fwd"
    assert "sglang.jit_kernel.activation.run_activation" not in launched_by()  # three functions launch it


def test_two_kernels_of_one_label_are_refused():
    twice = kernel("flashinfer.norm.x", use("a", "b"), use("b", on=HOPPER))
    with pytest.raises(ValueError, match=r"two kernels flashinfer\.norm\.x of the family b"):
        facts_of((twice,))


MOVED = KernelFacts(
    "new.module.f",
    (
        Place("new.module.f", "new-wheel", since="0.2.3"),
        Place("new.module.f", "wheel", since="0.4.10"),
        Place("old.module.g", "wheel", until="0.4.6"),
    ),
)
GONE = KernelFacts("a.f", (Place("a.f", "wheel", until="0.4.6"),))
LATE = KernelFacts("a.f", (Place("a.f", "wheel", since="0.4.10.post1"),))


@pytest.mark.parametrize(
    ("facts", "installed", "library", "absent"),
    [
        (GONE, {"wheel": "0.4.10"}, "wheel", "not in wheel 0.4.10, last in 0.4.6"),
        (GONE, {"wheel": "0.4.6.post2+cu130"}, "wheel", "not in wheel 0.4.6.post2+cu130, last in 0.4.6"),
        (LATE, {"wheel": "0.4.10"}, "wheel", "not in wheel 0.4.10, first in 0.4.10.post1"),
        (GONE, {}, "wheel", None),
        (MOVED, {"wheel": "0.4.7"}, "new-wheel", "not in wheel 0.4.7, first in 0.4.10"),
        (MOVED, {}, "new-wheel", None),
    ],
)
def test_a_release_that_lacks_a_kernel_says_which_has_it(monkeypatch, facts, installed, library, absent):
    monkeypatch.setattr("flashinfer_trace.kernels.table._version", installed.get)
    assert (facts.absent(), facts.library) == (absent, library)
    assert facts.missing() == (absent or f"needs {library}, which is not installed")
    assert facts.skipped() == absent and not facts.optional


@pytest.mark.parametrize(
    ("path", "until", "absent", "missing"),
    [
        ("json.dumps", "", None, None),
        ("json.gone", "", "not in wheel 0.5, last in 0.4", "not in wheel 0.5, last in 0.4"),
        ("json.no_module.f", "", "not in wheel 0.5, last in 0.4", "not in wheel 0.5, last in 0.4"),
        ("json.gone", "0.5", None, None),  # a defect of the table, which a call shows
        ("json.no_module.f", "0.5", None, "needs json.no_module of wheel, which cannot be imported"),
    ],
)
def test_a_name_that_the_installed_release_lacks_is_looked_for(monkeypatch, path, until, absent, missing):
    """A release that the table does not know, or the last one that is known to have the name."""
    monkeypatch.setattr("flashinfer_trace.kernels.table._version", {"wheel": "0.5"}.get)
    monkeypatch.setitem(flashinfer_trace.kernels.table.RECORDED, "wheel", "0.4")
    facts = KernelFacts(path, (Place(path, "wheel", until=until),))
    assert facts.absent() == absent
    assert (facts.missing() or "")[: len(missing or "")] == (missing or "")
    assert (facts.missing() is None) == (missing is None)


def test_a_kernel_outside_the_table_needs_facts():
    family = family_of(flashinfer_trace.load(NORM))
    with pytest.raises(FamilyError, match=r"family rmsnorm: the table of kernels has no toy\.norm that computes it"):
        Kernel("toy.norm", lambda *_: {}).of_family(family.name)
    with pytest.raises(FamilyError, match=r"toy\.norm has no facts"):
        Kernel("toy.norm", lambda *_: {}).unsupported(flashinfer_trace.load(NORM))


@pytest.fixture
def entry_points(monkeypatch):
    """Sets what entry points of other packages name: group -> objects, or exceptions that loading raises."""

    def name(**groups):
        def loads(named):
            if isinstance(named, Exception):
                raise named
            return named

        def points(group):
            named = groups.get(group.rpartition(".")[2], ())
            return [SimpleNamespace(name="mine", value="mine:it", load=lambda one=one: loads(one)) for one in named]

        monkeypatch.setattr(importlib.metadata, "entry_points", points)
        forget()

    def forget():
        for cached in (private.families, private.kernels, private.facts_of_family, families_of_op_type):
            cached.cache_clear()

    yield name
    monkeypatch.undo()
    forget()


FAST = private_kernel("mine.fast_norm", "mine", lambda *_: {}, on=HOPPER, needs=(lambda one: None,))


def test_a_further_kernel_of_a_known_family_is_found_by_both_sides(entry_points):
    entry_points(kernels=[SimpleNamespace(KERNELS={"rmsnorm": (FAST,)})])
    definition = flashinfer_trace.load(NORM)
    assert family_of(definition).kernels_of(definition)[-1].label == "mine.fast_norm"
    assert kernels_of("rmsnorm", definition)["mine.fast_norm"].capabilities == "9.0"
    assert "mine.fast_norm" not in named_kernels("rmsnorm", definition)  # the dataset's tags do not depend on it


def test_a_family_of_another_package_is_found(entry_points):
    from dataclasses import replace

    record = family_of(flashinfer_trace.load(NORM))
    mine = replace(record, name="my_norm", kernels=(FAST,))
    entry_points(families=[SimpleNamespace(FAMILIES=(mine,))])
    assert families_of_op_type("rmsnorm")["my_norm"] is mine and set(family_kernels("my_norm")) == {"mine.fast_norm"}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"kernels": [ImportError("no CUDA")]}, "mine = mine:it of .*kernels cannot be loaded: ImportError: no CUDA"),
        ({"kernels": [SimpleNamespace(KERNELS=[FAST])]}, "must define KERNELS, a mapping"),
        ({"families": [SimpleNamespace(FAMILIES=[])]}, "must define FAMILIES, a tuple"),
        ({"kernels": [SimpleNamespace(KERNELS={"rmsnorm": (Kernel("a.b", print),)})]}, r"a\.b has no facts"),
    ],
)
def test_entry_points_that_cannot_be_used_are_named(entry_points, groups, message):
    entry_points(**groups)
    with pytest.raises(PrivateKernelsError, match=message):
        kernels_of("rmsnorm", flashinfer_trace.load(NORM))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"kernels": [SimpleNamespace(KERNELS={"no_such_family": (FAST,)})]}, "names the family no_such_family"),
        ({"kernels": [SimpleNamespace(KERNELS={"rmsnorm": (FAST, FAST)})]}, "already has the kernel mine"),
        ({"families": [SimpleNamespace(FAMILIES=("rmsnorm",))]}, "'rmsnorm', which is not a Family"),
    ],
)
def test_records_of_other_packages_that_do_not_fit_are_named(entry_points, groups, message):
    entry_points(**groups)
    with pytest.raises(FamilyError, match=message):
        all_families()
