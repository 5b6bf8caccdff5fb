"""Runs references in a process of their own: time, memory and output are limited, and only tensors cross.

    with ReferenceWorker() as worker:
        outputs = worker.run(definition, inputs, seed)

A process serves one reference, at any sizes: Definitions of a family differ in the constants of their references only.
It is replaced when another reference comes, or when it died, hung or answered nonsense: no reference meets another.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from flashinfer_trace.format.allow_list import allowed
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.reference import check_allowed, substitute_constants
from flashinfer_trace.sandbox import protocol
from flashinfer_trace.sandbox.confine import STRONGEST
from flashinfer_trace.sandbox.fork_server import ForkServer, Service, available
from flashinfer_trace.sandbox.limits import Budget, ReferenceFailed, ReferenceLimits
from flashinfer_trace.sandbox.process import ConfinedProcess

__all__ = ["ReferenceFailed", "ReferenceLimits", "ReferenceWorker", "reference_worker"]

#: Environment variables of references.
ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")

REFERENCES = Service("flashinfer_trace.sandbox.child", ENVIRONMENT.__contains__)

#: Kinds of failure that a worker itself may report.
_REPORTED = ("not-loaded", "raised", "memory", "output", "random", "state", "inputs", "outputs", "memory-shared")


class ReferenceProcess(ConfinedProcess):
    who = "the reference's"
    failure = ReferenceFailed


class ReferenceWorker:
    """Runs references in worker processes. Not for several threads at once.

    Args:
        fork: whether the server is a copy of this process (see `ForkServer`), as it is now.
        waived: rules of the allow-list that references need not meet; none that keeps a reference from doing harm.

    Attributes:
        level: what confines the processes, a key of `confine.LEVELS`; empty before the first call.
    """

    def __init__(self, limits: ReferenceLimits | None = None, fork: bool = False, waived: Collection[str] = ()) -> None:
        self.limits = limits or ReferenceLimits()
        self.level = ""
        self._waived = waived
        self._server = ForkServer(REFERENCES, fork=True) if fork else None
        self._process: ReferenceProcess | None = None
        self._serves: tuple[str, bool] | None = None
        self._started_for: tuple[str, bool] | None = None
        self._budget: Budget | None = None

    def __enter__(self) -> ReferenceWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes; a later `run` starts new ones."""
        self._drop()
        if self._server is not None:
            self._server.close()
            self._server = None

    @contextmanager
    def within(self, budget: Budget | None) -> Iterator[None]:
        """Calls in this block take their time from a budget, and are ended when it is spent."""
        before, self._budget = self._budget, budget
        try:
            yield
        finally:
            self._budget = before

    def run(self, definition: Definition, inputs: Mapping[str, Any], seed: int, uniform: Any = None) -> dict[str, Any]:
        """Outputs of the embedded reference by name: contiguous tensors on the CPU, or Python numbers.

        Args:
            definition: whose reference runs.
            inputs: every declared input: dense tensors on the CPU (strides are kept), or Python numbers.
            seed: of torch's global generator, for operations that draw.
            uniform: a tensor of numbers that torch.rand returns instead, in the shape and dtype that it is asked for.

        Raises:
            ReferenceFailed: it gave no outputs, or did something forbidden. The next call is not affected unless the
                time of a budget is spent (see `within`).
            InputError: the number of outputs is not the declared one.
        """
        given = [inputs[name] for name in definition.inputs] + ([] if uniform is None else [uniform])
        values = [protocol.describe_value(value, strided=True) for value in given]
        process = self._serving(definition)
        draws = definition.op_type in allowed.DRAWING_OP_TYPES
        header = {
            **{"names": list(definition.inputs), "outputs": list(definition.outputs)},
            **{"values": [described for described, _ in values], "seed": seed, "draws": draws},
        }
        budget = self._budget
        try:
            with nullcontext() if budget is None else budget.spending():
                process.begin_request(min(self.limits.seconds, budget.left if budget else math.inf))
                process.send(protocol.in_few_pieces([protocol.pack_header(header), *(data for _, data in values)]))
                outputs = self._outputs(process)
        except BaseException as error:
            # An exception of the reference is a whole answer; after all else, Ctrl-C too, half of one may be under way.
            kind = error.kind if isinstance(error, ReferenceFailed) else ""
            if kind != "raised":
                self._drop()
            if kind == "timed-out" and budget is not None and budget.left <= 0:
                raise budget.spent() from error
            raise
        return definition.name_outputs(tuple(outputs))

    def _serving(self, definition: Definition) -> ReferenceProcess:
        """The process that serves this reference: the one at hand, or a new one."""
        draws = definition.op_type in allowed.DRAWING_OP_TYPES
        serves = (definition.reference, draws)
        if self._process is not None and self._serves == serves:
            return self._process
        try:
            check_allowed(definition.reference, definition.name, definition.op_type, self._waived)
        except ValueError as error:
            self._drop()
            raise ReferenceFailed("refused", str(error)) from error
        any_size = substitute_constants(definition.reference, dict.fromkeys(definition.const_axes, 0), definition.name)
        try:
            if self._process is None or self._started_for != (any_size, draws):
                self._begin()
            assert self._process is not None
            self._process.begin_request(self.limits.seconds)
            request = {"source": definition.reference, "label": definition.name}
            self._process.send([protocol.pack_header(request)])
        except BaseException:
            self._drop()
            raise
        self._serves, self._started_for = serves, (any_size, draws)
        return self._process

    def _begin(self) -> None:
        self._drop()
        if self._server is None or not self._server.alive:  # or it was ended from outside, or by an interrupt
            if self._server is not None:
                self._server.close()
            self._server = ForkServer(REFERENCES)
        self._process = process = ReferenceProcess(self._server)
        limits = self.limits
        told = {"memory_bytes": limits.memory_bytes, "output_bytes": limits.output_bytes, "threads": limits.threads}
        process.begin_request(limits.seconds)
        process.send([protocol.pack_header(told)])
        self.level = str(process.header()["level"])

    def _drop(self) -> None:
        process, self._process, self._serves = self._process, None, None
        if process is not None:
            process.end()

    def _outputs(self, process: ReferenceProcess) -> list[Any]:
        answer = process.header()
        if "failed" in answer:
            raise _reported(answer["failed"])
        with process.failures():
            return protocol.read_values(answer.get("values"), process.read, self.limits.output_bytes)


@contextmanager
def reference_worker(device: str, full: bool, waived: Collection[str] = ()) -> Iterator[ReferenceWorker | None]:
    """The worker for a run of `flashinfer-trace verify`, forked from this process as it is now; none on a GPU.

    A warning on standard error says so where a platform cannot isolate references, or not fully.
    """
    if device != "cpu":
        yield None
        return
    if not available():
        print("warning: this platform cannot isolate references; they run in this process", file=sys.stderr)
        yield None
        return
    limits = ReferenceLimits(600.0, 1 << 40, 64 << 30, os.cpu_count() or 1, 100.0) if full else ReferenceLimits()
    with ReferenceWorker(limits, fork=True, waived=waived) as worker:
        yield worker
        if worker.level not in ("", STRONGEST):
            print(f"warning: references were isolated by {worker.level} only; see SECURITY.md", file=sys.stderr)


def _reported(failed: Any) -> ReferenceFailed:
    """The failure that a worker reports, if it has the form of one."""
    if isinstance(failed, list) and len(failed) == 2 and failed[0] in _REPORTED and isinstance(failed[1], str):
        error = failed[1].partition(":")[0] if failed[0] == "raised" else ""
        return ReferenceFailed(failed[0], f"the reference failed: {failed[1]}", error)
    return ReferenceFailed("protocol", "the reference's process answered a failure of no known form")
