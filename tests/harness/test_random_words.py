"""Random words against the known ones of SplitMix64, and the operations that make inputs of them."""

import numpy
import pytest
import torch
from whole_dataset import MEMBERS

from flashinfer_trace.families import all_families
from flashinfer_trace.harness.cases import cases
from flashinfer_trace.harness.exact import ExactOperations, InexactOperation
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.verdict import random_words
from flashinfer_trace.verdict.tensors import same_bits

SMALLEST = {name: min(members, key=lambda one: (input_bytes(one), one.name)) for name, members in MEMBERS.items()}

#: Words of the seed 1234567, as the authors' own program prints them.
KNOWN = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_the_words_are_those_of_the_authors():
    for numbers in (numpy.arange(1, 6), torch.arange(1, 6)):
        assert [word & random_words.ALL for word in random_words._mixed(numbers, 1234567).tolist()] == KNOWN
    steps = (1234567 + number * random_words.GAMMA for number in range(1, 6))
    assert [random_words.mixed_number(step) for step in steps] == KNOWN


def test_words_are_the_same_however_they_are_computed(monkeypatch):
    """At once, in chunks, and with torch as on a GPU."""

    def drawn():
        draws = Draws(7, "cpu")
        return (
            draws.normal([5001]),
            draws.uniform([5001], -2, 3),
            draws.integers([5001], -3, 8),
            draws.permutation(5001),
        )

    once = drawn()
    monkeypatch.setattr(random_words, "FEW", 0)
    monkeypatch.setattr(random_words, "CPU_CHUNK", 1000)
    assert all(torch.equal(one, other) for one, other in zip(drawn(), once, strict=True))
    monkeypatch.setattr(random_words, "GPU_CHUNK", 1700)
    monkeypatch.setattr(random_words, "numpy", torch)  # arrays and tensors share their operations
    monkeypatch.setattr(torch, "ndarray", (), raising=False)
    monkeypatch.setattr(torch, "from_numpy", lambda found: found)
    assert all(torch.equal(one, other) for one, other in zip(drawn(), once, strict=True))


def test_a_draw_depends_on_its_number_and_not_on_the_sizes_of_others():
    first, second = Draws(7, "cpu"), Draws(7, "cpu")
    first.bits(3)
    second.bits(100_000)
    long, short = first.bits(50_001), second.bits(5)
    assert torch.equal(long[:5], short)
    assert len(long.unique()) == len(long)
    assert not torch.equal(Draws(8, "cpu").bits(5), Draws(7, "cpu").bits(5))


def test_functions_are_those_of_torch_up_to_rounding():
    x = torch.linspace(-9, 9, 4001, dtype=torch.float32)
    matrix = x[:4000].view(40, 100)
    functions = {
        "exp2": lambda: torch.exp2(x),
        "exp": lambda: torch.exp(x),
        "sin": lambda: torch.sin(x),
        "cos": lambda: torch.cos(x),
        "sigmoid": lambda: torch.sigmoid(x),
        "pow": lambda: 10000.0**x,
        "power of": lambda: x.abs().double().add(0.1) ** -1.1,
        "square": lambda: x.square(),
        "mean": lambda: matrix.mean(dim=1) + matrix.square().mean(),
        "cumsum": lambda: matrix.cumsum(dim=1, dtype=torch.float64),
        "counts": lambda: torch.zeros(3).scatter_add_(0, torch.tensor([2, 0, 2]), torch.ones(3)),
        "rows": lambda: matrix.clone().index_add_(0, torch.tensor([3, 1]), matrix[:2]),
        "softmax": lambda: torch.softmax(matrix, dim=-1),
        "sum": lambda: matrix.sum(dim=0),
        "sum of all": lambda: matrix.abs().sum(),
        "quotient": lambda: x / 448.0,
        "product": lambda: torch.bmm(matrix.view(4, 10, 100), matrix.view(4, 100, 10)),
    }
    for name, function in functions.items():
        expected = function()
        with ExactOperations():
            found = function()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=name)


def test_order_and_largest_elements_are_stable():
    x = torch.tensor([2.0, 1.0, 2.0, 1.0])
    with ExactOperations():
        assert torch.sort(x, descending=True).indices.tolist() == [0, 2, 1, 3]
        assert torch.argsort(x).tolist() == [1, 3, 0, 2]
        assert x.topk(3).indices.tolist() == [0, 2, 1]


def test_draws_have_the_distributions_that_are_asked_for():
    draws = Draws(11, "cpu")
    normal, uniform, integers = draws.normal([400_000]), draws.uniform([400_000]), draws.integers([70_000], -3, 3)
    order = draws.permutation(1000)
    assert abs(float(normal.mean())) < 0.01 and abs(float(normal.std()) - 1) < 0.01
    assert 4.2 < float(normal.abs().max()) < 5.01 and abs(float(normal.double().pow(4).mean()) - 2.91) < 0.05
    neighbors = torch.corrcoef(torch.stack([normal[:-1], normal[1:]]))[0, 1]
    assert abs(float(neighbors)) < 0.01
    assert 0 <= float(uniform.min()) < 1e-4 and 1 - 1e-4 < float(uniform.max()) < 1
    counts = torch.bincount(integers + 3)
    assert len(counts) == 7 and float((counts - 10_000).abs().max()) < 600
    assert sorted(order.tolist()) == list(range(1000)) and order.tolist() != list(range(1000))


def refused(function):
    with pytest.raises(InexactOperation, match="may depend on the device"), ExactOperations():
        function()


def test_inexact_operations_are_refused():
    x = torch.ones(3)
    refused(lambda: torch.erf(x))
    refused(lambda: x @ x)
    refused(lambda: torch.add(x, x, alpha=3))
    refused(lambda: x.max(dim=0))
    refused(lambda: torch.linspace(0, 1, 5))
    refused(lambda: torch.randint(0, 9, (3,), generator=torch.Generator()))
    refused(lambda: torch.arange(3) / 3)
    with pytest.raises(AssertionError, match="twice"), ExactOperations():
        torch.ones(3, 2).index_add_(0, torch.tensor([1, 1]), torch.ones(2, 2))


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_harness)], ids=["chunks", "on a GPU"]
)
@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_inputs_have_the_same_bits_everywhere(family, device, monkeypatch):
    job = Job(SMALLEST[family.name], family)
    drawn = [case for case, _ in zip(cases(job, 3, lambda: 1), range(len(job.corners) + 4), strict=False)]
    for case in drawn:
        wanted = family.inputs(job.sized, case.plan, case.seed, "cpu")
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(random_words, "FEW", 0)
            found = family.inputs(job.sized, case.plan, case.seed, device)
        for name, value in wanted.items():
            other = found[name]
            assert same_bits(value, other.cpu() if isinstance(other, torch.Tensor) else other), (name, case)
