"""Which Definitions a model's recorded calls have, and which the dataset lacks.

- `python -m tools.extract --model-name deepseek_v3`: one model
- `python -m tools.extract --model-name llama qwen2_moe --execution-modes decode --no-include-quantized`: fewer calls
- `python -m tools.extract --model-name my-llama --config config.json --tp 1 8`: dry runs, for a model without records
- `python -m tools.extract --record traces/runtime/FILE.json --write`: write the Definitions of new sizes

The calls are in execution order: those of the default server, then what other servers add. A call is *verified here* (a
Definition of its sizes has evidence from its kernel), its Definition *exists, not by this kernel*, it has a *new size*
of a family, which --write adds, or *no family* describes it; then the kernel's own arguments and the line that calls it
are printed. No existing Definition is replaced: what differs from one of its name is written to NAME_v2.json.review.

Exit status: 0 success, 1 a file could not be written or would be invalid, 2 wrong usage, or a record that cannot be
read or made, 3 conflicts to review.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flashinfer_trace import definitions, find_root
from flashinfer_trace.dataset.validation import Result, format_text
from tools.extract.matched import Dataset, Row, State, rows_of
from tools.extract.written import planned, problems_of
from tools.runtime_tracing.recording import Recording, RecordingError, read
from tools.shared.command import end_with, names_its_cause
from tools.trace.calls import settings_of
from tools.trace.records import committed, default_first, of_model, of_release, run_dry

MODES = ("prefill", "decode")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args([_spelled(one) for one in (sys.argv[1:] if arguments is None else arguments)])
    root = find_root()
    try:
        runs = chosen(root, options)
        dataset = Dataset(root, definitions(root=root))
        rows = rows_of(runs, dataset, options.execution_modes, options.deduplicate)
        plan = planned(rows, root, options.definitions or root / "definitions", options.deduplicate)
    except Exception as error:
        if not names_its_cause(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_json(rows) if options.format == "json" else _text(rows, options.verbose))
    if problems := problems_of(plan, root):
        print(
            format_text(Result(0, problems)),
            "error: these would be invalid; nothing was written",
            sep="\n",
            file=sys.stderr,
        )
        return 1
    try:
        for one in plan if options.write else ():
            one.write()
            if one.path is not None:
                print(f"{one.path}: written", file=sys.stderr)
    except OSError as error:
        print(f"error: {error}; no Definition is half-written, run again to write the rest", file=sys.stderr)
        return 1
    if options.write and any(one.path is not None for one in plan):
        print("Prove them and set their tags: `flashinfer-trace verify`, `flashinfer-trace sync`", file=sys.stderr)
    conflicts = [one for one in plan if one.conflict]
    for one in conflicts:
        print(f"conflict: {one.name}: {one.conflict}", file=sys.stderr)
    return 3 if conflicts else 0


def chosen(root: Path, options: argparse.Namespace) -> list[Recording]:
    """The runs that a command line asks for, of each model in turn, the default first.

    Raises:
        RecordingError: a model has no record and cannot be run, or no run is left.
    """
    if options.record:
        runs = of_release(default_first([read(path) for path in options.record]), options.release)
        return _kept(runs, options)
    every, found = committed(root), []
    for name in dict.fromkeys(options.model_name):
        known = [] if options.config or options.server else of_model(every, name)
        runs = _kept(of_release(known, options.release), options) if known else []
        sizes = [(tp, ep) for tp in options.tp or [1] for ep in options.ep or [1]] if not known or options.tp else []
        for tp, ep in sizes:
            if (tp, ep) not in [(_size(run, "tp_size"), _size(run, "ep_size")) for run in runs]:
                settings = [*filter(None, [options.server]), *([f"tp_size={tp}"] if tp > 1 else [])]
                settings += [f"ep_size={ep}"] if ep > 1 else []
                runs.append(run_dry(str(options.config or name), ",".join(settings), options.release))
        found += runs
    if not found:
        raise RecordingError(f"no run of {', '.join(options.model_name)} is left; choose other sizes or formats")
    return found


def _kept(runs: Sequence[Recording], options: argparse.Namespace) -> list[Recording]:
    """The runs of the sizes and formats that were asked for."""
    return [
        run
        for run in runs
        if options.include_quantized or settings_of(run)["quantization"] == "none"
        if not options.tp or _size(run, "tp_size") in options.tp
        if not options.ep or _size(run, "ep_size") in options.ep
    ]


def _size(run: Recording, name: str) -> int:
    return int(run.document["server"].get(name, 1))


def _text(rows: Sequence[Row], verbose: bool) -> str:
    """One line a call: state, op, kernel, Definition or reason."""
    shown = [row for row in rows if verbose or row.state is not State.PYTORCH]
    cells = [
        (
            row.state.value,
            row.op,
            row.kernel.rpartition(".")[2],
            ", ".join(row.definitions) or f"{row.site} {row.detail}",
        )
        for row in shown
    ]
    heading = ("State", "Op", "Kernel", "Definition, or the call that has none")
    widths = [max(len(cell[column]) for cell in (heading, *cells)) for column in range(3)]
    lines = [
        "  ".join([*(text.ljust(size) for text, size in zip(one, widths, strict=False)), one[3]])
        for one in (heading, *cells)
    ]
    counts = Counter(row.state for row in rows)
    total = ", ".join(f"{counts[state]} {state.value}" for state in State if state is not State.PYTORCH)
    hidden = len(rows) - len(shown)
    rest = f"; {hidden} functions of PyTorch without a Definition are not listed (--verbose)" if hidden else ""
    return "\n".join([*lines, f"{total}{rest}"])


def _json(rows: Sequence[Row]) -> str:
    fields = ("model", "op", "kernel", "definitions", "site", "sizes", "detail", "modes", "runs")
    found = [{"state": row.state.value, **{name: getattr(row, name) for name in fields}} for row in rows]
    return json.dumps(found, indent=1)


def _spelled(argument: str) -> str:
    """An option in either spelling: `--model_name` is `--model-name`."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if re.match("--[a-z]", name) else argument


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= value <= 9999:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size between 1 and 9999")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.extract", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model-name", nargs="+", action="extend", metavar="NAME", help="models, model types, or `all`")
    what.add_argument("--record", type=Path, nargs="+", metavar="FILE", help="records of runs")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json, which is run dry")
    parser.add_argument(
        "--server", default="", metavar="SETTINGS", help="a dry run with these settings: name=value,..."
    )
    parser.add_argument("--release", metavar="VERSION", help="of SGLang (default: the newest that was run)")
    parser.add_argument("--execution-modes", nargs="+", choices=MODES, default=list(MODES), help="default: both")
    for option, text in (("--tp", "tensor-parallel sizes"), ("--ep", "expert-parallel sizes")):
        parser.add_argument(option, nargs="+", type=_positive, metavar="N", help=f"{text} (default: all that were run)")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--include-quantized", action=flag, default=True, help="also runs with quantized weights")
    parser.add_argument(
        "--deduplicate",
        action=flag,
        default=True,
        help="one row for equal calls, and only missing Definitions are made; otherwise existing ones too, for review",
    )
    parser.add_argument("--write", action="store_true", help="write the Definitions of new sizes")
    parser.add_argument("--definitions", type=Path, metavar="DIR", help="where to (default: those of the dataset)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--verbose", action="store_true", help="also list functions of PyTorch without a Definition")
    return parser


if __name__ == "__main__":
    end_with(main)
