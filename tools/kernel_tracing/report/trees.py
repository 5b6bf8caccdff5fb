"""Chains as trees: frames that chains have in common, from the kernel upwards, are shown once.

A subtree (all the callers above one frame) that occurs again, under the same or another kernel, is not repeated: the
first occurrence gets an anchor, and the others link to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.shared.markdown import code, escape, link

# No-break spaces: Markdown neither strips nor collapses them, so that the tree keeps its shape.
GAP = "\u00a0"
Frame = Mapping[str, Any]
# What makes two frames the same.
Key = tuple[str, int, str, str]


@dataclass
class Node:
    """One frame and what calls into its function.

    Attributes:
        key: the frame.
        callers: the frames that follow it in the chains.
        ends: the texts of the chains that end here.
        shape: the number of the set of callers; equal numbers mean equal subtrees. Set by Forest.
    """

    key: Key
    callers: dict[Key, Node] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    shape: int = -1

    def sorted_callers(self) -> list[Node]:
        """The callers, in the order of the chains."""
        return list(self.callers.values())


def frame_key(frame: Frame) -> Key:
    """The frame's identity, which is also its sort key."""
    return (frame["file"], frame["line"], frame["function"], frame["call"])


def merge(chains: Iterable[tuple[Iterable[Frame], str]]) -> list[Node]:
    """The chains of one kernel, each with its text, as trees: one per call site, the kernel's call first."""
    top = Node(("", 0, "", ""))
    for frames, text in chains:
        node = top
        for frame in frames:
            key = frame_key(frame)
            node = node.callers.setdefault(key, Node(key))
        node.ends = (*node.ends, text)
    return list(top.callers.values())


class Forest:
    """Renders the trees of all kernels, in the order in which they appear in the report."""

    def __init__(self, trees: Iterable[list[Node]], places: Places) -> None:
        """Args:
        trees: the trees of every kernel, all of which are needed to find repetitions.
        places: the links to the sources.
        """
        self.places = places
        self._shapes: dict[tuple[tuple[Key, tuple[str, ...], int], ...], int] = {(): 0}
        self._visits: dict[int, int] = {}
        self._sizes = {0: 0}
        self._anchors: dict[int, str] = {}
        for nodes in trees:
            for node in nodes:
                self._intern(node)
                self._count(node)

    def _intern(self, root: Node) -> None:
        order = [root]
        for node in order:
            order.extend(node.callers.values())
        for node in reversed(order):
            callers = node.sorted_callers()
            shape = tuple((caller.key, caller.ends, caller.shape) for caller in callers)
            node.shape = self._shapes.setdefault(shape, len(self._shapes))
            self._sizes[node.shape] = sum(1 + self._sizes[caller.shape] for caller in callers)

    def _count(self, root: Node) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            self._visits[node.shape] = self._visits.get(node.shape, 0) + 1
            if self._visits[node.shape] == 1:
                stack.extend(node.callers.values())

    def _shared(self, node: Node) -> bool:
        """Whether the node's callers are repeated and long enough that a link to them is shorter."""
        return self._sizes[node.shape] > 1 and self._visits[node.shape] > 1

    def lines(self, root: Node) -> list[str]:
        """One kernel call and its callers, one per line."""
        lines: list[str] = []
        stack: list[tuple[Node, str, str]] = [(root, "", "")]
        while stack:
            node, branch, indent = stack.pop()
            line = branch + self.places.frame(node.key)
            line += "".join(f" ▪ {escape(text)}" for text in node.ends)
            callers = node.sorted_callers()
            known = self._anchors.get(node.shape) if self._shared(node) else None
            if known is None and self._shared(node):
                self._anchors[node.shape] = f"callers-{len(self._anchors) + 1}"
                line += f' <a id="{self._anchors[node.shape]}"></a>'
            lines.append(line)
            if known is not None:
                callers_of = link(f"callers of {node.key[2]}", f"#{known}")
                lines.append(f"{indent}└─>{GAP}as above: {callers_of}")
                continue
            for number, caller in reversed(list(enumerate(callers, 1))):
                last = number == len(callers)
                below = indent + (GAP * 2 if last else f"│{GAP}")
                stack.append((caller, f"{indent}{'└─>' if last else '├─>'}{GAP}", below))
        # A backslash at the end of a line is a line break within a paragraph.
        return [f"{line}\\" for line in lines[:-1]] + lines[-1:]


class Places:
    """Links to frames, each of which is written once, at the end of a page."""

    def __init__(self, address: Callable[[str, int], str]) -> None:
        """`address` gives the address of a line of a file."""
        self._address = address
        self._numbers: dict[tuple[str, int], int] = {}

    def link(self, label: str, file: str, line: int) -> str:
        """A link to a line of a file."""
        number = self._numbers.setdefault((file, line), len(self._numbers) + 1)
        return f"[{escape(label)}][{number}]"

    def frame(self, key: Key) -> str:
        """A frame: its call, which links to the sources, and its function."""
        file, line, function, call = key
        name = f"{file.rpartition('/')[2]}:{line}"
        return f"{self.link(callee(call) or function, file, line)} in {code(function)} ({escape(name)})"

    def lines(self) -> list[str]:
        """The addresses."""
        return [f"[{number}]: {self._address(*place)}" for place, number in self._numbers.items()]


def callee(call: str) -> str:
    """The text of a call without its arguments: `self.layers[i](x, y)` -> `self.layers[i]()`."""
    depth = 0
    for position, character in enumerate(call):
        if character == "(" and depth == 0 and position > 0:
            return f"{call[:position]}()"
        depth += character in "([{"
        depth -= character in ")]}"
    return call
