"""Which kernels each model runs: a page with all models, and their list for the index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.kernel_tracing.configuration.needs import Settings, needs
from tools.kernel_tracing.report.trace_files import settings_of
from tools.kernel_tracing.rules import serving_steps
from tools.shared.markdown import code, escape, link, slug, table

#: The page of all models.
PAGE = "models.md"
#: The phase of what a CUDA graph captures while a server loads and decode replays.
CAPTURED = f"{serving_steps.REPLAYED} (captured)"
#: What a chain can be part of, in this order.
PHASES = ("load", "prefill", "decode", CAPTURED, "extend", "min_p")


@dataclass
class Uses:
    """How one model uses one kernel.

    Attributes:
        kernel: the link to the kernel.
        ops: what the model's code calls on the way to the kernel.
        phases: when it runs.
        configurations: those of the model that call it.
        runs: recorded runs of the model that show it.
    """

    kernel: str
    ops: set[str] = field(default_factory=set)
    phases: set[str] = field(default_factory=set)
    configurations: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)


@dataclass
class Model:
    """A model of the listed configurations.

    Attributes:
        architecture: the class in SGLang's sources.
        settings: the settings of each of its configurations.
        recorded: how many of these were also recorded.
        kernels: how it uses each of its kernels, in the order of the trace.
    """

    name: str
    architecture: str
    settings: dict[str, Settings] = field(default_factory=dict)
    recorded: int = 0
    kernels: list[Uses] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """Its place on the page."""
        return f"model-{slug(self.name)}"


def models(trace: Mapping[str, Any], anchors: Sequence[str]) -> list[Model]:
    """The models of a trace, by name.

    Args:
        trace: a document, as `trace_files.load_traces` returns it.
        anchors: for each of its kernels, the place on the page of its category.
    """
    found: dict[str, Model] = {}
    of: dict[str, Model] = {}
    for one in trace["configurations"]:
        model = found.setdefault(one["model"], Model(one["model"], one["architecture"]))
        model.settings[one["name"]] = settings_of(one)
        model.recorded += one["recorded"]
        of[one["name"]] = model
    for kernel, anchor in zip(trace["kernels"], anchors, strict=True):
        address = link(kernel["name"], f"{slug(kernel['category'])}.md#{anchor}")
        uses: dict[str, Uses] = {}
        for chain in kernel["chains"]:
            for name, phases in chain["configurations"].items():
                one = uses.setdefault(of[name].name, Uses(address))
                one.ops.add(chain["op"])
                one.phases.update(shown_phases(chain, phases))
                one.configurations.add(name)
                if name in chain["seen"]:
                    one.runs.add(name)
        for name, one in uses.items():
            found[name].kernels.append(one)
    return sorted(found.values(), key=lambda model: model.name)


def shown_phases(chain: Mapping[str, Any], phases: Sequence[str]) -> list[str]:
    """The phases of a chain; where a CUDA graph is captured, that which replays it instead of `load`."""
    captured = any(frame["function"] == serving_steps.CAPTURE for frame in chain["frames"])
    return [CAPTURED if captured and phase == "load" else phase for phase in phases]


def section(found: Sequence[Model]) -> list[str]:
    """The list of models for the index."""
    rows = [
        (
            link(model.name, f"{PAGE}#{model.anchor}"),
            code(model.architecture),
            str(len(model.settings)),
            str(model.recorded or ""),
            str(len(model.kernels)),
            str(sum(bool(one.runs) for one in model.kernels) or ""),
        )
        for model in found
    ]
    return [
        "## By model",
        "",
        f"[{PAGE}]({PAGE}) lists the kernels of each model. *Seen* counts those that its recorded runs show.",
        "",
        *table(("Model", "Architecture", "Configurations", "Recorded", "Kernels", "Seen"), rows),
    ]


def page(found: Sequence[Model], version: str, head: Sequence[str]) -> str:
    """The page of all models.

    Args:
        version: the release of SGLang.
        head: what begins the page, below its title.
    """
    lines = [
        f"# Kernels by model: SGLang {escape(version)}",
        "",
        *head,
        "A kernel is listed if a configuration of the model calls it. *When* says which of the model's configurations "
        "do. *Seen* counts the recorded runs of the model that show the kernel. The link leads to its chains.",
    ]
    for model in found:
        lines += ["", f'<a id="{model.anchor}"></a>', "", f"## {escape(model.name)}", "", _facts(model), ""]
        lines += table(("Kernel", "Ops", "Phases", "When", "Seen"), _rows(model))
    return "\n".join(lines) + "\n"


def _facts(model: Model) -> str:
    configurations = f"{len(model.settings)} configuration{'s' * (len(model.settings) != 1)}"
    return f"{code(model.architecture)}: {configurations}, {model.recorded or 'none'} of them recorded."


def _rows(model: Model) -> Iterator[tuple[str, ...]]:
    for one in model.kernels:
        yield (
            one.kernel,
            ", ".join(code(op) for op in sorted(one.ops)),
            ", ".join(phase for phase in PHASES if phase in one.phases),
            escape(needs(one.configurations, model.settings)) or "always",
            str(len(one.runs) or ""),
        )
