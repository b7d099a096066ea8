"""The ETTR and goodput of jobs, and the fault-free rate that they are compared with, added up from the database, each
iteration once. app.jobs.throughput has the definitions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

from openrecycle.agent.coordination.membership import Note
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.throughput import (
    NOTHING,
    WINDOW,
    Account,
    Baseline,
    Figures,
    Wait,
    Waited,
    Window,
    apart,
    joined,
    trained,
    without_waits,
)
from openrecycle.db.store import Record, Store
from openrecycle.planner.plans.plan import Plan

BATCH = 2000


class Accounts:
    """The figures of all jobs of a console. Thread-safe. plan: finds a plan by its fingerprint. batch: more new
    iterations than this are added up by the database."""

    def __init__(
        self,
        store: Store,
        plan: Callable[[str], Plan | None] = lambda fingerprint: None,
        *,
        batch: int = BATCH,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._plan = store, plan
        self._batch, self._clock = batch, clock
        self.waiting = WaitingTimes(store)
        self._of: WeakKeyDictionary[LiveJob, tuple[Account, float]] = WeakKeyDictionary()
        self._compared: WeakKeyDictionary[LiveJob, tuple[str, str, bool]] = WeakKeyDictionary()
        self._windows: WeakKeyDictionary[LiveJob, Window] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, job: LiveJob) -> Figures:
        """Returns a job's figures so far. Raises SQLAlchemyError."""
        # Taken before the waits are read: later iterations may include a wait that is not among them.
        committed = job.state.committed
        waited = self.waiting.of(job)
        with self._lock:
            account, begin = self._of.get(job) or (Account(), 0.0)
            account, begin = self._brought_up(account, job, committed, waited), begin or self._begin(job)
            self._of[job] = account, begin
            return figures(account, job, begin, self._clock(), waited)

    def _begin(self, job: LiveJob) -> float:
        """Returns when the first generation opened, in POSIX seconds; 0: none has."""
        generations = self._store.generations(job.job_id, limit=1) if job.state.current else []
        return float(generations[0]["opened_at"]) if generations else 0.0

    def _brought_up(self, account: Account, job: LiveJob, committed: int, waited: Waited) -> Account:
        """Adds the iterations up to number `committed` - 1 that the account does not have yet."""
        missing = committed - 1 - account.through
        if missing <= 0:
            return account
        if missing > self._batch:
            account = Account()
            for row in self._store.iteration_sums(job.job_id, committed - 1):
                account.add_sum(without_waits(row, waited))
            rows = self._store.iterations(job.job_id, after=committed - 2, limit=1)
        else:
            rows = self._store.iterations(job.job_id, after=account.through, limit=missing)
            for row in rows:
                account.add(row["iteration"], trained(row, waited), row["generation"], len(row["skipped"]))
        if rows:
            account.last_at = rows[-1]["committed_at"]
        return account

    # -- the baseline -----------------------------------------------------------------------

    def consider(self, job: LiveJob) -> None:
        """Pins the job's baseline as soon as one is known, and a new one when that is due; called once per tick.

        Raises SQLAlchemyError or ConsoleError; the next call tries again.
        """
        state, known = job.state, job.baseline
        if state.over or state.current is None:
            return
        if known is None and (planned := planned_rate(job)) is not None:
            with job.lock:  # another thread may have pinned one meanwhile
                if job.baseline is None:
                    job.pin(Baseline(planned, "planned", renew=0))
                known = job.baseline
        if known is not None and known.renew is None:
            if state.current.failed or not self._quicker(job, state.current.plan_fingerprint, known.plan):
                self._windows.pop(job, None)
                return
            begin = 0 if job in self._windows else state.committed  # a window that has begun goes on
        else:
            begin = known.renew or 0 if known else 0
        window = self._windows.get(job)
        if window is None or window.through < begin - 1:
            window = self._windows[job] = Window(begin - 1)
        if (missing := state.committed - 1 - window.through) > 0:
            # The first iteration counts at most as long as the others: with two, one short iteration would decide for
            # good.
            enough = state.committed >= WINDOW
            if enough and known is not None and known.source == "planned" and not known.refuted:
                known = self._judged(job, known)
            self._look(job, window, known, min(missing, self._batch))

    def _judged(self, job: LiveJob, known: Baseline) -> Baseline | None:
        """Refutes a predicted baseline if the job has exceeded it. Returns the baseline that counts now."""
        if self.of(job).baseline is None:
            with job.lock:
                if job.baseline is known:
                    job.pin(replace(known, refuted=True))
        return job.baseline

    def _look(self, job: LiveJob, window: Window, known: Baseline | None, most: int) -> None:
        """Adds new iterations to the window, and pins the baseline when the window is found. most: how many iterations
        to take, all of which were committed before the waits are read."""
        waited, spec = self.waiting.of(job), job.spec
        workers = spec.pipelines * spec.stages
        for row in self._store.iterations(job.job_id, after=window.through, limit=most):
            alone = row["iteration"] not in waited.by_iteration
            whole = row["living"] == workers and alone and not row["skipped"]
            window.add(row["iteration"], row["seconds"], row["generation"], whole=whole)
            if not window.found:
                continue
            opened = self._store.generation(job.job_id, row["generation"])
            plan = opened["plan_fingerprint"] if opened else ""
            made, unsteady = window.baseline(spec.samples, plan)
            del self._windows[job]
            if known is not None and known.renew is None and made.samples_per_second <= known.samples_per_second:
                # The new plan should be quicker, and is not: the rate stays, and that plan is not tried again.
                text = f"fault-free stays {_rate(known.samples_per_second)} samples/s: the new fault-free plan was not "
                text += f"quicker ({_rate(made.samples_per_second)}, {made.words})"
                made = replace(known, plan=plan)
            else:
                text = f"fault-free is {_rate(made.samples_per_second)} samples/s, {made.words}{unsteady}"
                if known is not None:
                    text += f"; until now {_rate(known.samples_per_second)}, {known.words}"
            with job.lock:
                if job.baseline is known:
                    job.pin(made, Note("info", "job", text))
            return

    def _quicker(self, job: LiveJob, fingerprint: str, than: str) -> bool:
        """Says whether one fault-free plan is shorter than another. The answer is remembered: this is asked at each
        tick, and two large plans would push each other out of the cache."""
        if fingerprint == than:
            return False
        compared = self._compared.get(job)
        if compared is None or compared[:2] != (fingerprint, than):
            a, b = self._plan(fingerprint), self._plan(than)
            quicker = (
                (a is not None and b is not None)
                and a.job.time_unit == b.job.time_unit
                and a.metrics.period < b.metrics.period
            )
            compared = self._compared[job] = fingerprint, than, quicker
        return compared[2]


def figures(account: Account, job: LiveJob, begin: float, now: float, waited: Waited = NOTHING) -> Figures:
    """Computes a job's figures. begin, now: POSIX seconds."""
    spec, baseline = job.spec, job.baseline
    samples = account.count * spec.samples - account.skipped * spec.samples_per_micro_batch
    end = account.last_at if job.state.over else now
    out = waited.within(begin, end)
    # The system clock may have been set since the job began. A launcher times iterations from commit to commit by a
    # monotonic clock, so their sum is used; iterations of a job with its own loop have gaps, so it is not used there.
    since = begin if spec.own_loop or not account.last_at else account.last_at
    left = end - since - waited.within(since, end)
    if not begin or account.through < 0:
        wall = 0.0
    elif since == begin:
        wall = max(left, account.took)
    else:
        wall = account.took + max(0.0, left)
    if wall <= 0:
        return Figures(baseline, None, None, 0.0, 0.0, out)
    productive = min(account.productive, wall)
    if baseline is not None and not baseline.holds(samples, productive):
        baseline = None
    goodput = samples / (baseline.samples_per_second * wall) if baseline else None
    return Figures(baseline, productive / wall, goodput, wall, productive, out)


def planned_rate(job: LiveJob) -> float | None:
    """Returns the samples per second that the fault-free plan predicts; None if its times are not real ones."""
    if not job.spec.paced or job.plans.job.time_unit != "ms":
        return None
    plan = job.plans.catalog.find(())
    if plan is None or plan.metrics.period <= 0:
        return None
    return job.spec.samples / (plan.metrics.period / 1000)


def _rate(value: float) -> str:
    return f"{value:,.4g}"


class WaitingTimes:
    """How long the jobs of a console have waited for people. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: WeakKeyDictionary[LiveJob, dict[float, tuple[Record, float]]] = WeakKeyDictionary()

    def of(self, job: LiveJob) -> Waited:
        """Returns how long a job has waited for people. Raises SQLAlchemyError."""
        if not (waits := job.waits):
            return NOTHING
        pauses = [self._begun(job, wait) for wait in waits if not wait.generation]
        whole = joined([*(wait for wait in waits if wait.generation), *pauses])
        iterations: dict[int, float] = {}
        for wait in whole:
            if wait.end is not None and (found := self._iteration(job, wait.begin, wait.end)) is not None:
                iterations[found[0]] = iterations.get(found[0], 0.0) + found[1]
        chosen: dict[int, float] = {}
        for wait in job.choices:
            if wait.end is not None:
                chosen[wait.generation] = chosen.get(wait.generation, 0.0) + wait.end - wait.begin
        return Waited(iterations, chosen, apart(pauses, job.choices), tuple(whole))

    def _begun(self, job: LiveJob, pause: Wait) -> Wait:
        """Returns a pause that begins with the last commit in it: workers finish their iteration before they stop, and
        that time is training."""
        last = self._around(job, pause.end)[1]
        begin = max(pause.begin, last if pause.end is None else min(last, pause.end))
        return pause._replace(begin=begin)

    def _iteration(self, job: LiveJob, begin: float, end: float) -> tuple[int, float] | None:
        """Returns (number of the iteration that a wait was in, seconds of the wait in it); None: it is not committed
        yet.
        """
        row = self._around(job, end)[0]
        if row is None:
            return None
        seconds = min(end, row["committed_at"]) - max(begin, row["committed_at"] - row["seconds"])
        return row["iteration"], max(0.0, min(seconds, row["seconds"]))

    def _around(self, job: LiveJob, end: float | None) -> tuple[Record | None, float]:
        """Returns the first iteration that was committed after the end of a wait (None: none yet), and when the one
        before it was committed (0: none was). end: None while the wait lasts."""
        found = self._found.setdefault(job, {})
        if end is not None and end not in found:
            row = self._store.committed_after(job.job_id, end)
            if row is not None:
                found[end] = row, self._store.last_commit(job.job_id, row["iteration"])
        if end is None or end not in found:
            return None, self._store.last_commit(job.job_id)
        return found[end]
