"""Configurations of models: the classes that the traced model's configuration can never have.

A serving framework defines a class for each configuration that `transformers` lacks, and the files of the models that
use it import it. A test for such a class fails for every model whose files do not import it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.kernel_tracing.source.declarations import ClassInfo
from tools.kernel_tracing.source.index import Index

_BASES = {"PretrainedConfig", "PreTrainedConfig"}


class ModelConfigs:
    """The names used in the files of the traced model and of the models it is built from."""

    def __init__(self, index: Index, entries: Sequence[ClassInfo]) -> None:
        self.index = index
        self.packages = {info.module.name.rpartition(".")[0] for info in entries}
        self.depth = max((package.count(".") + 2 for package in self.packages), default=0)
        self.own = self._reached([info.module.name for info in entries])
        self._known: dict[ClassInfo, bool] = {}

    def is_impossible(self, info: ClassInfo) -> bool:
        """Whether the traced model's configuration is never of this class.

        True for a configuration that another model's file names, if neither it nor a configuration that it derives
        from, or that derives from it, is named by a file of the traced model.
        """
        known = self._known.get(info)
        if known is None:
            known = self._known[info] = self._is_impossible(info)
        return known

    def _is_impossible(self, info: ClassInfo) -> bool:
        if _BASES.isdisjoint(path.rpartition(".")[2] for path in self.index.external_bases(info)):
            return False
        family = {*self.index.mro(info), *self.index.subclasses(info)}
        names = re.compile(rf"\b(?:{'|'.join(sorted(re.escape(cls.name) for cls in family))})\b")
        texts = [self.index.sources.text(module) for module in self._models()]
        return any(names.search(text) for text in texts) and not any(
            names.search(self.index.sources.text(module)) for module in self.own
        )

    def _models(self) -> list[str]:
        return [name for name in self.index.sources.modules if self._is_model(name)]

    def _is_model(self, module: str) -> bool:
        return any(module.startswith(f"{package}.") for package in self.packages)

    def _reached(self, modules: list[str]) -> list[str]:
        """The modules, and those of models that they mention: a model may be built from the layers of another one."""
        packages = "|".join(sorted(re.escape(package) for package in self.packages))
        mention = re.compile(rf"(?:\b(?:{packages})(?:\.|[ \t]+import[ \t]+)|^[ \t]*from[ \t]+\.)(\w+)", re.M)
        found, pending = dict.fromkeys(modules), list(modules)
        while pending:
            named = {
                f"{package}.{name}"
                for name in mention.findall(self.index.sources.text(pending.pop()))
                for package in self.packages
            }
            for module in self._models():
                if module not in found and not named.isdisjoint((module, ".".join(module.split(".")[: self.depth]))):
                    found[module] = None
                    pending.append(module)
        return list(found)
