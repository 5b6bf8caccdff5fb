"""Judges anyone's kernel against a Definition: the cases, the oracle and the bounds are those of verification."""
