"""The report of hand-made traces."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest

from tools.kernel_tracing.report.notes import LONGEST_LIST, split_condition
from tools.kernel_tracing.report.render import render
from tools.kernel_tracing.report.trees import GAP, callee
from tools.shared.markdown import code, escape

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "schema/kernel_traces.schema.json").read_text())
MODEL = "sglang/srt/models/m.py"
LAYER = "sglang/srt/layers/l.py"


def frame(file, line, function, call, condition="", approximate=None):
    entry = {"file": file, "line": line, "function": function, "call": call, "condition": condition}
    return entry | ({} if approximate is None else {"approximate": approximate})


def kernel(name, chains, source="sgl-kernel", category="gemm", ops=(), definition=("sgl_kernel/gemm.py", 7)):
    sites = []
    for chain in chains:
        site = {part: chain[0][part] for part in ("file", "line", "function")}
        if site not in sites:
            sites.append(site)
    return {
        "name": name,
        "source": source,
        "category": category,
        "definition": {"file": definition[0], "line": definition[1]},
        "call_sites": sites,
        "ops": list(ops),
        "chains": [list(chain) for chain in chains],
    }


def trace(*kernels, unresolved=()):
    document = unchecked(*kernels, unresolved=unresolved)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document


def unchecked(*kernels, unresolved=()):
    source = {"version": "1.0", "sha256": "ab" * 32}
    return {
        "sources": {"sglang": source, "sgl-kernel": source, "flashinfer-python": source},
        "model": "deepseek",
        "platform": "cuda",
        "kernels": list(kernels),
        "unresolved": list(unresolved),
    }


ENTRY = frame(MODEL, 90, "Causal.forward", "self.model(ids)")
LAYERS = frame(MODEL, 50, "Model.forward", "self.layers[i](x)")
MLP = frame(MODEL, 20, "Layer.forward", "self.mlp(x)", "MoE layer")
DENSE = frame(MODEL, 22, "Layer.forward", "self.dense(x)")
GEMM = kernel(
    "fp8_gemm",
    [
        [frame(LAYER, 5, "Linear.forward", "fp8_gemm(a, b)", "quantization=fp8"), MLP, LAYERS, ENTRY],
        [frame(LAYER, 5, "Linear.forward", "fp8_gemm(a, b)", "quantization=fp8"), DENSE, LAYERS, ENTRY],
    ],
    ops=["mlp", "dense"],
)
NORM = kernel(
    "norm",
    [[frame(LAYER, 9, "Norm.forward", "norm(x)"), frame(MODEL, 18, "Layer.forward", "self.norm(x)"), LAYERS, ENTRY]],
    source="triton",
    category="norm",
    ops=["norm"],
    definition=("", 0),
)


def section(report, title):
    return report.split(f"\n## {title}")[1].split("\n## ")[0]


def test_sections_come_in_order():
    report = render(trace(GEMM, NORM))
    titles = re.findall(r"^## (.*)", report, re.M)
    assert titles == [
        "Summary",
        "Kernels and ops",
        "Call chains",
        "By source library",
        "Unresolved calls (0)",
        "Conditional paths and quantisation variants",
    ]
    assert "| sglang | 1.0 | `" + "ab" * 32 + "` |" in report
    assert report.startswith("# Kernel traces: deepseek on cuda\n")
    assert "2 kernels, 3 call chains over 7 call sites, 0 unresolved calls" in report


def test_summary_and_ops():
    report = render(trace(GEMM, NORM))
    assert "| Kernel | Source | Category | Primary call site | Definition file |\n|---|---|---|---|---|\n" in report
    assert (
        "| [fp8_gemm](#kernel-sgl-kernel-fp8-gemm) | sgl-kernel | gemm | "
        "[sglang/srt/layers/l.py:5](../.sources/sglang/srt/layers/l.py#L5) | "
        "[sgl_kernel/gemm.py](../.sources/sgl_kernel/gemm.py#L7) |"
    ) in report
    assert "| native only |" in section(report, "Summary")
    assert "| [fp8_gemm](#kernel-sgl-kernel-fp8-gemm) | `mlp`, `dense` |" in section(report, "Kernels and ops")
    assert 'id="kernel-sgl-kernel-fp8-gemm"' in report, "the links of the tables lead somewhere"


def test_trees_share_what_chains_have_in_common():
    chains = section(render(trace(GEMM), base="p/"), "Call chains").split("#### fp8")[1].splitlines()[4:]
    gap = GAP * 4
    assert chains == [
        "[fp8_gemm()](p/sglang/srt/layers/l.py#L5) in `Linear.forward` **if quantization=fp8** **(sgl-kernel)**\\",
        f'├─>{GAP}[self.mlp()](p/{MODEL}#L20) in `Layer.forward` **if MoE layer** <a id="callers-1"></a>\\',
        f"│{GAP * 3}└─>{GAP}[self.layers\\[i\\]()](p/{MODEL}#L50) in `Model.forward`\\",
        f"│{GAP * 3}{gap}└─>{GAP}[self.model()](p/{MODEL}#L90) in `Causal.forward` ▪\\",
        f"└─>{GAP}[self.dense()](p/{MODEL}#L22) in `Layer.forward`\\",
        f"{gap}└─>{GAP}as above: [callers of Layer.forward](#callers-1)",
    ]


def test_repeated_callers_are_referred_to_across_kernels_and_every_anchor_exists_once():
    report = render(trace(GEMM, NORM))
    assert report.count("self.model()") == 1
    anchors = re.findall(r'<a id="([^"]+)"></a>', report)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", report)) <= set(anchors)


def test_single_callers_are_repeated_rather_than_referred_to():
    first = kernel("a", [[frame(LAYER, 5, "F.forward", "a(x)"), ENTRY]])
    second = kernel("b", [[frame(LAYER, 6, "F.forward", "b(x)"), ENTRY]])
    report = render(trace(first, second))
    assert report.count("[self.model()]") == 2 and "as above" not in report


def test_a_chain_that_ends_where_others_go_on_is_marked():
    top = frame(LAYER, 5, "Linear.forward", "k(a)")
    report = render(trace(kernel("k", [[top, MLP], [top, MLP, LAYERS]])))
    assert "**if MoE layer** ▪\\" in report and "in `Model.forward` ▪" in report


def test_order_of_kernels_and_chains_in_the_trace_does_not_matter_for_the_trees():
    swapped = copy.deepcopy(GEMM)
    swapped["chains"].reverse()
    assert render(trace(GEMM, NORM)) == render(trace(NORM, swapped))
    assert render(trace(GEMM, NORM)) == render(json.loads(json.dumps(trace(GEMM, NORM))))


def test_chains_that_were_left_out_are_counted():
    assert "\n2 chains from 1 call site.\n" in render(trace(GEMM))
    assert "\n2 chains from 1 call site; 12 more are omitted for brevity.\n" in render(
        trace(GEMM | {"omitted_chains": 12})
    )
    assert "; about 2.0e+22 more are" in render(trace(GEMM | {"omitted_chains": 2 * 10**22}))


def test_breakdown_by_library():
    text = section(render(trace(GEMM, NORM)), "By source library")
    titles = ["sgl-kernel (1)", "flashinfer (0)", "deep-gemm (0)", "triton-kernels (0)", "triton (1)"]
    titles += ["torch.ops (0)", "jit (0)"]
    assert re.findall(r"^### (.*)", text, re.M) == titles
    assert "[sgl_kernel/gemm.py:7](../.sources/sgl_kernel/gemm.py#L7) | 1 | 2 |" in text


def test_unresolved_calls_are_counted_by_reason():
    calls = [
        {"file": MODEL, "line": 5, "function": "f", "call": "self.x(y)", "reason": "unknown receiver"},
        {"file": MODEL, "line": 3, "function": "f", "call": "h[k](y)", "reason": "unknown receiver"},
        {"file": LAYER, "line": 4, "function": "g", "call": "getattr(a, b)(c)", "reason": "name is computed"},
    ]
    text = section(render(trace(GEMM, unresolved=calls)), "Unresolved calls (3)")
    assert re.findall(r"^### (.*)", text, re.M) == ["unknown receiver (2)", "name is computed (1)"]
    assert text.index("h\\[k\\]()") < text.index("self.x()")


def test_notes_are_derived_from_the_conditions():
    text = section(render(trace(GEMM, NORM)), "Conditional paths")
    assert "without any condition: `norm`." in text
    assert "| **MoE layer** | none | `fp8_gemm` | 1 |" in text
    assert "| **quantization=fp8** | `fp8_gemm` | none | 2 |" in text
    assert "| **quantization=fp8** | `fp8_gemm` | `dense`, `mlp` |" in text
    assert "There are no approximate hops." in text
    guess = kernel("g", [[frame(LAYER, 1, "f", "g()", "", "any override"), ENTRY]])
    assert "| any override | 1 | `g` |" in render(trace(guess))
    guard = kernel("h", [[frame(LAYER, 1, "f", "h()", "x.ndim == 2 and quantization=a or b"), ENTRY]])
    text = section(render(trace(guard)), "Conditional paths")
    first, second = text.split("### Conditions in the sources")
    assert "**quantization=a or b**" in first and "**x.ndim == 2**" in second
    names = [kernel(f"k{n:02}", [[frame(LAYER, n, "f", "g()")]]) for n in range(1, LONGEST_LIST + 4)]
    assert f"`k{LONGEST_LIST:02}` and 3 more." in render(trace(*names))


def test_nothing_found():
    report = render(trace())
    assert report.count("No kernel was found.") == 3
    assert "0 kernels, 0 call chains over 0 call sites" in report
    assert report.count("\n\nNone.\n") == 9 and "without any condition: none." in report


def test_odd_characters_stay_text():
    odd = kernel(
        "Klass<T>.run",
        [[frame("sglang/a b/ü_[1].py", 1, "Größe.<lambda>", "x[`a|b`](*y, **z)", "a|b and <script>*c*_d_")]],
        category="a|b *c*",
        ops=["o|p", "q`r"],
    )
    report = render(trace(odd))
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", report)
    assert not re.search(r"(?<!\\)<(script|T|lambda)>", outside)
    assert "../.sources/sglang/a%20b/%C3%BC_%5B1%5D.py#L1" in report
    assert r"[x\[\`a\|b\`\]()]" in report
    assert r"**if a\|b and \<script\>\*c\*\_d\_**" in report
    assert "### a\\|b \\*c\\*" in report
    assert "`o\\|p`, ``q`r``" in report
    for line in section(report, "Summary").splitlines()[4:5]:
        assert len(re.findall(r"(?<!\\)\|", line)) == 6


def test_two_kernels_of_one_name_have_their_own_anchors():
    twins = [kernel("k", [[ENTRY]]), kernel("k", [[ENTRY]], definition=("sgl_kernel/moe.py", 3))]
    report = render(trace(*twins))
    assert '<a id="kernel-sgl-kernel-k"></a>' in report and '<a id="kernel-sgl-kernel-k-2"></a>' in report


def test_very_deep_and_very_many_chains():
    deep = [frame(MODEL, n, f"f{n}", f"g{n}()") for n in range(1, 1201)]
    assert render(unchecked(kernel("deep", [deep]))).count("└─>") == 1199
    # 2^12 paths through pairs of callers: the tree grows with the graph, not with the number of paths.
    paths = [[]]
    for level in range(12):
        paths = [[*path, frame(MODEL, 10 * level + side, "f", f"c{level}()")] for path in paths for side in (1, 2)]
    assert len(render(unchecked(kernel("wide", paths))).splitlines()) < 150


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("f(x)", "f()"),
        ("self.layers[i(0)](x)", "self.layers[i(0)]()"),
        ("kernel[(grid,)](a)", "kernel[(grid,)]()"),
        ("@decorate", "@decorate"),
        ("(a or b)(x)", "(a or b)()"),
    ],
)
def test_callee(call, expected):
    assert callee(call) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a=1", ["a=1"]),
        ("a=1, b in (1, 2); c and d('x, y')", ["a=1", "b in (1, 2)", "c", "d('x, y')"]),
        ("MoE layer and android", ["MoE layer", "android"]),
        ("x) and y", ["x)", "y"]),
        ("(a) and (b or c) and (d)(e)", ["a", "b or c", "(d)(e)"]),
        ("a and (b or very.long...", ["a"]),
    ],
)
def test_split_condition(text, expected):
    assert split_condition(text) == expected


def test_escape_and_code():
    assert escape("a\nb  *c*") == "a b \\*c\\*"
    assert escape("_a_b_ f(x)[0] <T>") == r"\_a_b\_ f(x)\[0\] \<T\>"
    assert (code("a`b"), code("`a`"), code("a|b"), code("")) == ("``a`b``", "`` `a` ``", "`a\\|b`", "")
