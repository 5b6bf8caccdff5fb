"""The dataset of GPU-kernel Definitions whose references are proven against the real CUDA kernels.

    >>> import flashinfer_trace
    >>> definition = flashinfer_trace.load("rmsnorm_h7168")
    >>> inputs = flashinfer_trace.make_inputs(definition, {"batch_size": 4}, seed=0)
    >>> output = definition.run(**inputs)

Importing the package does not import torch; only `make_inputs`, `judge`, `workloads` and
``Definition.run`` do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from flashinfer_trace.dataset.store import DatasetError, definitions, find_root, load
    from flashinfer_trace.format.definition import Axis, Definition, InputError, TensorSpec
    from flashinfer_trace.judging.submission import SubmissionError
    from flashinfer_trace.judging.traffic import Workload
    from flashinfer_trace.judging.verdict import Verdict

__version__ = "0.1.0"
__all__ = [
    "Axis",
    "DatasetError",
    "Definition",
    "InputError",
    "SubmissionError",
    "TensorSpec",
    "Verdict",
    "definitions",
    "find_root",
    "judge",
    "load",
    "make_inputs",
    "workloads",
]


#: Where names lie. Each module is imported on first use: an interrupt at start-up comes when the command handles it.
_EXPORTED = {
    "dataset.store": ("DatasetError", "definitions", "find_root", "load"),
    "format.definition": ("Axis", "Definition", "InputError", "TensorSpec"),
    "judging.submission": ("SubmissionError",),
    "judging.verdict": ("Verdict",),
}


def __getattr__(name: str) -> Any:
    """Names that other modules define, and the module `costs`, which imports torch."""
    if name == "costs":
        return importlib.import_module("flashinfer_trace.judging.costs")
    for module, names in _EXPORTED.items():
        if name in names:
            return getattr(importlib.import_module(f"flashinfer_trace.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_inputs(
    definition: Definition | str,
    axes: Mapping[str, int] | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Valid inputs of a Definition, by name.

    The same definition, axes and seed produce the same bits on every device; global random state is neither read nor
    changed.

    Args:
        definition: of a known family, or its name.
        axes: values of variable axes, integers from 0 to 2**31 - 1; the family chooses the others (and the index
            structure) from the seed.
        seed: any integer from 0 to 2**63 - 1.
        device: the device on which the tensors are created: ``cpu``, ``cuda`` or ``cuda:N``.

    Returns:
        Tensors with the declared shapes and dtypes, and Python numbers for scalars. They satisfy every constraint.

    Raises:
        DatasetError: the Definition does not exist.
        InputError: an axis is unknown, no valid inputs have the given value, the seed is not in its range, this machine
            lacks the device, or `definition` is not one.
        ImportError: torch is not installed (``pip install flashinfer-trace[verify]``).
    """
    from flashinfer_trace.dataset.store import definition_of
    from flashinfer_trace.judging.user_inputs import device_name, requested_inputs

    device_name(device)
    return requested_inputs(definition_of(definition), axes or {}, seed, device)


def judge(
    kernel: Callable[..., Any] | str | Path,
    definition: Definition | str,
    *,
    device: str | torch.device = "cpu",
    examples: int = 20,
    seed: int | None = None,
    twin: bool | None = None,
    timeout: float | None = None,
    memory: float | None = None,
    keep_going: bool = False,
) -> Verdict:
    """Grades anyone's kernel against a Definition: see docs/judge.md.

    It runs in a process of its own, on the cases and by the bounds with which the Definition itself was verified. A
    file can reach neither this package nor its oracles there. A callable is trusted: its process is a copy of this one,
    with the same memory and imports. Give code that you do not trust as a file, for example to compute a reward.

    Args:
        kernel: ``FILE.py``, ``FILE.py:FUNCTION``, a Solution of flashinfer-bench (``.json``) or, on a CPU, a callable.
        definition: or its name.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        examples: drawn cases that must count, in addition to the corners; 1 or more.
        seed: from 0 to 2**63 - 1, to repeat a verdict; from the system's entropy if there is none.
        twin: whether to judge at the sizes of the family's small twin; by default where its own sizes take long.
        timeout: seconds that one call may take, and loading, which has 30 at least; by default 60 for a call, 300 for
            the first one, and 120 for loading.
        memory: GiB that its process may take beyond what it has before the kernel is loaded, inputs and outputs
            included; no limit by default.
        keep_going: whether to run the other cases after a failure: `Verdict.tally` counts the right ones by kind.

    Returns:
        A Verdict, which prints as a report; its `failing_case()` has the tensors of the first failure.
        Whatever the kernel does is in it: nothing that a kernel raises is raised.

    Raises:
        SubmissionError: `kernel` is not a submission.
        InputError: this machine lacks the device, `examples` or `seed` is out of range, or `definition` is not one.
        ImportError: torch is not installed (``pip install flashinfer-trace[verify]``).
    """
    from flashinfer_trace.judging import judge as judging
    from flashinfer_trace.judging.submission import RunLimits

    options: dict[str, Any] = {"examples": examples, "seed": seed, "twin": twin, "keep_going": keep_going}
    return judging.judge(kernel, definition, device=device, limits=RunLimits.of(timeout, memory), **options)


def workloads(definition: Definition | str) -> tuple[Workload, ...]:
    """Inputs of a Definition under named traffic, the same bits on every device: see docs/workloads.md.

    >>> for workload in flashinfer_trace.workloads("rmsnorm_h7168"):
    ...     inputs = workload.inputs("cuda")

    Args:
        definition: or its name.

    Returns:
        Workloads with `name`, `axes` (values of the variable axes) and ``inputs(device)``; `quick` ones are those of a
        short benchmark.

    Raises:
        DatasetError: the Definition does not exist.
        InputError: `definition` is not one.
        ImportError: torch is not installed (``pip install flashinfer-trace[verify]``).
    """
    from flashinfer_trace.judging import traffic

    return traffic.workloads(definition)
