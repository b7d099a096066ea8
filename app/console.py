"""The console as a service: what the REST API and the pages call. Thread-safe.

What agents and launchers say is in app.jobs.agent_reports, what people read of jobs in app.jobs.queries, what
operators ask for in app.jobs.operator_actions.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.events import Note
from openrecycle.agent.coordination.membership import Ladder
from openrecycle.agent.protocol import JobCreated, JobSpec, JobState
from openrecycle.app.advice.service import Advising
from openrecycle.app.catalogs.service import Catalogs
from openrecycle.app.history.service import Histories
from openrecycle.app.jobs.agent_reports import Reports
from openrecycle.app.jobs.audit import AuditLog
from openrecycle.app.jobs.live_job import TICK_SECONDS, LiveJob
from openrecycle.app.jobs.operator_actions import Operators
from openrecycle.app.jobs.past_jobs import PastJobs
from openrecycle.app.jobs.queries import Readings
from openrecycle.app.jobs.view_builder import PlanCache
from openrecycle.app.metrics.exposition import Metrics
from openrecycle.app.metrics.jobs import OVER_SHOWN, JobMetrics
from openrecycle.app.observing.drifting import Drifting
from openrecycle.app.observing.feed import Feed
from openrecycle.app.observing.goodput import Accounts
from openrecycle.app.observing.keep import Keep
from openrecycle.app.observing.log_book import LogBook
from openrecycle.app.observing.measuring import Measuring
from openrecycle.app.observing.recorder import Recorder
from openrecycle.app.observing.rollout import RollOuts
from openrecycle.app.plans.ahead import Planning
from openrecycle.app.plans.library import Library
from openrecycle.app.plans.page_plans import Making
from openrecycle.app.plans.profiles import NamedProfiles
from openrecycle.app.plans.replanning import Replanning
from openrecycle.app.plans.simulations import Simulations
from openrecycle.app.plans.solving import Solves
from openrecycle.app.plans.uploading import Uploads
from openrecycle.app.runtime.children import begin_without_pages
from openrecycle.app.runtime.errors import ConsoleError, storing, unknown_job
from openrecycle.app.runtime.event_loop_watch import EventLoopWatch
from openrecycle.app.security.access import Access
from openrecycle.app.security.tokens import Tokens
from openrecycle.db.audit import AuditStore
from openrecycle.db.job_index import OVER, JobIndex
from openrecycle.db.observations import Observations
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.db.tokens import TokenStore
from openrecycle.planner.errors import PlannerError
from openrecycle.planner.packed import Question
from openrecycle.planner.plan import Plan

log = structlog.get_logger()

MAX_WORKERS = 16_384
# Of all jobs that have not ended: the time that the console takes to start, and its memory, go by them.
MAX_LIVE_WORKERS = 16 * MAX_WORKERS

# What a console that is killed forgets of its workers' newest heartbeats; each sends another within a second.
FLUSH_SECONDS = 5.0
# For one job's turn; a database that does not answer takes a tenth of it.
STUCK_SECONDS = 120.0
# Between two looks whether the database can be written.
PROBE_SECONDS = 1.0
# Of one job in one turn: more would keep the event loop waiting for tens of milliseconds.
FLUSH_AT_ONCE = 512


class Console(Reports, Readings):
    """One per process and database. `start` before use, `close` at the end.

    tolerance: plans are made ahead for up to this many failures. keep: how much of its history. pulse: of the event
    loop that hears the workers; while that stands still, no silence counts.
    """

    def __init__(
        self,
        store: Store,
        *,
        ladder: Ladder | None = None,
        tolerance: int = 2,
        keep: Keep | None = None,
        pulse: EventLoopWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ladder = ladder or Ladder()
        self.pulse, self._clock = pulse or EventLoopWatch(clock=clock), clock
        self._store = store
        self._jobs: dict[str, LiveJob] = {}
        self._index = JobIndex(store.database)
        self.past = PastJobs(self._index)
        self._unreadable: set[str] = set()
        self._lock = threading.Lock()
        self._plans = PlanCache(store)
        self.tolerance = tolerance
        self.catalogs = Catalogs(store)
        self.catalogs.on_plans = self._take_plans
        self.metrics = Metrics()
        self._planning = Planning(tolerance, self.catalogs, self.metrics.plan_made)
        self._drifting = Drifting(self._planning, self._plans.get, self.ladder.heartbeat)
        self.operators = Operators(self.job, store)
        self.tokens = Tokens(TokenStore(store.database))
        self.audit = AuditLog(AuditStore(store.database))
        self.access = Access()  # of whoever serves it
        self.observations = Observations(store.database)
        self.measuring = Measuring(self.observations, self.ladder.heartbeat)
        self.accounts = Accounts(store, self.observations, self._plans.get)
        waited = self.accounts.waiting.of
        self._advising = Advising(store, waited)
        self._job_metrics = JobMetrics(
            self.live_jobs, store, self._plans.get, self.accounts.of, self.past.states, waited
        )
        self.metrics.registry.register(self._job_metrics)
        self._unwatch = self.metrics.watch(store.database.engine)
        self.feed = Feed(store, self.observations)
        self.roll_outs = RollOuts(store)
        self.recorder = Recorder(store.database, self.live_jobs, keep or Keep(), self.job_ids)
        self.histories = Histories(self, store.database)
        self.logs = LogBook()
        self.simulations = Simulations()
        self.making = Making()
        self.library = Library(store, self._plans)
        self.profiles = NamedProfiles(store.database)
        self.uploads = Uploads()
        self.solves = Solves(on_made=self.metrics.plan_made)
        self.replanning = Replanning(self.job, self.plan, self.solves, self._keep_plan)
        self._stop = threading.Event()
        self._got_on = self._clock()
        self._probing, self._stored_at = threading.Lock(), -math.inf
        self._ticker = threading.Thread(target=self._keep_time, name="console-ticks", daemon=True)

    # -- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Takes up every job of the database that is not over; the others, of which there may be thousands, one by one
        when somebody asks for them."""
        begin_without_pages()
        self._planning.start()
        self._advising.start()
        self.past.read()
        states = self._index.states()
        for job_id in [*list(self.past.lines())[-OVER_SHOWN:], *(j for j in states if states[j] not in OVER)]:
            job = self.take_up(job_id)
            if job is not None and not job.state.over:
                self._check_ladder(job)
                self._planning.make_ahead(job)
        self._got_on = self._clock()
        self._ticker.start()
        self.recorder.start()
        self.histories.start()

    def stop_waiting(self) -> None:
        """Sends every long-poll home, so that the server can end."""
        for job in list(self._jobs.values()):
            job.topic.close()
            job.generation_topic.close()
        self.solves.stop_waiting()

    def close(self) -> None:
        """Writes what is not yet written, ends the planning process."""
        self.stop_waiting()
        self._stop.set()
        if self._ticker.is_alive():
            self._ticker.join(2)
        self.tokens.close()
        self.catalogs.close()
        self._planning.close()
        self._advising.close()
        self.simulations.close()
        self.solves.close()
        self.uploads.close()
        self.making.close()
        self._plans.close()
        for job in self._jobs.values():
            with suppress(ConsoleError):
                job.take_heartbeats()
        self.histories.close()
        self.recorder.close()
        self._flush()
        self._unwatch()

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

    # -- jobs -------------------------------------------------------------------------------

    def create_job(self, spec: JobSpec, idempotency_key: str | None = None) -> tuple[JobCreated, bool]:
        """Also says whether the job is new: with a key seen before, the earlier job is returned.

        Raises ConsoleError for a job that can't be planned, or a key that was used for another one.
        """
        if spec.pipelines * spec.stages > MAX_WORKERS:
            raise ConsoleError(
                422,
                "invalid",
                f"pipelines x stages: got {spec.pipelines * spec.stages}, expected at most {MAX_WORKERS} workers",
            )
        live = sum(len(job.state.members) for job in self.live_jobs() if not job.state.over)
        if live + spec.pipelines * spec.stages > MAX_LIVE_WORKERS:
            detail = (
                f"this console looks after {live:,} workers of jobs that have not ended, at most {MAX_LIVE_WORKERS:,}"
            )
            raise ConsoleError(409, "full", f"{detail}; end or delete some of them first")
        job_id, created_at = secrets.token_hex(6), time.time()
        try:
            self.ladder.check_above(spec.transfer_timeout, spec.group_timeout)
            job = self._live(job_id, spec, created_at)
        except PlannerError as error:
            raise ConsoleError(422, "invalid", str(error)) from None
        members = [{"name": member.name, "state": member.state.value} for member in job.state.members.values()]
        text = spec.model_dump_json()
        # Under the lock, so that whoever is given an earlier job's id finds that job.
        with self._lock, storing():
            row = self._store.create_job(
                job_id,
                name=spec.name,
                spec=text,
                state=JobState.STARTING.value,
                created_at=created_at,
                workers=members,
                idempotency_key=idempotency_key,
            )
            new = row["id"] == job_id
            if new:
                self._jobs[job_id] = job
        if not new and JobSpec.model_validate_json(row["spec"]) != spec:
            raise ConsoleError(
                409, "idempotency_conflict", f"Idempotency-Key: {idempotency_key!r} was used for another job"
            )
        if new:
            self._planning.make_ahead(job)
            log.info("job created", job=job_id, name=spec.name, workers=len(members))
        ladder = self.ladder
        created = JobCreated(
            job_id=row["id"],
            heartbeat_seconds=ladder.heartbeat,
            suspect_seconds=ladder.suspect,
            dead_seconds=ladder.dead,
        )
        return created, new

    def job(self, job_id: str) -> LiveJob:
        """Raises ConsoleError (404)."""
        job = self._jobs.get(job_id)
        if job is None and job_id in self.past.lines():
            with storing():
                job = self.take_up(job_id)
        if job is None:
            raise unknown_job(job_id)
        return job

    def job_ended(self, job: LiveJob) -> None:
        self._planning.cancel(job)
        self._advising.cancel(job)
        self.tokens.end_job(job.job_id)

    def live_jobs(self) -> list[LiveJob]:
        return list(self._jobs.values())

    def job_ids(self) -> list[str]:
        return [*self.past.lines(), *self._jobs]

    def follow(self) -> None:
        """Notes jobs that are over and have come into the database beside us; lets go of those that were deleted.
        Raises SQLAlchemyError."""
        known = dict.fromkeys(self.past.lines(), True)
        known |= {job_id: bool(job.state.over) for job_id, job in list(self._jobs.items())}
        states = self._index.states()
        new = [j for j, state in states.items() if state in OVER and j not in known and j not in self._unreadable]
        if new:
            self.past.read(new)
        for job_id, over in known.items():
            if over and job_id not in states:
                self.let_go(job_id)

    def take_up(self, job_id: str) -> LiveJob | None:
        """Reads a stored job, unless it is here already; None: it can't be read. Raises SQLAlchemyError."""
        if job_id not in self._jobs and job_id not in self._unreadable and (row := self._store.job(job_id)) is not None:
            try:
                job = self._live(job_id, JobSpec.model_validate_json(row["spec"]), row["created_at"])
                job.restore(row)
                self._job_metrics.begin(job)
                with self._lock:
                    self._jobs.setdefault(job_id, job)
            except (PlannerError, ValueError):
                log.exception("a stored job can't be read; it is left out", job=job_id)
                self._unreadable.add(job_id)
        self.past.drop(job_id)
        return self._jobs.get(job_id)

    def let_go(self, job_id: str) -> None:
        """Of a job that is deleted: whoever asks for it from now on learns that there is none."""
        with self._lock:
            job = self._jobs.pop(job_id, None)
        self.past.drop(job_id)
        if job is not None:
            self.job_ended(job)
            job.topic.close()
            job.generation_topic.close()

    # -- details ----------------------------------------------------------------------------

    def _live(self, job_id: str, spec: JobSpec, created_at: float) -> LiveJob:
        return LiveJob(
            job_id,
            spec,
            created_at,
            store=self._store,
            ladder=self.ladder,
            want_plan=self._planning.make_now,
            on_generation=self._planning.make_next,
            look_up=self.catalogs.find,
            clock=self._clock,
        )

    def _check_ladder(self, job: LiveJob) -> None:
        """Of a job that another console took: it runs, so it is not refused."""
        try:
            self.ladder.check_above(job.spec.transfer_timeout, job.spec.group_timeout)
        except PlannerError as error:
            job.record(Note("warning", "console", f"this console's time-outs do not suit the job's agents: {error}"))

    def _keep_plan(self, job: LiveJob, plan: Plan) -> None:
        """Keeps a plan in the catalog of the job's question, unless it is for speeds that were found, which pass."""
        if job.job is job.nominal:
            self.catalogs.keep(job.question, plan)

    def _take_plans(self, question: Question, names: list[str]) -> None:
        """Running jobs use better plans of their catalog from the next failure on."""
        for job in list(self._jobs.values()):
            if not job.state.over and job.question == question:
                self._planning.take(job, names)

    def _keep_time(self) -> None:
        last_flush, turns = time.monotonic(), 0
        resting: set[str] = set()  # jobs that are over, and of which nothing is left to be done
        while not self._stop.wait(TICK_SECONDS):
            self._got_on = self._clock()
            for job in list(self._jobs.values()):
                self._got_on = self._clock()
                if job.job_id in resting and job.quiet:
                    continue
                try:
                    self.tick(job)
                    if missing := job.plan_missing():
                        job.ask_for(missing)
                    self._drifting.consider(job)
                    self._advising.consider(job)
                    self.replanning.consider(job)
                    self.measuring.consider(job)
                    self.accounts.consider(job)
                    if job.state.over:
                        resting.add(job.job_id)
                except ConsoleError as error:
                    log.warning("a tick could not be stored; it is tried again", job=job.job_id, reason=error.detail)
                except Exception:
                    log.exception("a tick failed", job=job.job_id)
            if time.monotonic() - last_flush >= FLUSH_SECONDS:
                last_flush = time.monotonic()
                resting &= self._jobs.keys()
                turns = max((len(job.state.members) for job in list(self._jobs.values())), default=0)
                turns = max(1, -(-turns // FLUSH_AT_ONCE))
            if turns:
                turns -= 1
                self._flush(FLUSH_AT_ONCE)

    def tick(self, job: LiveJob) -> None:
        """Looks for workers that have fallen silent, unless it is this process that can't hear them: then the next
        tick takes all of that time for a pause of the console's own."""
        if self.pulse.overdue <= self.ladder.heartbeat:
            job.tick()

    def _flush(self, most: int = MAX_WORKERS) -> None:
        """most: workers of each job."""
        beats = {job_id: rows for job_id, job in list(self._jobs.items()) if (rows := job.unsaved_contacts(most))}
        if beats:
            try:
                self._store.heartbeats(beats)
            except SQLAlchemyError as error:
                # Only the latest heartbeat counts, and another one is on its way.
                log.warning("heartbeats could not be stored", reason=type(error).__name__)


_console: Console | None = None


def get_console() -> Console:
    """The console of this process. Raises RuntimeError before `set_console`."""
    if _console is None:
        raise RuntimeError("no console runs in this process")
    return _console


def set_console(console: Console | None) -> None:
    global _console
    _console = console
