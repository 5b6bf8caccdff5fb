"""Fixtures of the tests of tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from built_pages import built_site


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site."""
    return built_site(tmp_path_factory)
