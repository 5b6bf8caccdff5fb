"""How fast the references are, beside what they replace."""
