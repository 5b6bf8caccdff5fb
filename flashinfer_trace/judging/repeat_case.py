"""Repeats a case that a kernel failed, without flashinfer-trace: python repeat.py [FILE.py[:FUNCTION]] [--device cuda].

It needs torch, safetensors, the modules next to it, and what the kernel imports. Exit status: 0 right, 1 wrong,
whatever is raised.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
CASE = json.loads((HERE / "case.json").read_text(encoding="utf-8"))
#: Rows before those of the case, which push offsets past 32 bits.
FAR: Any = importlib.import_module("far_rows").FarRows(**CASE.get("far", {"inputs": {}, "outputs": {}}))


def tensors(part: str) -> dict[str, torch.Tensor]:
    """The contents of a file of this directory."""
    return load_file(str(HERE / f"{part}.safetensors"))


def inputs(device: str) -> dict[str, Any]:
    """The inputs, with the strides that they had; memory between strided rows is NaN."""
    stored, found = tensors("inputs"), dict[str, Any]()
    for name, one in CASE["inputs"].items():
        if "number" in one:
            found[name] = one["number"]
            continue
        value, stride = stored[name].to(device), one["stride"]
        steps = zip(value.shape, stride, strict=True)
        count = 1 + sum((size - 1) * step for size, step in steps) if value.numel() else 0
        between = torch.full((count,), float("nan") if value.is_floating_point() else 0).to(device, value.dtype)
        found[name] = between.as_strided(value.shape, stride).copy_(value) if 0 not in stride else value
    given: dict[str, Any] = FAR.given(found)
    return given


def request(named: str | None) -> dict[str, Any]:
    """Where the function of the submission is, or that of the file that is named."""
    file, _, function = (named or "").partition(":")
    if file:
        return {"kind": "file", "path": file, "name": function or None}
    if "kernel" not in CASE:
        sys.exit("name the kernel: python repeat.py FILE.py[:FUNCTION]")
    return {**CASE["kernel"], "root": str(HERE), "path": str(HERE / CASE["kernel"]["path"])}


def outputs(named: str | None, device: str) -> dict[str, Any]:
    """The kernel's results: it returns it, or writes it into memory that it is given."""
    given, filled = inputs(device), FAR.filled({name: one.to(device) for name, one in tensors("fill").items()})
    submitted = importlib.import_module("loading").load(request(named), device, list(given), list(filled))
    torch.manual_seed(CASE["call_seed"])
    with torch.no_grad():
        found = submitted(given, dict(filled))
    if found is None:
        found = filled
    elif not isinstance(found, dict):
        values = found if isinstance(found, (tuple, list)) else [found]
        found = dict(zip(filled, map(torch.as_tensor, values), strict=True))
    own: dict[str, Any] = FAR.own(found, FAR.outputs)
    return own


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
    found, expected, bounds = outputs(given.kernel, given.device), tensors("expected"), tensors("bound")
    return int(sum(wrong(name, found[name], value, bounds.get(name)) for name, value in expected.items()) > 0)


if __name__ == "__main__":
    sys.exit(main())
