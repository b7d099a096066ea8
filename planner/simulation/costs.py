"""What it costs to get from one state of a job to the next, in seconds, and what a worker costs in dollars."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from openrecycle.planner.jobs.errors import InputError


@dataclass(frozen=True)
class RecoveryCosts:
    """Seconds, unless said otherwise. The defaults are for a job of some hundred accelerators.

    detect: from a death until all know. recover: agreement and new groups, with a plan made ahead.
    rejoin: until a worker that returns has its peers' state. migrate: until a worker that changes its
    stage has. repartition: until every worker has the layers of a new partition. restart: from the
    last checkpoint, everyone anew. checkpoint: to save one; checkpoint_interval: between two.
    dollars: per worker and hour.
    """

    detect: float = 1.0
    recover: float = 1.0
    rejoin: float = 5.0
    migrate: float = 5.0
    repartition: float = 20.0
    restart: float = 300.0
    checkpoint: float = 30.0
    checkpoint_interval: float = 1800.0
    dollars: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e7:
                raise InputError(f"--cost {field.name}", value, "a number from 0 to 1e7")
            if field.name == "checkpoint_interval" and not value:
                raise InputError("--cost checkpoint_interval", value, "a number of seconds above 0")

    @classmethod
    def parse(cls, text: str, *, field: str = "--cost") -> RecoveryCosts:
        """`detect=1,recover=0.5,...`, any subset. Raises InputError."""
        known = [f.name for f in fields(cls)]
        values: dict[str, float] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, raw = part.partition("=")
            if name not in known:
                raise InputError(field, part, "NAME=NUMBER with NAME one of " + ", ".join(known))
            try:
                values[name] = float(raw)
            except ValueError:
                values[name] = math.nan
            if not math.isfinite(values[name]):
                raise InputError(field, part, f"{name}=NUMBER")
        return cls(**values)
