"""Installs a release of SGLang, to run, in its own folder for tools.dry_run.

python -m tools.fetch_sources --install                      # the release that dry runs use
python -m tools.fetch_sources --install --release 0.5.24     # another, or `newest`: its data file is written first
"""

from __future__ import annotations

import argparse
import sys

from tools.dry_run.install import InstallError, install_release
from tools.dry_run.release import DEFAULT, ReleaseError
from tools.shared.command import end_with


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 the release is installed, 1 it could not be, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", required=True, help="install a release")
    parser.add_argument("--release", default=DEFAULT, metavar="VERSION", help=f"or `newest` (default: {DEFAULT})")
    version = parser.parse_args(arguments).release
    try:
        release, changed = install_release(version)
    except (InstallError, ReleaseError) as error:
        print(f"fetch_sources: {error}", file=sys.stderr)
        return 1
    print(f"{release.site}: sglang {release.version}, {'installed' if changed else 'already present'}")
    return 0


if __name__ == "__main__":
    end_with(main)
