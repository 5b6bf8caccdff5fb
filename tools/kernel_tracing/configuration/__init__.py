"""Configurations: what a hop of the call graph requires."""
