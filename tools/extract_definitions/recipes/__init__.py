"""How to derive the Definitions of each family from models: one module per op_type, registered here."""

from __future__ import annotations

from tools.extract_definitions.needs import Recipe
from tools.extract_definitions.recipes import (
    activation,
    gemm,
    gqa_paged,
    gqa_ragged,
    mla_paged,
    mla_ragged,
    moe_sigmoid,
    moe_softmax,
    rmsnorm,
    rope,
    sampling,
)

RECIPES: tuple[Recipe, ...] = (
    activation.RECIPE,
    gemm.RECIPE,
    gqa_paged.RECIPE,
    gqa_ragged.RECIPE,
    mla_paged.RECIPE,
    mla_ragged.RECIPE,
    moe_sigmoid.RECIPE,
    moe_softmax.RECIPE,
    rmsnorm.RECIPE,
    rope.RECIPE,
    *sampling.RECIPES,
)
