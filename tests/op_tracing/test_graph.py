"""The execution graph of small packages: order, branches, loops over layers, annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic import write

from tools.kernel_tracing.report.analysis import analyse
from tools.kernel_tracing.report.trace import document
from tools.kernel_tracing.source.sources import find_sources
from tools.op_tracing.check import check
from tools.op_tracing.trace import trace

LAYERS = """
from torch import nn
from sgl_kernel import good, other
class Linear(nn.Module):
    def forward(self, x):
        return good(x)
class Norm(nn.Module):
    def forward(self, x):
        return other(x)
class Embedding(nn.Module):
    def forward(self, x):
        return x + 1
"""


def op_trace(root: Path, model: str, **files: str) -> dict[str, Any]:
    """The op trace of a model file, checked against its kernel traces."""
    heading = "from torch import nn\nfrom sglang.srt.layers.basic import Embedding, Linear, Norm\n"
    tree = {"layers/basic.py": LAYERS, "models/tiny.py": heading + model}
    analysis = analyse(find_sources(write(root, tree | files)), "tiny")
    ops = trace(analysis)
    assert check(ops, document(analysis)) == []
    return ops


def outline(node: dict[str, Any]) -> Any:
    """A node as text, or as a pair of text and children if it has any."""
    text = " | ".join(filter(None, [f"{node['name']} {node['kind']}", node["annotation"]]))
    return (text, [outline(child) for child in node["children"]]) if node["children"] else text


def forward_of(ops: dict[str, Any]) -> Any:
    """What the entry class calls."""
    (entry,) = ops["graph"]["children"]
    return [outline(child) for child in entry["children"]]


def test_execution_order_and_plain_torch(tmp_path: Path) -> None:
    ops = op_trace(
        tmp_path,
        """
class Tiny(nn.Module):
    def __init__(self):
        self.down = Linear()
        self.up = Linear()
        self.norm = Norm()
        self.embed = Embedding()
    def forward(self, x):
        return self.down(self.act(self.up(self.norm(self.embed(x)))))
    def act(self, x):
        return x.relu()
EntryClass = Tiny
""",
    )
    assert forward_of(ops) == ["embed torch", "norm op", "up op", "down op"]
    assert [(op["name"], [kernel["name"] for kernel in op["kernels"]]) for op in ops["ops"]] == [
        ("down", ["good"]),
        ("norm", ["other"]),
        ("up", ["good"]),
    ]
    assert ops["ops"][0]["call_sites"] == [
        {"file": "sglang/srt/models/tiny.py", "line": 11, "function": "Tiny.forward"}
    ]


def test_branches_of_one_op_are_one_node(tmp_path: Path) -> None:
    ops = op_trace(
        tmp_path,
        """
class Tiny(nn.Module):
    def __init__(self):
        self.norm = Norm()
    def forward(self, x, residual):
        if residual is None:
            x = self.norm(x)
        else:
            x = self.norm(x, residual)
        return x
EntryClass = Tiny
""",
    )
    assert forward_of(ops) == ["norm op"]
    (node,) = ops["graph"]["children"][0]["children"]
    assert [(site["line"], site["annotation"]) for site in node["call_sites"]] == [
        (9, "residual is None"),
        (11, "residual is not None"),
    ]


def test_dispatch_on_an_enum_annotates_the_paths(tmp_path: Path) -> None:
    ops = op_trace(
        tmp_path,
        """
from enum import Enum
class Method(Enum):
    MHA = 1
    MLA = 2
class Tiny(nn.Module):
    def __init__(self):
        self.attn = Linear()
        self.norm = Norm()
    def forward(self, x, method: Method):
        if method == Method.MHA:
            return self.forward_mha(x)
        elif method == Method.MLA:
            return self.forward_mla(x)
        raise NotImplementedError
    def forward_mha(self, x):
        return self.attn(x)
    def forward_mla(self, x):
        return self.norm(x)
EntryClass = Tiny
""",
    )
    first, second = forward_of(ops)
    assert "MHA" in first[0]
    assert first[1] == ["attn op"]
    assert "MLA" in second[0]
    assert second[1] == ["norm op"]


def test_loop_over_layers_and_two_kinds_of_them(tmp_path: Path) -> None:
    ops = op_trace(
        tmp_path,
        """
class Dense(nn.Module):
    def __init__(self):
        self.up = Linear()
    def forward(self, x):
        return self.up(x)
class Sparse(nn.Module):
    def __init__(self):
        self.gate = Norm()
    def forward(self, x):
        return self.gate(x)
class Layer(nn.Module):
    def __init__(self, config, index):
        self.mlp = Sparse() if index > config.first else Dense()
    def forward(self, x):
        return self.mlp(x)
class Tiny(nn.Module):
    def __init__(self, config):
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.number)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
EntryClass = Tiny
""",
    )
    ((layer, children),) = forward_of(ops)
    assert layer == "layer container | for layer in self.layers"
    assert [child[1] for child in children] == [["up op"], ["gate op"]]
    texts = [child[0] for child in children]
    assert len(set(texts)) == 2
    assert all(text.startswith("mlp container | ") for text in texts)


def test_a_container_is_written_out_once(tmp_path: Path) -> None:
    ops = op_trace(
        tmp_path,
        """
class MLP(nn.Module):
    def __init__(self):
        self.up = Linear()
    def forward(self, x):
        return self.up(x)
class Tiny(nn.Module):
    def __init__(self):
        self.first = MLP()
        self.second = MLP()
    def forward(self, x):
        return self.second(self.first(x))
class Other(Tiny):
    pass
class More(Tiny):
    def forward(self, x):
        return self.first(x)
EntryClass = [Tiny, Other, More]
""",
    )
    tiny, more = ops["graph"]["children"]
    assert outline(tiny) == ("Tiny container | also Other", [("first container", ["up op"]), "second again"])
    assert outline(more) == ("More container", ["first again"])


def test_recursion_ends(tmp_path: Path) -> None:
    ops = op_trace(
        tmp_path,
        """
class Tiny(nn.Module):
    def __init__(self):
        self.up = Linear()
    def forward(self, x):
        if x.ndim > 2:
            return self.forward(x[0])
        return self.up(x)
EntryClass = Tiny
""",
    )
    assert [child["name"] for child in ops["graph"]["children"][0]["children"]] == ["up"]


def test_framework_code_that_calls_back_is_a_container(tmp_path: Path) -> None:
    ops = op_trace(
        tmp_path,
        """
from sglang.srt.layers.steps import run_steps
class Tiny(nn.Module):
    def __init__(self):
        self.up = Linear()
    def op_up(self, x):
        return self.up(x)
    def forward(self, x):
        return run_steps([self.op_up], x)
EntryClass = Tiny
""",
        **{"layers/steps.py": "def run_steps(steps, x):\n    for step in steps:\n        x = step(x)\n    return x\n"},
    )
    ((steps, children),) = forward_of(ops)
    assert steps == "run_steps container"
    assert [child[1] for child in children] == [["up op"]]
    assert children[0][0].startswith("op_up container | for step in steps")


def test_direct_kernels_and_whose_weight_they_take(tmp_path: Path) -> None:
    ops = op_trace(
        tmp_path,
        """
from sgl_kernel import wrong
class Gate(nn.Module):
    def forward(self, x):
        return wrong(x, self.weight)
class Tiny(nn.Module):
    def __init__(self):
        self.up = Linear()
        self.gate = Gate()
    def forward(self, x, small):
        if small:
            x = wrong(x, self.up.weight.T)
        else:
            x = self.up(x)
        return wrong(self.gate(x))
EntryClass = Tiny
""",
    )
    assert forward_of(ops) == ["up op", "gate op", "wrong op"]
    assert [[kernel["name"] for kernel in op["kernels"]] for op in ops["ops"]] == [
        ["wrong"],
        ["good", "wrong"],
        ["wrong"],
    ]
    sites = ops["graph"]["children"][0]["children"][0]["call_sites"]
    assert [site["annotation"].startswith("wrong path") for site in sites] == [True, False]
    (direct,) = ops["direct_kernels"]
    assert [site["line"] for site in direct["call_sites"]] == [7, 14, 17]


@pytest.mark.parametrize(
    ("module", "classes", "group", "when"),
    [
        (
            "model_executor/model_runner.py",
            "class ModelRunner:\n    def sample(self, x):\n        return self.pick(x)\n"
            "    def pick(self, x):\n        return wrong(x)\n",
            "sampling",
            "after every forward",
        ),
        (
            "speculative/eagle_worker.py",
            "class EAGLEWorker:\n    def forward_batch_generation(self, x):\n        return self.pick(x)\n"
            "    def pick(self, x):\n        return wrong(x)\n",
            "speculative decoding",
            "speculative decoding",
        ),
    ],
)
def test_what_runs_outside_the_forward(tmp_path: Path, module: str, classes: str, group: str, when: str) -> None:
    ops = op_trace(
        tmp_path,
        "class Tiny(nn.Module):\n    def __init__(self):\n        self.up = Linear()\n"
        "    def forward(self, x):\n        return self.up(x)\nEntryClass = Tiny\n",
        **{module: f"from sgl_kernel import wrong\n{classes}"},
    )
    (op,) = ops["non_model_ops"]
    assert (op["name"], op["group"]) == ("pick", group)
    assert when in op["when"]
    assert [kernel["name"] for kernel in op["kernels"]] == ["wrong"]
    assert [one["name"] for one in ops["ops"]] == ["up"]
