"""Definitions and what they are made of: fields, constraints, names, JSON with positions. Free of torch."""
