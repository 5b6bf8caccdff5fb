"""Mixtures of experts: routers, experts, and the steps around them."""

from __future__ import annotations

FAMILIES = ()
