"""Conditions of tests around and before a call, and conditions as text."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest
from conditional_models import MODEL, MODES, conditions, trace_model
from synthetic import trace_files

from tools.kernel_tracing.configuration.condition_text import (
    Part,
    contradictions,
    join,
    member,
    setting,
    split_condition,
    summarise,
)
from tools.kernel_tracing.rules import gpu_generations, registries

TESTS = {
    "enumeration": ("x.mode == ForwardMode.DECODE", "ForwardMode.DECODE", "not ForwardMode.DECODE"),
    "members": (
        "mode in (ForwardMode.DECODE, ForwardMode.MIXED)",
        "ForwardMode.DECODE or MIXED",
        "not (ForwardMode.DECODE or MIXED)",
    ),
    "either": (
        "mode == ForwardMode.DECODE or mode == ForwardMode.MIXED",
        "ForwardMode.DECODE or MIXED",
        "not (ForwardMode.DECODE or MIXED)",
    ),
    "predicate": ("batch.forward_mode.is_decode()", "ForwardMode.DECODE", "not ForwardMode.DECODE"),
    "predicate of many": ("batch.forward_mode.is_extend()", "ForwardMode.is_extend()", "not ForwardMode.is_extend()"),
    "flag": (
        "batch.forward_mode.is_draft_extend(include_v2=True)",
        "speculative decoding and ForwardMode.DRAFT_EXTEND or DRAFT_EXTEND_V2",
        "not (ForwardMode.DRAFT_EXTEND or DRAFT_EXTEND_V2)",
    ),
    "setting": ("get_runner().is_triton()", "runner=triton", "not runner=triton"),
    "other platforms": ("get_runner().is_triton() or get_runner().is_ascend()", "runner=triton", "not runner=triton"),
    "one line": ("uses_triton(get_runner())", "runner=triton", "not runner=triton"),
    "field": ("self.fast", "runner=deep_gemm", "not runner=deep_gemm"),
    "field set twice": ("self.twice", "self.twice", "not self.twice"),
    "local": ("decoding", "ForwardMode.DECODE", "not ForwardMode.DECODE"),
    "string": (
        "get_server_args().sampling_backend == 'flashinfer'",
        "sampling_backend=flashinfer",
        "not sampling_backend=flashinfer",
    ),
    "list": (
        "self.current_attention_backend in BACKENDS",
        "attention_backend=fa3 or triton",
        "not (attention_backend=fa3 or triton)",
    ),
    "quantisation": (
        "self.quant_config is None or self.quant_config.get_name() == 'fp8'",
        "quantization=none or fp8",
        "not (quantization=none or fp8)",
    ),
    "on or off": ("config.server_args.enable_sparse", "enable_sparse=true", "enable_sparse=false"),
    "no flag": ("config.enable_sparse", "config.enable_sparse", "not config.enable_sparse"),
    "no setting": ("x.name == 'a'", "x.name == 'a'", "x.name != 'a'"),
    "generation": ("_is_sm90", "GPU: sm90", "not GPU: sm90"),
    "generation asked": ("is_sm90_supported()", "GPU: sm90", "not GPU: sm90"),
    "capability": ("get_device_sm() >= 100", "GPU: sm100 or newer", "GPU: older than sm100"),
    "no capability": ("x.size >= 100", "x.size >= 100", "x.size < 100"),
    "plumbing": ("x.shape[0] > 0", "x.shape[0] > 0", "x.shape[0] <= 0"),
    "several": ("x.a and x.b", "x.a and x.b", "not (x.a and x.b)"),
    "none of": ("x.a or x.b", "(x.a or x.b)", "not x.a and not x.b"),
}


@pytest.mark.parametrize("name", TESTS)
def test_tests_read_in_the_fields_terms(tmp_path, name):
    test, expected, negated = TESTS[name]
    body = f"""
        def __init__(self, config):
            self.fast = get_runner().is_deep_gemm()
            self.twice = get_runner().is_deep_gemm()
            self.quant_config = config.quant
            if config.slow:
                self.twice = False
        def forward(self, x, batch: Batch, config):
            mode = batch.forward_mode
            decoding = mode.is_decode()
            if {test}:
                return good(x)
            else:
                return other(x)
    """
    names = "BACKENDS, Batch, ForwardMode, get_device_sm, get_runner, get_server_args, is_sm90_supported, _is_sm90"
    imports = f"from sglang.srt.modes import {names}, uses_triton"
    document = trace_model(tmp_path, body, imports, modes=MODES)
    assert conditions(document, "good") == {expected}
    assert conditions(document, "other") == {negated}


ATTENTION = """
from sgl_kernel import good, other
class Attention:
    def forward(self, batch):
        if batch.mode.is_extend() and batch.captured:
            return self.captured(batch)
        return self.plain(batch)
    def captured(self, batch):
        return self.run(batch)
    def plain(self, batch):
        return self.wrapped(batch)
    def wrapped(self, batch):
        return self.run(batch)
    def run(self, batch):
        if batch.mode.is_decode():
            return good(batch)
        return other(batch)
"""


def test_a_chain_asks_for_one_member_of_what_has_one_name(tmp_path):
    body = """
    def __init__(self):
        self.attention = Attention()
    def forward(self, batch: Batch):
        return self.attention.forward(batch)
    """
    imports = "from sglang.srt.modes import Batch\nfrom sglang.srt.layers.attention import Attention"
    batch = "\nclass Batch:\n    mode: ForwardMode\n    captured: bool\n"
    attention = ATTENTION.replace("class Att", "from sglang.srt.modes import Batch\nclass Att").replace(
        "(self, batch", "(self, batch: Batch"
    )
    files = {
        "models/tiny.py": MODEL.format(imports=imports, body=indent(dedent(body), "    ")),
        "layers/attention.py": attention,
        "modes.py": MODES + batch,
    }
    found = {
        kernel["name"]: {tuple(frame["function"].rpartition(".")[2] for frame in chain) for chain in kernel["chains"]}
        for kernel in trace_files(tmp_path, files)["kernels"]
    }
    plain, captured = ("run", "wrapped", "plain", "forward", "forward"), ("run", "captured", "forward", "forward")
    assert found["good"] == {plain}
    assert found["other"] == {plain, captured}


EARLY = {
    "return": ("if x.a:\n    return x\nreturn good(x)", "not x.a"),
    "otherwise": ("if x.a:\n    x = x + 1\nelse:\n    return x\nreturn good(x)", "x.a"),
    "chain": ("if x.a:\n    return x\nelif x.b:\n    return x + 1\nreturn good(x)", "not x.a and not x.b"),
    "continue": ("for y in x:\n    if y.a:\n        continue\n    good(y)", "not y.a"),
    "after the loop": ("for y in x:\n    if y.a:\n        continue\nreturn good(x)", ""),
    "no return": ("if x.a:\n    x = x + 1\nreturn good(x)", ""),
    "checks": ("if x.a:\n    raise ValueError\nreturn good(x)", ""),
    "checks of a choice": ("if get_runner().is_triton():\n    raise ValueError\nreturn good(x)", "not runner=triton"),
    "inner return": ("if x.a:\n    if x.b:\n        return x\nreturn good(x)", ""),
    "implied": (
        "if get_runner().is_triton():\n    return x\nif get_runner().is_deep_gemm():\n    return good(x)",
        "runner=deep_gemm",
    ),
    "with": ("with x:\n    if x.a:\n        return x\nreturn good(x)", "not x.a"),
    "enclosing first": ("if x.a:\n    return x\nif x.b:\n    if x.c:\n        return good(x)", "x.b and x.c"),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_an_early_return_leaves(tmp_path, name):
    code, expected = EARLY[name]
    body = "def forward(self, x):\n" + indent(code, "    ")
    document = trace_model(tmp_path, body, "from sglang.srt.modes import get_runner", modes=MODES)
    assert conditions(document, "good") == {expected}


def test_summaries_name_configuration_first_and_cut_between_parts():
    chain = ["x.ndim == 2 and quantization=fp8", "ForwardMode.DECODE", "MoE layer and attention_backend=a or b", ""]
    assert (
        summarise(chain)
        == "attention_backend=a or b and quantization=fp8 and MoE layer and ForwardMode.DECODE and x.ndim == 2"
    )
    assert summarise(["quantization=fp8", "", "quantization=fp8 and f(a and b)"]) == "quantization=fp8 and f(a and b)"
    assert summarise([]) == summarise(["", ""]) == ""
    assert summarise(["(a or b)", "not (c and d)"]) == "not (c and d) and (a or b)"
    assert summarise(chain, limit=40) == "attention_backend=a or b and ..."
    assert summarise(["a, b"]) == "a and b"
    assert summarise(["quantization=fp8", "quantization=fp8 or awq", "not quantization=gguf"]) == "quantization=fp8"
    assert summarise(["E.A", "not (E.B or C)", "not F.A"]) == "not F.A and E.A"
    assert summarise(["quantization=fp8 and not quantization=fp8"]) == "quantization=fp8 and not quantization=fp8"
    long = [f"part{n:03}=value" for n in range(100)]
    kept = split_condition(summarise(long))
    assert set(kept) < set(long) and len(summarise(long)) <= 310


def test_contradictions_are_of_one_setting_without_a_common_value():
    assert contradictions(["quantization=fp8", "quantization=gguf or awq"]) == [
        ("quantization=fp8", "quantization=gguf or awq")
    ]
    assert contradictions(["runner=a", "not (runner=a or b)"]) == [("runner=a", "not (runner=a or b)")]
    assert contradictions(["quantization=fp8", "quantization=fp8 or awq and not quantization=awq"]) == []
    assert contradictions(["runner=a or b and not runner=a", "x.a and not x.a"]) == []


def test_parts_join_without_what_others_imply():
    chosen, refused = member("E", ["A"], "x"), member("E", ["B"], "x", negated=True)
    assert join([refused, chosen]) == "E.A"
    assert join([refused, member("E", ["C"], "x", negated=True)]) == "not (E.B or C)"
    assert join([member("E", ["B"], "y", negated=True), chosen]) == "not E.B and E.A"  # of another subject
    assert join([Part("x.a"), setting("quantization", ["a", "b"])]) == "quantization=a or b and x.a"
    assert join([Part("x" * 200), Part("y" * 200)]) == "x" * 200 + " and ..."


def test_names_of_generations_and_settings():
    generations = {"_is_sm100_supported": "sm100", "is_hopper_with_cuda_12_3": "hopper", "is_blackwell": "blackwell"}
    assert {name: gpu_generations.generation(name) for name in generations} == generations
    assert not any(map(gpu_generations.generation, ("small", "is_smaller", "use_deep_gemm", "sm_count")))
    assert gpu_generations.compared("device_sm_major", "<", 10, False) == "older than sm100"
    assert gpu_generations.compared("device_capability", "==", 9, True) == "sm90"
    assert not gpu_generations.compared("device_sm", ">=", 3, False)
    settings = ["attention_backend", "moe_runner_backend", "speculative_moe_runner_backend"]
    assert registries.setting_of("runner_backend_name", settings) == "moe_runner_backend"
    assert registries.setting_of("current_attention_backend", settings) == "attention_backend"
    assert not registries.setting_of("backend", settings) and not registries.setting_of("x_y", settings)
    assert registries.enum_dimension("MoeA2ABackend", []) == "moe_a2a_backend"
    assert registries.enum_dimension("DeepEPMode", ["deepep_mode"]) == "deepep_mode"
    assert registries.enum_dimension("SpeculativeAlgorithm", ["speculative_algorithm"]) == "speculative"
