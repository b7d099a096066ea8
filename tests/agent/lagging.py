"""The example's model, of which one worker stands still for a while between its stage's reduction and its step:
`--workload tests.agent.lagging:Lagging`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from openrecycle.agent.config.faults import FaultInjector, Kill
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.planner.jobs.job import Worker


class Lagging(Gpt):
    """worker stands still for `seconds` right before its step of `iteration`."""

    def __init__(self, worker: str, iteration: int, seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        whole_init, whole_before = FaultInjector.__init__, FaultInjector.before

        def init(self: Any, who: Worker, kills: list[Kill], last_words: Callable[[], None], rank: int) -> None:
            whole_init(self, who, kills, last_words, rank)
            self.lags = str(who) == worker

        def before(self: Any, at: int, kind: str, *key: int) -> None:
            if self.lags and (at, kind) == (iteration, "O"):
                time.sleep(seconds)
            whole_before(self, at, kind, *key)

        FaultInjector.__init__ = init  # type: ignore[method-assign]
        FaultInjector.before = before  # type: ignore[method-assign]
