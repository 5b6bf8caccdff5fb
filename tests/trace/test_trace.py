"""Traces from recorded runs: every call with its chain, in order, and the ops and the graph that follow from them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashinfer_trace import find_root
from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.recording import (
    RecordedCall,
    RecordedLaunch,
    Recording,
    RecordingError,
    read,
    read_all,
    write,
)
from tools.trace import records
from tools.trace.__main__ import main
from tools.trace.calls import PHASES, in_model, keys_of, settings_of, traced
from tools.trace.document import dumps, trace
from tools.trace.records import of_model, of_release
from tools.trace.render import backtraces, render

ROOT = find_root()
RUNS = {run.name: run for run in read_all(ROOT / "traces" / "runtime")}
RELEASE = ("--release", "0.5.11")
PLAIN = RUNS["llama_3.1_8b-bf16-flashinfer"]
MODEL, LAYER = "sglang/srt/models/toy.py", "sglang/srt/layers/norm.py"


def names(node: dict[str, Any]) -> Iterator[str]:
    """The ops of a graph, in its order."""
    if node["kind"] != "container":
        yield node["name"]
    for child in node["children"]:
        yield from names(child)


@pytest.mark.parametrize("model", sorted({str(run.document["model"]) for run in RUNS.values()}))
def test_a_trace_has_the_chains_of_its_runs_and_no_others(model: str):
    """Counted in the files themselves: every kernel that launched something, with its frames below the driver."""
    runs = of_model(list(RUNS.values()), model)
    found = trace(runs, model)
    chains = {
        (kernel["path"], tuple((f["file"], f["line"], f["function"]) for f in chain["frames"]), run, phase)
        for kernel in found["kernels"]
        for chain in kernel["chains"]
        for run, phases in chain["configurations"].items()
        for phase in phases
    }
    assert chains == {one for run in runs for one in raw_chains(run.name)}


def raw_chains(name: str) -> Iterator[tuple[Any, ...]]:
    document = json.loads((ROOT / "traces" / "runtime" / f"{name}.json").read_text(encoding="utf-8"))
    for phase, kernel, stack, _, _, launches in document["calls"]:
        _, path, *_ = document["kernels"][kernel]
        frames = []
        while stack >= 0:
            frame, stack = document["stacks"][stack]
            file, line, function, _ = document["frames"][frame]
            frames.append((document["files"][file], line, function))
        frames = [frame for frame in frames if frame[0] != "sglang/bench_one_batch.py"]
        runs = launches or phase == "capture" or path in document["stand_ins"]
        prepares = path.rpartition(".")[2] in ("plan", "begin_forward", "fast_decode_plan")
        if frames and path and runs and not prepares and not path.startswith("torch.ops.sglang."):
            yield path, tuple(frames), name, phase


def test_the_ops_of_a_layer_are_in_the_order_of_the_models_code():
    """Read in SGLang 0.5.11, models/llama.py: LlamaDecoderLayer.forward, LlamaAttention.forward, LlamaMLP.forward."""
    found = trace([PLAIN], "llama")
    assert list(names(found["graph"])) == [
        *("embed_tokens", "input_layernorm", "qkv_proj", "rotary_emb", "attn", "o_proj", "post_attention_layernorm"),
        *("gate_up_proj", "act_fn", "down_proj", "norm", "logits_processor"),
    ]
    (model,) = found["graph"]["children"]
    assert (model["name"], model["function"]) == ("LlamaForCausalLM", "LlamaForCausalLM.forward")
    kinds = dict(_kinds(found["graph"]))
    assert kinds["qkv_proj"] == "torch" and kinds["act_fn"] == "op"


def _kinds(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield node["name"], node["kind"]
    for child in node["children"]:
        yield from _kinds(child)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_the_graph_of_one_run_follows_its_first_layer(name: str):
    """In each function, what the first layer calls is in the order in which it was called."""
    run = RUNS[name]
    found = trace([run], name)
    for phase in PHASES:
        first = [call for call in traced(run) if call.phase == phase and not call.group and not call.layer]
        for entry in {call.frames[call.position][:3:2] for call in first}:
            of_function = [call for call in first if call.frames[call.position][:3:2] == entry]
            wanted = list(dict.fromkeys(call.op for call in of_function))
            (shown, *_) = [
                [op for op in children if op in wanted]
                for children in _children(found["graph"])
                if {*wanted} <= {*children}
            ]
            assert shown == wanted, (phase, entry)


def _children(node: dict[str, Any]) -> Iterator[list[str]]:
    yield [child["name"] for child in node["children"] if child["kind"] != "container"]
    for child in node["children"]:
        yield from _children(child)


def test_the_default_run_comes_first_then_what_others_add():
    found = trace(of_model(list(RUNS.values()), "deepseek_v3"), "deepseek_v3")
    default, *others = found["sequence"]
    assert default["configurations"] == ["deepseek_v3-fp8-fa3_stand_in"] and default["needs"] == ""
    assert [call["path"] for call in default["calls"]][:1] == ["torch.arange"]
    calls = [call for group in found["sequence"] for call in group["calls"]]
    assert len(calls) == sum(len(kernel["chains"]) for kernel in found["kernels"])
    assert all(group["needs"] for group in others)
    assert all("deepseek_v3-fp8-fa3_stand_in" not in group["configurations"] for group in others)
    needs = {group["needs"]: group for group in others}
    decode = next(one for text, one in needs.items() if text == "attention_backend=flashmla")
    assert "flash_mla_with_kvcache" in {call["name"] for call in decode["calls"]}


def test_what_runs_outside_of_the_layers_has_a_group():
    found = trace([PLAIN], "llama")
    groups = {(op["group"], op["name"]): {one["name"] for one in op["kernels"]} for op in found["non_model_ops"]}
    assert "top_k_top_p_sampling_from_probs" in groups["sampling", "sampler"]
    assert "create_flashinfer_kv_indices_triton" in groups["attention metadata", "init_forward_metadata"]
    assert "write_req_to_token_pool_triton" in groups["KV-cache I/O", "alloc_for_extend"]
    inside = {kernel["name"] for op in found["ops"] for kernel in op["kernels"]}
    assert "top_k_top_p_sampling_from_probs" not in inside and "silu_and_mul" in inside


@pytest.mark.parametrize("name", sorted(RUNS))
def test_each_kernel_has_a_category_and_can_be_looked_up(name: str):
    for call in traced(RUNS[name]):
        assert call.kernel.category != "other", call.kernel
        entry = {"name": call.kernel.name, "source": call.kernel.source, "path": call.kernel.path}
        assert keys_of(entry)[0].startswith(f"{call.kernel.source}:")
        assert call.group or in_model(call.frames[call.position].file)


def toy(*calls: tuple[str, tuple[Frame, ...], int | None], **about: Any) -> Recording:
    """A run of a made-up model: kernel, chain and layer of each call."""
    found = tuple(
        RecordedCall("prefill", "sgl_kernel", path, frames, "", 1, (), (RecordedLaunch("k", layer, 1, 1.0),))
        for path, frames, layer in calls
    )
    return Recording({**PLAIN.document, "stand_ins": [], **about}, found)


def test_a_call_that_a_later_layer_is_the_first_to_make_has_its_place_by_line():
    def at(line: int, called: str) -> tuple[Frame, ...]:
        return (
            Frame(LAYER, line, "Part.forward", "kernel"),
            Frame(MODEL, line, "Layer.forward", called),
            Frame(MODEL, 90, "Model.forward", "layer"),
        )

    run = toy(
        ("sgl_kernel.a", at(10, "first"), 0), ("sgl_kernel.c", at(30, "last"), 0), ("sgl_kernel.b", at(20, "mid"), 1)
    )
    assert list(names(trace([run], "toy")["graph"])) == ["first", "mid", "last"]


def test_a_kernel_that_the_model_calls_itself_is_listed():
    run = toy(("sgl_kernel.dsv3_router_gemm", (Frame(MODEL, 7, "Gate.forward", "dsv3_router_gemm"),), None))
    (direct,) = trace([run], "toy")["direct_kernels"]
    assert direct["name"] == "dsv3_router_gemm"
    assert direct["call_sites"] == [{"file": MODEL, "line": 7, "function": "Gate.forward"}]


def test_a_dry_run_launches_nothing_and_is_shown_all_the_same():
    frames = (Frame(MODEL, 7, "Gate.forward", "rmsnorm"),)
    call = RecordedCall("prefill", "sgl_kernel", "sgl_kernel.rmsnorm", frames, "", 1, (), ())
    dry = Recording(PLAIN.document, (call, dataclasses.replace(call, kernel="flashinfer.prefill.W.plan")))
    assert [one.kernel.name for one in traced(dry)] == ["rmsnorm"]
    launched = dataclasses.replace(call, launches=(RecordedLaunch("k", 0, 1, 1.0),), kernel="sgl_kernel.other")
    assert [one.kernel.name for one in traced(Recording(PLAIN.document, (call, launched)))] == ["other"]


def test_the_report_has_every_form():
    found = trace(of_model(list(RUNS.values()), "qwen3_8b"), "qwen3_8b")
    text = render(found, lambda kernel: ["d_1", "d_2", "d_3", "d_4"] if kernel["name"] == "rmsnorm" else [])
    sections = re.findall(r"^## (.*)$", text, re.M)
    assert sections == [
        *("Runs", "Kernels by library", "Kernels", "Execution graph", "Kernels that the model's code calls directly"),
        *("Ops", "Outside the model's forward", "Calls in execution order"),
    ]
    assert "`d_1`, `d_2`, `d_3`, 1 more" in text
    assert "https://github.com/sgl-project/sglang/blob/v0.5.11/python/sglang/srt/models/qwen3.py#L" in text
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == anchors
    assert text == render(found, lambda kernel: ["d_1", "d_2", "d_3", "d_4"] if kernel["name"] == "rmsnorm" else [])


def test_a_backtrace_is_not_repeated():
    frames = [
        dict(zip(("file", "line", "function", "called"), (MODEL, n, f"f{n}", f"g{n}"), strict=True)) for n in range(3)
    ]
    call = {"name": "k", "source": "jit", "op": "o", "phases": ["decode"], "frames": frames}
    lines = list(backtraces([call, {**call, "frames": [{**frames[0], "line": 9}, *frames[1:]]}], 4))
    assert lines[0] == "   5 k (jit)  op o; decode" and lines[3] == f"       {MODEL}:2 f2 -> g2"
    assert lines[-1] == f"       ... as in 5 from {MODEL}:1 on" and len(lines) == 7


def test_the_json_writes_each_frame_once():
    found = trace(of_model(list(RUNS.values()), "deepseek_v3"), "deepseek_v3")
    text = dumps(found)
    read_again = json.loads(text)
    assert len(text) < 1_000_000 and len(read_again["frames"]) == len({tuple(one) for one in read_again["frames"]})
    chain = read_again["kernels"][0]["chains"][0]
    shown = [
        dict(zip(("file", "line", "function", "called"), read_again["frames"][n], strict=True)) for n in chain["frames"]
    ]
    assert shown == found["kernels"][0]["chains"][0]["frames"]


def test_models_are_found_by_name_by_beginning_and_by_type():
    runs = list(RUNS.values())
    assert {run.document["model"] for run in of_model(runs, "DeepSeek-V3")} == {"deepseek_v3"}
    assert {run.document["model"] for run in of_model(runs, "llama")} == {"llama_3.1_8b"}
    assert {run.document["model"] for run in of_model(runs, "qwen2_moe")} == {"qwen2_57b_a14b"}
    assert len(of_model(runs, "all")) == len(runs) and of_model(runs, "gpt9") == []


def test_runs_of_two_releases_are_not_mixed():
    newer = Recording({**PLAIN.document, "versions": {**PLAIN.document["versions"], "sglang": "0.5.23"}}, PLAIN.calls)
    assert of_release([PLAIN, newer], None) == [newer] and of_release([PLAIN, newer], "0.5.11") == [PLAIN]
    with pytest.raises(RecordingError, match=r"no record is of SGLang 0\.4; there are records of 0\.5\.23, 0\.5\.11"):
        of_release([PLAIN, newer], "0.4")


def test_the_command_prints_one_kernel_or_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model", "llama", *RELEASE, "--kernel", "silu_and_mul"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# default: llama_3.1_8b-bf16-fa3_stand_in") and "activation.py" in out
    assert "rmsnorm" not in out and "runs of SGLang 0.5.11" in err
    assert (
        main(["--model", "llama", *RELEASE, "--out", str(tmp_path / "l.md"), "--json", str(tmp_path / "l.json")]) == 0
    )
    assert (tmp_path / "l.md").read_text().startswith("# llama: kernels") and capsys.readouterr().out == ""
    assert json.loads((tmp_path / "l.json").read_text())["model"] == "llama"


def test_the_command_names_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert main(["--record", str(bad)]) == 2
    assert "bad.json: KeyError('sha256')" in capsys.readouterr().err
    assert main(["--model", "llama", *RELEASE, "--kernel", "silu_and_mull"]) == 2
    assert "did you mean silu_and_mul?" in capsys.readouterr().err
    assert main(["--model", "llama", "--release", "0.1"]) == 2
    assert "no record is of SGLang 0.1; there are records of " in capsys.readouterr().err
    monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)
    assert main(["--model", "gpt9"]) == 2
    assert "gpt9: no record of it" in capsys.readouterr().err


def test_a_record_can_be_given_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    about = {key: value for key, value in PLAIN.document.items() if key not in TABLES}
    write(tmp_path / "one.json", {**about, "model": "mine"}, PLAIN.calls[:60])
    assert read(tmp_path / "one.json").calls == PLAIN.calls[:60]
    assert main(["--record", str(tmp_path / "one.json")]) == 0
    assert capsys.readouterr().out.startswith(f"# default: {PLAIN.name}")
    assert settings_of(PLAIN)["quantization"] == "none"


TABLES = ("$schema", "sha256", "files", "frames", "stacks", "kernels", "arguments", "cuda_kernels", "calls")
