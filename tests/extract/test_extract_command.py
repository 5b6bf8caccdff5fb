"""The command from end to end on a small model: what it writes and merges, refuses to overwrite, and survives."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from made_up_evidence import write_evidence
from small_models import MIXTURE, TINY, add_model, load_definition

from flashinfer_trace.dataset.validation import validate_paths
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.kernels.table import KernelFacts
from tools.extract_definitions import apply
from tools.extract_definitions.plan import Row
from tools.extract_definitions.report import detail


def states(table):
    """State and name of each row of a dry run."""
    rows = [line.split() for line in table.splitlines()]
    known = ("created", "tagged", "skipped", "partly", "outside", "conflict", "unsupported")
    return {row[1]: row[0] for row in rows if len(row) > 2 and row[0] in known}


def test_a_small_model(root, extract, snapshot):
    add_model(root, "tiny", "Tiny", {**TINY, "head_dim": 8})  # two of its projections have the same sizes
    status, out, err = extract("--model-name", "tiny", "--tp", 1, 2)
    assert status == 0, err
    files = snapshot()
    assert {
        *(
            "gemm/gemm_bf16_n96_k64.json",
            "gemm/gemm_bf16_n64_k64.json",
            "gemm/gemm_bf16_n192_k64.json",
            "gemm/gemm_bf16_n64_k96.json",
        ),
        *(
            "gemm/gemm_bf16_n48_k64.json",
            "gemm/gemm_bf16_n64_k32.json",
            "gemm/gemm_bf16_n64_k48.json",
            "gemm/gemm_bf16_n128_k64.json",
        ),
        *("rmsnorm/rmsnorm_h64.json", "rmsnorm/fused_add_rmsnorm_residual_out_h64.json"),
        "sampling/top_k_top_p_joint_sampling_from_probs_v128.json",
    } <= set(files)
    assert not validate_paths([root / "definitions"], root).problems
    gemm = load_definition(root, "gemm/gemm_bf16_n96_k64.json")
    # The query, key and value projection on one rank ((8 + 2 x 2) x 8), and half of gate and up on two ranks (2 x 48).
    assert gemm["tags"] == [
        *("status:unverified", "stage:prefill", "stage:decode", "model:tiny", "tp:1", "tp:2"),
    ]
    assert "qkv_proj ((8 query + 2 x 2 key-value heads) x 8) at TP 1" in gemm["description"]
    assert "gate_up_proj (2 x 48) at TP 2" in gemm["description"]
    assert f"{len(files)} created" in out


def test_nothing_is_dropped_in_silence(extract):
    _, table, _ = extract("--model-name", "tiny", "--dry-run", "--verbose")
    unsupported = [line for line in table.splitlines() if line.startswith("unsupported")]
    embedding = next(line for line in unsupported if line.split()[1] == "embed_tokens")
    assert "torch" in embedding
    assert not [line for line in unsupported if "in no recipe" in line or "speculative decoding" in line]
    (down,) = (line for line in table.splitlines() if line.split()[:2] == ["partly", "down_proj"])
    assert "without a Definition: " in down and "sgl-kernel:fp8_scaled_mm" in down
    assert any(line.startswith("outside") and "KV-cache I/O" in line for line in table.splitlines())


def test_the_summary_is_short_and_a_conflict_is_its_last_line(root, extract):
    status, out, err = extract("--model-name", "tiny", "twin-1.5")
    assert (
        status == 0 and len(out.splitlines()) == out.count("created") and out.splitlines()[-1].endswith(" 0 conflict")
    )
    gaps = err.splitlines()
    assert [line.split(":")[0] for line in gaps] == ["unsupported", "not listed", "left out"]
    assert "ops outside the forward pass (--verbose)" in gaps[1]
    path = root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json"
    path.write_text(path.read_text().replace("bfloat16", "float16"))
    status, table, _ = extract("--model-name", "tiny", "--dry-run")
    assert status == 3 and table.splitlines()[-1].startswith(
        "conflict: gemm_bf16_n64_k64: other inputs, outputs, reference; see "
    )
    status, _, err = extract("--model-name", "tiny", "--verbose")
    assert status == 3 and err.splitlines()[-1].startswith(
        "conflict: gemm_bf16_n64_k64: other inputs, outputs, reference; see "
    )
    assert "partly: tiny: down_proj: without a Definition: " in err and "outside: tiny: " in err


def test_long_lists_are_cut_and_say_so(extract):
    _, whole, _ = extract("--model-name", "tiny", "--dry-run", "--verbose")
    _, table, _ = extract("--model-name", "tiny", "--dry-run")
    lines = dict(zip(whole.splitlines(), table.splitlines(), strict=True))
    (full,) = (line for line in lines if line.split()[:2] == ["partly", "down_proj"])
    shown, _, rest = lines[full].partition(" and ")
    assert full.startswith(shown) and len(shown) < len(full)
    assert rest == f"{full.count(', ') - shown.count(', ')} more (--verbose)"


def test_a_long_reason_without_a_list_is_cut_between_words():
    row = Row("unsupported", "attn", ("tiny",), "the logits are scaled " * 10)
    assert detail(row, verbose=True) == row.detail
    cut = detail(row, verbose=False)
    assert len(cut) < 180 and cut.startswith("the logits are scaled the") and cut.endswith(" ... (--verbose)")
    assert row.detail.startswith(cut.removesuffix(" ... (--verbose)"))


def test_a_dry_run_tells_all_and_writes_nothing(extract, snapshot):
    status, table, _ = extract("--model-name", "tiny", "--dry-run")
    assert status == 0 and snapshot() == {}
    assert states(table)["rmsnorm_h64"] == "created"
    extract("--model-name", "tiny")
    assert set(states(table)) >= {path.rpartition("/")[2].removesuffix(".json") for path in snapshot()}


def test_running_again_changes_nothing(root, extract, snapshot):
    extract("--model-name", "tiny")
    before = {path: (root / "definitions" / path).stat().st_mtime_ns for path in snapshot()}
    status, out, _ = extract("--model-name", "tiny")
    assert status == 0 and out.startswith("0 created, 0 tagged, ")
    assert {path: (root / "definitions" / path).stat().st_mtime_ns for path in snapshot()} == before


def test_models_share_kernels(root, extract, snapshot):
    """One call or two, in either order, give the same tags and keep what a person wrote."""
    extract("--model-name", "tiny", "twin_1_5")
    together = snapshot()
    assert "model:tiny" in load_definition(root, "gemm/gemm_bf16_n64_k64.json")["tags"]
    for path in together:
        (root / "definitions" / path).unlink()
    extract("--model-name", "twin-1.5")
    path = root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json"
    data = json.loads(path.read_text())
    data["description"] = "Curated by a person."
    path.write_text(json.dumps(data))
    status, table, _ = extract("--model-name", "tiny", "--dry-run")
    assert set(states(table).values()) == {"tagged", "partly", "outside", "unsupported"}
    assert "adds model:tiny" in table
    status, _, _ = extract("--model-name", "tiny")
    assert status == 0
    assert load_definition(root, "gemm/gemm_bf16_n64_k64.json")["description"] == "Curated by a person."
    for path, text in snapshot().items():
        apart, at_once = json.loads(text), json.loads(together[path])
        assert {**apart, "description": ""} == {**at_once, "description": ""}


def test_tags_of_one_stage_and_size_are_merged(root, extract):
    add_model(root, "tiny", "Tiny", {**TINY, "head_dim": 8})
    extract("--model-name", "tiny", "--execution-modes", "decode", "--tp", 2)
    assert load_definition(root, "gemm/gemm_bf16_n48_k64.json")["tags"] == [
        "status:unverified",
        "stage:decode",
        "model:tiny",
        "tp:2",
    ]
    extract("--model-name", "tiny", "--execution-modes", "prefill", "--tp", 1, 2)
    merged = ["status:unverified", "stage:prefill", "stage:decode", "model:tiny", "tp:2"]
    assert load_definition(root, "gemm/gemm_bf16_n48_k64.json")["tags"] == merged


def test_only_the_tags_of_a_file_change(root, extract):
    extract("--model-name", "tiny")
    path = root / "definitions" / "rmsnorm" / "rmsnorm_h64.json"
    before = path.read_text().splitlines()
    extract("--model-name", "twin-1.5")
    after = path.read_text().splitlines()
    assert [line for line in after if line not in before] == ['    "model:twin-1.5",']
    assert [line for line in before if line not in after] == []


def test_refreshing_restores_texts_and_order_but_not_the_description(root, extract, snapshot):
    extract("--model-name", "tiny")
    whole = snapshot()
    path = root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json"
    data = json.loads(path.read_text())
    data["description"] = "Curated by a person."
    data["tags"].reverse()
    data["inputs"]["A"]["description"] = "Stale."
    path.write_text(json.dumps(data))
    assert extract("--model-name", "tiny")[1].startswith("0 created, 0 tagged")
    status, _, _ = extract("--model-name", "tiny", "--refresh")
    expected = json.loads(whole["gemm/gemm_bf16_n64_k64.json"])
    assert status == 0 and load_definition(root, "gemm/gemm_bf16_n64_k64.json") == {
        **expected,
        "description": "Curated by a person.",
    }
    assert {name: text for name, text in snapshot().items() if "n64_k64" not in name} == {
        name: text for name, text in whole.items() if "n64_k64" not in name
    }
    assert extract("--model-name", "tiny", "--refresh")[1].startswith("0 created, 0 tagged")


CHANGES = {
    "axes": lambda data: data["axes"].update(extra={"type": "var", "description": "Another axis."}),
    "constraints": lambda data: data["constraints"].append("n == 64"),
    "inputs": lambda data: data["inputs"]["A"].update(dtype="float16"),
    "outputs": lambda data: data["outputs"]["C"].update(shape=["n", "m"]),
    "reference": lambda data: data.update(reference=data["reference"] + "\n# another\n"),
}


@pytest.mark.parametrize("section", CHANGES)
def test_another_kernel_of_the_same_name_is_a_conflict(root, extract, snapshot, section):
    extract("--model-name", "tiny")
    path = root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json"
    data = json.loads(path.read_text())
    expected = json.loads(path.read_text())
    CHANGES[section](data)
    path.write_text(json.dumps(data))
    before = snapshot()
    status, _, err = extract("--model-name", "tiny")
    assert status == 3
    assert f"conflict: gemm_bf16_n64_k64: other {section}; see gemm_bf16_n64_k64_v2.json.review" in err
    review = path.with_name("gemm_bf16_n64_k64_v2.json.review")
    assert json.loads(review.read_text()) == {**expected, "name": "gemm_bf16_n64_k64_v2"}
    assert {**snapshot()} == {**before, "gemm/gemm_bf16_n64_k64_v2.json.review": review.read_text()}
    # The validator reports it, and running again adds no second one.
    rules = {(problem.rule, problem.file) for problem in validate_paths([root / "definitions"], root).problems}
    assert ("file-unexpected", "definitions/gemm/gemm_bf16_n64_k64_v2.json.review") in rules
    after = snapshot()
    assert extract("--model-name", "tiny")[0] == 3
    assert snapshot() == after


def test_a_review_file_is_never_overwritten(root, extract, snapshot):
    extract("--model-name", "tiny")
    path = root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json"
    path.write_text(path.read_text().replace("bfloat16", "float16"))
    mine = path.with_name("gemm_bf16_n64_k64_v2.json.review")
    mine.write_text("notes of a reviewer")
    status, table, _ = extract("--model-name", "tiny", "--dry-run")
    assert status == 3 and states(table)["gemm_bf16_n64_k64"] == "conflict"
    assert extract("--model-name", "tiny")[0] == 3
    assert mine.read_text() == "notes of a reviewer"
    assert "gemm/gemm_bf16_n64_k64_v3.json.review" in snapshot()


def test_models_in_conflict_over_one_kernel_share_a_review_file(root, extract, snapshot):
    extract("--model-name", "tiny")
    path = root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json"
    path.write_text(path.read_text().replace("bfloat16", "float16"))
    assert extract("--model-name", "tiny")[0] == 3
    before = snapshot()
    status, _, err = extract("--model-name", "twin-1.5")
    assert status == 3 and "see gemm_bf16_n64_k64_v2.json.review, already there" in err
    reviews = {name: text for name, text in snapshot().items() if name.endswith(".review")}
    assert reviews == {name: text for name, text in before.items() if name.endswith(".review")} != {}


def test_a_name_of_another_op_type_is_a_conflict(root, extract):
    extract("--model-name", "tiny")
    moved = root / "definitions" / "other" / "gemm_bf16_n64_k64.json"
    moved.parent.mkdir()
    (root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json").rename(moved)
    moved.write_text(moved.read_text().replace('"op_type": "gemm"', '"op_type": "other"'))
    status, _, err = extract("--model-name", "tiny")
    assert status == 3 and "gemm_bf16_n64_k64: other op_type" in err


def test_duplicates_are_written_for_review_where_asked_for(root, extract, snapshot):
    extract("--model-name", "tiny")
    before = snapshot()
    status, _, err = extract("--model-name", "tiny", "--no-deduplicate")
    assert status == 3 and "exists, and duplicates were requested" in err
    added = {path: text for path, text in snapshot().items() if path not in before}
    assert {path.replace("_v2.json.review", ".json") for path in added} == set(before)
    assert {path: snapshot()[path] for path in before} == before


def test_what_is_quantised_can_be_left_out(root, extract, snapshot):
    add_model(root, "experts", "Experts", MIXTURE)
    assert extract("--model-name", "experts", "--no-include-quantized")[0] == 0
    created = {Path(path).stem for path in snapshot() if path.startswith("moe/")}
    assert created == {"moe_topk_deepseek_topk2_ng4_kg2_e16"}  # the router reads no weights of experts
    _, table, _ = extract("--model-name", "experts", "--no-include-quantized", "--dry-run")
    assert "its experts are quantised (--include-quantized)" in table
    assert extract("--model-name", "experts", "--ep", 4)[0] == 0
    (path,) = (path for path in snapshot() if path.startswith("moe/") and "fp8" in path)
    assert path == "moe/moe_fp8_block_scale_ds_routing_topk2_ng4_kg2_e4_h128_i128.json"
    assert {"ep:4", "quantization:fp8_block_scale", "routing:deepseek-v3"} <= set(load_definition(root, path)["tags"])
    assert not validate_paths([root / "definitions"], root).problems


def test_two_models_that_give_one_name_to_other_constants(root, extract, snapshot):
    """The name of a mixture of experts gives the number of experts per rank, not of all experts."""
    add_model(root, "experts", "Experts", MIXTURE)
    add_model(root, "more", "More", {**MIXTURE, "n_routed_experts": 32})
    status, _, err = extract("--model-name", "experts", "more", "--ep", 4, 8)
    name = "moe_fp8_block_scale_ds_routing_topk2_ng4_kg2_e4_h128_i128"
    assert status == 3 and f"conflict: {name}: other constants in the same call" in err
    assert load_definition(root, f"moe/{name}.json")["axes"]["num_experts"]["value"] == 16
    review = json.loads((root / "definitions" / "moe" / f"{name}_v2.json.review").read_text())
    assert review["axes"]["num_experts"]["value"] == 32
    before = snapshot()
    assert extract("--model-name", "experts", "more", "--ep", 4, 8)[0] == 3
    assert snapshot() == before
    # If the existing Definition is a third kernel, each of the two has its file.
    path, review = (root / "definitions" / "moe" / f"{name}{end}" for end in (".json", "_v2.json.review"))
    path.write_text(path.read_text().replace("bfloat16", "float16"))
    review.unlink()
    assert extract("--model-name", "experts", "more", "--ep", 4, 8)[0] == 3
    versions = [path.with_name(f"{name}_v{version}.json.review") for version in (2, 3)]
    assert [json.loads(one.read_text())["axes"]["num_experts"]["value"] for one in versions] == [16, 32]


def test_another_directory(root, extract, snapshot, tmp_path):
    status, _, _ = extract("--model-name", "tiny", "--definitions", tmp_path / "elsewhere")
    assert status == 0 and snapshot() == {}
    assert (tmp_path / "elsewhere" / "rmsnorm" / "rmsnorm_h64.json").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_evidence_decides_the_status(root, extract):
    extract("--model-name", "tiny")
    definition = Definition.from_dict(load_definition(root, "rmsnorm/rmsnorm_h64.json"))
    write_evidence(root, definition)
    status, _, err = extract("--model-name", "twin-1.5")
    assert status == 0, err
    assert load_definition(root, "rmsnorm/rmsnorm_h64.json")["tags"][0] == "status:verified"
    assert load_definition(root, "rmsnorm/fused_add_rmsnorm_residual_out_h64.json")["tags"][0] == "status:unverified"


def test_a_deleted_definition_is_extracted_again_although_its_evidence_is_there(root, extract, snapshot):
    extract("--model-name", "tiny")
    definition = Definition.from_dict(load_definition(root, "rmsnorm/rmsnorm_h64.json"))
    write_evidence(root, definition)
    extract("--model-name", "tiny", "--refresh")
    before = snapshot()
    assert load_definition(root, "rmsnorm/rmsnorm_h64.json")["tags"][0] == "status:verified"
    (root / "definitions" / "rmsnorm" / "rmsnorm_h64.json").unlink()
    status, _, err = extract("--model-name", "tiny")
    assert status == 0, err
    assert snapshot() == before


def test_a_full_disk_changes_nothing(root, extract, snapshot, monkeypatch):
    written = []

    def write_text(path, text, **options):
        if ".extract_definitions_" in path.parent.name:
            if len(written) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            written.append(path)
        return original(path, text, **options)

    original = apply.Path.write_text
    monkeypatch.setattr(apply.Path, "write_text", write_text)
    status, _, err = extract("--model-name", "tiny")
    assert status == 1 and "No space left on device" in err and len(written) == 3
    assert snapshot() == {}
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_an_interrupted_run_leaves_whole_files_and_is_taken_up_again(root, extract, snapshot, monkeypatch, error):
    extract("--model-name", "tiny")
    whole = snapshot()
    for path in whole:
        (root / "definitions" / path).unlink()
    renamed = []

    def replace(source, target):
        if len(renamed) == 4:
            raise error
        renamed.append(target)
        original(source, target)

    original = apply.os.replace
    monkeypatch.setattr(apply.os, "replace", replace)
    status, _, err = extract("--model-name", "tiny")
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 1) and "run again to write the rest" in err
    assert "no Definition is half-written" in err and "Traceback" not in err
    assert len(snapshot()) == 4
    assert not validate_paths([root / "definitions"], root).problems
    monkeypatch.setattr(apply.os, "replace", original)
    assert extract("--model-name", "tiny")[0] == 0
    assert snapshot() == whole


def test_a_recipe_that_makes_something_invalid_writes_nothing(root, extract, snapshot):
    path = root / "reference" / "gemm" / "gemm_bf16.py"
    path.write_text(path.read_text().replace("import torch", "import os\nimport torch", 1))
    status, _, err = extract("--model-name", "tiny")
    assert status == 1 and "reference-import" in err and "nothing was written" in err
    *lines, last = err.splitlines()
    assert lines and all(re.match(r"tiny(, twin-1\.5)? \(n \d+, k \d+\): reference-import: ", line) for line in lines)
    target = root / "definitions" / "gemm" / "gemm_bf16_n64_k64.json"
    assert any(line.startswith("tiny (n 64, k 64): ") and line.endswith(f"; for {target}") for line in lines)
    assert "extract_definitions_" not in err and "Correct the constants of the model" in last
    assert snapshot() == {}


def test_a_size_that_no_kernel_takes_is_a_gap(root, extract, snapshot, monkeypatch):
    """Its Definition could never be verified."""
    monkeypatch.setattr(KernelFacts, "unsupported", lambda kernel, definition: f"is not built for {definition.op_type}")
    status, out, err = extract("--model-name", "tiny")
    assert (status, snapshot()) == (0, {}) and "0 created" in out
    gap = "unsupported: tiny: gemm_bf16_n64_k12: no kernel takes it: is not built for gemm"
    assert gap in err.splitlines()
