"""Categories of kernels: what each does, as a person read it. `categories.json` lists kernels by category."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("categories.json")
#: The category of a kernel that nobody has classified.
OTHER = "other"


@cache
def _categories() -> dict[str, str]:
    listed: dict[str, list[str]] = json.loads(PATH.read_text(encoding="utf-8"))
    return {name: category for category, names in listed.items() for name in names}


def categorise(name: str) -> str:
    """The category of a kernel, by its name; `OTHER` if the list lacks it."""
    return _categories().get(name, OTHER)
