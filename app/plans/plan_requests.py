"""Plans that a child process makes or looks up: what it is asked, and what it does. Large plans cross the pipe in
columns (planner.plans.packed)."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openrecycle.app.runtime.children import Channel, TaskQueue, answered
from openrecycle.planner.catalogs.catalog_store import CatalogInfo, MappedBlobs, StoredCatalog
from openrecycle.planner.jobs.job import MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.packed import from_bytes, to_bytes
from openrecycle.planner.plans.plan import JobDoc, Plan, PlanError
from openrecycle.planner.portfolio import checked_plan_of, make_plan


@dataclass(frozen=True)
class PlanRequest:
    """Asks for one plan. time_limit: of the solver, in seconds. partition: layers per stage; (): as the job says."""

    owner: str
    job: JobDoc
    failed: tuple[str, ...]
    technique: str
    memory: str
    solver: str = "list"
    time_limit: float = 60.0
    partition: tuple[int, ...] = ()
    timeout: None = None
    makes: bool = True

    def to_json(self) -> bytes:
        return json.dumps({**self.__dict__, "job": self.job.model_dump(mode="json")}).encode()

    def read(self, document: bytes) -> Plan:
        return from_bytes(document, source="the planning process")


@dataclass(frozen=True)
class LookUpRequest:
    """Asks for one plan of a catalog, fitted to the failures. info: of the catalog, as JSON. stored: the plan as it
    lies there, under that name."""

    owner: str
    info: str
    failed: tuple[str, ...]
    name: str
    stored: bytes
    timeout: None = None
    makes: bool = False

    def to_json(self) -> bytes:
        return json.dumps({"look_up": {**self.__dict__, "stored": b64encode(self.stored).decode()}}).encode()

    def read(self, document: bytes) -> Plan:
        return from_bytes(document, source="the planning process")


def plan_maker(name: str = "planning", *, on_made: Callable[[Plan], None] = lambda made: None) -> TaskQueue:
    """Takes PlanRequest and LookUpRequest."""
    return TaskQueue(serve, name, on_made=on_made)


def serve(channel: Channel, request: bytes) -> None:
    """In the child."""
    channel.say(answered(request, _plan))


def _plan(asked: dict[str, Any]) -> bytes:
    if "look_up" in asked:
        return to_bytes(_looked_up(**asked["look_up"]))
    plan = make_plan(
        problem(
            JobDoc.model_validate(asked["job"]),
            asked["failed"],
            asked["technique"],
            asked["memory"],
            asked["partition"],
        ),
        solver=asked["solver"],
        time_limit=asked["time_limit"],
        look_ahead=asked["solver"] != "list",  # asked for while workers wait
        form=checked_plan_of,
    )
    return to_bytes(plan)


def _looked_up(info: str, failed: Sequence[str], name: str, stored: str, **_: object) -> Plan:
    """Raises PlannerError when the stored plan is damaged, or not for such failures."""
    catalog = StoredCatalog(CatalogInfo.from_json(info), MappedBlobs({name: b64decode(stored)}))
    found = catalog.find(Worker.parse(worker, field="failed") for worker in failed)
    if found is None:
        raise PlanError(f"plan {name} is not for these failures")
    return found.plan


def problem(
    document: JobDoc, failed: Sequence[str], technique: str, memory: str, partition: Sequence[int] = ()
) -> Problem:
    """Raises PlannerError."""
    workers, job = frozenset(Worker.parse(name, field="failed") for name in failed), document.job()
    return Problem(
        job.with_partition(partition) if partition else job, workers, Technique.of(technique), MemoryLimit.parse(memory)
    )
