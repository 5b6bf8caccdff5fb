"""The version and the hash of a package of Python sources, unpacked from a wheel or checked out."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_VERSION = re.compile(r"^_*version_*\s*(?::\s*\w+\s*)?=.*?['\"]([0-9][^'\"]*)['\"]", re.M)


def package_version(root: Path, distribution: str) -> str:
    """The version from the wheel's metadata, version.py, _version.py or pyproject.toml, or "unknown"."""
    stem = distribution.replace("-", "_")
    for metadata in sorted(root.parent.glob("*.dist-info")):
        name, _, version = metadata.name.removesuffix(".dist-info").partition("-")
        if name.lower() == stem:
            return version
    for place in ("_version.py", "version.py", "_build_meta.py", "../pyproject.toml", "../version.txt"):
        path = root / place
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            match = _VERSION.search(text)
            if match:
                return match[1]
            if path.suffix == ".txt" and text.strip():
                return text.strip()
    return "unknown"


def package_hash(root: Path) -> str:
    """SHA-256 over the sorted relative paths and contents of the package's .py files."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
