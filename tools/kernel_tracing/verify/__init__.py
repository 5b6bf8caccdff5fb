"""Checks a trace against the sources, without the analysis that wrote it."""
