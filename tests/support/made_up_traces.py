"""Made-up kernel traces, in the form that `load_traces` returns and in that of a file."""

from __future__ import annotations

from tools.kernel_tracing.report.trace_files import completed, packed

CONFIGURATION = {
    "name": "small-bf16",
    "model": "small",
    "architecture": "SmallForCausalLM",
    "quantization": "none",
    "gpu": "sm90",
    "server": {},
    "environment": {},
    "resolved": {},
    "recorded": True,
}
#: Another one, so that a chain that only one of them takes needs something.
OTHER = CONFIGURATION | {"name": "small-fp8", "quantization": "fp8"}


def chain(*frames, op="op", only=None, **more):
    """A chain that both configurations take, or only the one of a name."""
    names = [one["name"] for one in (CONFIGURATION, OTHER) if only in (None, one["name"])]
    return {
        "frames": list(frames),
        "op": op,
        "group": "",
        "configurations": {name: ["prefill"] for name in names},
        "undecided": [],
        "seen": [],
        **more,
    }


def document(kernels, sources, model="small"):
    """A whole document of kernels, whose chains are made by `chain`."""
    return completed(
        {
            "sources": sources,
            "model": model,
            "platform": "cuda",
            "configurations": [CONFIGURATION, OTHER],
            "kernels": kernels,
            "not_evaluated": [],
        }
    )


def file_form(kernels, sources, model="small"):
    """The same as a file has it."""
    return packed(document(kernels, sources, model))
