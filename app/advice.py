"""Which way on is best while workers are out, in a sentence. Pure: the planner's advisor, and what of its
advice the agents can carry out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.membership import names
from planner.job import MemoryLimit, Technique, Worker
from planner.plan import JobDoc
from planner.policy import Advice, JobState, Option, advise
from planner.simulation.costs import RecoveryCosts
from planner.simulation.planned import LAYERS_PER_STAGE, PlannedJob

# What happens at once, whatever is advised. Everything else would change who runs which stage.
REROUTE, REPARTITION = "re-route", "re-partition"
# Another way is worth an operator's while when it trains so much more than re-routing does.
CLEAR_MARGIN = 0.05


@dataclass(frozen=True)
class Verdict:
    """way: what the job does. advised: what it should do. absorbed: do the bubbles hold the load?

    reason: why, in a few sentences.
    """

    way: str
    advised: str
    absorbed: bool
    reason: str

    @property
    def calls_for_an_operator(self) -> bool:
        return self.way != self.advised


@dataclass(frozen=True)
class AdviceRequest:
    """owner: the job's id. samples: of one iteration. unit_seconds: of the job's time unit; None: what
    its name says. heals_in, since_checkpoint: seconds, as for planner.policy.advise. basis: where the
    costs and the repair time come from, in words.
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
    heals_in: float
    since_checkpoint: float | None
    basis: str
    # More than this, and the job is too large to be advised while it matters.
    patience: float = 60.0

    def to_json(self) -> bytes:
        return json.dumps({"advise": {**self.__dict__, "job": self.job.model_dump(mode="json")}}).encode()

    def read(self, document: str) -> Verdict:
        return Verdict(**json.loads(document))


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
        RecoveryCosts(detect=request["detect"], recover=request["recover"]),
        heals_in=request["heals_in"],
    )
    verdict = decide(advice, request["failed"], planned.full.per_second, request["basis"])
    return json.dumps(verdict.__dict__)


def decide(advice: Advice, failed: Sequence[str], full: float, basis: str) -> Verdict:
    """The job re-routes in any case; another way is left to an operator, if it is clearly better.

    full: samples per second without failures. basis: said last.
    """
    best = advice.choice
    text = f"With {names(list(failed))} out, the best way on is {advice.sentence}."
    advised = REROUTE
    if best.name != REROUTE:
        taken = next((option for option in advice.options if option.name == REROUTE), None)
        now = f"re-routes ({taken.rate:.4g} samples/s)" if taken else "re-routes"
        gain = _gain(best, taken, advice.horizon, full)
        if gain <= CLEAR_MARGIN:
            text += f" The job {now}, which trains less by under {CLEAR_MARGIN:.0%}."
        else:
            advised = best.name
            more = f"train {gain:.0%} more" if math.isfinite(gain) else "be the only way to train by then"
            text += (
                f" The job {now}: to {best.name} would {more}, but this version can't do it in place, "
                "so an operator would have to."
            )
    if best.name == REPARTITION:
        text += f" It is assumed that each stage has {LAYERS_PER_STAGE} layers of equal cost that can move."
    return Verdict(REROUTE, advised, advice.absorbed, f"{text} {basis}".strip())


def _gain(best: Option, taken: Option | None, horizon: float, full: float) -> float:
    """How much more `best` trains, as a share of what `taken` does; inf where that is nothing."""
    samples = taken.samples(horizon, full) if taken else 0.0
    return best.samples(horizon, full) / samples - 1 if samples > 0 else math.inf
