"""Errors that a person reads: each names the field, the value and what was expected."""

from __future__ import annotations

import operator
import os
import re
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

# Characters of a value that an error shows.
SHOWN = 1_000


class PlannerError(ValueError):
    """Base of everything the planner refuses. `str(error)` is one sentence for the user."""


class InputError(PlannerError):
    """A value is not acceptable.

    field: the name the user knows it by (`--fail`, `job.stages`, ...).
    value: what was given.
    expected: what would have been accepted.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        super().__init__(f"{field}: {self.said}")

    @property
    def said(self) -> str:
        """The sentence without the field."""
        return f"got {shown(self.value)}, expected {self.expected}"

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str]]:
        # A planning process sends the error to the process that reports it.
        return type(self), (self.field, self.value, self.expected)


class InfeasibleError(PlannerError):
    """The input is well formed, and no schedule exists.

    constraint: which requirement fails; remedy: what would make it feasible.
    """

    def __init__(self, constraint: str, remedy: str) -> None:
        self.constraint = constraint
        self.remedy = remedy
        super().__init__(f"no schedule exists: {constraint}; {remedy}")

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[str, str]]:
        return type(self), (self.constraint, self.remedy)


# The fields whose names on the command line are others than elsewhere.
_FLAGS = {"--fail": "failed"}


def named_in_documents(error: PlannerError) -> PlannerError:
    """Returns the error with the field's name in documents and on pages, in place of the command line's."""
    if not isinstance(error, InputError) or not error.field.startswith("--"):
        return error
    name = _FLAGS.get(error.field, error.field.removeprefix("--").replace("-", "_"))
    return InputError(name, error.value, error.expected)


def in_words(error: PlannerError) -> str:
    """Returns the sentence of `named_in_documents`."""
    return str(named_in_documents(error))


def shown(value: object) -> str:
    """`repr`, shortened where it is long: a refused value may be of any size."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert whole numbers of more than 4,300 digits to text
        return f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"


def as_whole(value: Any) -> int | None:
    """Returns the int that a value stands for, such as one of NumPy's; None if it is no whole number, or a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        return None
    try:
        return operator.index(value)
    except TypeError:  # also NumPy's bools and arrays
        return None


def as_number(value: Any) -> int | float | None:
    """Returns the int or float that a value stands for, such as one of NumPy's; None if it is no number, or a bool."""
    if type(value) is float:
        return value
    found = as_whole(value)
    if found is None and isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    return found


def check_whole(field: str, value: object, least: int, expected: str = "") -> int:
    """Returns the int that `value` stands for. Raises InputError unless it is a whole number of at least `least`.
    expected: other words for the error."""
    found = as_whole(value)
    if found is None or found < least:
        raise InputError(field, value, expected or f"a whole number of at least {least}")
    return found


def in_a_line(error: BaseException) -> str:
    """The first line of an exception, with its type, for use in a sentence."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


_EXAMPLES = "openrecycle.agent.examples"
_PYTHON = str(Path(os.__file__).parent)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def in_user_code(frame: FrameType) -> bool:
    """Is this a frame of the user's code, or of an example, rather than of this product, of torch or of Python?"""
    module, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    if file.startswith("<frozen ") or (file.startswith(_PYTHON) and "-packages" not in file):
        return False
    return module.startswith(_EXAMPLES) or module.partition(".")[0] not in ("openrecycle", "torch")


def where_raised(error: BaseException | None) -> str:
    """Returns where in the user's own code an error or its cause arose: `, at model.py:12 in forward`. If all of that
    code is in installed packages, as with a model of transformers, where it arose there. "" if neither did."""
    seen, packaged = set[int](), ""
    while error is not None and id(error) not in seen:  # raise e from e
        seen.add(id(error))
        for frame, line in reversed([*walk_tb(error.__traceback__)]):
            if in_user_code(frame):
                place = f", at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
                if not _INSTALLED.search(frame.f_code.co_filename):
                    return place
                packaged = packaged or place
        error = error.__cause__
    return packaged


def in_short(error: BaseException) -> BaseException:
    """Shorten the traceback of `error` to what a user needs to find the mistake in their own code.

    Frames of this product are removed. The cause becomes what the user's code raised, from its first line on, or none.
    """
    cause = error.__cause__
    while cause is not None and not _theirs(cause.__traceback__):
        cause = cause.__cause__
    if cause is not None:
        place = cause.__traceback__
        while place is not None and not in_user_code(place.tb_frame):
            place = place.tb_next
        cause = cause.with_traceback(place)
        if (before := cause.__context__) is not None and not _theirs(before.__traceback__):
            cause.__context__ = None
    error.__cause__, error.__suppress_context__ = cause, True
    return error.with_traceback(None)


def _theirs(place: TracebackType | None) -> bool:
    """Does the traceback pass through the user's code?"""
    while place is not None:
        if in_user_code(place.tb_frame):
            return True
        place = place.tb_next
    return False
