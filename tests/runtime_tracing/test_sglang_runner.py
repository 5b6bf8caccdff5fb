"""The parts of the runner that need no SGLang."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from tools.runtime_tracing.call_log import CallLog
from tools.runtime_tracing.sglang_runner import Outcome, _follow_layers, _in_phase, _load_compiled, _spread_weights


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(50, 8)
        self.layers = torch.nn.ModuleList([self.layer() for _ in range(3)])
        self.norm = torch.nn.LayerNorm(8)
        with torch.no_grad():
            for weight in self.parameters():
                weight.uniform_(-1e-3, 1e-3)

    def layer(self) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.gate, layer.gate_up_proj = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(8, 4)
        layer.forward = lambda x: x + layer.gate(x).sum()
        return layer


def test_the_log_knows_the_running_layer():
    model, log, running = Model(), CallLog(), []
    for layer in model.layers:
        layer.gate.register_forward_hook(lambda *_: running.append(log.layer))
    _follow_layers(model, 3, log)
    for layer in model.layers:
        layer(torch.ones(2, 8))
        running.append(log.layer)
    assert running == [0, None, 1, None, 2, None]


def test_a_list_of_another_length_is_not_the_decoder():
    model, log = Model(), CallLog()
    _follow_layers(model, 2, log)
    model.layers[0].register_forward_hook(lambda *_: None)
    model.layers[0](torch.ones(2, 8))
    assert log.layer is None


def test_tokens_and_routers_differ_after_spreading():
    model = Model()
    _spread_weights(model)
    assert torch.equal(model.norm.weight, torch.ones(8))
    assert 0.8 < model.embed_tokens.weight.std() < 1.2
    assert 0.01 < model.layers[0].gate.weight.std() < 0.03
    assert model.layers[0].gate_up_proj.weight.abs().max() <= 1e-3  # other weights stay


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_loads_the_modules_that_were_compiled_beforehand(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel_jit_rope_64.so").touch()
    utils, ffi = types.ModuleType("sglang.jit_kernel.utils"), types.ModuleType("tvm_ffi")
    utils.load_jit = lambda *args: f"compiled {args}"
    ffi.load_module = lambda path: f"loaded {Path(path).name}"
    packages = {name: types.ModuleType(name) for name in ("sglang", "sglang.jit_kernel")}
    packages["sglang.jit_kernel"].utils = utils
    for name, module in {**packages, "sglang.jit_kernel.utils": utils, "tvm_ffi": ffi}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("RUNTIME_TRACING_JIT", str(tmp_path))
    _load_compiled((lambda module, name: (module, name)) if rank == 0 else lambda module, name: module)
    found = [utils.load_jit("rope", 64), utils.load_jit("norm")]
    names = ["sgl_kernel_jit_rope_64", "sgl_kernel_jit_norm"]
    modules = ["loaded sgl_kernel_jit_rope_64.so", "compiled ('norm',)"]
    assert found == (list(zip(modules, names, strict=True)) if rank == 0 else modules)


def test_a_capture_is_a_phase_of_its_own():
    outcome = Outcome()

    def capture() -> str | None:
        torch.ones(2).add(1)
        return outcome.log.phase

    assert _in_phase(capture, outcome, "capture")() == "capture"
    assert outcome.log.phase is None and outcome.phases == {"capture": "capture"}
    assert [call.kernel for call in outcome.log.calls][-1].endswith("add")
