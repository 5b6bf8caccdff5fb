"""Faults of samplers and of renormalization: parameters that are off by a little, and random numbers that are not."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashinfer_trace.harness.faults import Fault, FaultyCase, with_inputs

TEMPERATURE = 1.05
OFF = 0.02


def one_less(name: str, inputs: dict[str, Any], trial: FaultyCase) -> dict[str, Any] | None:
    """k - 1, where that keeps another number of tokens."""
    k, vocab_size = inputs[name], inputs["probs"].shape[1]
    less = torch.where((k > 1) & (k <= vocab_size), k - 1, k)
    return None if torch.equal(less, k) else {**inputs, name: less}


def scaled(name: str, factor: float, inputs: dict[str, Any], trial: FaultyCase) -> dict[str, Any] | None:
    """p times a factor, where p is a limit at all."""
    p = inputs[name]
    other = torch.where((p > 0) & (p < 1), p * factor, p)
    return None if torch.equal(other, p) else {**inputs, name: other}


def tempered(inputs: dict[str, Any], trial: FaultyCase) -> dict[str, Any] | None:
    """Probabilities at TEMPERATURE instead of 1, with the sum that they had."""
    probs = inputs["probs"]
    flatter = probs.double().pow(1 / TEMPERATURE)
    total = flatter.sum(dim=-1, keepdim=True).clamp_min(1e-300)
    other = (flatter * (probs.double().sum(dim=-1, keepdim=True) / total)).float()
    return None if torch.equal(other, probs) else {**inputs, "probs": other}


def one_number(trial: FaultyCase) -> dict[str, torch.Tensor] | None:
    """Every draw of a distribution uses the same random number: all of them give its first sample."""
    samples, group = trial.outputs["samples"], trial.expected["samples"].parts["group"]
    first = torch.searchsorted(group, torch.arange(int(group[-1]) + 1, device=group.device)) if len(group) else group
    same = samples[first[group]] if len(group) else samples
    return None if torch.equal(same, samples) else {"samples": same}


def parameter_faults(names: tuple[str, ...]) -> tuple[Fault, ...]:
    """The faults of the parameters among these inputs, and of the temperature."""
    found = []
    for name in names:
        if name == "top_k":
            found.append(with_inputs("k - 1", functools.partial(one_less, name)))
        else:
            for sign, word in ((-1, "small"), (1, "large")):
                factor = 1 + sign * OFF
                found.append(with_inputs(f"{name} 2 % too {word}", functools.partial(scaled, name, factor)))
    return (*found, with_inputs(f"temperature {TEMPERATURE}", tempered))


def sampling_faults(*names: str) -> tuple[Fault, ...]:
    """The faults of a sampler with these parameters."""
    return (*parameter_faults(names), Fault("one random number for all draws", one_number))


def renorm_faults(*names: str) -> tuple[Fault, ...]:
    """The faults of renormalization with these parameters."""
    return parameter_faults(names)
