"""Workers of several ranks whose layers are fully sharded: each rank has a part of every parameter and of every
micro-batch."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from openrecycle.agent.config.options import Optimization
from openrecycle.agent.examples import fully_sharded, tensor_parallel
from openrecycle.agent.examples.gpt import Block
from openrecycle.agent.models import compat
from openrecycle.agent.models.layers import build_layers
from openrecycle.agent.models.parallelized import DividedBatches, OverRanks, Parallelized, parts_of_a_rank
from openrecycle.agent.stages.backward import STRATEGIES
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import stage_optimizer
from openrecycle.planner.jobs.errors import InputError
from tests.agent import rank_stages
from tests.agent.launches import warm
from tests.agent.rank_stages import KINDS, Residual, Shared, Task, train
from tests.agent.runs import Run, forked
from tests.conftest import at_length

ITERATIONS = 5


class Together:
    """The ranks of one worker, each in a process of its own."""

    def __init__(self, ranks: int, folder: Path) -> None:
        warm()
        context = multiprocessing.get_context("forkserver")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_stages.as_rank, args=(rank, ranks, str(folder / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, *what: Any) -> list[dict[str, Tensor]]:
        """What each rank answers."""
        for pipe in self._pipes:
            pipe.send(what)
        return [{k: torch.as_tensor(v) for k, v in pipe.recv().items()} for pipe in self._pipes]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


@pytest.fixture(scope="module", params=[at_length(2), 3])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    ranks = Together(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


# torch's split counts a parameter of two places twice here; in a job it is tried, and not taken.
SPLITS = [(kind, split) for kind in KINDS for split in STRATEGIES if (kind, split) != (Shared, "torch")]


# Each kind of layers once, and each split.
FEW = [(kind, split) for kind, split in SPLITS if split == "deferred" or kind is Residual]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "split"), [split if split in FEW else at_length(*split) for split in SPLITS])
def test_ranks_make_of_a_micro_batch_what_one_process_makes(
    kind: type[nn.Module], split: Any, together: Together
) -> None:
    """The gradients, the loss, changes of buffers, and what goes back to the stage before."""
    alone = train(Task(kind), split, lambda _, gradient: gradient, turned=False)
    answers = together.ask(kind, False, split, False)
    for name, expected in alone.items():
        if name in ("bits", "held"):
            continue
        if name.startswith("of the input"):
            got = torch.cat([answer[name] for answer in answers])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
            continue
        for answer in answers:
            torch.testing.assert_close(answer[name], expected, rtol=1e-4, atol=1e-6)
    assert set(alone) == set(answers[0])
    assert all(answer["held"] == 0 for answer in answers), "between two ops nobody holds whole parameters"


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Residual, rank_stages.Counting])
def test_the_order_of_micro_batches_shows_in_no_bit(kind: type[nn.Module], together: Together) -> None:
    once, turned = (together.ask(kind, True, "deferred", turned) for turned in (False, True))
    for a, b in zip(once, turned, strict=True):
        assert torch.equal(a["bits"], b["bits"])


@pytest.mark.processes
def test_layers_may_be_left_whole(together: Together) -> None:
    alone = train(Task(Residual), "deferred", lambda _, gradient: gradient, turned=False)
    for answer in together.ask(Residual, True, "deferred", False):
        for name in alone:
            if name not in ("bits", "held") and not name.startswith("of the input"):
                torch.testing.assert_close(answer[name], alone[name], rtol=1e-4, atol=1e-6)


# -- jobs ---------------------------------------------------------------------------------------


TINY = {"width": 32, "heads": 2, "sequence": 16, "batch": 2, "dropout": 0.0}
EVALUATED = (
    *("--workload", "tests.agent.rank_stages:Evaluated", "--evaluate-every", "1"),
    *("--workload-options", json.dumps(TINY)),
)


def job(record: Path, *arguments: str, iterations: int = ITERATIONS, batch: int = 2, grid: str = "3x2x3") -> Run:
    """A small model on workers of two ranks each; the first steps are clipped, after the fact."""
    pipelines, stages, micro_batches = grid.split("x")
    options = json.dumps({"width": 32, "heads": 2, "sequence": 16, "batch": batch})
    return forked(
        record,
        *(
            "--pipelines",
            pipelines,
            "--stages",
            stages,
            "--micro-batches",
            micro_batches,
            "--iterations",
            str(iterations),
        ),
        *("--workload", "agent.examples.fully_sharded:Gpt", "--ranks-per-worker", "2", "--clip-norm", "0.5"),
        *("--workload-options", options, *arguments),
    )


def small(record: Path, *arguments: str) -> Run:
    return job(record, *arguments, iterations=4, grid="2x2x2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = small(tmp_path_factory.mktemp("sharded") / "reference.jsonl")
    assert run.status == 0, run.errors
    return run


@pytest.mark.processes
@pytest.mark.parametrize(
    "kill",
    [
        "W1_1.1@2:F1",
        at_length("W0_0.1@2:R"),
        at_length("W1_1@0:F0"),
        at_length("W0_0@2:O"),
        at_length("W1_0.1@2:W1"),
        at_length("W0_1@2:V"),
    ],
)
@pytest.mark.parametrize("kept", [(), at_length(("--keep-finished",))])
def test_the_death_of_a_rank(kill: str, kept: tuple[str, ...], reference: Run, tmp_path: Path) -> None:
    run = small(tmp_path / "run.jsonl", "--kill", kill, *kept)
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert {failure["worker"] for failure in run.failures} == {kill[:4]}


@pytest.mark.chaos
@pytest.mark.processes
def test_a_checkpoint_knows_no_ranks(reference: Run, tmp_path: Path) -> None:
    """A job of whole workers goes on from it; and two hurt workers, made one, from what a peer has."""
    folder = tmp_path / "checkpoints"
    options = ("--checkpoint", str(folder), "--checkpoint-every", "3")
    run = small(tmp_path / "first.jsonl", *options)
    assert run.status == 0 and run.final == reference.final, run.errors
    shutil.rmtree(folder / "iteration-0000000004")
    alone = small(tmp_path / "alone.jsonl", *options, "--resume", "newest", "--ranks-per-worker", "1")
    assert alone.status == 0, alone.errors


@pytest.mark.chaos
@pytest.mark.processes
def test_two_hurt_workers_make_a_whole_one(tmp_path: Path) -> None:
    kills = ("--kill", "W1_1.1@1:F1", "--kill", "W0_0@2:I1")
    hurt, whole = (job(tmp_path / f"{len(k)}.jsonl", *k, iterations=40) for k in (kills, ()))
    assert hurt.status == 0, hurt.errors
    assert hurt.losses == whole.losses and hurt.final == whole.final
    assert hurt.iterations[-1]["living"] == 5


@pytest.mark.chaos
@pytest.mark.processes
def test_an_evaluation_is_of_the_whole_micro_batch(tmp_path: Path) -> None:
    """With dropout switched off it is that of workers of one process, up to rounding."""
    runs = [
        job(tmp_path / f"{ranks}.jsonl", *EVALUATED, "--ranks-per-worker", ranks, iterations=2) for ranks in ("2", "1")
    ]
    assert [run.status for run in runs] == [0, 0], runs[0].errors
    ours, theirs = ([line["evaluation"]["values"] for line in run.lines if "evaluation" in line] for run in runs)
    assert len(ours) == len(theirs) > 0
    first, alone = ({k: float.fromhex(v) for k, v in values[0].items()} for values in (ours, theirs))
    assert first["samples"] == alone["samples"] / 2  # a mean over ranks, each of which has half of them
    assert first["loss"] == pytest.approx(first["loss again"], rel=1e-6)
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-4)


@pytest.mark.chaos
@pytest.mark.processes
def test_what_raises_on_one_rank_alone_ends_the_job(tmp_path: Path) -> None:
    """The others would wait for it."""
    options = json.dumps(TINY | {"bad": True})
    run = job(tmp_path / "run.jsonl", *EVALUATED, "--workload-options", options, iterations=2)
    assert run.status == 1 and "IndexError" in run.errors


@pytest.mark.processes
def test_samples_that_ranks_can_not_share_are_refused_before_the_start(tmp_path: Path) -> None:
    run = job(tmp_path / "run.jsonl", batch=3)
    assert run.status == 2 and "fully sharded" in run.errors and not run.lines


# -- without processes ------------------------------------------------------------------------


class Mixed(fully_sharded.Gpt):
    """A part of each layer by one means, the rest by the other."""

    def parallelize(self, layer: nn.Module, mesh: Any) -> nn.Module:
        for part in list(layer.modules()):
            if isinstance(part, Block):
                parallelize_module(part, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(layer, mesh=mesh)


class Alternating(fully_sharded.Gpt):
    """Some layers by one means, others by the other."""

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        if any(part.out_features == 256 for part in layer.modules() if isinstance(part, nn.Linear)):
            return super().parallelize(layer, mesh)
        parallelize_module(layer[-1], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return layer  # type: ignore[no-any-return]


class Lower(fully_sharded.Gpt):
    """In another type."""

    def parallelize(self, layer: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


class Away(fully_sharded.Gpt):
    """Kept elsewhere."""

    def parallelize(self, layer: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


class Columns(fully_sharded.Gpt):
    """Split along another dimension."""

    def parallelize(self, layer: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))


class Fewer(fully_sharded.Gpt):
    """Over one of the two ranks."""

    def parallelize(self, layer: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(layer, mesh=DeviceMesh(mesh.device_type, [0]))


def test_how_layers_are_split_is_found_out() -> None:
    assert parts_of_a_rank(fully_sharded.Gpt(width=32, heads=2, sequence=16), 3, 2, 0)[0]
    assert not parts_of_a_rank(tensor_parallel.Gpt(width=32, heads=2, sequence=16), 3, 2, 0)[0]


@pytest.mark.parametrize("kind", [Mixed, Alternating, Lower, Away, Columns, Fewer])
def test_what_can_not_be_run_is_refused(kind: type[fully_sharded.Gpt]) -> None:
    with pytest.raises(InputError) as refused:
        parts_of_a_rank(kind(width=32, heads=2, sequence=16), 3, 2, 0)
    assert refused.value.field == "parallelize"


def test_modules_that_were_given_are_left_as_they_were() -> None:
    task = Task(Residual)
    made = [task.build_layer(k, 2, 0) for k in range(2)]
    task.build_layer = lambda layer, layers, seed: made[layer]  # type: ignore[method-assign]
    before = [{name: (type(p), p.shape) for name, p in m.named_parameters()} for m in made]
    assert parts_of_a_rank(task, 2, 2, 0)[0]  # type: ignore[arg-type]
    assert before == [{name: (type(p), p.shape) for name, p in m.named_parameters()} for m in made]
    assert all(type(part).__name__ != "FSDPResidual" for m in made for part in m.modules())


class Tied(Task):
    """Its layers share a parameter."""

    def tied(self, layers: int) -> tuple[tuple[str, ...], ...]:
        return (("0.0.scale.weight", "1.0.scale.weight"),)


def test_within_an_op_the_state_is_that_of_the_parts() -> None:
    """A hand-over reads it from another thread."""
    with compat.imagined_ranks(2) as mesh:
        workload: Any = Parallelized(Task(Residual), 0, mesh, torch.clone, divided=True)  # type: ignore[arg-type]
        module = build_layers(workload, range(1), 2, 0)
        stage = stage_optimizer(workload, module, SUM_OF["fast"](module.parameters(), terms=1), Optimization())
        between = {name: tensor.data_ptr() for name, tensor in stage.state().tensors.items()}
        with OverRanks(layer for _, layer in module.layers).op(together=True):
            assert {name: tensor.data_ptr() for name, tensor in stage.state().tensors.items()} == between


def test_a_parameter_that_layers_share_stays_a_part() -> None:
    with compat.imagined_ranks(2) as mesh:
        workload: Any = Parallelized(Tied(Residual), 0, mesh, torch.clone, divided=True)  # type: ignore[arg-type]
        module = build_layers(workload, range(2), 2, 0)
        parts = {id(shard.local) for _, layer in module.layers for u in layer.over_ranks.units for shard in u.shards}  # type: ignore[union-attr]
    one, other = (module.get_parameter(name) for name in workload.tied(2)[0])
    assert torch.equal(one, other) and one is not other
    assert {id(one), id(other)} <= parts


def test_a_micro_batch_is_divided_into_runs_of_samples() -> None:
    class Data:
        samples_per_micro_batch = 4

        def inputs(self, *_: int) -> Any:
            return torch.arange(4), {"mask": torch.arange(8).view(4, 2)}

    parts: list[Any] = [DividedBatches(Data(), rank, 2).inputs(0, 0, 0, 0) for rank in range(2)]  # type: ignore[arg-type]
    assert [part[0].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert parts[1][1]["mask"].tolist() == [[4, 5], [6, 7]]
    with pytest.raises(InputError):
        DividedBatches(Data(), 0, 3).inputs(0, 0, 0, 0)  # type: ignore[arg-type]


def test_the_loss_is_that_of_the_whole_micro_batch() -> None:
    """Where samples are weighted, as they are weighted; a part that does not count has no loss of its own."""

    class Weighted:
        usual_weight = 1.0

        def weight(self, targets: Tensor) -> float:
            return float((targets >= 0).sum())

        def loss(self, output: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(output, targets, ignore_index=-1)

    output = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for targets in (torch.tensor([0, -1, 2, 1]), torch.tensor([-1, -1, 2, 1]), torch.tensor([0, 1, 2, -1])):
        whole = output.clone().requires_grad_()
        expected = Weighted().loss(whole, targets)
        expected.backward()  # type: ignore[no-untyped-call]
        told: list[Tensor] = []

        def remember(numbers: Tensor, told: list[Tensor] = told) -> Tensor:
            told.append(numbers)
            return numbers.unsqueeze(0)

        parts = [(DividedBatches(Weighted(), r, 2, remember)) for r in range(2)]  # type: ignore[arg-type]
        for r, part in enumerate(parts):
            part.loss(output[2 * r : 2 * r + 2], targets[2 * r : 2 * r + 2])
        rows = torch.stack(told[:2])
        parts = [DividedBatches(Weighted(), r, 2, lambda _, rows=rows: rows) for r in range(2)]  # type: ignore[arg-type, misc]
        mine = output.clone().requires_grad_()
        for r, part in enumerate(parts):
            loss = part.loss(mine[2 * r : 2 * r + 2], targets[2 * r : 2 * r + 2])
            torch.testing.assert_close(loss, expected)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(mine.grad, whole.grad)
