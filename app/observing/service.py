"""What a console observes of its jobs: measured iterations, goodput, history, the feed, and what workers write."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from openrecycle.agent.messages.protocol import LogLine, LogLines
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.observing.feed import Feed
from openrecycle.app.observing.goodput import Accounts
from openrecycle.app.observing.measuring import Measuring
from openrecycle.app.observing.recorder import Recorder
from openrecycle.app.observing.rollout import RollOuts
from openrecycle.app.settings import RetentionLimits
from openrecycle.db.observations import Observations
from openrecycle.db.store import Store
from openrecycle.planner.plans.plan import Plan


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
        keep: RetentionLimits,
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


LINES = 200
# Of all workers of a job together; of large jobs each keeps less.
ALL_LINES = 50_000
FEWEST = 20


class LogBook:
    """Of all jobs. Lines of a process that has ended stay until its successor has as many. Thread-safe."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], deque[LogLine]] = {}
        self._lock = threading.Lock()

    def take(self, job: LiveJob, message: LogLines) -> None:
        """Raises ConsoleError for a worker that the job does not have, or a process that does not count."""
        member = job.sender(message.worker, message.incarnation)
        most = max(FEWEST, min(LINES, ALL_LINES // len(job.state.members)))
        with self._lock:
            lines = self._of.setdefault((job.job_id, member.name), deque(maxlen=most))
            if message.skipped and message.lines:
                lines.append(LogLine(at=message.lines[0].at, text=f"… {message.skipped:,} lines left out …"))
            lines.extend(message.lines)

    def lines(self, job_id: str, worker: str) -> tuple[LogLine, ...]:
        """Oldest first."""
        with self._lock:
            return tuple(self._of.get((job_id, worker), ()))
