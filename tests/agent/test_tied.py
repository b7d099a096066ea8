"""Parameters that layers share: one value everywhere, however the model is cut and whoever dies."""

from __future__ import annotations

import copy
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from openrecycle.agent.config.devices import Mode
from openrecycle.agent.config.options import HandOver, Optimization
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.jobs.callables import CallableWorkload, Model
from openrecycle.agent.models.layers import LayerStack, build_layers, tied_of
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.workers.reduction import Route, TiedSums, routes
from openrecycle.planner.jobs.job import Worker
from tests.agent.local_jobs import TINY, LocalJob, Message, uncut
from tests.agent.rearranging import Rearranging
from tests.conftest import at_length

LAYERS = 6
CLIP = Optimization(clip_norm=0.3)
OPTIONS: dict[str, Any] = TINY | {"layers": LAYERS, "tied": True, "dropout": 0.0}
TIED = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", OPTIONS)


def test_who_tells_whom_about_what() -> None:
    living = [Worker.parse(name) for name in ("W0_0", "W1_0", "W1_2", "W0_1")]
    found = routes((("0.a", "5.b"), ("0.c", "1.c")), (2, 2, 2), living)
    assert found == (
        Route(Worker(0, 0), Worker(1, 2), ("0.a",)),
        Route(Worker(1, 2), Worker(0, 0), ("5.b",)),
        Route(Worker(1, 2), Worker(1, 0), ("5.b",)),
    )


class Twice(nn.Module):
    """Has the one parameter under two names."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.first.weight = self.second.weight = weight


def test_what_a_layer_shares_within_itself_it_shares_on_with_its_copy() -> None:
    table = nn.Embedding(8, 8)
    model = Model(layers=[table, Twice(table.weight)], loss=nn.functional.mse_loss)
    given = CallableWorkload(model, *[None] * 3, 0)  # type: ignore[arg-type]
    stack = build_layers(given, range(1, 2), 2, 0)
    (own,) = stack.parameters()
    assert own is not table.weight and torch.equal(own, table.weight)
    layer = dict(stack.layers)[1]
    assert layer.get_parameter("first.weight") is layer.get_parameter("second.weight") is own


def test_layers_that_are_wrapped_share_by_the_names_that_their_owner_sees() -> None:
    """As for activation checkpointing, with whole layers in wrappers."""
    table, head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    head.weight = table.weight
    model = Model(layers=[checkpoint_wrapper(table), checkpoint_wrapper(head)], loss=nn.functional.mse_loss)
    given = CallableWorkload(model, *[None] * 3, 0)  # type: ignore[arg-type]
    (names,) = tied = tied_of(given, 2)  # type: ignore[arg-type]
    stack, me = build_layers(given, range(2), 2, 0), Worker(0, 0)
    assert set(names) == set(dict(stack.named_parameters())) and stack.copies == {names[1]}
    sums = SUM_OF["deterministic"](stack.parameters(), terms=1)
    for parameter in sums.parameters:
        sums.add(parameter, torch.ones(8, 8))
    optimizer = StageOptimizer(stack, torch.optim.SGD(stack.parameters(), lr=1.0), sums)
    groups: Any = None  # nothing goes to another stage
    TiedSums(me, groups, tied, (2,), [me]).sum(0, optimizer)
    before = table.weight.detach().clone()
    optimizer.step()
    for parameter in stack.parameters():
        assert torch.equal(parameter, before - 2)


def _reference(iterations: int) -> list[float]:
    """Losses of one process in which the two are one parameter."""
    task = Gpt(**OPTIONS)
    stack = build_layers(task, range(LAYERS), LAYERS, 0)
    layers = dict(stack.layers)
    layers[LAYERS - 1].get_submodule("2").weight = layers[0].get_parameter("0.token.weight")  # type: ignore[assignment]
    model = nn.Sequential(*layers.values())
    optimizer = task.optimizer(model.parameters())
    losses = []
    for i in range(iterations):
        cells = [(0, i, p, m) for p in range(2) for m in range(4)]
        loss: Tensor = sum((task.loss(model(task.inputs(*c)), task.targets(*c)) / 8 for c in cells), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", SUM_OF)
@pytest.mark.parametrize(("gradient", "fits"), [(1000.0, True), (3500.0, False), (-3500.0, False)])
def test_a_sum_over_copies_that_is_out_of_range_is_not_stepped(gradient: float, fits: bool, mode: Mode) -> None:
    """Though that of each copy is in range."""
    layers = {number: nn.Linear(2, 2, bias=False) for number in range(3)}
    stack, me = LayerStack(layers, frozenset({"1.weight", "2.weight"})), Worker(0, 0)
    sums = SUM_OF[mode](stack.parameters(), terms=1)
    for parameter in sums.parameters:
        sums.add(parameter, torch.full((2, 2), gradient))
    optimizer = StageOptimizer(stack, torch.optim.SGD(stack.parameters()), sums)
    groups: Any = None  # nothing goes to another stage
    TiedSums(me, groups, (("0.weight", "1.weight", "2.weight"),), (3,), [me]).sum(0, optimizer)
    sums.write_gradients()
    assert bool(sums.rejected) == (not fits and mode == "deterministic")
    if not sums.rejected:
        assert [p.grad.unique().tolist() for p in sums.parameters if p.grad is not None] == [[3 * gradient]] * 3


@pytest.fixture(scope="module")
def calm() -> LocalJob:
    return uncut(iterations=8, workload=TIED, optimization=CLIP)


@pytest.mark.processes
def test_it_trains_as_one_parameter_does(calm: LocalJob) -> None:
    for ours, theirs in zip(map(float.fromhex, calm.losses), _reference(8), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("partition", [(4, 1, 1), at_length((5, 1))])
def test_the_partition_does_not_show(calm: LocalJob, partition: tuple[int, ...]) -> None:
    job = LocalJob(stages=len(partition), iterations=8, workload=TIED, optimization=CLIP, partition=partition).run()
    assert job.losses == calm.losses and job.lines[-1] == calm.lines[-1]


class Moving(Rearranging):
    """After the first death, when its worker is back, and after the second death."""

    partitions = {2: (3, 1, 2), 4: (1, 4, 1)}  # noqa: RUF012 -- as in its base


@pytest.mark.chaos
@pytest.mark.processes
def test_a_death_a_move_a_return_a_death_a_move_and_a_return() -> None:
    """The two copies are on the first and last stage all along, and what lies between moves."""
    long = 28
    undisturbed = uncut(iterations=long, workload=TIED, optimization=CLIP)
    back: list[str] = []

    def act(job: LocalJob, line: Message) -> None:
        if "relayout" in line:
            job.start("W1_1" if line["relayout"]["generation"] == 2 else "W0_0")

    def hear(job: LocalJob, worker: str, message: Message) -> None:
        if message["kind"] == "formed" and worker == "W1_1" and message["generation"] == 3 and not back:
            back.append(worker)
            job.signal("W0_0", signal.SIGKILL)

    job = LocalJob(
        iterations=long,
        workload=TIED,
        optimization=CLIP,
        decides=Moving,
        hand_over=HandOver(at_once=0),
        pace=0.009,
        kills=("W1_1@1:I2",),
        on_line=act,
        on_message=hear,
    ).run()
    assert sorted(job.dead) == ["W0_0", "W1_1"] and job.iterations[-1]["living"] == 6
    assert [line["relayout"]["partition"] for line in job.lines if "relayout" in line] == [[3, 1, 2], [1, 4, 1]]
    assert job.losses == undisturbed.losses and job.lines[-1] == undisturbed.lines[-1]


def test_copies_have_one_value_and_are_apart() -> None:
    stack = build_layers(Gpt(**OPTIONS), range(LAYERS), LAYERS, 3)
    first, head = (dict(stack.named_parameters())[name] for name in ("0.0.token.weight", "5.2.weight"))
    assert torch.equal(first, head) and first is not head
    alone = dict(build_layers(Gpt(**OPTIONS), range(5, 6), LAYERS, 3).named_parameters())
    assert torch.equal(alone["5.2.weight"], first)
    assert copy.deepcopy(stack).copies == {"5.2.weight"}
