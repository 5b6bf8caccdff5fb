"""Shell completion of names, op_types, tags and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from flashinfer_trace.dataset import store
from flashinfer_trace.format.definition import Definition, InputError

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def _completer(values: Callable[[], Iterable[str]]) -> Completer:
    """Completes to the `values` that begin with what the user typed; offers none if the dataset cannot be read."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        try:
            return sorted({value for value in values() if value.startswith(incomplete)})
        except (store.DatasetError, InputError, OSError):
            return []

    return complete


names = _completer(lambda: (path.stem for path in store.definition_paths()))
op_types = _completer(lambda: (path.parent.name for path in store.definition_paths()))
tags = _completer(lambda: (tag for definition in store.definitions() for tag in definition.tags))
words = _completer(lambda: (value for one in store.definitions() for value in _words(one)))
models = _completer(lambda: (path.stem for path in (store.find_root() / "models" / "needs").glob("*.json")))


def _words(definition: Definition) -> Iterator[str]:
    """The words of `find` that are worth completing."""
    yield from (definition.name, definition.op_type)
    yield from (
        tag.replace(":", "=") if tag[:3] in ("tp:", "ep:") else tag.partition(":")[2] for tag in definition.tags
    )


class _ColonBashComplete(BashComplete):
    """Completes tags in bash, which splits ``status:verified`` into three words and replaces only the last of them."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor and the word at it; words around a colon are joined again."""
        arguments, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in (*arguments, incomplete):
            if words and (word == ":" or words[-1].endswith(":")):
                words[-1] += word
            else:
                words.append(word)
        return words[:-1], words[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        """Completions without the text up to the last colon, because bash keeps that text."""
        kept = incomplete.rfind(":") + 1
        found = super().get_completions(args, incomplete)
        return [CompletionItem(item.value[kept:], type=item.type, help=item.help) for item in found]


def register_bash_completion() -> None:
    """Makes the completion script of bash use the class above."""
    add_completion_class(_ColonBashComplete)
