"""Probes of the defects of real kernels, which findings/kernels.json describes.

A probe calls the kernel with the smallest input. It returns whether the kernel does what is right, which includes
raising an error instead of giving wrong results. `tests/test_kernel_findings.py` runs each in a process of its own:
`python kernel_findings.py NAME` prints RIGHT, WRONG, or ABSENT and why the installed release lacks the kernel. Without
a name, it runs all of them and prints findings/probes.json. The result of each goes to stderr as it comes, and then the
findings that must change. To report another defect, add a `Probe` and describe it there.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import attention_findings
import flashinfer_findings
import moe_findings
import sglang_findings
import sparse_findings
import torch
from moe_findings import raises

from flashinfer_trace.families.gemm.int8 import unpacked

if TYPE_CHECKING:
    from tools.shared.findings import Finding

#: FlashInfer compiles some kernels when they are first called.
SECONDS = 300
#: Probes that run at once.
JOBS = 12
#: The packages of the kernels: what they lack is of another release, what others lack is a defect of the machine.
PACKAGES = ("flashinfer", "sgl_kernel", "sglang")


@dataclass(frozen=True)
class Probe:
    """A probe that shows one defect.

    Attributes:
        right: () -> whether the kernel does what is right.
        kills: whether the process may end, or the CUDA context be lost, instead.
    """

    right: Callable[[], bool]
    kills: bool = False


def codes_of(name: str) -> tuple[torch.dtype, tuple[float, float]]:
    """The dtype of the codes of a quantizer per group, and their limits."""
    return (torch.int8, (-128.0, 127.0)) if name.endswith("int8") else (torch.float8_e4m3fn, (-448.0, 448.0))


def per_token_zeros() -> bool:
    import sgl_kernel

    x = torch.zeros(1, 512, dtype=torch.bfloat16, device="cuda")
    codes = torch.empty(1, 512, dtype=torch.float8_e4m3fn, device="cuda")
    sgl_kernel.sgl_per_token_quant_fp8(x, codes, torch.empty(1, device="cuda"))
    return bool((codes.float() == 0).all())


def fused_silu_ignored(name: str) -> bool:
    import sgl_kernel

    x = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    dtype, limits = codes_of(name)
    # Room for a kernel that takes all 256 columns for one matrix.
    memory = torch.zeros(8, 128, device="cuda").to(dtype)
    scales = torch.zeros(8, 1, device="cuda")
    quantize = functools.partial(getattr(sgl_kernel, name), x, memory[:4], scales[:4], 128, 1e-10, *limits)
    if raises(lambda: quantize(fuse_silu_and_mul=True, enable_v2=True)):
        return True
    gate, up = x.float().chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    return bool(((memory[:4].float() * scales[:4] - wanted).norm() < 0.1 * wanted.norm()).item())


def bmm_row_major() -> bool:
    import sgl_kernel

    a, b = (torch.randn(1, 64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(1, device="cuda")
    products: list[torch.Tensor] = []
    if raises(lambda: products.append(sgl_kernel.bmm_fp8(a, b, one, one, torch.bfloat16))):
        return True
    wanted = a.float() @ b.float()
    return bool(((products[0].float() - wanted).norm() < 0.02 * wanted.norm()).item())


def qserve_per_channel(n: int, k: int) -> bool:
    """Random codes, all scales 1 and all zeros 0. The memory past the operands is also random, and a fault if read."""
    import sgl_kernel

    a = torch.randint(-8, 9, (128, k), dtype=torch.int8, device="cuda")[:1]
    packed = torch.randint(-128, 128, (4 * n, k // 2), dtype=torch.int8, device="cuda")[:n]
    ones, zeros = (torch.full((n,), value, dtype=torch.float16, device="cuda") for value in (1.0, 0.0))
    token = torch.ones(1, dtype=torch.float16, device="cuda")
    out = torch.full((1, n), torch.nan, dtype=torch.float16, device="cuda")
    if raises(lambda: sgl_kernel.qserve_w4a8_per_chn_gemm(a, packed, ones, token, zeros, token, out)):
        return True
    wanted = a.double() @ unpacked(packed).double().T
    return bool(((out - wanted).abs() <= 2**-11 * wanted.abs()).all())


def qserve_per_group(n: int) -> bool:
    """Activations, weights and scales of 1: every sum is 128."""
    import sgl_kernel

    a = torch.ones(1, 128, dtype=torch.int8, device="cuda")
    packed = torch.full((n, 64), 0x11, dtype=torch.int8, device="cuda")
    scales = torch.ones(1, n, dtype=torch.int8, device="cuda")
    w_scales = torch.ones(n, dtype=torch.float16, device="cuda")
    token = torch.ones(1, dtype=torch.float16, device="cuda")
    out = torch.full((1, n), torch.nan, dtype=torch.float16, device="cuda")
    zeros = torch.zeros_like(scales)
    if raises(lambda: sgl_kernel.qserve_w4a8_per_group_gemm(a, packed, zeros, scales, w_scales, token, out)):
        return True
    return bool((out == 128).all())


def norm_wide_weight() -> bool:
    """Rows and a weight of ones: every output is 1. Each half of a 1 in float32, read as bf16, is 0 or 1."""
    import sgl_kernel  # noqa: F401

    x = torch.ones(1, 256, dtype=torch.bfloat16, device="cuda")
    output = torch.full_like(x, torch.nan)
    # sgl_kernel.rmsnorm hands bf16 to FlashInfer where that is installed; the op is sgl-kernel's own.
    call = torch.ops.sgl_kernel.rmsnorm.default
    return raises(lambda: call(output, x, torch.ones(256, device="cuda"), 1e-6, False)) or bool((output == 1).all())


def masked_rows(name: str) -> bool:
    """Two experts with two rows each; masked_m leaves out the second row of expert 0."""
    import sgl_kernel

    x = torch.ones(2, 2, 256, dtype=torch.bfloat16, device="cuda")
    dtype, limits = codes_of(name)
    codes = torch.zeros(2, 2, 256, device="cuda").to(dtype)
    scales = torch.zeros(2, 2, 2, device="cuda")
    given = torch.tensor([1, 2], dtype=torch.int32, device="cuda")
    quantize = getattr(sgl_kernel, name)
    if raises(lambda: quantize(x, codes, scales, 128, 1e-10, *limits, masked_m=given, enable_v2=True)):
        return True
    return bool((codes[0, 1].float() == 0).all() and (scales[0, 1] == 0).all() and (scales[1] > 0).all())


def codes_of_vast_values(name: str) -> bool:
    """One group of 128 values of 1.5 times 2^126: each code is the largest."""
    import sgl_kernel

    x = torch.full((1, 128), 1.5 * 2.0**126, dtype=torch.bfloat16, device="cuda")
    dtype, limits = codes_of(name)
    codes = torch.zeros(1, 128, device="cuda").to(dtype)
    quantize = getattr(sgl_kernel, name)
    if raises(lambda: quantize(x, codes, torch.zeros(1, 1, device="cuda"), 128, 1e-10, *limits, enable_v2=True)):
        return True
    return bool((codes.float() == limits[1]).all())


def codes_beyond_32_bits(name: str) -> bool:
    """2^32 + 4,096 ones, and codes of 0 where none are written: each code is the largest."""
    import sgl_kernel

    rows = (1 << 20) + 1
    x = torch.ones(rows, 4096, dtype=torch.bfloat16, device="cuda")
    dtype, limits = codes_of(name)
    codes = torch.zeros(rows, 4096, dtype=torch.int8, device="cuda").view(dtype)
    scales = torch.zeros(rows, 32, device="cuda")
    if raises(lambda: getattr(sgl_kernel, name)(x, codes, scales, 128, 1e-10, *limits)):
        return True
    return bool((codes[-1].float() == limits[1]).all())


def impossible_token() -> bool:
    """One tree whose only candidate has probability 0, and numbers of 0: nothing is accepted, token 1 is drawn."""
    import sgl_kernel

    trees = torch.tensor([[[0, 0]], [[0, 1]], [[1, -1]], [[-1, -1]]], device="cuda")
    predicts, index = torch.full((2,), -1, device="cuda").int(), torch.full((1, 2), -1, device="cuda").int()
    count, u = torch.zeros(1, device="cuda").int(), torch.zeros(1, 2, device="cuda")
    target = torch.tensor([0.0, 1.0], device="cuda").repeat(1, 2, 1)
    draft = torch.zeros_like(target)
    verify = sgl_kernel.tree_speculative_sampling_target_only
    verify(predicts, index, count, *trees, u, u[:, 0].contiguous(), target, draft, 1.0, 1.0, True)
    return int(count) == 0 and predicts.tolist() == [1, -1]


#: Three names of one function.
GROUP_QUANTIZERS = tuple(f"sgl_per_token_group_quant_{kind}" for kind in ("8bit", "fp8", "int8"))
QSERVE = "qserve_w4a8_per"

PROBES: dict[str, Probe] = {
    "sgl_per_token_quant_fp8: codes of a token of zeros": Probe(per_token_zeros),
    **{
        f"{name}: {defect}": Probe(functools.partial(probe, name))
        for defect, probe in {
            "fuse_silu_and_mul is ignored": fused_silu_ignored,
            "masked_m is ignored": masked_rows,
            "codes of values beyond 2^126": codes_of_vast_values,
            "2^32 elements": codes_beyond_32_bits,
        }.items()
        for name in GROUP_QUANTIZERS
    },
    "bmm_fp8: a row-major B gives a wrong product": Probe(bmm_row_major),
    f"{QSERVE}_chn_gemm: n that is not a multiple of 64": Probe(lambda: qserve_per_channel(96, 128), kills=True),
    f"{QSERVE}_chn_gemm: k that is not a multiple of 128": Probe(lambda: qserve_per_channel(64, 64), kills=True),
    f"{QSERVE}_group_gemm: n that is not a multiple of 64": Probe(lambda: qserve_per_group(96), kills=True),
    "sgl_kernel.rmsnorm: a float32 weight is read as bf16": Probe(norm_wide_weight),
    "tree_speculative_sampling_target_only: a token of probability 0 is accepted": Probe(impossible_token),
    **{name: Probe(probe, kills) for name, probe, kills in sparse_findings.PROBES},
    "concat_and_cast_mha_k_triton: keys beyond 32 bits": Probe(sglang_findings.keys_beyond_32_bits, kills=True),
    **{
        name: Probe(probe)
        for of_module in (moe_findings, flashinfer_findings, sglang_findings, attention_findings)
        for name, probe in of_module.PROBES
    },
}


def absence(error: ImportError | AttributeError) -> str | None:
    """The error's text if the installed release lacks the kernel, or None."""
    if isinstance(error, ImportError):
        return str(error) if (error.name or "").partition(".")[0] in PACKAGES else None
    of_package = re.match(rf"(module|'_OpNamespace') '({'|'.join(PACKAGES)})\b", str(error))
    return str(error) if of_package else None


def main(name: str) -> None:
    torch.manual_seed(0)
    try:
        right = PROBES[name].right()
    except (ImportError, AttributeError) as error:
        if (missing := absence(error)) is None:
            raise
        print("ABSENT", " ".join(missing.split()))
        return
    torch.cuda.synchronize()
    print("RIGHT" if right else "WRONG")


def verdict(name: str, kills: bool, returncode: int, output: str) -> str:
    """The result of a probe: "right", "wrong", or "absent: ..."; raises for one that says nothing."""
    last = (output.strip().splitlines() or [""])[-1]
    if returncode == 0 and last in ("RIGHT", "WRONG"):
        return last.lower()
    if returncode == 0 and last.startswith("ABSENT "):
        return f"absent: {last.removeprefix('ABSENT ')}"
    lost = "CUDA error" in output or "AcceleratorError" in output
    if kills and (returncode < 0 or lost):
        return "wrong"
    raise RuntimeError(f"{name}: the probe ended with {returncode} and said {output[-1500:]!r}")


def run(name: str) -> str:
    """Runs a probe in a process of its own: see `verdict`."""
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return verdict(name, PROBES[name].kills, done.returncode, done.stdout + (done.stderr if done.returncode else ""))


def record() -> dict[str, Any]:
    """Runs all probes: the GPU, the releases, and what each probe says, or "error: ..."."""

    def told(name: str) -> str:
        try:
            said = run(name)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            said = f"error: {error}"
        print(f"{name} | {said}", file=sys.stderr, flush=True)
        return said

    with ThreadPoolExecutor(JOBS) as pool:
        outcomes = dict(zip(PROBES, pool.map(told, PROBES), strict=True))
    libraries = {name: importlib.metadata.version(name) for name in ("flashinfer-python", "sglang", "sglang-kernel")}
    return {"gpu": torch.cuda.get_device_name(), "libraries": libraries, "probes": outcomes}


def changes(findings: Iterable[Finding], recorded: Mapping[str, Any]) -> Iterator[str]:
    """The changes that a record of all probes asks of findings/kernels.json."""
    for one in findings:
        version = recorded["libraries"][one.library]
        outcomes = [{recorded["probes"][probe].partition(":")[0] for probe in each.probes} for each in one.defects]
        for number, (defect, found) in enumerate(zip(one.defects, outcomes, strict=True)):
            state = next((state for said, state in STATES.items() if said in found), None)
            if state is None and "error" in found:
                yield f"{one.id}: defect {number}: a probe says nothing: {defect.probes}"
            elif state not in (None, defect.state):
                yield f"{one.id}: defect {number}: state is {defect.state}, but {version} shows {state}"
        every = set[str]().union(*outcomes)
        if "wrong" in every and (one.version != version or one.upstream["state"] in ("fixed", "replaced")):
            yield f"{one.id}: version is {one.version}, upstream {one.upstream['state']}, but {version} has the defect"
        for said, state in (("right", "fixed"), ("absent", "replaced")):
            if every == {said} and one.upstream["state"] != state:
                yield f"{one.id}: upstream is {one.upstream['state']}, but all probes are {said} in {version}: {state}"


#: Result of a probe -> the state of its defect; a result that is absent leaves it as it was.
STATES = {"wrong": "shown", "right": "gone"}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        from flashinfer_trace import find_root
        from tools.shared.findings import read_findings

        print(json.dumps(found := record(), indent=2))
        print(*changes(read_findings(find_root()), found), sep="\n", file=sys.stderr)
