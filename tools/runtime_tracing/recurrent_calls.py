"""Calls of linear attention, short convolutions and gated norms, by the named tensors that give each size.

Their kernels take tensors in another order than Definitions, transposed, or as part of a pipeline: the gates of a
prefill are computed before it. The names of tensors tell more than their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flashinfer_trace import Definition
from tools.runtime_tracing.recording import RecordedCall

_TENSOR = re.compile(r"\b(\w+): ([a-z]+\d\w*)\[([\d,]+)\]")
_QKV = {"num_q_heads": ("q", -2), "num_k_heads": ("k", -2), "num_v_heads": ("v", -2), "head_size": ("q", -1)}
_FILTER = {"conv_dim": ("w_ptr", 0), "width": ("w_ptr", 1)}
#: Beginning of the names of Definitions, the longest first -> const axis -> a tensor of a call, and its axis. Compiled
#: functions have numbers for names.
PLACES: Mapping[str, Mapping[str, tuple[str, int]]] = {
    "causal_conv1d_update_c": _FILTER,
    "causal_conv1d_c": _FILTER,
    "gdn_packed_decode_": {"qkv_size": ("mixed_qkv", 1), "num_v_heads": ("a", 1), "head_size": ("h0", -1)},
    "gdn_prefill_": _QKV,
    "kda_packed_decode_": {"qkv_size": ("0", 1), "num_v_heads": ("2", 1), "head_size": ("6", -1)},
    "mamba_ssd_prefill_": {
        "nheads": ("x_ptr", -2),
        "head_dim": ("x_ptr", -1),
        "dstate": ("c_ptr", -1),
        "ngroups": ("c_ptr", -2),
    },
    "mamba_ssu_decode_": {
        **{"nheads": ("state_ptr", -3), "head_dim": ("state_ptr", -2), "dstate": ("state_ptr", -1)},
        "ngroups": ("b_ptr", -2),
    },
    "kda_prefill_": {
        **{"num_q_heads": ("k", -2), "num_k_heads": ("k", -2), "num_v_heads": ("v", -2)},
        "head_size": ("k", -1),
    },
    "rmsnorm_sigmoid_gate_": {"head_dim": ("x", -1)},
    "rmsnorm_silu_gate_": {"head_dim": ("x", -1)},
}
#: Beginning of the names of Definitions -> settings that a call of them has, if it has these at all.
SETTINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "causal_conv1d_": {"HAS_BIAS": ("False",), "SILU_ACTIVATION": ("True",)},
    "rmsnorm_sigmoid_gate_": {"ACTIVATION": ("'sigmoid'",), "HAS_RESIDUAL": ("False",), "NORM_BEFORE_GATE": ("True",)},
    "rmsnorm_silu_gate_": {
        "ACTIVATION": ("'silu'", "'swish'"),
        "HAS_RESIDUAL": ("False",),
        "NORM_BEFORE_GATE": ("True",),
        "HAS_BIAS": ("False",),
    },
}


def sizes_of(call: RecordedCall, definition: Definition) -> dict[str, int] | None:
    """The const axes that a call gives a Definition of its family; None if its tensors do not determine them.

    A call that lacks one of the tensors, or has states of another dtype, or whose tensor of queries, keys and values
    has no whole number of heads, gives no axes.
    """
    begin = next((begin for begin in PLACES if definition.name.startswith(begin)), None)
    if begin is None:
        return None
    tensors = [(name.lower(), dtype, sizes) for name, dtype, sizes in _TENSOR.findall(call.arguments)]
    given = {name: tuple(map(int, sizes.split(","))) for name, _, sizes in tensors}
    # States have a dtype of their own, and Definitions of either.
    if any(name == "state_ptr" and dtype != definition.inputs["state"].dtype for name, dtype, _ in tensors):
        return {}
    try:
        axes = {axis: given[name][place] for axis, (name, place) in PLACES[begin].items()}
    except (KeyError, IndexError):
        return {}
    if "width" in axes:
        axes["state_len"] = axes["width"] - 1
    if "qkv_size" in axes:
        heads, rest = divmod(axes["qkv_size"] - axes["num_v_heads"] * axes["head_size"], 2 * axes["head_size"])
        if rest or heads < 1:
            return {}
        axes["num_k_heads"] = heads
    return axes if axes.keys() >= definition.const_axes.keys() else {}


def has_settings(chosen: Mapping[str, str], definition: Definition) -> bool:
    """Whether the settings of a call are those that a Definition describes."""
    found = (one for begin, one in SETTINGS.items() if definition.name.startswith(begin))
    wanted: Mapping[str, tuple[str, ...]] = next(found, {})
    return all(chosen.get(name, values[0]) in values for name, values in wanted.items())
