"""The console as a service: what the REST API and the pages call. Thread-safe.

What agents and launchers say is in app.console.reports, what people read of jobs in app.console.view, what
operators ask for in app.console.operators.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.advice.service import Advising
from openrecycle.app.catalogs.service import Catalogs
from openrecycle.app.console.operators import Operators
from openrecycle.app.console.registry import MAX_WORKERS, JobRegistry
from openrecycle.app.console.reports import Reports
from openrecycle.app.console.view import Queries
from openrecycle.app.history.service import Histories
from openrecycle.app.jobs.live_job import TICK_SECONDS, LiveJob
from openrecycle.app.observing.goodput import Accounts
from openrecycle.app.observing.measuring import Measuring
from openrecycle.app.observing.metrics import OVER_SHOWN, JobMetrics, Metrics
from openrecycle.app.observing.recorder import Recorder
from openrecycle.app.observing.rollout import RollOuts
from openrecycle.app.plans.service import PlansService
from openrecycle.app.plans.sources import PlanSources
from openrecycle.app.runtime.errors import ConsoleError, storing
from openrecycle.app.runtime.patches import begin_without_pages
from openrecycle.app.runtime.runner import EventLoopWatch
from openrecycle.app.runtime.settings import RetentionLimits
from openrecycle.app.security.access import Security
from openrecycle.db.session import Database
from openrecycle.db.store import Store

log = structlog.get_logger()

# What a console that is killed forgets of its workers' newest heartbeats; each sends another within a second.
FLUSH_SECONDS = 5.0
# Jobs that are over stay in memory for as long, with what their workers wrote; the newest stay for good.
OVER_SECONDS = 86_400.0
# For one job's turn; a database that does not answer takes a tenth of it.
STUCK_SECONDS = 120.0
# Between two looks whether the database can be written.
PROBE_SECONDS = 1.0
# Of one job in one turn: more would keep the event loop waiting for tens of milliseconds.
FLUSH_AT_ONCE = 512


class ConsoleService:
    """One per process and database. `start` before use, `close` at the end.

    tolerance: plans are made ahead for up to this many failures. keep: how much of its history. loop_watch: of the
    event loop that hears the workers; while that stands still, no silence counts.

    jobs: those that there are; reports: what their workers and launchers say; queries: what people read of them;
    operators: what people ask of them.
    """

    def __init__(
        self,
        store: Store,
        *,
        failure_timeouts: FailureTimeouts | None = None,
        tolerance: int = 2,
        keep: RetentionLimits | None = None,
        loop_watch: EventLoopWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._clock = store, clock
        self.failure_timeouts = failure_timeouts = failure_timeouts or FailureTimeouts()
        self.jobs = JobRegistry(store, failure_timeouts, self)
        self.loop_watch, self.tolerance = loop_watch or EventLoopWatch(clock=clock), tolerance
        self.metrics, heartbeat = Metrics(), failure_timeouts.heartbeat
        self.security = Security(store.database)
        self.operators = Operators(self.jobs.find, store)
        self.catalogs = Catalogs(store)
        self.plans = PlansService(
            *(store, self.catalogs),
            tolerance=tolerance,
            heartbeat=heartbeat,
            find=self.jobs.find,
            jobs=self.jobs.live,
            on_made=self.metrics.plan_made,
        )
        cache = self.plans.cache
        self.measuring = Measuring(store, cache.plan, heartbeat)
        self.accounts = Accounts(store, cache.get)
        self.roll_outs = RollOuts(store)
        self.recorder = Recorder(store.database, self.jobs.live, keep or RetentionLimits(), self.jobs.ids)
        self.sources = PlanSources(
            store,
            find=self.jobs.find,
            plans=cache,
            library=self.plans.library,
            making=self.plans.making,
            catalogs=self.catalogs,
            measured=self.measuring.iteration,
        )
        waited = self.accounts.waiting.of
        self._advising = Advising(store, waited)
        self._job_metrics = JobMetrics(
            self.jobs.live, store, cache.get, self.accounts.of, self.jobs.past.states, waited
        )
        self.metrics.registry.register(self._job_metrics)
        self._unwatch = self.metrics.watch(store.database.engine)
        self.reports = Reports(store, self.jobs.find, self.job_ended, self.measuring.wanted, waited)
        self.queries = Queries(
            *(store, failure_timeouts, clock),
            find=self.jobs.find,
            live=self.jobs.live,
            past=self.jobs.past.lines,
            plans=cache,
            figures=self.accounts.of,
            waited=waited,
            advice=self._advising.advice,
        )
        self.histories = Histories(self.jobs, store.database)
        self._stop = threading.Event()
        self._got_on = self._clock()
        self._probing, self._stored_at = threading.Lock(), -math.inf
        self._ticker = threading.Thread(target=self._keep_time, name="console-ticks", daemon=True)

    # -- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Takes up every job of the database that is not over; the others, of which there may be thousands, one by one
        when somebody asks for them."""
        begin_without_pages()
        self.plans.start()
        self._advising.start()
        self.jobs.take_up_all(over=OVER_SHOWN)
        self._got_on = self._clock()
        self._ticker.start()
        self.recorder.start()
        self.histories.start()

    def stop_waiting(self) -> None:
        """Sends every long-poll home, so that the server can end."""
        for job in self.jobs.live():
            job.topic.close()
            job.generation_topic.close()
        self.plans.stop_waiting()

    def close(self) -> None:
        """Writes what is not yet written, ends the child processes."""
        self.stop_waiting()
        self._stop.set()
        if self._ticker.is_alive():
            self._ticker.join(2)
        self.security.close()
        self.catalogs.close()
        self.plans.close()
        self._advising.close()
        for job in self.jobs.live():
            with suppress(ConsoleError):
                job.take_heartbeats()
        self.histories.close()
        self.recorder.close()
        self._flush()
        self._unwatch()

    def new_job(self, job_id: str, spec: JobSpec, created_at: float) -> LiveJob:
        return LiveJob(
            job_id,
            spec,
            created_at,
            store=self._store,
            failure_timeouts=self.failure_timeouts,
            want_plan=self.plans.ahead.make_now,
            on_generation=self.plans.ahead.make_next,
            look_up=self.catalogs.find,
            clock=self._clock,
        )

    def job_begins(self, job: LiveJob) -> None:
        self.plans.ahead.make_ahead(job)

    def job_read(self, job: LiveJob) -> None:
        self._job_metrics.begin(job)

    def job_ended(self, job: LiveJob) -> None:
        self.plans.ahead.cancel(job)
        self._advising.cancel(job)
        self.security.tokens.end_job(job.job_id)

    def stuck(self) -> str:
        """Which threads of the console have not got on for longer than anything takes; empty: none."""
        if not self._ticker.ident or self._stop.is_set():
            return ""
        still = not self._ticker.is_alive() or self._clock() - self._got_on > STUCK_SECONDS
        return self._ticker.name if still else ""

    def ready(self) -> None:
        """Raises ConsoleError when the database does not answer, or can't store anything, which is asked for once a
        second at most."""
        with self._probing, storing():
            if self._clock() - self._stored_at >= PROBE_SECONDS:
                self._store.try_to_write()
                self._stored_at = self._clock()
            else:
                self._store.ping()

    @property
    def database(self) -> Database:
        return self._store.database

    def _keep_time(self) -> None:
        last_flush, turns = time.monotonic(), 0
        resting: dict[str, float] = {}  # jobs that are over, of which nothing is left to be done; and since when
        while not self._stop.wait(TICK_SECONDS):
            self._got_on = self._clock()
            for job in self.jobs.live():
                self._got_on = self._clock()
                if job.job_id in resting and job.quiet:
                    continue
                try:
                    self.tick(job)
                    if missing := job.plan_missing():
                        job.ask_for(missing)
                    self.plans.consider(job)
                    self._advising.consider(job)
                    self.measuring.consider(job)
                    self.operators.consider(job)
                    self.accounts.consider(job)
                    if job.state.over:
                        job.plans.let_go()
                        resting.setdefault(job.job_id, time.monotonic())
                except ConsoleError as error:
                    log.warning("a tick could not be stored; it is tried again", job=job.job_id, reason=error.detail)
                except Exception:
                    log.exception("a tick failed", job=job.job_id)
            if time.monotonic() - last_flush >= FLUSH_SECONDS:
                last_flush = time.monotonic()
                self._rest(resting)
                self.plans.simulations.end_unwatched()
                turns = max((len(job.state.members) for job in self.jobs.live()), default=0)
                turns = max(1, -(-turns // FLUSH_AT_ONCE))
            if turns:
                turns -= 1
                self._flush(FLUSH_AT_ONCE)

    def _rest(self, resting: dict[str, float]) -> None:
        """Keeps a line alone of jobs that have been at rest for long. Lets go of those that are none any more."""
        live = {job.job_id: job for job in self.jobs.live()}
        for job_id in resting.keys() - live.keys():
            del resting[job_id]
        newest_last = sorted((live[job_id] for job_id in resting), key=lambda job: job.created_at)
        for job in newest_last[:-OVER_SHOWN]:
            if time.monotonic() - resting[job.job_id] < OVER_SECONDS:
                continue
            try:
                if self.jobs.rest(job):
                    del resting[job.job_id]
            except SQLAlchemyError as error:
                log.warning("jobs that are over stay in memory for now", reason=type(error).__name__)
                return

    def tick(self, job: LiveJob) -> None:
        """Looks for workers that have fallen silent, unless it is this process that can't hear them: then the next
        tick takes all of that time for a pause of the console's own."""
        if self.loop_watch.overdue <= self.failure_timeouts.heartbeat:
            job.tick()

    def _flush(self, most: int = MAX_WORKERS) -> None:
        """most: workers of each job."""
        beats = {job.job_id: rows for job in self.jobs.live() if (rows := job.measurements.unsaved(most))}
        if beats:
            try:
                self._store.heartbeats(beats)
            except SQLAlchemyError as error:
                # Only the latest heartbeat counts, and another one is on its way.
                log.warning("heartbeats could not be stored", reason=type(error).__name__)


_console: ConsoleService | None = None


def get_console() -> ConsoleService:
    """The console of this process. Raises RuntimeError before `set_console`."""
    if _console is None:
        raise RuntimeError("no console runs in this process")
    return _console


def set_console(console: ConsoleService | None) -> None:
    global _console
    _console = console
