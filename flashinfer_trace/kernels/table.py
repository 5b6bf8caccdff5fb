"""The form of the table of kernels: one entry for each real kernel, with what holds whoever calls it.

An entry says where releases have the kernel, what it launches, and which families it computes: on which GPUs, for which
sizes, under which tag. How a family calls it, and how exactly it computes, is in the family's record, which names the
entry by its path. `flashinfer_trace.kernels` has the entries and looks them up. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.kernels.stacks import BEFORE, TODAY

#: The highest compute capability of a kernel that has no limit.
UNLIMITED = (99, 9)
#: The lowest and the highest compute capability of the GPUs that run a kernel.
Capabilities = tuple[tuple[int, int], tuple[int, int]]
TURING = ((7, 5), UNLIMITED)
AMPERE = ((8, 0), UNLIMITED)
ADA = ((8, 9), UNLIMITED)
FROM_HOPPER = ((9, 0), UNLIMITED)
FROM_BLACKWELL = ((10, 0), UNLIMITED)
TO_HOPPER = ((8, 0), (9, 0))
HOPPER = ((9, 0), (9, 0))
BLACKWELL = ((10, 0), (10, 3))
#: Not a B300 (10.3).
B200 = ((10, 0), (10, 0))
#: Distribution -> the release whose kernels the table describes: today's, and the last of a former name.
RECORDED = {**TODAY, "sgl-kernel": "0.3.21"}
#: How a path begins -> the distribution that has it, as pip names it.
_DISTRIBUTIONS = {
    "flashinfer.": "flashinfer-python",
    "sgl_kernel.": "sglang-kernel",
    "torch.ops.sgl_kernel.": "sglang-kernel",
    "deep_gemm.": "sgl-deep-gemm",
    "flash_mla.": "sgl-flash-mla",
    "flash_attn.cute.": "flash-attn-4",
    "triton_kernels.": "sglang-kernel",
    "sglang.": "sglang",
    "torch.": "torch",
}
#: How a path begins -> the distribution that had it before it was one of its own.
_CAME_FROM = {"deep_gemm.": "sglang-kernel"}
#: Modules that a machine can lack and still run the kernels: each is installed without its dependencies, or only for
#: some GPUs.
OPTIONAL = ("sglang.", "deep_gemm.", "flash_mla.", "flash_attn.cute.", "triton_kernels.")
#: Modules that cannot be imported where the library was installed without what they need, though the kernel's can.
_ALSO_IMPORTED = {
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_kernels.fused_moe_kernel": (
        "sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size"
    ),
}

#: (definition) -> why a kernel does not compute it, or None.
Need = Callable[[Definition], "str | None"]


@dataclass(frozen=True)
class Place:
    """Where some releases of a distribution have a kernel.

    Attributes:
        path: its dotted path there.
        distribution: as pip names it.
        since, until: the first and the last release that has it there, both inclusive; empty if none is known.
    """

    path: str
    distribution: str
    since: str = ""
    until: str = ""

    def has(self, version: str) -> bool:
        """Whether a release has it there."""
        own = _numbers(version)
        return _numbers(self.since) <= own and not (self.until and own > _numbers(self.until))

    @property
    def last(self) -> str:
        """The last release that is known to have it there."""
        return self.until or RECORDED.get(self.distribution, "")


@dataclass(frozen=True)
class Use:
    """Families that a kernel computes in one way.

    Attributes:
        families: their names.
        variants: what distinguishes uses of one path, e.g. a backend -> the GPUs that run it.
        needs: what else a Definition must have.
        tags: the paths by which tags name the kernel; None for the entry's own.
    """

    families: tuple[str, ...]
    variants: Mapping[str, Capabilities]
    needs: tuple[Need, ...] = ()
    tags: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Entry:
    """One kernel of the table.

    Attributes:
        path: dotted path of the public function or class, e.g. ``flashinfer.norm.rmsnorm``.
        uses: what it computes.
        places: where releases have it, the newest first.
        launches: what it launches, or what is another name of it, as traces name that.
        tags: the paths by which tags name it: empty if tags do not.
    """

    path: str
    uses: tuple[Use, ...]
    places: tuple[Place, ...]
    launches: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelFacts:
    """One kernel of a family: what is known of it without calling it.

    Attributes:
        path, variant: name it within the family; see `Entry` and `Use`.
        places: where releases have it, the newest first.
        min_capability, max_capability: inclusive range of CUDA compute capabilities.
        needs: what else a Definition must have.
        tags: the paths by which tags name it.
    """

    path: str
    places: tuple[Place, ...]
    variant: str = ""
    min_capability: tuple[int, int] = (7, 5)
    max_capability: tuple[int, int] = UNLIMITED
    needs: tuple[Need, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Unique name within a family: the path, and the variant in brackets."""
        return f"{self.path}[{self.variant}]" if self.variant else self.path

    @property
    def library(self) -> str:
        """The distribution that has it: of the installed ones, otherwise of the newest release."""
        return (self._installed() or self.places[0]).distribution

    @property
    def libraries(self) -> tuple[str, ...]:
        """Every distribution that has it, or had it."""
        return tuple(dict.fromkeys(place.distribution for place in self.places))

    @property
    def last_in(self) -> str:
        """The last release that has it, as ``sglang-kernel 0.4.2``; empty if today's has it or no stack does."""
        place = self.places[0]
        known = place.distribution in RECORDED and place_in(self.places, TODAY) is None
        return f"{place.distribution} {place.last}" if known else ""

    @property
    def optional(self) -> bool:
        """Whether a machine that has to run the kernels may do without its library."""
        return self.path.startswith(OPTIONAL) or "sgl-kernel" in self.libraries

    @property
    def capabilities(self) -> str:
        """The compute capabilities of the GPUs that run it, as `capability_range` writes them."""
        return capability_range(self.min_capability, self.max_capability)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it runs on a GPU of this compute capability."""
        return self.min_capability <= capability <= self.max_capability

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        """Why it cannot run on a GPU of this compute capability, or None."""
        if self.runs_on(capability):
            return None
        return f"needs compute capability {self.capabilities}, this GPU has {capability[0]}.{capability[1]}"

    def unsupported(self, definition: Definition) -> str | None:
        """Why this kernel does not compute this Definition of the family, or None if it does."""
        return next((reason for need in self.needs if (reason := need(definition)) is not None), None)

    def absent(self) -> str | None:
        """Why no installed release has it, or None: this is its release, and no defect of this machine."""
        if (place := self._installed()) is not None:
            return _checked(place)[0]
        older = [(place, version) for place in self.places if (version := _version(place.distribution)) is not None]
        if not older:
            return None
        place, version = older[0]
        if place.until and _numbers(version) > _numbers(place.until):
            return f"not in {place.distribution} {version}, last in {place.until}"
        return f"not in {place.distribution} {version}, first in {place.since}"

    def missing(self) -> str | None:
        """Why it cannot be used in this environment, or None: its library is not installed, not usable, or another."""
        place = self._installed()
        if place is None:
            return self.absent() or f"needs {self.places[0].distribution}, which is not installed"
        return next((reason for reason in _checked(place) if reason), None)

    def skipped(self) -> str | None:
        """Why a machine that has to run the kernels may leave it out, or None."""
        return self.missing() if self.optional else self.absent()

    def _installed(self) -> Place | None:
        """The place of the installed release."""
        found = {place.distribution: _version(place.distribution) for place in self.places}
        return place_in(self.places, {name: version for name, version in found.items() if version is not None})


def use(
    *families: str,
    variant: str = "",
    on: Capabilities = TURING,
    variants: Mapping[str, Capabilities] | None = None,
    needs: Need | tuple[Need, ...] = (),
    tags: tuple[str, ...] | None = None,
) -> Use:
    """A `Use` of some families: of one variant on a range of compute capabilities, or of several."""
    all_needs = needs if isinstance(needs, tuple) else (needs,)
    return Use(families, variants or {variant: on}, all_needs, tags)


def kernel(
    path: str,
    *uses: Use,
    was: str = "",
    dropped: bool = False,
    places: tuple[Place, ...] = (),
    launches: tuple[str, ...] = (),
    tags: tuple[str, ...] | None = None,
) -> Entry:
    """An entry: its place is its path in the distribution that has such paths, and tags name an op by its function.

    Args:
        path: where today's stack has it; where the last release with it had it, if it is dropped.
        was: where the stack before had it, if not there.
        dropped: whether the stack before was the last with it.
        places: where else releases have it.
    """
    own = _distribution(path)
    found = [Place(path, own, until=BEFORE[own] if dropped else "", since=RECORDED[own] if was else "")]
    earlier = next((one for start, one in _CAME_FROM.items() if path.startswith(start)), "")
    before = _distribution(was) if was else earlier
    if before:
        found.append(Place(was or path, before, until=BEFORE[before]))
    named = (path.removeprefix("torch.ops."),) if tags is None else tags
    return Entry(path, uses, places or tuple(found), launches, named)


def _distribution(path: str) -> str:
    return next(name for start, name in _DISTRIBUTIONS.items() if path.startswith(start))


def capability_range(lowest: tuple[int, int], highest: tuple[int, int]) -> str:
    """An inclusive range of compute capabilities: ``10.0``, ``10.0 to 10.3``, or ``10.0 or above``."""
    low, high = (".".join(map(str, each)) for each in (lowest, highest))
    if highest == UNLIMITED:
        return f"{low} or above"
    return low if lowest == highest else f"{low} to {high}"


def facts_of(entries: tuple[Entry, ...]) -> dict[str, dict[str, KernelFacts]]:
    """Family -> its kernels by label, in the order of the table."""
    found: dict[str, dict[str, KernelFacts]] = {}
    for entry in entries:
        for one in entry.uses:
            tags = entry.tags if one.tags is None else one.tags
            for variant, capabilities in one.variants.items():
                facts = KernelFacts(entry.path, entry.places, variant, *capabilities, one.needs, tags)
                for family in one.families:
                    if found.setdefault(family, {}).setdefault(facts.label, facts) is not facts:
                        raise ValueError(f"the table has two kernels {facts.label} of the family {family}")
    return found


def place_in(places: tuple[Place, ...], versions: Mapping[str, str]) -> Place | None:
    """Where a stack (distribution -> version) has a kernel, or None: that of its newest place."""
    return next((one for one in places if (own := versions.get(one.distribution)) and one.has(own)), None)


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release, for comparison: (0, 4, 2) of ``0.4.2.post1+cu130`` and (0, 4, 2, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _checked(place: Place) -> tuple[str | None, str | None]:
    """Why the installed release of a library lacks a kernel, and why the library cannot be imported; None if neither.

    In the last release that is known to have it, a missing name is a defect of the table, which a call shows.
    """
    version, own = _version(place.distribution) or "", _module_of(place.path)
    is_last = not place.last or _numbers(version) == _numbers(place.last)
    gone = f"not in {place.distribution} {version}, last in {place.last}"
    for name in (own, *(module for start, module in _ALSO_IMPORTED.items() if place.path.startswith(start))):
        try:
            module: object = importlib.import_module(name)
        except Exception as error:  # modules of kernels fail to import in many ways: no driver, another version, ...
            absent = isinstance(error, ModuleNotFoundError) and f"{own}.".startswith(f"{error.name}.")
            why = f"needs {name} of {place.distribution}, which cannot be imported: {type(error).__name__}: {error}"
            return (gone, None) if absent and not is_last else (None, why)
        if name == own:
            owner = functools.reduce(getattr, ("ops", own), sys.modules["torch"]) if _is_op(place.path) else module
    return None if is_last or hasattr(owner, place.path.rpartition(".")[2]) else gone, None


def _is_op(path: str) -> bool:
    return path.startswith("torch.ops.")


def _module_of(path: str) -> str:
    """The module that has a function, or that registers an op."""
    return path.split(".")[2] if _is_op(path) else path.rpartition(".")[0]
