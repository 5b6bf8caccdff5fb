"""Definitions that others wrote: FlashInfer's dumps, and those of flashinfer-bench. Importing this imports no torch.

FlashInfer 0.7 writes a Definition for each call of a running program (``FLASHINFER_TRACE_DUMP=1``). Its templates name
axes, inputs and outputs in their own way, and embed references that import what they like. `ALIASES` says, by version
and template, which families of this dataset may compute the same function, and how one calls the other. Whether they do
compute the same, the family's oracle decides (`judging.dumped`).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.store import definitions, find_root, find_roots
from flashinfer_trace.format.constraints import ConstraintError, parse
from flashinfer_trace.format.definition import Definition, InputError, TensorSpec
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.naming import Naming, NamingError, derive_name, family_name, load_naming
from flashinfer_trace.format.reference import ReferenceSourceError

#: How templates and families correspond, from the root of the dataset.
ALIASES = "schema/flashinfer_dumps.json"
#: The dtype in a dump that did not see it.
UNKNOWN = "unknown"
#: The rule of the allow-list that a dumped reference need not meet: the oracle judges which of equal values is first.
TIES = frozenset({"reference-ties"})
#: Keys of a dump that a Definition of this dataset has not.
OF_DUMPS = ("check", "init", "calls")
#: Constant sizes, which follow the template in a name.
_SIZES = r"(?:_(?:d_)?[A-Za-z]+[0-9]+)*"
#: Functions that give memory as it was, and what a dumped reference calls instead.
_MEMORY = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}


class DumpError(ValueError):
    """A dump, or the table of aliases, cannot be used. The message names the file and the fix."""


@dataclass(frozen=True)
class Alias:
    """How one template corresponds to families of this dataset.

    Attributes:
        template: the prefix of the names of its dumps.
        families: those that may compute it, the likeliest first.
        axes: equations that give const axes of the families from those of the dump.
        inputs: parameter of the dumped reference -> expression of the family's inputs and, in upper case, its const
            axes. A parameter that is not here takes the input of its own name.
        outputs: the family's output -> the dump's. One that is not here has its own name.
        without: outputs of the family that the template lacks: these are not judged.
        differs: how its function differs in form from the family's. Such a dump is never the same; its values are
            judged.
        call: expression that calls the reference, as ``reference(q=their_q[:1])``; by default once, with all inputs.
        result: expression of the family's outputs: ``result`` is what the reference returned, ``their_NAME`` what it
            was given as NAME.
        kernel: path of the kernel here that the dumped API is.
        silent: arguments of the API that decide the function, and that a dump does not tell.
    """

    template: str
    families: tuple[str, ...]
    axes: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    call: str = ""
    result: str = "result"
    kernel: str = ""
    silent: tuple[str, ...] = ()

    @property
    def form(self) -> tuple[str, ...]:
        """The differences that every dump of the template has. They are not defects."""
        return (*self.differs, *(f"it has no output {name}" for name in self.without))


@dataclass(frozen=True)
class Dump:
    """A Definition that a program of others wrote.

    Attributes:
        definition: what it says; ``unknown`` dtypes and a missing reference (an empty text) are possible.
        optional: inputs and outputs that a call may leave out.
        api: the function that was called, as ``fi_api:`` says; empty if it does not.
        calls: how often it was called; 0 if the dump does not count.
        check: the source of its comparison; empty if there is none.
    """

    definition: Definition
    optional: frozenset[str]
    api: str
    calls: int
    check: str

    @property
    def name(self) -> str:
        return self.definition.name


@dataclass(frozen=True)
class Match:
    """A Definition of a family here that a dump may be.

    Attributes:
        family: its family.
        definition: of the dataset; of a size that it lacks, one of the family with that size put in.
        exists: whether the dataset has it.
        alias: how the dump's names correspond to its names.
        untold: const axes whose values the dump does not tell.
    """

    family: str
    definition: Definition
    exists: bool
    alias: Alias
    untold: Mapping[str, int]


def read_dumps(paths: Iterable[Path]) -> list[Dump]:
    """The dumps in files and directories, by name; of a TraceSet of flashinfer-bench, its ``definitions/``.

    Raises:
        DumpError: a file cannot be read or is not a Definition, or a directory has none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        files = dump_files(path) if path.is_dir() else [path]
        if not files:
            raise DumpError(f"{path}: there is no .json file; give the directory of FLASHINFER_TRACE_DUMP_DIR")
        found |= dict.fromkeys(files)
    return sorted(map(read_dump, found), key=lambda dump: dump.name)


def dump_files(directory: Path) -> list[Path]:
    """The files of a directory, sorted; of a TraceSet of flashinfer-bench, those of its ``definitions/``."""
    inside = directory / "definitions"
    return sorted((inside if inside.is_dir() else directory).rglob("*.json"))


def read_dump(path: Path) -> Dump:
    """The dump in a file.

    Raises:
        DumpError: it cannot be read, or is not a Definition.
    """
    return dump_of(_data(path), path)


def dump_of(data: Mapping[str, Any], path: Path | None = None) -> Dump:
    """The dump that parsed JSON says.

    Raises:
        DumpError: it is not a Definition.
    """
    where = path or "dump"
    try:
        definition = Definition.from_dict({"reference": "", **data}, path)
    except InputError as error:
        raise DumpError(str(error)) from error
    sections = [data["inputs"], data["outputs"]]
    optional = frozenset(name for entries in sections for name, entry in entries.items() if entry.get("optional"))
    calls, check = data.get("calls", 0), data.get("check") or ""
    if type(calls) is not int or calls < 0:
        raise DumpError(f"{where}: calls is not a number of calls; write 0 or more, or leave it out")
    if not isinstance(check, str):
        raise DumpError(f"{where}: check is not a string; leave it out")
    api = next(iter(definition.tag_values("fi_api")), "")
    return Dump(definition, optional, api, calls, check)


def is_dump(path: Path) -> bool:
    """Whether a file has what dumps have and Definitions of this dataset have not, or lacks what these have.

    Raises:
        DumpError: it cannot be read.
    """
    data = _data(path)
    return any(key in data for key in OF_DUMPS) or "reference" not in data or "constraints" not in data


def has_keys_of_dumps(path: Path) -> bool:
    """Whether a file has a key that only dumps have; not if it cannot be read."""
    try:
        return any(key in _data(path) for key in OF_DUMPS)
    except DumpError:
        return False


def _data(path: Path) -> Mapping[str, Any]:
    try:
        return load_object(path)
    except JsonSourceError as error:
        raise DumpError(f"{path}: cannot be read: {error}") from error


def versions() -> list[str]:
    """Releases of FlashInfer that the table of aliases has, the newest last."""
    return list(_table())


@functools.lru_cache(maxsize=8)
def aliases(version: str) -> Mapping[str, Alias]:
    """The aliases of one release of FlashInfer, by template.

    Raises:
        DumpError: the table cannot be read, or lacks that release.
    """
    table = _table()
    if version not in table:
        raise DumpError(f"{ALIASES} has no FlashInfer {version}; it has {', '.join(table)}")
    made = {}
    for template, entry in table[version].items():
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        made[template] = Alias(template, **given)
    return made


@functools.cache
def _table() -> Mapping[str, Any]:
    path = find_root() / ALIASES
    try:
        table = load_object(path)["versions"]
    except (JsonSourceError, KeyError) as error:
        raise DumpError(f"{path}: cannot be read: {error}; restore it from version control") from error
    return dict(table)


def matches(dump: Dump, version: str) -> list[Match]:
    """The Definitions that a dump can be, by names and sizes, the likeliest first; empty if nothing is like it."""
    naming = load_naming()
    alias = _alias_of(dump, version, naming)
    if alias is None:
        return []
    found: list[Match] = []
    for family in alias.families:
        found += _of_family(dump, alias, family, naming)
    return found


def _alias_of(dump: Dump, version: str, naming: Naming) -> Alias | None:
    """The template's alias; of a Definition that follows the conventions here, one that changes no name."""
    known = [name for name in aliases(version) if re.fullmatch(rf"{name}{_SIZES}", dump.name)]
    if known and (dump.api or not family_name(dump.definition, naming)):
        return aliases(version)[max(known, key=len)]
    family = family_name(dump.definition, naming)
    return Alias(family, (family,)) if family else None


def _of_family(dump: Dump, alias: Alias, family: str, naming: Naming) -> Iterator[Match]:
    """The Definitions of one family that a dump may be: one, if the dump tells all sizes."""
    siblings = [one for one in _by_family().get(family, ()) if one.root is not None]
    if not siblings:
        return
    known = _sizes(dump, alias)
    wanted = {axis: value for axis, value in known.items() if axis in siblings[0].const_axes}
    alike = [one for one in siblings if all(one.const_axes[axis] == value for axis, value in wanted.items())]
    for one in alike:
        untold = {axis: value for axis, value in one.const_axes.items() if axis not in wanted}
        free = {axis: value for axis, value in untold.items() if _varies(siblings, axis, wanted)}
        yield Match(family, one, True, alias, free)
    pattern = naming.families[family]
    missing = [axis for axis in siblings[0].const_axes if axis not in wanted]
    sized = {**{axis: siblings[0].const_axes[axis] for axis in missing}, **wanted}
    if alike or any(_varies(siblings, axis, {}) for axis in missing):
        return
    try:
        name = derive_name(pattern, sized)
        made = replace(siblings[0].with_const_axes(sized), name=name)
    except (NamingError, ReferenceSourceError):
        return
    if family_name(made, naming) == family:
        yield Match(family, made, False, alias, {})


def _varies(siblings: Sequence[Definition], axis: str, wanted: Mapping[str, int]) -> bool:
    """Whether Definitions of a family differ in an axis, where the wanted ones do not decide it."""
    alike = [one for one in siblings if all(one.const_axes[other] == value for other, value in wanted.items())]
    return len({one.const_axes[axis] for one in alike}) > 1


def siblings(family: str) -> list[str]:
    """The names of the Definitions that a dump of a family can be."""
    return [one.name for one in _by_family().get(family, ())]


def _by_family() -> Mapping[str, list[Definition]]:
    return _of_roots(tuple(find_roots()))


@functools.lru_cache(maxsize=1)
def _of_roots(_roots: tuple[Path, ...]) -> Mapping[str, list[Definition]]:
    naming, found = load_naming(), dict[str, list[Definition]]()
    for one in definitions():
        found.setdefault(family_name(one, naming) or "", []).append(one)
    return found


def _sizes(dump: Dump, alias: Alias) -> dict[str, int]:
    """Const axes by the names here: those of the dump, and what the equations of the alias give."""
    sizes = dict(dump.definition.const_axes)
    for text in alias.axes:
        try:
            sizes |= {axis: int(value) for axis, value in parse(text).solve(sizes).items()}
        except ConstraintError:  # the dump does not tell that axis
            continue
    return sizes


def differences(dump: Dump, match: Match) -> list[str]:
    """In what the contract of a dump differs from a Definition here, a line each; its values are not compared."""
    ours, theirs, alias = match.definition, dump.definition, match.alias
    given = [*alias.inputs.values(), *([alias.call] if alias.call else [])]
    lines, used = [], {part for text in given for part in _names(text)}
    for name, spec in theirs.inputs.items():
        text = alias.inputs.get(name, name)
        named = [part for part in _names(text) if part in ours.inputs]
        used |= set(named)
        if not named and name not in alias.inputs:
            if name not in dump.optional:
                lines.append(f"it takes {name}, which {match.family} does not")
        elif (source := _source(text)) in ours.inputs:
            lines += _misfits(f"input {name}", spec, ours.inputs[source], compare_rank=text == source)
    missing = [name for name in ours.inputs if name not in used]
    lines += [f"it does not take {name}" for name in missing]
    produced, as_it_is = set[str](), alias.result == "result" and not alias.call
    for name, spec in ours.outputs.items():
        if name in alias.without:
            continue
        own = alias.outputs.get(name, name)
        produced.add(own)
        if own not in theirs.outputs:
            lines.append(f"it has no output {own}")
        elif as_it_is or not alias.differs:  # one in another form may convert it
            lines += _misfits(f"output {own}", theirs.outputs[own], spec, compare_rank=as_it_is and own == name)
    extra = [name for name in theirs.outputs if name not in produced and name not in dump.optional]
    return [*lines, *(f"it has the output {name}, which {match.family} has not" for name in extra), *alias.form]


def _names(expression: str) -> list[str]:
    tree = ast.parse(expression, mode="eval")
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def _source(expression: str) -> str:
    """The name whose value an expression passes on, as it is or in another shape: ``B`` of ``B.transpose(0, 1)[0]``."""
    node = ast.parse(expression, mode="eval").body
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _misfits(where: str, theirs: TensorSpec, ours: TensorSpec, compare_rank: bool) -> Iterator[str]:
    """How a dumped tensor differs; one that may also be a number for all rows is not another function."""
    if theirs.shape is None or ours.shape is None:
        return
    if theirs.dtype not in (UNKNOWN, ours.dtype):
        yield f"{where} is {theirs.dtype}, not {ours.dtype}"
    if compare_rank and len(theirs.shape) != len(ours.shape):
        yield f"{where} has {len(theirs.shape)} dimensions, not {len(ours.shape)}"


def normalized(dump: Dump, match: Match) -> Definition:
    """The Definition here with the dump's reference: its function, called by the names here.

    The text is parsed and written again without what only runs elsewhere (``from __future__``); memory that is not
    filled becomes zeros. It is still a stranger's code, and runs in the sandbox only.

    Raises:
        DumpError: the dump has no reference, or one that is not Python.
    """
    where = dump.definition.path or dump.name
    if not dump.definition.reference.strip():
        raise DumpError(f"{where}: it has no reference; nothing can be judged")
    try:
        module = ast.parse(dump.definition.reference)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DumpError(f"{where}: its reference is not Python: {error}") from error
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise DumpError(f"{where}: its reference defines no function")
    entry = next((one for one in functions if one.name == "run"), functions[-1])
    module.body = [node for node in module.body if not _is_future(node)]
    module = _Normalizer("run" if entry.name == "run" else "").visit(module)
    called = "their_run" if entry.name == "run" else entry.name
    text = ast.unparse(ast.fix_missing_locations(module))
    return replace(
        match.definition,
        reference=f"{text}\n\n\n{_adapter(called, entry, dump, match)}",
        path=None,
        root=None,
    )


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


class _Normalizer(ast.NodeTransformer):
    """Fills memory with zeros, drops annotations (there they are text), and renames a function that is `renamed`."""

    def __init__(self, renamed: str) -> None:
        self._renamed = renamed

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = _MEMORY.get(node.attr, node.attr)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = f"their_{node.id}" if node.id == self._renamed else node.id
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            one.annotation = None
        node.returns = None
        self.generic_visit(node)
        node.name = f"their_{node.name}" if node.name == self._renamed else node.name
        return node


def _adapter(called: str, entry: ast.FunctionDef, dump: Dump, match: Match) -> str:
    """Source of ``run`` with the inputs here, which calls the dumped function."""
    ours, alias = match.definition, match.alias
    parameters = [one.arg for one in (*entry.args.posonlyargs, *entry.args.args, *entry.args.kwonlyargs)]
    theirs = dump.definition.inputs
    by_name = entry.args.kwarg is not None and any(name in parameters for name in theirs)
    given = {}
    for place, name in enumerate(theirs):
        text = alias.inputs.get(name, name)
        parameter = name
        if name not in parameters and place < len(parameters) and parameters[place] not in theirs and not by_name:
            parameter = parameters[place]  # it has names of its own; they stand in the declared order
        if (name in alias.inputs or name in ours.inputs) and (parameter in parameters or entry.args.kwarg):
            given[parameter] = text
    given |= {
        name: text for name, text in alias.inputs.items() if name not in theirs
    }  # arguments that no dump declares
    upper = {axis.upper(): value for axis, value in ours.const_axes.items()}
    texts = [*given.values(), alias.result, *([alias.call] if alias.call else [])]
    read = dict.fromkeys(name for text in texts for name in _names(text) if name in upper)
    lines = [f"{name} = {upper[name]}" for name in read]
    lines += ["", "", f"def run({', '.join(ours.inputs)}):"]
    lines += [f"    their_{name} = {text}" for name, text in given.items()]
    keywords = ", ".join(f"{name}=their_{name}" for name in given)
    call = re.sub(r"\breference\(", f"{called}(", alias.call) or f"{called}({keywords})"
    lines += [f"    result = {call}", f"    return {alias.result}", ""]
    return "\n".join(lines)
