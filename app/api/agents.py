"""Routes for agents and launchers. Their messages are in agent.messages.protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Generic, TypeVar

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import BaseModel

from openrecycle.agent.coordination.membership import LeadTerm
from openrecycle.agent.messages.protocol import (
    AGENT_TOKEN,
    LEAD,
    Acknowledgement,
    Acknowledgements,
    BatchReply,
    Commands,
    Deployment,
    FailureReport,
    Failures,
    Heartbeats,
    InterimPlan,
    IterationReport,
    JobCreated,
    JobFinished,
    JobSpec,
    LeadAnswer,
    LeadClaim,
    Recovery,
    Registration,
    Registrations,
    Relayout,
)
from openrecycle.app.api.models import Actor, ProfileName, ReadBeside, ReportOutcome, Wait
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import in_thread, in_turn
from openrecycle.app.security.access import Role, caller_of
from openrecycle.planner.plans.plan import job_doc

After = Annotated[int, Query(ge=0, le=2**53)]
LeadHeader = Annotated[
    str | None, Header(alias=LEAD, max_length=20, pattern="^(0|[1-9][0-9]{0,14})/(0|[1-9][0-9]{0,3})$")
]


def _lead_of(request: Request) -> LeadTerm | None:
    """Returns the term and node in whose name a launcher of a job on several nodes speaks, as `of_lead` has found
    it."""
    return getattr(request.state, "lead", None)


# Passed on with the message: whether the sender still leads is decided when the message is taken.
Sender = Annotated[LeadTerm | None, Depends(_lead_of)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]
# The most messages of one transaction, so that others who wait for the job's lock, such as its tick, get it in between.
MOST = 1024
M = TypeVar("M", Registration, Acknowledgement, FailureReport)


class JobWanted(JobSpec):
    """profile_name: of a profile that the console keeps or came with, taken in the place of `profile`."""

    profile_name: ProfileName | None = None


class ReportBatcher(Generic[M]):
    """Takes messages together that come for a job while it stores earlier ones: in one transaction, and in one thread,
    so that the other threads are free for other jobs and for people. With 2,048 workers in launchers of 8, the console
    takes a quarter less processor time than when each launcher's acknowledgements have a transaction of their own, and
    the slowest 1 % of heartbeats are answered twice as quickly.

    take: takes a job's id, messages and their sender; returns the answer to all of them."""

    def __init__(self, take: Callable[[str, Sequence[M], LeadTerm | None], BatchReply]) -> None:
        self._take: Callable[[str, Sequence[M], LeadTerm | None], BatchReply] = take
        self._posted: dict[str, list[tuple[Sequence[M], LeadTerm | None, asyncio.Future[BatchReply]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def post(self, job_id: str, messages: Sequence[M], sender: LeadTerm | None = None) -> BatchReply:
        """Queues messages and returns the answer to them. Raises ConsoleError."""
        answer: asyncio.Future[BatchReply] = asyncio.get_running_loop().create_future()
        if job_id in self._posted:
            self._posted[job_id].append((messages, sender, answer))
        else:
            self._posted[job_id] = [(messages, sender, answer)]
            task = asyncio.create_task(self._drain(job_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await answer

    async def _drain(self, job_id: str) -> None:
        while posted := self._posted[job_id]:
            sender = posted[0][1]
            # Only messages of one sender are taken together: those of another may not count.
            sizes = accumulate(MOST + 1 if who != sender else len(messages) for messages, who, _ in posted)
            count = max(1, sum(size <= MOST for size in sizes))
            now, self._posted[job_id] = posted[:count], posted[count:]
            replies: Iterable[BatchReply | Exception]
            try:
                parts = [messages for messages, _, _ in now]
                whole = [m for part in parts for m in part]
                replies = _split(await in_thread(self._take, job_id, whole, sender), parts)
            except Exception as error:
                replies = [error] * len(now)
            if last := not self._posted[job_id]:
                del self._posted[job_id]  # before anybody hears of it: a loop may end with its last answer
            for (_, _, answer), reply in zip(now, replies, strict=True):
                if answer.done():  # its connection is gone
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
            if last:
                return


def _split(
    reply: BatchReply, parts: Sequence[Sequence[Registration | Acknowledgement | FailureReport]]
) -> Iterator[BatchReply]:
    """Yields the answer to each part of messages that were taken together."""
    at = 0
    for messages in parts:
        mine = range(at, at := at + len(messages))
        refused = [r.model_copy(update={"index": r.index - mine.start}) for r in reply.refused if r.index in mine]
        before = {m.worker: reply.before[m.worker] for m in messages if m.worker in reply.before}
        taken = len(messages) - len(refused)
        yield reply.model_copy(update={"taken": taken, "refused": tuple(refused), "before": before})


def router(console: ConsoleService) -> APIRouter:
    registrations, acknowledgements = (
        ReportBatcher(console.reports.register),
        ReportBatcher(console.reports.acknowledge),
    )
    failures = ReportBatcher(console.reports.failures)

    async def of_lead(request: Request, lead: LeadHeader = None) -> None:
        """The launcher that leads a job of several nodes says so with every request; 409: another node leads by now."""
        job_id = request.path_params.get("job_id")
        # Callers who may only look can ask for deployments, too, and must not influence who leads.
        if lead is not None and job_id is not None and caller_of(console.security.access, request.headers).reports:
            request.state.lead = sender = LeadTerm.parse(lead)
            job = await console.jobs.find_beside(job_id)
            if not job.lead.heard(sender):  # it has a later term, which must be stored first
                await in_thread(job.heard_lead, sender)

    api = APIRouter(prefix="/jobs", tags=["agents"], route_class=ReadBeside, dependencies=[Depends(of_lead)])

    @api.post("", status_code=201, responses={200: {"model": JobCreated}, 409: {}})
    async def create_job(
        wanted: JobWanted,
        request: Request,
        response: Response,
        idempotency_key: IdempotencyKey = None,
        x_actor: Actor = "API",
    ) -> JobCreated:
        """201 for a new job; 200 with the earlier one for an Idempotency-Key seen before.

        A console with a token answers with another one in OpenRecycle-Agent-Token, which is good for this job
        alone: whoever starts its workers gives them that.
        """
        caller = caller_of(console.security.access, request.headers)
        spec = await in_turn(_spec, console, wanted)
        created, new = await in_turn(console.jobs.create, spec, idempotency_key)
        if new:
            await in_thread(console.security.audit.record, x_actor, "create job", created.job_id, job_id=created.job_id)
        # For a repeated request, callers with an agent's token keep theirs: many processes may share one job.
        if console.security.access.guarded and (new or caller.operates):
            _, token = await in_thread(
                console.security.tokens.create, Role.AGENT, created_by=caller.name, job_id=created.job_id
            )
            response.headers[AGENT_TOKEN] = token
        response.status_code = 201 if new else 200
        return created

    @api.post("/{job_id}/workers", response_model=BatchReply)
    async def register(job_id: str, message: Registrations, sender: Sender) -> Response:
        """Each is taken or refused by itself; one that is malformed is a 422 for all, and none is taken."""
        return _json(await registrations.post(job_id, message.registrations, sender))

    @api.get("/{job_id}/deployment", response_model=Deployment, responses={204: {}})
    async def deployment(job_id: str, after: After = 0, wait: Wait = 0) -> Response:
        """The newest deployment with a generation above `after`, as soon as there is one; 204: none in time, or in
        less where many wait; or the job has ended meanwhile."""
        topic = (await console.jobs.find_beside(job_id)).generation_topic
        found = await topic.wait_for(lambda: console.reports.deployment(job_id, after), wait)
        return Response(status_code=204) if found is None else Response(found, media_type="application/json")

    @api.post("/{job_id}/heartbeats", response_model=BatchReply)
    async def heartbeats(job_id: str, message: Heartbeats) -> Response:
        """Each is taken or refused by itself; one that is malformed is a 422 for all, and none is taken."""
        await console.jobs.find_beside(job_id)
        # In the event loop, since a change of threads takes longer than a launcher's 8; 2,048 take it 3 ms.
        return _json(console.reports.heartbeats(job_id, message.heartbeats))

    @api.post("/{job_id}/acknowledgements", response_model=BatchReply)
    async def acknowledge(job_id: str, message: Acknowledgements, sender: Sender) -> Response:
        """Each is taken or refused by itself; one that is malformed is a 422 for all, and none is taken."""
        return _json(await acknowledgements.post(job_id, message.acknowledgements, sender))

    @api.post("/{job_id}/failures", response_model=BatchReply)
    async def fail(job_id: str, message: Failures, sender: Sender) -> Response:
        """Each is taken or refused by itself; one that is malformed is a 422 for all, and none is taken. One generation
        follows from all of them."""
        return _json(await failures.post(job_id, message.failures, sender))

    @api.post("/{job_id}/interim")
    async def interim(job_id: str, message: InterimPlan, sender: Sender) -> ReportOutcome:
        """What a generation runs until those who take their state from a peer have it."""
        return ReportOutcome(reason=await in_thread(console.reports.meanwhile, job_id, message, sender))

    @api.post("/{job_id}/iterations", status_code=204)
    async def iterations(job_id: str, message: IterationReport, sender: Sender) -> None:
        await in_thread(console.reports.committed, job_id, message.iterations, message.age, sender)

    @api.post("/{job_id}/recoveries", status_code=204)
    async def recovery(job_id: str, message: Recovery, sender: Sender) -> None:
        await in_thread(console.reports.recovered, job_id, message, sender)

    @api.post("/{job_id}/relayouts", status_code=204)
    async def relayout(job_id: str, message: Relayout, sender: Sender) -> None:
        await in_thread(console.reports.rearranged, job_id, message, sender)

    @api.get("/{job_id}/commands")
    async def commands(job_id: str, after: After = 0, wait: Wait = 0) -> Commands:
        """Commands with seq > after, as soon as there are any; an empty list after `wait` seconds at most."""
        topic = (await console.jobs.find_beside(job_id)).topic
        found = await topic.wait_for(lambda: console.jobs.find(job_id).commands.after(after) or None, wait)
        return Commands(commands=tuple(found or ()))

    @api.post("/{job_id}/lead")
    async def lead(job_id: str, message: LeadClaim) -> LeadAnswer:
        """A node that too few of the others follow asks for the lead."""
        return await in_thread(console.reports.claim_lead, job_id, message)

    @api.post("/{job_id}/finish", status_code=204)
    async def finish(job_id: str, message: JobFinished, sender: Sender) -> None:
        await in_thread(console.reports.finish, job_id, message, sender)

    return api


def _json(message: BaseModel) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


def _spec(console: ConsoleService, wanted: JobWanted) -> JobSpec:
    """Returns the spec that is stored, and compared with that of an earlier request with the same Idempotency-Key.
    Raises ConsoleError."""
    fields = {name: getattr(wanted, name) for name in JobSpec.model_fields}
    if wanted.profile_name is not None:
        if wanted.profile is not None:
            raise ConsoleError(422, "invalid", "got both, expected one of them", field="profile, profile_name")
        job = console.plans.profiles.job(wanted.profile_name, wanted.pipelines, wanted.stages, wanted.micro_batches)
        fields["profile"] = job_doc(job)
    return JobSpec.model_validate(fields)
