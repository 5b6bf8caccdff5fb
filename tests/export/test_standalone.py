"""Adapters of kernels as modules of their own: complete, without this package, and computing the same."""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import all_families, family_of
from flashinfer_trace.families.sampling import sampler
from flashinfer_trace.families.speculative import build, greedy
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.judging.export.solutions import main_source
from flashinfer_trace.judging.export.standalone import Slice, SliceError

KERNELS = [(family, kernel) for family in all_families() for kernel in family.kernels]


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@pytest.mark.parametrize(("family", "kernel"), KERNELS, ids=[f"{f.name}-{k.label[:80]}" for f, k in KERNELS])
def test_an_adapter_is_a_module_that_needs_nothing_of_this_package(family: Family, kernel: Kernel):
    parts = Slice()
    source = f"CALL = {parts.expression(kernel.seeded or kernel.call)}\n"
    source = f"{parts.source}\n{source}"
    assert "flashinfer_trace" not in source
    code = compile(source, "main.py", "exec")
    names: dict[str, object] = {}
    exec(code, names)  # imports of kernels are inside of functions
    assert callable(names["CALL"])
    used = {each.argval for one in codes(code) for each in dis.get_instructions(one) if each.opname in ("LOAD_GLOBAL",)}
    assert {name for name in used if name not in names and not hasattr(builtins, name)} == set()


@pytest.mark.parametrize("name", ["gemm_bf16_n1_k3584", "gemm_bf16_bias_n128_k2880", "gemm_float32_n160_k5120"])
def test_a_solution_computes_what_its_adapter_does(name: str):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    kernel = next(each for each in family.kernels_of(definition) if each.library == "torch")
    names: dict[str, object] = {}
    exec(main_source(definition, family, kernel), names)
    inputs = flashinfer_trace.make_inputs(definition, {"m": 3})
    outputs = {"C": torch.empty_like(definition.run(**inputs))}
    run = names["run"]
    assert callable(run)
    assert torch.equal(run(*inputs.values()), kernel.call(definition, inputs, outputs)["C"])


def test_a_solution_that_draws_takes_its_seeds_from_torch():
    """A counter would be no randomness: `flashinfer-trace check` rejects one."""
    definition = flashinfer_trace.load("min_p_sampling_from_probs_v32000")
    family = family_of(definition)
    seeds: list[int] = []
    names: dict[str, Any] = {}
    exec(main_source(definition, family, family.kernels[0]), names)
    names["CALL"] = lambda definition, inputs, seed: seeds.append(seed) or {"samples": None}
    with torch.random.fork_rng(devices=[]):
        for number in (1, 2, 1):
            torch.manual_seed(number)
            names["run"](None, None)
    assert seeds[0] != seeds[1] and seeds[0] == seeds[2] and all(0 <= seed < 1 << 31 for seed in seeds)


def test_functions_of_the_same_name_stay_apart():
    parts = Slice(reserved=["run_sgl"])
    first, second = parts.expression(greedy.run_sgl), parts.expression(build.run_sgl)
    assert (first, second) == ("run_sgl_2", "run_sgl_3")
    names: dict[str, object] = {}
    exec(parts.source, names)
    assert {"run_sgl_2", "run_sgl_3", "verified"} <= names.keys()


def test_closures_keep_what_they_were_made_with():
    parts = Slice()
    calls = [parts.expression(sampler(name)) for name in ("top_k", "top_p")]
    assert len(set(calls)) == 2
    names: dict[str, types.FunctionType] = {}
    exec(parts.source, names)
    assert [names[call].__closure__[0].cell_contents for call in calls] == ["top_k", "top_p"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), "a Tensor cannot be written"),
        (lambda inputs: inputs, "is not a function of this package"),
        (dis.dis, "is not a function of this package"),
    ],
)
def test_what_cannot_be_copied_is_refused(value: object, message: str):
    with pytest.raises(SliceError, match=message):
        Slice().expression(value)
