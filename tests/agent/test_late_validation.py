"""Clipping and NaN checks after the step, on real processes: the bits of checks before the step.

One job holds every case: iteration 1 has a NaN in one micro-batch of the first stage alone, the last one is
clipped; in between the stages have regained confidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openrecycle.agent.config.options import Optimization
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import Slot, ValidationResult
from openrecycle.agent.transport.ranks import Ranks
from openrecycle.agent.workers.validation_exchange import Steps
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker, WorkerRank
from openrecycle.planner.plans.schedule import MicroBatch
from tests.agent.nan_model import NanModel
from tests.agent.runs import Run, nan_model
from tests.agent.virtual_wires import Round, train
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

ITERATIONS, CLIP = 20, 2.0
NAN_ITERATIONS = {"loud": [19], "poisoned": [1]}


def _run(record: Path, *arguments: str, iterations: int = ITERATIONS, **options: list[int]) -> Run:
    return nan_model(record, *arguments, iterations=iterations, options=options)


def _validations(run: Run) -> list[tuple[int, bool]]:
    return [
        (line["validation"]["iteration"], line["validation"]["redone"]) for line in run.lines if "validation" in line
    ]


def _norms(run: Run) -> dict[int, str]:
    said = [line["gradient_norm"] for line in run.lines if "gradient_norm" in line]
    return {norm["iteration"]: norm["norm"] for norm in said}


def _same_bits(run: Run, reference: Run) -> None:
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert _norms(run) == _norms(reference)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("synchronous")
    run = _run(folder / "run.jsonl", "--clip-norm", str(CLIP), "--synchronous", **NAN_ITERATIONS)
    assert run.status == 0, run.errors
    assert len(run.losses) == ITERATIONS and _validations(run) == [(1, False)]
    assert sorted({*range(ITERATIONS)} - _norms(run).keys()) == [1], "whose update is skipped has none"
    return run


@pytest.mark.chaos
def test_the_synchronous_order_is_plain_training(synchronous: Run) -> None:
    """Against one process, one module and torch's own clipping, to the rounding of float32."""
    task = NanModel(**NAN_ITERATIONS)
    module = nn.Sequential(*(task.build_stage(s, 2, 0) for s in range(2)))
    optimizer = task.optimizer(module.parameters())
    scheduler = task.scheduler(optimizer)
    for i in range(ITERATIONS):
        cells = [(0, i, p, m) for p in range(2) for m in range(2)]
        loss = sum((task.loss(module(task.inputs(*c)), task.targets(*c)) / 4 for c in cells), torch.zeros(()))
        assert float.fromhex(synchronous.losses[i]) == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        assert (norm.item() > CLIP) == (i in NAN_ITERATIONS["loud"])
        assert norm.isnan().item() == (i in NAN_ITERATIONS["poisoned"])
        if not norm.isnan():
            optimizer.step()
            scheduler.step()


def test_steps_taken_before_their_validation_end_in_the_same_bits(synchronous: Run, tmp_path: Path) -> None:
    run = _run(tmp_path / "run.jsonl", "--clip-norm", str(CLIP), **NAN_ITERATIONS)
    _same_bits(run, synchronous)
    assert _validations(run) == [(1, True), (19, True)]


@pytest.mark.parametrize(
    "kills",
    [
        # Between the step and its validation, which is to skip it; and one more while the stages wait for validations.
        ("W1_0@1:V", "W0_1@10:I1"),
        at_length(("W1_1@19:V",)),  # after the last step, which is to be clipped
        ("W0_0@1:O",),  # some have stepped, and the validation of what they did is never heard
    ],
)
def test_a_death_between_step_and_validation(kills: tuple[str, ...], synchronous: Run, tmp_path: Path) -> None:
    wishes = [text for kill in kills for text in ("--kill", kill)]
    run = _run(tmp_path / "run.jsonl", "--clip-norm", str(CLIP), *wishes, **NAN_ITERATIONS)
    _same_bits(run, synchronous)
    # A death after the last step may leave nothing to redo.
    assert len(run.failures) == len(kills) or kills == ("W1_1@19:V",)


def test_a_newcomer_knows_what_the_others_expect(synchronous: Run, tmp_path: Path) -> None:
    """It returns while the stages wait for validations, and all of them stop waiting at the same step."""
    # Paced, so that there is a job left to come back to.
    wishes = ("--kill", "W1_0@2:F1", "--rejoin", "W1_0@2", "--pace", "F=15ms,I=15ms,W=15ms")
    run = _run(tmp_path / "run.jsonl", "--clip-norm", str(CLIP), *wishes, **NAN_ITERATIONS)
    _same_bits(run, synchronous)
    assert run.iterations[-1]["living"] == 4


def test_stop_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    run = _run(tmp_path / "run.jsonl", "--non-finite", "stop", iterations=8, poisoned_all=[3])
    assert run.status == 1
    assert golden("iteration-3-a-gradient-was") in run.errors
    assert len(run.losses) <= 4


def test_too_many_skipped_updates_in_a_row_end_the_job(tmp_path: Path) -> None:
    run = _run(tmp_path / "run.jsonl", iterations=30, poisoned_all=[2, *range(4, 30)])
    assert run.status == 1
    assert golden("iteration-14-a-gradient-was") in run.errors
    assert [i for i, _ in _validations(run)] == [2, *range(4, 14)]


# -- what a death leaves in doubt is settled by those who are left ---------------------------------


class _Unused:
    """Groups of a generation in which nothing has been sent yet."""

    ranks = Ranks()


Said = list[tuple[int, ValidationResult, bool]]


def _steps(
    worker: Worker, gradient: float, normed: Callable[[int, float], None] = lambda iteration, norm: None
) -> tuple[Steps, StageOptimizer, Said]:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    sums = GradientSum(module.parameters(), terms=1)
    stage = StageOptimizer(module, torch.optim.SGD(module.parameters(), lr=1.0), sums, clips=True)
    said: Said = []
    sums.add(module.weight, torch.tensor([[gradient]]))
    clipped = Optimization(clip_norm=1.0)
    steps = Steps(worker, clipped, stage, (1, 1), lambda *what: said.append(what), normed=normed)
    return steps, stage, said


def test_what_is_in_doubt_after_a_death_is_settled_by_the_survivors() -> None:
    """Norms 3 and 4 in two stages: 5 together, clipped to 1. One worker knew it, the other did not."""
    workers = Worker(0, 0), Worker(0, 1)
    norms: list[tuple[int, float]] = []
    informed, knows, _ = _steps(workers[0], 3.0)
    uninformed, doubts, said = _steps(workers[1], 4.0, lambda *what: norms.append(what))
    knows.step(None)
    doubts.step(None)
    assert next(doubts.module.parameters()).item() == 1.0 - 4.0
    clipped = ValidationResult(1.0 / (5.0 + 1e-6), norm=5.0)
    knows.settle(clipped)
    holders = {WorkerRank(w): (1, *s.numbers()) for w, s in zip(workers, (informed, uninformed), strict=True)}
    for steps in (informed, uninformed):
        steps.begin(_Unused(), list(workers), 1, holders)  # type: ignore[arg-type]
    assert next(knows.module.parameters()).item() == pytest.approx(1.0 - 3.0 / 5.0)
    assert next(doubts.module.parameters()).item() == pytest.approx(1.0 - 4.0 / 5.0)
    assert said == [(0, clipped, True)] and norms == [(0, 5.0)]
    assert knows.post_validation == doubts.post_validation and doubts.settled


def test_who_has_gone_further_still_tells_of_the_step_in_doubt() -> None:
    """One has settled step 0 and taken step 1; it goes back, and tells the other of step 0."""
    workers = Worker(0, 0), Worker(0, 1)
    (further, ahead, _), (uninformed, doubts, _) = _steps(workers[0], 3.0), _steps(workers[1], 4.0)
    ahead.step(None)
    doubts.step(None)
    ahead.settle(ValidationResult(1.0 / (5.0 + 1e-6)))
    ahead.gradients.add(ahead.gradients.parameters[0], torch.tensor([[100.0]]))
    ahead.step(None)
    assert ahead.slot == Slot((10000.0,)) and ahead.slot_before == Slot((9.0,))
    holders = {WorkerRank(workers[0]): (2, *further.numbers()), WorkerRank(workers[1]): (1, *uninformed.numbers())}
    ahead.roll_back()
    for steps in (further, uninformed):
        steps.begin(_Unused(), list(workers), 1, holders)  # type: ignore[arg-type]
    assert next(doubts.module.parameters()).item() == pytest.approx(1.0 - 4.0 / 5.0)
    assert next(ahead.module.parameters()).item() == pytest.approx(1.0 - 3.0 / 5.0)
    assert ahead.slot == Slot((9.0,)) and ahead.post_validation == doubts.post_validation


# -- forwards whose worker does not know yet that the iteration counts no more ----------------------

IGNORANT = 1000
"""An op that never comes: such a worker hears of it where it has to wait for the news."""


def _without_news(void: dict[Worker, int], took: Callable[[Worker, MicroBatch, Any], None]) -> None:
    """One iteration of two stages in virtual wires. void: see Round."""
    job = Job.uniform(1, 2, 3)
    plan, _ = Catalog(job, Technique.STAGGERED, MemoryLimit("uniform")).plan_for(set())
    train(plan.schedule(), [Round(void=void), Round()], width=3, seed=0, took=took)


@pytest.fixture
def filled() -> Iterator[None]:
    """What is not initialised holds the largest numbers, and NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled")
def test_what_is_passed_on_can_be_computed_with() -> None:
    """An uninitialised integer is no index."""
    taken: list[Tensor] = []

    def took(worker: Worker, key: MicroBatch, x: Any) -> None:
        if worker.stage:
            taken.append(torch.cat([t.flatten().double() for t in x]))

    _without_news({Worker(0, 0): 0, Worker(0, 1): IGNORANT}, took)
    assert taken, "the second stage has computed nothing"
    counted = taken[-3:]
    assert all(bool((x == -1).all()) for x in counted) and not any(x.any() for x in taken[:-3])
    assert len(taken) > 3


def test_what_a_forward_raises_counts_only_where_its_iteration_does() -> None:
    ran: Counter[Worker] = Counter()

    def took(worker: Worker, key: MicroBatch, x: Any) -> None:
        ran[worker] += 1
        if (not x[0].any()) if worker.stage else (ran[worker] == 1):
            raise IndexError("no such row")

    _without_news({Worker(0, 0): IGNORANT, Worker(0, 1): IGNORANT}, took)
    assert ran[Worker(0, 1)] > 3, "it has run both iterations"
    with pytest.raises(IndexError):
        ran.clear()
        _without_news({}, took)
