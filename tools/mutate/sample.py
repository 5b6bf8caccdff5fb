"""The fixed sample of mutants that every test run judges, small enough for CI."""

from __future__ import annotations

from collections.abc import Iterable

from tools.mutate.mutants import Mutant


def sample(found: Iterable[Mutant], share: int) -> list[Mutant]:
    """About one mutant in `share`, chosen by content hash: the same ones until their code changes."""
    return [mutant for mutant in found if int(mutant.content, 16) % share == 0]
