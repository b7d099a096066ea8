"""Recommends the best option while workers are out, in a few sentences, and says which options the job can take by
itself. Pure; runs in a child process.

It takes the planner's advice (planner.simulation.policy) and limits it to the options that agents can carry out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from openrecycle.agent.coordination.generations import MOVE_ITERATIONS, worth_moving
from openrecycle.agent.coordination.membership import Candidate
from openrecycle.app.runtime.processes import Channel
from openrecycle.app.runtime.task_queue import TaskQueue
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import MayMove, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.jobs.words import (
    MIGRATE,
    REROUTE,
    STAND_BY,
    layers_move,
    layers_moved,
    names,
    percent,
    whole_sentence,
)
from openrecycle.planner.layers.partition import lay_out
from openrecycle.planner.layers.room import LayerRoom
from openrecycle.planner.plans.packed import to_text
from openrecycle.planner.plans.plan import JobDoc, Plan
from openrecycle.planner.simulation.engine import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.simulation.policy import (
    PLANNED_OPS,
    REPARTITION,
    Advice,
    Option,
    PolicyState,
    advise,
    best_option,
    merit,
    one_f_one_b,
    shares,
    span,
)
from openrecycle.planner.solvers.portfolio import make_plan

# Another way is taken, or recommended to an operator, if it trains at least this much more than re-routing.
CLEAR_MARGIN = 0.05

REPAIR, JOBS_END = "the expected repair", "the end of the job if it re-routes"
"""The end of the time that advice looks ahead to, in words."""


@dataclass(frozen=True)
class Recommendation:
    """Advice for one job. way: what the job does, or is about to do. advised: what it should do. reason: why, in a few
    sentences.

    candidates: the ways that the job can take by itself, best first. better: the name of one that is clearly better
    than re-routing; "": none. plans: the candidates' plans, packed (planner.plans.packed) and in base64.
    """

    way: str
    advised: str
    reason: str
    candidates: tuple[Candidate, ...] = ()
    better: str = ""
    plans: tuple[str, ...] = field(default=(), repr=False)

    @property
    def calls_for_an_operator(self) -> bool:
        return self.way != self.advised


_RECOMMENDATION = TypeAdapter(Recommendation)


@dataclass(frozen=True)
class AdviceRequest:
    """A request for advice. samples: of one iteration. unit_seconds:
    seconds of the job's time unit; None: as its name says. heals_in, since_checkpoint: seconds, as for
    planner.simulation.policy.advise. copy: seconds to copy a stage's state. basis: where the costs and the repair time
    come from, in words. migrate: whether workers may change their stage. relayout: whether layers may
    (agent.messages.protocol.JobSpec). partition: layers per stage now. move: seconds that training loses when layers
    move; None: to be assumed. automatic: whether the job takes the best way by itself. room: the workers' memory for
    layers that move; None: enough. left: iterations that are not committed yet; None: many.
    """

    job: JobDoc
    failed: tuple[str, ...]
    technique: str
    memory: str
    samples: float
    unit_seconds: float | None
    detect: float
    recover: float
    copy: float
    heals_in: float
    since_checkpoint: float | None
    basis: str
    migrate: bool = False
    relayout: MayMove = "never"
    partition: tuple[int, ...] = ()
    move: float | None = None
    automatic: bool = True
    room: LayerRoom | None = None
    left: int | None = None


def advisor(timeout: float = 60.0) -> TaskQueue[Recommendation]:
    """Makes a task queue that takes AdviceRequest. timeout: seconds; advice that takes longer would come too late to
    matter."""
    return TaskQueue(serve, "advising", read_recommendation, timeout=timeout)


def read_recommendation(document: bytes) -> Recommendation:
    return _RECOMMENDATION.validate_json(document)


def serve(channel: Channel, request: AdviceRequest) -> None:
    """Answers one request, in the child."""
    channel.say(recommendation_document(request))


def recommendation_document(asked: AdviceRequest) -> bytes:
    """Returns the recommendation as JSON. Takes seconds for a large job. Raises PlannerError."""
    job = asked.job.job()
    planned = PlannedJob(
        job.with_partition(asked.partition) if job.layers else job,
        samples=asked.samples,
        technique=Technique.of(asked.technique),
        memory=MemoryLimit.parse(asked.memory),
        unit_seconds=asked.unit_seconds,
    )
    failed = frozenset(Worker.parse(name, field="failed") for name in asked.failed)
    costs = RecoveryCosts(detect=asked.detect, recover=asked.recover, migrate=asked.copy)
    if job.layers and asked.relayout != "never":
        move = MOVE_ITERATIONS * planned.full.seconds if asked.move is None else asked.move
        costs = replace(costs, repartition=move)
    left = math.inf if asked.left is None else asked.left
    advice = advise(PolicyState(failed, asked.since_checkpoint), planned, costs, heals_in=asked.heals_in, left=left)
    until = REPAIR if advice.horizon == asked.heals_in else JOBS_END
    made, refused = candidates(
        *(advice, planned, failed), migrate=asked.migrate, relayout=asked.relayout, room=asked.room, until=until
    )
    recommendation = decide(
        advice,
        asked.failed,
        planned.full,
        asked.basis,
        [c for c, _ in made],
        automatic=asked.automatic,
        relayout=asked.relayout,
        refused=refused,
        left=left,
        until=until,
    )
    plans = tuple(to_text(plan) for _, plan in made if plan is not None)
    return _RECOMMENDATION.dump_json(replace(recommendation, plans=plans))


def candidates(
    advice: Advice,
    planned: PlannedJob,
    failed: frozenset[Worker],
    *,
    migrate: bool,
    relayout: MayMove = "never",
    room: LayerRoom | None = None,
    until: str = REPAIR,
) -> tuple[list[tuple[Candidate, Plan | None]], str]:
    """Returns the ways that agents can carry out, best first, each with its plan, and why there is no memory for a
    better partition ("": there is).

    On a large grid the only way is re-routing, without a plan, which would otherwise be made twice. until: the end of
    the time that the advice looks ahead to."""
    options = {option.name: option for option in advice.options}
    stay, moved = options.get(REROUTE), options.get(MIGRATE)
    if stay is None:
        return [], ""
    large, ahead = planned.job.ops > PLANNED_OPS, (advice.horizon, until)
    found = [_candidate(stay, failed, (), "", planned, ahead, None if large else _plan(planned, failed))]
    if moved and moved.migrations and migrate and not large:
        moves = tuple((m.worker, m.takes) for m in moved.migrations)
        after = failed - {to for _, to in moves} | {source for source, _ in moves}
        words = ", ".join(f"{source} takes the place of {to}" for source, to in moves)
        found.append(_candidate(moved, after, moves, words, planned, ahead, _plan(planned, after)))
    laid, refused = options.get(REPARTITION), ""
    if laid and relayout != "never" and planned.job.layers and not large:
        plan, refused = _laid_out(planned, failed, room)
        if plan is not None and plan.partition != planned.job.partition:
            rate = Rate(plan.metrics.period * planned.unit, planned.samples).per_second
            words = layers_move(layers_moved(planned.job.partition, plan.partition))
            way = Option(REPARTITION, laid.pause, rate, partition=plan.partition)
            found.append(_candidate(way, failed, (), words, planned, ahead, plan))
    broken = sorted({worker.pipeline for worker in failed})
    if failed and len(broken) < planned.job.pipelines and not large:
        column = frozenset(Worker(p, s) for p in broken for s in range(planned.job.stages))
        if (plan := _plan(planned, column)) is not None:
            rate = Rate(plan.metrics.period * planned.unit, planned.samples).per_second
            one = len(broken) == 1
            words = (
                f"pipeline{'' if one else 's'} {', '.join(map(str, broken))} "
                f"stand{'s' if one else ''} by, and the others run all micro-batches"
            )
            stood_by = Option(STAND_BY, stay.pause, rate)
            found.append(_candidate(stood_by, column, (), words, planned, ahead, plan))
    return sorted(found, key=lambda pair: merit(pair[0].name, pair[0].samples, pair[0].pause)), refused


def _laid_out(planned: PlannedJob, failed: frozenset[Worker], room: LayerRoom | None) -> tuple[Plan | None, str]:
    """Returns the plan with the best partition for the living workers (if none is out, with the job's own partition),
    and why there is no memory for a better one."""
    technique, memory = planned.technique, planned.memory
    try:
        if failed:
            layout = lay_out(planned.job, failed, technique=technique, memory=memory, room=room)
            refused = layout.refused
        else:
            job = planned.job.at_home
            everybody = (job.pipelines,) * job.stages
            refused = room.refusal(job.partition, planned.job.partition, everybody) if room else ""
            if refused:  # there is no memory to move all layers back: as far as there is
                layout = lay_out(planned.job, technique=technique, memory=memory, room=room)
            else:
                layout = lay_out(job, technique=technique, memory=memory, over="schedules")
        return checked(make_plan(layout.problem, solver="list", look_ahead=False, layout=layout)), refused
    except PlannerError:
        return None, ""


def _plan(planned: PlannedJob, failed: frozenset[Worker]) -> Plan | None:
    try:
        problem = Problem(planned.job, failed, planned.technique, planned.memory)
        return checked(make_plan(problem, solver="list", look_ahead=False))
    except PlannerError:
        return None


def _candidate(
    option: Option,
    failed: frozenset[Worker],
    moves: tuple[tuple[Worker, Worker], ...],
    words: str,
    planned: PlannedJob,
    ahead: tuple[float, str],
    plan: Plan | None,
) -> tuple[Candidate, Plan | None]:
    """Makes the candidate for an option. words: what moves. ahead: (seconds, their end in words)."""
    full, (horizon, until) = planned.full.per_second, ahead
    samples = max(0.0, option.samples(horizon, full))
    text = f"{words}: " if words else ""
    text += f"{option.rate:.4g} samples/s ({shares(option.rate, planned)})"
    if failed:
        text += f" after a pause of {option.pause:.3g} s, {samples:,.0f} samples in the {span(horizon)} to {until}"
    candidate = Candidate(
        option.name,
        tuple(map(str, sorted(failed))),
        tuple((str(source), str(to)) for source, to in moves),
        option.rate,
        option.rate / full,
        one_f_one_b(planned).per_second / option.rate - 1,
        option.pause,
        samples,
        plan.fingerprint if plan else "",
        text,
        option.partition,
    )
    return candidate, plan


def decide(
    advice: Advice,
    failed: Sequence[str],
    whole: Rate,
    basis: str,
    ways: Sequence[Candidate] = (),
    *,
    automatic: bool = True,
    relayout: MayMove = "never",
    refused: str = "",
    left: float = math.inf,
    until: str = REPAIR,
) -> Recommendation:
    """Ranks the options that the job has.

    The job re-routes in any case. If it may, it moves workers by itself where that is clearly better, and layers where
    that pays within the hour and the job. All other ways are left to an operator.

    ways: the candidates. whole: the rate of the fault-free plan. basis: the last sentence. refused: why there is no
    memory for a better partition. left: iterations that are not committed yet. until: the end of the time that the
    advice looks ahead to."""
    horizon, full, samples = advice.horizon, whole.per_second, whole.samples
    known = {option.name: option for option in advice.options}
    can = {way.name: Option(way.name, way.pause, way.rate) for way in ways}
    # The advisor's rate for a new partition assumes that workers move too. Here only layers do; `ways` has that rate.
    can |= {name: known[name] for name in (REROUTE, *can) if name in known and name != REPARTITION}
    ranked = best_option(list(can.values()), horizon, full)
    taken = can.get(REROUTE)
    goes = [o for o in ranked if _taken_alone(o, taken, horizon, full, samples, relayout, left)]
    better = goes[0].name if goes else ""
    way, advised = (better if automatic and better else REROUTE), REROUTE
    if not failed:
        return _back(way, better, taken, ways, refused)
    text = f"With {names(list(failed))} empty"
    if ranked:
        best = ranked[0]
        said = {way.name: way.text for way in ways if way.text}
        text += f", the best option is {best.name}: {said.get(best.name) or _numbers(best, horizon, full, until)}"
        if len(ranked) > 1:
            text += f"; next is {ranked[1].name}: {_numbers(ranked[1], horizon, full, until)}"
        text += f"; {advice.load}." if advice.load else "."
        gain = _gain(best, taken, horizon, full)
        if best.name != REROUTE and (gain > CLEAR_MARGIN or best.name == better):
            advised = best.name
            does = "this job does so now" if best.name == way else "an operator may choose it"
            than = f"It {_more(gain)} than to re-route" if math.isfinite(gain) else "Nothing else trains by then"
            text += f" {than}, and {does}."
        elif best.name != REROUTE:
            text += f" The job re-routes, which trains less by under {percent(CLEAR_MARGIN, 0)}."
    else:
        text += ", the job has no option that it could take by itself."
    text += f" {whole_sentence(refused)}" if refused else ""
    return Recommendation(way, advised, f"{text} {basis}".strip(), tuple(ways), better)


def _back(way: str, better: str, taken: Option | None, ways: Sequence[Candidate], refused: str) -> Recommendation:
    """Advises a job whose workers are all back, while its layers are still as they were cut for fewer."""
    text = "all workers are back"
    back = next((w for w in ways if w.name == REPARTITION), None)
    if back is not None and taken is not None:
        more = f"{back.rate:.4g} samples/s instead of {taken.rate:.4g}"
        text += f"; with the layers where they were before it trains {more}"
        text += ", and they move back now" if way == better else ", and an operator may move them back"
    text += f"; {refused}" if refused else ""
    return Recommendation(way, better or way, text, tuple(ways), better)


def _taken_alone(
    option: Option,
    taken: Option | None,
    horizon: float,
    full: float,
    samples: float,
    relayout: MayMove,
    left: float,
) -> bool:
    """Says whether the job takes that way by itself, rather than re-route (`taken`)."""
    if option.name == MIGRATE:
        return _gain(option, taken, horizon, full) > CLEAR_MARGIN
    if option.name != REPARTITION or taken is None:
        return option.name == REPARTITION
    now, then = samples / taken.rate, samples / option.rate
    pays = worth_moving(now, then, now, left)[0] and _gain(option, taken, horizon, full) > 0
    # Layers arrive after the current iteration, so at least two must be left.
    return option.rate > taken.rate and left > 1 and (pays or relayout == "always")


def _numbers(option: Option, horizon: float, full: float, until: str) -> str:
    return (
        f"{option.rate:.4g} samples/s after a pause of {option.pause:.3g} s, "
        f"{max(0.0, option.samples(horizon, full)):,.0f} samples in the {span(horizon)} to {until}"
    )


def _more(gain: float) -> str:
    return f"trains {percent(gain, 0)} more"


def _gain(best: Option, taken: Option | None, horizon: float, full: float) -> float:
    """Returns how much more `best` trains, as a share of what `taken` does; inf if `taken` trains nothing."""
    samples = taken.samples(horizon, full) if taken else 0.0
    return best.samples(horizon, full) / samples - 1 if samples > 0 else math.inf
