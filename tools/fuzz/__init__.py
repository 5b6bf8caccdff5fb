"""Hostile files for everything that reads one, by the thousand; see `python -m tools.fuzz --help`."""
