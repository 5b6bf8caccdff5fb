"""The scoring of call-edge resolvers on synthetic labels, and whether the hand-made labels match the release."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
from release import SOURCES, analysis, needs_sources

from tools.resolver_benchmark import peers, tracer
from tools.resolver_benchmark.__main__ import PEERS, main
from tools.resolver_benchmark.defined_names import DefinedNames, calls_of
from tools.resolver_benchmark.labels import LABELS, Label, LabelError, label_problems, read_labels
from tools.resolver_benchmark.scores import Tally, attribute, score

#: Lower limits for the labelled calls, as resolved by the analysis from which traces are made (docs/kernel_tracing.md).
#: Figures below them are a regression.
PRECISION, RECALL = 0.99, 0.97

PACKAGE = {
    "sglang/__init__.py": "",
    "sglang/model.py": """
        from sglang.layers import Norm, helper as help_me
        from sglang.layers import *

        class Model:
            def __init__(self):
                self.norm = Norm()

            def forward(self, x):
                def inner():
                    return help_me(x)
                print(inner())
                return self.norm(x)
        """,
    "sglang/layers/__init__.py": "from .impl import *\nfrom .impl import helper\n",
    "sglang/layers/impl.py": """
        class Norm:
            def forward(self, x):
                return x

        if True:
            def helper(x):
                return x

        second = helper
        """,
}
NORM = "sglang.layers.impl:Norm"
HELPER = "sglang.layers.impl:helper"


def label(call="f", line=1, callees=(), also=(), kind="direct", caller="Model.forward", file="sglang/model.py"):
    return Label(file, line, call, caller, frozenset(callees), kind, "", frozenset(also))


def entry(call, line, callees, caller="Model.forward", **more):
    shared = {"file": "sglang/model.py", "kind": "direct", "note": ""}
    return {**shared, "line": line, "call": call, "caller": caller, "callees": list(callees), **more}


@pytest.fixture
def tree(tmp_path):
    for name, text in PACKAGE.items():
        path = tmp_path / "sources" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return tmp_path / "sources"


@pytest.fixture
def labelled(tree, tmp_path):
    """A directory of labels that match the synthetic package."""
    directory = tmp_path / "labels"
    directory.mkdir()
    entries = [
        entry("Norm", 6, [NORM], caller="Model.__init__"),
        entry("help_me", 10, [HELPER], caller="Model.forward.inner"),
        entry("print", 11, []),
        entry("self.norm", 12, [f"{NORM}.forward"], kind="module_call"),
    ]
    (directory / "model.json").write_text(json.dumps(entries), encoding="utf-8")
    (directory / "peers.json").write_text("[]", encoding="utf-8")
    return directory


def test_precision_and_recall_are_over_all_edges():
    labels = [
        label("a", 1, ["sglang.x:a"]),
        label("b", 2, ["sglang.x:b", "sglang.y:B.b", "sglang.z:C.b"], kind="override"),
        label("print", 3, kind="builtin"),
    ]
    edges = {labels[0].query: {"sglang.x:a"}, labels[1].query: {"sglang.x:b", "sglang.w:wrong"}}
    figures = score(labels, edges)
    assert (figures["expected"], figures["predicted"], figures["correct"]) == (4, 3, 2)
    assert figures["precision"] == pytest.approx(2 / 3, abs=1e-4)
    assert figures["recall"] == 0.5
    assert figures["by_kind"]["override"]["recall"] == pytest.approx(1 / 3, abs=1e-4)
    assert figures["by_kind"]["builtin"] | {"labels": 0} == {
        **vars(Tally()),
        "precision": None,
        "recall": None,
        "negatives": 1,
        "negatives_clean": 1,
        "exact": 1,
    }
    assert list(figures["by_kind"]) == ["builtin", "direct", "override"]


def test_an_answer_to_a_negative_costs_precision():
    labels = [label("a", 1, ["sglang.x:a"]), label("b", 2, kind="pruned")]
    figures = score(labels, {labels[0].query: {"sglang.x:a"}, labels[1].query: {"sglang.x:b_npu"}})
    assert (figures["precision"], figures["recall"]) == (0.5, 1.0)
    assert (figures["negatives"], figures["negatives_clean"], figures["exact"]) == (1, 0, 1)


def test_what_may_be_reported_is_neither_right_nor_wrong():
    asked = label("a", 1, ["sglang.x:a"], also=["sglang.x:other"])
    assert score([asked], {asked.query: {"sglang.x:a", "sglang.x:other"}})["precision"] == 1.0
    only = score([asked], {asked.query: {"sglang.x:other"}})
    assert (only["precision"], only["recall"], only["exact"]) == (None, 0.0, 0)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (f"{NORM}.__init__", NORM),
        (NORM, f"{NORM}.__init__"),
    ],
)
def test_a_class_and_its_constructor_are_one_callee(expected, answer):
    asked = label("Norm", 1, [expected])
    assert score([asked], {asked.query: {answer}})["exact"] == 1


def test_answers_outside_the_project_are_not_counted():
    asked = label("F.linear", 1)
    answers = {"torch.nn.functional:linear", "torch.ops.sgl_kernel.gemm", "builtins:print"}
    assert score([asked], {asked.query: answers})["predicted"] == 0


def test_no_answer_is_not_wrong():
    figures = score([label("a", 1, ["sglang.x:a"])], {})
    assert (figures["precision"], figures["recall"]) == (None, 0.0)


def test_edges_of_callers_are_given_to_calls_favourably():
    labels = [
        label("self.norm", 1, [f"{NORM}.forward"]),
        label("x.view", 2),
        label("self.run", 3, ["sglang.x:A.run"]),
        label("g", 4, ["sglang.x:g"], caller="<module>"),
    ]
    graph = {
        "sglang.model.Model.forward": {
            f"{NORM}.forward",
            "sglang.x:B.run",
            "sglang.x:unlabelled",
            "torch.view",
            "list",
        },
        "sglang.model": {"sglang.x:g"},
    }
    edges = attribute(labels, graph)
    assert edges[labels[0].query] == {f"{NORM}.forward"}
    assert edges[labels[1].query] == set()
    assert edges[labels[2].query] == {"sglang.x:B.run"}  # the call of the same name, which expects another
    assert edges[labels[3].query] == {"sglang.x:g"}


def test_an_edge_that_another_call_expects_is_not_held_against_its_namesake():
    labels = [label("a.run", 1, ["sglang.x:A.run"]), label("b.run", 2, kind="pruned")]
    edges = attribute(labels, {"sglang.model.Model.forward": {"sglang.x:A.run"}})
    assert edges == {labels[0].query: {"sglang.x:A.run"}, labels[1].query: set()}


def test_names_are_followed_to_their_definition(tree):
    known = DefinedNames(tree)
    assert known.locate("sglang.layers.impl.Norm.forward") == f"{NORM}.forward"
    assert known.locate("sglang.layers.Norm") == NORM  # relative star import
    assert known.locate("sglang.model.help_me") == HELPER  # import as, then a re-export
    assert known.locate("sglang.model.Norm.forward") == f"{NORM}.forward"
    assert known.locate("sglang.layers.impl.second") == HELPER
    assert known.locate("torch.nn.Linear") == "torch.nn.Linear"
    assert known.locate("sglang.model.missing") == "sglang.model.missing"
    assert HELPER in known
    assert "sglang.model:Model.forward.inner" in known
    assert "sglang.model:Norm" not in known


def test_a_star_import_of_oneself_ends(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("from sglang import *\n")
    assert DefinedNames(tmp_path).locate("sglang.f") == "sglang.f"


def test_labels_that_fit_have_no_problems(labelled, tree):
    assert label_problems(read_labels(labelled), tree) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (label("print", 12), "model.py:12: no call of `print` starts on this line"),
        (label("print", 11, caller="Model"), "`print` is called in Model.forward, not in Model"),
        (label("print", 11, ["sglang.model:nothing"]), "sglang.model:nothing is not defined anywhere"),
        (label("print", 11, [HELPER], [HELPER]), "is in both callees and also"),
        (label("print", 11, file="sglang/gone.py"), "sglang/gone.py:11: no call of `print`"),
    ],
)
def test_labels_that_do_not_fit_are_named(wrong, message, tree):
    (problem,) = label_problems([wrong], tree)
    assert message in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{]", "model.json:1: not JSON"),
        ('[{"file": "a.py", "lines": 1}]', "label 0: "),
        (json.dumps([entry("f", 1, []), entry("f", 1, [])]), "label 1: sglang/model.py:1 f is labelled twice"),
        (None, "no labels"),
    ],
)
def test_malformed_label_files_are_explained(text, message, tmp_path):
    if text is not None:
        (tmp_path / "model.json").write_text(text)
    with pytest.raises(LabelError, match=message):
        read_labels(tmp_path)


def test_calls_are_found_where_they_start():
    text = "@register(\n    1)\ndef f():\n    g(\n        1).h(2)\n    k[a, b](3)\n"
    assert calls_of(text) == {
        (1, "register"): "<module>",
        (4, "g"): "f",
        (4, "g(1).h"): "f",
        (6, "k[a, b]"): "f",
    }


def test_the_command_measures_the_resolver_that_is_wired_in(labelled, tree, tmp_path, monkeypatch, capsys):
    def edges(sources, queries):
        assert sources == tree
        return {query: {f"{NORM}.forward"} if query[2] == "self.norm" else set() for query in queries}

    monkeypatch.setattr(tracer, "edges", edges)
    out = tmp_path / "figures.json"
    arguments = ["--sources", str(tree), "--labels", str(labelled), "--json", str(out)]
    assert main(arguments) == 0
    (figures,) = json.loads(out.read_text())
    assert figures["tool"] == "own"
    assert (figures["precision"], figures["recall"]) == (1.0, pytest.approx(1 / 3, abs=1e-4))
    assert "negatives without an answer: 1 of 1" in capsys.readouterr().out


def test_a_missing_tool_is_reported_with_the_reason(labelled, tree, tmp_path, capsys):
    common = ["--sources", str(tree), "--labels", str(labelled), "--no-own", "--with", "jedi", "--python"]
    assert main([*common, str(tmp_path / "no-python")]) == 1
    assert "jedi: not measured: cannot start" in capsys.readouterr().out
    assert main([*common, sys.executable]) in (0, 1)  # measured where jedi happens to be installed
    assert "jedi" in capsys.readouterr().out


def test_labels_of_another_release_are_refused(labelled, tree, capsys):
    (tree / "sglang" / "model.py").write_text("\n")
    assert main(["--sources", str(tree), "--labels", str(labelled)]) == 1
    assert "is " + str(tree) + " the release for which the labels were made?" in capsys.readouterr().err


def test_a_tool_that_fails_or_hangs_is_told_apart(tree, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Boom: out of cheese' >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(peers.PeerError, match="failed: Boom: out of cheese"):
        peers.ask("jedi", tree, [], str(python), 10)
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(peers.PeerError, match=r"did not finish within 0.2 s"):
        peers.ask("jedi", tree, [], str(python), 0.2)


def test_the_last_name_of_a_call_is_what_jedi_is_asked():
    import ast

    def position(text):
        return peers.name_position(ast.parse(text, mode="eval").body.func)

    assert position("f(x)") == (1, 0)
    assert position("a.b.c(x)") == (1, 4)
    assert position("k.l[grid](x)") == (1, 2)
    assert position("f(x)(y)") is None
    assert peers.name_position(None) is None


def test_imports_are_followed_to_files(tree):
    assert peers.imported_files(tree, "sglang/model.py") == {"sglang/layers/__init__.py"}
    assert peers.imported_files(tree, "sglang/layers/__init__.py") == {"sglang/layers/impl.py"}


# Calls that were labelled and verified by hand.


def test_there_are_enough_labels_of_every_hop():
    labels = read_labels(LABELS)
    readme = (LABELS / "README.md").read_text(encoding="utf-8")
    assert len(labels) >= 170
    assert len({asked.file for asked in labels}) >= 5
    assert sum(not asked.callees for asked in labels) >= 25
    assert all(asked.note for asked in labels)
    assert {kind for kind in {asked.kind for asked in labels} if f"`{kind}`" not in readme} == set()


def test_figures_of_other_tools_are_kept():
    figures = json.loads((LABELS / "peers.json").read_text(encoding="utf-8"))
    assert [entry["tool"] for entry in figures] == list(PEERS)
    for measured in figures:
        assert {"version", "precision", "recall", "by_kind", "date", "command"} <= measured.keys()
        assert measured["labels"] == len(read_labels(LABELS)), "labels changed: measure again"


@needs_sources
def test_the_labels_fit_the_release():
    assert label_problems(read_labels(LABELS), SOURCES) == []


@needs_sources
def test_labels_are_resolved_no_worse_than_before():
    labels = read_labels(LABELS)
    figures = score(labels, tracer.answers(analysis("deepseek"), [asked.query for asked in labels]))
    assert figures["precision"] >= PRECISION
    assert figures["recall"] >= RECALL
