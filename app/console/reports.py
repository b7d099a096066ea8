"""What agents and launchers say and ask, of every job. A part of app.console.service.ConsoleService.

Every report goes through the coordinator of its job and into the database before it is answered;
heartbeats alone are kept in memory and written behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from weakref import WeakKeyDictionary

from openrecycle.agent.coordination import membership as happening
from openrecycle.agent.coordination.generations import deployment_of
from openrecycle.agent.coordination.membership import Interim, LeadTerm
from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    BatchReply,
    Deployment,
    FailureReport,
    Heartbeat,
    InterimPlan,
    Iteration,
    JobFinished,
    JobState,
    LeadAnswer,
    LeadClaim,
    LogLines,
    Recovery,
    RefusedReport,
    Registration,
    Relayout,
    ValidationReport,
)
from openrecycle.app.jobs.live_job import IncomingReport, LiveJob
from openrecycle.app.jobs.states import Arrival, PlannedRestart
from openrecycle.app.jobs.waiting import Waited
from openrecycle.app.runtime.errors import ConsoleError, plain, storing, unknown_worker
from openrecycle.db.store import Store
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.words import layers_move, micro_batch_names, milliseconds
from openrecycle.planner.plans.plan import Plan

# A report that was sent twice stands among so many of the newest events.
LOOK_BACK = 200


def skipped_note(report: Iteration, micro_batches: int) -> happening.Note:
    """What an iteration left out, as a line of the feed. micro_batches: of a pipeline."""
    numbers = micro_batch_names(report.skipped, micro_batches)
    text = f"iteration {report.iteration}: {numbers} left out; the loss is the mean of the others"
    return happening.Note("warning", "step", text)


def validation_note(report: ValidationReport) -> happening.Note:
    """What came of checking an iteration's gradients, as a line of the feed."""
    if report.coefficient is None:
        undone = "; its step had been taken already and was rolled back" if report.redone else ""
        text = (
            f"iteration {report.iteration} is skipped: a gradient was NaN, infinite or out of range, so no "
            f"parameter has changed{undone}"
        )
        return happening.Note("warning", "step", text)
    if report.coefficient < 1:
        text = (
            f"iteration {report.iteration}: gradients were too large and clipped to {report.coefficient:.3g} of "
            "their length; the step taken before that was known was rolled back and taken again"
        )
    else:
        text = (
            f"iteration {report.iteration}: the step was rolled back and taken again without the clipping that "
            "had been expected"
        )
    return happening.Note("info", "step", text)


class Reports:
    """Thread-safe. Every method raises ConsoleError: for an unknown job or worker, a process that does
    not count, or a database that does not answer. sender: of a job on several nodes, who said that it leads; what a
    launcher says that leads no more changes nothing.

    ended: called with a job for which nothing more is to be done. measure: which iteration the workers of a job are to
    record. waited: for a person, by a job.
    """

    def __init__(
        self,
        store: Store,
        find: Callable[[str], LiveJob],
        ended: Callable[[LiveJob], None],
        measure: Callable[[LiveJob], int | None],
        waited: Callable[[LiveJob], Waited],
    ) -> None:
        self._store, self._find, self._ended = store, find, ended
        self._measure, self._waited = measure, waited
        # The newest of each job, and of what it was made.
        self._deployments: WeakKeyDictionary[LiveJob, tuple[object, Deployment]] = WeakKeyDictionary()

    def register(self, job_id: str, said: Sequence[Registration], sender: LeadTerm | None = None) -> BatchReply:
        """Each is taken or refused by itself."""
        job, reports = self._find(job_id), list[IncomingReport]()
        for one in said:
            process = Arrival(plain(one.host), one.pid, one.ranks, one.made_of)
            reports.append(IncomingReport(happening.WorkerRegistered(one.worker, one.incarnation), process))
        reply = self._reply(job, said, job.apply_all(reports, sender))
        refused, members = {report.index for report in reply.refused}, job.state.members
        before = dict[str, int]()
        for index, one in enumerate(said):
            if one.own_loop and index not in refused:
                member = members[one.worker]
                mine = member.generation if member.incarnation == one.incarnation else 0
                before[one.worker] = mine - 1 if mine else reply.generation
        return reply.model_copy(update={"before": before}) if before else reply

    def heartbeats(self, job_id: str, beats: Sequence[Heartbeat]) -> BatchReply:
        """Each is taken or refused by itself. Touches no database and waits for nothing."""
        job, answers = self._find(job_id), list[int | ConsoleError]()
        for beat in beats:
            try:
                answers.append(job.heard(beat))
            except ConsoleError as error:
                answers.append(error)
        return self._reply(job, beats, answers)

    def _reply(
        self,
        job: LiveJob,
        reports: Sequence[Registration | Heartbeat | Acknowledgement],
        answers: Sequence[object],
    ) -> BatchReply:
        """answers: for each report what came of it; a ConsoleError: it was refused."""
        refused = tuple(
            RefusedReport(index=index, worker=report.worker, code=answer.code, detail=answer.detail)
            for index, (report, answer) in enumerate(zip(reports, answers, strict=True))
            if isinstance(answer, ConsoleError)
        )
        taken = len(reports) - len(refused)
        return BatchReply(generation=job.state.generation, measure=self._measure(job), taken=taken, refused=refused)

    def failure(self, job_id: str, message: FailureReport, sender: LeadTerm | None = None) -> str:
        """Returns what the coordinator makes of it."""
        job = self._find(job_id)
        if message.cause == "exit":
            late = message.age_milliseconds / 1000
            seen = f" (seen {late:.1f} s before the report came)" if late >= 1 else ""
            detail = plain(message.detail) + seen
            event = happening.Exited(message.worker, message.incarnation, message.reporter, detail)
            restart = PlannedRestart.of(message.restart, time.time() - late) if message.restart else None
            known = bool(message.spare or restart)
            beside = [IncomingReport(event, spare=message.spare, restart=restart)] if known else ()
            return job.apply(event, beside=beside, sender=sender)
        if message.cause in ("exception", "state-lost"):
            what = happening.OpRaised if message.cause == "exception" else happening.StateLost
            raised = what(message.worker, message.incarnation, message.generation, plain(message.detail))
            return job.apply(raised, sender=sender)
        return job.apply(
            happening.TransferBroken(
                message.reporter, message.incarnation, message.worker, message.generation, plain(message.detail)
            ),
            sender=sender,
        )

    def acknowledge(self, job_id: str, said: Sequence[Acknowledgement], sender: LeadTerm | None = None) -> BatchReply:
        """Each is taken or refused by itself."""
        job, reports = self._find(job_id), list[IncomingReport]()
        for one in said:
            event = happening.GenerationAcknowledged(one.worker, one.incarnation, one.generation, one.state)
            reports.append(IncomingReport(event, acknowledgement={**one.model_dump(), "at": time.time()}))
        return self._reply(job, said, job.apply_all(reports, sender))

    def meanwhile(self, job_id: str, message: InterimPlan, sender: LeadTerm | None = None) -> str:
        """What a generation runs until newcomers have their state."""
        job, failed, plan = self._find(job_id), message.failed, None
        if len(set(failed)) < len(failed) or any(name not in job.state.members for name in failed):
            raise ConsoleError(422, "invalid", "failed: expected workers of the job's grid, each once")
        if message.document:
            try:
                plan = Plan.from_json(message.document, source="document")
            except PlannerError as error:
                raise ConsoleError(422, "invalid", str(error)) from None
            grid = (plan.job.pipelines, plan.job.stages, plan.job.micro_batches)
            of_job = (job.spec.pipelines, job.spec.stages, job.spec.micro_batches)
            same = message.plan_fingerprint == plan.fingerprint == plan.compute_fingerprint()
            if grid != of_job or not same or sorted(plan.failed) != sorted(failed) or check(plan):
                raise ConsoleError(422, "invalid", "document: expected a valid plan of the job, as the report names it")
        with storing():
            known = plan is not None or self._store.has_plan(message.plan_fingerprint)
        interim = Interim(message.plan_fingerprint if known else "", failed)
        reason = job.apply(happening.InterimPlanUsed(message.generation, interim), plan=plan, sender=sender)
        if known and plan is None:  # one that came with the report is the job's by that
            with storing():
                self._store.link_plan(job_id, message.plan_fingerprint, failed)
        return reason

    def committed(
        self, job_id: str, iterations: Sequence[Iteration], age: float = 0.0, sender: LeadTerm | None = None
    ) -> None:
        """age: seconds since the newest was committed."""
        job = self._find(job_id)
        for report in iterations:
            if report.iteration >= job.spec.iterations:
                raise ConsoleError(
                    422,
                    "invalid",
                    f"iterations.iteration: got {report.iteration}, expected below {job.spec.iterations}, "
                    "the number that the job runs",
                )
        rows, at = list[dict[str, object]](), time.time() - age
        for report in reversed(iterations):
            rows.append({**report.model_dump(), "skipped": report.skipped, "committed_at": max(0.0, at)})
            at -= report.seconds  # of a batch that has waited each is as old as those after it took
        with nullcontext() if sender is None else job.taking(sender), storing():
            self._store.add_iterations(job_id, rows[::-1])
            count = self._store.committed_iterations(job_id)
        job.stored()
        left_out = [i for i in iterations if i.skipped and i.iteration >= job.state.committed]
        if left_out:
            job.record(*(skipped_note(i, job.spec.micro_batches) for i in left_out))
        job.apply(happening.IterationsCommitted(count), sender=sender)

    def recovered(self, job_id: str, message: Recovery, sender: LeadTerm | None = None) -> None:
        job = self._find(job_id)
        if message.worker not in job.state.members:
            raise unknown_worker(message.worker)
        took, at = milliseconds(message.resumed_ms), time.time()
        text = f"generation {message.generation}: training resumed {took} after {message.worker} died"
        with storing():
            people = sum(self._waited(job).in_recovery({**message.model_dump(), "at": at}))
        if people:
            text += f", of it {milliseconds(1000 * people)} waiting for a person"
        with job.taking(sender):
            events = job.feed.rows([happening.Note("info", "recovery", text, message.worker)])
            if self._store.add_recovery(job_id, {**message.model_dump(), "at": at}, events):
                job.stored(len(events))
        job.topic.publish()

    def rearranged(self, job_id: str, message: Relayout, sender: LeadTerm | None = None) -> None:
        job = self._find(job_id)
        try:
            partition = job.plans.nominal.check_partition(message.partition)
        except PlannerError as error:
            raise ConsoleError(409, "misfit", str(error)) from None
        count = message.moved_layers
        if count > sum(partition):
            raise ConsoleError(409, "misfit", f"moved_layers: got {count}, expected at most {sum(partition)}")
        with storing():
            opened = self._store.generation(job_id, message.generation)
        fits = opened is not None and tuple(opened["partition"]) == partition
        if not fits and not message.problem:
            detail = f"partition: got {list(partition)}, which is not that of generation {message.generation}"
            raise ConsoleError(409, "misfit", detail)
        text = "" if message.problem else layers_move(count, done=True)
        moved = happening.LayersMoved(message.generation, message.iteration, partition, text, message.problem)
        job.apply(moved, sender=sender)

    def validated(self, job_id: str, report: ValidationReport) -> None:
        """What came of checking an iteration's gradients. A report that is known already changes nothing."""
        job, note = self._find(job_id), validation_note(report)
        with storing(), job.lock:
            newest = self._store.events(job_id, limit=LOOK_BACK, newest=True)
            if not any(row["kind"] == note.kind and row["text"] == note.text for row in newest):
                job.record(note)

    def printed(self, job_id: str, message: LogLines) -> None:
        """What a worker's process has written."""
        job = self._find(job_id)
        job.measurements.logs.take(job.writer(message.worker, message.incarnation).name, message)

    def claim_lead(self, job_id: str, message: LeadClaim) -> LeadAnswer:
        wanted = LeadTerm(message.term, message.node)
        granted, reason = self._find(job_id).claim_lead(wanted, message.after, ask=message.ask)
        return LeadAnswer(granted=granted, reason=reason)

    def finish(self, job_id: str, message: JobFinished, sender: LeadTerm | None = None) -> None:
        job = self._find(job_id)
        job.apply(happening.Finished(JobState(message.state), plain(message.reason)), sender=sender)
        self._ended(job)

    def deployment(self, job_id: str, after: int) -> Deployment | None:
        """The newest deployment, if its generation is above `after`. Does not block."""
        job = self._find(job_id)
        state = job.state
        generation = state.current
        if generation is None or generation.number <= after:
            return None
        leaving = tuple(name for name in generation.failed if state.members[name].leaving)
        key = (generation.number, leaving)
        known = self._deployments.get(job)
        if known is None or known[0] != key:
            known = self._deployments[job] = key, deployment_of(generation, leaving)
        return known[1]
