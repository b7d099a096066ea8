"""How options are defined: each once, as a field of a dataclass, with its help, default and bounds.

From that one field come the argument in Python, the option of the command line, what is sent to the workers, and the
error for a wrong value. An error names the option by its path, as Python writes it (`faults.timeouts.transfer`). The
command line replaces paths by its own spelling (`spelled`), also where another option is named in `backticks`.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from openrecycle.planner.jobs.errors import InputError, as_number

G = TypeVar("G", bound=type)

# Larger whole numbers are not exact in JSON (agent.messages.protocol.Count).
LARGEST = 2**53


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = "",
    env: str | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    expected: str = "",
    parse: Callable[[str], object] | None = None,
    secret: bool = False,
    told: str | None = None,
) -> Any:
    """Returns a field of an OptionGroup.

    flag: on the command line; "": the field's name with dashes; None: no flag. env: the environment variable that may
    stand in for the flag. least, above, most: bounds of a number. expected: what an error says instead of the bounds.
    parse: a function that raises InputError for a text that means nothing. secret: leave the value out of `repr`. told:
    the field of agent.messages.protocol.JobSpec that tells a console of it."""
    metadata: dict[str, Any] = {"help": help, "flag": flag, "env": env, "least": least, "above": above, "most": most}
    metadata |= {"expected": expected, "parse": parse, "told": told}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata, repr=not secret)


class OptionGroup:
    """Base of the dataclasses that hold options. PATH: the group's path in agent.config.options.TrainingOptions.

    The constructor checks all options, and raises InputError that names a wrong one by its path.
    """

    PATH: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for own in fields(self):  # type: ignore[arg-type]
            if own.metadata:
                object.__setattr__(self, own.name, _checked(type(self), own, getattr(self, own.name)))

    @classmethod
    def path(cls, name: str) -> str:
        return f"{cls.PATH}.{name}" if cls.PATH else name

    def refuse(self, name: str, expected: str) -> InputError:
        """Returns the error for the present value of a field."""
        return InputError(self.path(name), getattr(self, name), expected)


@dataclass(frozen=True)
class Leaf:
    """One option. path: of its field, from the outermost group. default: its value where none is given."""

    path: str
    field: Field[Any]
    annotation: Any

    @property
    def flag(self) -> str | None:
        named: str | None = self.field.metadata["flag"]
        return f"--{self.field.name.replace('_', '-')}" if named == "" else named

    @property
    def default(self) -> Any:
        return self.field.default


@cache
def _hints(group: Any) -> dict[str, Any]:
    return get_type_hints(group)


def leaves(group: type, prefix: str = "") -> Iterator[Leaf]:
    """Yields all options of a group and of the groups in it, in order."""
    for own in fields(group):
        annotation, path = _hints(group)[own.name], f"{prefix}{own.name}"
        if isinstance(annotation, type) and issubclass(annotation, OptionGroup):
            yield from leaves(annotation, f"{path}.")
        elif own.metadata:
            yield Leaf(path, own, annotation)


def build(group: type, given: Mapping[str, Any], prefix: str = "", **others: Any) -> Any:
    """Makes a group from the values of its options, by path. others: values of its fields that are no options."""
    arguments = dict(others)
    for own in fields(group):
        annotation, path = _hints(group)[own.name], f"{prefix}{own.name}"
        if isinstance(annotation, type) and issubclass(annotation, OptionGroup):
            arguments[own.name] = build(annotation, given, f"{path}.")
        elif path in given:
            arguments[own.name] = given[path]
    return group(**arguments)


def documented(group: G) -> G:
    """Adds a line for each option to the docstring of a group."""
    lines = []
    for own in fields(group):
        if own.metadata:
            default = "" if own.default is MISSING else f" Default: {own.default!r}."
            lines.append(f"{own.name}: {own.metadata['help']}{default}")
    group.__doc__ = "\n\n".join([(group.__doc__ or "").strip(), *lines])
    return group


def without_none(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union without None; for any other annotation, that one alone."""
    union = get_origin(annotation) in (Union, types.UnionType)
    return tuple(a for a in get_args(annotation) if a is not type(None)) if union else (annotation,)


def _checked(group: Any, own: Field[Any], value: Any) -> Any:
    """Returns a field's value as it is kept. Raises InputError for a wrong one."""
    annotation, path, about = _hints(group)[own.name], group.path(own.name), own.metadata
    kinds = without_none(annotation)
    if value is None and kinds != (annotation,):
        return None
    if isinstance(annotation, type) and issubclass(annotation, OptionGroup):
        if not isinstance(value, annotation):
            raise InputError(path, value, f"openrecycle.{annotation.__name__}(...)")
        return value
    if get_origin(kinds[0]) is Literal:
        choices = get_args(kinds[0])
        if value not in choices:
            nothing = ", or nothing" if kinds != (annotation,) else ""
            raise InputError(path, value, about["expected"] or " or ".join(map(str, choices)) + nothing)
        return value
    if get_origin(kinds[0]) is Sequence:
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(i, str) for i in value):
            raise InputError(path, value, "a list of texts")
        return tuple(value)
    if Path in kinds and isinstance(value, Path):
        return str(value)
    if bool in kinds:
        if not isinstance(value, bool):
            raise InputError(path, value, "True or False")
        return value
    found = as_number(value) if int in kinds or float in kinds else None
    if found is not None:
        if not _within(found, about) or not (float in kinds or isinstance(found, int)):
            raise InputError(path, value, _expected(about, whole=float not in kinds))
        value = found
    elif not isinstance(value, str) or str not in kinds or (Path in kinds and "\0" in value):
        raise InputError(path, value, _expected(about, whole=float not in kinds) if str not in kinds else _text(about))
    if about["parse"] is not None:
        try:
            about["parse"](str(value))
        except InputError as error:
            raise InputError(path, error.value, error.expected) from None
    return value


def _text(about: Mapping[str, Any]) -> str:
    """Says which text an option takes, as its `parse` says it of a wrong one."""
    try:
        if about["parse"] is not None:
            about["parse"]("\0")
    except InputError as error:
        return f"a text: {error.expected}"
    return "a text without NULs"


def _within(value: float, about: Mapping[str, Any]) -> bool:
    """Is a number within its bounds? NaN never is, nor a whole number that is too large for a float or a message."""
    least, above, most = about["least"], about["above"], about["most"]
    return (
        (abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value))
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )


def _expected(about: Mapping[str, Any], *, whole: bool) -> str:
    if about["expected"]:
        return str(about["expected"])
    kind = "a whole number" if whole else "a finite number"
    bounds = [
        f"{word} {about[name]:g}"
        for name, word in (("least", "of at least"), ("above", "above"), ("most", "of at most"))
        if about[name] is not None
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


@contextmanager
def spelled(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces the path of an option, in an InputError from inside the block, by what `names` has for it. What follows
    in brackets stays."""
    try:
        yield
    except InputError as error:
        expected = re.sub(r"`([a-z_.]+)`", lambda match: names.get(match[1], match[0]), error.expected)
        field, bracket, place = error.field.partition("[")
        field = names.get(field, field) + bracket + place
        if (field, expected) == (error.field, error.expected):
            raise
        raise InputError(field, error.value, expected) from error.__cause__
