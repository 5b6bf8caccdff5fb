"""Helpers that several tools share: Markdown, and the packages of fetched sources."""
