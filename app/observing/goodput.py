"""ETTR and goodput of jobs, and the fault-free rate they are measured by: one definition for all who show them.

ETTR is productive time / wall time, goodput the same weighted with throughput / fault-free
throughput, that is samples that count / (fault-free rate x wall time). Wall time runs from the first
epoch's opening until now, or to the last commit of a job that is over. The first iteration of an
epoch takes from the last commit of the epoch before, so it has the failure, the redone work and the
recovery in it: what it took beyond a usual iteration of its epoch is not productive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from statistics import median

from app.live import LiveJob
from db.observations import Observations
from db.store import Record, Store

# The fault-free rate is the median of so many iterations, the newest with all workers.
SETTLED = 512
FEWEST = 3
# Beyond as many new iterations the database adds them up.
BATCH = 2000


@dataclass(frozen=True)
class Figures:
    """Of one job so far. fault_free: samples per second with all workers, `measured` or `planned` as
    source says, None while neither is known. Fractions are None before the first commit, goodput also
    without a fault-free rate. Seconds of wall and productive time."""

    fault_free: float | None
    source: str
    ettr: float | None
    goodput: float | None
    wall: float
    productive: float


@dataclass
class EpochSum:
    """The iterations of one epoch, whose first one took `first` seconds and the others `rest`."""

    first: float
    rest: float = 0.0
    others: int = 0

    def productive(self, usual: float | None) -> float:
        """Seconds. usual: what an iteration takes elsewhere, where this epoch has had no other yet."""
        if self.others:
            usual = self.rest / self.others
        return self.rest + (self.first if usual is None else min(self.first, usual))


class Account:
    """What is known of one job's iterations, added up once each."""

    def __init__(self) -> None:
        self.through = -1
        self.count = 0
        self.last_at = 0.0
        self.settled: deque[float] = deque(maxlen=SETTLED)
        self._closed = 0.0
        """Productive seconds of epochs that are done."""
        self._epoch = 0
        self._sum: EpochSum | None = None
        self._usual: float | None = None

    def add(self, iteration: int, seconds: float, epoch: int, whole: bool) -> None:
        """The next iteration. whole: with all workers living."""
        if self._sum is None or epoch != self._epoch:
            self._close()
            self._epoch, self._sum = epoch, EpochSum(seconds)
        else:
            self._sum.rest += seconds
            self._sum.others += 1
            if whole:
                self.settled.append(seconds)
        self.through = iteration
        self.count += 1

    def add_sum(self, row: Record) -> None:
        """A whole epoch up to some iteration; see db.observations.iteration_sums."""
        self._close()
        first, others = row["first_seconds"], row["count"] - 1
        self._epoch, self._sum = row["epoch"], EpochSum(first, max(0.0, row["seconds"] - first), others)
        self.through = row["first"] + others
        self.count += row["count"]

    @property
    def productive(self) -> float:
        return self._closed + (self._sum.productive(self._usual) if self._sum else 0.0)

    def _close(self) -> None:
        if self._sum is not None:
            self._closed += self._sum.productive(self._usual)
            if self._sum.others:
                self._usual = self._sum.rest / self._sum.others


class Accounts:
    """Of all jobs of a console. Thread-safe."""

    def __init__(self, store: Store, observations: Observations) -> None:
        self._store, self._observations = store, observations
        self._of: dict[str, tuple[Account, float]] = {}
        self._lock = threading.Lock()

    def of(self, job: LiveJob) -> Figures:
        """Raises SQLAlchemyError."""
        with self._lock:
            account, begin = self._of.get(job.job_id) or (Account(), 0.0)
            account, begin = self._brought_up(account, job), begin or self._begin(job)
            self._of[job.job_id] = account, begin
            return figures(account, job, begin, time.time())

    def _begin(self, job: LiveJob) -> float:
        """When the first epoch opened; 0 while none has."""
        epochs = self._store.epochs(job.job_id) if job.state.current else []
        return float(epochs[0]["opened_at"]) if epochs else 0.0

    def _brought_up(self, account: Account, job: LiveJob) -> Account:
        """With the iterations that have been committed since."""
        missing = job.state.committed - 1 - account.through
        if missing <= 0:
            return account
        workers = job.spec.pipelines * job.spec.stages
        if missing > BATCH:
            account = Account()
            for row in self._observations.iteration_sums(job.job_id, job.state.committed - 1):
                account.add_sum(row)
            newest = self._observations.settled_seconds(job.job_id, workers, SETTLED)
            account.settled.extend(reversed(newest))
            rows = self._store.iterations(job.job_id, limit=1, newest=True)
        else:
            rows = self._store.iterations(job.job_id, after=account.through, limit=missing)
            for row in rows:
                account.add(row["iteration"], row["seconds"], row["epoch"], row["living"] == workers)
        if rows:
            account.last_at = rows[-1]["committed_at"]
        return account


def figures(account: Account, job: LiveJob, begin: float, now: float) -> Figures:
    """begin, now: POSIX seconds."""
    spec = job.spec
    samples = spec.pipelines * spec.micro_batches * spec.samples_per_micro_batch
    rate, source = None, ""
    if len(account.settled) >= FEWEST and (usual := median(account.settled)) > 0:
        rate, source = samples / usual, "measured"
    elif (planned := planned_rate(job)) is not None:
        rate, source = planned, "planned"
    end = account.last_at if job.state.over else now
    wall = end - begin if begin and account.through >= 0 else 0.0
    if wall <= 0:
        return Figures(rate, source, None, None, 0.0, 0.0)
    productive = min(account.productive, wall)
    goodput = account.count * samples / (rate * wall) if rate else None
    return Figures(rate, source, productive / wall, goodput, wall, productive)


def planned_rate(job: LiveJob) -> float | None:
    """Samples per second that the fault-free plan predicts; None when its times are not real ones."""
    if not job.spec.paced or job.job.time_unit != "ms":
        return None
    plan = job.catalog.find(())
    if plan is None or plan.metrics.period <= 0:
        return None
    samples = job.spec.pipelines * job.spec.micro_batches * job.spec.samples_per_micro_batch
    return samples / (plan.metrics.period / 1000)
