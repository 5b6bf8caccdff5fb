"""The command line: exit statuses, formats, errors that name the fix, and completion."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys

import click
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main
from flashinfer_trace.cli.group import echo_json
from flashinfer_trace.cli.options import text_table
from flashinfer_trace.dataset.evidence import proofs

pytestmark = pytest.mark.quick

MODEL = str(flashinfer_trace.find_root() / "models" / "llama-3.1-8b.json")


@pytest.mark.parametrize("importing", ["flashinfer_trace.cli", "click", "flashinfer_trace.dataset.store"])
def test_an_interrupt_during_the_imports_is_one_line(importing):
    program = f"""if True:
        import signal, sys
        class Interrupting:
            def find_spec(self, name, *_):
                if name == {importing!r}:
                    signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from flashinfer_trace.__main__ import main  # as the console script does
        sys.meta_path.insert(0, Interrupting())
        sys.argv[1:] = ["list"]
        assert {importing!r} not in sys.modules
        main()
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "\ninterrupted\n")


def test_references_are_embedded_and_statuses_match_the_evidence(invoke):
    result = invoke("sync", "--check")
    assert result.exit_code == 0, result.output


def test_validate_reports_place_and_rule(invoke, copy_of_dataset):
    data = json.loads(copy_of_dataset.read_text())
    data["axes"]["batch_size"]["description"] = ""
    copy_of_dataset.write_text(json.dumps(data, indent=2))
    text = invoke("validate", str(copy_of_dataset))
    assert text.exit_code == 1
    assert "rmsnorm_h512.json:" in text.output
    parsed = json.loads(invoke("validate", str(copy_of_dataset), "--format", "json").output)
    assert parsed["checked"] == 1
    pointers = {problem["pointer"] for problem in parsed["problems"]}
    assert "/axes/batch_size/description" in pointers
    assert set(parsed["problems"][0]) == {"file", "line", "pointer", "rule", "severity", "message", "hint"}


def test_embed_mends_an_old_reference_and_takes_the_status_away(invoke, copy_of_dataset):
    data = json.loads(copy_of_dataset.read_text())
    correct = data["reference"]
    data["reference"] = correct.replace("EPS = 1e-6", "EPS = 1e-5")
    data["tags"] = ["status:verified", *[tag for tag in data["tags"] if not tag.startswith("status:")]]
    copy_of_dataset.write_text(json.dumps(data, indent=2))
    assert invoke("sync", "--check").exit_code == 1
    assert json.loads(copy_of_dataset.read_text()) == data
    result = invoke("sync")
    assert result.exit_code == 0, result.output
    assert "reference and status:unverified and tags (-fi_api:" in result.output
    mended = json.loads(copy_of_dataset.read_text())
    assert mended["reference"] == correct
    assert "status:unverified" in mended["tags"]
    assert "0 files updated" in invoke("sync").output


def test_list_and_show(invoke):
    rows = json.loads(invoke("list", "--op-type", "gemm", "--format", "json").output)
    assert {row["op_type"] for row in rows} == {"gemm"}
    assert "rmsnorm_h512" in invoke("list", "--tag", "model:deepseek-v3").output
    shown = invoke("show", "rmsnorm_h512").output
    assert "def run(" in shown
    assert "hidden_size" in shown


def test_show_lists_the_runs_of_kernels_before_those_that_only_tags_name(invoke):
    """Also where no tag names the kernels that ran."""
    for name in ("gemm_bf16_n4096_k4096", "rmsnorm_h512"):
        definition = flashinfer_trace.load(name)
        shown = [line for line in invoke("show", name).output.splitlines() if line.startswith("  kernel  ")]
        runs = proofs(flashinfer_trace.find_root(), definition)
        for line, run in zip(shown, runs, strict=False):
            ran = f"ran, {run.library} {run.version} on {run.run.gpu}, {run.cases} cases"
            assert line == f"  kernel  {run.kernel_label}: {ran}"
        called = [tag.partition(":")[2] for tag in definition.tags if tag.startswith("called_as:")]
        assert runs and [line.split()[1].rstrip(":") for line in shown[len(runs) :]] == called


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate", "no/such/file.json"], "no such file or directory: no/such/file.json"),
        (["show", "rmsnorm_h513"], "did you mean"),
        (["sync", "rmsnorm_h513"], "did you mean"),
        (["list", "--op-type", "gem"], "no op_type 'gem'; did you mean gemm?"),
        (["list", "--op-type", "zzz"], "no op_type 'zzz'; the op_types are activation, batch, concat"),
        (
            ["list", "--tag", "model:deepseek-v33"],
            "no Definition has the tag 'model:deepseek-v33'; did you mean model:deep",
        ),
        (["list", "--tag", "nosuch:x"], "no Definition has the tag 'nosuch:x'; tags begin with status:"),
        (["verify", "nothing*"], "no Definition matches 'nothing*'"),
        (
            ["verify", "rmsnorm_h512", "--device", "abacus"],
            "--device abacus: there is no such device; give cpu, cuda",
        ),
        (["verify", "rmsnorm_h512", "--device", "meta"], "it runs on cpu, cuda or cuda:N"),
        (["verify", "rmsnorm_h512", "--record"], "--record needs --device cuda"),
        (["verify", "rmsnorm_h512", "--axes", "batch_size"], "--axes takes k=v"),
        (["verify", "rmsnorm_h512", "--axes", "rows=3"], "['rows'] are not variable axes"),
        (["verify", "rmsnorm_h512", "--plan", "{"], "--plan is not JSON"),
        (["verify", "rmsnorm_h512", "--axes", "batch_size=1", "--plan", "{}"], "give one of them"),
        (["verify", "rmsnorm_h512", "--kernel", "nobody"], "there are flashinfer.norm.rmsnorm"),
        (["validate", MODEL], "is not a Definition but the constants of a model"),
        (["validate", MODEL], "pytest tests/test_models.py"),
        (["verify", "rmsnorm_h512", "--kernel", "rmsnrm"], "did you mean flashinfer.norm.rmsnorm"),
        (["verify", "rmsnorm_h*", "--kernel", "flashinfer.norm.rmsnor"], "did you mean flashinfer.norm.rmsnorm"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_message(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_tag_or_op_type_that_no_definition_has_yet_is_an_empty_list(invoke, copy_of_dataset):
    data = json.loads(copy_of_dataset.read_text())
    data["tags"] = [tag.replace("status:verified", "status:unverified") for tag in data["tags"]]
    copy_of_dataset.write_text(json.dumps(data))
    for arguments in (["--tag", "status:verified"], ["--op-type", "gemm"]):
        assert (invoke("list", *arguments).exit_code, invoke("list", *arguments).output) == (0, "")
        assert json.loads(invoke("list", *arguments, "--format", "json").output) == []


def test_names_are_neither_cut_nor_wrapped(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    longest = max((one.name for one in flashinfer_trace.definitions()), key=len)
    assert len(longest) > 40
    assert any(longest in line.split() for line in invoke("list").output.splitlines())
    line, *_ = [
        line for line in invoke("verify", longest, "--against", "kernel").output.splitlines() if longest in line
    ]
    assert line.split()[0] == longest and "skipped" in line


@pytest.mark.parametrize("width", [3, 30])
def test_the_text_table_aligns_plain_and_colored_cells(width):
    rows = [["name", "n"], ["x" * width, "1"], [click.style("y", fg="red"), "12"]]
    lines = [click.unstyle(line) for line in text_table(rows, right=[1]).splitlines()]
    assert lines == [
        f"{'name':{max(width, 4)}}   n",
        f"{'x' * width:{max(width, 4)}}   1",
        f"{'y':{max(width, 4)}}  12",
    ]


def test_embed_by_name_leaves_the_others_alone(invoke, copy_of_dataset, change):
    other = copy_of_dataset.with_name("rmsnorm_h7168.json")
    shutil.copy(flashinfer_trace.load("rmsnorm_h7168", flashinfer_trace.dataset.store.PACKAGE.parent).path, other)
    before = other.read_text()
    # Whether its evidence is recorded for the present reference does not matter here.
    copy_of_dataset.write_text(copy_of_dataset.read_text().replace("status:unverified", "status:verified"))
    source = copy_of_dataset.parents[2] / "reference" / "rmsnorm" / "rmsnorm.py"
    source.write_text(source.read_text().replace("mul_(weight)", "mul_(weight * 1.01)"))
    checked = json.loads(invoke("sync", "rmsnorm_h512", "--check", "--format", "json").output)
    ((file, change),) = (one.values() for one in checked.pop("changed"))
    assert file == "definitions/rmsnorm/rmsnorm_h512.json" and change.startswith(
        "reference and status:unverified and tags"
    )
    assert checked == {"root": str(copy_of_dataset.parents[2]), "written": False}
    assert "1 file updated" in invoke("sync", "rmsnorm_h512").output
    assert "weight * 1.01" in copy_of_dataset.read_text()
    assert other.read_text() == before


def test_show_as_json_is_the_definition(invoke):
    definition = flashinfer_trace.load("rmsnorm_h512")
    assert json.loads(invoke("show", "rmsnorm_h512", "--format", "json").output) == definition.to_dict()


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["show", "rmsnorm_h513"], 2),
        (["list", "--op-type", "gem"], 2),
        (["coverage", "--model", "nobody"], 2),
        (["validate", "no/such/file.json"], 2),
        (["verify", "nothing*"], 2),
        (["verify", "--nosuch"], 2),
        (["sync", "rmsnorm_h513"], 2),
        (["list"], 1),
        (["show", "rmsnorm_h512"], 1),
        (["sync"], 1),
        (["verify"], 1),
    ],
)
def test_an_error_is_json_too(invoke, copy_of_dataset, arguments, status):
    if status == 1:
        copy_of_dataset.write_text("{")
    result = invoke(*arguments, "--format", "json")
    assert result.exit_code == status, result.output
    assert list(json.loads(result.stdout)) == ["error"]
    assert "Error: " in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["list"], ["show", "rmsnorm_h512"], ["sync"], ["verify"], ["coverage"]])
def test_a_broken_file_is_one_line_that_names_it(invoke, copy_of_dataset, arguments):
    copy_of_dataset.write_text("{")
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert f"Error: {copy_of_dataset}: " in line and "property name enclosed in double quotes" in line


@pytest.mark.parametrize("command", ["show", "verify", "list", "cost"])
@pytest.mark.parametrize(("field", "other"), [("name", "rmsnorm_h1024"), ("op_type", "layernorm")])
def test_a_file_that_holds_another_definition_is_not_taken_for_its_own(invoke, copy_of_dataset, command, field, other):
    """A copy whose name nobody changed, and a file in the folder of another op_type."""
    data = json.loads(copy_of_dataset.read_text())
    copy_of_dataset.write_text(json.dumps(data | {field: other}, indent=2))
    result = invoke(command, *(["rmsnorm_h512"] if command != "list" else []))
    assert result.exit_code == 1
    line = {"name": 2, "op_type": 3}[field]
    assert f"rmsnorm/rmsnorm_h512.json:{line}: it belongs at definitions/" in result.stderr
    assert f"{other}" in result.stderr and f"correct {field} there, or move the file" in result.stderr


@pytest.mark.parametrize("arguments", [["list"], ["validate"], ["verify"], ["sync"], ["coverage"], ["show", "x"]])
def test_a_wrong_root_is_one_line(invoke, monkeypatch, tmp_path, arguments):
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert f"no dataset (definitions/ and schema/) in {tmp_path}" in line


def test_infinities_are_null_in_json():
    command = click.Command("any", callback=lambda: echo_json([math.inf, (math.nan, 1.5), {"a": -math.inf}]))
    assert json.loads(CliRunner().invoke(command).output, parse_constant=pytest.fail) == [
        None,
        [None, 1.5],
        {"a": None},
    ]


def test_the_conventions_are_not_reported_as_no_definitions(invoke):
    result = invoke("validate", str(flashinfer_trace.find_root() / "schema" / "naming.json"))
    assert result.exit_code == 0 and "0 Definitions" not in result.output
    assert "no Definition" in result.output and "`flashinfer-trace validate` checks the dataset" in result.output


def test_a_link_that_leads_to_itself_is_a_problem_of_its_file(invoke, tmp_path):
    link = tmp_path / "loop.json"
    link.symlink_to(link)
    result = invoke("validate", str(link))
    assert result.exit_code == 1 and "loop.json:1: file-kind: is a symbolic link" in result.output


VARIABLE = "_FLASHINFER_TRACE_COMPLETE"


def completed(shell: str, *words: str) -> list[str]:
    """Suggestions of the shell for the last of these words."""
    completion = get_completion_class(shell)(main, {}, "flashinfer-trace", VARIABLE)
    return [item.value for item in completion.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sho"], ["show"]),
        (["show", "rmsnorm_h71"], ["rmsnorm_h7168", "rmsnorm_h7168_eps1e5"]),
        (["show", "rmsnorm_h7168_"], ["rmsnorm_h7168_eps1e5"]),
        (["verify", "rmsnorm_h7168", "rmsnorm_h15"], ["rmsnorm_h1536", "rmsnorm_h1536_eps1e5"]),
        (["sync", "rmsnorm_h15"], ["rmsnorm_h1536", "rmsnorm_h1536_eps1e5"]),
        (["list", "--op-type", "gem"], ["gemm"]),
        (["list", "--tag", "status:ver"], ["status:verified"]),
        (["coverage", "--model", "deepseek-v3"], ["deepseek-v3", "deepseek-v3.2"]),
        (["coverage", "--format", "j"], ["json"]),
        (["show", "nothing"], []),
    ],
)
def test_words_are_completed(words, expected):
    assert completed("zsh", *words) == expected


def test_every_name_and_op_type_is_offered():
    definitions = list(flashinfer_trace.definitions())
    assert completed("fish", "show", "") == sorted(one.name for one in definitions)
    assert completed("fish", "list", "--op-type", "") == sorted({one.op_type for one in definitions})
    assert completed("fish", "list", "--tag", "") == sorted({tag for one in definitions for tag in one.tags})


STATUS = sorted({f"status:{value}" for one in flashinfer_trace.definitions() for value in one.tag_values("status")})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["list", "--tag", "status", ":", "ver"], "plain,verified"),
        (["list", "--tag", "model", ":", "deepseek-v3.2"], "plain,deepseek-v3.2"),
        (["list", "--tag", "status:ver"], "plain,verified"),
        (["list", "--tag", "stat"], "\n".join(f"plain,{tag}" for tag in STATUS)),
        (["show", "rmsnorm_h71"], "plain,rmsnorm_h7168\nplain,rmsnorm_h7168_eps1e5"),
        (["show", "rmsnorm_h7168_"], "plain,rmsnorm_h7168_eps1e5"),
    ],
)
def test_bash_takes_a_colon_for_the_end_of_a_word(monkeypatch, words, expected):
    """bash passes ``status:ver`` as three words, and replaces only the last of them."""
    monkeypatch.setenv("COMP_WORDS", "\n".join(["flashinfer-trace", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    completion = get_completion_class("bash")(main, {}, "flashinfer-trace", VARIABLE)
    assert completion.complete() == expected


@pytest.mark.parametrize(
    "words", [["show", ""], ["list", "--tag", ""], ["list", "--op-type", ""], ["coverage", "--model", ""]]
)
def test_a_dataset_that_cannot_be_read_completes_nothing(monkeypatch, tmp_path, words):
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    assert completed("zsh", *words) == []
