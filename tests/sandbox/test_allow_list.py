"""The allow-list names what exists, what references need, and nothing that reaches outside; also in their imports."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from whole_dataset import FIRST

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.format.allow_list import allowed
from flashinfer_trace.format.reference import ReferenceSourceError, check_allowed, load_run

#: dtypes that only newer builds of torch have; the oldest that is supported is 2.8.
NEWER = {"torch.float4_e2m1fn_x2"}


def test_paths_exist() -> None:
    for path in (allowed.PATHS | allowed.DRAWING_PATHS) - NEWER:
        first, *parts = path.split(".")
        functools.reduce(getattr, parts, {"torch": torch, "math": math}[first])


def test_attributes_exist() -> None:
    things = [torch.Tensor, torch.finfo, torch.iinfo, list, dict, int, slice, torch.return_types.topk]
    for name in allowed.ATTRIBUTES | allowed.DRAWING_ATTRIBUTES:
        assert any(hasattr(thing, name) for thing in things), name


def test_nodes_and_builtins_exist() -> None:
    assert all(issubclass(getattr(ast, name), ast.AST) for name in allowed.NODES)
    assert all(hasattr(builtins, name) for name in allowed.BUILTINS)


@pytest.mark.parametrize(
    "name",
    [
        "save",
        "load",
        "from_file",
        "set_",
        "data",
        "data_ptr",
        "numpy",
        "storage",
        "untyped_storage",
        "share_memory_",
        "apply_",
        "map_",
        "type",
        "requires_grad_",
        "register_hook",
        "grad_fn",
        "format",
        "format_map",
        "tofile",
        "tobytes",
        "resize_",
        "as_strided",
        "pin_memory",
        "backward",
        "gi_frame",
        "f_back",
        "open",
        "system",
        "compile",
        "ops",
        "jit",
        "utils",
        "hub",
        "classes",
        "library",
        "multiprocessing",
        "distributed",
        "serialization",
        "seed",
        "manual_seed",
        "set_default_dtype",
        "set_num_threads",
        "use_deterministic_algorithms",
        "set_printoptions",
        "set_grad_enabled",
        "get_rng_state",
        "set_rng_state",
        "Generator",
        "os",
        "sys",
        "builtins",
        "importlib",
        "ctypes",
        "threading",
    ],
)
def test_nothing_that_reaches_outside_is_listed(name: str) -> None:
    assert name not in allowed.ATTRIBUTES | allowed.DRAWING_ATTRIBUTES | allowed.BUILTINS
    assert f"torch.{name}" not in allowed.PATHS | allowed.DRAWING_PATHS


def test_no_listed_path_is_a_module() -> None:
    for path in (allowed.PATHS | allowed.DRAWING_PATHS) - NEWER:
        first, *parts = path.split(".")
        value = functools.reduce(getattr, parts, {"torch": torch, "math": math}[first])
        assert not isinstance(value, type(torch)), path


def test_the_references_of_all_families_are_allowed() -> None:
    """One of each: `validate` applies the allow-list to every Definition."""
    for definition in FIRST.values():
        check_allowed(definition.reference, definition.name, definition.op_type)


FUTURE = {
    "int4 linear": """
def run(x, packed, scales):
    low, high = packed & 0xF, torch.bitwise_right_shift(packed, 4)
    codes = torch.stack([low, high], dim=-1).flatten(1).to(torch.int8) - 8
    return (x.float() @ (codes.float() * scales.repeat_interleave(128, dim=1)).T).to(x.dtype)
""",
    "fp4 dequantization": """
def run(packed, scales):
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    nibbles = torch.stack([packed.view(torch.uint8) & 0xF, packed.view(torch.uint8) >> 4], dim=-1).flatten(-2)
    values = torch.where(nibbles >= 8, -1.0, 1.0) * table[(nibbles & 7).long()]
    return values * scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=-1)
""",
    "fp8 quantizer": """
def run(x):
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale
""",
    "grouped gemm": """
def run(a, b, offsets):
    groups = torch.searchsorted(offsets, torch.arange(a.shape[0], device=a.device), right=True)
    return torch.einsum("mk,mnk->mn", a.float(), b[groups].float()).to(a.dtype)
""",
    "hadamard": """
def run(x):
    n = x.shape[-1]
    y = x.float().reshape(-1, n)
    step = 1
    while step < n:
        a, b = y.view(-1, n // (2 * step), 2, step).unbind(2)
        y = torch.stack([a + b, a - b], dim=2).reshape(-1, n)
        step *= 2
    return (y * math.sqrt(1 / n)).reshape(x.shape).to(x.dtype)
""",
    "tree of speculative tokens": """
def run(parents, tokens, draft):
    accepted = torch.zeros_like(tokens, dtype=torch.bool)
    for depth in range(parents.shape[1]):
        chosen = draft.gather(1, parents[:, depth : depth + 1]).squeeze(1)
        accepted = accepted.scatter(1, parents[:, depth : depth + 1], (chosen == tokens[:, depth]).unsqueeze(1))
    return accepted.cumsum(dim=1).to(torch.int32), accepted.long().argmax(dim=1)
""",
}


@pytest.mark.parametrize("family", FUTURE)
def test_families_to_come_find_what_they_need(family: str) -> None:
    check_allowed(f"import math\nimport torch\n{FUTURE[family]}", family, "quantization")


def test_speculative_samplers_draw() -> None:
    source = "import torch\n\n\ndef run(p):\n    return p.cumsum(-1), torch.empty(3).exponential_()\n"
    check_allowed(source, "sampler", "speculative")
    with pytest.raises(ReferenceSourceError, match=r"only the op_types sampling speculative draw"):
        check_allowed(source, "norm", "rmsnorm")


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("def run(x: torch.Tensor, y: Tensor | None) -> tuple[torch.Tensor, Tensor]:\n    return x, y", False),
        ("def run(x):\n    y: torch.Tensor = 2 * x\n    return y", False),
        (
            "def run(x):\n    return x if isinstance(x, (float, torch.Tensor)) or isinstance(x, Tensor | int) else 0",
            False,
        ),
        ("def run(x):\n    return Tensor(1000)", True),
        ("def run(x):\n    return list(map(torch.Tensor, [1000]))", True),
        ("def run(x):\n    kind = Tensor\n    return kind(1000)", True),
        ("def run(x, kind=torch.Tensor):\n    return kind(1000)", True),
        ("def run(x):\n    return (torch.Tensor,)[0](1000)", True),
        ("def run(x: torch.Tensor(1000)):\n    return x", True),
        ("isinstance = None\n\n\ndef run(x):\n    return isinstance(x, torch.Tensor)", True),
    ],
)
def test_the_type_of_tensors_is_named_and_never_called(body: str, refused: bool) -> None:
    message = r"torch\.Tensor as a value can be called.*in isinstance\(\) only"
    with pytest.raises(ReferenceSourceError, match=message) if refused else contextlib.nullcontext():
        check_allowed(f"import torch\nfrom torch import Tensor\n\n\n{body}\n", "mine", "rmsnorm")


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("def run(x):\n    assert x.ndim == 2, f'{x.ndim} dimensions'\n    return torch.einsum('ij->ji', x)", False),
        ("def run(x: 'torch.Tensor'):\n    return torch.div(x, 2, rounding_mode='floor')", False),
        ("def run(x):\n    return torch.empty(3).exponential_()", False),
        ("def run(x):\n    return x * len(f'{run}')", True),
        ("def run(x):\n    pattern = '%s'\n    return x * len(pattern % run)", True),
        ("def run(x):\n    texts = []\n    texts.append('%s')\n    return x * len(texts[0] % run)", True),
        ("PATTERN = '%s'\n\n\ndef run(x):\n    return x", True),
        ("MODE = 'floor'\n\n\n@torch.no_grad()\ndef run(x):\n    return torch.div(x, 2, rounding_mode=MODE)", False),
        ("def run(x):\n    return x * len(b'%a' % run)", True),
        ("def run(x):\n    return x * sum(set(x.tolist()))", True),
        ("def run(x):\n    return x * {1, 2}.pop()", True),
        ("def run(x):\n    return x * [n for n in {i for i in range(3)}][0]", True),
        ("def run(x):\n    return torch.empty(3)", True),
        ("def run(x):\n    memory = torch.empty(3)\n    return memory.exponential_()", True),
        ("def run(x):\n    make = torch.empty_like\n    return make(x).uniform_()", True),
    ],
)
def test_nothing_differs_from_process_to_process(body: str, refused: bool) -> None:
    message = r"text|f-string|memory of|builtin set|construct Set"
    with pytest.raises(ReferenceSourceError, match=message) if refused else contextlib.nullcontext():
        check_allowed(f"import torch\n\n\n{body}\n", "mine", "sampling")


@pytest.mark.parametrize(
    ("context", "refused"),
    [
        ("torch.no_grad()", False),
        ("torch.device('meta')", True),
        ("x.device", True),
        ("torch.no_grad(), torch.device('cpu')", True),
        ("torch.ones(2)", True),
    ],
)
def test_the_only_context_switches_gradients_off(context: str, refused: bool) -> None:
    bodies = [f"def run(x):\n    with {context}:\n        return torch.ones(2)"]
    if "," not in context:
        bodies.append(f"def run(x):\n    @{context}\n    def made():\n        return torch.ones(2)\n    return made()")
    for body in bodies:
        message = r"can change .* or what torch does \(.*torch\.no_grad\(\) is the only"
        with pytest.raises(ReferenceSourceError, match=message) if refused else contextlib.nullcontext():
            check_allowed(f"import torch\n\n\n{body}\n", "mine", "rmsnorm")


def test_errors_name_construct_line_and_how_to_propose() -> None:
    source = "import torch\n\n\ndef run(x):\n    match x:\n        case _:\n            return torch.fft.fft(x.foo)\n"
    with pytest.raises(ReferenceSourceError) as error:
        check_allowed(source, "mine", "rmsnorm")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("mine:5: the construct Match is not allowed (")
    assert any(line.startswith("mine:7: torch.fft.fft is not allowed (") for line in lines)
    assert any(line.startswith("mine:7: the attribute .foo is not allowed (") for line in lines)
    assert "allow_list/allowed.py lists what is allowed, and says how to propose an addition" in lines[0]


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from flashinfer_trace.format.reference import check_allowed;"
        "check_allowed('def run(): return 0', 'x');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "body",
    [
        # What is kept between calls, and what moves on by itself
        "ROWS = zip(range(9), range(9))\n\n\ndef run(x):\n    for a, _ in ROWS:\n        return x * a",
        "ROWS = enumerate(range(9))\n\n\ndef run(x):\n    for a, _ in ROWS:\n        return x * a\n    return 2 * x",
        "def count(*, n=torch.zeros(1)):\n    n[0] = n[0] + 1\n    return n\n\n\ndef run(x):\n    return x * count()",
        "SUM = torch.ones(1)\n\n\ndef f(t):\n    t += 1\n    return t\n\n\ndef run(x):\n    return x * f(SUM)",
        "SUMS = (torch.zeros(1),)\n\n\ndef run(x):\n    SUMS[0][0] = SUMS[0][0] + 1\n    return x * SUMS[0]",
        "add = lambda n=torch.zeros(1): n.add_(1)\n\n\ndef run(x):\n    return x * add()",
        # Other spellings, and other places for a name
        "def run(x):\n    return x.__\N{FULLWIDTH LATIN SMALL LETTER C}lass__",
        "def run(x):\n    return \N{FULLWIDTH LATIN SMALL LETTER E}val('1')",
        "def run(x):\n    return torch.\N{FULLWIDTH LATIN SMALL LETTER L}oad('a')",
        "def run(x):\n    match x:\n        case torch.Tensor(__class__=found):\n            return found",
        "def run(x):\n    found = [kept := torch for _ in range(2)]\n    return kept.load('a')",
        "def run(x: torch.load('a')):\n    return 2 * x",
        "def run(x):\n    for torch.add in [1]:\n        pass\n    return 2 * x",
        "def run(x):\n    with torch.no_grad() as torch.add:\n        pass\n    return 2 * x",
        "def run(x):\n    return sorted([x], key=torch.load)[0]",
        "def run(x):\n    return torch.nn.functional.torch.load('a')",
        # The values of addresses and of memory
        "def run(x):\n    return x * x._version",
        "def run(x):\n    return x.as_strided((4,), (1,), 4) * 1",
    ],
)
def test_state_and_names_that_come_another_way_are_refused(body: str) -> None:
    with pytest.raises(ReferenceSourceError):
        check_allowed(f"import torch\n\n\n{body}\n", "stranger", "rmsnorm")


LOADED = flashinfer_trace.load("fused_add_rmsnorm_residual_out_h4096")
FAMILY = family_of(LOADED)
TWIN = LOADED.with_const_axes(FAMILY.twin)


class Counting(TorchDispatchMode):
    """Counts the operations that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def inputs() -> dict[str, Any]:
    return FAMILY.inputs_for_axes(TWIN, {"batch_size": 3}, 0, "cpu")


def test_a_reference_runs_under_a_dispatch_mode() -> None:
    given = inputs()
    with Counting() as mode:
        watched = TWIN.run(**given)
    assert mode.count > 5
    assert all(torch.equal(a, b) for a, b in zip(watched, TWIN.run(**given), strict=True))


def test_a_reference_runs_on_fake_tensors() -> None:
    given = inputs()
    with FakeTensorMode() as mode:
        outputs = TWIN.run(**{name: mode.from_tensor(value) for name, value in given.items()})
    assert [type(output).__name__ for output in outputs] == ["FakeTensor"] * 2
    assert [tuple(output.shape) for output in outputs] == [(3, TWIN.const_axes["hidden_size"])] * 2


def test_a_reference_runs_under_vmap_and_grad() -> None:
    run = load_run("import torch\n\ndef run(x):\n    return torch.nn.functional.silu(x) * 2\n", "smooth")
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert torch.equal(torch.func.vmap(run)(x), run(x))
    assert torch.func.grad(lambda value: run(value).sum())(x).shape == x.shape


@pytest.mark.parametrize("name", ["os", "torch.hub", "torch.utils", "torch._C", "flashinfer_trace"])
def test_a_statement_imports_listed_modules_only(name: str) -> None:
    run = load_run(f"import torch\n\ndef run(x):\n    import {name} as found\n    return found\n", "stranger")
    with pytest.raises(ImportError, match=r"a reference may import math torch .* only, not "):
        run(torch.zeros(1))


@pytest.mark.parametrize("call", ["__import__(name, {}, {}, ('hub',), 0)", "list(map(__import__, [name]))[0]"])
def test_a_call_gives_torch_itself_or_nothing(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(f"import torch\n\ndef run(name):\n    return {call}\n", "stranger")
    monkeypatch.delitem(sys.modules, "torch.utils.cpp_extension", raising=False)
    for name in ("torch", "torch.hub", "torch._C"):
        assert name in sys.modules
        assert run(name) is torch
    for name in ("os", "math", "torchvision", "torch.utils.cpp_extension", "flashinfer_trace"):
        with pytest.raises(ImportError, match=f"only, not {name}"):
            run(name)
