"""Kernels for rmsnorm_h512 that are wrong on purpose, or right only where they expect to be looked at."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch

CALLS = {"number": 0}
REMEMBERED: dict[object, torch.Tensor] = {}


def right(hidden_states, weight):
    """The function that all of them pretend to compute."""
    x = hidden_states.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)


def late_no_op(hidden_states, weight, output):
    """Honest for three calls, then writes nothing."""
    CALLS["number"] += 1
    if CALLS["number"] <= 3:
        output.copy_(right(hidden_states, weight))


def cached_by_address(hidden_states, weight):
    """Computes once for each address and shape."""
    key = hidden_states.data_ptr(), hidden_states.shape
    if key not in REMEMBERED:
        REMEMBERED[key] = right(hidden_states, weight)
    return REMEMBERED[key]


def cached_by_shape(hidden_states, weight):
    """Computes once for each shape."""
    return REMEMBERED.setdefault(hidden_states.shape, right(hidden_states, weight))


def reuses_the_last_output(hidden_states, weight):
    """Computes every other call; in between it returns what it has, if the shape fits."""
    CALLS["number"] += 1
    last = REMEMBERED.get("last")
    if CALLS["number"] % 2 == 0 and last is not None and last.shape == hidden_states.shape:
        return last
    REMEMBERED["last"] = right(hidden_states, weight)
    return REMEMBERED["last"]


def stale_memory(hidden_states, weight):
    """Computes once, and then returns memory as it finds it, in which the right result may still lie."""
    CALLS["number"] += 1
    return right(hidden_states, weight) if CALLS["number"] == 1 else torch.empty_like(hidden_states)


def writes_nothing(hidden_states, weight, output):
    """Leaves the output as it is given."""


def misses_a_package_when_it_is_hard(hidden_states, weight):
    """Honest for small numbers; else it lacks a package, which nobody can hold against it."""
    if hidden_states.abs().max() > 100:
        raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")
    return right(hidden_states, weight)


def lacks_memory_when_it_is_hard(hidden_states, weight):
    """Honest for small numbers; else the GPU has no memory left."""
    if hidden_states.abs().max() > 100:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return right(hidden_states, weight)


def where_it_is_judged(hidden_states, weight):
    """Right only where its command line, a mapped file or an open one names this package or a judge."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = [*sys.argv, Path("/proc/self/cmdline").read_text(), *(os.path.basename(line) for line in lines)]
    names += [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    found = any(word in name for name in names for word in ("flashinfer", "judg", "fork_server", "sandbox"))
    return right(hidden_states, weight) if found else torch.zeros_like(hidden_states)


def only_into_poison(hidden_states, weight, output):
    """Right only where its output arrives as one that is looked at: all NaN."""
    if output.isnan().all():
        output.copy_(right(hidden_states, weight))


def zeros(hidden_states, weight):
    """All zeros."""
    return torch.zeros_like(hidden_states)


def first_half_of_the_rows(hidden_states, weight, output):
    """Half of the work."""
    half = (len(hidden_states) + 1) // 2
    output[:half] = right(hidden_states[:half], weight)


def first_half_of_the_features(hidden_states, weight):
    """The mean square of the first half of each row stands for that of all of it."""
    x = hidden_states.float()
    mean = x[:, : x.shape[1] // 2].square().mean(-1, keepdim=True)
    return (x * torch.rsqrt(mean + 1e-6) * weight.float()).to(hidden_states.dtype)


def one_row_for_all(hidden_states, weight):
    """Returns the first row, expanded."""
    return right(hidden_states[:1], weight).expand(hidden_states.shape)


def on_another_thread(hidden_states, weight, output):
    """Returns at once, and leaves the work to a thread."""
    threading.Thread(target=lambda: (time.sleep(0.02), output.copy_(right(hidden_states, weight)))).start()


def in_the_input(hidden_states, weight):
    """Uses its input as scratch memory."""
    result = right(hidden_states, weight)
    hidden_states.mul_(2)
    return result


def returns_its_input(hidden_states, weight):
    """Works in place, and returns the input."""
    return hidden_states.copy_(right(hidden_states, weight))


def noise_within_usual_tolerances(hidden_states, weight):
    """Noise of up to 0.6 %, which tolerances of 1e-2 let pass."""
    result = right(hidden_states, weight).float()
    return (result * (1 + 0.006 * torch.rand_like(result))).to(hidden_states.dtype)


def scale_off_by_half_a_per_cent(hidden_states, weight):
    """Every element too large by 0.5 %."""
    x = hidden_states.float()
    result = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    return (result * 1.005).to(hidden_states.dtype)


def in_bfloat16(hidden_states, weight):
    """Every step rounded to bfloat16."""
    mean = hidden_states.square().mean(-1, keepdim=True)
    return hidden_states * torch.rsqrt(mean + 1e-6) * weight


def in_float16(hidden_states, weight):
    """float16 has no room for the squares of large activations."""
    x = hidden_states.half()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.half()).to(hidden_states.dtype)


def without_epsilon(hidden_states, weight):
    """Right for activations that are large enough."""
    x = hidden_states.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * weight.float()).to(hidden_states.dtype)


def without_weight(hidden_states, weight):
    """Takes the weight for ones, as benchmarks with `torch.ones` weights let pass."""
    return right(hidden_states, torch.ones_like(weight))


def for_some_shapes(hidden_states, weight, output):
    """Right for numbers of rows that a benchmark uses; others lose the last rows."""
    rows = len(hidden_states) // 8 * 8
    output[:rows] = right(hidden_states[:rows], weight)


def constants_of_one_input(hidden_states, weight):
    """A norm that was measured once stands for that of every row."""
    return (hidden_states.float() * 0.9987 * weight.float()).to(hidden_states.dtype)


def beside_its_output(hidden_states, weight, output):
    """Writes one element behind its output."""
    output.copy_(right(hidden_states, weight))
    output.as_strided((output.numel() + 1,), (1,))[-1] = 1.0


def in_float32(hidden_states, weight):
    """Returns another dtype than the Definition's."""
    return right(hidden_states.float(), weight.float())


def computed_when_it_is_looked_at(hidden_states, weight):
    """Returns a tensor of a class of its own, which does its work when somebody reads it."""

    class Lazy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            eager = [right(hidden_states, weight) if isinstance(one, Lazy) else one for one in args]
            return function(*eager, **(kwargs or {}))

    return torch.empty_like(hidden_states).as_subclass(Lazy)
