"""Plans that a page asks for on the spot: made in a child process of their own, each once.

They never stand in the way of a job's own plans, which another process makes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from openrecycle.app.plans.plan_requests import PlanRequest, plan_maker
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Technique
from openrecycle.planner.plans.plan import JobDoc, Plan
from openrecycle.planner.reference import reference_plan

MAX_KEPT = 32
TIME_LIMIT = 5.0
# Above this a page gets the list scheduler's plan at once; better ones are for the Planner page.
SEARCHED_OPS = 20_000


@dataclass(frozen=True)
class PlanQuestion:
    """What is to be planned. Equal questions have one answer."""

    job: JobDoc
    failed: tuple[str, ...]
    technique: str
    memory: str

    @property
    def is_reference(self) -> bool:
        """Is it fault-free 1F1B of a grid small enough to be laid out at once?"""
        plain = self.technique == Technique.FAULT_FREE and self.memory == "1f1b" and not self.failed
        return plain and self.ops <= SEARCHED_OPS

    @property
    def ops(self) -> int:
        return 3 * self.job.pipelines * self.job.stages * self.job.micro_batches


@dataclass
class Answer:
    """plan or why, once `done`. asked: monotonic seconds."""

    plan: Plan | None = None
    why: str = ""
    done: bool = False
    asked: float = field(default_factory=time.monotonic)


class Making:
    """Thread-safe. Its child process begins with the first question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._maker = plan_maker("plans on the spot")
        self._started = False

    def get(self, question: PlanQuestion) -> Answer:
        """The answer, as far as it is there; it is begun now if nobody has asked before."""
        key = repr(question)
        with self._lock:
            known = self._answers.pop(key, None)
            if known is None:
                known = self._begin(question)
            self._answers[key] = known  # the newest last
            while len(self._answers) > MAX_KEPT:
                self._answers.pop(next(iter(self._answers)))
            return known

    def close(self) -> None:
        with self._lock:
            if self._started:
                self._maker.close()

    def _begin(self, question: PlanQuestion) -> Answer:
        answer = Answer()
        if question.is_reference:
            # A fixed order of ops: nothing is searched for, so nobody need wait for a process to begin.
            try:
                answer.plan = reference_plan(question.job.job(), "1f1b")
            except PlannerError as error:
                answer.why = str(error)
            answer.done = True
            return answer

        def done(plan: Plan | None, why: str) -> None:
            answer.plan, answer.why, answer.done = plan, why, True

        if not self._started:
            self._started = True
            self._maker.start(child=False)
        solver = "auto" if question.ops <= SEARCHED_OPS else "list"
        request = PlanRequest(
            "a page", question.job, question.failed, question.technique, question.memory, solver, TIME_LIMIT
        )
        self._maker.submit(request, done)
        return answer
