"""The class of a dumped Definition: the one here whose oracle its reference meets, or another function.

A dumped reference is a stranger's code: it runs in the sandbox, under the allow-list of references from pull requests.
Only the rule of ties is waived: which of equal values comes first, the oracle judges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flashinfer_trace.dataset.dumps import TIES, Dump, DumpError, Match, differences, matches, normalized
from flashinfer_trace.dataset.evidence import Entry, proofs
from flashinfer_trace.dataset.store import find_root
from flashinfer_trace.families import family_of
from flashinfer_trace.format.allow_list import allowed
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.harness.cases import Case
from flashinfer_trace.harness.family import Family, Inputs, Outputs
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.twins import has_real_size, real_cases, twin_key
from flashinfer_trace.judging.grades import JudgedInputs, kinds_of_inputs, standards, unmet
from flashinfer_trace.judging.judge import graded
from flashinfer_trace.judging.more_plans import judged_cases
from flashinfer_trace.judging.twin_sizes import with_own_constants
from flashinfer_trace.judging.verdict import Failure, Verdict
from flashinfer_trace.sandbox.worker import ReferenceFailed, ReferenceWorker
from flashinfer_trace.verdict.compare import Expected, Policy
from flashinfer_trace.verdict.outputs import misfits, numbers_as_tensors
from flashinfer_trace.verdict.tensors import torch_dtype

#: The classes of dumps.
SAME, ANOTHER, NEW_SIZE, UNKNOWN = "same", "another function", "new size", "unknown"
CLASSES = (SAME, NEW_SIZE, ANOTHER, UNKNOWN)
#: Drawn cases that must count, in addition to the corners. A dump may have several candidates.
EXAMPLES = 8
#: Of operations that draw, whose cases have thousands of rows.
FEWER_EXAMPLES = 1
#: Definitions here that one dump is compared with, if it does not tell all sizes.
MOST_CANDIDATES = 4
#: After this many wrong cases no more are run. One of them is reported.
MOST_FAILURES = 12
#: Failures after which nothing that the reference does can be learned.
FINAL = ("refused", "not-loaded", "timed-out", "too-slow", "died", "protocol")
#: Failures that take so long that the reference is compared with no other Definition.
ENDLESS = ("timed-out", "too-slow")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Classified:
    """The classification of one dump.

    Attributes:
        match: the Definition here that it is, or that is closest; None if nothing here is like it.
        reasons: of another function, what differs; of an unknown one, why nothing is known. A line each. An unknown
            one with a match resembles it, and has no reference that would show more.
        verdict: on its reference; None if it did not run.
        runs: the recorded runs that prove the Definition here; of the dumped kernel, if any are.
    """

    dump: Dump
    kind: str
    match: Match | None = None
    reasons: tuple[str, ...] = ()
    verdict: Verdict | None = None
    runs: tuple[Entry, ...] = field(default=(), compare=False)


def classified(dumps: Iterable[Dump], version: str) -> Iterator[Classified]:
    with ReferenceWorker(waived=TIES) as worker:
        references = References(worker)
        for dump in dumps:
            yield classify(dump, version, references)


def classify(dump: Dump, version: str, references: References) -> Classified:
    """The match of a dump: the first Definition here with its contract whose oracle its reference meets."""
    candidates = matches(dump, version)
    if not candidates:
        return Classified(dump, UNKNOWN, reasons=("no family here has this template",))
    closest: Classified | None = None
    for match in candidates[:MOST_CANDIDATES]:
        found = _against(dump, match, references)
        if found.kind != ANOTHER:
            return found
        if found.verdict is not None and found.verdict.failure is not None and found.verdict.failure.kind in ENDLESS:
            return found
        closest = closest or found
        if closest.verdict is None and found.verdict is not None:
            closest = found
    assert closest is not None
    return closest


def _against(dump: Dump, match: Match, references: References) -> Classified:
    contract = differences(dump, match)
    runs = _runs(match)
    if any(line.startswith("input ") for line in contract):
        return Classified(dump, ANOTHER, match, tuple(contract), runs=runs)
    if not dump.definition.reference.strip():
        return Classified(dump, UNKNOWN, match, (*contract, "it has no reference: nothing can be judged"))
    try:
        verdict = references.judge(normalized(dump, match), match.alias.without)
    except DumpError as error:
        return Classified(dump, ANOTHER, match, (*contract, str(error)), runs=runs)
    if verdict.failure is not None or not verdict.passed:
        told = verdict.failure.message if verdict.failure else "no case could have failed"
        return Classified(dump, ANOTHER, match, (*contract, told), verdict, runs)
    if contract:
        return Classified(dump, ANOTHER, match, tuple(contract), verdict, runs)
    return Classified(dump, SAME if match.exists else NEW_SIZE, match, (), verdict, runs)


def _runs(match: Match) -> tuple[Entry, ...]:
    """The runs that prove a Definition; those of the dumped kernel, if it has any."""
    if not match.exists:
        return ()
    every = proofs(match.definition.root or find_root(), match.definition)
    own = tuple(run for run in every if run.kernel_label.partition("[")[0] == match.alias.kernel)
    return own or every


class References:
    """Judges references by the oracles of families. Dumps of one template at several sizes share their small twin."""

    def __init__(self, worker: ReferenceWorker, examples: int = EXAMPLES, seed: int = 0) -> None:
        self._worker, self._examples, self._seed = worker, examples, seed
        self._twins: dict[Hashable, Verdict] = {}

    def judge(self, definition: Definition, without: Collection[str] = ()) -> Verdict:
        """The verdict on a `normalized` reference, as `judge` gives of a kernel, by the smallest case that it fails.

        Outputs that it is `without` are not judged.

        Most cases have the sizes of the family's small twin, which keeps what no shape shows, such as a window; a few
        have the Definition's own, where these take about a second.
        """
        family = with_own_constants(definition, family_of(definition))
        if without:
            kept = {name: spec for name, spec in definition.outputs.items() if name not in without}
            definition, family = dataclasses.replace(definition, outputs=kept), _returning(family, kept)
        job = Job(definition, dataclasses.replace(family, strided=()), None, "cpu")  # dumps do not tell strides
        key = twin_key(job)
        if key not in self._twins:
            self._twins[key] = self._of_twin(job)
        verdict = dataclasses.replace(self._twins[key], definition=definition.name)
        if not has_real_size(definition):
            return verdict
        full = JudgedInputs(dataclasses.replace(job, full=True), job.family.kernels_of(definition))
        if verdict.failure is None:
            real = _Judged(full, self._worker).verdict(0, self._seed)
            return real if real.failure is not None else verdict
        if "AssertionError" in verdict.failure.message:
            return _Judged(full, self._worker).verdict(self._examples, self._seed)  # it has its sizes written into it
        if "has the shape" in verdict.failure.message:
            return _Judged(full, self._worker).verdict(0, self._seed)  # it computes with one of its sizes
        return verdict

    def _of_twin(self, job: Job) -> Verdict:
        kinds, examples = kinds_of_inputs(job), self._examples
        if job.definition.op_type in allowed.DRAWING_OP_TYPES:
            kinds, examples = kinds[:1], min(examples, FEWER_EXAMPLES)
        first = _Judged(kinds[0], self._worker).verdict(examples, self._seed)
        if first.failure is not None and first.failure.kind not in FINAL:
            for judged in kinds[1:]:
                if _Judged(judged, self._worker).verdict(examples, self._seed).passed:
                    first.right_on = judged.limited_to
                    break
        return first


def _returning(family: Family, outputs: Collection[str]) -> Family:
    """The family with these outputs alone."""

    def kept(policies: Mapping[str, Policy]) -> dict[str, Policy]:
        return {name: policy for name, policy in policies.items() if name in outputs}

    def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
        return {name: one for name, one in family.oracle(definition, inputs).items() if name in outputs}

    kernels = tuple(dataclasses.replace(one, compare=kept(one.compare)) for one in family.kernels)
    return dataclasses.replace(family, compare=kept(family.compare), kernels=kernels, oracle=oracle, relations=())


class _Judged:
    def __init__(self, judged: JudgedInputs, worker: ReferenceWorker) -> None:
        self._job, self._worker, self._left = judged.job, worker, standards(judged)
        self._verdict = Verdict.about(judged.job, "the dumped reference", limited_to=judged.limited_to)
        self._other_dtypes: dict[str, None] = {}

    @torch.no_grad()
    def verdict(self, examples: int, seed: int) -> Verdict:
        """The verdict after corners and `examples` drawn cases, or a few real ones if that is 0.

        A wrong case does not end it at once. The smallest one is reported; among wrong values, one that is not finite
        where a number is right comes first.
        """
        verdict, verdict.seed = self._verdict, seed
        failures: list[tuple[float, Failure]] = []
        drawn = 0

        def missing() -> int:
            return examples - drawn

        few = [] if examples else [Case(plan, one, "drawn") for plan, one in real_cases(self._job, seed, corners=True)]
        for case in few or judged_cases(self._job, seed, missing):
            counted = self._left[0].cases
            failure, size = self._case(case)
            if failure is not None:
                failures.append((size, failure))
                if failure.kind in FINAL or len(failures) == MOST_FAILURES:
                    break
            useful = failure is not None or self._left[0].cases > counted
            drawn += useful and case.kind == "drawn"
            verdict.corners += useful and case.kind == "corner"
        pooled = [(one, one.of_all_cases()) for one in self._left]
        together = [failure for _, failure in pooled if failure is not None]
        if not failures and len(together) == len(pooled):
            failures.append((0, together[0]))
        self._left[:] = [one for one, failure in pooled if failure is None] or self._left
        if self._other_dtypes and not failures:
            failures.append((0, Failure("outputs", "; ".join(self._other_dtypes))))
        if failures:
            verdict.failure = min(failures, key=_urgency)[1]
        return graded(verdict, self._left)

    def _case(self, case: Case) -> tuple[Failure | None, float]:
        """How the reference fails one case, if it does, and the number of elements of the case."""
        job = self._job
        inputs, axes = job.family.inputs_and_axes(job.sized, case.plan, case.seed, "cpu")
        size = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
        self._verdict.calls += 1
        if failure := self._failure(case, inputs, axes):
            return failure.at(axes, case.plan, case.seed), size
        self._verdict.reached(axes)
        return None, size

    def _failure(self, case: Case, inputs: Inputs, axes: dict[str, int]) -> Failure | None:
        job = self._job
        try:
            found = self._worker.run(job.sized, inputs, case.call_seed)
            outputs = self._in_declared_dtypes(numbers_as_tensors(job.sized, found, _CPU))
        except ReferenceFailed as failed:
            return Failure(failed.kind, failed.message)
        except InputError as error:
            return Failure("outputs", str(error).removeprefix(f"{job.definition.name}: "))
        if lines := misfits(job.sized, axes, outputs, _CPU):
            return Failure("outputs", "; ".join(lines))
        expected = job.family.expected(job.sized, inputs)
        return unmet(self._left, [one.failure(job, inputs, outputs, expected) for one in self._left])

    def _in_declared_dtypes(self, outputs: Outputs) -> Outputs:
        """The outputs. One in another floating or integer dtype is converted first: its values are judged."""
        named = dict(outputs)
        for name, value in outputs.items():
            wanted = torch_dtype(self._job.sized.outputs[name].dtype)
            if value.dtype != wanted and value.dtype.is_floating_point == wanted.is_floating_point:
                self._other_dtypes[f"output {name} comes out as {value.dtype}, not {wanted}".replace("torch.", "")] = (
                    None
                )
                named[name] = value.to(wanted)
        return named


def _urgency(failed: tuple[float, Failure]) -> tuple[bool, bool, float]:
    """The order of failed cases whose size is known: wrong values, NaN or infinite, small cases."""
    size, failure = failed
    finite = not failure.index or math.isfinite(failure.got) or not math.isfinite(failure.wanted)
    return failure.kind != "values", finite, size


def counts(found: Sequence[Classified]) -> dict[str, tuple[int, int]]:
    return {
        kind: (len(own), sum(one.dump.calls for one in own))
        for kind in CLASSES
        for own in [[one for one in found if one.kind == kind]]
    }
