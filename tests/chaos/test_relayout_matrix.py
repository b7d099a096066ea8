"""Layers move after a death, and a second worker is killed at every op of the iterations in which they do.

The state comes slowly, so that the hand-over lasts some iterations: kills fall into its beginning, its middle, the
iteration in which all have gone over, and the ones after it.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from openrecycle.agent.config.options import HandOver, Optimization
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import ENDLESS, TINY, LocalJob, Message, uncut
from tests.agent.rearranging import Rearranging
from tests.agent.test_relayout import WAYS, of_several_ranks

pytestmark = pytest.mark.processes

GRID = {"pipelines": 3, "stages": 2, "micro_batches": 2}
LAYERED = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", TINY | {"layers": 4})
ITERATIONS = 12
FIRST = "W2_1@1:F0"
SECOND = ("W0_0", "W1_0", "W2_0", "W0_1", "W1_1")
OPS = ("F0", "I0", "W0", "F1", "I1", "W1", "R", "O", "V")
WISHES = {
    "clipped": Optimization(clip_norm=0.3),
    "synchronous": Optimization(clip_norm=0.3, synchronous=True),
    "sharded": Optimization(clip_norm=0.3, sharding="zero1"),
}


class Moving(Rearranging):
    partitions = {2: (3, 1)}  # noqa: RUF012 -- as in its base


def _run(
    wish: str, kills: tuple[str, ...], rate: float | None = None, decides: type = Moving, **given: Any
) -> LocalJob:
    hand_over = HandOver(at_once=0, rate=rate)
    given = {"iterations": ITERATIONS} | given
    return LocalJob(
        **GRID,
        **given,
        workload=LAYERED,
        optimization=WISHES[wish],
        hand_over=hand_over,
        pace=0.004,
        kills=kills,
        decides=decides,
    ).run()


@pytest.fixture(scope="module", params=WISHES)
def calm(request: pytest.FixtureRequest) -> tuple[str, LocalJob]:
    return request.param, LocalJob(
        **GRID, iterations=ITERATIONS, workload=LAYERED, optimization=WISHES[request.param]
    ).run()


@pytest.mark.parametrize("iteration", range(1, 7))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("second", SECOND)
def test_a_second_death_while_layers_move(calm: tuple[str, LocalJob], second: str, op: str, iteration: int) -> None:
    wish, undisturbed = calm
    if wish == "sharded" and second[-1] == FIRST[3] and iteration == 1:
        pytest.skip("both owners of a part of the optimizer's state die before anybody else has a copy")
    job = _run(wish, (FIRST, f"{second}@{iteration}:{op}"), rate=4e5)
    assert job.dead == sorted([FIRST[:4], second])
    assert job.losses == undisturbed.losses and job.lines[-1] == undisturbed.lines[-1]
    assert [line["relayout"]["partition"] for line in job.lines if "relayout" in line] == [[3, 1]]


class ChosenMeanwhile(Rearranging):
    """Others are chosen once a second worker has died, whoever has gone over to the first ones by then."""

    partitions = {2: (3, 1), 3: (1, 3)}  # noqa: RUF012 -- as in its base


@pytest.mark.parametrize("iteration", range(2, 6))
@pytest.mark.parametrize("op", ["F0", "R", "O", "V"])
@pytest.mark.parametrize("second", ["W0_0", "W1_1"])
def test_other_layers_are_chosen_while_layers_move(
    calm: tuple[str, LocalJob], second: str, op: str, iteration: int
) -> None:
    wish, undisturbed = calm

    def act(job: LocalJob, line: Message) -> None:
        if "relayout" in line and line["relayout"]["partition"] == [1, 3]:
            job.launcher.end_at(job.iterations[-1]["iteration"] + 4)

    kills = (FIRST, f"{second}@{iteration}:{op}")
    job = _run(wish, kills, rate=4e5, decides=ChosenMeanwhile, iterations=ENDLESS, on_line=act)
    assert job.dead == sorted([FIRST[:4], second])
    assert job.losses[:ITERATIONS] == undisturbed.losses[: len(job.losses)]
    whole = uncut(**GRID, iterations=len(job.losses), workload=LAYERED, optimization=WISHES[wish])
    assert job.losses == whole.losses and job.lines[-1] == whole.lines[-1]


@pytest.fixture(scope="module", params=[(way, wish) for way in WAYS for wish in ("clipped", "sharded")], ids="-".join)
def calm_ranks(request: pytest.FixtureRequest) -> tuple[dict[str, Any], LocalJob]:
    way, wish = request.param
    grid = of_several_ranks(way, pipelines=3) | {"optimization": WISHES[wish]}
    return grid, LocalJob(**grid, iterations=ITERATIONS).run()


@pytest.mark.parametrize("iteration", [2, 3])
@pytest.mark.parametrize("op", ["F0", "O"])
@pytest.mark.parametrize("second", ["W0_0.1", "W0_1.1"])
def test_a_rank_dies_while_layers_move(
    calm_ranks: tuple[dict[str, Any], LocalJob], second: str, op: str, iteration: int
) -> None:
    """Of a worker that gets layers, or of one that gives them."""
    grid, undisturbed = calm_ranks
    if grid["optimization"].sharding == "zero1" and second[3] == FIRST[3]:
        pytest.skip("both owners of a part of the optimizer's state may die before anybody else has a copy")
    job = LocalJob(
        **grid,
        iterations=ITERATIONS,
        hand_over=HandOver(at_once=0, rate=2e5),
        pace=0.004,
        kills=("W2_1.1@1:F0", f"{second}@{iteration}:{op}"),
        decides=Moving,
    ).run()
    assert job.dead == sorted(["W2_1", second[:4]])
    assert job.losses == undisturbed.losses and job.lines[-1] == undisturbed.lines[-1]
    assert [line["relayout"]["partition"] for line in job.lines if "relayout" in line] == [[3, 1]]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("kind", ["adopted", "formed", "rearranged"])
@pytest.mark.parametrize("second", ["W0_0", "W1_1"])
def test_a_rank_dies_at_any_moment_of_a_change(
    calm_ranks: tuple[dict[str, Any], LocalJob], second: str, kind: str, workers: int
) -> None:
    """Once so many workers have said that they are there: while layers are built, come, and are taken into use."""
    grid, undisturbed = calm_ranks
    if grid["optimization"].sharding == "zero1" and second[3] == FIRST[3]:
        pytest.skip("both owners of a part of the optimizer's state may die before anybody else has a copy")
    killed: list[int] = []
    """In which generation; on a busy machine the second may not come together, and another follows."""

    def hear(job: LocalJob, worker: str, message: Message) -> None:
        generation = message.get("generation", 0)
        if message["kind"] != kind or generation < 2 or killed:
            return
        if len(job.said(kind, generation=generation)) == workers:
            killed.append(generation)
            job.signal(second, signal.SIGKILL)

    job = LocalJob(
        **grid,
        iterations=ITERATIONS,
        hand_over=HandOver(at_once=0),
        pace=0.01,
        kills=("W2_1.1@1:F0",),
        decides=Moving,
        on_message=hear,
    ).run()
    assert job.dead == sorted(["W2_1", second])
    assert job.losses == undisturbed.losses and job.lines[-1] == undisturbed.lines[-1]
    assert [line["relayout"]["partition"] for line in job.lines if "relayout" in line] == [[3, 1]]
