"""The pages of models: the step of each recorded run in order, and the page of each kernel with its callers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashinfer_trace.dataset.coverage import model_coverages, op_table
from flashinfer_trace.kernels import TABLE
from flashinfer_trace.kernels.table import RECORDED
from tools.runtime_tracing.composed_calls import composed
from tools.runtime_tracing.matching import Standing
from tools.runtime_tracing.recording import RecordedCall, Recording
from tools.runtime_tracing.time_coverage import PHASES, unmeasured
from tools.shared.markdown import escape as markdown
from tools.shared.markdown import table as markdown_table
from tools.site.definition_pages import gpu_of, kernel_link
from tools.site.facts import Facts, called_as, last_name, state
from tools.site.html import badge, code, escape, link, table

#: The code of models, which gives an op its name.
_MODELS = "sglang/srt/models/"
#: Frames of a chain, and chains of a kernel, that a page shows.
_FRAMES, _CHAINS = 8, 6
_STATES = {Standing.VERIFIED: "verified", Standing.OTHER_SIZES: "other sizes", Standing.UNKNOWN: "no Definition"}


@dataclass(frozen=True)
class Row:
    """One call of a step of the whole model.

    Attributes:
        op: the function of the model from which it is called.
        layers: how many layers of the model make this call; 0 outside of the layers.
        microseconds: the time of its kernels on the GPU in the whole model, without waits for other GPUs.
        definitions: those that describe it.
    """

    op: str
    layers: int
    call: RecordedCall
    microseconds: float
    standing: Standing
    definitions: tuple[str, ...]


def step(facts: Facts, run: Recording, phase: str) -> list[Row]:
    """The calls of a step that launch kernels, in order; none if the times of the run say nothing."""
    if unmeasured(run):
        return []
    window = run.document.get("model_config", {}).get("sliding_window")
    rows = []
    for call in composed(run.calls):
        exchanged = call.exchanged
        launches = [one for one in call.launches if one not in exchanged]
        if call.phase != phase or not launches:
            continue
        standing, names = facts.evidence.of(call, window)
        layers = sum(run.weight(layer) for layer in {one.layer for one in launches} - {None})
        time = sum(one.microseconds * run.weight(one.layer) for one in launches)
        rows.append(Row(_op(call), layers, call, time, standing, names))
    return rows


def _op(call: RecordedCall) -> str:
    of_model = next((frame for frame in call.stack if frame.file.startswith(_MODELS)), None)
    frame = of_model or (call.stack[0] if call.stack else None)
    return frame.function if frame else "unknown"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def runs_of_model(facts: Facts, model: str) -> list[Recording]:
    """The recorded runs of a model."""
    return [run for run in facts.runs if _plain(str(run.document["model"])) == _plain(model)]


def run_pages(facts: Facts) -> Iterator[tuple[str, str]]:
    """Name and Markdown of the page of each recorded run whose times mean something."""
    for run in facts.runs:
        if steps := [(phase, rows) for phase in reversed(PHASES) if (rows := step(facts, run, phase))]:
            yield run.name, _run_page(facts, run, steps)


def _run_page(facts: Facts, run: Recording, steps: Sequence[tuple[str, Sequence[Row]]]) -> str:
    document = run.document
    siblings = [one for one in runs_of_model(facts, str(document["model"])) if not unmeasured(one)]
    choices = "".join(
        f'<option value="{escape(one.name)}.html"{" selected" * (one is run)}>{escape(one.name)}</option>'
        for one in siblings
    )
    model = next((name for name in facts.models if _plain(name) == _plain(str(document["model"]))), "")
    versions = document["versions"]
    parts = [
        f"# {markdown(_title(facts, run, model))}\n",
        f'<p><label>Server: <select class="go">{choices}</select></label>'
        + "".join(f' <a class="md-button" href="#{phase}">{phase.capitalize()}</a>' for phase, _ in steps)
        + "</p>\n",
        f"SGLang {versions['sglang']} on {document['gpus']} {versions['gpu']}, {len(document['prompts'])} prompts of "
        f"up to {max(document['prompts'])} tokens. The run has few layers with real sizes; times are for the whole "
        "model. Waits for other GPUs do not count.\n",
        f"<p>{link(f'../models/{model}.html', 'All Definitions of this model')}</p>\n" if model else "",
    ]
    for phase, rows in steps:
        total = sum(row.microseconds for row in rows)
        covered = sum(row.microseconds for row in rows if row.standing is Standing.VERIFIED)
        parts += [
            f"## {phase.capitalize()}\n",
            f"One step takes {total / 1000:.1f} ms of GPU time, {covered / total:.1%} of it in verified kernels.\n",
            _shares(rows, total),
            f"### {phase.capitalize()}, in order\n",
            _in_order(facts, rows, total),
        ]
    return "\n".join(part for part in parts if part)


def _title(facts: Facts, run: Recording, model: str) -> str:
    title = facts.models[model]["title"] if model else str(run.document["model"])
    return f"{title}: {' '.join(run.name.split('-')[1:])}"


def _bar(share: float) -> str:
    return f'<span class="bar" style="width:{100 * share:.1f}%"></span>{share:.1%}'


def _shares(rows: Sequence[Row], total: float) -> str:
    """The kernels that take the most time."""
    times: dict[str, float] = defaultdict(float)
    for row in rows:
        times[row.call.kernel] += row.microseconds
    shown = [
        [code(_last(kernel)), f"{time / 1000:.2f}", _bar(time / total)]
        for kernel, time in sorted(times.items(), key=lambda one: -one[1])[:8]
    ]
    return table(["Kernel", "ms", "Share"], shown, right=(1,)) + "\n"


def _last(path: str) -> str:
    parts = path.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 and parts[-2][:1].isupper() else parts[-1]


def _in_order(facts: Facts, rows: Sequence[Row], total: float) -> str:
    shown = []
    for number, row in enumerate(rows, 1):
        names = [link(f"../definitions/{name}.html", code(name)) for name in row.definitions[:2]]
        path = _page_path(facts, row.call)
        shown.append(
            [
                str(number),
                escape(row.op),
                f"{row.layers} x" if row.layers else "",
                kernel_link(facts, path, _last(row.call.kernel)) if path else code(_last(row.call.kernel)),
                ", ".join(names) or f'<span class="none">{_STATES[row.standing]}</span>',
                f"{row.microseconds:,.0f}",
                _bar(row.microseconds / total),
            ]
        )
    return table(["", "Op", "Layers", "Kernel", "Definition", "us", "Share"], shown, right=(0, 2, 5)) + "\n"


def _page_path(facts: Facts, call: RecordedCall) -> str:
    """The kernel of a call that has a page: the one with its last name, in the same library."""
    return facts.kernels_by_last.get((call.kernel.split(".")[0], last_name(call.kernel)), "")


def model_pages(facts: Facts) -> Iterator[tuple[str, str]]:
    """Name and Markdown of the page of each model."""
    ops = ops_of_models(facts.root)
    for name, model in facts.models.items():
        runs = [run for run in runs_of_model(facts, name) if not unmeasured(run)]
        needed = [one for one in facts.dataset if name in facts.catalog.models(one)]
        verified = sum(state(one) == "verified" for one in needed)
        rows = [
            [
                link(f"../definitions/{one.name}.html", code(one.name)),
                badge(state(one)),
                escape(", ".join(size.replace(":", " ").upper() for size in facts.catalog.models(one)[name])),
            ]
            for one in needed
        ]
        steps = [
            [
                link(f"../runs/{run.name}.html", code(run.name)),
                escape(f"{run.document['gpus']} {run.document['versions']['gpu']}"),
                *(f"{sum(row.microseconds for row in step(facts, run, phase)) / 1000:.1f}" for phase in PHASES),
            ]
            for run in runs
        ]
        gaps = model_gaps(facts, runs)
        parts = [
            f"# {markdown(str(model['title']))}\n",
            f"{len(needed)} Definitions describe what this model calls; {verified} of them are verified. "
            f"[Filter them in the catalog](../catalog.html#model={name}).\n",
            "## Its step in order\n\n"
            + (
                table(["Recorded run", "GPU", *(f"{phase.capitalize()}, ms" for phase in PHASES)], steps, (2, 3))
                or "No run of this model has been recorded yet."
            )
            + "\n",
            *(["## Gaps, by time\n", gaps] if gaps else []),
            f"## Ops\n\n{ops[name]}",
            "## Definitions\n",
            table(["Definition", "State", "Sizes (none: all)"], rows) + "\n",
        ]
        yield name, "\n".join(parts)


def ops_of_models(root: Path) -> dict[str, str]:
    """Model -> the Definitions that each of its ops needs, and the ops that have none, with the reason."""
    texts = {}
    for one in model_coverages(root):
        headings, *rows = op_table(one)
        lines = [*markdown_table(headings, rows, "llrrrl"), ""]
        if one.unsupported:
            lines += ["Ops without a Definition:", "", *_reasons(one.unsupported), ""]
        texts[one.model] = "\n".join(lines)
    return texts


def _reasons(unsupported: Mapping[str, str]) -> list[str]:
    """One line for each reason, without the kernels that it ends with, and the ops that it keeps out."""
    ops: dict[str, list[str]] = {}
    for op, reason in unsupported.items():
        ops.setdefault(reason.rpartition(": ")[0], []).append(f"`{op}`")
    return [f"- {', '.join(names)}: {reason}" for reason, names in ops.items()]


def model_gaps(facts: Facts, runs: Sequence[Recording]) -> str:
    """The kernels of a model's steps that no verified Definition covers, by their largest share of a step."""
    largest: dict[str, tuple[float, str]] = {}
    for run in runs:
        for phase in PHASES:
            rows = step(facts, run, phase)
            total = sum(row.microseconds for row in rows)
            times: dict[str, float] = defaultdict(float)
            for row in rows:
                if row.standing is not Standing.VERIFIED:
                    times[row.call.kernel] += row.microseconds
            for kernel, time in times.items():
                largest[kernel] = max(largest.get(kernel, (0.0, "")), (time / total, f"{run.name}, {phase}"))
    shown = [
        [code(_last(kernel)), f"{share:.2%}", escape(where)]
        for kernel, (share, where) in sorted(largest.items(), key=lambda one: -one[1][0])[:20]
    ]
    return table(["Kernel", "Largest share", "In"], shown, right=(1,)) + "\n" if shown else ""


def kernel_pages(facts: Facts) -> Iterator[tuple[str, str]]:
    """Name and Markdown of the page of each kernel."""
    callers: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in facts.runs:
        for call in run.calls:
            path = _page_path(facts, call)
            if path and call.stack:
                chain = tuple(f"{frame.file}:{frame.line} {frame.function}" for frame in call.stack[:_FRAMES])
                if run.name not in callers[path][chain]:
                    callers[path][chain].append(run.name)
    places = {entry.path: entry.places for entry in TABLE}
    described: dict[str, list[str]] = defaultdict(list)
    for one in facts.dataset:
        for path in {*called_as(one), *(entry.path for entry in facts.proofs[one.name])}:
            described[path].append(one.name)
    for path, page in facts.kernels.items():
        parts = [f"---\nsearch:\n  exclude: true\n---\n\n# {markdown(path)}\n"]
        if path in places:
            today = next((one for one in places[path] if one.has(RECORDED.get(one.distribution, "0"))), None)
            parts.append(
                f"In today's stack: {today.distribution} {RECORDED[today.distribution]}.\n"
                if today and today.distribution in RECORDED
                else "Not in today's stack.\n"
            )
        parts += [_defects(facts, path), _proofs(facts, path, described[path]), _chains(callers[path])]
        yield page, "\n".join(part for part in parts if part)


def _defects(facts: Facts, path: str) -> str:
    found = [one for one in facts.findings if path in one.kernels]
    lines = [
        f"- [{markdown(one.title)}](../findings.md#{one.id}), seen in {one.library} {one.version}" for one in found
    ]
    return "## Defects\n\n" + "\n".join(lines) + "\n" if lines else ""


def _proofs(facts: Facts, path: str, names: Sequence[str]) -> str:
    rows = []
    for name in names:
        runs = [entry for entry in facts.proofs[name] if entry.path == path]
        shown = [f"{entry.library} {entry.version} on {gpu_of(entry)}, {entry.run.started_at[:10]}" for entry in runs]
        rows.append([link(f"../definitions/{name}.html", code(name)), escape("; ".join(shown)) or "not run here"])
    return f"## Definitions\n\n{table(['Definition', 'Runs'], rows)}\n" if rows else ""


def _chains(callers: dict[tuple[str, ...], list[str]]) -> str:
    if not callers:
        return ""
    parts = ["## Callers in recorded runs\n"]
    for chain, runs in list(callers.items())[:_CHAINS]:
        named = ", ".join(runs[:4]) + ", ..." * (len(runs) > 4)
        parts.append(f"{escape(named)}:\n\n```text\n" + "\n".join(chain) + "\n```\n")
    if len(callers) > _CHAINS:
        parts.append(f"{len(callers) - _CHAINS} more call chains differ from these; the recordings have them.\n")
    return "\n".join(parts)
