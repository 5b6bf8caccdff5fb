"""Work before the clock of a timed call starts is too early, and work after its return is too late; honest kernels
return and leave what they like.
"""

from __future__ import annotations

import collections
import gc
import sys

import pytest
import torch
from cheating_kernels import ALL, CHEATS, NORM
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import poisoned_outputs
from flashinfer_trace.harness.verify import Job
from flashinfer_trace.judging.after_call import Undisturbed, hush, stored, unhush
from flashinfer_trace.judging.grades import kinds_of_inputs, standards
from flashinfer_trace.judging.judge import checked
from flashinfer_trace.judging.loading import ReturnError
from flashinfer_trace.judging.process import Failed, Launch, Timing
from flashinfer_trace.judging.submission import RunLimits, from_path
from flashinfer_trace.sandbox.shared_memory import HIDDEN, Filled

MONITOR = """
import sys
import torch

LEFT, TOOL = [], 3
events = sys.monitoring.events

def returned(code, offset, value):
    if LEFT and code.co_name == "mark":
        sys.monitoring.set_events(TOOL, 0)
        x, w, output = LEFT.pop()
        output.copy_((x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * w).to(x.dtype))

sys.monitoring.use_tool_id(TOOL, "late")
sys.monitoring.register_callback(TOOL, events.PY_RETURN, returned)

def run(x, w):
    LEFT[:] = [(x, w, torch.empty_like(x))]
    sys.monitoring.set_events(TOOL, events.PY_RETURN)
    return LEFT[0][2]
"""


def failures(path: str, server, device: str = "cpu", before: int = 0) -> list[str | None]:
    """The error in each call of a short series, by kind, after so many on other inputs."""
    definition, submission = flashinfer_trace.load(NORM), from_path(path)
    job = Job(definition, family_of(definition), None, device, full=True)
    every = [flashinfer_trace.make_inputs(definition, {"batch_size": 64}, 3 + n, device) for n in range(before + 1)]
    inputs = every.pop()
    expected = job.family.expected(definition, inputs)
    names = list(definition.inputs), list(definition.outputs)
    try:
        with Launch(server, submission.request, *names, device, RunLimits()).start() as process:
            for earlier in every:
                process.timed(earlier, poisoned_outputs(definition, earlier, 1), 2, Timing(repeats=3))
            found = process.timed(inputs, poisoned_outputs(definition, inputs, 1), 2, Timing(repeats=3))
    except Failed as failed:
        return [failed.kind]
    left = standards(kinds_of_inputs(job)[0])
    wrong = [checked(job, answer, inputs, expected, left) for answer in found.answers]
    return [one and one.kind for one in wrong]


@pytest.mark.parametrize("cheat", [one for one in ALL if one.file == "after_the_call"], ids=lambda one: one.function)
def test_what_is_computed_after_the_clock_has_stopped_is_wrong(cheat, server):
    assert set(failures(cheat.path, server)) <= set(cheat.kinds)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
def test_a_tool_that_monitors_is_stopped(tmp_path, server):
    (tmp_path / "monitor.py").write_text(MONITOR)
    assert failures(str(tmp_path / "monitor.py"), server) == ["values"] * 3


HONEST = {
    "a subclass of tuple": "return collections.namedtuple('Result', 'output')(right(hidden_states, weight))",
    "a subclass of dict": "return collections.OrderedDict(output=right(hidden_states, weight))",
    "a default device": "torch.set_default_device('cpu')\n    return right(hidden_states, weight)",
    "no collection": "gc.disable()\n    return right(hidden_states, weight)",
    "a parameter": "return torch.nn.Parameter(right(hidden_states, weight))",
}


@pytest.mark.parametrize("kind", HONEST)
def test_honest_kernels_return_and_leave_what_they_like(kind, tmp_path, server):
    text = (CHEATS / "after_the_call.py").read_text()
    text += f"\n\ndef run(hidden_states, weight):\n    import collections\n    {HONEST[kind]}\n"
    (tmp_path / "mine.py").write_text(text)
    assert failures(f"{tmp_path / 'mine.py'}:run", server) == [None] * 3


def test_containers_of_torch_and_of_libraries_are_read():
    def outputs():
        return {"values": torch.zeros(3), "indices": torch.zeros(3, dtype=torch.int64)}

    table = torch.arange(6.0).view(3, 2)
    found = table.max(dim=1)
    pair = collections.namedtuple("Pair", "first second")(found.values, found.indices)
    for returned in (found, pair, list(pair), collections.OrderedDict(indices=found[1], values=found[0])):
        into = outputs()
        described = stored(returned, into)
        assert into["values"].tolist() == [1, 3, 5] and into["indices"].tolist() == [1] * 3
        assert described["indices"] == {"dtype": "int64", "shape": [3], "device": "cpu", "layout": "torch.strided"}
    with pytest.raises(ReturnError, match=r"keys are not all plain strings, as \['values', 'indices'\] are"):
        stored({0: found[0], "indices": found[1]}, outputs())


def test_nothing_is_asked_and_all_is_put_back():
    asked = []

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    tensor = torch.zeros(2)
    with Function(), Dispatch():
        with Undisturbed():
            assert not gc.isenabled()
            tensor.clone().copy_(tensor)
        assert gc.isenabled() and not asked
        tensor.clone()
        assert asked == [torch.Tensor.clone, torch.ops.aten.clone.default]
    hush()
    with Undisturbed():
        pass
    assert not gc.isenabled(), "one that was hushed before stays so"
    unhush()


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
    """The path of a kernel that may use what the cheats in `after_the_call.py` do."""
    (directory / "early.py").write_text((CHEATS / "after_the_call.py").read_text() + text)
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
