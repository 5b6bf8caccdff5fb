"""The GPU that is not there: what is known of tensors, what is not, and that nothing unknown passes in silence.

The fakes change PyTorch for the whole process. One process installs them, and each script runs in a fork of it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORKS = """
    import os, pathlib, sys, traceback
    import torch
    from tools.dry_run import caught, device, findings, kernels, packages, tensors
    device.install(device.GPUS["sm90"], pathlib.Path(sys.argv[1]))
    tensors.other_operator = kernels.of_operator
    tensors.install()
    for path in map(str.strip, sys.stdin):
        if not os.fork():
            with open(f"{path}.out", "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            try:
                exec(compile(pathlib.Path(path).read_text(), path, "exec"))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        print("done", flush=True)
"""
Run = Callable[[str], str]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process on the fake GPU that runs each script whose path it is given."""
    command = [sys.executable, "-c", textwrap.dedent(FORKS), str(tmp_path_factory.mktemp("guard"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as found:
        yield found
        assert found.stdin is not None
        found.stdin.close()


@pytest.fixture
def run(process: subprocess.Popen[str], tmp_path: Path) -> Run:
    """A function that returns the output of a script."""

    def output(script: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script), encoding="utf-8")
        assert process.stdin is not None and process.stdout is not None
        print(path, file=process.stdin, flush=True)
        assert process.stdout.readline() == "done\n"
        return Path(f"{path}.out").read_text(encoding="utf-8")

    return output


def test_small_tensors_have_values_and_large_ones_have_shapes(run):
    out = run(
        """
        lengths = torch.tensor([3, 5], device="cuda")
        print(lengths.device, lengths.cumsum(0).tolist(), torch.cuda.get_device_name())
        weight = torch.nn.Parameter(torch.empty(4096, 1024, dtype=torch.bfloat16, device="cuda"))
        product = torch.nn.functional.linear(torch.zeros(7, 1024, dtype=torch.bfloat16, device="cuda"), weight)
        print(product, product.is_cuda, findings.lines())
        """,
    )
    assert out == "cuda:0 [3, 8] NVIDIA H100 80GB HBM3\nDry(bfloat16[7, 4096]) True []\n"


def test_a_value_that_nobody_computed_is_an_error_and_stays_one_if_it_is_caught(run):
    out = run(
        """
        unwritten = torch.empty(4, dtype=torch.int32, device="cuda")
        unwritten[:2] = 7
        print(unwritten[:2].tolist())
        for read in (lambda: unwritten[2].item(), lambda: torch.empty(1 << 20, device="cuda").sum().item(),
                     lambda: (torch.empty(1 << 20, device="cuda") > 0).nonzero()):
            try:
                read()
            except findings.DryRunError as error:
                print("refused")
        print(len(findings.lines()), {line.partition(":")[0] for line in findings.lines()} == {findings.UNKNOWN_VALUE})
        """,
    )
    assert out == "[7, 7]\nrefused\nrefused\nrefused\n3 True\n"


def test_what_a_kernel_writes_is_not_known_any_more(run):
    out = run(
        """
        kernels.define("dry_test", ["fill(Tensor! out, Tensor lengths) -> ()", "same(Tensor(a!) x) -> Tensor(a!)"])
        out, lengths = torch.zeros(3, dtype=torch.int32, device="cuda"), torch.tensor([1, 2], device="cuda")
        view = out[1:]
        torch.ops.dry_test.fill(out, lengths)
        print(lengths.tolist(), torch.ops.dry_test.same(lengths) is lengths)
        try:
            view.tolist()
        except findings.DryRunError:
            print("refused")
        """,
    )
    assert out == "[1, 2] True\nrefused\n"


def test_a_kernel_with_an_unknown_output_is_an_error_that_names_it(run):
    out = run(
        """
        kernels.define("dry_test", ["new_one(Tensor x, int n) -> Tensor"])
        try:
            torch.ops.dry_test.new_one(torch.zeros(3, device="cuda"), 4)
        except findings.DryRunError as error:
            print(error)
        print(len(findings.lines()))
        """,
    )
    assert "dry_test::new_one(Tensor x, int n) -> Tensor" in out
    assert out.endswith("\n1\n")


def test_a_stand_in_may_be_defined_with_but_not_called(run, tmp_path):
    (tmp_path / "sglang-1.0.dist-info").mkdir()
    (tmp_path / "sglang-1.0.dist-info" / "METADATA").write_text("Requires-Dist: absent-package==2.5\n")
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib.metadata, absent_package\n"
        "class Derived(absent_package.Base): pass\n"
        "constant = absent_package.make(3)\n"
        "@absent_package.decorate\n"
        "def decorated(): return importlib.metadata.version('absent-package')\n"
        "def calls(): return absent_package.compute(1)\n"
    )
    out = run(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        packages.install(pathlib.Path({str(tmp_path)!r}), {{}})
        import sglang
        print(sglang.decorated(), sglang.Derived(), findings.lines())
        sglang.calls()
        print(findings.lines())
        try:
            import absent_package_that_nobody_requires
        except ModuleNotFoundError:
            print("missing")
        """,
    )
    first, second, third = out.splitlines()
    assert first.startswith("2.5 <") and first.endswith(" []")
    assert "a stand-in" in second and "absent_package.compute" in second and "sglang/__init__.py:6:calls" in second
    assert third == "missing"


def test_an_exception_that_sglang_catches_is_found_unless_it_is_reviewed_or_raised_again(run, tmp_path):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import contextlib\n"
        "def falls_back():\n"
        "    try:\n        return {}['a kernel']\n"
        "    except KeyError:\n        return 'slow path'\n"
        "def raises_again():\n"
        "    try:\n        falls_back() and {}['b']\n"
        "    except KeyError as error:\n        raise ValueError('clear') from error\n"
        "def suppresses():\n"
        "    with contextlib.suppress(ZeroDivisionError):\n        1 / 0\n"
        "def reviewed():\n"
        "    try:\n        import aiter\n"
        "    except ImportError:\n        return 'not AMD'\n"
    )
    out = run(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        caught.install(pathlib.Path({str(tmp_path)!r}))
        import sglang
        print(sglang.falls_back(), sglang.suppresses(), sglang.reviewed())
        try:
            sglang.raises_again()
        except ValueError:
            print("raised")
        print(*findings.lines(), sep="\\n")
        """,
    )
    first, second, *lines = out.splitlines()
    assert (first, second) == ("slow path None not AMD", "raised")
    assert len(lines) == 2
    assert "KeyError: 'a kernel', 2 x, at sglang/__init__.py:falls_back" in lines[0]
    assert "ZeroDivisionError: division by zero, 1 x, at sglang/__init__.py:suppresses" in lines[1]
