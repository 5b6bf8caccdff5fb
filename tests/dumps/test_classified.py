"""How FlashInfer's dumps are classified: by the committed record, and with changes that each make another function."""

from __future__ import annotations

import datetime
import random

import pytest

from flashinfer_trace.dataset.dumps import (
    TIES,
    Dump,
    DumpError,
    aliases,
    differences,
    dump_of,
    matches,
    normalized,
    versions,
)
from flashinfer_trace.dataset.store import find_root
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.naming import load_naming
from flashinfer_trace.judging.dumped import ANOTHER, NEW_SIZE, SAME, UNKNOWN, References, classified, classify
from flashinfer_trace.kernels import kernels_of
from flashinfer_trace.sandbox.limits import ReferenceLimits
from flashinfer_trace.sandbox.worker import ReferenceWorker
from tests.dumps.conftest import Classify
from tools.templates.__main__ import main
from tools.templates.page import page
from tools.templates.record import Record
from tools.templates.verdicts import VERDICTS, judge, missing_names

LAST_128 = ("k_b[:max_kv, kv_h].T", "k_b[max(0, max_kv - 128) : max_kv, kv_h].T")


#: Of each template, by its name.
COMMITTED = {one["template"]: one for one in load_object(find_root() / VERDICTS)["templates"]}
#: Templates that are judged again although nothing that decides their verdicts has changed: others each day.
DRAWN = 3


def test_verdicts_come_out_again(record: Record) -> None:
    """Those of templates for which something has changed, and a few others. Every night, all of them."""
    with judge(record) as judging:
        assert judging.templates == list(COMMITTED)
        stale = [name for name in COMMITTED if judging.made_by(name) != COMMITTED[name]["made_by"]]
        drawn = random.Random(datetime.date.today().toordinal()).sample([*COMMITTED], DRAWN)
        for name in {*stale, *drawn}:
            again = {**judging.template(name), "made_by": COMMITTED[name]["made_by"]}
            assert again == COMMITTED[name], "run `python -m tools.templates --judge`, and read what changed"
        assert judging.probes() == load_object(find_root() / VERDICTS)["probes"]


def test_a_digest_is_of_all_that_decides(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("rmsnorm", "merge_state")
    with judge(record) as judging:
        before = [judging.made_by(name) for name in names]
        monkeypatch.setattr("tools.templates.verdicts.siblings", lambda family: [family])
        assert [judging.made_by(name) for name in names] != before
        monkeypatch.undo()
        monkeypatch.setattr("tools.templates.verdicts._family_code", lambda family: f"{family == 'merge_state'}")
        first, second = (judging.made_by(name) for name in names)
        monkeypatch.setattr("tools.templates.verdicts._family_code", lambda family: "False")
        assert judging.made_by("rmsnorm") == first and judging.made_by("merge_state") != second


def test_the_page_comes_out_byte_for_byte(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--page"]) == 0
    assert capsys.readouterr().out == page(record, load_object(find_root() / VERDICTS))


def test_every_dump_of_a_known_template_has_a_class(record: Record) -> None:
    known = sorted(dump.name for dump in record.parsed() if matches(dump, record.version))
    told = [dump for one in COMMITTED.values() for dump in one["dumps"]]
    assert sorted(one["name"] for one in told) == known
    assert len(known) >= 150
    assert {one["class"] for one in told} == {SAME, NEW_SIZE, ANOTHER, UNKNOWN}


def test_every_template_of_the_record_with_an_alias_is_judged(record: Record) -> None:
    """A template that computes what a family here does has an alias, and a reference of it a verdict."""
    assert set(aliases(record.version)) == set(COMMITTED)
    having = {data["template"] for data in record.dumps if data.get("reference")}
    # No oracle here takes the numbers that chain_speculative_sampling draws itself; a probe shows its defect.
    left_out = [name for name in COMMITTED if ("reference" in COMMITTED[name]) != (name in having)]
    assert left_out == ["chain_speculative_sampling"]


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
        ("merge_states", "is nan, right is 0"),
        ("top_k_renorm_probs", "is 0, right is 0.0"),
        ("top_p_renorm_probs", "is 0, right is 0.0"),
        ("min_p_sampling", "x its bound"),
        ("sampling_from_probs", "x its bound"),
        ("fused_topk_deepseek", "topk_ids"),
        ("mla_rope_quantize_fp8", "x the bound"),
        ("trtllm_ragged_attention_deepseek", "the reference failed"),
        ("top_k_ragged_transform", "listed twice"),
        ("moe_fp4_block_scale_ds_routing", "x the bound"),
        ("trtllm_bf16_moe", "the sandbox refuses it"),
    ],
)
def test_a_known_defect_is_found_again(template: str, said: str) -> None:
    assert said in "; ".join(COMMITTED[template]["reference"]["wrong"])


@pytest.mark.parametrize("template", ["trtllm_batch_decode", "xqa", "single_decode", "nvfp4_quantize", "top_k_varlen"])
def test_another_form_with_right_values_is_another_function_and_no_defect(template: str) -> None:
    one = COMMITTED[template]
    assert one["reference"]["wrong"] == [] and one["reference"]["form"]
    assert {dump["class"] for dump in one["dumps"]} == {ANOTHER}


def test_a_dump_without_a_reference_is_unknown_and_says_what_it_resembles(record: Record) -> None:
    dump = next(dump for dump in record.parsed() if dump.name == "mhc_post")
    (one,) = classified([dump], record.version)
    assert one.kind == UNKNOWN and one.match is not None and one.match.family == "mhc_post"
    assert one.reasons[-1] == "it has no reference: nothing can be judged"


def test_defects_beside_references_are_found_again(record: Record) -> None:
    verdicts = load_object(find_root() / VERDICTS)
    assert "x the bound" in COMMITTED["rmsnorm"]["other_epsilon"]
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


#: Inputs of dumps that may have any dtype: buffers that are written, and scales that are read as numbers.
ANY_DTYPE = {"concat_mla_k": {"k"}, "bmm_fp8": {"A_scale", "B_scale"}, "mla_paged_decode": {"ckv_scale_arr"}}
ANY_DTYPE |= {name: {"out"} for name in ("mm_M1_16_K7168_N256", "mm_M1_16_K6144_N256", "tinygemm_bf16")}


def test_another_dtype_of_any_tensor_is_another_function(record: Record) -> None:
    """None of the dumps that are the same, or of another size, stays so with another dtype of one of its tensors."""
    alike = {one["name"] for row in COMMITTED.values() for one in row["dumps"] if one["class"] in (SAME, NEW_SIZE)}
    unnoticed, tried = [], 0
    for data in {data["name"]: data for data in record.dumps if data["name"] in alike}.values():
        for section, name in [("inputs", name) for name in data["inputs"]] + [
            ("outputs", name) for name in data["outputs"]
        ]:
            entry = data[section][name]
            if entry["shape"] is None or (section == "inputs" and name in ANY_DTYPE.get(data["template"], ())):
                continue
            other = dump_of({**data, section: {**data[section], name: {**entry, "dtype": "float64"}}})
            tried += 1
            if any(not differences(other, match) for match in matches(other, record.version)):
                unnoticed.append((data["name"], section, name))
    assert unnoticed == [] and tried > 100


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


def test_a_reference_that_does_not_end_is_ended(record: Record) -> None:
    data = next(data for data in record.dumps if data["name"] == "rmsnorm_h512")
    endless = data["reference"].replace("    EPS = 1e-6\n", "    EPS = 1e-6\n    while True:\n        EPS = 1e-6\n")
    with ReferenceWorker(ReferenceLimits(seconds=1.0), waived=TIES) as worker:
        one = classify(dump_of({**data, "reference": endless}), record.version, References(worker))
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
