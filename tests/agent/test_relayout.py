"""Layers move between stages while a job trains, and it ends with the bits of one in which nothing moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.options import Faults, HandOver, Optimization
from openrecycle.agent.coordination.generations import worth_moving
from openrecycle.agent.models.workload import PROBED, NamedWorkload
from openrecycle.agent.workers.relayout import Move, moves
from openrecycle.planner.jobs.job import Worker
from tests.agent.local_jobs import ENDLESS, TINY, LocalJob, Message, uncut
from tests.agent.rearranging import rearranging
from tests.conftest import at_length

LAYERS = 6
LAYERED = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", TINY | {"layers": LAYERS})
CLIP = Optimization(clip_norm=0.3)


def _workers(*names: str) -> list[Worker]:
    return list(map(Worker.parse, names))


def test_who_gives_which_layers_to_whom() -> None:
    living = _workers("W0_0", "W1_0", "W0_1", "W0_2", "W1_2")
    found = moves((2, 2, 2), (3, 1, 2), living)
    assert found == (
        Move(*_workers("W0_0", "W0_1"), 2, 3),
        Move(*_workers("W1_0", "W0_1"), 2, 3),
    )
    # From several stages, and spread over the givers; in the next attempt from others.
    found = moves((2, 2, 2), (1, 4, 1), living)
    taken = [(str(m.source), m.first, m.after) for m in found]
    assert {str(m.to) for m in found} == {"W0_1"} and taken == [("W0_0", 1, 2), ("W0_2", 4, 5)]
    other = moves((2, 2, 2), (1, 4, 1), living, attempt=1)
    assert [str(m.source) for m in other] == ["W1_0", "W1_2"]
    assert moves((2, 2, 2), (2, 2, 2), living) == ()


def _job(iterations: int, partitions: dict[int, tuple[int, ...]], **given: Any) -> LocalJob:
    decides = rearranging(partitions)
    given = {"workload": LAYERED, "optimization": CLIP} | given
    return LocalJob(iterations=iterations, decides=decides, **given).run()


@pytest.fixture(scope="module")
def calm() -> LocalJob:
    return uncut(iterations=8, workload=LAYERED, optimization=CLIP)


@pytest.mark.processes
@pytest.mark.parametrize("undo", [at_length(False), at_length(True)])
def test_layers_of_a_sharded_optimizer_move(undo: bool) -> None:
    """And back, with a death in between, however long a worker takes to return; each worker of a stage has a part of
    what goes to another."""
    wanted = Optimization(clip_norm=0.3, synchronous=not undo)
    sharded = replace(wanted, sharding="zero1")
    grid = {"pipelines": 3, "stages": 2, "micro_batches": 2}

    def act(job: LocalJob, line: Message) -> None:
        if "relayout" not in line:
            return
        if line["relayout"]["partition"] == [3, 3]:
            job.launcher.end_at(job.iterations[-1]["iteration"] + 4)
        elif line["relayout"]["generation"] == 2:
            job.start("W1_1")

    kills = ("W1_1@1:F1", "W0_0@5:I1")
    job = _job(ENDLESS, {2: (4, 2), 4: (3, 3)}, **grid, kills=kills, on_line=act, optimization=sharded, pace=0.01)
    changes = [line["relayout"]["partition"] for line in job.lines if "relayout" in line]
    assert changes == [[4, 2], [3, 3]]
    calm = uncut(**grid, iterations=len(job.losses), workload=LAYERED, optimization=wanted)
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


@pytest.mark.processes
@pytest.mark.parametrize("at_once", [at_length(None), 0], ids=["with the description", "piece by piece"])
def test_after_a_death_layers_move_and_the_bits_stay(calm: LocalJob, at_once: int | None) -> None:
    hand_over = HandOver() if at_once is None else HandOver(at_once=at_once)
    job = _job(8, {2: (3, 1, 2)}, kills=("W1_1@2:F1",), hand_over=hand_over)
    assert job.dead == ["W1_1"]
    changes = [line["relayout"] for line in job.lines if "relayout" in line]
    assert [(c["generation"], c["partition"]) for c in changes] == [(2, [3, 1, 2])]
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


@pytest.mark.chaos
@pytest.mark.processes
def test_layers_move_and_move_back_when_the_worker_returns() -> None:
    long = 30  # paced, so that the worker has time to come back
    calm = uncut(iterations=long, workload=LAYERED, optimization=CLIP)

    def act(job: LocalJob, line: Message) -> None:
        if "relayout" in line and line["relayout"]["generation"] == 2:
            job.start("W1_1")

    kills = ("W1_1@1:F1", "W0_0@5:I1")
    job = _job(long, {2: (3, 1, 2), 4: (2, 2, 2)}, kills=kills, on_line=act, pace=0.01)
    changes = [line["relayout"]["partition"] for line in job.lines if "relayout" in line]
    assert changes == [[3, 1, 2], [2, 2, 2]]
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


@pytest.mark.chaos
@pytest.mark.processes
def test_layers_go_on_to_move_after_a_worker_has_come_back_in_between() -> None:
    """What was on its way is dropped while the newcomer takes its state, and nothing else would begin it again."""

    def act(job: LocalJob, line: Message) -> None:
        if "failure" in line:
            job.start("W1_1")  # layers are on their way, slowly
        elif "relayout" in line:
            job.launcher.end_at(job.iterations[-1]["iteration"] + 4)

    slow = HandOver(at_once=0, rate=40_000)
    job = _job(ENDLESS, {2: (3, 1, 2)}, kills=("W1_1@1:F1",), hand_over=slow, on_line=act, pace=0.01)
    changes = [line["relayout"] for line in job.lines if "relayout" in line]
    assert [(c["generation"] > 2, c["partition"]) for c in changes] == [(True, [3, 1, 2])]
    calm = uncut(iterations=len(job.losses), workload=LAYERED, optimization=CLIP)
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


@pytest.mark.chaos
@pytest.mark.processes
def test_an_op_that_raises_while_layers_move_ends_nobody() -> None:
    """Whoever is to try the micro-batch is named for the plan of all, and there is no interim plan meanwhile."""
    bad = NamedWorkload("tests.agent.poisoned:Poisoned", {"inputs": [(3, 0, 1)], **TINY, "layers": LAYERS})
    told: dict[str, Any] = {"workload": bad, "faults": Faults(on_bad_sample="skip")}

    def act(job: LocalJob, line: Message) -> None:
        if "relayout" in line:
            job.launcher.end_at(job.iterations[-1]["iteration"] + 4)

    slow = HandOver(at_once=0, rate=40_000)
    job = _job(ENDLESS, {2: (3, 1, 2)}, kills=("W1_1@1:F1",), hand_over=slow, on_line=act, pace=0.01, **told)
    raised = [i for i, line in enumerate(job.lines) if "raised" in line]
    moved = [i for i, line in enumerate(job.lines) if "relayout" in line]
    assert job.dead == ["W1_1"] and raised and len(moved) == 1 and raised[0] < moved[0]
    calm = LocalJob(iterations=len(job.losses), optimization=CLIP, **told).run()
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


WAYS = ("tensor_parallel", "fully_sharded")
"""In which the layers of examples are split over the ranks of a worker; or `both`."""


def of_several_ranks(way: str, pipelines: int = 2) -> dict[str, Any]:
    """A small job whose workers are two ranks each, or for both ways four."""
    example = "tensor_parallel" if way == "both" else way
    return {
        "pipelines": pipelines,
        "stages": 2,
        "micro_batches": 1,  # iterations of so many processes take CPU time
        "workload": NamedWorkload(f"openrecycle.agent.examples.{example}:Gpt", TINY | {"layers": 4}),
        "platform": Platform(ranks_per_worker=4, mesh="2x2") if way == "both" else Platform(ranks_per_worker=2),
        "divided": way != "tensor_parallel",
    }


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.parametrize("way", [*WAYS, "both"])
@pytest.mark.parametrize("sharding", ["none", at_length("zero1")])
def test_layers_of_workers_of_several_ranks_move_and_move_back(way: str, sharding: Any) -> None:
    """After the death of a rank, and when its worker is back; until then a job without an end trains."""
    grid = of_several_ranks(way) | {"optimization": Optimization(clip_norm=0.3, sharding=sharding), "micro_batches": 2}

    def act(job: LocalJob, line: Message) -> None:
        if "relayout" not in line:
            return
        if line["relayout"]["partition"] == [2, 2]:
            job.launcher.end_at(job.iterations[-1]["iteration"] + 4)
        else:
            job.start("W1_1")

    job = LocalJob(
        **grid,
        iterations=ENDLESS,
        kills=("W1_1.1@1:F0",),
        relayout="always",
        hand_over=HandOver(at_once=0),
        pace=0.1,
        on_line=act,
    ).run()
    assert job.dead == ["W1_1"]
    assert [line["relayout"]["partition"] for line in job.lines if "relayout" in line] == [[3, 1], [2, 2]]
    calm = LocalJob(**grid, iterations=len(job.losses)).run()
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_dies_while_layers_of_several_ranks_move(way: str) -> None:
    """Of a worker that gets them, whose other rank ends, too; the one beside it gets them all the same."""
    grid = of_several_ranks(way) | {"optimization": CLIP}
    slowly = HandOver(at_once=0, rate=1e5)
    job = _job(7, {2: (3, 1)}, **grid, kills=("W1_1@1:F0", "W1_0.1@2:F0"), hand_over=slowly, pace=0.02)
    assert job.dead == ["W1_0", "W1_1"]
    assert [line["relayout"]["partition"] for line in job.lines if "relayout" in line] == [[3, 1]]
    calm = LocalJob(**grid, iterations=7).run()
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize("sharding", ["none", at_length("zero1")])
def test_layers_that_can_not_be_built_where_they_should_go_stay(tmp_path: Path, sharding: Any) -> None:
    """Their builder reads weights that are gone by then. Nobody ends, and a person is told once."""
    grid: dict[str, Any] = {"pipelines": 3, "stages": 2, "micro_batches": 2}
    grid |= {"iterations": 10, "optimization": Optimization(sharding=sharding)}
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"weights")
    told = TINY | {"layers": 8}

    def act(job: LocalJob, line: Message) -> None:
        if "iteration" in line:
            weights.unlink(missing_ok=True)

    workload = NamedWorkload("tests.agent.kept_weights:FromFile", {**told, "file": str(weights)})
    job = LocalJob(**grid, workload=workload, relayout="always", kills=("W1_1@2:F0",), pace=0.017, on_line=act).run()
    calm = uncut(**grid, workload=NamedWorkload("openrecycle.agent.examples.gpt:Gpt", told))
    assert job.dead == ["W1_1"] and job.losses == calm.losses and job.lines[-1] == calm.lines[-1]
    assert not [line for line in job.lines if "relayout" in line]
    (warning,) = (line["warning"] for line in job.lines if "warning" in line)
    assert str(weights) in warning


@pytest.mark.processes
@pytest.mark.chaos
def test_layers_that_one_rank_of_a_worker_can_not_build_stay(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"weights")

    def act(job: LocalJob, line: Message) -> None:
        if "iteration" in line:
            weights.unlink(missing_ok=True)

    grid = of_several_ranks("fully_sharded") | {"iterations": 8, "micro_batches": 2}
    told = {**TINY, "layers": 4, "file": str(weights)}
    workload = NamedWorkload("tests.agent.kept_weights:FromFileOfOneRank", told)
    job = LocalJob(
        **grid | {"workload": workload}, relayout="always", kills=("W1_1@2:F0",), pace=0.05, on_line=act
    ).run()
    calm = LocalJob(**grid).run()
    assert job.dead == ["W1_1"] and job.losses == calm.losses and job.lines[-1] == calm.lines[-1]
    warnings = [line["warning"] for line in job.lines if "warning" in line]
    assert len(warnings) == 1 and str(weights) in warnings[0], warnings
    assert not [line for line in job.lines if "relayout" in line]


@pytest.mark.chaos
@pytest.mark.processes
def test_a_stage_whose_backward_can_not_be_tried_any_more_keeps_it_whole(tmp_path: Path) -> None:
    """Layers of two kinds of stages meet, and the data are gone on which it would be tried how to split them."""
    kept = tmp_path / "first-batches"
    kept.write_bytes(b"data")

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == PROBED:
            kept.unlink()

    told = {"file": str(kept), "layers": LAYERS}
    workload = NamedWorkload("tests.agent.kept_weights:PassingData", told)
    kills = (f"W1_1@{PROBED + 2}:F1",)
    job = _job(PROBED + 6, {2: (3, 1, 2)}, workload=workload, kills=kills, on_line=act)
    assert job.dead == ["W1_1"] and [line["relayout"]["partition"] for line in job.lines if "relayout" in line] == [
        [3, 1, 2]
    ]
    assert any(str(kept) in line["warning"] for line in job.lines if "warning" in line)
    kept.write_bytes(b"data")
    calm = uncut(iterations=PROBED + 6, workload=workload, optimization=CLIP)
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


def test_a_move_is_worth_its_cost_by_the_hour() -> None:
    assert worth_moving(100.0, 99.0, 30.0)[0]  # 36 s an hour for 30
    assert not worth_moving(100.0, 99.0, 40.0)[0]
    assert not worth_moving(100.0, 101.0, 0.0)[0]


def test_a_move_is_worth_its_cost_by_what_is_left_of_the_job() -> None:
    assert worth_moving(100.0, 90.0, 1.0, left=11)[0]  # a tenth of 11 iterations for one
    assert not worth_moving(100.0, 90.0, 1.0, left=10)[0]
    assert not worth_moving(100.0, 90.0, 0.0, left=10)[0]


@pytest.mark.chaos
@pytest.mark.processes
def test_a_job_moves_layers_by_itself_and_moves_them_back() -> None:
    """Re-routed at once; the better partition follows; when the worker is back, so does the one without failures."""
    long = 36
    grid = {"pipelines": 3, "stages": 2, "micro_batches": 2}
    workload = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", TINY | {"layers": 8})
    undisturbed = uncut(**grid, iterations=long, workload=workload)

    def act(job: LocalJob, line: Message) -> None:
        if "relayout" in line and line["relayout"]["partition"] != [4, 4]:
            job.start("W1_1")

    job = LocalJob(
        **grid,
        iterations=long,
        workload=workload,
        relayout="always",
        kills=("W1_1@2:F0",),
        pace=0.017,
        on_line=act,
    ).run()
    first, last = (line["relayout"] for line in job.lines if "relayout" in line)
    assert first["partition"] == [5, 3] and first["moved_layers"] == 1 and first["stall_ms"] > 0
    assert last["partition"] == [4, 4]
    assert job.losses == undisturbed.losses and job.lines[-1] == undisturbed.lines[-1]
