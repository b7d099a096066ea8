"""Makes what the UI and the API see of a job: app.console.view's plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openrecycle.agent.coordination.membership import Member
from openrecycle.app.console.view import EventView, JobHead, JobSummary, JobView, RecoveryView, WorkerView
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.stored_plans import PlanCache
from openrecycle.app.jobs.waiting import Waited, segments
from openrecycle.app.observing.goodput import Figures
from openrecycle.app.observing.rates import IterationView, iteration_view
from openrecycle.app.workers.states import OUT, RankState, WorkerStates
from openrecycle.db.observations import Observations
from openrecycle.db.store import Store

# Of jobs of so many workers, what is seen of each is made once a second, however many look.
SHARED, SHARED_SECONDS = 256, 1.0
# And some at a time: while another thread is at work, the event loop gets its turn once for each heartbeat, which is
# not often enough for thousands a second.
AT_ONCE, PAUSE_SECONDS = 256, 0.001


@dataclass(frozen=True)
class _History:
    version: int
    iterations: tuple[IterationView, ...]
    events: tuple[EventView, ...]
    recoveries: tuple[RecoveryView, ...]


@dataclass(frozen=True)
class _Workers:
    key: tuple[int, str | None]
    at: float
    workers: tuple[WorkerView, ...]


def job_view(
    job: LiveJob,
    stores: tuple[Store, Observations],
    plans: PlanCache,
    sentence: Callable[[WorkerStates, Sequence[IterationView]], str],
    figures: Figures,
    waited: Waited,
    iterations: int,
    events: int,
    *,
    workers: bool = True,
) -> JobView:
    state = job.state
    run = job.plan_run
    fingerprint = run.fingerprint if run else None
    rerouted = plans.rerouted(fingerprint) if fingerprint else {}
    history = _history(job, *stores, waited, iterations, events)
    worker_states = job.worker_states(rerouted)
    return JobView(
        job_id=job.job_id,
        spec=job.spec,
        state=state.job_state,
        sentence=sentence(worker_states, history.iterations),
        created_at=job.created_at,
        generation=state.generation,
        workers=_workers(job, fingerprint, worker_states) if workers else (),
        plan=plans.get(fingerprint) if fingerprint else None,
        iterations=history.iterations,
        events=history.events,
        recoveries=history.recoveries,
        planned_ahead=job.planned_ahead,
        plans_to_make=job.plans_to_make,
        advice=job.advice,
        figures=figures,
        condition=worker_states.condition,
        missing=worker_states.missing,
        moved=worker_states.moved,
        waits_since=waited.since,
        plan_words=run.words if run else "",
        held=state.held,
        coming=state.current.partition if state.current and state.moving else (),
        spares=worker_states.spares,
    )


def _workers(job: LiveJob, fingerprint: str | None, worker_states: WorkerStates) -> tuple[WorkerView, ...]:
    """In grid order. Those of a large job are shared by all who look within a second, unless something is stored."""
    members = worker_states.state.members
    if len(members) < SHARED:
        return tuple(worker_view(job, member, worker_states) for member in members.values())
    key, now = (job.version, fingerprint), time.monotonic()
    known = job.view_cache.get("workers")
    if isinstance(known, _Workers) and known.key == key and now - known.at < SHARED_SECONDS:
        return known.workers
    made: list[WorkerView] = []
    for count, member in enumerate(members.values(), start=1):
        made.append(worker_view(job, member, worker_states))
        if count % AT_ONCE == 0:
            time.sleep(PAUSE_SECONDS)
    workers = tuple(made)
    job.view_cache["workers"] = _Workers(key, now, workers)
    return workers


def worker_view(job: LiveJob, member: Member, worker_states: WorkerStates) -> WorkerView:
    role = worker_states.role(member)
    process = role.process if role.process and role.process.role == role.name else None
    contact = job.contacts.get(member.name)
    beat = contact.beat if contact and contact.beat.incarnation == member.incarnation else None
    age = None if member.last_heard is None else max(0.0, time.monotonic() - member.last_heard)
    return WorkerView(
        name=member.name,
        pipeline=int(member.name[1:].partition("_")[0]),
        stage=member.stage,
        state=role.state,
        takes_rerouted=0 if role.state in OUT else worker_states.rerouted.get(member.name, 0),
        heartbeat_age=age,
        generation=member.generation,
        iteration=beat.iteration if beat else 0,
        phase=beat.phase if beat else "",
        op_milliseconds=beat.op_milliseconds if beat else {},
        resident_bytes=beat.resident_bytes if beat else 0,
        host=process.host if process else "",
        pid=process.pid if process else 0,
        acknowledged=member.acknowledged,
        detail=role.detail,
        slow=worker_states.slow.get(member.name, 0.0),
        since=process.since if process else 0.0,
        slot=process.slot if process else "",
        moved_to=role.moved_to,
        doing=beat.doing if beat else None,
        spare=sum(r.state is RankState.SPARE for r in worker_states.ranks(process)) if process and process.spare else 0,
    )


def head(job: LiveJob) -> JobHead:
    run = job.plan_run
    return JobHead(
        job_id=job.job_id,
        spec=job.spec,
        state=job.state.job_state,
        condition=job.worker_states().condition,
        workers=len(job.state.members),
        plan=run.fingerprint if run else None,
        plan_words=run.words if run else "",
        planned_ahead=job.planned_ahead,
        plans_to_make=job.plans_to_make,
    )


def summary(job: LiveJob, sentence: str) -> JobSummary:
    state = job.state
    return JobSummary(
        job_id=job.job_id,
        name=job.spec.name,
        state=state.job_state,
        sentence=sentence,
        created_at=job.created_at,
        generation=state.generation,
        living=len(state.current.living) if state.current else 0,
        workers=len(state.members),
        condition=job.worker_states().condition,
    )


def _history(job: LiveJob, store: Store, seen: Observations, waited: Waited, iterations: int, events: int) -> _History:
    """Read again only when something was stored since: many viewers share one read."""
    key = (iterations, events, tuple(waited.by_iteration))
    version = job.version
    cached = job.view_cache.get(key)
    if isinstance(cached, _History) and cached.version == version:
        return cached
    samples = job.spec.pipelines * job.spec.micro_batches * job.spec.samples_per_micro_batch
    feed = store.events(job.job_id, limit=events, newest=True)
    seen_by = seen.seen_events(job.job_id, [row["seq"] for row in feed if row["severity"] != "info"])
    history = _History(
        version,
        tuple(
            iteration_view(row, samples, waited) for row in store.iterations(job.job_id, limit=iterations, newest=True)
        ),
        tuple(
            EventView(
                row["seq"],
                row["at"],
                row["severity"],
                row["kind"],
                row["worker"],
                row["text"],
                seen_by.get(row["seq"], ("", 0.0))[0],
                row["count"],
                row["last_at"],
            )
            for row in feed
        ),
        tuple(
            RecoveryView(**{k: v for k, v in row.items() if k != "job_id"}, steps=tuple(segments(row, waited)))
            for row in store.recoveries(job.job_id)
        ),
    )
    if len(job.view_cache) > 8:
        job.view_cache.clear()
    job.view_cache[key] = history
    return history
