"""Extraction from recorded runs: what each call has, and the Definitions of new sizes."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from whole_dataset import DEFINITIONS, with_calls

from flashinfer_trace import Definition, find_root
from flashinfer_trace.dataset.evidence import kernels_today
from flashinfer_trace.format.naming import family_name, load_naming
from tools.extract import __main__ as command
from tools.extract import matched
from tools.extract.__main__ import main
from tools.extract.matched import Dataset, State, rows_of
from tools.extract.sizes import new_sizes
from tools.extract.written import planned
from tools.runtime_tracing.composed_calls import composed
from tools.runtime_tracing.matching import Evidence
from tools.runtime_tracing.recording import TABLES, RecordedCall, Recording, RecordingError, read_all, write
from tools.trace.records import of_model

ROOT = find_root()
RUNS = read_all(ROOT / "traces" / "runtime")
RELEASE = ("--release", "0.5.11")
DATASET = list(DEFINITIONS.values())
NAMING = load_naming(ROOT)
BOTH = ("prefill", "decode")
DENSE = "llama_3.1_8b-bf16-flashinfer"
#: Least share of the recorded calls of one Definition whose sizes must be found without it.
LEAST_FOUND = 0.75


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return with_calls()


@pytest.fixture(scope="module")
def families() -> dict[str, list[Definition]]:
    found: dict[str, list[Definition]] = defaultdict(list)
    for one in DATASET:
        found[str(family_name(one, NAMING))].append(one)
    return found


def run(name: str) -> Recording:
    return next(one for one in RUNS if one.name == name)


def test_sizes_of_recorded_calls_are_found_without_their_definitions(families: dict[str, list[Definition]]):
    """Each call that one Definition describes is asked for its sizes as if the dataset lacked that Definition."""
    known = Evidence(DATASET, {one.name: [k.path for k in kernels_today(ROOT, one).values()] for one in DATASET})
    by_name = {one.name: one for one in DATASET}
    results: Counter[str] = Counter()
    wrong = []
    seen = set()
    for recorded in RUNS:
        window = recorded.document["model_config"].get("sliding_window")
        for call in composed(recorded.calls):
            like = call.kernel, call.arguments, call.through, window
            names = known.of(call, window)[1]
            if like in seen or not call.launches or len(names) != 1:
                continue
            seen.add(like)
            family = str(family_name(by_name[names[0]], NAMING))
            if others := [one for one in families[family] if one.name != names[0]]:
                found = new_sizes(call, NAMING.families[family], others, window)
                result = "none" if not found else "found" if [*found] == [*names] else "several"
                results[result] += 1
                if found and names[0] not in found:
                    wrong.append((call.kernel, call.arguments, names, [*found]))
    assert wrong == []
    assert results["found"] > LEAST_FOUND * results.total(), results
    assert results["several"] < 0.05 * results.total(), results


def changed(call: RecordedCall, old: int, new: int) -> RecordedCall:
    """A call of another size."""
    return dataclasses.replace(call, arguments=call.arguments.replace(str(old), str(new)))


def test_a_call_of_another_size_is_a_new_size_of_its_family(dataset: Dataset):
    """No model has hidden size 4160: every norm, projection and quantizer of it is missing."""
    calls = tuple(changed(call, 4096, 4160) for call in run(DENSE).calls)
    rows = rows_of([dataclasses.replace(run(DENSE), calls=calls)], dataset, BOTH)
    new = {row.definitions[-1]: row for row in rows if row.state is State.NEW_SIZE}
    assert {"rmsnorm_h4160_eps1e5", "fused_add_rmsnorm_residual_out_h4160_eps1e5", "gemm_bf16_n6144_k4160"} <= {*new}
    norm = new["rmsnorm_h4160_eps1e5"]
    assert norm.sizes == {"rmsnorm_h4160_eps1e5": ("rmsnorm_eps1e5", {"hidden_size": 4160})}
    assert (norm.op, norm.site) == ("input_layernorm", "sglang/srt/models/llama.py:316")


def test_a_kernel_without_a_family_is_shown_with_its_arguments(dataset: Dataset):
    rows = rows_of([run("deepseek_v3.2-fp8-nsa-fp8_cache")], dataset, BOTH)
    (row,) = (row for row in rows if row.kernel.endswith("_get_k_and_s_triton_kernel"))
    assert row.state is State.NO_FAMILY and row.definitions == ()
    assert row.detail.startswith("_get_k_and_s_triton_kernel(buf_ptr: uint8[257,8448], page_indices_ptr: int32[3,41]")
    assert row.site.startswith("sglang/srt/models/deepseek_common/attention_forward_methods/forward_mla.py:")


def test_the_plan_of_a_dense_model_is_the_one_that_a_person_reads_in_its_code(dataset: Dataset):
    """Llama-3.1-8B in bf16 on one GPU, FlashInfer attention: models/llama.py and layers/ of SGLang 0.5.11."""
    rows = rows_of([run(DENSE)], dataset, ("decode",))
    described = [(row.op, row.definitions) for row in rows if row.definitions]
    assert described == [
        ("clamp_position_cuda", ("clamp_position",)),
        ("init_forward_metadata", ("create_flashinfer_kv_indices",)),
        ("input_layernorm", ("rmsnorm_h4096",)),
        ("qkv_proj", ("gemm_bf16_n6144_k4096",)),
        ("rotary_emb", ("rope_with_cos_sin_cache_neox_style_h32_kv8_d128_rd128",)),
        ("attn", ("store_cache_d1024",)),
        ("attn", ("gqa_paged_decode_h32_kv8_d128_ps1",)),
        ("o_proj", ("gemm_bf16_n4096_k4096",)),
        (
            "post_attention_layernorm",
            ("fused_add_rmsnorm_h4096", "fused_add_rmsnorm_residual_out_h4096_eps1e5"),
        ),
        ("gate_up_proj", ("gemm_bf16_n28672_k4096",)),
        ("act_fn", ("silu_and_mul_i14336",)),
        ("down_proj", ("gemm_bf16_n4096_k14336",)),
        ("input_layernorm", ("fused_add_rmsnorm_h4096", "fused_add_rmsnorm_residual_out_h4096_eps1e5")),
        ("norm", ("fused_add_rmsnorm_h4096", "fused_add_rmsnorm_residual_out_h4096_eps1e5")),
        ("logits_processor", ("gemm_bf16_n128256_k4096",)),
        ("softmax", ("softmax_temperature_v128256",)),
        ("sampler", ("top_k_top_p_joint_sampling_from_probs_v128256",)),
    ]


def test_the_router_and_the_experts_of_deepseek_v3_have_definitions(dataset: Dataset):
    """The default server, which an earlier extraction refused op by op."""
    rows = rows_of([run("deepseek_v3-fp8-fa3_stand_in")], dataset, BOTH)
    named = {name for row in rows for name in row.definitions}
    assert {
        *("moe_topk_deepseek_topk8_ng8_kg4_e256", "gemm_float32_out_n256_k7168"),
        *("moe_fp8_block_scale_expert_gemm_topk9_r1_e257_n4096_k7168", "fp8_blockwise_scaled_mm_n2112_k7168"),
        "mla_ragged_prefill_causal_h128_qk192_vo128",
    } <= named


def test_a_kernel_without_evidence_is_told_from_one_that_ran(dataset: Dataset, monkeypatch: pytest.MonkeyPatch):
    (ran,) = (row for row in rows_of([run(DENSE)], dataset, ("decode",)) if row.definitions == ("rmsnorm_h4096",))
    monkeypatch.setattr(matched, "proofs", lambda root, definition: [])
    rows = rows_of([run(DENSE)], Dataset(ROOT, DATASET), ("decode",))
    (named,) = (row for row in rows if row.definitions == ran.definitions)
    assert (ran.state, named.state) == (State.VERIFIED, State.EXISTS)


def test_equal_calls_are_one_row_unless_each_run_has_its_own(dataset: Dataset):
    runs = of_model(RUNS, "llama")
    merged, apart = rows_of(runs, dataset, BOTH), rows_of(runs, dataset, BOTH, merged=False)
    assert len(apart) > len(merged) and {row.definitions for row in apart} == {row.definitions for row in merged}
    norm = next(row for row in merged if row.definitions == ("rmsnorm_h4096",))
    assert len(norm.runs) > 3 and {*norm.modes} == {"prefill", "decode"}
    assert all(len(row.runs) == 1 for row in apart)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main([*arguments, *RELEASE, "--format", "json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_models_modes_formats_and_sizes_are_chosen(capsys: pytest.CaptureFixture[str]):
    several = output(capsys, "--model-name", "deepseek_v3", "llama", "qwen2_moe")
    assert list(dict.fromkeys(row["model"] for row in several)) == ["deepseek_v3", "llama_3.1_8b", "qwen2_57b_a14b"]
    decode = output(capsys, "--model_name", "llama", "--execution_modes", "decode")
    assert {mode for row in decode for mode in row["modes"]} == {"decode"}  # type: ignore[attr-defined]
    plain = output(capsys, "--model-name", "llama", "--no-include-quantized")
    every = output(capsys, "--model-name", "llama", "--include-quantized")
    assert "per_token_quant_fp8_h4096" in {n for row in every for n in row["definitions"]}  # type: ignore[attr-defined]
    assert "per_token_quant_fp8_h4096" not in {n for row in plain for n in row["definitions"]}  # type: ignore[attr-defined]
    two = output(capsys, "--model-name", "llama", "--tp", "2")
    assert {run for row in two for run in row["runs"]} == {"llama_3.1_8b-bf16-flashinfer-tp2"}  # type: ignore[attr-defined]
    experts = output(capsys, "--model-name", "qwen3_30b_a3b", "--ep", "2", "--tp", "2")
    assert {run for row in experts for run in row["runs"]} == {"qwen3_30b_a3b-bf16-flashinfer-ep2"}  # type: ignore[attr-defined]


def test_the_table_has_a_line_for_each_call(capsys: pytest.CaptureFixture[str]):
    assert main(["--model-name", "qwen3_8b", *RELEASE]) == 0
    first, *lines, total = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["State", "Op", "Kernel"]
    assert any(line.startswith("verified here") and line.endswith("gemm_bf16_n6144_k4096") for line in lines)
    assert "functions of PyTorch without a Definition are not listed" in total
    assert main(["--model-name", "qwen3_8b", *RELEASE, "--verbose"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(lines) + 2


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A run of a model whose hidden size no Definition has."""
    calls = [changed(call, 4096, 4160) for call in run(DENSE).calls if "rmsnorm" in call.kernel]
    about = {
        key: value for key, value in run(DENSE).document.items() if key not in (*TABLES, "calls", "$schema", "sha256")
    }
    write(tmp_path / "one.json", {**about, "model": "mine"}, calls)
    return tmp_path / "one.json"


def test_new_sizes_are_written_only_when_asked_for(record: Path, capsys: pytest.CaptureFixture[str]):
    target = record.parent / "definitions"
    assert main(["--record", str(record), "--definitions", str(target)]) == 0
    assert not target.exists() and "new size" in capsys.readouterr().out
    assert main(["--record", str(record), "--definitions", str(target), "--write"]) == 0
    assert {path.stem for path in target.glob("*/*.json")} == {
        *("rmsnorm_h4160_eps1e5", "fused_add_rmsnorm_h4160_eps1e5", "fused_add_rmsnorm_residual_out_h4160_eps1e5")
    }
    made = Definition.from_dict(json.loads((target / "rmsnorm" / "rmsnorm_h4160_eps1e5.json").read_text()))
    assert made.const_axes == {"hidden_size": 4160} and "status:unverified" in made.tags
    assert not any(tag.startswith("model:") for tag in made.tags)


def test_another_definition_of_the_name_is_a_conflict_for_review(record: Path, capsys: pytest.CaptureFixture[str]):
    target = record.parent / "definitions"
    arguments = ["--record", str(record), "--definitions", str(target), "--write"]
    assert main(arguments) == 0
    path = target / "rmsnorm" / "rmsnorm_h4160_eps1e5.json"
    path.write_text(path.read_text().replace("1e-5", "1e-6"))
    before = path.read_text()
    capsys.readouterr()
    assert main(arguments) == 3
    assert "conflict: rmsnorm_h4160_eps1e5: differs in reference; see rmsnorm_h4160_eps1e5_v2.json.review" in (
        capsys.readouterr().err
    )
    assert path.read_text() == before and path.with_name("rmsnorm_h4160_eps1e5_v2.json.review").exists()
    assert main(arguments) == 3 and len(list(target.glob("*/*.review"))) == 1


def test_without_deduplication_existing_definitions_are_made_again_for_review(dataset: Dataset, tmp_path: Path):
    rows = [row for row in rows_of([run(DENSE)], dataset, BOTH) if row.definitions == ("rmsnorm_h4096",)]
    assert planned(rows, ROOT, ROOT / "definitions", deduplicate=True) == []
    (one,) = planned(rows, ROOT, ROOT / "definitions", deduplicate=False)
    assert one.path is not None and one.path.name == "rmsnorm_h4096_v2.json.review" and one.conflict
    assert json.loads(one.text) == json.loads((ROOT / "definitions/rmsnorm/rmsnorm_h4096.json").read_text())
    (elsewhere,) = planned(rows, ROOT, tmp_path, deduplicate=False)
    assert elsewhere.path == tmp_path / "rmsnorm" / "rmsnorm_h4096.json" and not elsewhere.conflict


def test_nothing_is_written_that_would_be_invalid(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    target = record.parent / "definitions"
    monkeypatch.setattr(command, "problems_of", lambda plan, root: validate_one(plan[0].path))
    assert main(["--record", str(record), "--definitions", str(target), "--write"]) == 1
    assert "nothing was written" in capsys.readouterr().err and not target.exists()


def validate_one(path: Path) -> list[object]:
    from flashinfer_trace.dataset.validation import validate_paths

    broken = path.parents[2] / "broken.json"
    broken.write_text("{}")
    return list(validate_paths([broken], ROOT).problems)


def test_what_no_record_shows_is_run_dry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked = []

    def dry(model: str, server: str, release: str | None) -> Recording:
        asked.append((model, server, release))
        return run(DENSE)

    monkeypatch.setattr(command, "run_dry", dry)
    assert main(["--model-name", "mine", "--config", "config.json", "--tp", "1", "8", "--ep", "1"]) == 0
    assert asked == [("config.json", "", None), ("config.json", "tp_size=8", None)]
    asked.clear()
    assert main(["--model-name", "llama", *RELEASE, "--tp", "2", "4"]) == 0
    assert asked == [("llama", "tp_size=4", "0.5.11")]

    def refused(model: str, server: str, release: str | None) -> Recording:
        raise RecordingError(f"{model}: the dry run failed: ValueError: no such architecture")

    monkeypatch.setattr(command, "run_dry", refused)
    assert main(["--model-name", "gpt9"]) == 2
    assert "gpt9: the dry run failed: ValueError: no such architecture" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--model-name", "llama", "--tp", "0"], ["--model-name", "x", "--record", "y"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "usage:" in capsys.readouterr().err
