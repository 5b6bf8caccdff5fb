"""Runs FlashInfer's own trace_apply on CPU tensors, with a stand-in for its kernel; prints who computed each call.

trace_apply_program.py FLASHINFER_SITE EXPORT [guarded|plain]
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch

from tools.templates.installed import imported


def main(site: str, export: str, how: str) -> None:
    flashinfer = imported(Path(site))
    torch.cuda.is_current_stream_capturing = lambda: False  # torch for a CPU has no answer
    original = flashinfer.norm.rmsnorm
    ran: list[str] = []

    @functools.wraps(original)
    def stand_in(*args: object, **kwargs: object) -> torch.Tensor:
        ran.append("FlashInfer")
        return torch.zeros(1)

    for module in [one for name, one in sys.modules.items() if name.startswith("flashinfer")]:
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, stand_in)
    if how == "guarded":
        spec = importlib.util.spec_from_file_location("guard", Path(export) / "guard.py")
        assert spec is not None and spec.loader is not None
        guard = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(guard)
        places = guard.enable()
    else:  # as a server does that names the directory in FLASHINFER_TRACE_APPLY_PATH
        os.environ["FLASHINFER_TRACE_APPLY_PATH"] = export
        places = flashinfer.trace_apply.enable_apply()
    told = {"places": places}
    calls = {
        "bf16, 1e-6": (torch.bfloat16, 512, {}),
        "bf16, 1e-6, given": (torch.bfloat16, 512, {"eps": 1e-6}),
        "bf16, 1e-5": (torch.bfloat16, 512, {"eps": 1e-5}),
        "fp16, 1e-6": (torch.float16, 512, {}),
        "bf16, another size": (torch.bfloat16, 1024, {}),
    }
    for name, (dtype, hidden, kwargs) in calls.items():
        ran.clear()
        x, weight = torch.ones(2, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
        flashinfer.norm.rmsnorm(x, weight, **kwargs)
        told[name] = ran[0] if ran else "solution"
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
