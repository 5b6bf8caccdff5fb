"""Needs: the settings that a set of configurations shares and that set it apart from all others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

Settings = Mapping[str, str]
#: Settings in the order in which they are tried; what decides as much as another, but earlier, is stated. Deterministic
#: inference comes before the backend of sampling, which SGLang changes with it.
ORDER = (
    "architecture",
    "quantization",
    "gpu",
    "attention_backend",
    "moe_runner_backend",
    "enable_deterministic_inference",
    "sampling_backend",
    "kv_cache_dtype",
    "ep_size",
    "tp_size",
)
#: The most values of one setting that a text names.
MOST = 6
#: The text for a setting that a configuration leaves to the release.
UNSET = "not set"
#: The text for configurations that differ in no setting named here.
OTHERWISE = "other settings"


def needs(chosen: Collection[str], configurations: Mapping[str, Settings]) -> str:
    """The common part of the chosen configurations that the others lack: `gpu=sm100 and quantization=fp8 or nvfp4`.

    Args:
        chosen: names of configurations.
        configurations: the settings of all, by name. Every configuration has every setting.

    Returns: "" if all are chosen. A text that the chosen ones fulfil; it ends in `OTHERWISE` if others do as well.
    """
    others = {name for name in configurations if name not in chosen}
    parts: list[str] = []
    names = [*ORDER, *sorted({name for one in configurations.values() for name in one} - set(ORDER))]
    while others:
        best, left = "", others
        for name in names:
            values = {configurations[one].get(name, "") for one in chosen}
            kept = {one for one in others if configurations[one].get(name, "") in values}
            if len(kept) < len(left) and len(values) <= MOST:
                best, left = name, kept
        if not best:
            parts.append(OTHERWISE)
            break
        values = {configurations[one].get(best, "") for one in chosen}
        parts.append(_part(best, values))
        others = left
    return " and ".join(parts)


def _part(name: str, values: Set[str]) -> str:
    """One setting: `tp_size=4 or 8`, `dp_size not set`, or `dp_size=8 or not set`."""
    given = sorted(values - {""})
    if not given:
        return f"{name} {UNSET}"
    return f"{name}={' or '.join([*given, UNSET] if '' in values else given)}"
