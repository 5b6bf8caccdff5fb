"""docs/benchmarking.md: what its commands print where there is no GPU; and docs/performance.md from made-up times."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from flashinfer_trace.cli import main
from flashinfer_trace.dataset import store
from flashinfer_trace.judging.bench import results
from flashinfer_trace.judging.bench.environment import Environment
from flashinfer_trace.judging.bench.report import Measured, Report, Timetable
from flashinfer_trace.judging.bench.statistics import Policy, Series, summary
from flashinfer_trace.judging.traffic import path_of
from tools.site import definition_pages
from tools.site.times_missing import times_missing
from tools.site.times_page import fractions_svg, performance_documents

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "benchmarking.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", TEXT, re.M | re.S)
(NORM, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "judge.md").read_text(encoding="utf-8"), re.M | re.S)
MACHINE = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11.0", "3.12.3")


def invoke(command):
    return CliRunner().invoke(main, command.split()[1:])


def test_the_roofline_of_the_walk_through():
    command, shown = COMMANDS[0]
    printed = invoke(command).output.splitlines()
    for line in (line for line in shown.splitlines() if line != "..."):
        assert any(one.split() == line.split() for one in printed), f"{line!r} is not in {printed}"


def test_the_walk_through_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_norm.py").write_text(NORM)
    command, _ = COMMANDS[1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke(command)
    assert result.exit_code == 3 and len(result.output.splitlines()) == 1


def test_every_option_of_the_table_exists():
    named = re.findall(r"^\| `(--[a-z]+)", TEXT, re.M)
    printed = invoke("flashinfer-trace bench --help").output
    assert len(named) == 10 and all(option in printed for option in named)
    used = [word for command, _ in COMMANDS if " bench " in command for word in command.split() if word.startswith("-")]
    assert len(used) >= 6 and all(word in printed for word in used)


def record(root, kernel, seconds, reference=None, version="0.6.12", ahead=1.0, card=""):
    definition = store.load("rmsnorm_h3072")
    found = summary([Series([{"total": seconds, "ahead": ahead}] * 3, 0.0)])
    kernels = [Measured(kernel, "flashinfer-python", version, found)]
    table = Timetable("decode-8", {"batch_size": 8}, 3, 100, {"float32": 9}, 1e-5, kernels)
    (path,) = results.append(
        Report(definition.name, [], replace(MACHINE, card=card), False, False, [table]), definition, root / "results"
    )
    if reference:
        path.write_text(path.read_text().replace(definition.reference_sha256, reference))


def performance(root, dataset):
    return performance_documents(root, dataset)[root / "docs" / "performance.md"]


def rows(root, start="| `rmsnorm_h3072`"):
    """The document, and its rows about the Definition, or that begin otherwise, as cells."""
    text = performance(root, [store.load("rmsnorm_h3072")])
    lines = (line for line in text.splitlines() if line.startswith(start))
    return text, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


FAMILY = "| [`rmsnorm`](../families/rmsnorm.md)"


def test_the_fastest_kernel_of_the_latest_times(tmp_path):
    record(tmp_path, "slow", 4.1e-5)
    record(tmp_path, "slow", 4e-5)
    record(tmp_path, "fast", 2e-5)
    text, (cells,) = rows(tmp_path, FAMILY)
    assert cells[1:] == ["1", "1", "50 %"] and "## NVIDIA H200" in text


def test_times_of_an_older_reference_are_left_out(tmp_path):
    record(tmp_path, "fast", 2e-5, reference="0" * 64)
    assert "No time is recorded yet" in performance(tmp_path, [store.load("rmsnorm_h3072")])


def test_two_runs_that_agree(tmp_path):
    for seconds in (9e-5, 4e-5, 4.04e-5):
        record(tmp_path, "one", seconds)
    text, _ = rows(tmp_path)
    assert "1 of these were GPU-bound:" in text
    assert (
        "- 1 with runs on two cards or on unknown cards: median difference 1.0 %, largest 1.0 %; 0 differ by 3 %"
        in text
    )
    assert "CPU-bound" not in text


def test_the_command_for_another_run_takes_as_long_as_the_tool_that_recorded_the_others(tmp_path):
    record(tmp_path, "one", 4e-5)
    text, _ = rows(tmp_path)
    source = (ROOT / "tools" / "record_times.py").read_text(encoding="utf-8")
    (seconds,) = re.findall(r'"--seconds", type=float, default=([\d.]+)', source)
    assert f"bench -d NAME --workloads quick --seconds {seconds} --record results" in text
    assert f"after {seconds} s, but makes three at least" in " ".join(text.split()) and Policy().least == 3


def test_times_of_one_process_are_named_and_not_compared_with_those_of_several(tmp_path):
    record(tmp_path, "one", 4e-5)
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text(path.read_text().replace('"processes":1,', ""))
    assert "1 of 1 times are from before" in rows(tmp_path)[0]
    record(tmp_path, "one", 5e-5)
    text, listed = rows(tmp_path)
    assert listed == [] and "are from before" not in text


def test_two_runs_that_differ_are_listed(tmp_path):
    for label, times in {"one": (4e-5, 4.2e-5), "two": (5e-5, 4e-5), "three": (6e-5, 6e-5)}.items():
        for seconds in times:
            record(tmp_path, label, seconds)
    text, (first, second) = rows(tmp_path)
    assert first[2:] == ["`two`", "two, or unknown", "50.0 us", "40.0 us", "25.0 %"]
    assert second[2:] == ["`one`", "two, or unknown", "40.0 us", "42.0 us", "5.0 %"]
    assert "3 of these were GPU-bound:" in text
    assert "median difference 5.0 %, largest 25.0 %; 2 differ by 3 %" in text


def test_runs_on_one_card_are_told_from_those_on_two(tmp_path):
    times = {
        "one": (("a", 4e-5), ("a", 4.2e-5)),
        "two": (("a", 5e-5), ("b", 5.5e-5)),
        "three": (("", 6e-5), ("a", 6e-5)),
    }
    for label, runs in times.items():
        for card, seconds in runs:
            record(tmp_path, label, seconds, card=card)
    text, _ = rows(tmp_path)
    assert "- 1 with both runs on one card: median difference 5.0 %" in text
    assert "- 2 with runs on two cards or on unknown cards: median difference 5.0 %" in text
    listed = [line.split(" | ")[2:4] for line in text.split("### Families")[0].splitlines() if line.endswith(" % |")]
    assert listed == [["`two`", "two, or unknown"], ["`one`", "one"]]


def test_times_in_which_the_gpu_waited_are_told_apart(tmp_path):
    for label, times, ahead in (("one", (4e-5, 4.04e-5), 1.0), ("two", (5e-5, 4e-5), 0.0)):
        for seconds in times:
            record(tmp_path, label, seconds, ahead=ahead)
    text, (cells,) = rows(tmp_path, FAMILY)
    assert cells[1:] == ["1", "1", "†"]
    times = {"rmsnorm_h3072": list(results.read(tmp_path / "results"))[-1:]}
    page = definition_pages._times(SimpleNamespace(times=times, kernels={}), store.load("rmsnorm_h3072"))
    assert ">40.0 †<" in page and "%" not in page and "waited for the processor" in page
    assert "1 of these were GPU-bound:" in text
    assert "median difference 1.0 %, largest 1.0 %; 0 differ" in text
    assert "1 kernels were CPU-bound: median difference 25.0 %" in text
    assert "| 25.0 % |" not in text.split("### Families")[0], "only what the GPU alone decides is listed"


def test_short_times_and_those_of_another_version_are_not_compared(tmp_path):
    record(tmp_path, "short", 1e-5)
    record(tmp_path, "short", 1.2e-5)
    record(tmp_path, "new", 4e-5)
    record(tmp_path, "new", 5e-5, version="0.6.13")
    assert "No kernel that takes over 20 us was timed in two runs yet" in rows(tmp_path)[0]


def missing(*names, timed=()):
    """The text about kernels without a time on an H200, and its rows: family, kernel and reason."""
    times = {(name, workload): {label: [{"axes": axes}]} for name, workload, label, axes in timed}
    lines = times_missing(ROOT, map(store.load, names), (9, 0), times)
    return lines[2:3], [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:3] == "| `"]


def test_kernels_without_a_time_are_listed_with_the_reason():
    name, label = "gemm_bf16_n256_k7168", "torch.matmul[cuBLAS]"
    text, rows = missing(name, "cutlass_scaled_fp4_mm_n4096_k7168", timed=[(name, "decode-64", label, {"m": 64})])
    assert text[0].startswith("1 of 2 families have times.")
    whys = {kernel: why for _, kernel, why in rows}
    assert f"`{label}`" not in whys
    assert whys["all"] == "needs a GPU of compute capability 10.0 or above"
    _, (limited,) = missing("moe_nvfp4_experts_quant_e32_k7168")
    assert limited[1:] == ["all", "needs a GPU of compute capability 10.0 to 10.3"]
    fused = "sglang.kernels.ops.gemm.dsv3_fused_a_gemm.dsv3_fused_a_gemm"
    assert whys[f"`{fused}`"] == f"not for `{name}`: needs n = 2112"
    assert whys["`sgl_kernel.dsv3_router_gemm`"] == "takes m from 1 to 16, and a workload has 64"


def test_a_kernel_that_takes_a_workload_has_no_reason():
    name, label = "gemm_bf16_n256_k7168", "torch.matmul[cuBLAS]"
    timed = [(name, one, label, {"m": m}) for one, m in (("decode-64", 64), ("decode-8", 8))]
    whys = {kernel: why for _, kernel, why in missing(name, timed=timed)[1]}
    assert whys["`sgl_kernel.dsv3_router_gemm`"] == "no time is recorded yet"


def test_recorded_times_are_of_the_workloads_of_today():
    """The document leaves out one of other inputs, which says nothing of these."""
    compared, known = set(), {}
    for one in results.read(ROOT / "results"):
        definition = store.load(one["definition"])
        path = path_of(definition, ROOT)
        if results.of_today(one, definition, ROOT) and path.exists():
            workload = json.loads(path.read_text(encoding="utf-8"))["workloads"][one["workload"]]
            axes = {axis: one["axes"][axis] for axis in definition.var_axes}  # others may have gone
            assert (one["seed"], axes) == (workload["seed"], workload["axes"]), one
            compared.add(definition.name)
        elif definition.reference_sha256 == one["reference_sha256"] and path.exists():
            known[definition.name] = definition
    shown = performance(ROOT, known.values())
    for name in known.keys() - compared:
        assert f"| `{name}` |" not in shown
    assert len(compared) > 70  # others are of references that have changed since


def test_a_family_that_was_not_timed_is_named_once():
    text, rows = missing("gemm_bf16_n256_k7168", "rmsnorm_h7168", timed=[("rmsnorm_h7168", "decode-64", "a", {})])
    assert text[0].endswith(" It leaves out those of which no time is recorded yet, 1 in all: `gemm_bf16`.")
    assert "no time is recorded yet" not in {why for family, _, why in rows if family == "`gemm_bf16`"}


def test_families_without_a_time_are_judged_by_their_workloads():
    _, rows = missing("moe_align_block_size_topk8_e256_b64", "moe_post_reorder_topk9_h7168")
    assert [why for *_, why in rows] == [
        "takes lists whose length is a multiple of 4, and that of a workload is 16703; it has [a defect]"
        "(../findings.md)",
        "takes seq_len from 1 to 6, and a workload has 64",
        "loses what expert 0 computed, and tokens of the workloads choose any expert; it has [a defect]"
        "(../findings.md)",
    ]


def test_nothing_is_said_if_every_kernel_has_a_time():
    name = "bmm_bf16_b64_n128_k512"
    assert len(missing(name)[0]) == 1
    assert missing(name, timed=[(name, "decode-64", "torch.bmm[cuBLAS]", {})]) == ([], [])


def test_the_document_names_what_has_no_time(tmp_path):
    record(tmp_path, "flashinfer.norm.rmsnorm", 2e-5)
    text, _ = rows(tmp_path)
    assert "### Without a time" in text and "1 of 1 families have times" in text
    assert "| `rmsnorm` | `torch.ops.sgl_kernel.rmsnorm` | no time is recorded yet |" in text
    assert "| `rmsnorm` | `flashinfer.norm.rmsnorm` |" not in text


@pytest.mark.gpu_harness
def test_the_walk_through_on_a_gpu(tmp_path, monkeypatch, cuda_device):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_norm.py").write_text(NORM)
    assert shutil.which("nvidia-smi")
    result = invoke(COMMANDS[1][0])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("prefill-2048")]
    assert any("my_norm.py" in line and "%" in line for line in lines), result.output
    assert (tmp_path / "roofline.svg").read_text().count("<circle") > 2


def test_the_picture_has_a_bar_for_each_family(tmp_path):
    record(tmp_path, "slow", 4e-5)
    record(tmp_path, "fast", 2e-5)
    documents = performance_documents(tmp_path, [store.load("rmsnorm_h3072")])
    text, picture = (documents[tmp_path / "docs" / name] for name in ("performance.md", "performance_nvidia_h200.svg"))
    assert "](performance_nvidia_h200.svg)" in text
    tree = ElementTree.fromstring(picture)
    bars = [one for one in tree.iter() if one.tag.endswith("rect")]
    assert [one[0].text for one in bars] == ["rmsnorm: 50 %"] and bars[0].get("width") == "210.0"


def test_the_highest_fractions_come_first_and_none_leaves_the_picture():
    picture = fractions_svg("A <GPU>", {"b": [0.2], "a": [0.5, 1.4, 0.1], "c & d": [0.3]})
    tree = ElementTree.fromstring(picture)
    bars = [one for one in tree.iter() if one.tag.endswith("rect")]
    assert [one[0].text for one in bars] == ["a: 140 %, 50 %, 10 %", "c & d: 30 %", "b: 20 %"]
    assert [float(one.get("width")) for one in bars] == [420.0, 126.0, 84.0]
    marks = [one for one in tree.iter() if one.get("stroke") == "#d55e00"]
    assert [float(one.get("x1")) for one in marks] == [330 + 210, 330 + 42]


def test_without_times_there_is_no_picture(tmp_path):
    assert performance_documents(tmp_path, []).keys() == {tmp_path / "docs" / "performance.md"}
