"""The process of the command ``flashinfer-trace``: an interrupt is one line, also while the command is imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command, and ends the process."""
    try:
        from flashinfer_trace.cli import main as command

        command()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
