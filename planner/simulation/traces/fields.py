"""What all readers of trace files share: numbers from text, and workers for traces that only count them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.trace import HOUR_MS, MAX_HOURS, Event

MAX_WORKERS = 200_000


def whole(text: str, where: str, what: str, *, most: int = MAX_HOURS * HOUR_MS) -> int:
    """A whole number from 0 to `most`. Raises InputError naming `where`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) <= most):
        raise InputError(where, text, f"{what}, a whole number from 0 to {most}")
    return int(text)


def milliseconds(text: str, where: str, unit_ms: int, what: str) -> int:
    """A decimal number of a unit, in milliseconds. Raises InputError naming `where`."""
    try:
        value = Decimal(text)
        made = round(value * unit_ms) if value.is_finite() else -1
    except (InvalidOperation, OverflowError):
        made = -1
    if not 0 <= made <= MAX_HOURS * HOUR_MS:
        raise InputError(where, text, f"{what}, a number from 0 to {MAX_HOURS * HOUR_MS // unit_ms}")
    return made


def events_of_counts(counts: Iterable[tuple[int, int]], *, name: str) -> list[Event]:
    """Events for (time, how many live), where the source does not say who.

    Who leaves is drawn at random from those who are there, with the trace's name as the seed: the
    same file gives the same trace anywhere. A worker that comes is a new one.
    """
    noise = random.Random(name)
    living: list[str] = []
    out: list[Event] = []
    made = 0
    for time, count in counts:
        while len(living) > count:
            out.append(Event(time, "remove", living.pop(noise.randrange(len(living)))))
        while len(living) < count:
            made += 1
            living.append(f"node{made}")
            out.append(Event(time, "add", living[-1]))
    return out
