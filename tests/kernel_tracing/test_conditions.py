"""Conditions: each kind on a small package, with what must not be said, too."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest
from synthetic import trace_files

from tools.kernel_tracing.condition_text import Part, contradictions, join, member, setting, split_condition, summarise
from tools.kernel_tracing.rules import gpu_generations, registries

KERNELS = "from sgl_kernel import good, other, wrong\n"
MODEL = """
from torch import nn
from sgl_kernel import good, other, wrong
{imports}
class Tiny(nn.Module):
{body}
EntryClass = Tiny
"""
MODES = """
from enum import Enum, IntEnum, auto
class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    DRAFT_EXTEND_V2 = auto()
    def is_decode(self):
        return self == ForwardMode.DECODE
    def is_extend(self, include_v2=False):
        return (
            self == ForwardMode.EXTEND
            or self in (ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND)
            or (include_v2 and self == ForwardMode.DRAFT_EXTEND_V2)
            or self.is_target_verify()
        )
    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY
    def is_draft_extend(self, include_v2=False):
        return self == ForwardMode.DRAFT_EXTEND or (include_v2 and self == ForwardMode.DRAFT_EXTEND_V2)
class Runner(Enum):
    AUTO = "auto"
    DEEP_GEMM = "deep_gemm"
    TRITON = "triton"
    def is_deep_gemm(self):
        return self == Runner.DEEP_GEMM
    def is_triton(self):
        return self == Runner.TRITON
    def is_ascend(self):
        return self == Runner.AUTO
class Algorithm(Enum):
    NONE = auto()
    EAGLE = auto()
    @classmethod
    def from_string(cls, name) -> "Algorithm":
        return cls[name]
class ServerArgs:
    sampling_backend: str = "auto"
    attention_backend: str = "auto"
    runner: str = "auto"
    quantization: str = ""
    enable_sparse: bool = False
class Batch:
    forward_mode: ForwardMode = None
def get_runner() -> Runner:
    return Runner.AUTO
def get_server_args() -> ServerArgs:
    return ServerArgs()
def uses_triton(runner: Runner):
    return runner.is_triton()
def is_sm90_supported():
    return torch.cuda.get_device_capability()[0] == 9
BACKENDS = ["fa3", "triton", "ascend"]
_is_sm90 = is_sm90_supported()
"""


def conditions(document: dict, kernel: str, function: str = "") -> set[str]:
    """Conditions of the frames of a kernel's chains (in one function)."""
    found = {
        frame["condition"]
        for one in document["kernels"]
        if one["name"] == kernel
        for chain in one["chains"]
        for frame in chain
        if not function or frame["function"] == function
    }
    assert found, (kernel, function, [one["name"] for one in document["kernels"]])
    return found


def model(body: str, imports: str = "") -> str:
    return MODEL.format(imports=imports, body=indent(dedent(body), "    "))


def trace_model(root: Path, body: str, imports: str = "", **files: str) -> dict:
    """Trace a model of this class body; keywords are more modules."""
    others = {f"{name}.py": text for name, text in files.items()}
    return trace_files(root, {"models/tiny.py": model(body, imports), **others})


SPECULATIVE = {
    "models/tiny.py": model("def forward(self, x):\n    return wrong(x)"),
    "speculative/spec_info.py": """
        from enum import Enum, auto
        class SpeculativeAlgorithm(Enum):
            EAGLE = auto()
            EAGLE3 = auto()
            NGRAM = auto()
            NONE = auto()
            @classmethod
            def from_string(cls, name):
                return cls[name]
            def is_eagle(self):
                return self == SpeculativeAlgorithm.EAGLE or self == SpeculativeAlgorithm.EAGLE3
            def is_ngram(self):
                return self == SpeculativeAlgorithm.NGRAM
            def create_worker(self, server_args):
                assert not self == SpeculativeAlgorithm.NONE
                if self.is_eagle():
                    from sglang.srt.speculative.eagle_worker import EAGLEWorker
                    return EAGLEWorker
                elif self.is_ngram():
                    from sglang.srt.speculative.ngram_worker import NGRAMWorker
                    return NGRAMWorker
                raise ValueError
    """,
    "managers/tp_worker.py": """
        class TpModelWorker:
            def forward_batch_generation(self, batch):
                return batch
    """,
    "speculative/eagle_worker.py": """
        from sgl_kernel import good
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        class Verify:
            def __init__(self, x):
                self.x = x
            def verify(self):
                return good(self.x)
        class EAGLEWorker:
            def __init__(self):
                self.algorithm = SpeculativeAlgorithm.EAGLE
                self.target = TpModelWorker()
            def forward_batch_generation(self, batch):
                return Verify(batch).verify()
    """,
    "speculative/ngram_worker.py": """
        from sgl_kernel import other
        class NGRAMWorker:
            def forward_batch_generation(self, batch):
                return other(batch)
    """,
}


def test_the_class_of_a_worker_says_the_algorithm(tmp_path):
    document = trace_files(tmp_path, SPECULATIVE)
    root = "EAGLEWorker.forward_batch_generation"
    assert conditions(document, "good", root) == {"speculative=EAGLE or EAGLE3"}
    assert conditions(document, "good", "Verify.verify") == {""}  # said once, at the root
    assert conditions(document, "other") == {"speculative=NGRAM"}
    assert conditions(document, "wrong") == {""}


@pytest.mark.parametrize(("scheduler", "expected"), [("", {"speculative=EAGLE or EAGLE3"}), ("TpModelWorker()", {""})])
def test_a_class_that_the_runtime_also_makes_unseen_is_not_chosen_by_its_seen_maker(tmp_path, scheduler, expected):
    files = dict(SPECULATIVE)
    files["managers/tp_worker.py"] = """
        from sgl_kernel import good
        class TpModelWorker:
            def __init__(self):
                self.x = 1
            def forward_batch_generation(self, batch):
                return good(batch)
    """
    files["speculative/eagle_worker.py"] = """
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        class EAGLEWorker:
            def __init__(self):
                self.algorithm = SpeculativeAlgorithm.EAGLE
                self.target = TpModelWorker()
            def forward_batch_generation(self, batch):
                return batch
    """
    files["managers/scheduler.py"] = f"def run():\n    return {scheduler or None}\n"
    assert conditions(trace_files(tmp_path, files), "good") == expected


def test_modes_and_draft_models_of_speculative_decoding_only(tmp_path):
    body = """
        def forward(self, x, batch: Batch):
            mode = batch.forward_mode
            if mode.is_target_verify():
                return good(x)
            if mode.is_decode():
                return other(x)
    """
    document = trace_model(tmp_path, body, "from sglang.srt.modes import Batch", modes=MODES)
    assert conditions(document, "good") == {"speculative decoding and ForwardMode.TARGET_VERIFY"}
    assert conditions(document, "other") == {"ForwardMode.DECODE"}
    draft = trace_files(
        tmp_path / "draft", {"models/tiny_nextn.py": model("def forward(self, x):\n    return good(x)")}
    )
    assert conditions(draft, "good") == {"speculative decoding"}


REGISTRY = """
from sgl_kernel import good, other, wrong
ATTENTION_BACKENDS = {}
def register_attention_backend(name):
    def decorator(function):
        ATTENTION_BACKENDS[name] = function
        return function
    return decorator
class Base:
    def forward(self, x):
        return self.decode(x)
class Fast(Base):
    def decode(self, x):
        return good(x)
class Slow(Base):
    def decode(self, x):
        return other(x)
class Plain:
    def forward(self, x):
        return wrong(x)
"""
CHOOSE = """
    def __init__(self, config):
        self.attn_backend = ATTENTION_BACKENDS[config.attention_backend](config)
    def forward(self, x):
        return self.attn_backend.forward(x)
"""


def registry(**keys: str) -> str:
    """A registry whose keys make these classes."""
    makers = [
        f'@register_attention_backend("{key}")\ndef create_{key}(config):\n    return {name}()\n'
        for key, name in keys.items()
    ]
    return REGISTRY + "".join(makers)


def trace_registry(root: Path, **keys: str) -> dict:
    return trace_model(root, CHOOSE, "from sglang.srt.registry import ATTENTION_BACKENDS", registry=registry(**keys))


def test_a_choice_stands_at_the_hop_that_selects_the_class_and_only_there(tmp_path):
    document = trace_registry(tmp_path, a="Fast", b="Fast", c="Slow")
    assert conditions(document, "good", "Tiny.forward") == {"attention_backend=a or b"}
    assert conditions(document, "good", "Base.forward") == {""}
    assert conditions(document, "other", "Tiny.forward") == {"attention_backend=c"}


def test_a_class_of_too_many_keys_is_named_and_one_of_all_keys_is_not_a_condition(tmp_path):
    many = trace_registry(tmp_path / "many", **{f"k{n}": "Fast" for n in range(6)}, c="Slow")
    assert conditions(many, "good", "Tiny.forward") == {"attn_backend=Fast"}
    every = trace_registry(tmp_path / "every", a="Fast", b="Fast")
    assert conditions(every, "good") == {""}


def test_what_does_not_reach_a_kernel_is_no_alternative(tmp_path):
    body = """
        def __init__(self, last):
            self.layer = Layer() if last else Missing()
        def forward(self, x):
            return self.layer(x)
    """
    layers = "from torch import nn\nfrom sgl_kernel import good\n" + dedent(
        """
        class Layer(nn.Module):
            def forward(self, x):
                return good(x)
        class Missing(nn.Module):
            def forward(self, x):
                return x
        """
    )
    document = trace_model(tmp_path, body, "from sglang.srt.layer import Layer, Missing", layer=layers)
    assert conditions(document, "good") == {""}


def test_factories_and_construction_pass_a_choice_on(tmp_path):
    body = """
        def __init__(self):
            self.experts = get_class()()
        def forward(self, x):
            return self.experts.forward(x)
    """
    experts = KERNELS + dedent(
        """
        from sglang.srt.modes import get_runner
        class Core:
            def __init__(self):
                self.x = 1
            def run(self, x):
                return good(x)
        class Deep:
            def __init__(self):
                self.core = Core()
            def forward(self, x):
                return self.core.run(x)
        class Plain:
            def forward(self, x):
                return other(x)
        def get_class():
            if get_runner().is_deep_gemm():
                return Deep
            return Plain
        """
    )
    document = trace_model(tmp_path, body, "from sglang.srt.experts import get_class", experts=experts, modes=MODES)
    assert conditions(document, "good", "Tiny.forward") == {"runner=deep_gemm"}
    assert conditions(document, "good", "Deep.forward") == {""}
    assert conditions(document, "other", "Tiny.forward") == {"experts=Plain"}


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
