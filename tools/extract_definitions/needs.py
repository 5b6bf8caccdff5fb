"""The input and output of recipes: the model and options of a call, and the needs found for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.models import Model
from tools.extract_definitions.traces import STAGES, Usage
from tools.kernel_tracing.configuration.checks import misfit


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes:
        stages: serving stages to extract: `prefill`, `decode` or both.
        tensor_parallel: tensor-parallel sizes; None for those that each family covers by default.
        expert_parallel: expert-parallel sizes; None as above.
        page_sizes: tokens per page of the key-value cache.
        quantized: whether to extract kernels with quantised weights.
        ranks: the tensor- and the expert-parallel size of the one way to serve that is extracted; None for several.
    """

    stages: tuple[str, ...] = STAGES
    tensor_parallel: tuple[int, ...] | None = None
    expert_parallel: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] = (1, 64)
    quantized: bool = True
    ranks: tuple[int, int] | None = None

    @property
    def splits_each_expert(self) -> bool | None:
        """Whether ranks share the features of each expert; None if both ways to split a layer are extracted."""
        return None if self.ranks is None else self.ranks[0] > self.ranks[1]

    @property
    def has_default_sizes(self) -> bool:
        """Whether the user and the server leave all sizes to the families."""
        sizes = self.tensor_parallel, self.expert_parallel, self.ranks, self.page_sizes
        return sizes == (None, None, None, Options.page_sizes)


@dataclass(frozen=True)
class Use:
    """One place where a model uses a kernel.

    Attributes:
        model: the model.
        op: what the model's code calls it.
        role: what the kernel does there, for descriptions; may be empty.
        tp, ep: the parallel size at which the kernel has these sizes; None where it makes no difference.
    """

    model: Model
    op: str
    role: str = ""
    tp: int | None = None
    ep: int | None = None


@dataclass(frozen=True)
class Need:
    """A kernel at the sizes of a model.

    Attributes:
        family: name of the family in schema/naming.json.
        axes: the const axes that decide its name and sizes.
        use: where it is needed.
        stages: serving stages that call it.
        tags: tags beyond those that the family always has.
        claimed: whether models/ says so, so that tags may.
    """

    family: str
    axes: Mapping[str, int]
    use: Use
    stages: tuple[str, ...]
    tags: tuple[str, ...] = ()
    claimed: bool = True

    @property
    def key(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        """A key that is equal for needs of the same Definition."""
        return self.family, tuple(sorted(self.axes.items()))


@dataclass
class Request:
    """One model to extract: what recipes read, and what they report in addition to needs.

    Attributes:
        unused: ops that this configuration never calls, with the reason.
        uncovered: ops that a recipe knows but cannot cover for this model, with the reason. An op that the
            configuration needs and the trace lacks is one of them.
        left_out: messages on the sizes that were left out, with the reason.
    """

    model: Model
    usage: Usage
    options: Options
    unused: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)

    def stages(self, op: str, kernels: Iterable[str] = ()) -> tuple[str, ...]:
        """The chosen stages in which an op runs or, if kernels are given, in which it calls one of them."""
        found = self.usage.op(op)
        if found is None:
            return ()
        wanted = frozenset(kernels)
        stages = {
            stage
            for kernel, when in found.kernels.items()
            if not wanted or kernel_name(kernel) in wanted
            for stage in when
        }
        if not found.kernels and not wanted:  # torch computes it whenever the op runs
            stages = set(STAGES)
        return tuple(stage for stage in STAGES if stage in stages and stage in self.options.stages)

    def expect(self, op: str, what: str) -> None:
        """Reports an op that this configuration needs as not covered if the trace lacks it.

        The trace of one server is that of this configuration: what it lacks, the server does not call.

        Args:
            op: the op.
            what: what the configuration needs, in words.
        """
        if self.usage.op(op) is None and self.options.ranks is None:
            reason = f"the configuration needs {what}; the trace of {self.usage.architecture} lacks the op"
            self.uncovered.setdefault(op, reason)

    def tensor_parallel(self, default: Sequence[int]) -> list[int]:
        """The tensor-parallel sizes at which this model's heads can be divided.

        Raises:
            ExtractionError: the heads cannot be divided by a size that the user gave.
        """
        heads, fitting = self.model.size("num_attention_heads"), []
        if not self.model.is_latent and heads % (kv_heads := self.model.size("num_key_value_heads")):
            raise ExtractionError(
                f"{self.model.path}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}, so "
                "query heads cannot share key-value heads evenly; correct the configuration"
            )
        for size in self.options.tensor_parallel or default:
            problem = self._misfit(size)
            if problem and self.options.tensor_parallel:
                others = [str(n) for n in range(1, heads + 1) if not self._misfit(n)]
                raise ExtractionError(f"{problem}; choose from {', '.join(others)}")
            if problem:
                self.left_out[problem] = None
            else:
                fitting.append(size)
        return fitting

    def _misfit(self, size: int) -> str:
        """Why this model's heads cannot be divided over this many ranks; "" if they can."""
        heads, kv_heads = self.model.size("num_attention_heads"), self.model.size("num_key_value_heads")
        return misfit(heads, None if self.model.is_latent else kv_heads, size, self.model.name)

    def divides(self, width: int, size: int, what: str) -> bool:
        """Whether a tensor-parallel size divides `width`. If it does not, a note in `left_out` says so."""
        if width % size:
            self.left_out[f"TP {size} does not divide {what} {width} of {self.model.name}"] = None
        return width % size == 0


@dataclass(frozen=True)
class Recipe:
    """How to derive the Definitions of one op_type from models.

    Attributes:
        op_type: the op_type of the families.
        families: their names in schema/naming.json.
        kernels: `<source>:<name>` of the real kernels that they define.
        fields: the fields of a configuration that it understands; it can read no others.
        needs: finds what a model needs.
        document: makes the JSON of a Definition, without name, status and reference, from family, axes and needs.
    """

    op_type: str
    families: tuple[str, ...]
    kernels: frozenset[str]
    fields: frozenset[str]
    needs: Callable[[Request], Iterator[Need]]
    document: Callable[[str, Mapping[str, int], Sequence[Need]], dict[str, Any]]


def kernel_name(kernel: str) -> str:
    """`<source>:<name>` without the method, because a class of kernels covers all its methods."""
    return kernel.partition(".")[0] if not kernel.startswith("torch.ops") else kernel
