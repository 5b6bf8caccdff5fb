"""The evaluator against runs on a GPU: what launched is found, with its stack, and little else is."""

from __future__ import annotations

import pytest
from release import SOURCES, needs_sources
from steps import RECORDED, evaluated, recorded_frame

from tools.kernel_tracing.evaluator.core import Frame
from tools.kernel_tracing.evaluator.machine import Machine
from tools.kernel_tracing.report.evaluation import index_of
from tools.kernel_tracing.report.ops import in_model
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.rules.platforms import Platform

PHASES = ("prefill", "decode")
RUNS = sorted(RECORDED["runs"])
#: In the run with CUDA graphs, decoding replays what was captured while loading.
EAGER = [name for name in RUNS if not name.endswith("graph")]


def recorded_chains(name, phases=PHASES):
    """Chains as text, in the order in which they were first called."""
    run = RECORDED["runs"][name]
    chains = [tuple(map(recorded_frame, entry["chain"])) for phase in phases for entry in run[phase]]
    return list(dict.fromkeys(chains))


def evaluated_chains(name, phases=PHASES):
    """The same for an evaluated step, whose last frame is the statement that starts it."""
    found = {}
    for event in evaluated(name).events:
        if event.phase in phases:
            chain = tuple(f"{hop.file}:{hop.line}:{hop.function}" for hop in event.chain[:-1])
            found.setdefault(chain, event)
    return found


@pytest.mark.parametrize("name", RUNS)
@needs_sources
def test_every_recorded_chain_is_found(name):
    missing = set(recorded_chains(name)) - set(evaluated_chains(name))
    assert not missing, "\n".join(" <- ".join(chain[:4]) for chain in sorted(missing)[:5])


@pytest.mark.parametrize("name", EAGER)
@needs_sources
def test_what_is_found_was_launched(name):
    """At least 90 % of the kernels; nothing that only another configuration runs."""
    launched = {chain[0].rsplit(":", 1)[0] for chain in recorded_chains(name)}
    kernels = {}
    for chain, event in evaluated_chains(name).items():
        kernels.setdefault(event.name, set()).add(chain[0].rsplit(":", 1)[0])
    extra = sorted(kernel for kernel, places in kernels.items() if not places & launched)
    assert len(extra) <= 0.1 * len(kernels), extra


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("llama", "qwen3moe"))])
@needs_sources
def test_models_without_latent_attention_have_none_of_its_kernels(name):
    names = {event.name.lower() for event in evaluated(name).events}
    assert not [kernel for kernel in names if "mla" in kernel or "nsa" in kernel]


@needs_sources
def test_results_that_rules_state_are_those_of_the_sources():
    machine = Machine(index_of(SOURCES), Platform("cuda"))
    module = machine.module("sglang.srt.layers.quantization.marlin_utils")
    machine.start(module)
    machine.stack = [Frame(module, "", module.scope)]
    assert machine.call(machine.lookup("get_scale_perms"), [], {}) == serving_steps.SCALE_ORDER


@needs_sources
def test_a_phase_that_differs_in_its_sampling_runs_no_model():
    events = [event for event in evaluated("llama_bf16_flashinfer").events if event.phase == "min_p"]
    assert {"min_p_sampling_from_probs"} <= {event.name for event in events}
    assert not [hop.file for event in events for hop in event.chain if in_model(hop.file)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", RUNS)
@needs_sources
def test_the_order_is_that_of_execution(name, phase):
    launched = recorded_chains(name, [phase])
    assert [chain for chain in evaluated_chains(name, [phase]) if chain in set(launched)] == launched
