"""What a console observes of its jobs: measured iterations, goodput, history, the feed, and what workers write."""

from __future__ import annotations

from collections.abc import Callable

from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.observing.feed import Feed
from openrecycle.app.observing.goodput import Accounts
from openrecycle.app.observing.log_book import LogBook
from openrecycle.app.observing.measuring import Measuring
from openrecycle.app.observing.recorder import Recorder
from openrecycle.app.observing.rollout import RollOuts
from openrecycle.app.settings import Keep
from openrecycle.db.observations import Observations
from openrecycle.db.store import Store
from openrecycle.planner.plan import Plan


class Observing:
    """One per console. heartbeat: seconds. plan: finds one by its fingerprint. jobs: those that heartbeats may come of;
    job_ids: of all that there are. keep: how much of their history."""

    def __init__(
        self,
        store: Store,
        heartbeat: float,
        plan: Callable[[str], Plan | None],
        jobs: Callable[[], list[LiveJob]],
        job_ids: Callable[[], list[str]],
        keep: Keep,
    ) -> None:
        self.observations = Observations(store.database)
        self.measuring = Measuring(self.observations, heartbeat)
        self.accounts = Accounts(store, self.observations, plan)
        self.feed = Feed(store, self.observations)
        self.roll_outs = RollOuts(store)
        self.recorder = Recorder(store.database, jobs, keep, job_ids)
        self.logs = LogBook()

    def start(self) -> None:
        self.recorder.start()

    def consider(self, job: LiveJob) -> None:
        """Once a tick."""
        self.measuring.consider(job)
        self.accounts.consider(job)

    def close(self) -> None:
        self.recorder.close()
