"""Stages that are profiled run as workers run them: the executor's ops, all of them, side by side."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from openrecycle.agent.config.devices import Mode
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.models.layers import TensorSpec
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.profiling import (
    MeasuringError,
    NullGroup,
    ProfilingEffort,
    StageBenchmark,
    StageRun,
    batches,
    measure_stages,
    measure_step,
    measure_workload,
    script_of,
)
from openrecycle.planner.jobs.job import Job, Worker
from tests.golden import golden

TINY = {"width": 32, "heads": 2, "sequence": 16, "batch": 2}
GPT = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", TINY)


class OfAnyLength(Gpt):
    """Its micro-batches have other lengths, and the largest has 16 tokens a sample."""

    varies = True

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> torch.Tensor:
        return super().inputs(seed, iteration, pipeline, micro_batch)[:, : 2 + micro_batch]

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> torch.Tensor:
        return super().targets(seed, iteration, pipeline, micro_batch)[:, : 2 + micro_batch]

    def largest(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().inputs(seed, 0, 0, 0), super().targets(seed, 0, 0, 0)


class WithoutDisk(Gpt):
    """Its data can be read in the first iteration only."""

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> torch.Tensor:
        if iteration:
            raise OSError("the disk is gone")
        return super().inputs(seed, iteration, pipeline, micro_batch)


def told(stages: int, width: int, pipelines: int = 2) -> list[list[str]]:
    return [list(map(str, batch)) for batch in batches(Job(pipelines, stages, 1), width)]


def test_as_many_stages_at_once_as_the_machine_runs_workers() -> None:
    assert told(2, 2) == [["W0_0", "W0_1"]]
    assert told(4, 2) == [["W0_0", "W0_1"], ["W0_2", "W0_3"]]
    # Nobody is measured alone where others would run beside it.
    assert told(3, 2) == [["W0_0", "W0_1"], ["W0_2", "W0_0"]]
    assert told(1, 8) == [["W0_0", "W1_0"]]
    assert told(2, 8) == [["W0_0", "W0_1", "W1_0", "W1_1"]]
    assert told(1, 8, pipelines=1) == [["W0_0"]]


@pytest.mark.parametrize(("stage", "order"), [(0, "FFIWFIWIWO"), (1, "FIWFIWFIWO")])
def test_the_order_is_that_of_1f1b(stage: int, order: str) -> None:
    script = script_of(Worker(1, stage), Job(2, 2, 3))
    assert "".join(op.kind for op in script.ops) == order
    assert set(script.before.values()) == ({Worker(1, 0)} if stage else set())
    assert set(script.after.values()) == (set() if stage else {Worker(1, 1)})


def test_a_round_times_every_op_once() -> None:
    """With a clock that counts how often it is looked at: the times add up to the whole round."""
    looks = iter(range(10_000))
    run = StageRun(Worker(0, 1), Job(1, 2, 3), GPT, Optimization(), ProfilingEffort(1, 0), 1)
    bench = StageBenchmark(run, lambda: float(next(looks)))
    for _ in range(2):
        before = next(looks)
        times = bench.round()
        whole = next(looks) - before - 2
        assert times.keys() == {"F", "I", "W", "O"}
        assert 3 * (times["F"] + times["I"] + times["W"]) + times["O"] == whole


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
@pytest.mark.parametrize(("pipelines", "share"), [(1, 1.0), (2, 1.0), (8, 0.25)])
def test_of_a_sharded_optimizer_a_worker_steps_its_share(pipelines: int, share: float, mode: Mode) -> None:
    optimization = Optimization(mode=mode, sharding="zero1", clip_norm=1.0)
    run = StageRun(Worker(0, 1), Job(pipelines, 2, 1), GPT, optimization, ProfilingEffort(1, 0), 1)
    stepped = []
    bench = StageBenchmark(run)

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped.append(sum(p.numel() for group in optimizer.param_groups for p in group["params"]))

    handle = register_optimizer_step_pre_hook(count)
    try:
        for _ in range(2):
            assert bench.round()["O"] > 0
    finally:
        handle.remove()
    whole = bench.reduced_bytes / (8 if mode == "deterministic" else 4)
    assert sum(stepped) / 2 == pytest.approx(share * whole, rel=0.05 if share == 1 else 0.5), (
        "small parameters are not cut"
    )


def test_neighbours_have_what_a_stage_waits_for() -> None:
    between = ((TensorSpec((2, 3), "float32"), TensorSpec((4,), "int64", False)), (TensorSpec((5,), "float32"),))
    job = Job(1, 3, 2)
    alone = NullGroup(Worker(0, 1), between)

    class Layout:
        outgoing = between[1]

    transfers = alone.transfers(Layout())
    data = transfers.receive("F", (0, 0))
    assert data[0].shape == (2, 3) and data[0].abs().sum() > 0 and data[1].tolist() == [0] * 4
    assert list(transfers.receive("I", (0, 0))) == [0]
    # What is received is the receiver's own.
    data[0].zero_()
    assert transfers.receive("F", (0, 1))[0].abs().sum() > 0
    transfers.begin(0, script_of(Worker(0, 1), job))
    transfers.send("F", (0, 0), {0: torch.zeros(5)})
    transfers.let_go()


def test_of_inputs_of_several_shapes_the_largest_are_measured() -> None:
    """The neighbours that a stage is measured with know no other shape."""
    varied = NamedWorkload(f"{__name__}:OfAnyLength", TINY)
    for stage in range(2):
        run = StageRun(Worker(0, stage), Job(1, 2, 2), varied, Optimization(), ProfilingEffort(1, 0), 1)
        assert StageBenchmark(run).round()["F"] > 0
    assert measure_step(varied, Job(1, 2, 2), Optimization()) > 0


@pytest.mark.processes
def test_the_bytes_of_a_profile_are_those_of_the_largest_inputs() -> None:
    held = []
    for name in ("openrecycle.agent.examples.gpt:Gpt", f"{__name__}:OfAnyLength"):
        effort = ProfilingEffort(1, 0)
        measured = measure_workload(name, TINY, (1, 1, 1), Optimization(), effort, lambda _: None)
        held.append([(part.activation_bytes, part.weight_backward_bytes) for part in measured.parts])
    assert held[0] == held[1]


@pytest.mark.processes
def test_what_a_stage_raises_is_said() -> None:
    gone = NamedWorkload(f"{__name__}:WithoutDisk", TINY)
    with pytest.raises(MeasuringError, match="the disk is gone"):
        measure_stages(gone, Job(1, 1, 1), Optimization(), ProfilingEffort(2, 0), lambda _: None)


class NoData(Gpt):
    """Its data can't be read."""

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> torch.Tensor:
        raise OSError("the disk is gone")


def test_data_that_can_not_be_read_end_no_profile_with_a_traceback() -> None:
    with pytest.raises(MeasuringError, match="the disk is gone"):
        measure_workload(f"{__name__}:NoData", TINY, (1, 1, 1), Optimization(), ProfilingEffort(1, 0), lambda _: None)


@pytest.mark.processes
def test_stages_are_measured_in_processes_of_their_own() -> None:
    said: list[str] = []
    found = measure_stages(GPT, Job(1, 2, 2), Optimization(), ProfilingEffort(3, 1), said.append)
    assert len(found) == 2 and all(stage.keys() == {"F", "I", "W", "O"} for stage in found)
    assert all(len(times) % 3 == 0 and min(times) > 0 for stage in found for times in stage.values())
    assert "stage 0" in " ".join(said)
    with pytest.raises(MeasuringError, match=golden("stage-cant-be-run-inputerror")):
        measure_stages(NamedWorkload("no.such:thing"), Job(1, 1, 1), Optimization(), ProfilingEffort(1, 0), said.append)
