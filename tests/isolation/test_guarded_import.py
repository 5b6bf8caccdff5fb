"""A reference's own imports are restricted; torch's, which it makes where it dispatches to Python, are not."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.format.reference import load_run

LOADED = flashinfer_trace.load("fused_add_rmsnorm_residual_out_h4096")
FAMILY = family_of(LOADED)
TWIN = LOADED.with_const_axes(FAMILY.twin)


class Counting(TorchDispatchMode):
    """Counts the operations that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def inputs() -> dict[str, Any]:
    return FAMILY.inputs_for_axes(TWIN, {"batch_size": 3}, 0, "cpu")


def test_a_reference_runs_under_a_dispatch_mode() -> None:
    given = inputs()
    with Counting() as mode:
        watched = TWIN.run(**given)
    assert mode.count > 5
    assert all(torch.equal(a, b) for a, b in zip(watched, TWIN.run(**given), strict=True))


def test_a_reference_runs_on_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        outputs = TWIN.run(**{name: mode.from_tensor(value) for name, value in inputs().items()})
    assert [type(output).__name__ for output in outputs] == ["FakeTensor"] * 2
    assert [tuple(output.shape) for output in outputs] == [(3, TWIN.const_axes["hidden_size"])] * 2


def test_a_reference_runs_under_vmap_and_grad() -> None:
    run = load_run("import torch\n\ndef run(x):\n    return torch.nn.functional.silu(x) * 2\n", "smooth")
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert torch.equal(torch.func.vmap(run)(x), run(x))
    assert torch.func.grad(lambda value: run(value).sum())(x).shape == x.shape


@pytest.mark.parametrize("name", ["os", "torch.hub", "torch.utils", "torch._C", "flashinfer_trace"])
def test_a_statement_imports_listed_modules_only(name: str) -> None:
    run = load_run(f"import torch\n\ndef run(x):\n    import {name} as found\n    return found\n", "stranger")
    with pytest.raises(ImportError, match=r"a reference may import math torch .* only, not "):
        run(torch.zeros(1))


@pytest.mark.parametrize("call", ["__import__(name, {}, {}, ('hub',), 0)", "list(map(__import__, [name]))[0]"])
def test_a_call_gives_torch_itself_or_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(f"import torch\n\ndef run(name):\n    return {call}\n", "stranger")
    monkeypatch.delitem(sys.modules, "torch.utils.cpp_extension", raising=False)
    for name in ("torch", "torch.hub", "torch._C"):
        assert name in sys.modules
        assert run(name) is torch
    for name in ("os", "math", "torchvision", "torch.utils.cpp_extension", "flashinfer_trace"):
        with pytest.raises(ImportError, match=f"only, not {name}"):
            run(name)
