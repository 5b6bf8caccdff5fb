"""The pages that `python -m tools.site` builds from the checkout, made once a process."""

from __future__ import annotations

import functools

from flashinfer_trace import find_root
from tools.site.__main__ import documents

__all__ = ["pages"]


@functools.cache
def pages() -> dict[str, str]:
    """The text of each page, by the path that it would have under the root."""
    return {path.relative_to(find_root()).as_posix(): text for path, text in documents(find_root()).items()}
