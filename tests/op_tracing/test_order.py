"""The graph has the calls of a function in the order in which each configuration makes them, and the check sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.kernel_tracing.configuration.listed import Configuration, Model
from tools.kernel_tracing.report.evaluation import Call, Evaluation, Frame
from tools.op_tracing.check import check
from tools.op_tracing.graph import Node, build, document

FILE = "sglang/srt/models/tiny.py"
MODEL = Model("tiny", {"architectures": ["Tiny"]}, (1,))
#: One call of `Tiny.forward`: its name, its number in time, its line, whether it runs no kernel, and its phase.
Made = tuple[str, int, int, bool, str]


def op(name: str, order: int, line: int, phase: str = "prefill") -> Made:
    return (name, order, line, False, phase)


def plain(name: str, order: int, line: int, phase: str = "prefill") -> Made:
    return (name, order, line, True, phase)


def evaluation(name: str, *made: Made) -> Evaluation:
    kernels = [_call(one) for one in made if not one[3]]
    return Evaluation(Configuration(name, MODEL), kernels, [_call(one) for one in made if one[3]])


def _call(made: Made) -> Call:
    name, order, line, without_kernel, phase = made
    at = Frame(FILE, line, "Tiny.forward", f"self.{name}(x)")
    if without_kernel:
        where = ("Linear", "torch", "sglang/srt/layers/linear.py", 3)
        return Call(phase, *where, (at,), name, 0, "", "", (), (name,), ((line, 20),), order)
    launch = Frame("sglang/srt/layers/linear.py", 6, "Linear.forward", "good(x)")
    called, places = ("good", name), ((6, 9), (line, 20))
    where = ("good", "sgl-kernel", "sgl_kernel/gemm.py", 3)
    return Call(phase, *where, (launch, at), name, 1, "", "", (), called, places, order)


def names(root: Node) -> list[str]:
    (entry,) = root.children
    return [f"{child.name} (torch)" if child.kind == "torch" else child.name for child in entry.children]


def order_of(*evaluations: Evaluation) -> list[str]:
    return names(build(evaluations, "tiny"))


def test_a_plain_module_follows_the_kernel_whose_number_it_has() -> None:
    one = evaluation("one", op("norm", 1, 10), plain("up", 1, 10), op("act", 2, 10), plain("down", 2, 10))
    assert order_of(one) == ["norm", "up (torch)", "act", "down (torch)"]


def test_variants_of_a_call_stand_side_by_side() -> None:
    fp8 = evaluation("fp8", op("up", 1, 11), op("act", 2, 12), op("down", 3, 13))
    bf16 = evaluation("bf16", plain("up", 0, 11), op("act", 1, 12), plain("down", 1, 13))
    assert order_of(fp8, bf16) == ["up", "up (torch)", "act", "down", "down (torch)"]
    assert order_of(bf16, fp8) == ["up (torch)", "up", "act", "down (torch)", "down"]


def test_what_only_a_later_phase_calls_stands_where_it_runs() -> None:
    prefill = (op("attn", 1, 10), op("out", 2, 12))
    extend = (op("prepare", 3, 9, "extend"), op("attn", 4, 10, "extend"), op("merge", 5, 11, "extend"))
    one = evaluation("one", *prefill, *extend, op("out", 6, 12, "extend"))
    assert order_of(one) == ["prepare", "attn", "merge", "out"]


def test_a_loop_over_layers_does_not_put_a_call_of_the_second_layer_last() -> None:
    """`dense` runs in the first layer, `experts` in the second; `after` is known by its call in the first."""
    one = evaluation("one", op("dense", 1, 10), op("after", 2, 12), op("experts", 3, 10))
    assert order_of(one) == ["dense", "experts", "after"]


def test_branches_keep_the_order_of_their_configuration_and_not_that_of_lines() -> None:
    """`norm` is called at line 10 in one branch, and at line 22 in the other."""
    one = evaluation("one", op("norm", 1, 10), op("query", 2, 12))
    other = evaluation("other", op("query_only", 1, 20), op("key_only", 2, 21), op("norm", 3, 22))
    assert order_of(one, other) == ["query_only", "key_only", "norm", "query"]


def test_calls_of_one_place_are_in_the_order_of_time() -> None:
    assert order_of(evaluation("one", op("dispatch", 1, 10), op("experts", 2, 10), op("combine", 3, 10))) == [
        "dispatch",
        "experts",
        "combine",
    ]


def violations(evaluations: Sequence[Evaluation], swapped: tuple[int, int] | None = None) -> list[str]:
    """What the check says of the order in the graph, in which two calls may be swapped."""
    graph = document(build(evaluations, "tiny"), {one.configuration.name: {} for one in evaluations})
    made = graph["children"][0]["children"]
    if swapped is not None:
        first, second = swapped
        made[first], made[second] = made[second], made[first]
    empty: dict[str, Any] = {"model": "tiny", "platform": "cuda", "sources": {}}
    ops = {**empty, "ops": [], "non_model_ops": [], "graph": graph}
    return [one for one in check(ops, {**empty, "kernels": []}, evaluations) if "stands before" in one]


def test_the_check_names_calls_in_the_wrong_order() -> None:
    both = [
        evaluation("fp8", op("up", 1, 11), op("act", 2, 12), op("down", 3, 13)),
        evaluation("bf16", plain("up", 0, 11), op("act", 1, 12), plain("down", 1, 13)),
    ]
    assert violations(both) == []
    # The order is now up, up (torch), down (torch), down, act.
    assert violations(both, (2, 4)) == [
        "graph: tiny > Tiny > down stands before act, but the prefill of fp8 runs it later",
        "graph: tiny > Tiny > down stands before act, but the prefill of bf16 runs it later",
    ]
    assert violations(both, (0, 1)) == []  # no configuration runs both


def test_the_check_names_configurations_that_contradict_each_other() -> None:
    both = [
        evaluation("one", op("norm", 1, 10), op("attn", 2, 11)),
        evaluation("other", op("attn", 1, 20), op("norm", 2, 21)),
    ]
    assert violations(both) == ["graph: tiny > Tiny > norm stands before attn, but the prefill of other runs it later"]
