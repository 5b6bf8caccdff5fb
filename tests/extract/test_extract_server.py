"""`--server`: the kernels of one way to serve a model, as the evaluator decides, not those of all listed ways."""

from __future__ import annotations

import pytest
from digests import SOURCES
from digests import needs_digest_sources as needs_sources
from small_models import MIXTURE, SPARSE, TINY, add_model

from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.traces import usage_of_server
from tools.kernel_tracing.configuration.requested import parse_server

SERVED = ("--dry-run", "--sources", SOURCES, "--server")


def planned(out):
    """The names of the Definitions of a plan, and op -> detail of what has none."""
    rows = [line.split(maxsplit=3) for line in out.splitlines()]
    rest = {row[1]: row[3] for row in rows if row[0] in ("unsupported", "partly")}
    return {row[1] for row in rows if row[0] == "created"}, rest


@needs_sources
def test_only_the_kernels_of_that_server_are_extracted(extract):
    status, out, _ = extract("--model-name", "tiny", *SERVED, "attention_backend=flashinfer,tp=2")
    names, _ = planned(out)
    assert status == 0
    attention = {name for name in names if name.startswith("gqa_")}
    assert {name.partition("_h")[0] for name in attention} == {
        *("gqa_paged_decode", "gqa_paged_prefill_causal", "gqa_ragged_prefill_causal")
    }
    assert {name.rpartition("_")[2] for name in attention if "paged" in name} == {"ps1"}, "the server's page size"
    every, _ = planned(extract("--model-name", "tiny", "--dry-run", "--tp", "2", "--page-sizes", "1")[1])
    assert names <= every


@needs_sources
def test_an_op_of_other_kernels_is_unsupported(extract):
    names, rest = planned(extract("--model-name", "tiny", *SERVED, "attention_backend=triton")[1])
    assert not any(name.startswith("gqa_") for name in names)
    assert "triton:_fwd_kernel" in rest["attn"] and "flashinfer" not in rest["attn"]


@needs_sources
def test_a_model_that_sglang_rewrites_keeps_its_indexer():
    sparse = MIXTURE | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    config = sparse | {"architectures": ["DeepseekV32ForCausalLM"], "num_attention_heads": 128}
    usage, evaluation = usage_of_server("DeepseekV32ForCausalLM", SOURCES, config, parse_server("tp=1"))
    assert (evaluation.resolved["attention_backend"], evaluation.resolved["page_size"]) == ("nsa", 64)
    assert usage.op("indexer") is not None


@needs_sources
@pytest.mark.parametrize(("server", "local", "width"), [("tp=2", 16, 16), ("tp=2,ep=2", 8, 32)])
def test_experts_are_split_as_that_server_splits_them(root, extract, server, local, width):
    add_model(root, "experts", "Experts", SPARSE)
    names, _ = planned(extract("--model-name", "experts", *SERVED, server)[1])
    (layer,) = (name for name in names if name.startswith("moe_bf16"))
    assert f"_e{local}_" in layer and layer.endswith(f"_i{width}")


@needs_sources
@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("atention_backend=triton", "has no such field; did you mean attention_backend?"),
        ("speculative_algorithm=EAGLE", "the tracer does not evaluate speculative decoding; leave it out"),
        ("SGLANG_ENABLE_JIT_DEEPGEM=0", "did you mean SGLANG_ENABLE_JIT_DEEPGEMM?"),
        ("attention_backend=tritn", "attention_backend=tritn: choose one of triton, "),
        ("attention_backend=trtllm_mla", "SGLang does not serve LlamaForCausalLM so: "),
    ],
)
def test_what_sglang_refuses(extract, snapshot, server, message):
    status, _, err = extract("--model-name", "tiny", *SERVED, server)
    assert status == 2 and message in err and not snapshot()


@needs_sources
@pytest.mark.parametrize(
    ("server", "fields", "message"),
    [
        (
            "tp=1",
            {"hidden_size": None, "text_config": {"hidden_size": 64}},
            "models of several parts are not evaluated",
        ),
        ("disable_cuda_graph=false,cuda_graph_bs=3", {}, "the evaluator fails with TypeError: 'int' object is not"),
    ],
)
def test_models_and_values_that_cannot_be_evaluated(server, fields, message):
    config = {name: value for name, value in (TINY | fields).items() if value is not None}
    with pytest.raises(ExtractionError) as error:
        usage_of_server("LlamaForCausalLM", SOURCES, config, parse_server(server))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("fast", "'fast' is not name=value"),
        ("model=x,tp=2", "names a model"),
        ("gpu=sm10", "gpu=sm10 is not known"),
        ("quantization=fp8", "quantization: say how the weights are stored in the config.json"),
        ("dp=8", "dp_size: no recipe knows"),
    ],
)
def test_settings_that_cannot_be_used(extract, server, message):
    status, _, err = extract("--model-name", "tiny", "--dry-run", "--server", server)
    assert status == 2 and message in err


def test_one_server_needs_the_sources(extract, tmp_path):
    status, _, err = extract("--model-name", "tiny", "--sources", tmp_path / "none", "--server", "tp=1")
    assert status == 2 and "no such directory; fetch them with" in err


def test_missing_sources_are_fetched_by_the_command_of_the_hint(extract):
    """The default release of `fetch_sources` is another one."""
    status, _, err = extract("--model-name", "tiny", "--server", "tp=2")
    assert status == 2
    assert "`python -m tools.fetch_sources --release 0.5.8 --dest .sources-0.5.8`" in err
