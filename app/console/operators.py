"""The operators' commands to a job: to kill, restart or drain workers, to pause, and to choose how it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import structlog

from openrecycle.agent.coordination.generations import coming_back, out
from openrecycle.agent.coordination.membership import (
    LEAST_CHOICE_TIMEOUT,
    MOST_CHOICE_TIMEOUT,
    Candidate,
    Chosen,
    DrainAsked,
    Member,
    Mode,
    ModeSet,
    Note,
    Offer,
    PlanFrozen,
    RestartAsked,
)
from openrecycle.agent.messages.protocol import Command, WorkerState
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import Loss, loss_of
from openrecycle.app.runtime.errors import ConsoleError, named, plain, storing, unknown_worker
from openrecycle.db.access import audit_row
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Worker

log = structlog.get_logger()


@dataclass(frozen=True)
class Choice:
    """Who decides how a job goes on, and the options that there are.

    mode: who decides when workers are lost. choice_timeout: seconds that the job waits for a choice in manual mode.
    frozen_by: the operator who has frozen the plan; "": nobody. paused: an operator has paused the job; stopped: and
    all workers wait by now. waiting: the job stands still for a choice; seconds_left: then, until the best option is
    taken.

    failed: the workers that are out. candidates: the options, best first; empty until they are worked out, and when no
    worker is out. better: the name of an option that is clearly better than re-routing, "" if there is none.
    """

    mode: Mode
    choice_timeout: float
    frozen_by: str
    paused: bool
    stopped: bool
    waiting: bool
    seconds_left: float | None
    failed: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    better: str


class Operators:
    """Takes operators' commands. Thread-safe.

    find: a job by its id; raises ConsoleError. `actor` is the operator, for the feed and the audit log.
    """

    def __init__(self, find: Callable[[str], LiveJob], store: Store) -> None:
        self._find, self._store = find, store
        self._brought_back: WeakKeyDictionary[LiveJob, set[tuple[str, str | None]]] = WeakKeyDictionary()
        """Workers that `consider` has had started again, each with the incarnation that had left."""

    def kill(self, job_id: str, worker: str, actor: str, pid: int | None = None) -> None:
        """Asks the launcher to kill a worker's process. Only for demo jobs. pid: of the process that the operator saw
        there; if another one has taken its place, nothing is killed. Raises ConsoleError."""
        job, member = self._member(job_id, worker)
        if not job.spec.demo:
            raise ConsoleError(
                403,
                "not_a_demo",
                "got false; only processes of a demo job may be killed from the console",
                field="demo",
            )
        if member.incarnation is None or member.state in (WorkerState.FAILED, WorkerState.FINISHED):
            state = "drained" if member.state is WorkerState.FAILED and member.leaving else member.state
            raise ConsoleError(409, "not_running", f"{worker} is {state}, expected one that runs", field="worker")
        now = job.processes.get(member.incarnation)
        if pid and now is not None and now.pid != pid:
            text = f"{worker} is held by process {now.pid} by now, not by {pid}; look at it anew"
            raise ConsoleError(409, "not_running", text, field="worker")
        self._command(job, "kill", worker, actor)

    def restart(self, job_id: str, worker: str, actor: str) -> None:
        """Asks the launcher to start a new process for a failed worker. Raises ConsoleError."""
        self._start_again(self._restartable(job_id, worker), worker, actor)

    def can_restart(self, job_id: str, worker: str) -> bool:
        """Says whether `restart` would be accepted."""
        try:
            self._restartable(job_id, worker)
        except ConsoleError:
            return False
        return True

    def _restartable(self, job_id: str, worker: str) -> LiveJob:
        job, member = self._member(job_id, worker)
        _has_launcher(job, "start its processes again yourself")
        if member.state is not WorkerState.FAILED:
            raise ConsoleError(
                409, "not_failed", f"{worker} is {member.state}, expected one that has failed", field="worker"
            )
        if member.goes:  # its launcher has no free place for another process yet, and would start none
            text = f"{worker} is about to leave, as it was asked to; it can be started again once it has left"
            raise ConsoleError(409, "not_failed", text, field="worker")
        return job

    def consider(self, job: LiveJob) -> None:
        """Has workers started again that stand by with their pipeline, once the pipeline's lost workers are back.
        Raises ConsoleError; the next call tries again."""
        known = self._brought_back.setdefault(job, set())
        for worker in coming_back(job.state):
            left = worker, job.state.members[worker].incarnation
            if left not in known:
                self._start_again(job, worker, f"the coordinator, since {worker}'s pipeline is back,")
                known.add(left)

    def loss_of(self, job_id: str, worker: str) -> Loss:
        """Returns what would happen if `worker`, which is in the job, ended. Raises ConsoleError."""
        job = self._find(job_id)
        state = job.state
        lost = {*(state.current.failed if state.current else ()), worker}
        with job.lock:
            plan, whole = job.plans.catalog.find(map(Worker.parse, lost)), job.plans.catalog.find(())
        loss = loss_of(state, worker, time.monotonic(), job.failure_timeouts)
        if plan is None or whole is None or plan.metrics.period <= 0:
            return loss
        return loss._replace(share=whole.metrics.period / plan.metrics.period)

    def _member(self, job_id: str, worker: str) -> tuple[LiveJob, Member]:
        job = self._find(job_id)
        member = job.state.members.get(worker)
        if member is None:
            raise unknown_worker(worker)
        _runs(job)
        return job, member

    def pause(self, job_id: str, actor: str) -> str:
        """Asks all workers to stop before the same iteration. Raises ConsoleError."""
        return self._hold(job_id, "pause", actor)

    def resume(self, job_id: str, actor: str) -> str:
        """Lets a paused job go on. Raises ConsoleError."""
        return self._hold(job_id, "resume", actor)

    def _hold(self, job_id: str, kind: str, actor: str) -> str:
        job = self._find(job_id)
        _runs(job)
        _has_launcher(job, "it can't be paused from here")
        with job.writing():
            if job.paused == (kind == "pause"):
                code, words = ("paused", "the job is paused") if job.paused else ("not_paused", "the job is not paused")
                raise ConsoleError(409, code, words)
            self._command(job, kind, None, actor)
        return "all workers stop before the same iteration" if kind == "pause" else "all workers go on"

    def _start_again(self, job: LiveJob, worker: str, actor: str) -> None:
        job.apply(RestartAsked(worker))
        self._command(job, "restart", worker, actor)

    def _command(self, job: LiveJob, kind: str, worker: str | None, actor: str) -> None:
        actor = named(actor)
        with job.writing():
            events = job.feed.rows(
                [Note("warning", "operator", f"{actor} asked to {kind} {worker or 'the job'}", worker)]
            )
            seq = self._store.add_command(job.job_id, kind=kind, worker=worker or "", actor=actor, events=events)
            job.stored(len(events))
            job.asked(Command(seq=seq, kind=kind, worker=worker))  # type: ignore[arg-type]
        log.info("operator command", job=job.job_id, kind=kind, worker=worker, actor=actor)
        job.topic.publish()

    # -- how a job goes on --------------------------------------------------------------------

    def drain(self, job_id: str, worker: str, actor: str) -> str:
        """Asks a worker to leave after the current iteration. Raises ConsoleError."""
        job, _ = self._member(job_id, worker)
        who = named(actor)
        return job.apply(DrainAsked(worker, who), audit=audit_row(who, "drain", worker))

    def set_mode(self, job_id: str, mode: Mode, choice_timeout: float, actor: str) -> str:
        """Sets who decides when workers are lost. choice_timeout: seconds that the job waits for a choice in manual
        mode. Raises ConsoleError."""
        if not LEAST_CHOICE_TIMEOUT <= choice_timeout <= MOST_CHOICE_TIMEOUT:
            expected = f"{LEAST_CHOICE_TIMEOUT:g} to {MOST_CHOICE_TIMEOUT:g} seconds"
            raise ConsoleError(422, "invalid", f"got {choice_timeout!r}, expected {expected}", field="choice_timeout")
        who = named(actor)
        return self._find(job_id).apply(
            ModeSet(mode, choice_timeout, who), audit=audit_row(who, "mode", f"{mode} {choice_timeout:g}")
        )

    def freeze(self, job_id: str, frozen: bool, actor: str) -> str:
        """Freezes or unfreezes the plan in force (agent.coordination.generations.plan_frozen). Raises ConsoleError."""
        who = named(actor)
        action = "freeze plan" if frozen else "unfreeze plan"
        return self._find(job_id).apply(PlanFrozen(frozen, who), audit=audit_row(who, action))

    def measure_anew(self, job_id: str, actor: str) -> str:
        """Has the fault-free rate measured again from the next whole iterations. Until then the old one stays. Raises
        ConsoleError."""
        job, who = self._find(job_id), named(actor)
        _runs(job)
        known = job.baseline
        if known is None or known.source == "planned":
            raise ConsoleError(409, "not_measured", "the fault-free rate is about to be measured for the first time")
        text = (
            f"{who} has the fault-free rate measured again; until then it is {known.samples_per_second:,.4g} samples/s"
        )
        note = Note("warning", "operator", text)
        job.pin(replace(known, renew=job.state.committed), note, audit_row(who, "measure fault-free"))
        return text

    def choose(self, job_id: str, name: str, failed: tuple[str, ...] | None, actor: str) -> str:
        """Takes an option by its name. failed: the workers that were out in what the operator saw. Raises
        ConsoleError."""
        who = named(actor)
        return self._find(job_id).apply(Chosen(plain(name), who, failed), audit=audit_row(who, "choose", plain(name)))

    def acknowledge(self, job_id: str, seqs: Sequence[int], actor: str) -> int:
        """Marks events as seen by `actor`; returns how many nobody had seen before. Raises ConsoleError."""
        job = self._find(job_id)
        with storing():
            new = self._store.see_events(job_id, seqs, named(actor))
        if new:
            with job.lock:
                job.feed.unfold()
            job.stored()
            log.info("events acknowledged", job=job_id, events=new, actor=actor)
            job.topic.publish()
        return new

    def choice(self, job_id: str) -> Choice:
        """Returns who decides, and the options to choose from. Raises ConsoleError."""
        job = self._find(job_id)
        state = job.state
        pending = state.pending
        waiting = pending is not None and pending.until is not None
        failed = pending.failed if pending is not None and waiting else out(state)
        left = pending.until - time.monotonic() if pending is not None and pending.until is not None else None
        offer = state.offer if state.offer and state.offer.failed == failed else Offer((), ())
        return Choice(
            mode=state.mode,
            choice_timeout=state.choice_timeout,
            frozen_by=state.frozen_by,
            paused=job.paused,
            stopped=job.paused and not job.worker_states().running_on,
            waiting=waiting,
            seconds_left=None if left is None else max(0.0, left),
            failed=failed or (),
            candidates=offer.candidates,
            better=offer.better,
        )


def _has_launcher(job: LiveJob, otherwise: str) -> None:
    """Raises ConsoleError (409) for a job with its own loop: it has no launcher that could obey a command. otherwise:
    what to do instead."""
    if job.spec.own_loop:
        raise ConsoleError(409, "own_loop", f"the job has a loop of its own: {otherwise}")


def _runs(job: LiveJob) -> None:
    """Raises ConsoleError (409) if the job is over."""
    if job.state.over:
        raise ConsoleError(409, "job_over", f"the job has {job.state.over}; its processes are gone")
