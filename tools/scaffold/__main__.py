"""The three files of a new family: reference, Definition and harness record, with TODOs.

python -m tools.scaffold my_kernel --op-type my_op

`flashinfer-trace validate` names what is left to be written, until all of it is. Nothing that exists is overwritten.

Exit status: 0 done, 2 wrong usage, or a file is there already.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from flashinfer_trace.dataset import DatasetError, find_root
from flashinfer_trace.files import json_text, write_text
from flashinfer_trace.naming import NamingError, load_naming
from tools.scaffold.templates import RECORD, REFERENCE, definition

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class ScaffoldError(Exception):
    """The files cannot be written; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.scaffold", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", metavar="FAMILY", help="name of the family: lower case, digits, underscores")
    parser.add_argument("--op-type", required=True, metavar="T", help="op_type of its Definitions")
    options = parser.parse_args(arguments)
    try:
        root = find_root()
        files = texts(root, options.family, options.op_type)
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
    except (ScaffoldError, DatasetError, NamingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in files:
        print(f"{path.relative_to(root)}: written")
    print("\n".join(["Then:", *next_steps(root, options.family, options.op_type)]))
    return 0


def texts(root: Path, family: str, op_type: str) -> dict[Path, str]:
    """The three files.

    Raises:
        ScaffoldError: a name is unusable, the family exists, or a file is there already.
    """
    for what, name in (("family", family), ("op_type", op_type)):
        if not NAME.fullmatch(name) or keyword.iskeyword(name):
            raise ScaffoldError(f"{name!r} is no name of {what}: use lower case, digits and single underscores")
    known = load_naming(root).families
    if family in known:
        raise ScaffoldError(f"schema/naming.json has the family {family} already, of op_type {known[family].op_type}")
    files = {
        root / "reference" / op_type / f"{family}.py": REFERENCE,
        root / "definitions" / op_type / f"{family}_n8.json": json_text(definition(family, op_type)),
        record_path(root, family, op_type): RECORD.substitute(family=family, op_type=op_type),
    }
    for path in files:
        if path.exists():
            raise ScaffoldError(f"{path} exists; choose another name, or remove it")
    return files


def record_path(root: Path, family: str, op_type: str) -> Path:
    """A module of its own where the op_type is new, else one beside or inside the module of the op_type."""
    families = root / "flashinfer_trace" / "families"
    if not families.is_dir():
        raise ScaffoldError(f"{families}: no such directory; run this in a checkout")
    if (families / op_type).is_dir():
        return families / op_type / f"{family}.py"
    module = families / f"{op_type}.py"
    return families / f"{op_type}_{family}.py" if module.exists() else module


def next_steps(root: Path, family: str, op_type: str) -> list[str]:
    """What the author does, in order."""
    families = root / "flashinfer_trace" / "families"
    steps = [
        f'schema/naming.json: "{family}": {{"op_type": "{op_type}", "pattern": "{family}_n{{n}}"}} under families',
    ]
    if (families / op_type).is_dir():
        steps.append(f"flashinfer_trace/families/{op_type}/__init__.py: add its FAMILIES to those there")
    elif (families / f"{op_type}_{family}.py").exists():
        steps.append(f"flashinfer_trace/families/{op_type}.py: add its FAMILIES to those there")
    return [
        *(f"  {step}" for step in steps),
        "  fill the TODOs, then `flashinfer-trace embed` and `flashinfer-trace validate`",
        "  tools/extract_definitions/recipes/: how models need it",
    ]


if __name__ == "__main__":
    sys.exit(main())
