"""A schedule as lines of text for the terminal: a row per worker, a column per slice of time."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from openrecycle.planner.schedule import Schedule

MAX_ROWS = 48
_STYLE = {"F": "blue", "I": "green", "W": "yellow", "B": "cyan", "O": "magenta", ".": "dim"}


def gantt_lines(schedule: Schedule, *, width: int) -> Iterator[Text]:
    """One line per worker (at most MAX_ROWS), then the key.

    A column shows the op that runs in the middle of its slice; small letters are re-routed
    micro-batches, a dot is a bubble. width: columns of the terminal.
    """
    names = max(len(str(worker)) for worker in schedule.ops) + 1
    end = max(ops[-1].end for ops in schedule.ops.values())
    columns = min(end, max(20, width - names - 1))
    for worker, ops in sorted(schedule.ops.items())[:MAX_ROWS]:
        line = Text(f"{worker!s:<{names}}")
        at = 0
        for column in range(columns):
            middle = (2 * column + 1) * end / (2 * columns)
            while at < len(ops) and ops[at].end <= middle:
                at += 1
            kind = ops[at].kind if at < len(ops) and ops[at].start <= middle else "."
            rerouted = kind != "." and ops[at].rerouted
            line.append(kind.lower() if rerouted else kind, _STYLE[kind] + (" reverse" if rerouted else ""))
        yield line
    if len(schedule.ops) > MAX_ROWS:
        yield Text(f"... and {len(schedule.ops) - MAX_ROWS} more workers", "dim")
    slice_of = schedule.problem.job.units(end / columns)
    unit = schedule.problem.job.time_unit
    unit += "" if slice_of == 1 or unit.endswith("s") else "s"
    yield Text(f"one column is {slice_of:.3g} {unit}; small letters: re-routed micro-batches; dots: bubbles", "dim")
