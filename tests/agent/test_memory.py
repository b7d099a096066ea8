"""What workers are said to take, before they start, is what they take."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from openrecycle.agent.config.options import Checkpoints, Mode, Optimization, Planning, TrainingOptions
from openrecycle.agent.jobs import preflight
from openrecycle.agent.jobs.preflight import Machine, check_workload, micro_batch_memory, state_memory
from openrecycle.agent.models import compat
from openrecycle.agent.models.state import StageState
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer, stage_optimizer
from openrecycle.agent.stages.post_validation import CLEAN
from openrecycle.agent.transport import group
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, StageProfile, Worker
from tests.conftest import at_length

ROWS, WIDTH = 64, 32
ROW = 4 * ROWS * WIDTH
"""Bytes of what passes from layer to layer."""


class Chain:
    """Linear layers with a GELU behind each; or one that looks at its numbers."""

    samples_per_micro_batch = ROWS

    def __init__(self, *, looks: bool = False) -> None:
        self.looks = looks

    def layer_count(self, stages: int) -> int:
        return 4

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        return _Looking() if self.looks else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        return torch.ones(ROWS, WIDTH)

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        return torch.zeros(ROWS, WIDTH)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().mean()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)


class _Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * 2 if y.sum().item() > 0 else y * 3


def _options(**changes: Any) -> TrainingOptions:
    return TrainingOptions(job=Job.uniform(2, 2, 3), **changes)


@pytest.fixture(params=[0, 1 << 30], ids=["without data", "for real"])
def tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the first micro-batch is run."""
    monkeypatch.setattr(preflight, "SMALL_BYTES", request.param)


@pytest.mark.usefixtures("tried")
def test_what_a_micro_batch_holds_is_counted() -> None:
    chain: Any = Chain()
    found = micro_batch_memory(chain, (2, 2), 0, None, 1)
    assert found is not None
    first, last = found
    # After F: what enters each Linear and each GELU. After I: what enters each Linear, and the gradient of what leaves
    # it. What leaves the stage is sent, and counted there.
    assert first.forward == first.backward == 4 * ROW
    assert (first.given, first.back, first.received) == (ROW, 0, ROW)
    # The last keeps the output's difference from the targets for the loss, too.
    assert 5 * ROW <= last.forward <= 6 * ROW and (last.given, last.back) == (0, ROW)
    assert ROW <= first.beside <= 4 * ROW


def test_a_layer_that_looks_at_its_numbers_runs_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SMALL_BYTES", 0)
    chain: Any = Chain(looks=True)
    found = micro_batch_memory(chain, (4,), 0, None, 1)
    assert found is not None and found[0].forward > 4 * ROW


@pytest.mark.usefixtures("tried")
def test_a_stage_is_built_as_a_worker_builds_it_and_a_given_model_stays_as_it_is() -> None:
    """With parameters that two layers share, which each stage has a copy of."""
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    linears[3].weight = linears[0].weight

    class Given(Chain):
        def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
            return linears[layer]

        def tied(self, layers: int) -> list[list[str]]:
            return [["0.weight", "3.weight"]]

    given: Any = Given()
    before = [parameter for layer in linears for parameter in layer.parameters()]
    values = [parameter.detach().clone() for parameter in before]
    assert micro_batch_memory(given, (2, 2), 0, None, 1) is not None
    after = [parameter for layer in linears for parameter in layer.parameters()]
    assert all(a is b and a.equal(value) for a, b, value in zip(after, before, values, strict=True))


def test_layers_that_can_not_be_run_are_no_reason_to_refuse() -> None:
    class Broken(Chain):
        def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
            return nn.Linear(WIDTH + layer, WIDTH)

    broken: Any = Broken()
    assert micro_batch_memory(broken, (2, 2), 0, None, 1) is None
    found = check_workload(broken, _options())
    assert found.stages[0].activations == 0 and found.told == ()


@pytest.mark.parametrize(("sharding", "pipelines", "shares"), [("none", 3, 0), ("zero1", 2, 0), ("zero1", 3, 2)])
def test_the_terms_of_peers_are_counted_where_they_come(
    sharding: Literal["none", "zero1"], pipelines: int, shares: int
) -> None:
    """Of two peers, each needs all sums, and both begin them in place."""
    chain: Any = Chain()
    wanted = TrainingOptions(job=Job.uniform(pipelines, 2, 3), optimization=Optimization(sharding=sharding))
    stage = check_workload(chain, wanted).stages[0]
    assert stage.terms == shares * stage.sums // 3


@pytest.mark.usefixtures("tried")
def test_a_loss_that_raises_is_refused_where_workers_do_the_same() -> None:
    class Wrong(Chain):
        def loss(self, output: Tensor, targets: Tensor) -> Tensor:
            return super().loss(output, targets.view(2, ROWS // 4, WIDTH))

    wrong: Any = Wrong()
    with pytest.raises(InputError) as refused:
        check_workload(wrong, _options())
    assert refused.value.field == "loss" and f"targets float32[{ROWS}, {WIDTH}]" in str(refused.value)
    assert micro_batch_memory(wrong, (2, 2), 0, None, 1) is None


@pytest.mark.parametrize(
    ("mode", "clips", "peers"),
    [
        ("deterministic", False, 1),
        ("deterministic", True, 1),
        at_length("deterministic", False, 8),
        at_length("deterministic", True, 3),
        ("deterministic", True, 8),
        at_length("fast", False, 1),
        at_length("fast", True, 1),
        at_length("fast", False, 8),
    ],
)
def test_what_is_kept_beside_activations_is_what_is_said(mode: Mode, clips: bool, peers: int) -> None:
    layers, width = 6, 1024
    with torch.device("meta"):
        shapes = list(_linear(layers, width).named_parameters())
    sharding: Literal["none", "zero1"] = "zero1" if peers > 1 else "none"
    optimization = Optimization(mode=mode, clip_norm=1.0 if clips else None, sharding=sharding)
    said = state_memory(shapes, 8.0, True, optimization, peers)
    live = compat.LiveBytes()
    with live:
        module = _linear(layers, width)
        sums = SUM_OF[mode](module.parameters(), terms=2)
        made, pipelines = torch.optim.AdamW(module.parameters()), peers if peers > 1 else None
        stage = StageOptimizer(module, made, sums, clips=clips, pipelines=pipelines)
        if stage.shards is not None:
            stage.release([k for k, segment in enumerate(stage.shards.segments) if segment.shard % peers > 1])
        for _ in range(3):
            for parameter in sums.parameters:
                rows = torch.ones(2, parameter.shape[0])
                columns = torch.ones(2, parameter.numel() // parameter.shape[0])
                if parameter.dim() == 2:
                    sums.add_product(parameter, rows.t(), columns)
                else:
                    sums.add(parameter, torch.ones_like(parameter))
            if stage.tells_measures:
                stage.take_measures(stage.measures())
            stage.step(None)
            stage.settle(CLEAN)
    assert 0.97 * said.total <= live.now <= 1.03 * said.total


@pytest.mark.parametrize("peers", [1, 3])
def test_what_is_kept_from_a_step_on_is_made_before_anything_is_stepped(peers: int) -> None:
    """Otherwise it comes to lie between what the step takes for a moment, whose memory is then lost."""
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    sums = SUM_OF["deterministic"](module.parameters(), terms=1)
    made, there = torch.optim.AdamW(module.parameters()), list[int]()
    stage = StageOptimizer(module, made, sums, pipelines=peers if peers > 1 else None)
    if stage.shards is not None:
        stage.release([k for k, segment in enumerate(stage.shards.segments) if segment.shard % peers > 1])
    of_torch = made.step

    def step() -> None:
        of_torch()
        for parameter in made.param_groups[0]["params"]:
            parameter.grad = None
        gc.collect()
        there.append(sum(isinstance(one, Tensor) for one in gc.get_objects()))

    made.step = step  # type: ignore[assignment,method-assign]
    for _ in range(2):
        there.clear()
        for parameter in sums.parameters:
            sums.add(parameter, torch.ones_like(parameter))
        stage.step()
    assert len(there) > 2 and max(there) == there[0]


def _linear(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def test_all_that_may_be_there_at_a_time_is_said(tmp_path: Path) -> None:
    chain: Any = Chain()
    few = check_workload(chain, _options(planning=Planning(memory="1")))
    many = check_workload(chain, _options(planning=Planning(memory="3")))
    one = micro_batch_memory(chain, (2, 2), 0, None, 1)
    assert one is not None
    for stage in (0, 1):
        held = max(one[stage].forward, one[stage].backward)
        assert many.stages[stage].activations - few.stages[stage].activations == 2 * held
        assert few.least[stage] < few.stages[stage].total
    assert few.stages[0].checkpoint == 0
    written = check_workload(chain, _options(checkpoints=Checkpoints(directory=str(tmp_path), every=5)))
    state = written.stages[0]
    # Each of the two workers of a stage writes a half.
    assert state.checkpoint == (state.parameters + state.optimizer) // 2
    assert written.of([Worker(0, 0), Worker(1, 0)]) == 2 * state.total


@pytest.mark.parametrize(
    ("technique", "memory", "room", "held"),
    [
        ("staggered", "2", 5, 2),
        ("staggered", "bytes", 5, 5),  # micro-batches whose W is left; one that waits for its I leaves room for two
        ("staggered", "bytes", 18, 6),  # there are no more
        ("adaptive", "bytes", 7, 2),  # a whole B needs all of it until its end
        ("staggered", "none", 5, 3),
    ],
)
def test_in_bytes_more_may_be_in_flight(technique: str, memory: str, room: int, held: int) -> None:
    chain: Any = Chain()
    profile = StageProfile(activation_bytes=3, weight_backward_bytes=1)
    job = Job(2, 2, 3, profiles=(profile,) * 2, capacity_bytes=(room,) * 2)
    said = check_workload(chain, TrainingOptions(job=job, planning=Planning(technique=technique, memory=memory)))
    one = micro_batch_memory(chain, (2, 2), 0, None, 1)
    assert one is not None and one[0].forward == one[0].backward
    assert said.stages[0].activations == one[0].beside + held * one[0].forward
    assert f"activations of {held} micro-batches" in said.text


def test_it_is_checked_against_what_each_machine_has() -> None:
    chain: Any = Chain()
    found = check_workload(chain, _options())
    workers = [Worker(0, 0), Worker(0, 1)]
    assert not found.warning and found.check(workers, found.of(workers), "on node 1") == ""
    assert found.check(workers, None, "on node 1") == ""
    assert found.check(workers, found.of(workers) - 1, "on node 1")
    with pytest.raises(InputError, match="node 1"):
        found.check(workers, sum(found.least) - 1, "on node 1")


def test_a_worker_that_its_capacity_is_too_small_for_is_warned_of() -> None:
    chain: Any = Chain()
    options = _options()
    tight = replace(options, job=replace(options.job, capacity_bytes=(1000, 1000)))
    assert check_workload(chain, tight).warning


@pytest.mark.parametrize("optimization", [Optimization(), Optimization(clip_norm=1.0, sharding="zero1")])
def test_layers_that_move_take_what_they_would_take_from_the_start(optimization: Optimization, tmp_path: Path) -> None:
    chain: Any = Chain()
    checkpoints = Checkpoints(directory=str(tmp_path), every=5)
    options = TrainingOptions(job=Job.uniform(3, 2, 3), optimization=optimization, checkpoints=checkpoints)
    workers, found = list(options.job.workers()), check_workload(chain, options)
    assert found.room(chain, options, [Machine(workers, None)]) is None, "nobody knows what there is"
    assert found.room(chain, options, [Machine(workers, 1 << 30)]) is None, "there is enough for any layers"
    room = found.room(chain, options, [Machine(workers, found.of(workers)), Machine([], 5)])
    assert room is not None and room.places == ((found.of(workers), (3, 3), ""),)
    begun = room.taken((2, 2), (2, 2), (3, 3))
    assert begun == [stage.total for stage in found.stages]
    assert room.refusal((2, 2), (2, 2), (3, 3)) == "" != room.refusal((3, 1), (2, 2), (3, 3))
    moved = check_workload(chain, replace(options, planning=Planning(partition="3,1")))
    # Beside what is received and written at a time, which need not grow with the layers.
    assert room.taken((3, 1), (3, 1), (3, 3)) == pytest.approx([stage.total for stage in moved.stages], rel=0.1)
    old, new = (room.taken((3, 1), (2, 2), (3, 3), running=layers) for layers in ((2, 2), (3, 1)))
    assert (new[0], old[1]) == (room.taken((3, 1), (3, 1), (3, 3))[0], begun[1])
    assert begun[0] < old[0] < new[0] and new[1] < old[1], "what comes is kept before it runs, what goes until then"


@pytest.fixture
def few_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way is little beside a model, as with one of a real size."""
    monkeypatch.setattr(group, "PIECE_BYTES", 8)
    monkeypatch.setattr(group, "UNDER_WAY_BYTES", 128)


@pytest.mark.usefixtures("few_terms")
def test_a_sharded_optimizer_is_read_from_a_checkpoint_as_a_whole_and_that_is_said(tmp_path: Path) -> None:
    class Wide(Chain):
        """Takes more by its parameters than by activations."""

        def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
            return nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), *(nn.Linear(8 * WIDTH, 8 * WIDTH) for _ in range(8)))

        def layer_count(self, stages: int) -> int:
            return 1

        def loss(self, output: Tensor, targets: Tensor) -> Tensor:
            return output.square().mean()

    chain: Any = Wide()
    checkpoints = Checkpoints(directory=str(tmp_path), every=5)
    options = TrainingOptions(job=Job.uniform(32, 1, 1), optimization=Optimization(sharding="zero1"))
    said = check_workload(chain, replace(options, checkpoints=checkpoints)).stages[0]
    beside = said.total - said.resume
    assert said.resume == said.parameters + said.sums + 3 * said.parameters - beside > 0
    assert check_workload(chain, options).stages[0].resume == 0


@pytest.mark.usefixtures("few_terms")
def test_a_stage_that_has_grown_could_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    """Of a sharded optimizer that takes more than to train."""

    class Wide(Chain):
        def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
            wide = (nn.Linear(8 * WIDTH, 8 * WIDTH) for _ in range(4))
            return nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), *wide, nn.Linear(8 * WIDTH, WIDTH))

    chain: Any = Wide()
    job = Job.uniform(32, 2, 1, layers=4)
    checkpoints = Checkpoints(directory=str(tmp_path), every=5)
    options = TrainingOptions(job=job, optimization=Optimization(sharding="zero1"), checkpoints=checkpoints)
    found = check_workload(chain, options)
    assert found.resumed == (6 * found.stages[0].parameters // 2,) * 4
    assert [stage.total for stage in found.stages] == [sum(found.resumed[:2])] * 2, "to train takes less"
    # There is room for what moves, and to read two layers.
    options = replace(options, job=replace(job, capacity_bytes=(8 * found.resumed[0] // 3,) * 2))
    room = found.room(chain, options, [])
    assert room is not None and room.refusal((2, 2), (2, 2), (32, 32)) == ""
    assert room.refusal((3, 1), (2, 2), (32, 32)) != replace(room, resumed=()).refusal((3, 1), (2, 2), (32, 32)) == ""


@pytest.mark.parametrize("optimization", [Optimization(), Optimization(mode="fast"), Optimization(sharding="zero1")])
def test_of_a_stage_that_another_takes_the_place_of_parameters_stay(optimization: Optimization) -> None:
    chain, live = Chain(), compat.LiveBytes()
    with live:
        module = _linear(8, 256)
        sums = SUM_OF[optimization.mode](module.parameters(), terms=1)
        stage = stage_optimizer(chain, module, sums, optimization, 4)  # type: ignore[arg-type]
        for _ in range(2):
            for parameter in sums.parameters:
                sums.add(parameter, torch.ones(parameter.shape))
            stage.step()
        held = live.now
        stage.give_up()
    parameters = sum(p.nbytes for p in module.parameters())
    assert parameters <= live.now < 1.01 * parameters < held / 3
    sums.clear()


def test_what_is_read_of_a_sharded_optimizer_is_given_up_parameter_by_parameter() -> None:
    def stage(optimization: Optimization) -> StageOptimizer:
        module = _linear(8, 256)
        sums = SUM_OF["deterministic"](module.parameters(), terms=1)
        chain: Any = Chain()
        return stage_optimizer(chain, module, sums, optimization, 8)

    writer, reader = stage(Optimization()), stage(Optimization(sharding="zero1"))
    for parameter in writer.gradients.parameters:
        writer.gradients.add(parameter, torch.randn(parameter.shape))
    writer.step()
    written = writer.state()
    whole, live = sum(t.nbytes for t in written.tensors.values()), compat.LiveBytes()
    with live:
        state = StageState(written.document, {name: t.clone() for name, t in written.tensors.items()})
        reader.load_state(state, own=True)
    assert reader.shards is not None and len(reader.shards.segments) > len(reader.shards.of_parameter)
    assert live.most <= 1.1 * whole


def test_each_of_a_stages_workers_has_its_capacity_for_layers_that_move() -> None:
    chain: Any = Chain()
    options = _options()
    total = max(stage.total for stage in check_workload(chain, options).stages)
    options = replace(options, job=replace(options.job, capacity_bytes=(total, total)))
    drawn = torch.get_rng_state()
    room = check_workload(chain, options).room(chain, options, [])
    assert torch.equal(torch.get_rng_state(), drawn)
    assert room is not None and room.places == ((total, (1, 0), ""), (total, (0, 1), ""))
    assert room.refusal((3, 1), (2, 2), (1, 2))


def test_within_bytes_a_layer_that_comes_takes_its_state_alone() -> None:
    """A plan fills the capacity with micro-batches, of whichever partition."""
    chain: Any = Chain()
    options = replace(_options(), planning=Planning(memory="bytes"))
    total = max(stage.total for stage in check_workload(chain, options).stages)
    options = replace(options, job=replace(options.job, capacity_bytes=(total, total)))
    room = check_workload(chain, options).room(chain, options, [])
    assert room is not None and set(room.activations) == {0}
