"""Philox against the vectors of its authors, and the operations that make inputs of its bits."""

import math

import pytest
import torch

from flashinfer_trace.judging.traffic.exact import ExactDraws, InexactOperation
from flashinfer_trace.judging.traffic.philox import Stream, philox

# Random123, tests/kat_vectors: https://github.com/DEShawResearch/random123
KNOWN_ANSWERS = """
philox4x32 7 00000000 00000000 00000000 00000000 00000000 00000000   5f6fb709 0d893f64 4f121f81 4f730a48
philox4x32 7 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff   5207ddc2 45165e59 4d8ee751 8c52f662
philox4x32 7 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0   4dfccaba 190a87f0 c47362ba b6b5242a
philox4x32 10 00000000 00000000 00000000 00000000 00000000 00000000   6627e8d5 e169c58d bc57ac4c 9b00dbd8
philox4x32 10 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff   408f276d 41c83b0e a20bc7c6 6d5451fd
philox4x32 10 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0   d16cfe09 94fdcceb 5001e420 24126ea1
"""


@pytest.mark.parametrize("line", KNOWN_ANSWERS.strip().splitlines())
def test_the_known_answers_of_random123(line):
    _, rounds, *words = line.split()
    numbers = [int(word, 16) for word in words]
    found = philox(tuple(torch.tensor([word]) for word in numbers[:4]), (numbers[4], numbers[5]), int(rounds))
    assert [int(word) for word in found] == numbers[6:]


def test_a_draw_depends_on_its_number_and_not_on_the_sizes_of_others():
    first, second = Stream(7), Stream(7)
    first.words(3, torch.device("cpu"))
    second.words(100_000, torch.device("cpu"))
    long, short = (stream.words(count, torch.device("cpu")) for stream, count in ((first, 50_001), (second, 5)))
    assert torch.equal(long[:5], short)
    assert len(long.unique()) == len(long)
    assert not torch.equal(Stream(8).words(5, torch.device("cpu")), Stream(7).words(5, torch.device("cpu")))


def test_the_words_are_the_blocks_in_order():
    words = Stream(5 | 6 << 32).words(4, torch.device("cpu"))
    number = torch.tensor([0, 1])
    a, b, c, d = philox((number, number * 0, number * 0 + 1, number * 0), (5, 6))
    assert words.tolist() == torch.stack([b << 32 | a, d << 32 | c], dim=1).flatten().tolist()


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
        "softmax": lambda: torch.softmax(matrix, dim=-1),
        "sum": lambda: matrix.sum(dim=0),
        "sum of all": lambda: matrix.abs().sum(),
        "quotient": lambda: x / 448.0,
        "product": lambda: torch.bmm(matrix.view(4, 10, 100), matrix.view(4, 100, 10)),
    }
    for name, function in functions.items():
        expected = function()
        with ExactDraws(0):
            found = function()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=name)


def test_order_and_largest_elements_are_stable():
    x = torch.tensor([2.0, 1.0, 2.0, 1.0])
    with ExactDraws(0):
        assert torch.sort(x, descending=True).indices.tolist() == [0, 2, 1, 3]
        assert torch.argsort(x).tolist() == [1, 3, 0, 2]
        assert x.topk(3).indices.tolist() == [0, 2, 1]


def test_draws_have_the_distributions_that_are_asked_for():
    generator = torch.Generator()
    with ExactDraws(11):
        normal = torch.randn(400_000, generator=generator)
        uniform = torch.rand(400_000, generator=generator)
        integers = torch.randint(-3, 4, (70_000,), generator=generator)
        order = torch.randperm(1000, generator=generator)
    assert abs(float(normal.mean())) < 0.01 and abs(float(normal.std()) - 1) < 0.01
    assert float(normal.abs().max()) <= math.sqrt(12) + 1e-4
    assert 0 <= float(uniform.min()) < 1e-4 and 1 - 1e-4 < float(uniform.max()) < 1
    counts = torch.bincount(integers + 3)
    assert len(counts) == 7 and float((counts - 10_000).abs().max()) < 600
    assert sorted(order.tolist()) == list(range(1000)) and order.tolist() != list(range(1000))


def refused(function):
    with pytest.raises(InexactOperation, match="may depend on the device"), ExactDraws(0):
        function()


def test_inexact_operations_are_refused():
    x = torch.ones(3)
    refused(lambda: torch.log(x))
    refused(lambda: x @ x)
    refused(lambda: torch.add(x, x, alpha=3))
    refused(lambda: x.max(dim=0))
    refused(lambda: torch.linspace(0, 1, 5))
    refused(lambda: torch.randint(0, 9, (3,)).random_(0, 5, generator=torch.Generator()))
