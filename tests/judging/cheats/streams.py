"""Kernels for rmsnorm_h512 that cheat on a GPU only."""

from __future__ import annotations

import torch

GRAPHS: dict[torch.Size, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

#: Clock cycles that another stream is kept busy: tens of milliseconds.
BUSY = 100_000_000


def right(hidden_states, weight):
    """The function that all of them pretend to compute."""
    x = hidden_states.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)


def on_another_stream(hidden_states, weight, output):
    """Leaves the work to a stream that nobody waits for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
        output.copy_(right(hidden_states, weight))


def leaves_its_stream_behind(hidden_states, weight, output):
    """Makes another stream the current one, so later work waits for that one only."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)
    torch.cuda._sleep(BUSY)
    output.copy_(right(hidden_states, weight))


def on_the_cpu(hidden_states, weight):
    """Returns its result on another device."""
    return right(hidden_states, weight).cpu()


def replays_a_graph(hidden_states, weight):
    """Captures copies of its first inputs, and replays that whatever comes."""
    shape = hidden_states.shape
    if shape not in GRAPHS:
        own, factor = hidden_states.clone(), weight.clone()
        right(own, factor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = right(own, factor)
        GRAPHS[shape] = graph, result
    graph, result = GRAPHS[shape]
    graph.replay()
    return result
