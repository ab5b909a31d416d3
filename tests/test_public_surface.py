"""The public names of pgmesh and their signatures, as users reach them, compared with a listing of them.

The listing holds documented paths and calls, and does not say in which file a class lives. ``GOLDEN=write`` writes it
anew, where a public name was renamed on purpose. CHANGELOG.md records that.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any
from unittest import mock

import pytest

from tests.support import golden_files

Surface = dict[str, list[str]]
"""The lines of each section, sorted, by its title."""

MODULES: dict[str, tuple[str, ...]] = {
    "pgmesh": (),
    "pgmesh.launch": (),
    "pgmesh.interop": ("from_device_mesh",),
    "pgmesh.interop.megatron": ("process_groups", "published"),
    "pgmesh.interop.colossalai": ("ColossalMesh",),
    "pgmesh.recipes": (),
    "pgmesh.resharding": (),
    "pgmesh.parallel": (),
    "pgmesh.parallel.checkpoint": ("load", "save"),
    "pgmesh.svg": ("draw",),
}
"""The modules that the documentation imports from, and their documented names. Without names: those of ``__all__``."""

METHODS = ("__getitem__", "__iter__", "__len__", "__contains__", "__enter__", "__exit__")
"""The special methods that users rely on."""


def surface() -> Surface:
    """All sections of the listing."""
    found: Surface = {}
    classes: dict[str, type] = {}
    for path, names in MODULES.items():
        values = {name: reach(f"{path}.{name}") for name in names or reach(path).__all__}
        found[path] = sorted(lines_of(values))
        classes |= {f"{path}.{name}": value for name, value in values.items() if isinstance(value, type)}
    public = {*classes.values()}
    for title, kind in classes.items():
        found[title] = sorted([*constructor(kind), *bases(kind, public), *members(kind)])
    return found | command_line()


def reach(path: str) -> Any:
    """The value at a path that begins with a package, such as ``pgmesh.launch.join``, or a module."""
    package, *names = path.split(".")
    value: Any = importlib.import_module(package)
    for name in names:
        value = getattr(value, name) if hasattr(value, name) else importlib.import_module(f"{value.__name__}.{name}")
    return value


def lines_of(values: Mapping[str, Any]) -> Iterator[str]:
    """A line for each name of a module."""
    for name, value in values.items():
        yield f"class {name}" if isinstance(value, type) else f"function {name}{signature(value)}"


# -- a class ----------------------------------------------------------------------------------------------------------


def own(kind: type) -> list[type]:
    """The class and those of its bases that belong to the same package, so not those of torch or of Python."""
    root = kind.__module__.partition(".")[0]
    return [each for each in kind.__mro__ if each.__module__.partition(".")[0] == root]


def constructor(kind: type) -> Iterator[str]:
    """The line of the constructor, unless it is that of a base from elsewhere or of an enumeration."""
    makes = any(name in vars(each) for each in own(kind) for name in ("__init__", "__new__"))
    if makes and not issubclass(kind, enum.Enum):
        yield f"constructor {signature(kind)}"


def bases(kind: type, public: Iterable[type]) -> Iterator[str]:
    """A line for each base that users know: those of other packages, and those of our own that are public."""
    ours, shown = own(kind), {*public}
    foreign = [each for each in kind.__mro__ if each not in ours and each is not object]
    for each in kind.__mro__[1:]:
        if each in shown or (each in foreign and not any(each in other.__mro__[1:] for other in foreign)):
            yield f"base {each.__name__}"


def members(kind: type) -> list[str]:
    """A line for each public member. A name that only raises a hint is not public: ``getattr`` fails."""
    found: dict[str, str] = {}
    for each in own(kind):
        for name, value in vars(each).items():
            if is_public(name) and name not in found and hasattr(kind, name):
                found[name] = member(kind, name, value)
    named = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    named.update(getattr(kind, "_fields", ()))
    for name in filter(is_public, named):
        found[name] = f"field {name}"
    for each in own(kind):
        for name in filter(is_public, assigned(each)):
            found.setdefault(name, f"attribute {name}")
    return sorted(found.values())


def is_public(name: str) -> bool:
    return name in METHODS or not name.startswith("_")


def member(kind: type, name: str, value: Any) -> str:
    """The line of a member that the class itself holds."""
    if isinstance(value, (property, cached_property)):
        return f"property {name}"
    if isinstance(value, classmethod):
        return f"classmethod {name}{signature(value.__func__, skip=1)}"
    if isinstance(value, staticmethod):
        return f"static {name}{signature(value.__func__)}"
    if isinstance(value, type):
        return f"class {name}"
    if issubclass(kind, enum.Enum) and name in kind.__members__:
        return f"member {name} = {kind.__members__[name].value!r}"
    if callable(value):
        return f"method {name}{signature(value, skip=1)}"
    if inspect.isdatadescriptor(value):  # of a slot
        return f"attribute {name}"
    return f"value {name} = {Shown(value)!r}"


def assigned(kind: type) -> Iterator[str]:
    """The attributes that a class annotates, or that its methods assign to ``self``."""
    yield from inspect.get_annotations(kind)
    codes = [inspect.unwrap(value).__code__ for value in vars(kind).values() if inspect.isfunction(value)]
    for code in (code for code in codes if os.path.exists(code.co_filename)):  # not those that a decorator generated
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                yield node.attr


# -- a signature ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """A default as text that is the same on every run and every version of Python."""

    value: Any

    def __repr__(self) -> str:
        if isinstance(self.value, enum.Enum):
            return f"{type(self.value).__name__}.{self.value.name}"
        if inspect.isroutine(self.value) or isinstance(self.value, type):
            return str(self.value.__name__)
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(self.value))


def signature(what: Callable[..., Any], skip: int = 0) -> str:
    """The parameters with their kinds and defaults, without annotations.

    Args:
        what: a function or a class.
        skip: 1 leaves out ``self`` or ``cls``.
    """
    empty = inspect.Parameter.empty
    plain = [
        each.replace(annotation=empty, default=empty if each.default is empty else Shown(each.default))
        for each in inspect.signature(what).parameters.values()
    ]
    return str(inspect.Signature(plain[skip:]))


# -- the command line -------------------------------------------------------------------------------------------------


class Parsing(Exception):
    """Raised in place of parsing, with the parser."""


def parser_of(*words: str) -> argparse.ArgumentParser:
    """The parser that the command line makes for these words."""

    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> Any:
        raise Parsing(self)

    main = reach("pgmesh.__main__.main")
    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop), pytest.raises(Parsing) as found:
        main(words)
    return found.value.args[0]


def command_line() -> Surface:
    """A section for the program and one for each of its commands."""
    whole = parser_of("--help")
    found = {"command line": [f"command {name}" for name in commands(whole)] + [*options(whole)]}
    for name in commands(whole):
        found[f"command line: {name}"] = [*options(commands(parser_of(name))[name])]
    return {title: sorted(lines) for title, lines in found.items()}


def commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    chosen: list[Any] = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return chosen[0]


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A line for each option and each positional argument."""
    for each in parser._actions:
        if not isinstance(each, argparse._SubParsersAction):
            facts = {"dest": each.dest, "nargs": each.nargs, "choices": each.choices, "default": each.default}
            given = {fact: value for fact, value in facts.items() if value not in (None, argparse.SUPPRESS)}
            kind = f"option {' '.join(each.option_strings)}" if each.option_strings else f"argument {each.dest}"
            yield f"{kind} ({', '.join(f'{fact}={Shown(value)!r}' for fact, value in given.items())})"


# -- the comparison ---------------------------------------------------------------------------------------------------


def test_public_surface_equals_the_golden_listing():
    sections = (f"[{title}]\n" + "".join(f"{line}\n" for line in lines) for title, lines in surface().items())
    golden_files.check("public-surface.txt", "\n".join(sections))
