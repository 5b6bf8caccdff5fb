"""Kernels by the names that people see: labels, paths, and the paths of tags."""

import pytest

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.kernels.names import KINDS, kernels_named, no_kernel_named

PAGED = "gqa_paged_decode_h2_kv1_d128_ps64"
WRAPPER = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"


def kernels_of(name):
    definition = flashinfer_trace.load(name)
    return family_of(definition).kernels_of(definition)


def labels(given, definition):
    return [one.label for one in kernels_named(given, kernels_of(definition))]


def test_a_path_names_all_variants_and_a_label_one():
    assert len(labels(WRAPPER, PAGED)) > 1
    assert labels(f"{WRAPPER}[fa2]", PAGED) == [f"{WRAPPER}[fa2]"]


def test_every_kernel_tag_names_a_kernel_or_says_that_nobody_ran_it():
    for definition in flashinfer_trace.definitions():
        for tag in definition.tags:
            namespace, _, path = tag.partition(":")
            if namespace in KINDS:
                found = kernels_named(path, kernels_of(definition.name))
                assert bool(found) or namespace == "called_as", (definition.name, tag)


def test_a_kernel_that_nobody_ran_is_not_taken_for_a_typo():
    definition = flashinfer_trace.load("mla_paged_decode_page_table_h128_ckv512_kpe64_ps64")
    text = no_kernel_named("sgl_kernel.cutlass_mla_decode", "it has", kernels_of(definition.name), [definition])
    assert "it has not been run here" in text and "did you mean" not in text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rmsnrm", "flashinfer.norm.rmsnorm"),
        ("sgl_kernel.rmsnrm", "sgl_kernel.rmsnorm"),
        ("flashinfer.norm.rmsnor", "flashinfer.norm.rmsnorm"),
    ],
)
def test_a_typo_gets_the_nearest_names(typed, meant):
    text = no_kernel_named(typed, "it has", kernels_of("rmsnorm_h512"))
    assert "did you mean" in text and meant in text
