"""Repeats a case that a kernel failed, without flashinfer-trace: python repeat.py [FILE.py[:FUNCTION]] [--device cuda].

It needs torch, safetensors and what the kernel imports. Exit status: 0 right, 1 wrong, whatever is raised.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
CASE = json.loads((HERE / "case.json").read_text(encoding="utf-8"))
USUAL_NAMES = ("run", "ModelNew", "kernel")
#: Rows before those of the case, which push offsets past 32 bits, and the numbers to add to places among them.
FAR = CASE.get("far", {key: {} for key in ("inputs", "outputs", "places", "offsets", "requests")})


def tensors(part: str) -> dict[str, torch.Tensor]:
    """The contents of a file of this directory."""
    return load_file(str(HERE / f"{part}.safetensors"))


def inputs(device: str) -> dict[str, Any]:
    """The inputs, with the strides that they had; memory between strided rows is NaN."""
    stored, found = tensors("inputs"), {}
    for name, one in CASE["inputs"].items():
        if "number" in one:
            found[name] = one["number"]
            continue
        value, stride = stored[name], one["stride"]
        steps = zip(value.shape, stride, strict=True)
        count = 1 + sum((size - 1) * step for size, step in steps) if value.numel() else 0
        whole = torch.zeros(count, dtype=value.dtype)
        if value.is_floating_point():
            whole = torch.full((count,), float("nan")).to(value.dtype)
        strided = whole.to(device).as_strided(value.shape, stride)
        found[name] = strided.copy_(value) if 0 not in stride else value.to(device)
        one = found[name]
        if name in FAR["places"]:
            found[name] = torch.where(one >= 0, one + FAR["places"][name], one)
        elif name in FAR["offsets"]:
            found[name] = torch.cat([one[:1], one[1:] + FAR["offsets"][name]])
        elif name in FAR["requests"]:
            found[name] = torch.cat([one[:1], one + FAR["requests"][name]])
    return {name: behind(one, FAR["inputs"].get(name, 0)) for name, one in found.items()}


def behind(value: Any, rows: int) -> Any:
    """A tensor whose last rows are those of `value`, behind so many others."""
    if not rows:
        return value
    whole = torch.empty((rows + len(value), *value.shape[1:]), dtype=value.dtype, device=value.device)
    whole[rows:] = value
    whole[:rows] = value[:1]
    return whole


def kernel(named: str | None) -> Any:
    """The function of the submission, or of the file that is named."""
    file, _, function = (named or "").partition(":")
    if not file and "kernel" not in CASE:
        sys.exit("name the kernel: python repeat.py FILE.py[:FUNCTION]")
    path = Path(file) if file else HERE / CASE["kernel"]
    function = function or ("" if file else CASE.get("function") or "")
    if not file and CASE["package"]:
        sys.path.insert(0, str(HERE))
        module = importlib.import_module(".".join(Path(CASE["kernel"]).with_suffix("").parts))
    else:
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location("repeated", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["repeated"] = module
        spec.loader.exec_module(module)
    own = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
    name = function or next((one for one in USUAL_NAMES if hasattr(module, one)), own[0] if own else "run")
    found = getattr(module, name)
    if inspect.isclass(found):
        found = found(*(module.get_init_inputs() if hasattr(module, "get_init_inputs") else []))
    return found


def call(function: Any, given: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    """What the kernel computes, by output: it returns it, or writes it into memory that it is given."""
    names = list(CASE["outputs"])
    if hasattr(function, "plan") and hasattr(function, "run"):
        function.plan(**{name: given[name] for name in inspect.signature(function.plan).parameters})
        function = function.run
    filled = {name: behind(one.to(device), FAR["outputs"].get(name, 0)) for name, one in tensors("fill").items()}
    if isinstance(function, torch.nn.Module):
        function = function.to(device).eval()
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind.value in (0, 1, 3)]
    writes = CASE.get("destination")
    if writes is None:
        writes = set(names) <= set(parameters) or len(needed) == len(given) + len(names)
    passed = {**given, **(filled if writes else {})}
    torch.manual_seed(CASE["call_seed"])
    with torch.no_grad():
        by_name = set(passed) <= set(parameters)
        returned = function(**passed) if by_name else function(*passed.values())
    if writes:
        return filled
    if isinstance(returned, dict):
        return returned
    values = returned if isinstance(returned, (tuple, list)) else [returned]
    return dict(zip(names, map(torch.as_tensor, values), strict=True))


def wrong(name: str, got: torch.Tensor, value: torch.Tensor, bound: torch.Tensor | None) -> int:
    """How many elements of an output are wrong; it prints the worst one."""
    if got.shape != value.shape:
        print(f"{name}: shape {list(got.shape)}, expected {list(value.shape)}")
        return 1
    if bound is None:
        print(f"{name}: its elements are not judged one by one; compare got with expected yourself")
        return 0
    got, value = got.cpu().double(), value.double()
    error = (got - value).abs()
    beyond = ~((error <= bound) | (got == value) | (got.isnan() & value.isnan()))
    if not beyond.any():
        print(f"{name}: right")
        return 0
    ratio = torch.where(beyond, torch.nan_to_num(error / bound, nan=float("inf")), 0.0).flatten()
    at = int(ratio.argmax())
    own = got.flatten()[at].item(), value.flatten()[at].item(), bound.expand_as(value).flatten()[at].item()
    print(
        f"{name}: {int(beyond.sum())} of {beyond.numel()} elements are wrong; element {at} of the flat tensor is worst"
    )
    print("  got {:.9g}, expected {:.9g}, bound {:.3g}".format(*own))
    return int(beyond.sum())


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kernel", nargs="?")
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    found = call(kernel(given.kernel), inputs(given.device), given.device)
    expected, bounds = tensors("expected"), tensors("bound")
    found = {name: one[FAR["outputs"].get(name, 0) :] if one.ndim else one for name, one in found.items()}
    return int(sum(wrong(name, found[name], value, bounds.get(name)) for name, value in expected.items()) > 0)


if __name__ == "__main__":
    sys.exit(main())
