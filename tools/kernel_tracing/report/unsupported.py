"""Models for which the answer would be wrong: some of their layers are none that the evaluator can follow."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.sources import SourceTree


def refuse(model: Mapping[str, Any], sources: SourceTree) -> None:
    """Refuses a model that cannot be evaluated.

    Raises: ConfigurationError, which names the model's type, and the reason.
    """
    parts = [model, *(model[name] for name in serving_steps.part_configs(dict(model)))]
    recurrent = recurrent_models(sources)
    for found in (one.get("model_type") for one in parts):
        if found in recurrent:
            raise ConfigurationError(
                f"model_type={found}: {recurrent[found]} of {serving_steps.CONFIG_FILES} decides which layers keep a "
                "recurrent state (linear attention, Mamba, convolutions), which cannot be evaluated"
            )


def recurrent_models(sources: SourceTree) -> dict[str, str]:
    """The model types some of whose layers keep a recurrent state, and SGLang's class of each configuration."""
    found: dict[str, str] = {}
    classes: dict[str, ast.ClassDef] = {}
    modules = sorted(one for one in sources.modules if one.startswith(serving_steps.CONFIGS))
    for module in modules:
        classes |= {node.name: node for node in sources.tree(module).body if isinstance(node, ast.ClassDef)}
    for module in modules:
        for node in sources.tree(module).body:
            if isinstance(node, ast.ClassDef) and _is_recurrent(node, classes):
                # A class of transformers that SGLang extends declares the type; the file has its name.
                found[next(_model_types(node), module.rpartition(".")[2])] = node.name
    return found


def _is_recurrent(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    own = any(isinstance(one, ast.FunctionDef) and one.name == serving_steps.RECURRENT for one in node.body)
    bases = (classes.get(base.id) for base in node.bases if isinstance(base, ast.Name) and base.id != node.name)
    return own or any(_is_recurrent(base, classes) for base in bases if base is not None)


def _model_types(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == "model_type" for target in targets)
        value = getattr(statement, "value", None)
        if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value
