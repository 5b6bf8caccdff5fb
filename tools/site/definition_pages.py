"""The catalog, and the pages of Definitions and families."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flashinfer_trace import Definition
from flashinfer_trace.dataset.evidence import Entry
from flashinfer_trace.dataset.finding import distinguishing
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import TensorSpec
from flashinfer_trace.kernels.names import KINDS
from tools.mutate.results import read_summaries
from tools.mutate.summary import RESULTS, score
from tools.shared.markdown import escape as markdown
from tools.site.evidence_pages import family_accuracy, reasons
from tools.site.facts import Facts, called_as, seconds_of, state, title_of, waited
from tools.site.html import badge, code, escape, link, scatter, table

_DAGGER = " †"
#: The tags of one namespace that a page explains in one row at most.
_MANY = 8
_ACCURACY = ("Kernel: error / bound", "relative norm", "Reference: error / bound", "relative norm")
SHORT_GPU = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}


def op_of(facts: Facts, op_type: str) -> str:
    """The common name of an op_type."""
    return facts.naming.op_types.get(op_type, op_type.replace("_", " "))


def gpu_of(entry: Entry) -> str:
    """The short name of the GPU of a run."""
    return SHORT_GPU.get(entry.run.gpu, entry.run.gpu.removeprefix("NVIDIA "))


def dtypes_of(definition: Definition) -> list[str]:
    """The dtypes of its floating-point and quantized tensors, or all of them if there are none."""
    found = {one.dtype for one in (*definition.inputs.values(), *definition.outputs.values()) if one.shape}
    return sorted({one for one in found if one.startswith(("float", "bfloat", "int8", "uint8"))} or found)


def catalog_data(facts: Facts) -> str:
    """A script with one row for each Definition, in the order of the fields that assets/catalog.js names."""
    rows = []
    for one in facts.dataset:
        models = facts.catalog.models(one)
        gpus = sorted({gpu_of(entry) for entry in facts.proofs[one.name]})
        more = [*one.tag_values("stage"), *one.tag_values("quantization")]
        more += [f"routing {value}" for value in one.tag_values("routing")]
        title = title_of(one)
        rows.append(
            [one.name, one.op_type, state(one), dtypes_of(one), gpus, models, more, facts.catalog.family(one), title]
        )
    data = {
        "ops": {one: op_of(facts, one) for one in sorted({row.op_type for row in facts.dataset})},
        "rows": _packed(rows),
    }
    return f"const CATALOG = {json.dumps(data, separators=(',', ':'), ensure_ascii=False)};\n"


def _packed(rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Rows whose values are indexes into a table of the column, since few of them differ."""
    columns: list[Any] = []
    for column in zip(*rows, strict=True):
        texts = [json.dumps(value, ensure_ascii=False) for value in column]
        known = list(dict.fromkeys(texts))
        place = {text: number for number, text in enumerate(known)}
        columns.append({"values": [json.loads(text) for text in known], "rows": [place[text] for text in texts]})
    return {"columns": columns}


def definition_page(facts: Facts, one: Definition) -> str:
    """The page of one Definition, as Markdown."""
    family = facts.catalog.family(one)
    of_family = link(f"../families/{family}.html", code(family))
    top = f"{badge(state(one))} {escape(op_of(facts, one.op_type))}, family {of_family}"
    parts = [
        f"---\ntitle: {one.name}\nsearch:\n  exclude: true\n---\n\n# {markdown(one.name)}\n",
        f'<p class="top">{top}</p>\n\n{markdown(one.description)}\n',
        _models(facts, one),
        "## Run this\n",
        f"```console\n$ flashinfer-trace show {one.name}\n$ flashinfer-trace verify {one.name}\n"
        f"$ flashinfer-trace check my_kernel.py -d {one.name}\n```\n",
        f'<p><a class="md-button" href="{one.name}.json" download>Download JSON</a></p>\n',
        "## Axes\n",
        _axes(one),
        "## Inputs and outputs\n",
        _tensors(one),
    ]
    if one.constraints:
        parts += ["## Constraints\n", "".join(f"- `{rule}`\n" for rule in one.constraints)]
    parts += [
        "## Kernels\n",
        _kernels(facts, one),
        _times(facts, one),
        _workloads(facts, one),
        "## Tags\n",
        _tags(facts, one),
        f"## Reference\n\n```python\n{one.reference.rstrip()}\n```\n",
    ]
    return "\n".join(part for part in parts if part)


def _models(facts: Facts, one: Definition) -> str:
    found = facts.catalog.models(one)
    shown = [
        link(f"../models/{model}.html", escape(facts.models[model]["title"] if model in facts.models else model))
        + (f" ({', '.join(size.replace(':', ' ').upper() for size in sizes)})" if sizes else "")
        if model in facts.models
        else escape(model)
        for model, sizes in sorted(found.items())
    ]
    return f"<p>Models: {'; '.join(shown)}</p>\n" if shown else ""


def _axes(one: Definition) -> str:
    rows = [
        [code(name), str(getattr(axis, "value", "") or "variable"), escape(axis.description or "")]
        for name, axis in one.axes.items()
    ]
    return table(["Axis", "Value", "Meaning"], rows) + "\n"


def _tensors(one: Definition) -> str:
    def row(kind: str, name: str, tensor: TensorSpec) -> list[str]:
        shape = "scalar" if tensor.shape is None else f"[{', '.join(tensor.shape)}]"
        return [kind, code(name), code(tensor.dtype), escape(shape), escape(tensor.description or "")]

    rows = [row("input", *each) for each in one.inputs.items()] + [row("output", *each) for each in one.outputs.items()]
    return table(["", "Name", "dtype", "Shape", "Meaning"], rows) + "\n"


def kernel_link(facts: Facts, path: str, shown: str = "") -> str:
    """A link from a page one folder deep to the page of a kernel, if it has one."""
    text = code(shown or path)
    return link(f"../kernels/{facts.kernels[path]}.html", text) if path in facts.kernels else text


def _kernels(facts: Facts, one: Definition) -> str:
    found = facts.proofs[one.name]
    rows = [
        [
            kernel_link(facts, entry.path, entry.kernel_label),
            escape(f"{entry.library} {entry.version}"),
            escape(gpu_of(entry)),
            entry.run.started_at[:10],
            str(entry.cases),
            str(entry.vacuous),
            f"{entry.worst:.3g}",
        ]
        for entry in found
    ]
    text = table(["Kernel", "Version", "GPU", "Date", "Cases", "Vacuous", "Error / bound"], rows, right=(4, 5, 6))
    ran = {entry.path for entry in found}
    others = [path for path in called_as(one) if path not in ran]
    if others:
        text += f"\n\n<p>Not run here: {', '.join(kernel_link(facts, path) for path in others)}</p>"
    return (text or "No kernel has been run yet.") + "\n"


def _series(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float, str]]]:
    """The points of a plot: times in which the GPU did not wait for the processor, and that have a least time."""
    series: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for each in records:
        if each["least_seconds"] and not waited(each):
            point = each["least_seconds"], seconds_of(each), f"{each['definition']}, {each['workload']}"
            series[each["kernel"]].append(point)
    return dict(series)


def _times(facts: Facts, one: Definition) -> str:
    records = facts.times.get(one.name, ())
    if not records:
        return ""
    parts = ["## Times\n"]
    for gpu in sorted({each["environment"]["gpu"] for each in records}):
        of_gpu = [each for each in records if each["environment"]["gpu"] == gpu]
        rows = [
            [
                escape(each["workload"]),
                kernel_link(facts, each["kernel"].partition("[")[0], each["kernel"]),
                f"{seconds_of(each) * 1e6:,.1f}{_DAGGER * waited(each)}",
                f"{each['least_seconds'] / seconds_of(each):.0%}" if each["least_seconds"] and not waited(each) else "",
                escape(f"{each['library']} {each['version']}"),
            ]
            for each in sorted(of_gpu, key=lambda each: (each["workload"], seconds_of(each)))
        ]
        parts.append(f"### {gpu}\n\n{scatter(f'Times of {one.name} on {gpu}', _series(of_gpu))}\n")
        parts.append(table(["Workload", "Kernel", "Time, us", "Roofline", "Version"], rows, right=(2, 3)) + "\n")
    if any(map(waited, records)):
        parts.append(f"{_DAGGER.strip()} The GPU [waited for the processor](../docs/performance.md) in many calls.\n")
    return "\n".join(parts)


def _workloads(facts: Facts, one: Definition) -> str:
    rows = [
        [code(name), escape(", ".join(f"{axis} = {value}" for axis, value in each["axes"].items())), str(each["seed"])]
        for name, each in facts.workloads.get(one.name, {}).items()
    ]
    return f"## Workloads\n\n{table(['Name', 'Axes', 'Seed'], rows, right=(2,))}\n" if rows else ""


def _tags(facts: Facts, one: Definition) -> str:
    by_space: dict[str, list[str]] = defaultdict(list)
    for tag in one.tags:
        space, colon, value = tag.partition(":")
        by_space[space if colon else tag].append(value)
    spaces, flags = facts.naming.namespaces, facts.naming.flags
    rows = [
        [
            code(space),
            ", ".join(code(value) for value in values if value),
            escape(spaces[space].description if space in spaces else flags.get(space, "")),
        ]
        for space, values in by_space.items()
        if space not in KINDS
    ]
    return table(["Tag", "Values", "Meaning"], rows) + "\n"


def family_pages(facts: Facts) -> Iterator[tuple[str, str]]:
    """Name and Markdown of the page of each family."""
    scores = read_summaries(RESULTS)
    differ = distinguishing(facts.dataset)
    for name, members in facts.families.items():
        yield name, _family_page(facts, name, members, scores.get(name), differ)


def _family_page(
    facts: Facts,
    name: str,
    members: Sequence[Definition],
    mutants: Mapping[str, Any] | None,
    differ: Mapping[str, Mapping[str, str]],
) -> str:
    first = members[0]
    family = family_of(first)
    documented = first.reference.split('"""')[1] if first.reference.startswith('"""') else first.description
    rows = [
        [
            link(f"../definitions/{one.name}.html", code(one.name)),
            badge(state(one)),
            escape(", ".join(f"{axis} = {value}" for axis, value in {**one.const_axes, **differ[one.name]}.items())),
        ]
        for one in members
    ]
    runs = [entry for one in members for entry in facts.proofs[one.name]]
    accuracy = [[code(output), code(kernel), *cells] for output, kernel, *cells in family_accuracy(family, runs)]
    records = [each for one in members for each in facts.times.get(one.name, ())]
    plots = [
        f"### {gpu}\n\n{scatter(f'Times of {name} on {gpu}', found)}\n"
        for gpu in sorted({each["environment"]["gpu"] for each in records})
        if (found := _series([each for each in records if each["environment"]["gpu"] == gpu]))
    ]
    parts = [
        f"# {markdown(name)}\n",
        f'<p class="top">{escape(op_of(facts, first.op_type))}</p>\n',
        "## What it computes\n",
        "\n\n".join(markdown(part) for part in documented.split("\n\n")) + "\n",
        "## Axes\n",
        _axes_of_family(members),
        "## Bounds, and why\n",
        "\n".join(reasons(family)) + "\n",
        "## Accuracy\n",
        (table(["Output", "Kernel", "Definitions", *_ACCURACY], accuracy, range(2, 7)) or "No kernel has been run yet.")
        + "\n",
    ]
    if mutants is not None:
        parts.append(
            f"## Mutation score\n\nThe checks reject **{score(mutants):.1%}** of {mutants['mutants']:,} mutants of the "
            "reference ([what that means](../docs/harness_power.md)).\n"
        )
    parts += ["## Times\n", *plots] if plots else []
    parts += ["## Sizes\n", table(["Definition", "State", "Constants"], rows) + "\n"]
    return "\n".join(parts)


def _axes_of_family(members: Sequence[Definition]) -> str:
    first = members[0]
    rows = []
    for name, axis in first.axes.items():
        values = sorted({one.const_axes[name] for one in members if name in one.const_axes})
        shown = "variable" if not values else ", ".join(map(str, values[:_MANY])) + ", ..." * (len(values) > _MANY)
        rows.append([code(name), shown, escape(axis.description or "")])
    return table(["Axis", "Values", "Meaning"], rows) + "\n"
