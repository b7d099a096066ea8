"""The ways on when workers are lost or come back, and which is better: by what is trained until the next change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrecycle.planner.jobs.words import DROP, STAND_BY

if TYPE_CHECKING:
    from openrecycle.planner.layers.migration import Migration

REPARTITION, SHALLOWER = "re-partition", "one stage less"


@dataclass(frozen=True)
class Option:
    """One option. pause: seconds until training goes on. redo: seconds of earlier work that is lost.

    rate: samples per second from then on. migrations: who changes stage for it, where that is known.
    partition: layers per stage, where those change and it is known.
    """

    name: str
    pause: float
    rate: float
    redo: float = 0.0
    migrations: tuple[Migration, ...] = ()
    partition: tuple[int, ...] = ()

    def samples(self, horizon: float, before: float) -> float:
        """Trained within `horizon` seconds, less what is lost of the work done at rate `before`."""
        return max(0.0, horizon - self.pause) * self.rate - self.redo * before


def best_option(options: Sequence[Option], horizon: float, before: float) -> list[Option]:
    """The options, the best first."""
    return sorted(options, key=lambda o: merit(o.name, o.samples(horizon, before), o.pause))


def merit(name: str, samples: float, pause: float) -> tuple[float, float, bool, str]:
    """Sorts options, the best first: by what is trained; of those that differ in the last bits alone by the shorter
    pause, and then one that puts nobody healthy out comes first."""
    return -float(f"{samples:.9g}"), pause, name in (DROP, STAND_BY), name
