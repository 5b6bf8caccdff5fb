"""Facts in recorded arguments of attention, apart from sizes: the cap, the window, sinks, and unread inputs."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from flashinfer_trace import Definition, TensorSpec
from tools.runtime_tracing.recording import RecordedCall

#: Constant axes that are settings of a call, and no sizes of its tensors.
SETTING_AXES = {"logits_soft_cap", "window_size"}
_DECODE = "sglang.srt.layers.attention.triton_ops.decode_attention."
#: SGLang's decode attention has two launches: parts of the keys, without sinks, and the sum of the parts.
_PARTS = {f"{_DECODE}_fwd_kernel_stage1", f"{_DECODE}_fwd_grouped_kernel_stage1"}
_MERGE = f"{_DECODE}_fwd_kernel_stage2"
_CAP = re.compile(r"\b(?:logits_soft_cap|logit_cap|softcap): ([\d.]+)")
_WINDOW_LEFT = re.compile(r"\bwindow_(?:left: |size: \()(-?\d+)")
#: Triton kernels are compiled for a window, whose size is not recorded; these offsets are passed if there is one.
_WINDOWED = re.compile(r"\bwindow_kv_offset_ptr: ")
_SINKS = re.compile(r"\bsink_ptr: |\bsinks?: ")
_SINKS_16 = re.compile(r"\bsinks: bfloat16\[")
#: Tensors of FlashAttention's absorbed form of latent attention -> inputs of its Definitions, in their order.
_ABSORBED = {"qv": "q_nope", "q": "q_pe", "v_cache": "ckv_cache", "k_cache": "kpe_cache"}
_NOTHING_CACHED = re.compile(r"\bkv_indices: int\d+\[0\]")


@functools.cache
def in_order(arguments: str) -> str:
    """The tensors of absorbed latent attention as Definitions name and order them; other arguments as they are."""
    found = {name: re.search(rf"\b{name}: (\w+\[[\d,]+\])", arguments) for name in _ABSORBED}
    texts = [f"{_ABSORBED[name]}: {tensor[1]}" for name, tensor in found.items() if tensor]
    return ", ".join(texts) if len(texts) == len(_ABSORBED) else arguments


def takes_parts(call: RecordedCall) -> bool:
    """Whether a call computes parts of attention, to which sinks are added later."""
    return call.kernel in _PARTS


def merges_parts(call: RecordedCall) -> bool:
    """Whether a call merges parts, and is given no queries and no keys."""
    return call.kernel == _MERGE


def same_attention(call: RecordedCall, definition: Definition, window: int | None) -> bool:
    """Whether a call has the cap, the window and the sinks of a Definition; `window` is that of the run's model."""
    chosen = {} if merges_parts(call) else settings_of_attention(call.arguments, window)
    if any((definition.const_axes.get(name) or 0) != value for name, value in chosen.items()):
        return False
    return takes_parts(call) or _has_sinks(call.arguments) == ("sinks" in definition.inputs)


@functools.cache
def _has_sinks(arguments: str) -> bool:
    return bool(_SINKS.search(arguments))


@functools.cache
def settings_of_attention(arguments: str, window: int | None) -> Mapping[str, float]:
    """The cap of the logits and the window among recorded arguments, by the names of their axes; 0 for none."""
    cap, left = _CAP.search(arguments), _WINDOW_LEFT.search(arguments)
    own = int(left[1]) + 1 if left else 0
    if _WINDOWED.search(arguments):
        own = window or -1
    return {"logits_soft_cap": float(cap[1] if cap else 0), "window_size": own}


def read_inputs(call: RecordedCall, inputs: Mapping[str, TensorSpec]) -> Sequence[TensorSpec]:
    """The inputs of a Definition that a call of attention takes: no sinks for parts, no cache if nothing is cached.

    FlashAttention 3 takes the sinks in bfloat16; the values that families draw are numbers of that format.
    """
    unread = {"sinks"} if takes_parts(call) else set()
    if _NOTHING_CACHED.search(call.arguments):
        unread |= {name for name, one in inputs.items() if one.shape and one.shape[0] == "num_slots"}
    read = {name: one for name, one in inputs.items() if name not in unread}
    if "sinks" in read and _SINKS_16.search(call.arguments):
        read["sinks"] = dataclasses.replace(read["sinks"], dtype="bfloat16")
    return list(read.values())
