"""Values that readers do not expect: for JSON, for Python source, for regular expressions, for constraints."""

from __future__ import annotations

import random
from typing import Any

#: Regular expressions that explode, or are none.
PATTERNS = ("(a|aa)+$", "(a+)+b", "((x*)*)*y", "[", "(?P<x", "a{9999999999}", "\\", "(?R)", "^" * 5000, "(" * 3000)

#: Expressions for constraints: none of them has a place in a Definition.
EXPRESSIONS = (
    "2 ** 10 ** 10",
    "9 ** 9 ** 9 == batch_size",
    "a < b <",
    "(" * 4000,
    "not " * 4000 + "a",
    "-" * 9000 + "1 == 1",
    "+".join("a" * 4000),
    "batch_size % 0 == 0",
    "batch_size // 0 == 1",
    "1 << 10 ** 9 > 0",
    "__import__('os')",
    "x == '" + "y" * 3000 + "'",
    "[i for i in range(10 ** 9)]",
    "batch_size == " + "9" * 5000,
    "\u0430 == 1",
    "len(kv_indptr)[0] == 1",
    "a\x00b",
)

#: Python that a reference could contain, as whole lines.
SNIPPETS = (
    "(" * 300,
    "x = " + "-" * 20_000 + "1",
    "x = " + "+".join("1" * 5000),
    "x = " + "[" * 90 + "]" * 90,
    "x = 9 ** 9 ** 9 ** 9",
    "x = 'a' * 10 ** 12",
    "x = (1,) * 10 ** 10",
    "x = 1 << 10 ** 12",
    "x = " + "9" * 6000,
    "x = 0x" + "f" * 6000,
    "x = '\\N{no such name}'",
    "x = f'{1!r:{2}}' f'{{' '\\ud800'",
    "x = f'{" * 60,
    "def run(): yield",
    "async def run(x): return await x",
    "def run(*, x, **y): ...",
    "def run(" + ", ".join(f"a{i}" for i in range(3000)) + "): pass",
    "@run\ndef run(x): return x",
    "class run: pass",
    "run = lambda *x: x",
    "lambda: (yield)",
    "global run",
    "nonlocal run",
    "return 1",
    "break",
    "del run",
    "__debug__ = 1",
    "match x:\n    case [*_, {'a': 1, **b}] if b: pass",
    "type X[T] = int",
    "(x := 1)",
    "import os, sys as torch",
    "from . import _shared",
    "from ._shared import *",
    "from ._shared import nothing_at_all",
    "from ..._shared import x",
    "from .a.b.c import d",
    "from __future__ import annotations, braces",
    "\ufb01le = 1",
    "x\u200b = 1",
    "\tx = 1\n        y = 2",
    "# -*- coding: utf-7 -*-",
    "\x0c\x00",
    "if 1:\n" + "".join(" " * depth + "if 1:\n" for depth in range(1, 99)),
    "if a: pass\n" + "elif a: pass\n" * 3000,
    "try:\n    pass\nexcept* ValueError:\n    pass",
    "x = '''",
    "x: int: int = 3",
    "assert (run, 1)",
    "with torch.no_grad() as a, a as b: pass",
    "torch.ops.load_library('/dev/zero')",
    "HIDDEN_SIZE = HIDDEN_SIZE",
    "HIDDEN_SIZE = torch",
    "HIDDEN_SIZE, EPS = EPS, HIDDEN_SIZE",
    "HIDDEN_SIZE = 1e999",
    "def HIDDEN_SIZE(): pass",
)

#: Numbers and words in the place of a JSON value, as text: some are not JSON.
TOKENS = (
    "NaN", "Infinity", "-Infinity", "-0", "-0.0", "1e999", "-1e999", "1e-999", "0.1e1", "9" * 5000, "9" * 400 + ".5",
    "9007199254740993", "-9007199254740993", "18446744073709551616", "01", "+1", ".5", "1.", "0x10", "1_000", "True",
    "None", "undefined", "'x'", '"\\ud800"', '"\\ude00\\ud83d"', '"\\u0000"', '"\\x41"', '"\n"', '"', "[", "{", "]",
    "[" * 3000, '{"a":' * 500, "[" * 40 + "]" * 40, "//", "/* */ 1", "",
)  # fmt: skip

#: Bytes that get into a file by accident or on purpose.
BYTES = (b"\x00", b"\xff", b"\x80", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\r", b"\r\n",
         b"\x1b[31m", b"\x0c", b"\xe2\x80\xa8", b"\xe2\x80\xae", b"\xc0\xaf", b"\x7f")  # fmt: skip

#: Names of files, as bytes: neither UTF-8 nor printable, all of them.
NAMES = (b"\xff\xfe.json", b"a\nb.json", b".json", b"x.json.json", b"x" * 240 + b".json", b"-rf.json",
         b"\x1b[31mred.json", b"\xe2\x80\xae.json", b"a b.json", b"%s{0}.json", b"*.json", b"[.json",
         b"x.review", b".x.json.abcd1234.part", b"X.JSON")  # fmt: skip


def hostile_text(source: random.Random) -> str:
    """A string that nobody expects as a name, a path, a pattern, an expression or a reference."""
    kind = source.randrange(6)
    if kind == 0:
        return source.choice(PATTERNS)
    if kind == 1:
        return source.choice(EXPRESSIONS)
    if kind == 2:
        return source.choice(SNIPPETS)
    if kind == 3:
        return source.choice(
            ("", " ", "a\x00b", "\u202ex", "\ud800", "\U0001f600" * 50, "\x1b[2J", "\ufeff", "e\u0301", "\u2028")
        )
    if kind == 4:
        return source.choice(("../" * 50 + "etc/passwd", "/dev/zero", "~", "C:\\con", "a" * 300, "{}", "%s%n", "$(id)"))
    return source.choice("ab1_:.\n\"'\\\u00e9\u4e00") * source.choice((1, 41, 1000, 100_000))


def hostile_value(source: random.Random, depth: int = 0) -> Any:
    """A value of any JSON type."""
    kind = source.randrange(9)
    if kind < 3:
        return hostile_text(source)
    if kind < 5:
        numbers = (0, -1, 1, 2**31, 2**53, 2**53 + 1, -(2**63), 10**300, 0.5, -0.0, 1e308, 5e-324, 1.0, 1e22)
        return source.choice(numbers)
    if kind == 5:
        return source.choice((None, True, False, [], {}))
    if kind == 6 and depth < 3:
        return [hostile_value(source, depth + 1) for _ in range(source.choice((1, 2, 5)))]
    if kind == 7 and depth < 3:
        return {hostile_text(source)[:200]: hostile_value(source, depth + 1) for _ in range(source.choice((1, 2, 5)))}
    if kind == 8 and depth == 0:
        return nested(source)
    return source.choice((None, "x", 7))


def nested(source: random.Random) -> Any:
    """Something deep, or something wide."""
    if source.random() < 0.5:
        return [source.choice((None, 0, "x", [], {}))] * source.choice((100, 30_000))
    value: Any = 1
    for _ in range(source.choice((20, 40, 300))):
        value = [value] if source.random() < 0.5 else {"x": value}
    return value
