"""flashinfer-trace find and list: which Definitions words find, and what tells alike names apart."""

from __future__ import annotations

import json

import pytest

import flashinfer_trace
from flashinfer_trace.dataset.evidence import proofs
from flashinfer_trace.dataset.finding import Catalog
from flashinfer_trace.format.naming import load_naming

pytestmark = pytest.mark.quick

ROOT = flashinfer_trace.find_root()


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog(flashinfer_trace.definitions(), load_naming(ROOT))


LOOKUPS = json.loads((ROOT / "tests/support/lookups.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("lookup", LOOKUPS, ids=lambda one: one["what"])
def test_one_command_answers_each_lookup(lookup, invoke):
    """The site answers the same in tests/tools/test_site_browser.py."""
    result = invoke("find", *lookup["words"].split())
    assert result.exit_code == 0, result.output
    assert any(line.startswith(lookup["finds"]) for line in result.output.splitlines()), result.output


def names(catalog: Catalog, text: str) -> set[str]:
    return {one.name for one in catalog.find(text.split())}


@pytest.mark.parametrize(
    ("text", "found", "others"),
    [
        (
            "llama-3.1-70b tp=8 decode attention",
            "gqa_paged_decode_h8_kv1_d128_ps1",
            "gqa_paged_decode_h16_kv2_d128_ps1",
        ),
        ("llama-3.1-70b tp=8", "rmsnorm_h8192_eps1e5", "gqa_paged_decode_h64_kv8_d128_ps1"),  # at every size
        ("model=Llama-3.1-70B tp=4", "silu_and_mul_i7168", "silu_and_mul_i28672"),
        ("norm h=4096 eps=1e-05", "rmsnorm_h4096", "rmsnorm_h4096_eps1e6"),
        ("hidden_size=4096 rmsnorm", "rmsnorm_h4096", "rmsnorm_h5120"),
        (
            "gqa_* stage=decode",
            "gqa_paged_decode_h8_kv1_d128_ps1",
            "gqa_ragged_prefill_causal_h8_kv1_d128",
        ),
        ("qwen3 gemm", "gemm_bf16_n4096_k4096", "gemm_bf16_n1024_k6144"),
        ("family=rmsnorm* op_type=rmsnorm", "rmsnorm_h4096", "gemma_rmsnorm_h2304"),
    ],
)
def test_every_word_narrows(catalog, text, found, others):
    assert found in names(catalog, text) and others not in names(catalog, text)
    assert {found, others} <= {one.name for one in catalog.definitions}


def test_a_model_and_its_sizes_belong_together(catalog):
    """A Definition that a model calls on 2 GPUs, and another model on 8, is not one that the first calls on 8."""
    name = "silu_and_mul_i1024"
    assert {"model:deepseek-v3", "tp:2", "tp:8"} <= {*flashinfer_trace.load(name).tags}, "as the union of tags has it"
    assert name in names(catalog, "deepseek-v3 tp=2") and name in names(catalog, "tp=8")
    assert name not in names(catalog, "deepseek-v3 tp=8")


def test_each_model_of_each_definition_finds_it_at_each_of_its_sizes(catalog):
    for one in catalog.definitions[::7]:
        for model, sizes in catalog.models(one).items():
            for size in sizes or ["tp:1"]:
                assert one.name in names(catalog, f"{model} {size.replace(':', '=')} {one.name}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("atention", "no Definition has the word 'atention'; did you mean attention"),
        ("model=lama-3.1-70b", "no Definition has the model 'lama-3.1-70b'; did you mean llama-3.1-70b"),
        ("llama-3.1-70b tp=3", "no Definition has the size 'tp=3'; did you mean tp="),
        ("tp=4 tp=8", "a search takes one size of tp"),
        ("rmsnorm h=4097", "no Definition has h=4097; there are "),
        ("hiden_size=4096", "no Definition has the constant 'hiden_size'; did you mean hidden_size"),
        ("stage=decod", "no Definition has the tag 'stage:decod'; did you mean stage:decode"),
        ("family=rmsnrm", "no Definition has the family 'rmsnrm'; did you mean rmsnorm"),
        ("no_such_glob*", "no Definition has the word 'no_such_glob*'"),
    ],
)
def test_a_word_that_fits_nothing_gets_a_suggestion(invoke, text, message):
    result = invoke("find", *text.split())
    assert result.exit_code == 2 and message in result.stderr


def test_words_that_fit_together_nowhere_are_told_apart(invoke):
    result = invoke("find", "mixtral", "latent", "--format", "json")
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2 and error.startswith("no Definition fits mixtral latent; ")
    assert " without latent" in error and " without mixtral" in error


def test_the_state_is_that_of_the_evidence(invoke):
    (found,) = json.loads(invoke("find", "name=rmsnorm_h4096", "--format", "json").stdout)
    runs = proofs(ROOT, flashinfer_trace.load("rmsnorm_h4096"))
    assert [(one["kernel"], one["gpu"]) for one in found["kernels"]] == [
        (run.kernel_label, run.run.gpu) for run in runs
    ]
    assert found["status"] == "verified" and found["constants"] == {"eps": "1e-5", "hidden_size": "4096"}
    assert found["models"] == {"llama-3.1-8b": [], "mixtral-8x7b": []} and found["family"] == "rmsnorm_eps1e5"
    text = invoke("find", "name=rmsnorm_h4096").stdout
    assert all(f"{run.kernel_label}" in text and f" on {run.run.gpu}" in text for run in runs) and "eps=1e-5" in text


def test_list_shows_the_constants_that_names_do_not(invoke):
    rows = {line.split()[1]: line.split()[3:] for line in invoke("list", "--op-type", "rmsnorm").stdout.splitlines()}
    assert rows["rmsnorm_h4096"] == ["eps=1e-5"] and rows["rmsnorm_h5120"] == ["eps=1e-6"]


def test_repeated_tags_are_all_asked_for(invoke):
    both = ("model:llama-3.1-8b", "stage:decode")
    rows = json.loads(invoke("list", *(f"--tag={tag}" for tag in both), "--format", "json").stdout)
    every = {one.name: {*one.tags} for one in flashinfer_trace.definitions()}
    assert {row["name"] for row in rows} == {name for name, tags in every.items() if {*both} <= tags} != set()
    assert {one.name for one in flashinfer_trace.definitions(tag=both)} == {row["name"] for row in rows}
