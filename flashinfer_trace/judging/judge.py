"""`judge`: runs a submission in a process of its own on the cases of a verification, and grades what comes back."""

from __future__ import annotations

import dataclasses
import os
import random
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.dataset import store
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.case import device_of, poisoned_outputs
from flashinfer_trace.harness.cases import Case
from flashinfer_trace.harness.family import Family, Inputs, Kernel
from flashinfer_trace.harness.far import far_rows
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.layouts import FAR, LAYOUT
from flashinfer_trace.judging.diagnosis import diagnosed
from flashinfer_trace.judging.draws import unrandom
from flashinfer_trace.judging.failing_case import KeptCase
from flashinfer_trace.judging.grades import (
    REFERENCE,
    JudgedInputs,
    Standard,
    kinds_of_inputs,
    limited,
    standards,
    unmet,
)
from flashinfer_trace.judging.more_plans import judged_cases, longer_plans
from flashinfer_trace.judging.output_form import filled_outputs, outputs_of, with_unwritten, wrong_form
from flashinfer_trace.judging.process import Answer, Failed, Launch, SubmissionProcess
from flashinfer_trace.judging.server import Server, shared_server
from flashinfer_trace.judging.submission import (
    RunLimits,
    Submission,
    SubmissionError,
    from_callable,
    from_path,
)
from flashinfer_trace.judging.twin_sizes import JudgedTwins, small_by_default, twins_of
from flashinfer_trace.judging.user_inputs import LARGEST_SEED, device_name, whole_number
from flashinfer_trace.judging.verdict import Failure, Grade, Verdict
from flashinfer_trace.sandbox.fork_server import ServerEnded
from flashinfer_trace.verdict.compare import Expected

#: Drawn cases that count, in addition to corners and repeated ones.
EXAMPLES = 20

#: Failures that inputs of another kind may not show; after the others nothing more is run.
OF_INPUTS = ("values", "outputs", "relation", "raised", "died")

#: Failures after which its process can be called again.
LASTING = ("values", "outputs", "relation", "inputs-changed", "raised")

#: Drawn cases that a submission meets after a failure that the machine may have caused.
EXCUSED = 8

#: Bytes of a GPU that the case with offsets beyond 32 bits leaves free.
SPARE = 2 << 30

#: Kinds of submissions whose processes all begin alike: a callable's have the generators of the process that they are
#: copies of, and a known kernel's may have run others.
FRESH = ("file", "package")


def judge(
    kernel: Submission | Callable[..., Any] | str | Path,
    definition: Definition | str,
    *,
    device: str | torch.device = "cpu",
    examples: int = EXAMPLES,
    seed: int | None = None,
    twin: bool | None = None,
    limits: RunLimits | None = None,
    server: Server | None = None,
    keep_going: bool = False,
) -> Verdict:
    """Grades a kernel against a Definition.

    Args:
        kernel: a file (``FILE.py``, ``FILE.py:FUNCTION``), a Solution of flashinfer-bench (``.json``), or, on a CPU, a
            callable, which is trusted: it runs in a copy of this process, with its memory and imports. It takes the
            Definition's inputs and returns its outputs, or takes the outputs as well, to write into; a class of modules
            (``ModelNew``) is made first.
        definition: or its name.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        examples: drawn cases that must count, in addition to the corners; 1 or more.
        seed: of all cases, from 0 to 2**63 - 1; from the system's entropy if there is none.
        twin: whether to judge at the sizes of the family's small twin. By default a twin is judged on a CPU where a
            case at the Definition's own sizes takes more than about a second. That one keeps the constants that no
            shape shows and the features that are summed (see `twin_sizes`); a kernel that raises an error there or
            returns outputs of other shapes is not judged. At no twin is a kernel reference-grade.
        limits: what the submission may take.
        server: where its process is forked from.
        keep_going: run the other cases after a failure, unless its process ended, and count them in `Verdict.tally`.

    Raises:
        SubmissionError: `kernel` is not a submission.
        InputError: this machine lacks the device, `examples` or `seed` is out of range, or `definition` is not one.
        FamilyError: no record covers the Definition.
    """
    examples = whole_number("examples", examples, least=1)
    seed = secrets.randbits(31) if seed is None else whole_number("seed", seed, least=0, most=LARGEST_SEED)
    loaded = store.definition_of(definition)
    submission = as_submission(kernel, device)
    if submission.definition not in ("", loaded.name):
        raise SubmissionError(f"{submission.label} is for {submission.definition}, not for {loaded.name}")
    device = device_name(device)
    small = twin if twin is not None else small_by_default(loaded, device)
    by_default = small and twin is None
    limits = limits or RunLimits()
    family = family_of(loaded)
    twins = twins_of(loaded, family) if by_default else JudgedTwins(family)
    job = Job(loaded, twins.family, None, device, full=not small)
    started = time.perf_counter()
    with served(submission, server) as forks, submission.on_disk() as request:
        options = examples, seed, by_default, keep_going, twins
        verdict = _Judgment(submission, request, forks, limits, *options).verdict(job)
    if by_default and not verdict.cases and verdict.failure is not None and verdict.failure.of_sizes:
        verdict.grade, verdict.code = Grade.NOT_JUDGED, "other-sizes"
    verdict.seconds = time.perf_counter() - started
    verdict.replay = replay_line(submission, verdict, loaded, examples, limits)
    return verdict


def as_submission(kernel: Submission | Callable[..., Any] | str | Path, device: str | torch.device) -> Submission:
    """Makes the `kernel` argument of `judge` a submission."""
    if isinstance(kernel, Submission):
        return kernel
    if isinstance(kernel, (str, Path)):
        return from_path(str(kernel))
    if not callable(kernel):
        raise SubmissionError(f"a {type(kernel).__name__} is not a kernel; give a file or a callable")
    if str(device).partition(":")[0] == "cuda":
        raise SubmissionError(
            "CUDA cannot be forked with a callable of this process; write it to a file and give FILE.py"
        )
    return from_callable(kernel)


@contextmanager
def served(submission: Submission, server: Server | None) -> Iterator[Server]:
    """Where the submission's process is forked from: from this one, if the submission is a callable of it."""
    if submission.kernel is None:
        yield server or shared_server()
        return
    with Server(fork=True, kernel=submission.kernel) as own:
        yield own


@dataclass(frozen=True)
class _Judgment:
    submission: Submission
    request: Mapping[str, Any]
    server: Server
    limits: RunLimits
    examples: int
    seed: int
    by_default: bool
    keep_going: bool
    twins: JudgedTwins

    def verdict(self, job: Job) -> Verdict:
        """The verdict on all valid inputs; of a submission that refuses some, on those that a known kernel takes."""
        known = self._known(job)
        every = [limited(job, [known])] if known else kinds_of_inputs(job)
        first = self._on(every[0], known)
        if known or first.failure is None or first.grade == Grade.NOT_JUDGED or first.failure.kind not in OF_INPUTS:
            return first
        wrong = [first]
        for judged in every[1:]:
            verdict = self._on(judged, None)
            if verdict.passed and not first.failure.refused:
                first.right_on = judged.limited_to
                return first
            verdict.limited_to, verdict.beyond = judged.limited_to, first.failure
            if verdict.passed:
                return verdict
            wrong.append(verdict)
        # That it fails on inputs that no known kernel takes says less than a wrong value on those that they take.
        return next((one for one in wrong if one.failure and one.failure.kind == "values"), first)

    def _known(self, job: Job) -> Kernel | None:
        label = self.request.get("kernel")
        return next((one for one in job.family.kernels if one.label == label), None)

    def _on(self, judged: JudgedInputs, known: Kernel | None) -> Verdict:
        job = judged.job
        cut = {axis: job.definition.const_axes[axis] for axis in self.twins.cut}
        verdict = Verdict.about(job, self.submission.label, by_default=self.by_default, seed=self.seed, cut=cut)
        inputs, outputs = list(job.sized.inputs), list(job.sized.outputs)
        request = {**self.request, **({"definition": job.sized.to_dict()} if known else {})}
        left = standards(judged)
        launch = Launch(self.server, request, inputs, outputs, job.device, self.limits)
        try:
            verdict.kept_apart = self.server.keeps_apart
            with launch.start() as process:
                begin = launch.begin if request["kind"] in FRESH else None
                run = _Run(job, process, known, left, verdict, begin, self.keep_going)
                verdict.failure = (
                    run.all(self.examples, self.seed)
                    or run.longer(self.twins.longer, self.seed)
                    or run.beyond_32_bits(self.seed)
                )
                if verdict.failure is not None:
                    process.end()  # no other kernel is run where one went wrong
        except Failed as failed:
            verdict.failure = Failure.of(failed)
        except ServerEnded as ended:
            verdict.failure = Failure("died", str(ended))
        return graded(verdict, left)


def _free_bytes(device: str) -> int:
    """The free memory of a GPU; no limit is known for a CPU."""
    if torch.device(device).type == "cpu":
        return sys.maxsize
    torch.cuda.empty_cache()  # this process keeps what it has freed
    return int(torch.cuda.mem_get_info(device)[0])


def graded(verdict: Verdict, left: list[Standard]) -> Verdict:
    """The verdict with its grade: of the standards that were never failed, the reference's, or those of kernels."""
    best = left[0]
    verdict.cases, verdict.vacuous = best.cases, best.vacuous
    if verdict.failure is not None:
        verdict.grade = Grade.NOT_JUDGED if verdict.unjudged else Grade.WRONG
        verdict.code = (verdict.unjudged and verdict.failure.excuse) or verdict.failure.kind
        return verdict
    verdict.outputs = best.figures
    kernels = {number: label for one in left for number, label in one.kernels.items()}
    verdict.alike = [kernels[number] for number in sorted(kernels)]
    if best.cases:
        verdict.capped = best.label == REFERENCE and verdict.sizes == "twin"
        verdict.grade = Grade.REFERENCE if best.label == REFERENCE and not verdict.capped else Grade.KERNEL
    return verdict


@dataclass
class _Run:
    """The cases of one kind of inputs. Standards that the submission fails are removed from `left`."""

    job: Job
    process: SubmissionProcess
    known: Kernel | None
    left: list[Standard]
    verdict: Verdict
    begin: Callable[[], SubmissionProcess] | None
    keep_going: bool = False
    kept: bool = False

    @torch.no_grad()
    def all(self, examples: int, seed: int) -> Failure | None:
        """Runs cases until `examples` drawn ones count; the failure that left no standard."""
        verdict = self.verdict
        excused: Failure | None = None
        first: Failure | None = None
        left, failed = EXCUSED, 0

        def missing() -> int:
            return examples + verdict.corners + verdict.repeated - self.left[0].cases - failed

        for case in judged_cases(self.job, seed, missing):
            if excused is not None and case.kind == "corner":
                continue
            failure = self._case(case)
            if failure is not None and not self._excusable(failure):
                if not self.keep_going or failure.kind not in LASTING:
                    return first or failure
                first, failed = first or failure, failed + (case.kind != "corner")
                continue
            excused = excused or failure
            left -= excused is not None
            if excused is not None and (self.left[0].cases or not left):
                return excused
        if failure := first or excused or unmet(self.left, [one.of_all_cases() for one in self.left]):
            return failure
        return self._unrandom(seed)

    @torch.no_grad()
    def longer(self, families: Sequence[Family], seed: int) -> Failure | None:
        """Runs a few cases at the sizes of each of these twins, whose sums are as long as the Definition's."""
        numbers = random.Random(seed)
        for family in () if self.known else families:
            run = dataclasses.replace(self, job=dataclasses.replace(self.job, family=family))
            for plan in longer_plans(run.job):
                case = Case(plan, numbers.getrandbits(31), "corner", numbers.getrandbits(31))
                failure = run._case(case)
                if failure is not None:
                    return failure
            sized, twin = run.job.sized.const_axes, self.verdict.twin
            self.verdict.longer |= {axis: value for axis, value in sized.items() if axis in twin and value > twin[axis]}
        return None

    def beyond_32_bits(self, seed: int) -> Failure | None:
        """Runs the case whose offsets do not fit in 32 bits, last of all, because it may end the process. A kernel that
        runs out of memory or time there is not judged by it: right ones copy their inputs, or loop over rows."""
        job, numbers = self.job, random.Random(seed)
        plan = job.family.far_plan(job.request)
        if plan is None or self.known or not self.left[0].cases:  # `verify` runs it on real kernels
            return None
        case = Case(plan, numbers.getrandbits(31), "corner", numbers.getrandbits(31))
        inputs = job.family.inputs(job.sized, plan, case.seed, job.device)
        needed = far_rows(job.sized).bytes_of(inputs, poisoned_outputs(job.sized, inputs, 0)) + SPARE
        free = _free_bytes(job.device)
        if needed > free:
            self.verdict.far = f"not run: it takes {needed >> 30} GiB of GPU memory, and {free >> 30} are free"
            return None
        failure = self._case(case)
        if failure is not None and (failure.out_of_memory or failure.kind == "timed-out"):
            self.verdict.far, self.verdict.kept = f"not judged: {failure.message}", None
            return None
        self.verdict.far = "wrong" if failure else "right"
        return failure and dataclasses.replace(failure, message=f"with offsets beyond 32 bits: {failure.message}")

    def _excusable(self, failure: Failure) -> bool:
        """Whether it may fail like this although its values are right; not once they were, on any case that counts. So
        drawn cases are looked at after such a failure: corners, the hardest ones, come first."""
        excuse = failure.excuse or (self.verdict.by_default and failure.of_sizes)
        return bool(excuse) and not self.left[0].cases

    def _case(self, case: Case) -> Failure | None:
        job = self.job
        inputs, axes = job.family.inputs_and_axes(job.sized, case.plan, case.seed, job.device)
        counted = self.left[0].cases
        failure = self._called(case, inputs)
        kinds = [f"{name}={value}" for name, value in case.plan.items() if isinstance(value, str)]
        self.verdict.count([case.kind, *kinds], failure is None)
        if failure is not None:
            return failure.at(axes, case.plan, case.seed)
        if self.left[0].cases > counted:
            self._count(case, axes)
        return None

    def _called(self, case: Case, inputs: Inputs) -> Failure | None:
        """Calls the submission on the inputs of a case; the failure if it leaves no standard."""
        job = self.job
        answer: Answer | None = None
        self.verdict.calls += 1
        try:
            poisoned = filled_outputs(job.sized, inputs, case.call_seed)
            far = far_rows(job.sized) if case.plan.get(LAYOUT) == FAR else None
            answer = self.process.call(inputs, poisoned, case.call_seed, far)
        except Failed as failed:
            failure: Failure | None = Failure.of(failed)
        else:
            expected = job.family.expected(job.sized, inputs)
            in_place = self.known.in_place if self.known else ()
            failure = checked(job, answer, inputs, expected, self.left, in_place)
            if failure is not None:
                failure = self._told(failure, answer, poisoned, expected)
        if failure is not None and not self.kept:
            self.verdict.kept = KeptCase.of(job, case, (failure.kind, failure.standard), answer, poisoned)
            self.kept = not self._excusable(failure)
        return failure

    def _told(
        self,
        failure: Failure,
        answer: Answer,
        poisoned: Mapping[str, torch.Tensor],
        expected: Mapping[str, Expected],
    ) -> Failure:
        failure = dataclasses.replace(failure, printed=self.process.printed)
        if failure.kind != "values" or failure.output not in answer.outputs:
            return failure
        name, definition = failure.output, self.job.sized
        (policy,) = (one.policies[name] for one in self.left if one.label == failure.standard)
        told = diagnosed(
            failure, definition.outputs[name], answer.outputs[name], poisoned[name], expected[name], policy
        )
        return with_unwritten(told, answer, poisoned)

    def _count(self, case: Case, axes: Mapping[str, int]) -> None:
        verdict, kv_lens = self.verdict, case.plan.get("kv_lens", [])
        verdict.corners += case.kind == "corner"
        verdict.repeated += case.kind == "repeated"
        q_lens = case.plan.get("q_lens", [1] * len(kv_lens)) if kv_lens else []
        for queries, keys in zip(q_lens, kv_lens, strict=True):
            if (queries, keys) > tuple(verdict.longest.values()):
                verdict.longest = {"queries": queries, "keys": keys}
        verdict.reached(axes)

    def _unrandom(self, seed: int) -> Failure | None:
        if not any(kernel.seeded for kernel in self.job.family.kernels):
            return None
        try:
            return unrandom(self.job, self.process, self.begin, seed, rows=not self.known)
        except Failed as failed:
            return Failure.of(failed)


def checked(
    job: Job,
    answer: Answer,
    inputs: Inputs,
    expected: Mapping[str, Expected],
    left: list[Standard],
    in_place: Collection[str] = (),
) -> Failure | None:
    """The error in the outputs of one call; None if a standard is met. Standards that it fails leave `left`."""
    device = device_of(inputs)
    outputs = outputs_of(job.sized, answer, device)
    axes = job.sized.bind_axes(inputs)
    wrong = _misbehavior(answer, in_place) or wrong_form(job.sized, axes, answer, outputs, device)
    if wrong is not None:
        return wrong
    return unmet(left, [one.failure(job, inputs, outputs, expected) for one in left])


def _misbehavior(answer: Answer, in_place: Collection[str]) -> Failure | None:
    """The failure of a kernel that did something forbidden, even if its outputs are right."""
    changed = [name for name in answer.changed if name not in in_place]
    if changed:
        return Failure("inputs-changed", f"it changed its inputs {changed}; it must leave them as they are")
    if answer.outside:
        return Failure("outside", "it wrote outside of the tensors that it was given")
    if answer.tampered:
        return Failure("tampered", f"it replaced {', '.join(answer.tampered)}")
    return None


def replay_line(
    submission: Submission, verdict: Verdict, definition: Definition, examples: int, limits: RunLimits
) -> str:
    """Repeats a verdict on a submission: a command if it is a file and the command has options for its limits."""
    given = limits.given
    if not submission.file or given is None:
        return _call(submission, verdict, examples, limits)
    function = None if submission.sources else submission.request.get("name")
    file = os.path.relpath(submission.file) + (f":{function}" if function else "")
    file = f"./{file}" if file.startswith("-") else file
    options = f"-d {verdict.definition} --device {verdict.device}"
    if verdict.sizes == "twin":
        options += "" if verdict.by_default else " --twin"
    elif small_by_default(definition, verdict.device):
        options += " --full"
    options += f" --examples {examples} --seed {verdict.seed}"
    options += "".join(f" --{name} {value!r}" for name, value in given.items())
    return f"flashinfer-trace check {_quoted(file)} {options}"


def _quoted(file: str) -> str:
    """A path for a shell: for bash, where it has characters that no terminal shows, or bytes that are none."""
    if file.isprintable():
        return shlex.quote(file)
    plain = frozenset(range(32, 127)) - frozenset(b"\\'")
    return "$'" + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(file)) + "'"


def _call(submission: Submission, verdict: Verdict, examples: int, limits: RunLimits) -> str:
    """A call of `judge`; that of this module, if only this one takes such limits, and then it has to be imported."""
    name = submission.request.get("name")
    kernel = repr(submission.file + (f":{name}" if name and not submission.sources else ""))
    arguments = (
        f"{kernel if submission.file else 'kernel'}, {verdict.definition!r}, device={verdict.device!r}, "
        f"examples={examples}, seed={verdict.seed}, twin={None if verdict.by_default else verdict.sizes == 'twin'}"
    )
    if limits.given is not None:
        more = "".join(f", {name}={value!r}" for name, value in limits.given.items())
        return f"flashinfer_trace.judge({arguments}{more})"
    module = "from flashinfer_trace.judging.{0} import {1}".format
    imports = f"{module('judge', 'judge')}; {module('submission', 'RunLimits')}"
    return f"{imports}; judge({arguments}, limits={limits!r})"
