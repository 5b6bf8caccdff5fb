"""The one error of the extraction, for what its user can mend."""

from __future__ import annotations


class ExtractionError(Exception):
    """What was asked for cannot be extracted. The message names the model, the field or the file, and the mend."""
