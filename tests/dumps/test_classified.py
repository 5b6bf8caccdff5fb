"""What FlashInfer's dumps are: by the committed record, and with changes that each make another function."""

from __future__ import annotations

import json

import pytest

from flashinfer_trace.dataset.dumps import Dump, DumpError, aliases, differences, dump_of, matches, normalized, versions
from flashinfer_trace.dataset.store import find_root
from flashinfer_trace.format.files import json_text
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.naming import load_naming
from flashinfer_trace.judging.dumped import ANOTHER, NEW_SIZE, SAME, UNKNOWN, References, classify
from flashinfer_trace.kernels import kernels_of
from tests.dumps.conftest import Classify
from tools.templates.page import page
from tools.templates.record import RECORD, Record, read_record
from tools.templates.verdicts import VERDICTS, judged, missing_names

LAST_128 = ("k_b[:max_kv, kv_h].T", "k_b[max(0, max_kv - 128) : max_kv, kv_h].T")


def test_verdicts_and_page_come_out_byte_for_byte(record: Record) -> None:
    committed = (find_root() / VERDICTS).read_text()
    assert json_text(judged(record)) == committed, "run `python -m tools.templates --judge`, and read what changed"
    verdicts = json.loads(committed)
    assert page(record, verdicts) == page(read_record(find_root() / RECORD), load_object(find_root() / VERDICTS))


def test_every_dump_of_a_known_template_has_a_class(record: Record) -> None:
    verdicts = json.loads((find_root() / VERDICTS).read_text())
    known = [dump.name for dump in record.parsed() if matches(dump, record.version)]
    assert [one["name"] for one in verdicts["dumps"]] == known
    assert len(known) >= 60
    assert {one["class"] for one in verdicts["dumps"]} == {SAME, NEW_SIZE, ANOTHER}


def test_a_dump_of_another_template_is_unknown(record: Record, references: References) -> None:
    found = [
        classify(dump, record.version, references) for dump in record.parsed() if not matches(dump, record.version)
    ]
    assert len(found) > 200
    assert {one.kind for one in found} == {UNKNOWN}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("silu_and_mul", "x the bound"),
        ("gqa_paged_decode", "it does not take kv_last_page_len"),
        ("merge_state", "is nan, right is 0"),
        ("top_k_renorm_probs", "is 0, right is 0.0"),
        ("top_p_renorm_probs", "is 0, right is 0.0"),
        ("min_p_sampling", "x its bound"),
        ("fused_topk_deepseek", "topk_ids"),
        ("mla_rope_quantize_fp8", "x the bound"),
    ],
)
def test_a_known_defect_is_found_again(template: str, said: str) -> None:
    (row,) = [one for one in load_object(find_root() / VERDICTS)["templates"] if one["template"] == template]
    assert said in "; ".join(row["wrong"])


def test_defects_beside_references_are_found_again(record: Record) -> None:
    verdicts = load_object(find_root() / VERDICTS)
    (norm,) = [one for one in verdicts["silent"] if one["template"] == "rmsnorm"]
    assert "x the bound" in norm["judged"]
    assert [line.partition("`:")[0] for line in verdicts["probes"]] == [
        "`chain_speculative_sampling",
        "`grouped_gemm_nt_masked",
    ]
    assert record.checks["gemm_bf16"] == ("nan", "x100")
    assert missing_names(record.parsed()[0].check) == ["Any", "Optional"]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        pytest.param("rmsnorm_h7168", [("EPS = 1e-6", "EPS = 1e-4")], id="eps"),
        pytest.param("layernorm_h128", [("EPS = 1e-6", "EPS = 1e-4")], id="eps-of-layernorm"),
        pytest.param(
            "rmsnorm_h7168", [("EPS = 1e-6", "EPS = 1e-6 if hidden_states.shape[1] < 7168 else 1e-3")], id="size"
        ),
        pytest.param(
            "gqa_ragged_h32_kv8_d128",
            [LAST_128, ("v_b[:max_kv, kv_h]", "v_b[max(0, max_kv - 128) : max_kv, kv_h]")],
            id="window",
        ),
        pytest.param("gqa_ragged_h32_kv8_d128", [("q_idx + 1 + delta", "num_kv_tokens")], id="causal"),
        pytest.param("gqa_paged_decode_h32_kv8_d128_ps1", [("* sm_scale", "* sm_scale * 1.01")], id="scale"),
        pytest.param(
            "gqa_paged_decode_h32_kv8_d128_ps1",
            [("* sm_scale", "* sm_scale\n            logits = 30.0 * torch.tanh(logits / 30.0)")],
            id="cap",
        ),
        pytest.param("mla_paged_decode_h16_ckv512_kpe64_ps1", [("+ (qp @ Kp.T)", "")], id="rotary-part"),
        pytest.param("bmm_fp8_N128_K512", [("* A_scale.to(torch.float32)", "")], id="scale-of-fp8"),
    ],
)
def test_a_changed_reference_is_another_function(changed: Classify, name: str, texts: list[tuple[str, str]]) -> None:
    assert changed(name).kind == SAME
    one = changed(name, *texts)
    assert one.kind == ANOTHER
    assert one.verdict is not None and one.verdict.failure is not None and one.verdict.failure.kind == "values"


def test_another_epsilon_that_a_family_has_is_of_that_family(changed: Classify) -> None:
    one = changed("rmsnorm_h4096", ("EPS = 1e-6", "EPS = 1e-5"))
    assert (one.kind, one.match and one.match.family) == (SAME, "rmsnorm_eps1e5")
    one = changed("rmsnorm_h7168", ("EPS = 1e-6", "EPS = 1e-5"))
    assert (one.kind, one.match and one.match.definition.name) == (SAME, "rmsnorm_h7168_eps1e5")
    one = changed("rmsnorm_h6656", ("EPS = 1e-6", "EPS = 1e-5"))
    assert (one.kind, one.match and one.match.definition.name) == (NEW_SIZE, "rmsnorm_h6656_eps1e5")


@pytest.mark.parametrize("name", ["rmsnorm_h7168", "gqa_ragged_h32_kv8_d128", "gemm_bf16_N7168_K2048"])
def test_another_dtype_is_another_function(changed: Classify, name: str) -> None:
    one = changed(name, dtype=("bfloat16", "float16"))
    assert one.kind == ANOTHER
    assert any("is float16, not bfloat16" in line for line in one.reasons)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("name", ["gqa_paged_decode_h32_kv8_d128", "mla_paged_decode_h16_ckv512_kpe64"])
def test_a_dump_that_attends_to_the_whole_last_page_is_another_function(
    changed: Classify, name: str, page: int
) -> None:
    one = changed(f"{name}_ps{page}")
    assert one.kind == ANOTHER
    assert "it does not take kv_last_page_len" in one.reasons
    assert one.verdict is not None and one.verdict.failure is not None and one.verdict.failure.kind == "values"


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(
            [("torch.sigmoid(scores.to(torch.float32))", "torch.softmax(scores.to(torch.float32), -1)")], id="softmax"
        ),
        pytest.param([("* float(routed_scaling_factor)", "")], id="factor"),
        pytest.param([("+ bias.to(torch.float32).unsqueeze(0)", "")], id="bias"),
    ],
)
def test_another_routing_is_another_function(changed: Classify, texts: list[tuple[str, str]]) -> None:
    one = changed("fused_topk_deepseek_e64_k6", *texts)
    assert one.kind == ANOTHER
    plain = changed("fused_topk_deepseek_e64_k6")
    assert one.verdict is not None and plain.verdict is not None
    assert one.verdict.cases < plain.verdict.cases  # plain, it differs in ties only


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        pytest.param("import os", "refused", id="import"),
        pytest.param("open('/etc/passwd').read()", "refused", id="file"),
        pytest.param("getattr(torch, 'load')('x')", "refused", id="name"),
        pytest.param("hidden_states.zero_()", "inputs", id="writes"),
        pytest.param("torch.ones(1 << 40)", "memory", id="memory"),
    ],
)
def test_a_hostile_reference_is_refused_or_confined(changed: Classify, text: str, kind: str) -> None:
    one = changed("rmsnorm_h512", ("    EPS = 1e-6\n", f"    EPS = 1e-6\n    {text}\n"))
    assert one.kind == ANOTHER
    assert one.verdict is not None and one.verdict.failure is not None
    assert one.verdict.failure.kind == kind


def test_a_reference_that_does_not_end_is_ended(changed: Classify) -> None:
    one = changed("rmsnorm_h512", ("    EPS = 1e-6\n", "    EPS = 1e-6\n    while True:\n        EPS = 1e-6\n"))
    assert one.kind == ANOTHER
    assert one.verdict is not None and one.verdict.failure is not None
    assert one.verdict.failure.kind in ("timed-out", "too-slow")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"reference": ""}, "no reference", id="none"),
        pytest.param({"reference": "def f(:"}, "not Python", id="syntax"),
        pytest.param({"reference": "x = 1"}, "no function", id="no-function"),
    ],
)
def test_what_cannot_be_judged_says_why(dumps: dict[str, Dump], change: dict[str, str], message: str) -> None:
    dump = dumps["rmsnorm_h512"]
    (match, *_) = matches(dump, versions()[-1])
    with pytest.raises(DumpError, match=message):
        normalized(dump_of({**dump.definition.to_dict(), **change}), match)


def test_the_aliases_name_families_that_there_are() -> None:
    naming = load_naming()
    named = [set(alias.families) for version in versions() for alias in aliases(version).values()]
    assert len(named) > 30
    assert set().union(*named) <= set(naming.families)


def test_a_kernel_of_an_alias_computes_its_first_family(dumps: dict[str, Dump]) -> None:
    version = versions()[-1]
    for name in ("rmsnorm_h7168", "silu_and_mul_h2048", "gqa_ragged_h32_kv8_d128", "gqa_paged_decode_h32_kv8_d128_ps1"):
        (match, *_) = matches(dumps[name], version)
        kernels = kernels_of(match.family, match.definition)
        assert match.alias.kernel in {label.partition("[")[0] for label in kernels}


def test_inputs_and_outputs_of_no_family_are_differences(dumps: dict[str, Dump]) -> None:
    dump = dumps["rmsnorm_h512"]
    data = dump.definition.to_dict()
    data["inputs"]["gate"] = data["inputs"]["weight"]
    data["outputs"] = {"y": data["outputs"]["output"]}
    (match, *_) = matches(dump, versions()[-1])
    assert differences(dump_of(data), match) == [
        "it takes gate, which rmsnorm does not",
        "it has no output output",
        "it has the output y, which rmsnorm has not",
    ]
