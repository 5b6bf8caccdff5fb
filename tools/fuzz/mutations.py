"""Ways of making a valid file hostile. Each takes a source of random numbers and gives new bytes, or changes a path."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.digests import content_sha256, lengths_sha256
from tools.fuzz.values import BYTES, NAMES, SNIPPETS, TOKENS, hostile_value

#: Most values that changes choose from; what has more is not made larger still.
MAX_PLACES = 5000

_VALUE = re.compile(r'(?<=: )("(?:[^"\\]|\\.)*"|-?\d[\d.e+-]*|true|false|null)')


def hostile_json(source: random.Random, content: bytes) -> tuple[str, bytes]:
    """The change made, and a variant of JSON or JSON lines, mostly still JSON, with one to three wrong values."""
    if source.random() < 0.3:
        return hostile_bytes(source, content)
    lines = content.split(b"\n")
    is_lines = lines[0].endswith((b"}", b"]"))
    data = [json.loads(line) for line in lines if line] if is_lines else json.loads(content)
    done = []
    for _ in range(source.choice((1, 1, 2, 3))):
        change = source.choice(TREE_CHANGES)
        places = list(containers(data))
        if places:
            change(source, data, places)
            done.append(change.__name__)
    ascii_only = source.random() < 0.5
    if is_lines:
        text = "".join(json.dumps(line, ensure_ascii=ascii_only) + "\n" for line in data)
    else:
        text = json.dumps(data, indent=2, ensure_ascii=ascii_only)
    if source.random() < 0.2:
        text = source.choice(TEXT_CHANGES)(source, text)
        done.append("text")
    return "+".join(done), text.encode("utf-8", "surrogatepass")


Place = tuple[Any, Any]


def containers(data: Any) -> Sequence[Place]:
    """(container, key) of every value below the root."""
    found: list[Place] = []
    queue = [data]
    while queue and len(found) < MAX_PLACES:
        one = queue.pop()
        keys: Sequence[Any] = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            queue.append(one[key])
    return found


def replaced(source: random.Random, data: Any, places: Sequence[Place]) -> None:
    container, key = source.choice(places)
    container[key] = hostile_value(source)


def removed(source: random.Random, data: Any, places: Sequence[Place]) -> None:
    container, key = source.choice(places)
    del container[key]


def renamed(source: random.Random, data: Any, places: Sequence[Place]) -> None:
    container, key = source.choice(places)
    if isinstance(container, dict):
        container[str(hostile_value(source))[:2000]] = container.pop(key)


def added(source: random.Random, data: Any, places: Sequence[Place]) -> None:
    container, key = source.choice(places)
    if isinstance(container, dict):
        container[str(hostile_value(source))[:2000]] = hostile_value(source)
    else:
        container.insert(key, hostile_value(source))


def moved(source: random.Random, data: Any, places: Sequence[Place]) -> None:
    """A copy of one value takes the place of another one."""
    (one, key), (other, other_key) = source.choice(places), source.choice(places)
    one[key] = copy.deepcopy(other[other_key])


def wrapped(source: random.Random, data: Any, places: Sequence[Place]) -> None:
    container, key = source.choice(places)
    value = container[key]
    many = [value] * (2000 if len(places) < MAX_PLACES and not isinstance(value, (dict, list)) else 20)
    container[key] = source.choice(([value], {"value": value}, str(value), many))


def respelled(source: random.Random, data: Any, places: Sequence[Place]) -> None:
    """A string loses, repeats or gains characters; a number becomes another one. For code, that is odd code."""
    container, key = source.choice(places)
    value = container[key]
    if isinstance(value, str) and "\n" in value:
        container[key] = hostile_python(source, value.encode())[1].decode("utf-8", "replace")
    elif isinstance(value, str):
        cut = source.randrange(len(value) + 1)
        inserted = source.choice(
            ("", value[:cut], value[cut:][:2000] * 50, "\x00", "\u00e9", "_", " ", "-1", ":", "9" * 30)
        )
        container[key] = value[:cut] + inserted + value[cut + source.randrange(3) :]
    elif isinstance(value, (int, float)):
        container[key] = source.choice((value + 1, -value, value * 10**18, value / 7, str(value), value == 1))


TREE_CHANGES: Sequence[Callable[[random.Random, Any, Sequence[Place]], None]] = (
    replaced,
    replaced,
    removed,
    renamed,
    added,
    moved,
    wrapped,
    respelled,
    respelled,
)


def other_token(source: random.Random, text: str) -> str:
    """A value becomes a number or a word that is mostly no JSON."""
    found = list(_VALUE.finditer(text))
    if not found:
        return text + source.choice(TOKENS)
    match = source.choice(found)
    return text[: match.start()] + source.choice(TOKENS) + text[match.end() :]


def line_twice(source: random.Random, text: str) -> str:
    """Mostly a duplicate key."""
    lines = text.split("\n")
    number = source.randrange(len(lines))
    return "\n".join([*lines[: number + 1], *lines[number:]])


def line_removed(source: random.Random, text: str) -> str:
    lines = text.split("\n")
    del lines[source.randrange(len(lines))]
    return "\n".join(lines)


def twice(source: random.Random, text: str) -> str:
    return text + source.choice(("", "\n", "\x00")) + text


TEXT_CHANGES: Sequence[Callable[[random.Random, str], str]] = (
    other_token,
    other_token,
    line_twice,
    line_removed,
    twice,
)


def hostile_bytes(source: random.Random, content: bytes) -> tuple[str, bytes]:
    """The change made, and a file that is cut, torn, blown up or not even text."""
    kind = source.choice(("cut", "flipped", "inserted", "left out", "repeated", "token", "large", "none"))
    place = source.randrange(len(content) + 1)
    if kind == "cut":
        return kind, content[:place]
    if kind == "flipped":
        flipped = bytearray(content)
        for _ in range(source.choice((1, 3, 50))):
            flipped[source.randrange(len(flipped))] ^= 1 << source.randrange(8)
        return kind, bytes(flipped)
    if kind == "inserted":
        return kind, content[:place] + source.choice(BYTES) * source.choice((1, 1, 500)) + content[place:]
    if kind == "left out":
        return kind, content[:place] + content[place + source.choice((1, 10, 300)) :]
    if kind == "repeated":
        return kind, content[:place] + content[place : place + 200] * source.choice((2, 1000)) + content[place:]
    if kind == "token":
        text = content.decode("utf-8", "replace")
        return kind, source.choice(TEXT_CHANGES)(source, text).encode("utf-8", "surrogatepass")
    if kind == "large":
        piece = source.choice((b"[", b'{"a":', b"[1,", b'"x', b"1,", b" ", b"\n", b"9", b"\xff", b"\\u12", b"x=1\n"))
        return kind, piece * source.choice((100, 10_000, 1_500_000 // len(piece)))
    return kind, source.choice((b"", b"null", b"[]", b"{}", b'""', b"0", b"\x00" * 64, bytes(range(256))))


def hostile_python(source: random.Random, content: bytes) -> tuple[str, bytes]:
    """The change made, and a variant of a Python source with odd lines."""
    if source.random() < 0.2:
        return hostile_bytes(source, content)
    lines = content.decode("utf-8", "replace").split("\n")
    done = []
    for _ in range(source.choice((1, 1, 2))):
        number = source.randrange(len(lines))
        kind = source.choice(("snippet", "snippet", "removed", "repeated", "exchanged", "indented", "spelled"))
        done.append(kind)
        if kind == "snippet":
            blanks = source.choice(("", "    "))
            lines.insert(number, "\n".join(blanks + line for line in source.choice(SNIPPETS).split("\n")))
        elif kind == "removed" and len(lines) > 1:
            del lines[number]
        elif kind == "repeated":
            lines[number:number] = [lines[number][:2000]] * source.choice((1, 2000))
        elif kind == "exchanged":
            other = source.randrange(len(lines))
            lines[number], lines[other] = lines[other], lines[number]
        elif kind == "indented":
            lines[number] = source.choice(("\t", " ", " " * 300)) + lines[number]
        else:
            words = re.findall(r"\w+|\W", lines[number]) or [""]
            words[source.randrange(len(words))] = source.choice(
                (*words, "__class__", "(", "0", "\u00b2", "=", "\\", '"')
            )
            lines[number] = "".join(words)
    return "+".join(done), "\n".join(lines).encode("utf-8", "surrogatepass")


def sealed(content: bytes) -> bytes:
    """A JSON file whose digests of itself, and of its profiles, are right; other content stays as it is."""
    try:
        data = json.loads(content)
        for profile in data.get("profiles", {}).values():
            profile["lengths_sha256"] = lengths_sha256(profile)
        if "sha256" in data:
            data["sha256"] = content_sha256(data, "$schema", "sha256")
        return json.dumps(data, indent=1).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return content


def linked(source: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(source.choice(("/dev/zero", "/dev/null", path.name, "missing.json", "..", "/dev/tty")))


def fifo(source: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(source: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()
    if source.random() < 0.5:
        (path / "inside.json").write_bytes(b"{")


def missing(source: random.Random, path: Path) -> None:
    path.unlink()


def oddly_named(source: random.Random, path: Path) -> None:
    """A copy, or the file itself, under a name that is hard to print."""
    other = os.path.join(os.fsencode(path.parent), source.choice(NAMES))
    content = path.read_bytes()
    if source.random() < 0.5:
        path.unlink()
    with open(other, "wb") as stream:
        stream.write(content if source.random() < 0.7 else b"{")


#: Changes that replace a file by something else.
ON_DISK: Sequence[Callable[[random.Random, Path], None]] = (linked, fifo, directory, missing, oddly_named)
