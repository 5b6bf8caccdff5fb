"""An op trace as one HTML page: the graph as a tree, each op with its kernels, conditions, Definitions and chains.

The page needs no network: it contains its styles, scripts and data, and its content security policy refuses everything
else. The data are JSON in a script element that browsers do not run; the scripts insert them as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent / "page"
#: The scripts, in order: each uses those before it.
SCRIPTS = ("data.js", "tree.js", "detail.js", "page.js")

Site = list[int]


def render(
    op_document: Mapping[str, Any], kernel_document: Mapping[str, Any], definitions: Mapping[str, Sequence[str]]
) -> str:
    """The page of an op trace and the kernel traces it was made from.

    definitions: `kernel_id` -> names of the Definitions that cover the kernel; a missing kernel has none yet.
    Raises ValueError if the two documents differ in model, platform or sources, or if the op trace names an op or a
    kernel that does not exist.
    """
    for key in ("model", "platform", "sources"):
        if op_document[key] != kernel_document[key]:
            raise ValueError(
                f"the op trace and the kernel traces differ in {key}: {op_document[key]} and {kernel_document[key]}; "
                "make both from the same sources"
            )
    style = (PARTS / "page.css").read_text(encoding="utf-8")
    scripts = [(PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS]
    values = {
        "policy": _policy(style, scripts),
        "title": html.escape(f"{op_document['model']} on {op_document['platform']}: op trace"),
        "style": style,
        "data": _embedded(_Packer(kernel_document, definitions).pack(op_document)),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    template = (PARTS / "template.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def kernel_id(kernel: Mapping[str, Any]) -> str:
    """Identifies a kernel in both documents: name, source and where it is defined."""
    definition = kernel["definition"]
    return f"{kernel['name']}|{kernel['source']}|{definition['file']}|{definition['line']}"


def _policy(style: str, scripts: Sequence[str]) -> str:
    """The content security policy, which allows these styles and scripts, the empty icon, and nothing else."""
    return (
        f"default-src 'none'; style-src {_digest(style)}; script-src {' '.join(map(_digest, scripts))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(value: Any) -> str:
    """JSON that is safe inside a script element: ASCII, with nothing that could end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _said(chain: Mapping[str, Any]) -> str:
    """What a chain needs, and where it was seen."""
    seen = f"seen in {len(chain['seen'])} recorded runs" if chain["seen"] else ""
    return "; ".join(filter(None, (chain["needs"], seen)))


class _Packer:
    """Stores each text, each frame and each shared tail of chains once; `data.js` unpacks them.

    A chain is the number of a link. Links are pairs (frame, link of the caller or -1) in a flat list, so that the
    chains of a kernel share the path from the model's entry.
    """

    def __init__(self, kernel_document: Mapping[str, Any], definitions: Mapping[str, Sequence[str]]) -> None:
        self._document = kernel_document
        self._definitions = definitions
        self._texts: dict[str, int] = {}
        self._frames: dict[tuple[int, ...], int] = {}
        self._links: dict[tuple[int, int], int] = {}
        self._numbers = {kernel_id(kernel): number for number, kernel in enumerate(kernel_document["kernels"])}

    def pack(self, op_document: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the page."""
        document = self._document
        packed = {
            "model": document["model"],
            "platform": document["platform"],
            "sources": document["sources"],
            "unresolved": len(document["not_evaluated"]),
            "kernels": [self._kernel(kernel) for kernel in document["kernels"]],
            "ops": [self._op(op) for op in op_document["ops"]],
            "graph": self._node(op_document["graph"], {op["name"] for op in op_document["ops"]}),
            "direct": [
                {"kernel": self._number(kernel, "direct_kernels"), "sites": self._sites(kernel["call_sites"])}
                for kernel in op_document["direct_kernels"]
            ],
            "outside": [
                {**self._op(op), "group": op["group"], "when": op["when"]} for op in op_document["non_model_ops"]
            ],
        }
        frames = [number for frame in self._frames for number in frame]
        links = [number for link in self._links for number in link]
        return {**packed, "texts": list(self._texts), "frames": frames, "links": links}

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _kernel(self, kernel: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "name": kernel["name"],
            "source": kernel["source"],
            "category": kernel["category"],
            "file": kernel["definition"]["file"],
            "line": kernel["definition"]["line"],
            "definitions": list(self._definitions.get(kernel_id(kernel), ())),
            "chains": [self._chain(chain) for chain in kernel["chains"]],
        }

    def _chain(self, chain: Mapping[str, Any]) -> int:
        link = -1
        for position, frame in reversed(list(enumerate(chain["frames"]))):
            texts = (frame["function"], frame["call"], "" if position else _said(chain))
            key = (self._text(frame["file"]), frame["line"], *map(self._text, texts))
            number = self._frames.setdefault(key, len(self._frames))
            link = self._links.setdefault((number, link), len(self._links))
        return link

    def _op(self, op: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "name": op["name"],
            "sites": self._sites(op["call_sites"]),
            "kernels": [
                [self._number(kernel, op["name"]), self._text(kernel["condition"])] for kernel in op["kernels"]
            ],
        }

    def _number(self, kernel: Mapping[str, Any], user: str) -> int:
        number = self._numbers.get(kernel_id(kernel))
        if number is None:
            raise ValueError(
                f"{user} of the op trace names the kernel {kernel_id(kernel)}, which the kernel traces lack; "
                "make both from the same sources"
            )
        return number

    def _node(self, node: Mapping[str, Any], ops: set[str]) -> dict[str, Any]:
        if node["kind"] == "op" and node["name"] not in ops:
            raise ValueError(f"the graph of the op trace has an op {node['name']}, which its list of ops lacks")
        return {
            "name": node["name"],
            "kind": node["kind"],
            "annotation": node["annotation"],
            "function": node.get("function", ""),
            "sites": self._sites(node["call_sites"]),
            "children": [self._node(child, ops) for child in node["children"]],
        }

    def _sites(self, sites: Sequence[Mapping[str, Any]]) -> list[Site]:
        return [
            [
                self._text(site["file"]),
                site["line"],
                self._text(site["function"]),
                self._text(site.get("annotation", "")),
            ]
            for site in sites
        ]
