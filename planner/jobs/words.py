"""How the command line and the console write numbers, names and foreign text in sentences, and how they parse numbers
that people typed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

# What a job may do when it loses workers, as planner.simulation.policy names it. DROP: the micro-batches of the broken
# replica are left out. STAND_BY: the other pipelines run them, while the replica's other workers stand by.
REROUTE, MIGRATE, DROP, STAND_BY = "re-route", "migrate and re-route", "drop the replica", "stand by"


# Numbers as JSON and people write them: `float` also accepts 1_000 and the digits of every script.
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?|[+-]?(inf|nan)", re.IGNORECASE)


def number_of(text: str) -> float | None:
    """Parse a number; None where `text` is none."""
    return float(text) if NUMBER.fullmatch(text) else None


def printable(text: str, keep: str = "") -> str:
    """Make text from others safe for a terminal or a log: characters that are not shown but obeyed (escapes, line
    breaks, marks of direction) are written out, as in \\x1b. keep: characters that stay as they are."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(shown)


def encodable(text: str) -> str:
    """Replace what UTF-8 can't encode: lone surrogates, which Python makes of a file name in another encoding."""
    return text.encode("utf-8", "replace").decode()


def capital(text: str) -> str:
    """Make the first letter a capital."""
    return text[:1].upper() + text[1:]


def whole_sentence(text: str) -> str:
    """Add the full stop, which errors and reasons leave to the code that shows them, and a capital letter."""
    return capital(text).rstrip(".") + "."


def percent(fraction: float, digits: int = 1, *, sign: bool = False) -> str:
    """`95.2 %`; with sign: `+7.4 %`, and `±0 %` for what rounds to 0. Without: `<0.1 %` rather than 0."""
    least = 10.0**-digits
    if abs(fraction) < least / 200:
        return "±0 %" if sign else f"<{least:g} %" if fraction > 0 else "0 %"
    number = f"{100 * fraction:{'+' if sign else ''}.{digits}f}"
    return number.removesuffix(".0").replace("-", "−") + " %"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 worker`, `12 workers`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def milliseconds(value: float, digits: int = 3) -> str:
    """`0 ms`, `0.4 ms`, `283 ms`, `1.08 s`, `2 min 5 s`, `3 h 20 min`, `12 days 4 h`.

    digits: significant digits below a minute.
    """
    if 0 < value < 9.95 and digits == 3:
        return f"{value:.1f} ms"
    if value < 999.5:
        return f"{value:.0f} ms" if digits == 3 else f"{value:.{digits}g} ms"
    if value < 59_950:
        return f"{value / 1000:.{digits}g} s"
    whole = round(value / 1000)
    if whole < 3600:
        return _both(whole, 60, "min", "s")
    minutes = round(whole / 60)
    if minutes < 48 * 60:
        return _both(minutes, 60, "h", "min")
    return _both(round(minutes / 60), 24, "days", "h")


def planned(value: float, unit: str, digits: int = 3) -> str:
    """A time of a plan in the plan's own unit. digits: as for `milliseconds`."""
    if unit == "ms":
        return milliseconds(value, digits)
    return f"{value:,.6g} {unit if value == 1 else plural(unit)}"


def plural(unit: str) -> str:
    """A unit of time after a number other than 1, or on an axis: `slots`, `ms`."""
    return unit + "s" if unit == "slot" else unit


def _both(value: int, per: int, large: str, small: str) -> str:
    return f"{value // per} {large}" + (f" {value % per} {small}" if value % per else "")


def names(all_of_them: Sequence[str], limit: int = 6, last: str = ", ") -> str:
    """`W0_1, W1_2 and 3 more`; with last=" and ", where all are named: `W0_1 and W1_2`. Empty for no names."""
    if len(all_of_them) > limit:
        return f"{', '.join(all_of_them[:limit])} and {len(all_of_them) - limit:,} more"
    return last.join(filter(None, (", ".join(all_of_them[:-1]), *all_of_them[-1:])))


def micro_batch_names(numbers: Sequence[int], micro_batches: int) -> str:
    """`micro-batch 1.3`, or `micro-batches 0.0, 1.3 and 2 more`. numbers: pipeline * `micro_batches` + index inside the
    pipeline."""
    shown = names([f"{n // micro_batches}.{n % micro_batches}" for n in numbers])
    return f"micro-batch{'' if len(numbers) == 1 else 'es'} {shown}"


def layers_moved(before: Sequence[int], after: Sequence[int]) -> int:
    """Count the layers whose stage differs between two partitions."""
    was = [s for s, n in enumerate(before) for _ in range(n)]
    now = [s for s, n in enumerate(after) for _ in range(n)]
    return sum(a != b for a, b in zip(was, now, strict=True))


def layers_move(count: int, *, done: bool = False) -> str:
    """`1 layer moves to another stage`, `3 layers move to other stages`; done: they have moved."""
    if count == 1:
        return f"1 layer {'moved' if done else 'moves'} to another stage"
    return f"{count} layers {'moved' if done else 'move'} to other stages"


def counts(partition: Sequence[int]) -> str:
    """Layers per stage: `11, 14, 7, 12`."""
    return ", ".join(map(str, partition))


def gigabytes(size: int) -> str:
    """Bytes: `1.5 GB`, `12.0 MB`, `36 kB`."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"


class Grid(Protocol):
    """The sizes of a grid; plans, planning questions and running jobs have them."""

    @property
    def pipelines(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...


def grid(of: Grid) -> str:
    """`3 × 4 × 6`."""
    return f"{of.pipelines} × {of.stages} × {of.micro_batches}"
