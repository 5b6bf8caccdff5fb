"""What is computed before the clock of a timed call starts comes too early: the inputs are not yet all there."""

from __future__ import annotations

import pytest
import torch
from cheating_kernels import CHEATS
from test_afterwards import failures

from flashinfer_trace.sandbox.shared_memory import HIDDEN, Filled

#: Computes on the memory of the inputs of the call before, once there are others, when something runs code of it; the
#: call returns that.
EARLY = """
SEEN, KEPT, MADE = [], [], []

def early(*_):
    if SEEN and not torch.equal(KEPT[0], SEEN[0]):
        SEEN[:] = [KEPT[0] + 0]
        MADE[:] = [right(*KEPT)]

HOOK

def run(hidden_states, weight):
    result = MADE.pop() if MADE else right(hidden_states, weight)
    KEPT[:], SEEN[:] = (hidden_states, weight), [hidden_states + 0]
    LEAVE
    return result
"""
#: How it is run -> what it defines for that, and does in each call.
HOOKS = {
    "a mode": (
        "class Mode(TorchFunctionMode):\n"
        "    def __torch_function__(self, function, types, args=(), kwargs=None):\n"
        "        early()\n"
        "        return function(*args, **(kwargs or {}))\n",
        "in_a_mode(Mode, hidden_states, weight)",
    ),
    "an operator": (
        "LIBRARY = torch.library.Library('aten', 'IMPL')\n"
        "LIBRARY.impl('index_copy_', lambda to, dim, places, words: to.scatter_(dim, places, words), 'CPU')\n",
        "",
    ),
    "a generator": ("class Early:\n    manual_seed = early", "torch.cuda.default_generators = (Early(),)"),
}
#: Computes on another stream, and waits for it: the stream of the call is held meanwhile.
HELD = """
SIDE = torch.cuda.Stream()

def run(hidden_states, weight):
    with torch.cuda.stream(SIDE):
        result = right(hidden_states, weight)
    SIDE.synchronize()
    return result
"""


def submitted(directory, text: str) -> str:
    """The path of a kernel that may use what the cheats in `afterwards.py` do."""
    (directory / "early.py").write_text((CHEATS / "afterwards.py").read_text() + text)
    return f"{directory / 'early.py'}:run"


@pytest.mark.parametrize("kind", HOOKS)
def test_what_is_computed_before_the_clock_starts_is_wrong(kind, tmp_path, server):
    hook, leave = HOOKS[kind]
    path = submitted(tmp_path, EARLY.replace("HOOK", hook).replace("LEAVE", leave))
    assert failures(path, server, before=1)[0] == ("tampered" if kind == "an operator" else "values")


@pytest.mark.gpu_harness
def test_what_another_stream_computes_while_that_of_the_call_is_held_is_wrong(tmp_path, server, cuda_device):
    assert "values" in failures(submitted(tmp_path, HELD), server, cuda_device, before=1)


@pytest.mark.parametrize(("numbers", "hidden"), [(0, 0), (1, 1), (2, 1), (20_000, 19), (10**6, HIDDEN)])
def test_a_few_words_of_the_inputs_are_hidden(numbers, hidden):
    inputs = {"x": torch.arange(numbers, dtype=torch.float32), "empty": torch.empty(0)}
    filled = Filled(inputs, {"y": torch.zeros(3)})
    memory = torch.zeros(filled.size, dtype=torch.uint8)
    filled.fill(memory)
    told = filled.hide()
    assert len(told["places"]) == len(told["words"]) <= hidden and bool(told["places"]) == bool(hidden)
    assert filled.changed() == (["x"] if hidden else [])
    if hidden:
        memory[: filled.first].view(torch.int64)[torch.tensor(told["places"])] = torch.tensor(told["words"])
    assert not filled.changed() and not filled.outside()
