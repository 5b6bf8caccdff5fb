"""Records the digests of workloads in workloads/<op_type>/<name>.json: of one Definition a family, or of those named.

python -m tools.record_workloads                 # one Definition of each family
python -m tools.record_workloads rmsnorm_h7168
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flashinfer_trace import DatasetError, Definition, InputError, definitions, find_root, load
from flashinfer_trace.families import FamilyError, family_of
from flashinfer_trace.format.files import Lines, laid_out, write_text
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.judging.traffic import Workload, digests, drawn, path_of
from flashinfer_trace.verdict.tensors import torch_dtype
from tools.shared.command import end_with

#: Limit for the inputs of a recorded workload: a CPU makes them in seconds, so anybody can check them.
MOST_BYTES = 128 << 20
#: Bytes of the weights of a Definition that represents its family, if there is one.
WEIGHTS = 64 << 20


def chosen() -> list[Definition]:
    """One Definition of each family: the one that has a file, so new Definitions change no choice.

    If none has one, it is the median by weights of those with up to WEIGHTS bytes, or else the smallest.
    """
    families: dict[str, list[Definition]] = {}
    for definition in definitions():
        families.setdefault(family_of(definition).name, []).append(definition)
    root, found = find_root(), []
    for members in families.values():
        members.sort(key=lambda one: (input_bytes(one), one.name))
        small = [one for one in members if input_bytes(one) <= WEIGHTS] or members[:1]
        recorded = [one for one in members if path_of(one, root).exists()]
        found.append((recorded or [small[len(small) // 2]])[0])
    return found


def bytes_of(workload: Workload) -> int:
    """Memory of the inputs of a workload."""
    definition, total = workload.definition, 0
    for name, shape in definition.input_shapes(workload.axes).items():
        if shape is not None:
            total += torch.Size(shape).numel() * torch_dtype(definition.inputs[name].dtype).itemsize
    return total


def record(definition: Definition, root: Path) -> int:
    """Writes the file of a Definition: seed and axes of each workload, and digests of small ones; their number."""
    every = drawn(definition)
    found = {one.name: digests(one.inputs()) if bytes_of(one) <= MOST_BYTES else {} for one in every}
    write(path_of(definition, root), definition, every, found)
    return sum(map(bool, found.values()))


def write(
    path: Path, definition: Definition, every: Sequence[Workload], found: Mapping[str, Mapping[str, str]]
) -> None:
    """Writes the file: a line for each workload."""
    entries = {one.name: {"seed": one.seed, "axes": dict(one.axes), "inputs": found[one.name]} for one in every}
    document = {"$schema": "../../schema/workloads.schema.json", "definition": definition.name, "workloads": entries}
    spread = {(): Lines(2, closing=0), ("workloads",): Lines(4, closing=2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, laid_out(document, lambda place, _: spread.get(place)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 1 if a workload could not be made, 2 for names that are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="Definitions; by default one of each family")
    names = parser.parse_args(arguments).names
    failed = 0
    try:
        every = [load(name) for name in names] or chosen()
    except (DatasetError, FamilyError) as error:
        print(error, file=sys.stderr)
        return 2
    for definition in every:
        started = time.perf_counter()
        try:
            count = record(definition, definition.root or find_root())
            print(
                f"{definition.name}: {count} workloads with digests, {time.perf_counter() - started:.1f} s", flush=True
            )
        except (FamilyError, InputError, NotImplementedError, OSError) as error:
            failed = 1
            print(f"{definition.name}: {error}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    end_with(main)
