"""What there is to plan for a job: which workers may fail, and how long an iteration without failures takes.

Both cost more than the API's process may take, once a job has thousands of stages or micro-batches: the answer then
comes from a child process (app.runtime.children).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain, islice
from math import comb
from typing import Any

from openrecycle.app.runtime.children import Channel, answered
from openrecycle.planner.catalogs.catalog_store import CatalogInfo
from openrecycle.planner.jobs.failures import patterns
from openrecycle.planner.jobs.job import MemoryLimit, Technique, Worker
from openrecycle.planner.plans.baseline import reference_period
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.plans.plan import JobDoc

# Patterns that are looked for: no more are ever planned one by one.
MOST = 512
# Seconds that the child may take for one answer.
TIMEOUT = 30.0
# Up to so many ops, and sets of workers that might be looked at, the answer takes milliseconds.
QUICK_OPS, QUICK_SETS = 20_000, 20_000


@dataclass(frozen=True)
class PlansNeeded:
    """patterns: canonical failure sets that leave every stage a living peer, fewest failures first: all of up to
    `tolerance` failures, or the first MOST + 1. reference: the period of fault-free 1F1B, in the job's time unit."""

    tolerance: int
    patterns: tuple[frozenset[Worker], ...]
    reference: float

    def listed(self, tolerance: int, most: int) -> list[frozenset[Worker]] | None:
        """All of up to `tolerance` failures, unless there are more than `most` (at most MOST)."""
        found = [pattern for pattern in self.patterns if len(pattern) <= tolerance]
        return found if len(found) <= most else None


@dataclass(frozen=True)
class OutlookRequest:
    """Asks for the PlansNeeded of a question."""

    owner: str
    job: JobDoc
    technique: str
    memory: str
    tolerance: int
    timeout: float
    makes: bool = False

    @classmethod
    def of(cls, owner: str, info: CatalogInfo, tolerance: int) -> OutlookRequest:
        return cls(owner, info.job, info.technique.value, info.memory, tolerance, TIMEOUT)

    def to_json(self) -> bytes:
        return json.dumps({**self.__dict__, "job": self.job.model_dump(mode="json")}).encode()

    def read(self, document: bytes) -> PlansNeeded:
        said = json.loads(document)
        found = tuple(frozenset(map(Worker.parse, names)) for names in said["patterns"])
        return PlansNeeded(said["tolerance"], found, said["reference"])


def most_failures(question: CatalogQuestion) -> int:
    """How many failures leave each stage a living worker."""
    return question.job.stages * (question.job.pipelines - 1) if question.technique.reroutes else 0


def is_quick(question: CatalogQuestion, tolerance: int) -> bool:
    """Does `needed` take milliseconds, whatever the job's shape is?"""
    job = question.job
    if 3 * job.pipelines * job.stages * job.micro_batches > QUICK_OPS:
        return False
    workers = job.pipelines * job.stages
    return comb(workers, min(tolerance, most_failures(question), workers // 2)) <= QUICK_SETS


def needed(question: CatalogQuestion, tolerance: int) -> PlansNeeded:
    """Its time has no bound, unless `is_quick` says so."""
    job, tolerance = question.job, min(tolerance, most_failures(question))
    every = chain.from_iterable(patterns(job, count) for count in range(tolerance + 1))
    return PlansNeeded(tolerance, tuple(islice(every, MOST + 1)), reference_period(job) / job.ticks_per_unit)


def serve(channel: Channel, request: bytes) -> None:
    """In a child process."""
    channel.say(answered(request, lambda asked: outlook_document(asked).encode()))


def outlook_document(asked: dict[str, Any]) -> str:
    """In the child: what `OutlookRequest.read` reads. Raises PlannerError."""
    job = JobDoc.model_validate(asked["job"]).job()
    question = CatalogQuestion(job, Technique.of(asked["technique"]), MemoryLimit.parse(asked["memory"]))
    found = needed(question, asked["tolerance"])
    names = [sorted(map(str, pattern)) for pattern in found.patterns]
    return json.dumps({"tolerance": found.tolerance, "patterns": names, "reference": found.reference})
