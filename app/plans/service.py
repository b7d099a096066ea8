"""All plans of a console: those of running jobs, made ahead of failures and replaced by better ones, and those that
people ask for, keep, compare and simulate."""

from __future__ import annotations

from collections.abc import Callable

from openrecycle.app.catalogs.service import Catalogs
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.stored_plans import PlanCache
from openrecycle.app.plans.drifting import Drifting
from openrecycle.app.plans.job_planner import JobPlanner
from openrecycle.app.plans.library import Library
from openrecycle.app.plans.making import Making
from openrecycle.app.plans.profiles import NamedProfiles
from openrecycle.app.plans.replanning import Replanning
from openrecycle.app.plans.simulations import Simulations
from openrecycle.app.plans.solving import Solves
from openrecycle.app.plans.uploading import Uploads
from openrecycle.app.runtime.errors import plain, storing, unknown_plan
from openrecycle.db.store import Store
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.plans.plan import Plan


class PlansService:
    """One per console. tolerance: plans are made ahead for up to this many failures. heartbeat: seconds. find: a job by
    its id, raises ConsoleError. jobs: those that are not over, and others. on_made: called with each plan that a solver
    made."""

    def __init__(
        self,
        store: Store,
        catalogs: Catalogs,
        *,
        tolerance: int,
        heartbeat: float,
        find: Callable[[str], LiveJob],
        jobs: Callable[[], list[LiveJob]],
        on_made: Callable[[Plan], None],
    ) -> None:
        self._catalogs, self._jobs = catalogs, jobs
        catalogs.on_plans = self._take
        self.cache = PlanCache(store)
        self.ahead = JobPlanner(tolerance, catalogs, on_made)
        self.drifting = Drifting(self.ahead, self.cache.get, heartbeat)
        self.making = Making()
        self.library = Library(store, self.cache)
        self.profiles = NamedProfiles(store.database)
        self.uploads = Uploads()
        self.solves = Solves(on_made=on_made)
        self.simulations = Simulations()
        self.replanning = Replanning(find, self.plan, self.solves, self._keep)

    def start(self) -> None:
        self.ahead.start()

    def plan(self, fingerprint: str) -> Plan:
        """Raises ConsoleError (404)."""
        with storing():
            plan = self.cache.get(plain(fingerprint))
        if plan is None:
            raise unknown_plan(fingerprint)
        return plan

    def consider(self, job: LiveJob) -> None:
        """Once a tick."""
        self.drifting.consider(job)
        self.replanning.consider(job)

    def stop_waiting(self) -> None:
        """Sends whoever waits for a solver home."""
        self.solves.stop_waiting()

    def close(self) -> None:
        """Ends the child processes."""
        for service in (self.ahead, self.simulations, self.solves, self.uploads, self.making, self.cache):
            service.close()

    def _keep(self, job: LiveJob, plan: Plan) -> None:
        """Keeps a plan in the catalog of the job's question, unless it is for speeds that were found, which pass."""
        if job.job is job.nominal:
            self._catalogs.keep(job.question, plan)

    def _take(self, question: CatalogQuestion, names: list[str]) -> None:
        """Running jobs use better plans of their catalog from the next failure on."""
        for job in self._jobs():
            if not job.state.over and job.question == question:
                self.ahead.take(job, names)
