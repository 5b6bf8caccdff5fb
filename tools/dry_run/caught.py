"""Notices exceptions that SGLang catches and passes over: its ``except`` clauses report them.

The modules of SGLang are compiled with a call at the start of each clause that does not raise again. Lines and columns
stay those of the source.
"""

from __future__ import annotations

import _imp
import ast
import builtins
import contextlib
import importlib.machinery
import marshal
import os
import sys
from pathlib import Path
from typing import Any

from tools.dry_run import findings
from tools.runtime_tracing import frames

_NAME = "__dry_run_caught__"


class _Reporting(ast.NodeTransformer):
    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self.generic_visit(node)
        if not isinstance(node.body[-1], ast.Raise):
            call = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [], []))
            for part in ast.walk(call):
                ast.copy_location(part, node.body[0])
            node.body.insert(0, call)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with reports. Its bytecode is kept under a name of its own: the usual one reports nothing."""

    def get_code(self, fullname: str) -> Any:
        source = Path(self.path)
        if source.parent.name != "sglang" and "/sglang/" not in self.path:
            return super().get_code(fullname)
        kept = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}-reporting"
        if kept.exists() and kept.stat().st_mtime >= max(source.stat().st_mtime, Path(__file__).stat().st_mtime):
            code = marshal.loads(kept.read_bytes())
            # As importlib does: it may have been compiled at another path.
            _imp._fix_co_filename(code, self.path)  # type: ignore[attr-defined]
            return code
        tree = _Reporting().visit(ast.parse(source.read_bytes(), self.path))
        code = compile(tree, self.path, "exec", dont_inherit=True)
        kept.parent.mkdir(exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}")
        partial.write_bytes(marshal.dumps(code))
        partial.rename(kept)
        return code


def install(site: Path) -> None:
    """From now on, modules of SGLang in a site report what they catch."""

    def report() -> None:
        error = sys.exc_info()[1]
        code = sys._getframe(1).f_code
        function = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
        place = f"{frames.package_path(code.co_filename)}:{function}"
        _note(place, error)

    setattr(builtins, _NAME, report)
    real = contextlib.suppress.__exit__

    def leave(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        passed = real(self, kind, error, trace)
        if passed and error is not None:
            place = frames.package_path(sys._getframe(1).f_code.co_filename)
            if place is not None and place.startswith("sglang/"):
                _note(f"{place}:{sys._getframe(1).f_code.co_name}", error)
        return passed

    contextlib.suppress.__exit__ = leave  # type: ignore[method-assign]
    sys.path_hooks.insert(0, _hook(site))
    sys.path_importer_cache.clear()


def _note(place: str, error: Any) -> None:
    kind = type(error).__name__
    absent = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0]
    known = absent in findings.REVIEWED["modules"] or f"{place}:{kind}" in findings.REVIEWED["places"]
    if not known and not isinstance(error, (KeyboardInterrupt, SystemExit)):
        findings.note(findings.CAUGHT, f"{kind}: {' '.join(str(error).split())[:160]}", place)


def _hook(site: Path) -> Any:
    package = str(site / "sglang")

    def hook(path: str) -> Any:
        if path != str(site) and not path.startswith(package):
            raise ImportError(path)
        extensions = (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
        return importlib.machinery.FileFinder(path, extensions, (_Loader, [".py"]))

    return hook
