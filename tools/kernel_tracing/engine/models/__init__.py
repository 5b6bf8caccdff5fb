"""What the engine knows of Python and torch: builtins, containers, decorators, custom ops, modules."""
