"""The kernels of one configuration, in execution order, as text and as JSON."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from tools.kernel_tracing.evaluator.core import Event, Hop
from tools.kernel_tracing.evaluator.serving import Serving, Step
from tools.kernel_tracing.source.sources import SourceTree

PHASES = ("prefill", "decode")
MAX_CALL = 70
#: What a reader might look for in vain.
OMITTED = "not listed: products by cuBLAS and other plain torch calls"


def document(step: Step, sources: SourceTree) -> dict[str, Any]:
    """The kernels of a step.

    Returns: `frames`, each (file, line, function, call) once; per phase, the kernels in the order of their first call.
    A kernel's `chain` lists indexes of frames, its own call first; `undecided` quotes the tests that the configuration
    does not decide (both branches are shown). `not_evaluated` is what could not be evaluated, and how often; what
    depends on it may be missing, or be listed in error.
    """
    frames: dict[tuple[Any, ...], int] = {}
    phases = {phase: [_kernel(event, frames) for event in step.events if event.phase == phase] for phase in PHASES}
    configuration = step.configuration
    return {
        "sources": sources.describe(),
        "configuration": configuration.name,
        "gpu": configuration.gpu,
        "model": configuration.model,
        "settings": configuration.settings,
        "environment": configuration.environment,
        "prompts": list(configuration.prompts),
        "not_evaluated": [{"text": text, "count": count} for text, count in step.problems.items()],
        "frames": [dict(zip(("file", "line", "function", "call"), frame, strict=True)) for frame in frames],
        **phases,
    }


def _kernel(event: Event, frames: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    chain = [frames.setdefault(_frame(hop), len(frames)) for hop in event.chain if _is_traced(hop)]
    undecided = [_text(test.node, test.negated) for hop in event.chain for test in hop.tests if test.open]
    found: dict[str, Any] = {"name": event.name, "source": event.source}
    if event.file:
        found["definition"] = {"file": event.file, "line": event.line}
    found["chain"] = chain
    if undecided:
        found["undecided"] = undecided
    return found


def _is_traced(hop: Hop) -> bool:
    return not hop.file.startswith(Serving.FILE)


def _frame(hop: Hop) -> tuple[Any, ...]:
    call = " ".join(ast.unparse(hop.call).split()) if hop.call is not None else ""
    return (hop.file, hop.line, hop.function, call if len(call) <= MAX_CALL else call[: MAX_CALL - 3] + "...")


def _text(test: ast.expr, negated: bool) -> str:
    text = " ".join(ast.unparse(test).split())
    return f"not ({text})" if negated else text


def text(document: dict[str, Any], chains: bool = True) -> str:
    """The document for the terminal; without `chains`, only each kernel and its call."""
    lines = [f"{document['configuration']} on {document['gpu']}, sglang {document['sources']['sglang']['version']}"]
    lines.append(batch(document["prompts"]))
    for phase in PHASES:
        lines += ["", f"{phase}: {len({kernel['name'] for kernel in document[phase]})} kernels"]
        for number, kernel in enumerate(document[phase], 1):
            lines += _lines(document["frames"], kernel, number, chains)
    lines += ["", *problems(document)] if document["not_evaluated"] else []
    return "\n".join([*lines, "", OMITTED]) + "\n"


def batch(prompts: Sequence[int]) -> str:
    """The requests that were evaluated: what SGLang decides by their number or length holds for them."""
    *first, last = map(str, prompts)
    lengths = f"{', '.join(first)} and {last}" if first else last
    return f"batch: {len(prompts)} requests of {lengths} tokens; another batch may run other kernels"


def problems(document: dict[str, Any]) -> list[str]:
    """What could not be evaluated, one line each."""
    return [f"not evaluated ({one['count']}): {one['text']}" for one in document["not_evaluated"]]


def _lines(frames: list[dict[str, Any]], kernel: dict[str, Any], number: int, chains: bool) -> Iterator[str]:
    yield f"{number:4} {kernel['name']} ({kernel['source']})"
    for position, index in enumerate(kernel["chain"]):
        frame = frames[index]
        if chains or not position:
            yield f"       {frame['file']}:{frame['line']} {frame['function']}"
    for test in kernel.get("undecided", ()):
        yield f"       undecided: {test}"
