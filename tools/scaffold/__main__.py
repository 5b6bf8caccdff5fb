"""Creates the three files of a new family, with TODOs: reference, Definition and harness record.

python -m tools.scaffold my_kernel --op-type my_op --axis batch_size --axis hidden_size=4096 \\
    --input 'x:bfloat16[batch_size,hidden_size]' --input eps:float32 --output 'y:bfloat16[batch_size,hidden_size]'

`flashinfer-trace validate` lists the TODOs until all of them are filled in. No existing file is overwritten.

Exit status: 0 success, 2 wrong usage, or a file already exists.
"""

from __future__ import annotations

import argparse
import json
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from flashinfer_trace.dataset.store import DatasetError, find_root
from flashinfer_trace.format.files import json_text, write_text
from flashinfer_trace.format.naming import NamePattern, NamingError, derive_name, load_naming
from tools.scaffold.contract import Contract, ScaffoldError, pattern_of, read_contract
from tools.scaffold.templates import definition, record, reference
from tools.shared.command import end_with

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
#: An example that is used if no contract is given: axes, inputs, outputs.
EXAMPLE = (["m", "n=8"], ["x:bfloat16[m,n]"], ["output:bfloat16[m,n]"])
#: The kernels that models call and that have no Definition; a test requires that `not_yet` is up to date.
LISTED = Path("traces", "kernels_without_definition.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    given = (options.axis, options.input, options.output)
    try:
        root = find_root()
        check_names(root, options.family, options.op_type)
        contract = read_contract(root, *(given if any(given) else EXAMPLE))
        pattern, abbreviations = pattern_of(options.family, contract.name_axes, load_naming(root).abbreviations)
        name = derive_name(NamePattern(options.family, options.op_type, pattern), contract.const_axes)
        files = texts(root, options.family, options.op_type, name, contract)
        write_all(files)
    except (ScaffoldError, DatasetError, NamingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in files:
        print(f"{path.relative_to(root)}: written")
    entry = json.dumps({"op_type": options.op_type, "pattern": pattern})
    steps = [
        f'schema/naming.json, families: "{options.family}": {entry}',
        *(f'schema/naming.json, abbreviations: "{short}": {json.dumps(axes)}' for short, axes in abbreviations.items()),
        *next_steps(root, options.family, options.op_type, list(files), name),
    ]
    print("\n".join(["Then:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.scaffold", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", metavar="FAMILY", help="name of the family: lower case, digits, underscores")
    parser.add_argument("--op-type", required=True, metavar="T", help="op_type of its Definitions, existing or new")
    for option, metavar, text in (
        ("axis", "NAME[=VALUE]", "a variable axis, or a constant one: its value in the first Definition, or 2*AXIS"),
        ("input", "NAME:DTYPE[AXIS,...]", "an input of run(), in order; a scalar if [...] is omitted"),
        ("output", "NAME:DTYPE[AXIS,...]", "an output of run(), in order"),
    ):
        parser.add_argument(f"--{option}", action="append", default=[], metavar=metavar, help=text)
    return parser


def check_names(root: Path, family: str, op_type: str) -> None:
    """Raises ScaffoldError if a name is invalid or the family exists."""
    for what, name in (("family", family), ("op_type", op_type)):
        if not NAME.fullmatch(name) or keyword.iskeyword(name):
            raise ScaffoldError(f"{name!r} is not a valid {what}: use lower case, digits and single underscores")
    known = load_naming(root).families
    if family in known:
        raise ScaffoldError(f"schema/naming.json already has the family {family}, of op_type {known[family].op_type}")


def texts(root: Path, family: str, op_type: str, name: str, contract: Contract) -> dict[Path, str]:
    """The content of the three files; `name` is the name of the Definition.

    Raises:
        ScaffoldError: a file already exists, or `root` is not a checkout.
    """
    files = {
        root / "reference" / op_type / f"{family}.py": reference(contract),
        root / "definitions" / op_type / f"{name}.json": json_text(definition(name, op_type, contract)),
        record_path(root, family, op_type): record(family, op_type, contract),
    }
    for path in files:
        if path.exists():
            raise ScaffoldError(f"{path} exists; choose another name or remove it")
    return files


def record_path(root: Path, family: str, op_type: str) -> Path:
    """The path of the record: a new module, inside the op_type's package or next to its module if there is one."""
    families = root / "flashinfer_trace" / "families"
    if not families.is_dir():
        raise ScaffoldError(f"{families}: no such directory; run this in a checkout")
    if (families / op_type).is_dir():
        return families / op_type / f"{family}.py"
    module = families / f"{op_type}.py"
    return families / f"{op_type}_{family}.py" if module.exists() else module


def write_all(files: dict[Path, str]) -> None:
    """Writes all of the files, or none if one cannot be written (OSError)."""
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
    except OSError:
        for path in files:
            path.unlink(missing_ok=True)
        raise


def next_steps(root: Path, family: str, op_type: str, files: list[Path], name: str) -> list[str]:
    """The author's next steps, in order."""
    path = files[-1].relative_to(root)
    steps = ["fill in the TODOs in these files; `flashinfer-trace validate` lists those that are left"]
    if path.stem != op_type:
        inside = path.parent.name == op_type
        existing = f"{path.parent}/" if inside else f"{path.parent / op_type}.py"
        steps.append(f"{path} is found automatically: it may import from {existing}, which must not import it")
    steps += [
        "in the entry of the family in schema/naming.json, name the stages "
        '("tags": ["stage:prefill", "stage:decode"], or one of them)',
        "add each real kernel to flashinfer_trace/kernels/: its path, the family, and what it needs",
        f"flashinfer-trace sync {name} && flashinfer-trace validate && flashinfer-trace verify {name}",
        f"flashinfer-trace verify '{family}*' --examples 100 && pytest tests/test_mutants.py -k {family}",
        f"python -m tools.mutate {family}",
        f"add the cost of {family} to flashinfer_trace/judging/costs/, then: pytest tests/costs -k {family}",
        f"python -m tools.record_workloads {name} && pytest tests/traffic",
        f"remove its kernels from not_yet in {LISTED}, if it lists any",
        "only if a model in models/ calls it: name it in models/needs/<model>.json, under the op that does",
        "flashinfer-trace sync",
    ]
    return steps


if __name__ == "__main__":
    end_with(main)
