"""The error that extraction raises for problems its user can fix."""

from __future__ import annotations


class ExtractionError(Exception):
    """The request cannot be extracted. The message names the model, the field or the file, and the fix."""
