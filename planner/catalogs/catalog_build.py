"""Makes a catalog: what to plan ahead, in parallel, resumable.

Where all failure patterns can be listed each gets a plan. Larger grids get one plan per failure
*count*, for the distribution over stages that costs least: any failures can be led there by
migrations (planner.layers.migration), and failures with equal counts per stage need not even those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from openrecycle.planner.catalogs.catalog_store import PlanStore, StoredCatalog, create_folder, headers_of
from openrecycle.planner.catalogs.catalog_task import ReusablePlan, Target, Task, workers_of
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.failures import by_stage, canonical_pattern, patterns
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.layers.distribution import Counts, best_distributions, models
from openrecycle.planner.plans.packed import (
    CatalogQuestion,
    Effort,
    Header,
    decode_header,
    plan_name,
    unpack,
    with_effort,
)
from openrecycle.planner.plans.plan import PlanError
from openrecycle.planner.solvers.base import Cancelled

if TYPE_CHECKING:
    from openrecycle.planner.catalogs.catalog_engines import Engine

# Up to so many patterns each gets its own plan.
LISTED = 500
# Targets that one task plans, where nothing speaks for another number.
CHUNK = 16


class WritablePlanStore(PlanStore, Protocol):
    """Where plans lie that also takes new ones, one by one as they are made."""

    def put(self, name: str, blob: bytes) -> None: ...


@dataclass(frozen=True)
class Filled:
    """planned: made now. kept: there already. total: in all. finished: not stopped before its end."""

    planned: int
    kept: int
    total: int
    finished: bool


@dataclass(frozen=True)
class BuildReport(Filled):
    """With the catalog."""

    catalog: StoredCatalog
    seconds: float


def build_catalog(
    question: CatalogQuestion,
    tolerance: int,
    root: Path,
    *,
    engine: Engine,
    effort: Effort,
    per: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Cancelled | None = None,
) -> BuildReport:
    """Plans what is not there yet into a folder under `root`; a damaged plan counts as not there.

    per: `pattern`, `count`, or `auto`. on_progress gets (plans that are there, plans in all).
    Once `cancelled` is true no further task is begun, and what is done is kept. Raises InputError.
    """
    begin = time.perf_counter()
    wanted = targets(question, tolerance, per)
    catalog, folder = create_folder(root, question)
    filled = fill(question, wanted, folder, engine=engine, effort=effort, on_progress=on_progress, cancelled=cancelled)
    seconds = time.perf_counter() - begin
    return BuildReport(**vars(filled), catalog=StoredCatalog(catalog.info, folder), seconds=seconds)


def fill(
    question: CatalogQuestion,
    wanted: Sequence[Target],
    keeper: WritablePlanStore,
    *,
    engine: Engine,
    effort: Effort,
    on_progress: Callable[[int, int], None] | None = None,
    cancelled: Cancelled | None = None,
) -> Filled:
    """Plans those of `wanted` (see `targets`) that `keeper` lacks; see `build_catalog`."""
    there = _there(question, keeper, effort)
    missing = [t for t in wanted if not any(plan_name(workers_of(a)) in there for a in t.alternatives)]
    done = len(wanted) - len(missing)
    planned = 0
    if on_progress:
        on_progress(done, len(wanted))
    for blobs in engine.run(_tasks(question, missing, effort), cancelled):
        for name, blob in blobs:
            keeper.put(name, _better(question, keeper, name, blob))
            planned += 1
        if on_progress:
            on_progress(done + planned, len(wanted))
    finished = planned == len(missing)
    if finished:
        _inherit(question, keeper)
    return Filled(planned, done, len(wanted), finished)


# -- what to plan ----------------------------------------------------------------------------


def targets(question: CatalogQuestion, tolerance: int, per: str = "auto") -> list[Target]:
    """Everything that a catalog up to `tolerance` failures holds. Raises InputError."""
    job = question.job
    most = job.stages * (job.pipelines - 1) if question.technique.reroutes else 0
    if not 0 <= tolerance <= most:
        why = "each stage needs a living worker" if question.technique.reroutes else "fault-free plans take no failure"
        raise InputError("--tolerance", tolerance, f"a number of failures from 0 to {most}, as {why}")
    if per not in ("auto", "pattern", "count"):
        raise InputError("--per", per, "auto, pattern or count")
    listed = listed_patterns(job, tolerance, per)
    if listed is not None:
        return [Target(len(p), (by_stage(p, job),)) for p in listed]
    if job.speeds:
        raise InputError("--tolerance", tolerance, "fewer failures: workers of unlike speed need a plan per pattern")
    return _by_count(question, tolerance)


def listed_patterns(job: Job, tolerance: int, per: str = "auto") -> list[frozenset[Worker]] | None:
    """The failure patterns that get a plan each; None where a plan is made per failure count instead."""
    if per == "count":
        return None
    every = chain.from_iterable(patterns(job, count) for count in range(tolerance + 1))
    listed = list(every if per == "pattern" else islice(every, LISTED + 1))
    return listed if per == "pattern" or len(listed) <= LISTED else None


def _by_count(question: CatalogQuestion, tolerance: int) -> list[Target]:
    """One target per count: the best distributions by each period model.

    The failures of all stages lie in the same pipelines, which makes shorter plans (measured:
    up to 3 % on 64 x 32) and makes the plan of a count one for every smaller count as well.
    """
    ranked = models(question.job, question.technique, question.memory)
    found: list[list[Counts]] = [list(best_distributions(model, tolerance)) for model in ranked]
    out = []
    for count in range(tolerance + 1):
        options = dict.fromkeys(f[count] for f in found if count < len(f))
        out.append(Target(count, tuple(tuple(tuple(range(n)) for n in counts) for counts in options)))
    return out


def _there(question: CatalogQuestion, folder: PlanStore, effort: Effort) -> set[str]:
    """Plans that need not be made again: undamaged, and optimal or made with as much effort."""
    headers = headers_of(folder)
    return {name for name, h in headers.items() if question.fits(h.partition) and _enough(h, effort)}


def _better(question: CatalogQuestion, folder: PlanStore, name: str, blob: bytes) -> bytes:
    """What is kept of a new plan and the one that is there, which another solver may have made with more effort."""
    try:
        before = folder.get(name)
        kept = decode_header(before, source=name) if before is not None else None
    except PlanError:
        return blob
    new = decode_header(blob, source=name)
    if before is None or kept is None or not question.fits(kept.partition) or new.merit > kept.merit:
        return blob
    return with_effort(before, new.effort)


def _enough(header: Header, effort: Effort) -> bool:
    if header.solver.status == "optimal" or header.effort == effort:
        return True
    if effort.solver == "list":
        return True
    return header.effort.solver == effort.solver and (header.effort.time_limit or 0) >= (effort.time_limit or 0)


def _tasks(question: CatalogQuestion, missing: Sequence[Target], effort: Effort) -> Iterator[Task]:
    question = replace(question, job=question.job.at_home)
    nested = len({t.failures for t in missing}) == len(missing)
    for chunk in _chunks(question, missing, effort, nested):
        yield Task(question, effort, tuple(chunk), nested)


def _chunks(
    question: CatalogQuestion, missing: Sequence[Target], effort: Effort, nested: bool
) -> Iterator[Sequence[Target]]:
    """Targets that go together: few enough to share out and to stop soon.

    With as many failures on every stage a plan is at its best, and serves for all counts down to
    one stage less: so where there are many counts, each chunk ends with such a one.
    """
    stages = question.job.stages
    if nested and effort.solver == "list" and len(missing) >= 4 * stages:
        yield from (list(g) for _, g in groupby(missing, key=lambda t: -(-t.failures // stages)))
        return
    size = CHUNK if effort.solver == "list" else 1
    yield from (missing[begin : begin + size] for begin in range(0, len(missing), size))


# -- neighbouring counts ---------------------------------------------------------------------


def _inherit(question: CatalogQuestion, folder: WritablePlanStore) -> None:
    """What `work` does within a task, across all of them, also where each pattern has a plan.

    A plan is replaced by that of a pattern with one failure more, its pipelines renamed, which is shorter when it
    serves for these (a reduction among more peers may take longer); from the most failures down, so that it holds
    for any number more. No plan of the catalog is beaten by its neighbour then.
    """
    job = question.job
    headers = {name: header for name, header in headers_of(folder).items() if question.fits(header.partition)}
    names: dict[int, list[str]] = {}
    for name, header in headers.items():
        names.setdefault(header.failures, []).append(name)
    for count in sorted(names, reverse=True):
        for name in names[count]:
            longest = max((headers[fewer].metrics.period for fewer in names.get(count - 1, [])), default=0)
            if headers[name].metrics.period >= longest:
                continue
            for worker in sorted(headers[name].workers):
                failed = headers[name].workers - {worker}
                pattern, places = canonical_pattern(failed, job)
                kept = headers.get(plan_name(pattern))
                if kept is None or kept.metrics.period <= headers[name].metrics.period:
                    continue
                blob = folder.get(name)
                assert blob is not None
                more = unpack(blob, question, hashed=False).schedule()
                made = ReusablePlan(more, count, headers[name].solver.name).for_fewer(question.problem(failed))
                if not made:
                    continue
                if list(places) != sorted(places):
                    same = [range(job.pipelines)] * job.stages
                    made = replace(made, schedule=made.schedule.renamed(places, same))
                bound = round(kept.metrics.lower_bound * job.ticks_per_unit)
                if made.period < round(kept.metrics.period * job.ticks_per_unit):
                    stored, blob = made.stored(bound, kept.effort, question.over)
                    folder.put(stored, blob)
                    headers[stored] = decode_header(blob, source=stored)
