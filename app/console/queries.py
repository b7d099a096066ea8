"""What people, pages and dashboards read of every job. A part of app.console.service.Console."""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.app.console.jobs import PastJobs
from openrecycle.app.console.view import JobHead, JobSummary, JobView
from openrecycle.app.console.view_builder import SHARED, SHARED_SECONDS, head, job_view, summary
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.observing.job_history import Row, changes
from openrecycle.app.observing.rates import IterationView, recent_rate, share_of
from openrecycle.app.observing.service import Observing
from openrecycle.app.plans.service import PlansService
from openrecycle.app.runtime.errors import plain, storing, unknown_plan
from openrecycle.app.workers.sentence import sentence
from openrecycle.app.workers.states import WorkerStates
from openrecycle.db.plan_rows import PlanColumns
from openrecycle.db.store import Record, Store
from openrecycle.planner.plans.plan import Plan


@dataclass(frozen=True)
class _Line:
    """What was said of a job. over: was it? until: monotonic seconds."""

    over: bool
    version: int
    until: float
    line: JobSummary


class Queries(ABC):
    """Thread-safe. Every method raises ConsoleError: for an unknown job, or a database that does not answer."""

    _store: Store
    failure_timeouts: FailureTimeouts
    plans: PlansService
    observing: Observing
    past: PastJobs

    @abstractmethod
    def job(self, job_id: str) -> LiveJob:
        """Raises ConsoleError (404)."""

    @abstractmethod
    def live_jobs(self) -> list[LiveJob]:
        """Those that are not over, and those others that somebody has asked for."""

    def list_jobs(self) -> list[JobSummary]:
        """Newest first."""
        lines = {**self.past.lines(), **{job.job_id: self._summary(job) for job in self.live_jobs()}}
        return sorted(lines.values(), key=lambda line: (-line.created_at, line.job_id))

    def _summary(self, job: LiveJob) -> JobSummary:
        # Nothing of what is said here changes any more once a job is over, and there may be thousands. Of a large job
        # that is not, whoever asks within a second is told the same, unless something is stored.
        known, over, now, version = job.view_cache.get("summary"), job.state.over, time.monotonic(), job.version
        if isinstance(known, _Line) and (known.over if over else known.version == version and now < known.until):
            return known.line
        made = summary(job, self.sentence(job))
        shared = SHARED_SECONDS if len(job.state.members) >= SHARED else 0.0
        job.view_cache["summary"] = _Line(bool(over), version, now + shared, made)
        return made

    def head(self, job_id: str) -> JobHead:
        return head(self.job(job_id))

    def view(self, job_id: str, iterations: int = 600, events: int = 200, *, workers: bool = True) -> JobView:
        """workers: with what is seen of each, of which there may be thousands."""
        job = self.job(job_id)
        with storing():
            figures, waited = self.observing.accounts.of(job), self.observing.accounts.waiting.of(job)
            stores = self._store, self.observing.observations

            def say(worker_states: WorkerStates, newest: Sequence[IterationView]) -> str:
                share = share_of(recent_rate(newest), figures)
                return sentence(worker_states, time.monotonic(), self.failure_timeouts, share=share)

            return job_view(job, stores, self.plans.cache, say, figures, waited, iterations, events, workers=workers)

    def sentence(self, job: LiveJob) -> str:
        return sentence(job.worker_states(), time.monotonic(), self.failure_timeouts)

    def plan(self, fingerprint: str) -> Plan:
        """Raises ConsoleError (404)."""
        return self.plans.plan(fingerprint)

    def plan_document(self, job_id: str, fingerprint: str) -> str:
        """The stored JSON, as it is. Raises ConsoleError (404)."""
        return zlib.decompress(self.deflated_plan(job_id, fingerprint)).decode()

    def deflated_plan(self, job_id: str, fingerprint: str) -> bytes:
        """The same as it is stored: a tenth, or less. Raises ConsoleError (404)."""
        self.job(job_id)
        with storing():
            document = PlanColumns(self._store.database).deflated_document(plain(fingerprint), job_id)
        if document is None:
            raise unknown_plan(fingerprint)
        return document

    def job_plans(self, job_id: str) -> list[Record]:
        """The job's plans, fewest failures first: fingerprint, failed, ahead, created_at."""
        self.job(job_id)
        with storing():
            return self._store.job_plans(job_id)

    def events(self, job_id: str, after: int, limit: int) -> list[Record]:
        self.job(job_id)
        with storing():
            return self._store.events(job_id, after=after, limit=limit)

    def iterations(self, job_id: str, after: int, limit: int) -> list[Record]:
        self.job(job_id)
        with storing():
            return self._store.iterations(job_id, after=after, limit=limit)

    def past_failures(self, job_id: str, seconds: float | None = None) -> tuple[tuple[Row, ...], float]:
        """((seconds since the first generation, worker, `failed` or `joined`), ...), seconds covered: to now, or the
        first so many: what a simulation can be run on.

        A generation tells both: who is out that was in before, and who is in that was out.
        """
        job = self.job(job_id)
        with storing():
            generations = self._store.generations(job_id)
        if not generations:
            return (), 0.0
        begin = generations[0]["opened_at"]
        rows = changes(generations, begin)
        iterations = self.iterations(job_id, after=max(-1, job.state.committed - 2), limit=1)
        last = iterations[-1]["committed_at"] if iterations else time.time()
        # Whole ten seconds: a page that is opened again soon asks the same question.
        covered = 10.0 * ((max(last, generations[-1]["opened_at"]) - begin) // 10 + 1)
        if seconds is not None:
            covered = min(covered, seconds)
        return tuple(row for row in rows if row[0] <= covered), covered

    def generations_by_plan(self, job_id: str) -> dict[str, list[int]]:
        """The numbers of the generations that each plan was run in, by its fingerprint."""
        self.job(job_id)
        with storing():
            rows = self._store.generations(job_id)
        found: dict[str, list[int]] = {}
        for row in rows:
            for fingerprint in filter(None, (row["plan_fingerprint"], row["interim_plan"])):
                found.setdefault(fingerprint, []).append(row["generation"])
        return found

    def generations(self, job_id: str, after: int = 0, limit: int | None = None) -> list[Record]:
        """Generations with a number > after and their acknowledgements, oldest first."""
        self.job(job_id)
        with storing():
            generations = self._store.generations(job_id, after=after, limit=limit)
            last = generations[-1]["generation"] if generations else 0
            acks = self._store.acknowledgements(job_id, after=after, last=last) if generations else []
        by_generation: dict[int, list[Record]] = {}
        for ack in acks:
            by_generation.setdefault(ack.pop("generation"), []).append({k: v for k, v in ack.items() if k != "job_id"})
        return [
            {
                **{k: v for k, v in e.items() if k != "job_id"},
                "acknowledgements": by_generation.get(e["generation"], []),
            }
            for e in generations
        ]
