"""Rules on workloads/traffic.json, whose numbers are computed from traces that are not kept here."""

from __future__ import annotations

import itertools
from typing import Any

from flashinfer_trace.digests import lengths_sha256
from flashinfer_trace.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.validation.schemas import check_schema

__all__ = ["check_traffic"]

_FIX = "restore it from version control, or compute it again in a checkout: python -m tools.traffic_statistics TRACE"


def check_traffic(data: Any, schema: Any, findings: Findings) -> None:
    """Checks that quantiles ascend, that their digest is of them, and that traffic has a profile that exists.

    Args:
        data: the JSON of workloads/traffic.json.
        schema: the compiled schema of traffic.
        findings: those of the file.
    """
    if check_schema(schema, data, findings, "traffic-invalid"):
        return
    for name, profile in data["profiles"].items():
        for kind in ("prompts", "running", "positions"):
            for place, (lower, upper) in enumerate(itertools.pairwise(profile.get(kind, ()))):
                if upper < lower:
                    message = f"the quantile {upper} is less than {lower}, the one before it"
                    findings.add("traffic-invalid", message, _FIX, pointer_of("profiles", name, kind, place + 1))
        if profile["lengths_sha256"] != lengths_sha256(profile):
            message = f"the digest of the profile {quote(name)} is of other lengths"
            findings.add("traffic-invalid", message, _FIX, pointer_of("profiles", name, "lengths_sha256"))
    for kind in ("tokens", "requests"):
        for place, entry in enumerate(data[kind]):
            if (profile := entry.get("profile")) is not None and profile not in data["profiles"]:
                message = f"there is no profile {quote(profile)}"
                findings.add("traffic-invalid", message, "name one of profiles", pointer_of(kind, place, "profile"))
