"""flashinfer-trace add: one file, from what the Definitions of a family have in common; nothing on failure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from made_up_evidence import small_dataset
from whole_dataset import MEMBERS

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.dataset import add
from flashinfer_trace.dataset.add import AddError, new_definition
from flashinfer_trace.dataset.sync import SyncError, sync_definitions
from flashinfer_trace.dataset.validation import validate_paths
from flashinfer_trace.format.files import json_text
from flashinfer_trace.format.naming import load_naming

ROOT = flashinfer_trace.find_root()
NAMING = load_naming(ROOT)
#: A family of each op_type, with at least three Definitions: more say more of what does not depend on sizes.
FAMILIES = {
    NAMING.families[name].op_type: name
    for name, members in sorted(MEMBERS.items(), key=lambda item: len(item[1]))
    if len(members) >= 3
}


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    return small_dataset(tmp_path, ROOT, "rmsnorm_h512", "rmsnorm_h7168", "silu_and_mul_i1024")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["add", *arguments])


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_one_file_is_written_and_nothing_is_left_to_do(dataset: Path) -> None:
    before = files(dataset)
    done = invoke("rmsnorm", "hidden_size=6656")
    assert done.exit_code == 0, done.output
    (path,) = files(dataset).keys() - before.keys()
    assert path == dataset / "definitions" / "rmsnorm" / "rmsnorm_h6656.json"
    assert {one: text for one, text in files(dataset).items() if one != path} == before
    data = json.loads(path.read_text())
    assert data["description"] == "RMSNorm over 6656 features in bf16, eps 1e-6, rounded once, at the end."
    assert data["tags"][0] == "status:unverified" and not [one for one in data["tags"] if one.startswith("model:")]
    assert "HIDDEN_SIZE = 6656" in data["reference"] and "cases passed against the oracle" in done.output
    assert sync_definitions(dataset, write=False) == [] and not validate_paths([dataset], dataset).problems


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["rmsnorm", "hidden_size=512"], 1, "rmsnorm_h512 is in the dataset already"),
        (["rmsnrm", "hidden_size=6656"], 1, "did you mean rmsnorm or "),
        (["rmsnorm", "hidden=6656"], 1, "hidden is not an axis; the const axes of rmsnorm are hidden_size"),
        (["rmsnorm", "batch_size=6"], 1, "batch_size is a variable axis, which each call gives"),
        (
            ["silu_and_mul", "gate_up_size=64", "intermediate_size=16"],
            1,
            "gate_up_size == 2 * intermediate_size is",
        ),
        (["rmsnorm", "hidden_size=6656", "--description", "TODO"], 1, "description-trivial"),
        (["rmsnorm", "hidden_size=6656", "--description", "Sizes of nothing, over 77777 features."], 1, "77777"),
        (["gelu_and_mul", "intermediate_size=64"], 1, "gelu_and_mul has no Definition"),
        (["rmsnorm", "hidden_size"], 2, "'hidden_size' is not of the form axis=value"),
        (["rmsnorm", "hidden_size=2147483648"], 2, "sizes are at most 2147483647"),
        (["rmsnorm", "hidden_size=1", "hidden_size=2"], 2, "hidden_size has two values"),
        (["rmsnorm"], 2, "Missing argument"),
    ],
)
def test_what_is_refused_leaves_nothing(dataset: Path, arguments: list[str], status: int, message: str) -> None:
    before = files(dataset)
    done = invoke(*arguments)
    assert (done.exit_code, files(dataset)) == (status, before) and message in done.output, done.output


def test_what_no_kernel_takes_is_refused_with_the_reason_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is asked: fp8 products need sizes that 16 divides."""
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(ROOT))
    done = invoke("fp8_scaled_mm", "n=2001", "k=7168")
    assert done.exit_code == 1 and "no kernel of fp8_scaled_mm takes these sizes" in done.output, done.output
    assert "sgl_kernel.fp8_scaled_mm: " in done.output
    assert not list(ROOT.glob("definitions/*/fp8_scaled_mm_n2001_k7168.json"))


@pytest.mark.parametrize("error", [SyncError("no"), KeyboardInterrupt()])
def test_a_failure_at_the_end_leaves_nothing(dataset: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    before = files(dataset)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("flashinfer_trace.dataset.sync.sync", fail)
    assert invoke("rmsnorm", "hidden_size=6656").exit_code in (1, 130)
    assert files(dataset) == before


def test_a_reference_that_fails_against_the_oracle_is_not_written(dataset: Path) -> None:
    source = dataset / "reference" / "rmsnorm" / "rmsnorm.py"
    source.write_text(source.read_text().replace("EPS = 1e-6", "EPS = 1e-2"))
    before = files(dataset)
    done = invoke("rmsnorm", "hidden_size=6656")
    assert done.exit_code == 1 and "fails against the oracle" in done.output and files(dataset) == before


@pytest.mark.parametrize("family", FAMILIES.values())
def test_what_the_dataset_has_would_be_added_alike(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its smallest Definition, made from the others: same contract, axes and reference; no number that is wrong."""
    one = min(MEMBERS[family], key=lambda member: tuple(member.const_axes.values()))
    paths = [path for path in add.definition_paths(ROOT) if path.stem != one.name]
    monkeypatch.setattr(add, "definition_paths", lambda root: paths)
    given = {axis: one.const_axes[axis] for axis in NAMING.families[family].axes}
    try:
        data = new_definition(ROOT, family, given)
    except AddError as error:  # only where a person must say more; the command says what
        assert "also needs" in str(error) or "--description" in str(error)
        data = new_definition(ROOT, family, dict(one.const_axes), one.description)
    assert one.path is not None
    known = json.loads(one.path.read_text())
    assert {key: [*data[key]] for key in ("axes", "inputs", "outputs")} == {
        key: [*known[key]] for key in ("axes", "inputs", "outputs")
    }
    assert {name: axis.get("value") for name, axis in data["axes"].items()} == {
        name: axis.get("value") for name, axis in known["axes"].items()
    }
    assert data["reference"] == known["reference"] and data["constraints"] == known["constraints"]
    data["tags"] = known["tags"]
    assert not validate_paths([one.path], ROOT, {one.path: json_text(data)}).problems


def test_texts_of_models_and_of_other_sizes_are_left_out() -> None:
    made = new_definition(ROOT, "gqa_paged_decode_ps1", {"num_qo_heads": 56, "num_kv_heads": 8, "head_dim": 128})
    assert made["description"] == (
        "Grouped-query attention over a paged cache, for one new token per request (decode). "
        "56 query heads and 8 key-value heads of size 128, page size 1."
    )
    single = new_definition(ROOT, "gqa_paged_decode_ps1", {"num_qo_heads": 11, "num_kv_heads": 1, "head_dim": 128})
    assert "11 query heads and 1 key-value head of" in single["description"]
    derived = new_definition(ROOT, "per_token_group_quant_fp8", {"hidden_size": 640, "group_size": 128})
    assert derived["axes"]["num_groups"]["value"] == 5
    router = new_definition(ROOT, "moe_topk_softmax", {"top_k": 3, "num_experts": 48})
    assert router["description"] == (
        "Expert router: softmax over 48 logits, the 3 best experts of each token and their weights."
    )
    with pytest.raises(AddError, match="--description TEXT"):  # no text is true of other sizes
        new_definition(ROOT, "fast_topk_v2", {"top_k": 6144})


def test_the_checkout_has_one_more_file(tmp_path: Path) -> None:
    """.ci/merge-pairs adds sizes in a clone, as CONTRIBUTING.md says; here, that its command is the documented one."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "\n```bash\nflashinfer-trace add rmsnorm hidden_size=6656\n```\n" in text
    script = (ROOT / ".ci" / "merge-pairs").read_text(encoding="utf-8")
    assert 'SIZE, OTHER_SIZE = "6656", ' in script and ".ci/merge-pairs" in (ROOT / ".ci" / "run").read_text()
    done = subprocess.run([str(ROOT / ".ci" / "merge-pairs"), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "two sizes of one op_type" in done.stdout
