"""Shows on a CPU that a change of the code that judges changes no verdict: see `__main__`."""
