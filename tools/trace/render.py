"""A trace as Markdown: kernels by library, in execution order with their chains, the execution graph, and the ops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from tools.shared.markdown import code, escape, link, slug, table
from tools.trace.calls import TORCH, in_model

Kernel = Mapping[str, Any]
#: The names of the Definitions of a kernel.
Definitions = Callable[[Kernel], Sequence[str]]
#: The most Definitions, and call sites, named in one cell; the rest are counted.
MAX_NAMES = 3
MAX_SITES = 4
#: Distribution -> where its sources are on GitHub, by version, and which packages they hold.
REPOSITORIES = {
    "sglang": ("https://github.com/sgl-project/sglang/blob/v{version}/python/", "sglang/"),
    "flashinfer-python": ("https://github.com/flashinfer-ai/flashinfer/blob/v{version}/", "flashinfer/"),
}
#: Packages without a tag of their own -> where they are on GitHub.
PLACES = {
    "sgl_kernel": "https://github.com/sgl-project/sglang/blob/v{version}/sgl-kernel/python/",
    "deep_gemm": "https://github.com/sgl-project/DeepGEMM#",
    "triton_kernels": "https://github.com/triton-lang/triton/tree/main/python/triton_kernels#",
}


def render(trace: Mapping[str, Any], definitions: Definitions) -> str:
    """The report of one model, the same for equal documents.

    Args:
        trace: the result of `document.trace`.
        definitions: which Definitions a kernel has.
    """
    sections = {
        "Runs": _runs(trace),
        "Kernels by library": _libraries(trace, definitions),
        "Kernels": _kernels(trace, definitions),
        "Execution graph": _graph(trace),
        "Kernels that the model's code calls directly": _direct(trace),
        "Ops": _ops(trace["ops"], definitions),
        "Outside the model's forward": _outside(trace, definitions),
        "Calls in execution order": _sequence(trace),
    }
    lines = [
        f"# {escape(trace['model'])}: kernels that SGLang {escape(trace['sources']['sglang'])} calls",
        "",
        "From recorded runs; `python -m tools.trace` writes this. Links lead to the release on GitHub.",
    ]
    for title, section in sections.items():
        lines += ["", f"## {title}", "", *section]
    return "\n".join(lines) + "\n"


def short(names: Sequence[str], most: int = MAX_NAMES) -> list[str]:
    """The first names, and how many more there are."""
    return [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]


def _runs(trace: Mapping[str, Any]) -> list[str]:
    rows = []
    for one in trace["configurations"]:
        settings = {"quantization": one["quantization"], **one["server"], **one["environment"]}
        stand_ins = f"; stand-ins for {', '.join(one['stand_ins'])}" if one["stand_ins"] else ""
        text = ", ".join(f"{name}={value}" for name, value in settings.items()) + stand_ins
        rows.append((code(one["name"]), escape(text), escape(one["gpu"])))
    versions = ", ".join(f"{name} {version}" for name, version in trace["sources"].items())
    return [
        f"Versions: {escape(versions)}. The first run is the default.",
        "",
        *table(("Run", "Settings", "GPU"), rows),
    ]


def _libraries(trace: Mapping[str, Any], definitions: Definitions) -> list[str]:
    kernels, chains, defined = Counter[str](), Counter[str](), Counter[str]()
    for kernel in trace["kernels"]:
        source = kernel["source"]
        kernels[source] += 1
        chains[source] += len(kernel["chains"])
        defined[source] += bool(definitions(kernel))
    rows = [(escape(name), *map(str, (kernels[name], chains[name], defined[name]))) for name in sorted(kernels)]
    rows.append(("**all**", *map(str, (kernels.total(), chains.total(), defined.total()))))
    return table(("Library", "Kernels", "Chains", "With a Definition"), rows, "lrrr")


def _kernels(trace: Mapping[str, Any], definitions: Definitions) -> list[str]:
    """The summary: each kernel with its ops, and the lines of the model's code, or else of SGLang's, that call it."""
    rows = []
    for kernel in sorted(trace["kernels"], key=lambda kernel: kernel["source"] == TORCH):
        sites: dict[str, None] = {}
        for chain in kernel["chains"]:
            at = next((frame for frame in chain["frames"] if in_model(frame["file"])), chain["frames"][0])
            sites[_place(trace, at)] = None
        needs = dict.fromkeys(chain["needs"] for chain in kernel["chains"])
        rows.append(
            (
                code(kernel["name"]),
                escape(kernel["source"]),
                escape(kernel["category"]),
                ", ".join(short([code(op) for op in kernel["ops"]], MAX_SITES)),
                escape("always" if "" in needs else "; ".join(short([*needs]))),
                ", ".join(short([*sites], MAX_SITES)),
                _names(kernel, definitions),
            )
        )
    return table(("Kernel", "Library", "Category", "Ops", "When", "Call sites", "Definitions"), rows)


def _names(kernel: Kernel, definitions: Definitions) -> str:
    none = "" if kernel["source"] == TORCH else "none yet"
    return ", ".join(short([code(name) for name in definitions(kernel)])) or none


def _graph(trace: Mapping[str, Any]) -> list[str]:
    lines = [
        "The calls of the forward pass, in execution order. A container names the function that it enters. An op links "
        "to its kernels and lists all its call sites; *plain torch* marks those that run only PyTorch's functions. "
        "Conditions are in bold, those of a single call site in italics; a call without one is always made.",
        "",
    ]
    pending: list[tuple[Mapping[str, Any], int]] = [(child, 0) for child in reversed(trace["graph"]["children"])]
    while pending:
        node, depth = pending.pop()
        lines += [f"{'  ' * depth}{line}" for line in _node(node, trace)]
        pending += [(child, depth + 1) for child in reversed(node["children"])]
    return lines


def _node(node: Mapping[str, Any], trace: Mapping[str, Any]) -> list[str]:
    called = f"{node['name']}()"
    text = "- " + (escape(called) if node["kind"] == "container" else link(called, f"#{_anchor(node['name'])}"))
    if node.get("function"):
        text += f" — {code(node['function'])}"
    if node["annotation"]:
        text += f" **{escape(node['annotation'])}**"
    if node["kind"] == "torch":
        text += " *plain torch*"
    sites = [_site(site, trace) for site in node["call_sites"]]
    return [" ".join([text, *sites])] if len(sites) <= 1 else [text, *(f"  - {site}" for site in sites)]


def _site(site: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    text = _place(trace, site)
    return f"{text} *({escape(site['annotation'])})*" if site.get("annotation") else text


def _place(trace: Mapping[str, Any], frame: Mapping[str, Any]) -> str:
    name = frame["file"].rpartition("/")[2]
    return link(f"{name}:{frame['line']}", _address(trace, frame["file"], frame["line"]))


def _address(trace: Mapping[str, Any], file: str, line: int) -> str:
    """Where a line of a file is on GitHub. Files of kernel libraries without a tag there link to their repository."""
    for distribution, (base, package) in REPOSITORIES.items():
        if file.startswith(package) and distribution in trace["sources"]:
            return f"{base.format(version=trace['sources'][distribution])}{quote(file)}#L{line}"
    base = PLACES[file.partition("/")[0]].format(version=trace["sources"]["sglang"])
    return base.removesuffix("#") if base.endswith("#") else f"{base}{quote(file)}#L{line}"


def _direct(trace: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            code(kernel["name"]),
            escape(kernel["source"]),
            ", ".join(f"{_place(trace, site)} in {code(site['function'])}" for site in kernel["call_sites"]),
        )
        for kernel in trace["direct_kernels"]
    ]
    return table(("Kernel", "Library", "Call sites"), rows) if rows else ["None."]


def _ops(ops: Iterable[Mapping[str, Any]], definitions: Definitions) -> list[str]:
    ops = list(ops)
    rows = [
        (link(f"{op['name']}()", f"#{_anchor(op['name'])}"), str(len(op["kernels"])), _short_kernels(op)) for op in ops
    ]
    lines = [
        "*When* says which of the runs that call the op run the kernel, and in which phases.",
        "",
        *table(("Op", "Kernel count", "Kernels"), rows),
    ]
    for op in ops:
        lines += ["", f'<a id="{_anchor(op["name"])}"></a>', "", f"### {escape(op['name'])}", ""]
        cells = [
            (
                code(kernel["name"]),
                escape(kernel["source"]),
                escape(kernel["condition"]) or "always",
                _names(kernel, definitions),
            )
            for kernel in op["kernels"]
        ]
        lines += table(("Kernel", "Library", "When", "Definitions"), cells)
    return lines


def _short_kernels(op: Mapping[str, Any]) -> str:
    return ", ".join(code(kernel["name"]) for kernel in op["kernels"])


def _outside(trace: Mapping[str, Any], definitions: Definitions) -> list[str]:
    """Ops and kernels outside of the layers: sampling, metadata, the cache."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for op in trace["non_model_ops"]:
        groups[op["group"]].append(op)
    lines: list[str] = []
    for group in sorted(groups):
        rows = [
            (
                code(f"{op['name']}()"),
                ", ".join(short([_place(trace, site) for site in op["call_sites"]], MAX_SITES)),
                ", ".join(f"{code(kernel['name'])}: {_names(kernel, definitions)}" for kernel in op["kernels"]),
            )
            for op in groups[group]
        ]
        lines += [""] * bool(lines) + [f"### {escape(group)}", "", f"Runs {groups[group][0]['when']}.", ""]
        lines += table(("Op", "Call sites", "Kernels: Definitions"), rows)
    return lines or ["None."]


def _sequence(trace: Mapping[str, Any]) -> list[str]:
    lines = [
        "The chains of the default run come first, then those that other runs add, by the settings that they need. "
        "Below each kernel is its backtrace: the line that calls it, then what calls that function.",
    ]
    number = 0
    for group in trace["sequence"]:
        title = escape(group["needs"] or f"Default: {group['configurations'][0]}")
        lines += ["", f"### {title[:1].upper()}{title[1:]}", "", f"In {', '.join(group['configurations'])}:", "", "```"]
        lines += backtraces(group["calls"], number)
        lines.append("```")
        number += len(group["calls"])
    return lines


def backtraces(calls: Sequence[Mapping[str, Any]], first: int = 0) -> Iterator[str]:
    """Calls with their chains, numbered from `first` + 1; callers that an earlier chain has shown are not repeated."""
    shown: dict[tuple[tuple[Any, ...], ...], int] = {}
    for number, call in enumerate(calls, first + 1):
        yield f"{number:4} {call['name']} ({call['source']})  op {call['op']}; {', '.join(call['phases'])}"
        chain = [tuple(frame.values()) for frame in call["frames"]]
        for at, (file, line, function, called) in enumerate(chain):
            rest = tuple(chain[at:])
            if len(rest) > 1 and rest in shown:
                yield f"       ... as in {shown[rest]} from {file}:{line} on"
                break
            shown.setdefault(rest, number)
            yield f"       {file}:{line} {function}{f' -> {called}' if called else ''}"


def _anchor(name: str) -> str:
    return f"op-{slug(name)}"
