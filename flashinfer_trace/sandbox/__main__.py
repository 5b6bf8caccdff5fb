"""``python -m flashinfer_trace.sandbox`` says what confines references on this machine. Imports torch."""

from __future__ import annotations

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.sandbox.confine import LEVELS
from flashinfer_trace.sandbox.fork_server import available
from flashinfer_trace.sandbox.worker import ReferenceWorker

_NOTHING = {
    **{"name": "nothing", "op_type": "none", "description": "Gives nothing.", "tags": [], "axes": {}},
    **{"constraints": [], "inputs": {}, "outputs": {"y": {"shape": None, "dtype": "int32"}}},
    "reference": "def run():\n    return 0\n",
}


def main() -> None:
    """Runs an empty reference and prints the level that its worker reached."""
    if not available():
        print("none: this platform cannot fork; references run in the process that verifies them")
        return
    with ReferenceWorker() as worker:
        worker.run(Definition.from_dict(_NOTHING), {}, seed=0)
        print(f"{worker.level}: {LEVELS[worker.level]}")


if __name__ == "__main__":
    main()
