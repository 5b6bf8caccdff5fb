"""Digests of op traces: what they keep, when a committed one is used, and that they match the pinned release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from digests import SOURCES
from digests import needs_digest_sources as needs_sources

import flashinfer_trace
from tools.extract_definitions import model_code, traces
from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.model_code import ModelCode
from tools.extract_definitions.models import available, load_model
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import SourceTree, find_sources

PUBLISHED = sorted(Path(__file__).with_name("published").glob("*.json"))
COMMITTED = sorted(path.stem for path in traces.COMMITTED.glob("*.json"))


def kernel(name, *phases, source="sgl-kernel"):
    definition = {"file": "", "line": 0}
    return {"name": name, "source": source, "definition": definition, "condition": "", "phases": list(phases)}


DRAW = kernel("draw", "min_p")
DOCUMENT = {
    "sources": {"sglang": {"version": "1", "sha256": "0" * 64}},
    "ops": [
        {
            "name": "attn",
            "call_sites": [],
            "kernels": [
                kernel("attend", "decode"),
                kernel("attend", "extend"),
                kernel("Wrapper.run", "decode", source="flashinfer"),
                kernel("captured", "load"),  # by a CUDA graph, which each decode replays
            ],
        }
    ],
    "graph": {
        "name": "m",
        "kind": "container",
        "children": [
            {"name": "gate", "kind": "torch", "phases": ["decode"], "children": []},
            {"name": "attn", "kind": "op", "children": []},
        ],
    },
    "direct_kernels": [],
    "non_model_ops": [
        {
            "name": "sampler",
            "group": "sampling",
            "when": "always",
            "call_sites": [],
            "kernels": [DRAW],
        },
        {"name": "attn", "group": "utilities", "when": "once", "call_sites": [], "kernels": [kernel("warm", "load")]},
    ],
}


def test_a_digest_keeps_ops_kernels_and_stages():
    data = traces.condense("Tiny", DOCUMENT)
    assert json.loads(traces.dumps(data)) == data
    usage = traces.usage_from(data, ModelCode("Tiny", {}))
    assert usage.op("attn").kernels == {
        "sgl-kernel:attend": ("prefill", "decode"),
        "flashinfer:Wrapper.run": ("decode",),
        "sgl-kernel:captured": ("decode",),
    }
    assert usage.op("gate").kernels == {}
    assert usage.op("sampler").kernels == {"sgl-kernel:draw": ("prefill", "decode")}
    assert usage.op("absent") is None
    assert [(op.name, op.group) for op in usage.ops] == [
        *(("attn", ""), ("gate", ""), ("sampler", "sampling"), ("attn", "utilities")),
    ]


def test_every_model_has_a_committed_digest():
    root = flashinfer_trace.find_root()
    of_models = {load_model(root, name).architecture for name in available(root)}
    of_fixtures = {json.loads(path.read_text())["config"]["architectures"][0] for path in PUBLISHED}
    assert of_models | of_fixtures == set(COMMITTED)
    assert {path.stem for path in traces.CODE.glob("*.json")} == set(COMMITTED)
    assert len(COMMITTED) >= 15


def test_an_architecture_that_is_not_listed_needs_a_configuration():
    with pytest.raises(ExtractionError, match="no listed configuration has the architecture"):
        traces.digest("Phi3SmallForCausalLM", Index(_tree("class Phi3SmallForCausalLM:")))
    with pytest.raises(ExtractionError, match="no file in sglang/srt/models defines the class OtherForCausalLM"):
        traces.digest("OtherForCausalLM", Index(_tree("")))


def _tree(text):
    """Sources with one model file."""
    return SourceTree({}, {"sglang.srt.models.small": Path("small.py")}, {}, {"sglang.srt.models.small": text})


def write_sources(directory, body):
    """Writes sources with one model file, laid out like a checkout of sglang."""
    for package in ("sglang", "sglang/srt", "sglang/srt/models", "sglang/srt/layers"):
        (directory / package).mkdir(parents=True)
        (directory / package / "__init__.py").write_text("")
    (directory / "sglang" / "srt" / "models" / "small.py").write_text(body)
    (directory / "sgl_kernel").mkdir()
    (directory / "sgl_kernel" / "__init__.py").write_text(KERNELS)


KERNELS = """
import torch


def rmsnorm(input, weight):
    out = torch.empty_like(input)
    torch.ops.sgl_kernel.rmsnorm.default(out, input, weight)
    return out
"""


@needs_sources
def test_digests_are_of_the_pinned_release():
    described = find_sources(SOURCES).describe()
    for name in COMMITTED:
        assert traces.usage_of(name, None).sources == described, name


@needs_sources
def test_committed_model_code_is_that_of_the_pinned_release():
    tree = find_sources(SOURCES)
    for name in COMMITTED:
        text = (traces.CODE / f"{name}.json").read_text()
        assert model_code.dumps(traces.code_of(name, tree)) == text, f"run traces.py --code {name}"
        assert model_code.code_from(json.loads(text)) == traces.code_of(name, tree)


LAYERS = """
from torch import nn
from .parts import Norm as OtherNorm
from sglang.srt.models.parts import scale


class Base(nn.Module):
    def __init__(self, config):
        self.act_fn = SiluAndMul()


class Layer(Base):
    def __init__(self, config, layer_id: int = 0):
        self.size = config.hidden_size
        self.norm = OtherNorm(self.size, eps=1e-6) if config.normed else PPMissingLayer()
        self.attn = RadixAttention(self.heads, logit_cap=getattr(config, "cap", 0.0))

    def forward(self, x):
        return self.norm(self.attn(x, sinks=self.sinks)) * scale(self.config)


class Unused(nn.Module):
    def __init__(self, config):
        self.other = RadixAttention(config.unread)


KINDS = {"usual": Layer}


class SmallForCausalLM(nn.Module):
    def __init__(self, config, layer: Unused = None):
        self.layer = make(KINDS[config.kind])
"""
PARTS = """
class Norm:
    def __init__(self, size, eps):
        self.inner = Inner(size)


def scale(config):
    return config.factor if hasattr(config, "factor") else 1
"""


def test_what_the_code_of_a_model_passes(tmp_path):
    write_sources(tmp_path, LAYERS)
    (tmp_path / "sglang" / "srt" / "models" / "parts.py").write_text(PARTS)
    code = traces.code_of("SmallForCausalLM", find_sources(tmp_path))
    assert code.modules == {
        "act_fn": ("SiluAndMul()",),
        "attn": ("RadixAttention(self.heads, logit_cap=getattr(config, 'cap', 0.0))",),
        "inner": ("Inner(size)",),
        "norm": ("OtherNorm(config.hidden_size, eps=1e-06)", "PPMissingLayer()"),
    }
    assert code.calls == {
        "attn": ("self.attn(x, sinks=self.sinks)",),
        "norm": ("self.norm(self.attn(x, sinks=self.sinks))",),
    }
    assert code.reads == {"cap": ("0.0",), "factor": ("hasattr",), "hidden_size": (), "kind": (), "normed": ()}


def test_writing_digests_says_how_to_fetch_their_release_and_helps_without_sources(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = "python -m tools.fetch_sources --release 0.5.8 --dest .sources-0.5.8"
    assert traces.main([]) == 2
    assert f"`{command}`" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        traces.main(["--help"])
    assert command in capsys.readouterr().out
