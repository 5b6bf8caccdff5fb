"""The cost of a Definition at given inputs: bytes, operations, and the least time that a GPU needs for them.

    >>> cost_of(definition, make_inputs(definition, {"batch_size": 64}))

A cost proves nothing, and no evidence depends on it; it says how fast a kernel could be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashinfer_trace.dataset.store import definition_of, find_root
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.judging.costs import attention, choice, elementwise, experts, products, recurrent
from flashinfer_trace.judging.costs.work import Cost, CostFunction, Work, cost

__all__ = ["COSTS", "Cost", "CostError", "Work", "cost_of", "work_of"]

#: Family name -> its cost.
COSTS: dict[str, CostFunction] = {
    **attention.COSTS,
    **choice.COSTS,
    **elementwise.COSTS,
    **experts.COSTS,
    **products.COSTS,
    **recurrent.COSTS,
}


class CostError(LookupError):
    """A Definition of a family without a cost. The message says where to add it."""


def work_of(definition: Definition, inputs: Mapping[str, Any], axes: Mapping[str, int]) -> Work:
    """The reads, writes and operations of a Definition for inputs with these values of the variable axes.

    Raises:
        CostError: the Definition's family has no cost.
    """
    name = family_name(definition, load_naming(definition.root or find_root()))
    function = COSTS.get(name or "")
    if function is None:
        raise CostError(f"{definition.name}: family {name} has no cost; add it to a module of {__name__}")
    return function({**axes, **definition.const_axes}, inputs)


def cost_of(definition: Definition | str, inputs: Mapping[str, Any]) -> Cost:
    """The cost of a Definition, or of the one of this name, at actual inputs, which `Definition.bind_axes` accepts.

    Raises:
        CostError: the Definition's family has no cost.
        DatasetError: no Definition has this name.
        InputError: the inputs do not fit the Definition.
    """
    definition = definition_of(definition)
    axes = definition.bind_axes(inputs)
    return cost(definition, axes, work_of(definition, inputs, axes))
