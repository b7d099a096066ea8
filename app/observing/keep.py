"""How long the console keeps what: the defaults, and how people write a duration."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openrecycle.app.runtime.errors import SettingsError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LEAST_MINUTES = 2 * 3600.0
LEAST_HOURS = 2 * 86_400.0


@dataclass(frozen=True)
class Keep:
    """seconds, minutes, hours: for so many seconds of time, the samples of one second, minute and hour.

    events, states: of each job, the newest so many lines of the feed and changes of a worker's state.
    generations: of the newest so many, who acknowledged what. plans: of each job, the newest so many made ahead.
    """

    seconds: float = 15 * 60.0
    minutes: float = 2 * 86_400.0
    hours: float = 400 * 86_400.0
    events: int = 100_000
    states: int = 100_000
    generations: int = 50
    plans: int = 2_000

    def __post_init__(self) -> None:
        for option, value, least, why in (
            ("--keep-seconds", self.seconds, 120.0, "two minutes"),
            ("--keep-minutes", self.minutes, LEAST_MINUTES, "two hours, which hours are made of"),
            ("--keep-hours", self.hours, LEAST_HOURS, "two days"),
        ):
            if not least <= value <= 36_500 * 86_400.0:
                raise SettingsError(f"{option}: got {value:g} s, expected at least {why}")
        if self.events < 1_000:
            raise SettingsError(f"--keep-events: got {self.events}, expected at least 1000")


def seconds(text: str, option: str) -> float:
    """`90s`, `15m`, `48h`, `400d` in seconds. Raises SettingsError."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text.strip())
    if found is None:
        raise SettingsError(f"{option}: got {text!r}, expected a number and s, m, h or d, such as 15m")
    return float(int(found[1]) * _UNITS[found[2]])
