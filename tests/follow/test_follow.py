"""tools.follow on small trees of sources, which no test imports."""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from flashinfer_trace.kernels.stacks import BEFORE, TODAY
from tools.dry_run import many
from tools.dry_run.install import InstallError
from tools.follow import __main__ as command
from tools.follow.__main__ import kernel_pairs, main, markdown, report
from tools.follow.compare import compare
from tools.follow.public import public_kernels
from tools.follow.resolve import Roots
from tools.follow.stacks import Stack, bring_stack
from tools.runtime_tracing.recording import Recording
from tools.source_archives import FetchError

# tomllib is in the standard library since Python 3.11; tomli provides the same for 3.10.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
OLD = {
    "sglang/jit/norm.py": "def norm(x, eps=1e-6): ...\ndef rope(q, k, *, neox): ...\ndef lost(a, b): ...\n",
    "sglang/jit/own.py": "def quant(x, scale): ...\n",
    "sglang/jit/paged.py": "def quantize(x, group): ...\n",
    "sglang/layer.py": "class Norm:\n    def __init__(self, size): ...\n    def forward(self, x): ...\n",
    "sgl_kernel/__init__.py": "from sgl_kernel.gemm import mm, router, tree, wrapped\n",
    "sgl_kernel/gemm.py": "import torch\ndef mm(a, b): return torch.ops.sgl_kernel.mm.default(a, b)\n"
    "def router(x, w): return torch.ops.sgl_kernel.router(x, w)\ndef tree(a): ...\nwrapped = make('wrapped')\n",
}
NEW = {
    "sglang/kernels/ops/norm/norm.py": "def norm(x, eps=1e-6, *, pdl=False): ...\n",
    "sglang/kernels/ops/_private.py": "def norm(x, eps=1e-6): ...\n",
    "sglang/kernels/ops/__init__.py": "for _m, _f in [('norm', 'norm'), ('gate', '_gate')]:\n"
    "    register(KernelSpec(op=f\"new.{_f.lstrip('_')}\", target=f'sglang.kernels.ops.{_m}:{_f}'))\n"
    "register(KernelSpec(op=computed(), target='a:b'))\n",
    "sglang/kernels/ops/names.py": "def rope_v2(q, k, *, neox, scale): ...\ndef router(x, w, out=None): ...\n",
    "sglang/jit/own.py": "from sglang.kernels.quant import quant\n",
    "sglang/kernels/quant.py": "def quant(x, scale, ue8m0=False): ...\n",
    "sglang/layer.py": "class Norm:\n    def forward(self, x): ...\n    def extra(self): ...\n"
    "    def __init__(self, size): ...\n",
    "flashinfer/new.py": "@flashinfer_api(trace=one)\ndef fresh(x): ...\n@flashinfer_api\ndef lost(a, b): ...\n"
    "class Wrapper:\n    @flashinfer_api\n    def run(self): ...\n",
    "sgl_kernel/__init__.py": "from sgl_kernel.gemm import mm, added, wrapped\n"
    "if torch.version.cuda is None:\n    from sgl_kernel.gemm import tree\n",
    "sgl_kernel/gemm.py": "import torch\ndef mm(a, b): return torch.ops.sgl_kernel.mm.default(a, b, True)\n"
    "def added(a): ...\ndef tree(a): ...\ndef wrapped(a): ...\n",
    "sglang/kernels/tree.py": "def tree(a): ...\n",
    "sglang/kernels/paged.py": "def quantize_dsa(x, group): ...\n",
    "sglang/test/paged.py": "def quantize_test(x, group): ...\n",
}
PATHS = {
    "sglang.jit.norm.norm": ("moved", "sglang.kernels.ops.norm.norm.norm", ("added pdl (keyword =False)",)),
    "sglang.jit.norm.rope": ("gone", "", ("resembles sglang.kernels.ops.names.rope_v2",)),
    "sglang.jit.norm.lost": ("gone", "", ("resembles flashinfer.new.lost",)),
    "sglang.jit.own.quant": ("signature", "sglang.jit.own.quant", ("added ue8m0=False",)),
    "sglang.jit.paged.quantize": ("moved", "sglang.kernels.paged.quantize_dsa", ()),
    "sgl_kernel.tree": ("moved", "sglang.kernels.tree.tree", ()),
    "sglang.layer.Norm": ("unchanged", "sglang.layer.Norm", ()),
    "sgl_kernel.mm": ("unchanged", "sgl_kernel.mm", ()),
    "sgl_kernel.router": ("moved", "sglang.kernels.ops.names.router", ("added out=None",)),
    "sgl_kernel.wrapped": ("signature", "sgl_kernel.wrapped", ("the old parameters are compiled code",)),
    "sgl_kernel.never": ("not compared", "", ("not in the base stack",)),
    "torch.ops.sgl_kernel.mm": ("signature", "torch.ops.sgl_kernel.mm", ("without (_, _)", "added (_, _, _)")),
    "torch.ops.sgl_kernel.router": ("gone", "", ()),
    "torch.mm": ("not compared", "", ("its sources are not read",)),
}


def stack(directory: Path, files: dict[str, str], version: str) -> Stack:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    owners = {"sglang": "sglang", "sgl_kernel": "sglang-kernel", "flashinfer": "flashinfer-python"}
    present = {package: owner for package, owner in owners.items() if (directory / package).is_dir()}
    return Stack(dict.fromkeys(present.values(), version), present, Roots(dict.fromkeys(present, directory)))


@pytest.fixture
def stacks(tmp_path: Path) -> tuple[Stack, Stack]:
    return stack(tmp_path / "old", OLD, "1"), stack(tmp_path / "new", NEW, "2")


def test_what_became_of_each_path(stacks):
    found = {one.path: (one.state, one.now, one.changes) for one in compare(*stacks, sorted(PATHS, reverse=True))}
    assert found == PATHS
    assert list(found) == sorted(PATHS)


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("def f(a, b): ...", "def f(b, a): ...", ("another order",)),
        ("def f(a, b=1): ...", "def f(a, b=2): ...", ("b: =1 -> =2",)),
        ("def f(a, b=1): ...", "def f(a, *, b=1): ...", ("b: =1 -> keyword =1",)),
        ("def f(a, b=1): ...", "def f(a, c=2, b=1): ...", ("added c=2 before b",)),
        ("def f(a): ...", "def f(*a, **b): ...", ("without a", "added *a", "added **b")),
        ("def f(a: int): ...", "def f(a: str) -> None: ...", ()),
        ("def f(a): ...", "@overload\ndef f(b): ...\ndef f(a): ...", ()),
        ("class f:\n def run(self, a, b): ...", "class f:\n def run(self, b, a): ...", ("another order",)),
        ("class f:\n def run(self, a): ...", "class f:\n def plan(self): ...", ("without run.", "without run.a")),
    ],
)
def test_changes_of_parameters(tmp_path, before, after, changes):
    old = stack(tmp_path / "old", {"sglang/a.py": before}, "1")
    new = stack(tmp_path / "new", {"sglang/a.py": after}, "2")
    (found,) = compare(old, new, ["sglang.a.f"])
    assert (found.state, found.changes) == ("signature" if changes else "unchanged", changes)


def test_public_kernels(stacks):
    found, unread = public_kernels(stacks[1])
    assert found["new.gate"] == ["sglang.kernels.ops.gate._gate"]
    assert {"new.norm", "flashinfer.new.fresh", "flashinfer.new.Wrapper", "sgl_kernel.added"} <= set(found)
    assert "torch.ops.sgl_kernel.mm" in found
    assert unread == ["sglang/kernels/ops/__init__.py:3"]


def test_the_report_names_new_kernels_and_what_to_run_again(stacks):
    pairs = {path: [("one", path), ("two", path)] for path in PATHS}
    found = report(*stacks, pairs)
    assert {"new.gate", "flashinfer.new.fresh", "sgl_kernel.added"} <= set(found["new_kernels"])
    assert not {"new.norm", "sgl_kernel.mm", "torch.ops.sgl_kernel.mm"} & set(found["new_kernels"])
    again = {(one["definition"], one["kernel"]) for one in found["run_again"]}
    assert ("one", "sgl_kernel.mm") in again and ("two", "sglang.jit.norm.norm") in again
    assert not {("one", path) for path, (state, *_) in PATHS.items() if state in ("gone", "not compared")} & again
    same = report(stacks[0], stacks[0], pairs)
    assert same["run_again"] == [] and same["new_kernels"] == {}
    page = markdown(found)
    assert "| `sgl_kernel.router` | 2 | `sglang.kernels.ops.names.router` | added out=None |" in page
    assert "`sglang/kernels/ops/__init__.py:3`" in page


def test_models_that_call_other_kernels_or_fail_are_named(monkeypatch, stacks):
    outcomes = [
        (many.Outcome("same", "", Recording({}, ())), []),
        (many.Outcome("other", "", Recording({}, ())), ["    - decode triton a.old", "    + decode triton a.new"]),
        (many.Outcome("failed", "Traceback\nValueError: no such server"), []),
    ]
    monkeypatch.setattr(command, "of_the_set", lambda sglang, jobs: outcomes if sglang == "9.9" else [])
    found = {**report(*stacks, {}), "models": command.model_changes("9.9")}
    assert found["models"] == {
        "other": ["- decode triton a.old", "+ decode triton a.new"],
        "failed": ["ValueError: no such server"],
    }
    page = markdown(found)
    assert "2 models call other kernels" in page
    assert "## Other calls of other\n\n- `- decode triton a.old`\n- `+ decode triton a.new`\n" in page


METADATA = """Requires-Dist: sglang-kernel==1
Requires-Dist: flashinfer_python[cu13]==1
Requires-Dist: sgl-deep-gemm==1; extra == "fast"
Requires-Dist: torch==2
"""


def sources(root: Path, name: str, *packages: str, metadata: str = METADATA) -> None:
    for package in packages:
        (root / ".sources-stacks" / name / package).mkdir(parents=True)
    (root / ".sources-stacks" / name / "METADATA").write_text(metadata)


def test_sources_that_are_there_are_used_and_sglang_says_what_belongs_to_it(tmp_path):
    sources(tmp_path, "sglang-1", "sglang")
    sources(tmp_path, "sglang-kernel-1", "sgl_kernel", "triton_kernels")
    with pytest.raises(FetchError, match=r"no sources of flashinfer-python 1; omit --offline"):
        bring_stack({"sglang": "1"}, tmp_path, fetch=False)
    sources(tmp_path, "flashinfer-python-1", "flashinfer")
    found = bring_stack({"sglang": "1"}, tmp_path, fetch=False)
    assert found.versions == {"sglang": "1", "sglang-kernel": "1", "flashinfer-python": "1"}
    assert found.owners["triton_kernels"] == "sglang-kernel"
    assert found.roots.joinpath("flashinfer").parent.name == "flashinfer-python-1"
    sources(tmp_path, "sglang-2", "sglang", metadata="Requires-Dist: sglang-kernel==1\n")
    with pytest.raises(FetchError, match="sglang 2 pins no version of flashinfer-python: choose one"):
        bring_stack({"sglang": "2"}, tmp_path, fetch=False)


class TestFetched:
    """The real `pip download`, from a directory of wheels or from an address where nothing listens."""

    @pytest.fixture(autouse=True)
    def links(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
        (tmp_path / "links").mkdir()

    def wheel(self, tmp_path: Path, stem: str, version: str, files: Mapping[str, str]) -> Path:
        info = f"{stem}-{version}.dist-info"
        path = tmp_path / f"links/{stem}-{version}-cp312-cp312-manylinux_2_34_x86_64.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {stem}\nVersion: {version}\n" + METADATA
            )
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: cp312-cp312-manylinux_2_34_x86_64\n")
            archive.writestr(f"{info}/RECORD", "")
        return path

    def test_a_stack_arrives_and_is_not_fetched_again(self, tmp_path):
        self.wheel(tmp_path, "sglang", "1", {"sglang/a/b.py": "x = 1\n", "sglang/c.so": "", "other/d.py": ""})
        kernels = {"sgl_kernel/__init__.py": "", "deep_gemm/__init__.py": "", "benchmarks/e.py": ""}
        self.wheel(tmp_path, "sglang_kernel", "1", kernels)
        whole = self.wheel(tmp_path, "flashinfer_python", "1", {"flashinfer/__init__.py": ""})
        content = whole.read_bytes()
        whole.unlink()
        with pytest.raises(InstallError, match=r"pip download failed: .*flashinfer-python==1"):
            bring_stack({"sglang": "1"}, tmp_path)
        whole.write_bytes(content)
        found = bring_stack({"sglang": "1"}, tmp_path)
        assert found.packages == ["deep_gemm", "flashinfer", "sgl_kernel", "sglang"]
        shutil.rmtree(tmp_path / "links")
        assert bring_stack({"sglang": "1"}, tmp_path) == replace(found, roots=ANY)
        kept = tmp_path / ".sources-stacks"
        assert sorted(path.name for path in kept.iterdir()) == ["flashinfer-python-1", "sglang-1", "sglang-kernel-1"]
        files = [path.relative_to(kept).as_posix() for path in (kept / "sglang-1").rglob("*") if path.is_file()]
        assert sorted(files) == ["sglang-1/METADATA", "sglang-1/sglang/a/b.py"]

    def test_a_refused_wheel_leaves_nothing(self, tmp_path):
        self.wheel(tmp_path, "sglang", "1", {"sglang/a.py": "", "sglang/../../evil.py": ""})
        with pytest.raises(FetchError, match="leads outside the wheel"):
            bring_stack({"sglang": "1"}, tmp_path)
        assert not list((tmp_path / ".sources-stacks").iterdir())


def test_sources_that_are_not_there_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.follow.__main__.find_root", lambda: tmp_path)
    assert main(["--sglang", "9.9.9", "--offline"]) == 1
    assert "; omit --offline to fetch them" in capsys.readouterr().err


def test_a_kernel_is_compared_where_the_older_stack_has_it():
    old, new = (kernel_pairs(ROOT, versions) for versions in (BEFORE, TODAY))
    assert (
        old["sglang.jit_kernel.activation.silu_and_mul"] == new["sglang.kernels.ops.activation.activation.silu_and_mul"]
    )
    assert "sgl_kernel.qserve_w4a8_per_chn_gemm" in set(old) - set(new)


def test_the_extra_and_its_constraints_are_todays_stack():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    pinned = dict(one.partition(";")[0].split("==") for one in extra if "==" in one)
    constraints = [line for line in (ROOT / "constraints-gpu.txt").read_text().splitlines() if line[:1] != "#"]
    assert pinned == dict(line.split("==") for line in constraints) == TODAY
