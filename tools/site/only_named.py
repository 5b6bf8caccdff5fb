"""docs/coverage.md: kernels that tags name but that have not been run for the Definition (`called_as:`), and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flashinfer_trace import Definition
from flashinfer_trace.dataset.evidence import RECORDED_ON, kernels_today
from flashinfer_trace.kernels.names import CALLED
from tools.shared.markdown import code, escape, table

TEXT = """## Kernels that are only named

Kernels that libraries or models call for the function of a Definition, and that its `called_as:` tags name because
nobody ran them for it: how many Definitions name each, and why it did not run. Other kernels prove those of these
Definitions that are verified. A kernel that does not take the sizes of a Definition is not named by it.
"""


def only_named(root: Path, dataset: Iterable[Definition]) -> str:
    """The part of the document about them.

    Args:
        root: the dataset root.
        dataset: its Definitions.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for one in dataset:
        for path in one.tag_values(CALLED):
            counts[why_not_run(root, one, path), path] += 1
    rows = [[code(path), str(count), escape(why)] for (why, path), count in sorted(counts.items())]
    return "\n".join(["", TEXT, *table(["Kernel", "Definitions", "Why it did not run"], rows, "lrl")]) + "\n"


def why_not_run(root: Path, definition: Definition, path: str) -> str:
    """Why a kernel did not run for a Definition that names it; "" if nothing says so."""
    for kernel in kernels_today(root, definition).values():
        if path in kernel.tags:
            here, needed = kernel.runs_on(RECORDED_ON), ".".join(map(str, kernel.min_capability))
            return "awaits a GPU run" if here else f"needs compute capability {needed}"
    return ""
