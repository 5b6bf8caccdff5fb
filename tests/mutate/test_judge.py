"""Mutants are judged as the harness judges: weak records accept them, limits stop them, runs go on where they ended."""

from __future__ import annotations

import dataclasses
import functools
import json

from flashinfer_trace.verdict.compare import Comparison
from tools.mutate import runner
from tools.mutate.cases import Bench, bench_of, known_families, representative
from tools.mutate.judge import judge
from tools.mutate.mutants import mutants
from tools.mutate.summary import family_summary, score


@functools.cache
def rmsnorm_bench() -> Bench:
    family = known_families()["rmsnorm"]
    return bench_of(family, representative(family))


class AcceptsAnything:
    reason = "a planted weakness"

    def compare(self, actual, expected):
        return Comparison(0.0)

    def zero(self, expected, dtype):
        return expected.value.to(dtype)


def test_the_reference_itself_is_accepted_and_a_wrong_one_is_rejected():
    bench = rmsnorm_bench()
    verdict = judge(bench, bench.definition.reference)
    assert not verdict.rejected and verdict.identical and verdict.cases == len(bench.cases)
    wrong = bench.definition.reference.replace("rsqrt", "sqrt")
    assert judge(bench, wrong).how == "compared"


def test_what_is_wrong_at_real_size_only_is_rejected_there():
    bench = rmsnorm_bench()
    source = bench.definition.reference.replace("vector_norm(x,", "vector_norm(x[:, :4096],")
    assert source != bench.definition.reference
    verdict = judge(bench, source)
    assert verdict.how == "compared"
    assert bench.cases[verdict.cases - 1].size == "real"


def test_a_deleted_assert_is_rejected_because_a_wrong_size_is_accepted():
    bench = rmsnorm_bench()
    lines = bench.definition.reference.splitlines()
    source = "\n".join(line for line in lines if "assert hidden_states" not in line)
    assert judge(bench, source).how == "accepted a wrong size"


def test_a_record_that_accepts_anything_scores_nothing():
    bench = rmsnorm_bench()
    weak = dataclasses.replace(bench.family, compare={"output": AcceptsAnything()})
    bench = dataclasses.replace(bench, family=weak, cases=bench.cases[:4])
    found = [m for m in mutants(bench.definition, weak) if m.operator in ("arithmetic", "number")]
    verdicts = [judge(bench, mutant.source) for mutant in found]
    answered = [
        (m, v) for m, v in zip(found, verdicts, strict=True) if v.how not in ("raised", "accepted a wrong size")
    ]
    assert len(answered) >= 5
    summary = family_summary("weak", [m for m, _ in answered], [v for _, v in answered], [], real=True)
    assert score(summary) == 0.0
    assert len(summary["survivors"]) == len(answered)


ENDLESS = "import torch\ndef run(*inputs):\n    for i in range(10**12):\n        pass\n"
GREEDY = "import torch\ndef run(*inputs):\n    return torch.ones(10**11).sum()\n"


def small_bench(family: str, more: bool) -> Bench:
    bench = rmsnorm_bench()
    return dataclasses.replace(bench, cases=bench.cases[:6])


def test_endless_and_greedy_mutants_are_stopped_and_others_are_judged_after_them():
    reference = representative(known_families()["rmsnorm"]).reference
    tasks = [("rmsnorm", source, "") for source in (reference, ENDLESS, GREEDY, reference)]
    verdicts = dict(runner.judge_all(tasks, processes=1, seconds=12, gibibytes=4, load=small_bench))
    assert [verdicts[n].how for n in range(4)] == ["", "time", "raised", ""]
    assert "memory" in verdicts[2].detail.lower()


def test_the_checks_of_equivalents_say_where_a_mutant_differs():
    reference = representative(known_families()["rmsnorm"]).reference
    doubled = reference.replace("EPS = 1e-6", "EPS = 1.0")
    reordered = reference.replace("mean_square + EPS", "EPS + mean_square")
    assert len({reference, doubled, reordered}) == 3
    tasks = [("rmsnorm", source, check) for source in (reordered, doubled) for check in ("bits", "rounding")]
    lines = dict(runner.judge_all(tasks, processes=1, load=small_bench))
    assert lines[0] == lines[1] == ""
    assert "differ" in lines[2]


def test_verdicts_are_remembered_and_a_torn_line_is_judged_again(tmp_path):
    bench = rmsnorm_bench()
    verdict = judge(dataclasses.replace(bench, cases=bench.cases[:2]), bench.definition.reference)
    store = runner.Store(tmp_path / "cache", "rmsnorm", "0" * 64)
    store.add("one", verdict)
    with store.path.open("a") as stream:
        stream.write(json.dumps({"source": "two", **verdict.to_dict()})[:-5])
    again = runner.Store(tmp_path / "cache", "rmsnorm", "0" * 64)
    assert again.known == {"one": verdict}
    again.add("three", verdict)
    assert runner.Store(tmp_path / "cache", "rmsnorm", "0" * 64).known.keys() == {"one", "three"}
    assert runner.Store(tmp_path / "cache", "rmsnorm", "1" * 64).known == {}


def test_the_digest_follows_the_contract_and_the_family():
    families = known_families()
    rmsnorm, gemm = families["rmsnorm"], families["gemm"]
    definition = representative(rmsnorm)
    assert runner.code_digest(rmsnorm, definition) == runner.code_digest(rmsnorm, definition)
    other = dataclasses.replace(definition, constraints=("batch_size > 0",))
    assert runner.code_digest(rmsnorm, other) != runner.code_digest(rmsnorm, definition)
    assert runner.code_digest(gemm, definition) != runner.code_digest(rmsnorm, definition)
    changed = dataclasses.replace(rmsnorm, oracle=gemm.oracle)
    assert runner.code_digest(changed, definition) != runner.code_digest(rmsnorm, definition)
