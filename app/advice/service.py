"""Advice for running jobs on what to do while workers are out: when it is made, and from which measured costs.

`Advising` asks for advice once for each set of workers that are out. It does so after the recovery, in a child process,
so that neither a recovery nor a plan waits for it. In manual mode the advice comes first, so that the operator can
choose.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple
from weakref import WeakKeyDictionary

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.generations import out
from openrecycle.agent.coordination.membership import Candidate, Mode, Note, Offer, Offered, State
from openrecycle.app.advice.recommendation import AdviceRequest, Recommendation, advisor
from openrecycle.app.jobs.live_job import LiveJob, changes, repair_times
from openrecycle.app.jobs.states import ProcessState
from openrecycle.app.jobs.throughput import NOTHING, Waited, segments, unit_seconds
from openrecycle.app.runtime.errors import ConsoleError, unavailable
from openrecycle.db.store import Record, Store
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import count
from openrecycle.planner.plans.packed import from_text, packed
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.simulation.engine import RecoveryCosts

log = structlog.get_logger()

# The time to repair that is assumed until a worker of the job has come back; the Simulate page starts with it, too.
REPAIR_SECONDS = 4 * 3600.0
# Time from the start of a process until it registers, assumed until a launcher has started one again by itself.
START_SECONDS = 60.0
STARTS = 20  # how many of the newest such times are used for the median
ITERATIONS = 200
EVENTS = 100


class AdviceQuestion(NamedTuple):
    """What advice is asked on. failed: the workers that are out. held: layers per stage. due: launchers will start all
    of these workers again by themselves."""

    failed: tuple[str, ...]
    held: tuple[int, ...]
    due: bool = False


NO_QUESTION = AdviceQuestion((), (-1,))


@dataclass(frozen=True)
class MeasuredCosts:
    """How many seconds detection, recovery, a copy of a stage's state and a repair take in this job, as measured or
    assumed. move: seconds lost to a move of layers; None: none was measured. basis: in words, which are measured.
    """

    detect: float
    recover: float
    copy: float
    move: float | None
    repair: float
    basis: str


@dataclass
class _Advised:
    """The advice for one job. asked: what advice was asked on last. said: the newest advice in words, "": none.
    on: what that was asked on."""

    asked: AdviceQuestion
    on: AdviceQuestion = NO_QUESTION
    said: str = ""


class Advising:
    """Has all jobs of a console advised. `queue` takes the requests to its child process, which starts with the first.
    waited: how long a job has waited for people."""

    def __init__(self, store: Store, waited: Callable[[LiveJob], Waited]) -> None:
        self._store, self._waited = store, waited
        self.queue = advisor()
        self._of: WeakKeyDictionary[LiveJob, _Advised] = WeakKeyDictionary()

    def start(self) -> None:
        self.queue.start(child=False)

    def close(self) -> None:
        self.queue.close()

    def advice(self, job: LiveJob) -> str | None:
        """Returns the advice for the workers that are out now; None if there is none, or no worker is out."""
        found, state = self._of.get(job), job.state
        if found is None or state.current is None or state.halted or state.over:
            return None
        return found.said or None if (state.current.failed, state.held) == found.on[:2] else None

    def cancel(self, job: LiveJob) -> None:
        self.queue.cancel(job.job_id)

    def consider(self, job: LiveJob) -> None:
        """Asks for advice if other workers are out than last time, and the rest train again or an operator is to
        choose.
        """
        asked = _asked(job)
        of = self._of.get(job)
        if of is None:
            of = self._of[job] = _Advised(AdviceQuestion((), job.plans.nominal.home))
        if asked is None or asked == of.asked:
            return
        failed = asked.failed
        if not failed and job.state.held == job.plans.nominal.home:
            of.asked, of.said = asked, ""
            return
        try:
            request = self._request(job, failed)
        except SQLAlchemyError as error:
            log.warning("advice waits for the database", job=job.job_id, reason=str(unavailable(error)))
            return
        if request is None:
            if job.state.choosing:
                self._offer(job, Offered(failed, None, "no iteration has been timed yet"))
            return
        of.asked = asked

        def done(recommendation: Recommendation | None, why: str) -> None:
            if recommendation is None:
                log.warning("no advice", job=job.job_id, failed=failed, reason=why)
                self._offer(job, Offered(failed, None, why))
            elif not self._tell(job, asked, recommendation) and of.asked == asked:
                # The job recovers again. If the same workers are out afterwards, advice is asked for again.
                of.asked = NO_QUESTION

        self.queue.submit(job.job_id, request, done)

    def _tell(self, job: LiveJob, asked: AdviceQuestion, recommendation: Recommendation) -> bool:
        """Says, stores and offers what was recommended. Returns False if other workers are out by now, or the job
        recovers."""
        failed, candidates = asked.failed, recommendation.candidates
        try:
            with job.lock:  # no generation opens between the look and the line in the event feed
                if _asked(job) != asked:
                    return False
                # If the job has just moved layers as advised, nothing more is to be said.
                news = failed and (job.state.held == job.plans.nominal.home or recommendation.calls_for_an_operator)
                newest = self._store.events(job.job_id, limit=EVENTS, newest=True) if news else []
                if news and not job.state.choosing and not _told(newest):
                    calls = recommendation.calls_for_an_operator
                    job.record(Note("warning" if calls else "info", "plan", recommendation.reason))
            candidates = self._with_plans(job, recommendation)
        except (ConsoleError, SQLAlchemyError) as error:
            log.warning("the advice could not be stored", job=job.job_id, reason=type(error).__name__)
        if failed:
            of = self._of[job]
            of.on, of.said = asked, recommendation.reason  # set after its line in the event feed is stored
        offer = Offer(failed, candidates, recommendation.better) if candidates else None
        self._offer(job, Offered(failed, offer, "the job has no option that it could take by itself"))
        return True

    def _with_plans(self, job: LiveJob, recommendation: Recommendation) -> tuple[Candidate, ...]:
        """Returns the candidates, each with the fingerprint of the best plan that the job has for it by now."""
        for data in recommendation.plans if not job.plans.job.speeds else ():
            job.plans.file_plan(from_text(data))
        named = []
        for candidate in recommendation.candidates:
            with job.lock:
                catalog = job.plans.catalog.at(candidate.partition)
                plan = catalog.find(Worker.parse(name) for name in candidate.failed)
            if plan is not None:
                self._store.put_plan(job.job_id, plan.fingerprint, packed(plan), plan.failed, True)
                candidate = replace(candidate, plan=plan.fingerprint)
            named.append(candidate)
        return tuple(named)

    def _offer(self, job: LiveJob, event: Offered) -> None:
        try:
            job.apply(event)
        except ConsoleError as error:
            log.warning("the options could not be stored", job=job.job_id, reason=error.detail)
            self._of[job].asked = NO_QUESTION  # they are asked for again

    def _request(self, job: LiveJob, failed: tuple[str, ...]) -> AdviceRequest | None:
        """Makes the request for advice; None if it is not known yet how long the job's time unit is."""
        store, spec = self._store, job.spec
        if job.plans.job.time_unit == "slot" and not job.state.committed:
            return None
        generations = store.all_generations(job.job_id)
        iterations = store.iterations(job.job_id, limit=ITERATIONS, newest=True)
        unit = unit_seconds(iterations, _periods(job, generations, iterations))
        if unit is None and job.plans.job.time_unit == "slot":
            return None
        copies = copy_times(generations, store.last_acknowledgements(job.job_id))
        waited = self._waited(job)
        moves = move_times(generations, iterations)
        repairs, due = repair_times(changes(generations)), restart_due(job.state, job.processes, failed, time.time())
        starts = start_times(list(job.processes.values())) if due is not None else []
        known = measured_costs(store.recoveries(job.job_id), repairs, copies, waited, moves, due, starts)
        work = None
        if spec.checkpoints:
            # Agents do not report when they write checkpoints; on average the last one is half an interval old.
            work = min(RecoveryCosts().checkpoint_interval / 2, max(0.0, time.time() - generations[0]["opened_at"]))
        return AdviceRequest(
            job_doc(replace(job.plans.job, speeds=())),  # options are compared with workers that are alike
            failed,
            spec.technique,
            spec.memory,
            samples=float(spec.samples),
            unit_seconds=unit,
            detect=known.detect,
            recover=known.recover,
            copy=known.copy,
            heals_in=known.repair if failed else 3600.0,
            since_checkpoint=work,
            basis=known.basis,
            migrate=spec.migrate,
            relayout=spec.relayout,
            partition=job.plans.nominal.partition,
            move=known.move,
            automatic=job.state.mode is Mode.AUTOMATIC,
            left=max(0, job.state.iterations - job.state.committed),
            room=spec.room and spec.room.with_hosts(job.state.hosts({i: p.host for i, p in job.processes.items()})),
        )


def _in_question(state: State) -> tuple[str, ...] | None:
    """Returns the workers that the job trains without, or is to go on without; None while that is not settled."""
    if state.pending is not None and state.choosing:
        known = state.offer is not None and state.offer.failed == state.pending.failed
        return None if known else state.pending.failed
    return out(state)


def _asked(job: LiveJob) -> AdviceQuestion | None:
    failed = _in_question(job.state)
    if failed is None:
        return None
    due = bool(failed) and restart_due(job.state, job.processes, failed, 0.0) is not None
    return AdviceQuestion(failed, job.state.held, due)


def restart_due(state: State, processes: Mapping[str, ProcessState], failed: Sequence[str], now: float) -> float | None:
    """Returns the seconds until launchers have started all of `failed` again by themselves; None: they don't start all,
    or one waits for its node, which may take any time."""
    ended = [processes.get(state.members[name].incarnation or "") for name in failed]
    planned = [process.restart if process is not None else None for process in ended]
    if any(one is None or one.node is not None or one.number > one.most for one in planned):
        return None
    return max((one.at - now for one in planned if one is not None and one.at > now), default=0.0)


def start_times(processes: Sequence[ProcessState]) -> list[float]:
    """Returns the seconds from a launcher's restart of a process until that process has registered, one for each of the
    newest restarts. Later steps do not count, as they may wait for people. processes: all of the job."""
    began: dict[str, list[float]] = {}
    for process in sorted(processes, key=lambda process: process.since):
        began.setdefault(process.slot, []).append(process.since)
    by_itself = [
        (restart.at, process)
        for process in processes
        if (restart := process.restart) is not None and restart.node is None and restart.number <= restart.most
    ]
    found: list[float] = []
    for at, process in sorted(by_itself, key=lambda planned: planned[0], reverse=True):
        later = began.get(process.role, [])
        successor = bisect_right(later, process.held[-1][1])
        if successor < len(later) and later[successor] >= at:  # else none has come, or a person started it earlier
            found.append(later[successor] - at)
        if len(found) == STARTS:
            break
    return found


def copy_times(generations: Sequence[Record], acknowledgements: Sequence[Record]) -> list[float]:
    """Returns the seconds for which workers waited while newcomers took a stage's state, one for each generation with
    newcomers: from the last worker that adopted the plan to the last that had formed its groups."""
    taken = {e["generation"] for e in generations if e["joining"] and not e["restore"]}
    at: dict[tuple[int, str], float] = {}
    for row in acknowledgements:
        key = row["generation"], row["state"]
        at[key] = max(at.get(key, row["at"]), row["at"])
    both = [(at.get((e, "adopted")), at.get((e, "formed"))) for e in sorted(taken)]
    return [max(0.0, formed - adopted) for adopted, formed in both if formed is not None and adopted is not None]


def move_times(generations: Sequence[Record], iterations: Sequence[Record]) -> list[float]:
    """Returns the seconds that training lost to each move of layers: by how much the iterations during the move took
    longer than those before, and the first with the new partition longer than those after."""
    seconds: dict[int, list[tuple[int, float]]] = {}
    for row in sorted(iterations, key=lambda row: row["iteration"]):
        seconds.setdefault(row["generation"], []).append((row["iteration"], row["seconds"]))
    found = []
    for earlier, generation in pairwise(generations):
        ran, at = seconds.get(generation["generation"], []), generation["moved_at"]
        before = [took for _, took in seconds.get(earlier["generation"], [])[1:]]  # the first includes a recovery
        after = [took for i, took in ran if at is not None and i > at]
        if at is None or not after or not before:
            continue
        during = [took - median(before) for i, took in ran if i < at]
        first = [took - median(after) for i, took in ran if i == at]
        found.append(max(0.0, sum((*during, *first))))
    return found


def measured_costs(
    recoveries: Sequence[Record],
    repairs: Sequence[float],
    copies: Sequence[float] = (),
    waited: Waited = NOTHING,
    moves: Sequence[float] = (),
    due: float | None = None,
    starts: Sequence[float] = (),
) -> MeasuredCosts:
    """Combines measurements into costs, with assumptions for those that are missing.

    recoveries: rows of the database. repairs: seconds from a failure to the return. copies, moves, starts: see
    copy_times, move_times, start_times. waited: time for people, which is no cost of a recovery. due: seconds until all
    workers that are out are started again; None: see restart_due."""
    assumed = RecoveryCosts()
    seen = [r["detected_ms"] / 1000 for r in recoveries if r["death_known"]]
    formed = [(steps[1][1] + steps[2][1]) / 1000 for steps in (segments(r, waited) for r in recoveries)]
    repair = fmean(repairs) if repairs else 0.0
    recovery = f"as in {count(len(formed), 'recovery', 'recoveries')} measured" if formed else "assumed"
    repaired = f"the mean of {count(len(repairs), 'repair', 'repairs')}" if repair > 0 else "assumed"
    if due is not None:
        start = median(starts) if starts else START_SECONDS
        measured = f"as in {count(len(starts), 'restart', 'restarts')}" if starts else f"{start:g} s, assumed"
        repair, repaired = due + start, f"that of the restart that is due, and of its start ({measured})"
    copied = f"as in {count(len(copies), 'return or move', 'returns and moves')}" if copies else "assumed"
    return MeasuredCosts(
        median(seen) if seen else assumed.detect,
        median(formed) if formed else assumed.recover,
        median(copies) if copies else assumed.migrate,
        median(moves) if moves else None,
        repair if repair > 0 else REPAIR_SECONDS,
        f"Recovery costs are {recovery}; the time to repair is {repaired}; the time of a copy is {copied}.",
    )


def _periods(job: LiveJob, generations: Sequence[Record], iterations: Sequence[Record]) -> dict[int, float]:
    """Returns by generation the period of the plan that these iterations ran by, where it is at hand."""
    periods: dict[int, float] = {}
    ran = {row["generation"] for row in iterations}
    with job.lock:
        for generation in generations:
            if generation["generation"] in ran:
                catalog = job.plans.catalog.at(tuple(generation["partition"]))
                plan = catalog.find(frozenset(Worker.parse(name) for name in generation["failed"]))
                if plan is not None and plan.metrics.period > 0:
                    periods[generation["generation"]] = plan.metrics.period
    return periods


def _told(newest: Sequence[Record]) -> bool:
    """Says whether advice has been given since the newest generation opened, so that a console that restarts does not
    repeat it. newest: events, newest first."""
    last = next((row["kind"] for row in newest if row["kind"] in ("plan", "generation")), None)
    return last == "plan"
