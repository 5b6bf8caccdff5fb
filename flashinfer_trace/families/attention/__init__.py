"""Shared by the families of softmax attention: lengths and values of cases, oracle and bounds. Defines no family."""
