"""When a reference is farther from the oracle than a kernel: for the harness, and for evidence that says so."""

from __future__ import annotations

#: A reference may be worse than a kernel by this factor before it counts as less accurate: two correctly rounded
#: results of one value differ by as much in their Frobenius norm.
ALLOWED_FACTOR = 1.05
#: Unit roundoff of float32.
_ROUNDING = 2.0**-24


def too_far(error: float) -> float:
    """Relative norm of an error that is no longer about as small as `error`."""
    return ALLOWED_FACTOR * error + 4 * _ROUNDING
