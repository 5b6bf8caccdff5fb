"""A configuration for each model file of a release, of made-up sizes: what the checker is tried on.

`model_files.json` has the sizes. They suffice to run a model's code. What else a `config.json` says stays unknown, so
that both branches of tests on it are evaluated.
"""

from __future__ import annotations

import ast
from pathlib import Path

from flashinfer_trace.format import json_source
from tools.kernel_tracing.configuration.listed import Configuration, Model
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.sources import SourceTree

PATH = Path(__file__).with_name("model_files.json")
#: The name under which a model file lists the models that it serves.
_ENTRY = "EntryClass"


def model_files(sources: SourceTree, path: Path = PATH) -> list[Configuration]:
    """A configuration for the first model of each file of `sglang/srt/models/` that serves any, in the files' order.

    Raises:
        ConfigurationError: the sizes are malformed, or no file serves a model.
    """
    try:
        document = json_source.load_object(path)
        common, models = document["common"], document["models"]
    except (json_source.JsonSourceError, KeyError) as error:
        raise ConfigurationError(f"{path}: malformed ({error!r}); it needs `common` and `models`") from None
    found = []
    for module, file in sorted(sources.files.items()):
        name = file.removeprefix(serving_steps.MODEL_FILES).removesuffix(".py")
        served = _served(sources.text(module)) if file.startswith(serving_steps.MODEL_FILES) else ""
        if served:
            config = {**common, **models.get(name, {}), "architectures": [served]}
            found.append(Configuration(name, Model(name, config, (1, 1)), recorded=False))
    if not found:
        raise ConfigurationError(f"{serving_steps.MODEL_FILES}: no file has an {_ENTRY}")
    return found


def _served(text: str) -> str:
    """The first class that a module lists as its entry; "" if there is none."""
    if _ENTRY not in text:
        return ""
    for node in ast.parse(text).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == _ENTRY for target in targets):
            value = getattr(node, "value", None)
            parts = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
            return next((part.id for part in parts if isinstance(part, ast.Name)), "")
    return ""
