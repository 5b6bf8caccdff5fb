"""Workloads: the same bits as recorded, for every family; and what is refused."""

import hashlib
import json
import math
import re
from pathlib import Path

import jsonschema
import pytest
import torch

import flashinfer_trace
from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.digests import lengths_sha256
from flashinfer_trace.families import all_families, family_of
from flashinfer_trace.format.definition import InputError
from flashinfer_trace.judging.traffic import WorkloadError, digest, digests, drawn
from flashinfer_trace.judging.traffic.plans import unfit
from flashinfer_trace.judging.traffic.profiles import Profile, Traffic, TrafficError, load_traffic, quantile
from tools import record_workloads, traffic_statistics

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in (ROOT / "workloads").glob("*/*.json"))
#: Bytes of the workloads that these tests make: milliseconds each.
SMALL = 1 << 20


def elements(workload):
    return sum(math.prod(shape or ()) for shape in workload.definition.input_shapes(workload.axes).values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_workload_comes_again(path):
    found = flashinfer_trace.workloads(path.stem)
    assert [workload.name for workload in found] == list(json.loads(path.read_text(encoding="utf-8"))["workloads"])
    assert any(workload.quick for workload in found)
    smallest = min(found, key=elements)
    if elements(smallest) <= SMALL:  # tests/bench makes all of them again on a GPU
        assert digests(smallest.inputs()) == smallest.digests


def test_the_files_are_valid_and_small():
    for path in [*FILES, ROOT / "workloads" / "traffic.json"]:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema = (path.parent / data["$schema"]).read_text(encoding="utf-8")
        jsonschema.Draft202012Validator(json.loads(schema)).validate(data)
        if path in FILES:
            assert path.parent.name == store.load(path.stem).op_type
    assert sum(path.stat().st_size for path in (ROOT / "workloads").rglob("*.json")) < 3 << 20


def test_one_definition_of_each_family_is_recorded():
    recorded = sorted(family_of(store.load(path.stem)).name for path in FILES)
    assert recorded == sorted(family.name for family in all_families())
    assert sorted(one.name for one in record_workloads.chosen()) == sorted(path.stem for path in FILES)


@pytest.fixture
def root(tmp_path):
    """A dataset with rmsnorm_h3072 and its workloads."""
    for name in ("definitions/rmsnorm/rmsnorm_h3072.json", "workloads/traffic.json", "schema", "reference", "models"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / name)
    (tmp_path / "workloads" / "rmsnorm").mkdir(parents=True)
    return tmp_path


def changed(root, change):
    """The workloads of rmsnorm_h3072 after a change of their file."""
    data = json.loads((ROOT / "workloads/rmsnorm/rmsnorm_h3072.json").read_text(encoding="utf-8"))
    change(data)
    (root / "workloads/rmsnorm/rmsnorm_h3072.json").write_text(json.dumps(data), encoding="utf-8")
    return {one.name: one for one in flashinfer_trace.workloads(store.load("rmsnorm_h3072", root))}


def test_a_changed_digest_is_refused(root):
    workload = changed(root, lambda data: data["workloads"]["decode-1"]["inputs"].update(weight="0" * 64))["decode-1"]
    with pytest.raises(
        WorkloadError, match=r"rmsnorm_h3072\.json: workload decode-1: .*weight has the digest .*000"
    ) as e:
        workload.inputs()
    assert "python -m tools.record_workloads rmsnorm_h3072" in str(e.value)


def test_another_seed_and_other_axes_are_refused(root):
    with pytest.raises(WorkloadError, match="others than those that were recorded"):
        changed(root, lambda data: data["workloads"]["decode-1"].update(seed=1))["decode-1"].inputs()
    with pytest.raises(WorkloadError, match=r"its axes are \{'batch_size': 1\}, and the file says \{'batch_size': 2\}"):
        changed(root, lambda data: data["workloads"]["decode-1"].update(axes={"batch_size": 2}))["decode-1"].inputs()


def test_files_that_cannot_be_workloads_are_refused(root):
    with pytest.raises(WorkloadError, match="it is for rmsnorm_h1"):
        changed(root, lambda data: data.update(definition="rmsnorm_h1"))
    with pytest.raises(WorkloadError, match=r"workloads\.decode-3: .*which has decode-1"):
        changed(root, lambda data: data["workloads"].update({"decode-3": data["workloads"]["decode-1"]}))
    with pytest.raises(
        WorkloadError, match=r"json: .*workloads has 0 members, .*tools\.record_workloads rmsnorm_h3072"
    ):
        changed(root, lambda data: data.update(workloads={}))
    (root / "workloads" / "traffic.json").unlink()
    (root / "workloads" / "traffic.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TrafficError, match=r"traffic\.json: .*the file lacks the field 'profiles'"):
        load_traffic(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": []}, "axes is array, must be object"),
        ({"axes": {"batch_size": [1]}}, "batch_size is array, must be integer"),
        ({"axes": {"batch_size": -2}}, "batch_size is -2, violates minimum 0"),
        ({"axes": {"rows": 1}}, "axes are not batch_size"),
        ({"seed": "1"}, "seed is string, must be integer"),
        ({"seed": 1 << 31}, "seed is 2147483648, violates maximum"),
        ({"inputs": {"hidden_states": "0" * 64, "weight": 5}}, "weight is integer, must be string"),
        ({"inputs": {"hidden_states": "0" * 64, "weight": "xyz"}}, 'weight is "xyz", must match'),
        ({"inputs": {"weight": "0" * 64}}, "inputs are not hidden_states, weight"),
        ({"lengths": []}, 'decode-1 has no field "lengths" (the fields are seed, axes, inputs)'),
    ],
    ids=str,
)
def test_malformed_workloads_are_refused(root, change, message):
    with pytest.raises(WorkloadError, match=r"schema/workloads\.schema\.json") as error:
        changed(root, lambda data: data["workloads"]["decode-1"].update(change))
    assert re.search(r"rmsnorm_h3072\.json: .?workloads.decode-1\S*: " + re.escape(message), str(error.value))


@pytest.mark.parametrize("entry", [None, {}])
def test_a_workload_says_what_it_lacks(root, entry):
    with pytest.raises(WorkloadError, match=r"decode-1 (is null, must be object|lacks the field 'seed')"):
        changed(root, lambda data: data["workloads"].update({"decode-1": entry}))


def test_a_cost_is_at_the_axes_of_the_inputs(root):
    def other_axes(data):
        data["workloads"]["decode-1"].update(axes={"batch_size": 2})

    with pytest.raises(WorkloadError, match=r"its axes are .*, and the file says"):
        changed(root, other_axes)["decode-1"].cost()


@pytest.mark.parametrize(
    ("section", "place", "change"),
    [
        ("profiles", "chat", {"prompts": [0, 0]}),  # requests without a token never fill a chunk
        ("profiles", "chat", {"running": [1, {}]}),
        ("profiles", "chat", {"running": [1]}),
        ("profiles", "chat", {"running": []}),
        ("profiles", "chat", {"prefix": 1 << 50}),
        ("profiles", "chat", {"chunked": 1}),
        ("profiles", "chat", {"source": 1}),
        ("profiles", "chat", {"x" * 9000: 1}),
        ("tokens", 0, {"count": "8"}),
        ("tokens", 0, {"count": 1 << 40}),
        ("tokens", 0, {"phase": "both"}),
        ("tokens", 0, {"quick": 1}),
        ("tokens", 0, {"name": ["decode-1"]}),
        ("requests", 0, {"profile": ["chat"]}),
        ("tokens", 0, {"profile": "voice"}),
        ("requests", 0, {"count": 1 << 16}),  # with the longest requests: more than any cache holds
    ],
    ids=str,
)
def test_malformed_traffic_is_refused_whatever_its_digests(tmp_path, section, place, change):
    data = json.loads((ROOT / "workloads" / "traffic.json").read_text(encoding="utf-8"))
    data[section][place].update(change)
    for profile in data["profiles"].values():
        profile["lengths_sha256"] = lengths_sha256(profile)
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "traffic.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(TrafficError, match=r"schema/traffic\.schema\.json describes it") as error:
        load_traffic(tmp_path)
    assert len(str(error.value)) < 1000


def test_requests_have_a_profile(tmp_path):
    data = json.loads((ROOT / "workloads" / "traffic.json").read_text(encoding="utf-8"))
    del data["requests"][0]["profile"]
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "traffic.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(TrafficError, match="it has no profile"):
        load_traffic(tmp_path)


@pytest.mark.parametrize(
    ("name", "label", "axes", "reason"),
    [
        ("moe_topk_deepseek_topk8_ng8_kg4_e256", "flashinfer.fused_moe.fused_topk_deepseek", {}, "an error of 2.4e-04"),
        (
            "moe_topk_softmax_topk8_e64",
            "sglang.srt.layers.moe.topk.grouped_topk_gpu[eager, one group]",
            {},
            "probabilities in bfloat16",
        ),
        (
            "moe_post_reorder_topk9_h7168",
            "sglang.srt.layers.moe.ep_moe.kernels.post_reorder_triton_kernel",
            {},
            "loses what expert 0 computed",
        ),
        (
            "moe_align_block_size_topk8_e256_b64",
            "",
            {"max_padded": 16703},
            "a multiple of 4, and that of a workload is",
        ),
        ("moe_align_block_size_topk8_e256_b64", "", {"max_padded": 4096}, None),
        ("rope_with_cos_sin_cache_neox_style_d128_rd64", "torch.ops.sgl_kernel.rotary_embedding", {}, "as bfloat16"),
        ("rmsnorm_h512", "flashinfer.norm.rmsnorm", {"batch_size": 0}, "takes batch_size from 1 to"),
        ("rmsnorm_h512", "flashinfer.norm.rmsnorm", {"batch_size": 64}, None),
    ],
)
def test_a_kernel_does_not_take_every_workload(name, label, axes, reason):
    definition = store.load(name)
    kernels = {one.label: one for one in family_of(definition).kernels_of(definition)}
    found = unfit(kernels.get(label) or next(iter(kernels.values())), axes)
    assert found is None if reason is None else reason in found


def test_variants_have_other_elements_and_the_same_axes():
    workload = next(one for one in flashinfer_trace.workloads("rmsnorm_h3072") if one.name == "decode-8")
    first, second = workload.inputs(), workload.inputs(variant=1)
    assert first["hidden_states"].shape == second["hidden_states"].shape
    assert not torch.equal(first["hidden_states"], second["hidden_states"])


@pytest.mark.parametrize("variant", [-1, 2**31, True, 1.0])
def test_a_variant_that_would_be_cut_off_is_refused(variant):
    workload = flashinfer_trace.workloads("rmsnorm_h3072")[0]
    with pytest.raises(InputError, match=f"rmsnorm_h3072: workload {workload.name}: variant .* from 0 to 2147483647"):
        workload.inputs(variant=variant)


def test_the_last_variant_is_another_one():
    workload = next(one for one in flashinfer_trace.workloads("rmsnorm_h3072") if one.name == "decode-8")
    variants = [workload.inputs(variant=number)["hidden_states"] for number in (0, 1, 2**30, 2**31 - 1)]
    assert len({digest(one) for one in variants}) == 4


def test_attention_has_requests_of_drawn_lengths_in_shuffled_pages():
    decode = {one.name: one for one in flashinfer_trace.workloads("gqa_paged_decode_h8_kv1_d128_ps64")}
    chat = decode["chat-decode-16"]
    inputs = chat.inputs()
    assert chat.axes["batch_size"] == 16 and len(set(chat.plan["kv_lens"])) > 8
    pages = inputs["kv_indices"].tolist()
    assert len(set(pages)) == len(pages) and pages != sorted(pages)
    agentic = decode["agentic-decode-32"].plan
    assert agentic["shared_prefix"] == 6144 // 64 and min(agentic["kv_lens"]) > 6144
    assert decode["long-decode-16"].axes["num_kv_indices"] > chat.axes["num_kv_indices"]
    prefill = {one.name: one for one in flashinfer_trace.workloads("gqa_paged_prefill_causal_h8_kv1_d128_ps64")}
    assert sum(prefill["chat-prefill-2048"].plan["q_lens"]) == prefill["chat-prefill-2048"].axes["total_q"] == 2048
    assert prefill["recorded-prefill"].plan["q_lens"] == [700, 512, 300, 256, 129, 64, 17, 1]


def test_sizes_without_elements_are_those_of_the_inputs():
    """`Workload.axes` is found without making features; `inputs` compares it with what they have."""
    for name in ("moe_align_block_size_topk8_e256_b64", "fast_topk_v2_topk2048", "cutlass_scaled_fp4_mm_n4608_k7168"):
        small = [one for one in drawn(store.load(name)) if elements(one) <= 32 * SMALL]
        assert small
        for workload in small[:1]:
            workload.inputs()


def test_recorded_lengths_are_those_of_the_recorded_runs():
    (lengths,) = {tuple(one.profile.lengths) for one in load_traffic(ROOT)["tokens"] if one.profile}
    prompts = [
        tuple(json.loads(path.read_text(encoding="utf-8"))["prompts"])
        for path in (ROOT / "traces/runtime").glob("*.json")
    ]
    assert prompts.count(lengths) > len(prompts) / 2


def test_quantiles_count_each_token_of_a_running_request():
    pairs = [(10, 2), (20, 100), (5, 0)]
    running = sorted([11, 12, *range(21, 121)])
    expected = [running[max(0, math.ceil(place * len(running) / 64) - 1)] for place in range(65)]
    found = traffic_statistics.profile(pairs)
    assert found["running"] == expected
    assert found["prompts"][0] == 5 and found["prompts"][-1] == 20
    assert found["positions"][-1] == 19


def test_the_statistics_of_a_trace_are_compared_with_those_that_are_recorded(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,2\n1,20,100\n")
    monkeypatch.setattr(traffic_statistics, "find_root", lambda: tmp_path)
    (tmp_path / "workloads").mkdir()

    def run(profile):
        (tmp_path / "workloads" / "traffic.json").write_text(json.dumps({"profiles": {"one": profile}}))
        return traffic_statistics.main([str(trace)]), capsys.readouterr()

    status, printed = run({"source": "here", "trace_sha256": "0" * 64})
    assert status == 2 and "no profile has the trace_sha256" in printed.err
    profile = {"source": "here", "trace_sha256": hashlib.sha256(trace.read_bytes()).hexdigest()}
    status, printed = run(profile)
    found = json.loads(printed.out)
    assert status == 1 and (found["prompts"][0], found["prompts"][-1]) == (10, 20)
    assert run(found)[0] == 0
    found["running"][7] += 1
    assert run(found)[0] == 1
    for unusable in ("one", 5):
        assert run(unusable)[0] == 2
    trace.write_text("TIMESTAMP,GeneratedTokens\n0,10\n")
    status, printed = run(profile)
    assert status == 2 and "is not a readable trace" in printed.err
    trace.unlink()
    assert run(profile)[0] == 2


def test_recorded_lengths_are_the_prompts_of_recorded_runs():
    lengths = json.loads((ROOT / "workloads" / "traffic.json").read_text())["profiles"]["recorded"]["lengths"]
    runs = [json.loads(path.read_text()) for path in (ROOT / "traces" / "runtime").glob("*.json")]
    assert runs and lengths in [run["prompts"] for run in runs]


def test_quantiles_are_linear_in_between():
    assert [quantile([0, 10, 30], bits) for bits in (0, 1 << 30, 1 << 31, 3 << 30, (1 << 32) - 1)] == [0, 5, 10, 20, 29]


def test_a_chunk_of_prefill_is_full():
    short = Profile("", prompts=[100, 100], positions=[0, 100])
    assert short.prefill(250, lambda: 0).new == (100, 100, 50)
    long = Profile("", prompts=[9, 9], positions=[0, 40_000], chunked=True)
    batch = Traffic("long", "prefill", 8192, long, False).batch(lambda: 3 << 30)
    assert (batch.cached, batch.new, batch.lengths) == ((24_576,), (8192,), [32_768])


def test_digests_tell_dtype_shape_and_numbers_apart():
    zeros = torch.zeros(4, 2)
    values = [zeros, zeros.view(2, 4), zeros.view(torch.int32), zeros.half(), 0, 0.0, 1.0]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(zeros.T) == digest(torch.zeros(2, 4))
