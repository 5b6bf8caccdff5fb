"""flashinfer-trace verify: what it runs, what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import flashinfer_trace
from flashinfer_trace import families
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.family import private_kernel
from flashinfer_trace.harness.twins import Twins
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.kernels.needs import exactly
from tools.scaffold.__main__ import EXAMPLE
from tools.scaffold.contract import read_contract
from tools.scaffold.templates import definition, record, reference

CONTRACT = read_contract(flashinfer_trace.find_root(), *EXAMPLE)
UNFINISHED = record("scaled", "scaled", CONTRACT)


def test_verify_one_case_by_axes(invoke):
    result = invoke("verify", "rmsnorm_h512", "--axes", "batch_size=3", "--seed", "5", "--format", "json")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.output)
    assert (report["status"], report["cases"], report["seed"]) == ("passed", 1, 5)


def test_kernels_without_a_gpu_are_skipped_with_the_reason(invoke):
    result = invoke("verify", "rmsnorm_h512", "--against", "all", "--examples", "5")
    assert result.exit_code == 0, result.output
    assert "kernels need --device cuda" in result.output
    assert "1 passed, 0 failed, 2 skipped" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seed", str(2**63)), "is not in the range 0<=x<=9223372036854775807"),
        (("--axes", "batch_size=1,batch_size=2"), "--axes has two values of batch_size"),
        (("--axes", "batch_size=1", "--axes", "batch_size=2"), "--axes has two values of batch_size"),
        (("--axes", f"batch_size={2**31}"), "sizes are whole numbers from 0 to 2147483647"),
        (("--axes", f"batch_size={'9' * 5000}"), "sizes are whole numbers from 0 to 2147483647"),
        (("--evidence", "mine"), "--evidence mine is where --record writes; give --record too"),
    ],
)
def test_options_that_cannot_be_are_refused(invoke, options, message):
    result = invoke("verify", "rmsnorm_h512", *options, "--format", "json")
    assert result.exit_code == 2 and message in json.loads(result.stdout)["error"]


def test_axes_without_inputs_are_no_failure_of_the_reference(invoke):
    result = invoke("verify", "moe_shuffle_rows_h2048", "--axes", "num_rows=0")
    assert result.exit_code == 2 and "no inputs can be made with axes {'num_rows': 0}" in result.output


def test_an_error_after_some_results_leaves_a_list(invoke):
    names = ("silu_and_mul_i4096", "rmsnorm_h512")
    found = {}
    for axis in ("batch_size", "num_tokens"):  # of one of them each
        result = invoke("verify", *names, "--axes", f"{axis}=3", "--format", "json")
        assert result.exit_code == 2 and "are not variable axes" in result.stderr
        found[axis] = json.loads(result.stdout)
    documents = sorted(found.values(), key=lambda one: isinstance(one, list))
    assert documents[0].keys() == {"error"} and [one["status"] for one in documents[1]] == ["passed"]


def test_a_failure_is_exit_1_with_a_line_that_repeats_it(invoke, change):
    change(".mul_(weight)", ".mul_(weight * 1.01)")
    result = invoke("verify", "rmsnorm_h512", "--examples", "5")
    assert result.exit_code == 1
    assert "repeat: flashinfer-trace verify rmsnorm_h512 --against oracle" in result.output
    assert "0 passed, 1 failed" in result.output
    row = next(line for line in result.output.splitlines() if line.startswith("rmsnorm_h512 "))
    assert row.split()[2] == "failed" and row.split()[5] == "-", "a failure shows no figure of cases that passed"


def test_all_skipped_is_not_success(invoke):
    result = invoke("verify", "rmsnorm_h512", "--against", "kernel")
    assert result.exit_code == 3
    assert "nothing was verified: everything was skipped, kernels need --device cuda" in result.stderr
    reports = json.loads(invoke("verify", "rmsnorm_h512", "--against", "kernel", "--format", "json").stdout)
    assert {report["status"] for report in reports} == {"skipped"}


def test_definitions_without_a_kernel_are_not_success(invoke, monkeypatch):
    record = family_of(flashinfer_trace.load("rmsnorm_h512"))
    monkeypatch.setattr("flashinfer_trace.cli.tasks.family_of", lambda definition: replace(record, kernels=()))
    result = invoke("verify", "rmsnorm_h512", "--against", "kernel")
    assert result.exit_code == 3
    assert result.stderr == "nothing was verified: the chosen Definitions have no kernel\n"


def test_each_kernel_that_refuses_a_definition_says_why(invoke, monkeypatch):
    kernels = (
        private_kernel("toy.other", "pytest", lambda *_: {}, needs=(exactly(hidden_size=7168),)),
        private_kernel("toy.even", "pytest", lambda *_: {}, needs=(lambda definition: "takes odd sizes only",)),
    )
    record = family_of(flashinfer_trace.load("rmsnorm_h512"))
    monkeypatch.setattr("flashinfer_trace.cli.tasks.family_of", lambda definition: replace(record, kernels=kernels))
    result = invoke("verify", "rmsnorm_h512", "--against", "kernel")
    assert result.exit_code == 3
    assert result.stderr.splitlines() == [
        "nothing was verified: the chosen Definitions have no kernel",
        "  rmsnorm_h512: toy.other: needs hidden_size = 7168",
        "  rmsnorm_h512: toy.even: takes odd sizes only",
    ]


def test_an_embedded_reference_that_is_older_is_stale(invoke, copy_of_dataset):
    source = copy_of_dataset.parents[2] / "reference" / "rmsnorm" / "rmsnorm.py"
    source.write_text(source.read_text().replace("mul_(weight)", "mul_(weight * 1.01)"))
    result = invoke("verify", "rmsnorm_h512", "--examples", "5")
    assert result.exit_code == 1
    assert "warning: 1 Definition with a reference older than the one in reference/" in result.stderr
    assert "run `flashinfer-trace sync rmsnorm_h512`" in result.stdout
    assert "0 passed, 0 failed, 0 skipped, 1 stale" in result.stdout
    (report,) = json.loads(invoke("verify", "rmsnorm_h512", "--examples", "5", "--format", "json").stdout)
    assert report["status"] == "stale"
    invoke("sync", "rmsnorm_h512")
    output = invoke("verify", "rmsnorm_h512", "--examples", "5").output
    assert "0 passed, 1 failed, 0 skipped; dataset" in output, "only the older reference passed"


def test_a_stale_reference_that_fails_says_both(invoke, change):
    change(".mul_(weight)", ".mul_(weight * 1.01)", source_too=False)
    result = invoke("verify", "rmsnorm_h512", "--examples", "5")
    assert result.exit_code == 1
    assert "repeat: flashinfer-trace verify" in result.output and "sync rmsnorm_h512`" in result.output
    assert "0 passed, 1 failed, 0 skipped" in result.output


def test_a_case_at_the_own_sizes_that_proves_nothing_is_a_failure(invoke, monkeypatch):
    verified = Twins.verify
    monkeypatch.setattr(Twins, "verify", lambda *a, **options: replace(verified(*a, **options), real_size=0))
    result = invoke("verify", "rmsnorm_h512", "--examples", "5")
    assert result.exit_code == 1
    assert "the case at its own sizes proves nothing" in result.output
    large = invoke("verify", "moe_bf16_expert_gemm_topk8_r1_e128_n1536_k2048", "--examples", "5")
    assert large.exit_code == 0, large.output


def test_definitions_without_a_case_at_their_own_sizes_are_named(invoke):
    small, large = "rmsnorm_h512", "moe_bf16_gather_gemm*"
    output = invoke("verify", small, large, "--examples", "5").stdout
    names = "moe_bf16_gather_gemm_e128_n1536_k2048, moe_bf16_gather_gemm_swiglu_e128_n5760_k2880"
    line = f"2 of these have no case at their own sizes on a CPU (inputs of more than 72 MiB): {names}; verify with"
    assert f"\n{line} --device cuda\n" in output
    assert "3 passed, 0 failed" in output
    reports = json.loads(invoke("verify", small, large, "--examples", "5", "--format", "json").stdout)
    assert {report["definition"] for report in reports if report["only_twin"]} == set(names.split(", "))
    assert "own sizes" not in invoke("verify", small, "--examples", "5").stdout
    assert "own sizes" not in invoke("verify", names.split(", ")[0], "--axes", "num_tokens=2").stdout


def test_only_the_first_of_many_definitions_without_a_case_are_named(invoke):
    output = invoke("verify", "moe_bf16_expert_gemm_topk8*", "--examples", "5", "--jobs", "1").stdout
    (line,) = [line for line in output.splitlines() if "of these have no case" in line]
    assert line.count("moe_bf16_expert_gemm") == 3 and line.endswith(" more; verify with --device cuda")


def test_what_many_reports_say_is_printed_once(invoke):
    result = invoke("verify", "rmsnorm_h*", "--against", "kernel")
    assert result.output.count("kernels need --device cuda") == 3, "below the first, at the end, and in the verdict"
    assert " more skipped: kernels need --device cuda" in result.output


def damage_naming(root):
    (root / "schema" / "naming.json").write_text("{")


def damage_source(root):
    (root / "reference" / "rmsnorm" / "rmsnorm.py").write_text("def run(:\n")


def damage_embedded(root):
    path = root / "definitions" / "rmsnorm" / "rmsnorm_h512.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "reference": "def run(:\n"}))


def remove_pattern(root):
    path = root / "schema" / "naming.json"
    data = json.loads(path.read_text())
    del data["families"]["rmsnorm"]
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "status", "message"),
    [
        (damage_naming, "failed", "schema/naming.json: malformed"),
        (damage_source, "stale", "reference/rmsnorm/rmsnorm.py:1: the reference is not Python"),
        (damage_embedded, "failed", "rmsnorm_h512.json: rmsnorm_h512:1: the reference is not Python"),
        (remove_pattern, "failed", "no family in schema/naming.json matches this name; add its pattern there"),
    ],
)
def test_bad_data_is_a_failure_of_its_definition(invoke, copy_of_dataset, damage, status, message):
    damage(copy_of_dataset.parents[2])
    result = invoke("verify", "rmsnorm_h512", "--examples", "5")
    assert result.exit_code == 1, result.output
    assert message in result.stdout and "Traceback" not in result.output
    assert "0 passed, " in result.stdout and f" 1 {status}" in result.stdout
    (report,) = json.loads(invoke("verify", "rmsnorm_h512", "--format", "json").stdout)
    assert report["status"] == status and message in report["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nosuch\n", ":1: ModuleNotFoundError: No module named 'nosuch'; correct it, then run"),
        ("\n\ndef (:\n", ":3: SyntaxError: invalid syntax; correct it, then run"),
        (UNFINISHED, "the harness record of scaled is unfinished: write it"),
        (
            UNFINISHED.replace("TODO", "to do").replace('{"values": VALUE_KINDS}', '{"values": lambda request: 1 / 0}'),
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_bad_record_is_a_failure_of_its_definitions(
    invoke, copy_of_dataset, tmp_path_factory, monkeypatch, text, message
):
    root = copy_of_dataset.parents[2]
    names = json.loads((root / "schema" / "naming.json").read_text())
    names["families"]["scaled"] = {"op_type": "scaled", "pattern": "scaled_n{n}"}
    (root / "schema" / "naming.json").write_text(json.dumps(names))
    for folder in ("reference", "definitions"):
        (root / folder / "scaled").mkdir()
    (root / "reference" / "scaled" / "scaled.py").write_text(reference(CONTRACT))
    (root / "definitions" / "scaled" / "scaled_n8.json").write_text(
        json.dumps(definition("scaled_n8", "scaled", CONTRACT))
    )
    modules = tmp_path_factory.mktemp("families")
    (modules / "scaled.py").write_text(text)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(modules)])
    families.families_of_op_type.cache_clear()
    monkeypatch.delitem(sys.modules, "flashinfer_trace.families.scaled", raising=False)
    result = invoke("verify", "--examples", "5")
    assert result.exit_code == 1, result.output
    assert f"{modules / 'scaled.py'}:" in result.stdout and message in result.stdout
    assert "1 passed, 1 failed" in result.stdout, "the other Definitions must still be verified"
    assert "Traceback" not in result.output


def interrupt_at(monkeypatch, number, how):
    """Interrupts the verification of the Definition with this number."""
    calls = []

    def verify(self, job, **options):
        calls.append(job)
        if len(calls) == number:
            how()
        return Report(job.definition.name, job.target, job.device, cases=5, real_size=1)

    monkeypatch.setattr(Twins, "verify", verify)


def raised():
    raise KeyboardInterrupt


class Discarding:
    """Python prints an exception that a finalizer raises, and continues."""

    def __del__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize(("how", "finished"), [(raised, 2), (Discarding, 3)])
def test_an_interrupt_keeps_what_is_finished(invoke, monkeypatch, how, finished):
    for output_format in ("text", "json"):
        interrupt_at(monkeypatch, 3, how)
        result = invoke("verify", "rmsnorm_h*", "--jobs", "1", "--format", output_format)
        assert result.exit_code == 130, result.output
        assert f"interrupted: {finished} of " in result.stderr and "Traceback" not in result.output
    assert [report["status"] for report in json.loads(result.stdout)] == ["passed"] * finished


def test_an_interrupt_of_another_command(invoke, monkeypatch):
    monkeypatch.setattr("flashinfer_trace.dataset.validation.validate_paths", lambda *paths, **options: raised())
    result = invoke("validate", "--format", "json")
    assert (result.exit_code, json.loads(result.stdout)) == (130, {"error": "interrupted"})
    assert result.stderr.strip() == "interrupted"


def test_evidence_that_cannot_be_written_is_a_failure(invoke, monkeypatch):
    """A run on a GPU, as far as a machine without one can imitate it: the kernel passes, but recording fails."""

    def pass_all(jobs, **options):
        return [Report(job.definition.name, job.target, job.device, cases=60) for job in jobs]

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied", "evidence/rmsnorm/rmsnorm_h512.jsonl")

    monkeypatch.setattr("flashinfer_trace.cli.verification.check_device", lambda device, elsewhere: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("flashinfer_trace.cli.runs.verify_together", pass_all)
    monkeypatch.setattr("flashinfer_trace.cli.runs.entry_of", refuse)
    result = invoke("verify", "rmsnorm_h512", "--kernel", "flashinfer.norm.rmsnorm", "--device", "cuda", "--record")
    assert result.exit_code == 1
    assert "PermissionError" in result.stdout and "evidence/rmsnorm/rmsnorm_h512.jsonl" in result.stdout


def test_a_run_with_a_chosen_seed_is_not_recorded(invoke, monkeypatch):
    monkeypatch.setattr("flashinfer_trace.cli.verification.check_device", lambda device, elsewhere: None)
    result = invoke("verify", "rmsnorm_h512", "--device", "cuda", "--record", "--seed", "7")
    assert result.exit_code == 2
    assert "--record needs --seed 0: a run with a chosen seed is not evidence" in result.stderr


def test_off_a_terminal_there_is_no_progress_bar_and_no_color():
    code = "from flashinfer_trace.cli import main; main(['verify', 'rmsnorm_h512', '--examples', '5'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout and "1 passed" in result.stdout


@pytest.mark.parametrize("optional", [True, False])
def test_a_missing_library_is_skipped_only_if_it_is_optional(monkeypatch, optional):
    definition = flashinfer_trace.load("rmsnorm_h512")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("flashinfer_trace.kernels.table.OPTIONAL", ("toy.",) if optional else ())
    kernel = private_kernel("toy.kernel", "no-such-library", lambda *_: {})
    report = Task(definition, family_of(definition), kernel.label, kernel).impossible("cuda")
    found = None if report is None else (report.status, report.message)
    assert found == (("skipped", "needs no-such-library, which is not installed") if optional else None)
