"""Which way on is best while workers are out, in a sentence, and which of them the job can take by itself.

Pure: the planner's advisor, and what of its advice the agents can carry out.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from app.coordination.choices import Candidate
from app.coordination.membership import names
from planner.errors import PlannerError
from planner.job import MemoryLimit, Problem, Technique, Worker
from planner.packed import packed_plan_of, to_bytes
from planner.plan import JobDoc, Plan
from planner.policy import (
    DROP,
    MIGRATE,
    PLANNED_OPS,
    REROUTE,
    Advice,
    JobState,
    Option,
    advise,
    one_f_one_b,
    shares,
    span,
)
from planner.simulation.costs import RecoveryCosts
from planner.simulation.planned import LAYERS_PER_STAGE, PlannedJob, Rate
from planner.solvers.portfolio import make_plan
from planner.words import percent

REPARTITION, RESTART, SPARES = "re-partition", "restart from the checkpoint", "take spares"
# Another way is taken, or worth an operator's while, when it trains so much more than re-routing does.
CLEAR_MARGIN = 0.05

_CANNOT = {
    REPARTITION: "this job can't do it, for its layers can't change their stage",
    DROP: "this job doesn't do it, for every update would see fewer samples, and the losses would be others",
    RESTART: "this job can't do it by itself: an operator would have to start it again",
    SPARES: "this job has none that it could take by itself",
}


@dataclass(frozen=True)
class Verdict:
    """way: what the job does, or is about to do. advised: what it should do. absorbed: do the bubbles hold
    the load? reason: why, in a few sentences.

    candidates: the ways that the job can take by itself, best first. better: the name of one that is
    clearly better than re-routing, "" where none is. plans: of the candidates, as planner.packed has them, in base64.
    """

    way: str
    advised: str
    absorbed: bool
    reason: str
    candidates: tuple[Candidate, ...] = ()
    better: str = ""
    plans: tuple[str, ...] = field(default=(), repr=False)

    @property
    def calls_for_an_operator(self) -> bool:
        return self.way != self.advised


@dataclass(frozen=True)
class AdviceRequest:
    """owner: the job's id. samples: of one iteration. unit_seconds: of the job's time unit; None: what
    its name says. heals_in, since_checkpoint: seconds, as for planner.policy.advise. copy: seconds that a
    worker takes for a stage's state. basis: where the costs and the repair time come from, in words.
    migrate: may workers change their stage? automatic: does the job take the best way by itself?
    """

    owner: str
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
    automatic: bool = True
    # More than this, and the job is too large to be advised while it matters.
    patience: float = 60.0

    def to_json(self) -> bytes:
        return json.dumps({"advise": {**self.__dict__, "job": self.job.model_dump(mode="json")}}).encode()

    def read(self, document: bytes) -> Verdict:
        body = json.loads(document)
        candidates = tuple(
            Candidate(**{**c, "failed": tuple(c["failed"]), "moves": tuple((a, b) for a, b in c["moves"])})
            for c in body.pop("candidates")
        )
        return Verdict(**body | {"candidates": candidates, "plans": tuple(body["plans"])})


def verdict_document(request: Mapping[str, Any]) -> str:
    """The verdict on an AdviceRequest, as JSON. Takes seconds for a large job. Raises PlannerError."""
    planned = PlannedJob(
        JobDoc.model_validate(request["job"]).job(),
        samples=request["samples"],
        technique=Technique.of(request["technique"]),
        memory=MemoryLimit.parse(request["memory"]),
        unit_seconds=request["unit_seconds"],
    )
    failed = frozenset(Worker.parse(name, field="failed") for name in request["failed"])
    advice = advise(
        JobState(failed, request["since_checkpoint"]),
        planned,
        RecoveryCosts(detect=request["detect"], recover=request["recover"], migrate=request["copy"]),
        heals_in=request["heals_in"],
    )
    made = candidates(advice, planned, failed, migrate=request["migrate"])
    verdict = decide(
        advice,
        request["failed"],
        planned.full.per_second,
        request["basis"],
        [c for c, _ in made],
        automatic=request["automatic"],
        migrate=request["migrate"],
    )
    plans = [b64encode(to_bytes(plan)).decode() for _, plan in made if plan is not None]
    return json.dumps(asdict(verdict) | {"plans": plans})


def candidates(
    advice: Advice, planned: PlannedJob, failed: frozenset[Worker], *, migrate: bool
) -> list[tuple[Candidate, Plan | None]]:
    """The ways that the agents can carry out, best first, each with its plan; on a large grid re-routing
    alone, and no plan: it would be made twice."""
    options = {option.name: option for option in advice.options}
    stay, moved = options.get(REROUTE), options.get(MIGRATE)
    if stay is None:
        return []
    large = 3 * planned.workers * planned.job.micro_batches > PLANNED_OPS
    found = [_candidate(stay, failed, (), "", planned, advice.horizon, None if large else _plan(planned, failed))]
    if moved and moved.migrations and migrate and not large:
        moves = tuple((m.worker, m.takes) for m in moved.migrations)
        after = failed - {to for _, to in moves} | {source for source, _ in moves}
        words = ", ".join(f"{source} takes the place of {to}" for source, to in moves)
        found.append(_candidate(moved, after, moves, words, planned, advice.horizon, _plan(planned, after)))
    broken = sorted({worker.pipeline for worker in failed})
    if len(broken) < planned.job.pipelines and not large:
        column = frozenset(Worker(p, s) for p in broken for s in range(planned.job.stages))
        if (plan := _plan(planned, column)) is not None:
            rate = Rate(plan.metrics.period * planned.unit, planned.samples).per_second
            one = len(broken) == 1
            words = (
                f"pipeline{'' if one else 's'} {', '.join(map(str, broken))} "
                f"stand{'s' if one else ''} by, and the others run all micro-batches"
            )
            dropped = Option(DROP, stay.pause, rate)
            found.append(_candidate(dropped, column, (), words, planned, advice.horizon, plan))
    return sorted(found, key=lambda pair: -pair[0].samples)


def _plan(planned: PlannedJob, failed: frozenset[Worker]) -> Plan | None:
    try:
        return make_plan(
            Problem(planned.job, failed, planned.technique, planned.memory), solver="list", form=packed_plan_of
        )
    except PlannerError:
        return None


def _candidate(
    option: Option,
    failed: frozenset[Worker],
    moves: tuple[tuple[Worker, Worker], ...],
    words: str,
    planned: PlannedJob,
    horizon: float,
    plan: Plan | None,
) -> tuple[Candidate, Plan | None]:
    full = planned.full.per_second
    samples = max(0.0, option.samples(horizon, full))
    text = f"{words}: " if words else ""
    text += (
        f"{option.rate:.4g} samples/s ({shares(option.rate, planned)}) after a pause of {option.pause:.3g} s, "
        f"{samples:,.0f} samples in the {span(horizon)} to the expected repair"
    )
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
    )
    return candidate, plan


def decide(
    advice: Advice,
    failed: Sequence[str],
    full: float,
    basis: str,
    ways: Sequence[Candidate] = (),
    *,
    automatic: bool = True,
    migrate: bool = False,
) -> Verdict:
    """The job re-routes in any case, and moves workers where that is clearly better and it may; every other
    way is left to an operator. basis: said last."""
    best = advice.choice
    options = {option.name: option for option in advice.options}
    taken = options.get(REROUTE)
    text = f"With {names(list(failed))} out, the best way on is {advice.sentence}."
    possible = any(way.name == MIGRATE for way in ways)
    moved = options.get(MIGRATE)
    better = MIGRATE if possible and moved and _gain(moved, taken, advice, full) > CLEAR_MARGIN else ""
    way, advised = (better if automatic and better else REROUTE), REROUTE
    if best.name != REROUTE:
        gain = _gain(best, taken, advice, full)
        now = f"re-routes ({taken.rate:.4g} samples/s)" if taken else "re-routes"
        if gain <= CLEAR_MARGIN:
            text += f" The job {now}, which trains less by under {percent(CLEAR_MARGIN)}."
        else:
            advised = best.name
            text += f" The job {now}: to {best.name} would {_more(gain)}"
            if best.name != better:
                text += f"; {_why_not(best.name, migrate)}."
                if better and moved:
                    text += f" To {better} would {_more(_gain(moved, taken, advice, full))}"
            if better:
                text += ", and this job does so now." if automatic else ", and an operator may choose it."
    if best.name == REPARTITION:
        text += f" It is assumed that each stage has {LAYERS_PER_STAGE} layers of equal cost that can move."
    return Verdict(way, advised, advice.absorbed, f"{text} {basis}".strip(), tuple(ways), better)


def _why_not(name: str, migrate: bool) -> str:
    if name == MIGRATE:
        return "this job is too large for it" if migrate else "this job may not, as it was started"
    return _CANNOT.get(name, "this job can't do it")


def _more(gain: float) -> str:
    return f"train {percent(gain)} more" if math.isfinite(gain) else "be the only way to train by then"


def _gain(best: Option, taken: Option | None, advice: Advice, full: float) -> float:
    """How much more `best` trains, as a share of what `taken` does; inf where that is nothing."""
    samples = taken.samples(advice.horizon, full) if taken else 0.0
    return best.samples(advice.horizon, full) / samples - 1 if samples > 0 else math.inf
