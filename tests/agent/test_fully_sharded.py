"""Workers of several ranks whose layers are fully sharded: each rank has a part of every parameter and of every
micro-batch."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from openrecycle.agent.checkpoints import Identity, load_layers, write_share
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.examples import fully_sharded, gpt, tensor_parallel
from openrecycle.agent.examples.gpt import Block
from openrecycle.agent.models import compat
from openrecycle.agent.models.layers import build_layers
from openrecycle.agent.models.parallelized import (
    DividedBatches,
    OverRanks,
    Parallelized,
    gathered_tensors,
    part_of_rank,
    parts_of_a_rank,
)
from openrecycle.agent.models.state import Writer
from openrecycle.agent.stages.backward import STRATEGIES
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import stage_optimizer
from openrecycle.planner.jobs.errors import InputError
from tests.agent import rank_stages
from tests.agent.launches import warm
from tests.agent.rank_stages import KINDS, Even, Residual, Shared, Task, train
from tests.agent.runs import Run, forked
from tests.agent.saved import checkpoint_bits
from tests.conftest import at_length

ITERATIONS = 5


class Together:
    """The ranks of one worker, each in a process of its own. shape: of their mesh."""

    def __init__(self, shape: tuple[int, ...], folder: Path) -> None:
        warm()
        context = multiprocessing.get_context("forkserver")
        self.shape = shape
        self._pipes, self._processes = [], []
        for rank in range(prod(shape)):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_stages.as_rank, args=(rank, shape, str(folder / "store"), theirs), daemon=True
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


@pytest.fixture(scope="module", params=[at_length((2,)), (3,)], ids=str)
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    ranks = Together(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


@pytest.fixture(scope="module", params=[(2, 2), at_length((3, 2)), at_length((1, 2))], ids=str)
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    ranks = Together(request.param, tmp_path_factory.mktemp("mesh"))
    yield ranks
    ranks.end()


def compare_with_one_process(ranks: Together, kind: type[nn.Module], split: Any, *, whole: bool = False) -> None:
    """The gradients, the loss, changes of buffers, and what goes back to the stage before; and each element of a
    parameter counts once in a norm."""
    alone = train(Task(kind), split, lambda _, gradient: gradient, turned=False)
    answers = ranks.ask(kind, whole, split, False)
    for name, expected in alone.items():
        if name in ("bits", "held", "counted"):
            continue
        if name.startswith("of the input"):
            each = prod(ranks.shape[1:])
            for first in range(each):
                got = torch.cat([answer[name] for answer in answers[first::each]])
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
            continue
        for answer in answers:
            torch.testing.assert_close(answer[name], expected, rtol=1e-4, atol=1e-6)
    assert set(alone) == set(answers[0])
    assert whole or all(answer["held"] == 0 for answer in answers), "between two ops nobody holds whole parameters"
    assert sum(int(answer["counted"]) for answer in answers) == int(alone["counted"])


# torch's split counts a parameter of two places twice here; in a job it is tried, and not taken.
SPLITS = [(kind, split) for kind in KINDS for split in STRATEGIES if (kind, split) != (Shared, "torch")]


# Each kind of layers once, and each split.
FEW = [(kind, split) for kind, split in SPLITS if split == "deferred" or kind is Residual]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "split"), [split if split in FEW else at_length(*split) for split in SPLITS])
def test_ranks_make_of_a_micro_batch_what_one_process_makes(
    kind: type[nn.Module], split: Any, together: Together
) -> None:
    compare_with_one_process(together, kind, split)


ON_A_MESH = [(Even, True, "torch"), (Even, False, "torch"), (Even, False, "deferred"), (Even, True, "fused")]
ON_A_MESH += [(rank_stages.Positions, False, split) for split in STRATEGIES]
ON_A_MESH += [(kind, True, "deferred") for kind in KINDS]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "whole", "split"), [case if i < 1 else at_length(*case) for i, case in enumerate(ON_A_MESH)]
)
def test_layers_may_be_tensor_parallel_and_fully_sharded(
    kind: type[nn.Module], whole: bool, split: Any, mesh: Together
) -> None:
    compare_with_one_process(mesh, kind, split, whole=whole)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Residual, rank_stages.Counting])
def test_the_order_of_micro_batches_shows_in_no_bit(kind: type[nn.Module], together: Together) -> None:
    compare_orders(together, kind, "deferred")


@pytest.mark.processes
@pytest.mark.chaos
def test_the_order_of_micro_batches_shows_in_no_bit_on_a_mesh(mesh: Together) -> None:
    compare_orders(mesh, Even, "torch")


def compare_orders(ranks: Together, kind: type[nn.Module], split: Any) -> None:
    once, turned = (ranks.ask(kind, True, split, turned) for turned in (False, True))
    for a, b in zip(once, turned, strict=True):
        assert torch.equal(a["bits"], b["bits"])


@pytest.mark.processes
def test_layers_may_be_left_whole(together: Together) -> None:
    compare_with_one_process(together, Residual, "deferred", whole=True)


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


def on_a_mesh(record: Path, *arguments: str, iterations: int = 4, grid: str = "2x1x2") -> Run:
    """Workers of four ranks: two run a part of each micro-batch together, as two others do."""
    model = ("--workload", "agent.examples.tensor_parallel:Gpt", "--ranks-per-worker", "4", "--mesh", "2x2")
    return job(record, *model, *arguments, iterations=iterations, grid=grid)


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


@pytest.mark.processes
@pytest.mark.parametrize("kill", ["W1_0.3@0:W0", at_length("W0_0@0:O"), at_length("W0_0.1@0:R")])
def test_the_death_of_a_rank_of_a_mesh(kill: str, tmp_path: Path) -> None:
    few: dict[str, Any] = {"iterations": 2, "grid": "2x1x1"}
    whole, hurt = (on_a_mesh(tmp_path / f"{len(k)}.jsonl", *k, **few) for k in ((), ("--kill", kill)))
    assert [whole.status, hurt.status] == [0, 0], hurt.errors
    assert hurt.losses == whole.losses and hurt.final == whole.final
    assert [failure["worker"] for failure in hurt.failures] == [kill[:4]]


@pytest.mark.chaos
@pytest.mark.processes
def test_workers_of_a_mesh_train_what_one_process_trains(tmp_path: Path) -> None:
    """Up to rounding; the gradients are clipped by the same norm."""
    steady = ("--workload-options", json.dumps(TINY))
    alone = ("--ranks-per-worker", "1", "--mesh", "1x1")
    ours, theirs = (on_a_mesh(tmp_path / f"{len(k)}.jsonl", *k) for k in (steady, (*steady, *alone)))
    assert [ours.status, theirs.status] == [0, 0], theirs.errors
    ours_are, theirs_are = ([float.fromhex(loss) for loss in run.losses] for run in (ours, theirs))
    assert ours_are == pytest.approx(theirs_are, rel=1e-5)


@pytest.mark.chaos
@pytest.mark.processes
def test_a_checkpoint_knows_no_mesh(tmp_path: Path) -> None:
    """Each element is in it once, whoever steps it; and a job goes on from it to the same bits, or with one process a
    worker."""
    folder, other = tmp_path / "checkpoints", tmp_path / "other"
    options = ("--checkpoint", str(folder), "--checkpoint-every", "2", "--weights", str(tmp_path / "weights"))
    run = on_a_mesh(tmp_path / "first.jsonl", *options, "--kill", "W2_0.2@1:F1", grid="3x1x3")
    shared = ("--checkpoint", str(other), "--optimizer-sharding", "zero1")
    sharded = on_a_mesh(tmp_path / "sharded.jsonl", *options, *shared, "--kill", "W1_0.1@3:I1", grid="3x1x3")
    assert [run.status, sharded.status] == [0, 0], run.errors + sharded.errors
    assert run.losses == sharded.losses and run.final == sharded.final
    assert checkpoint_bits(folder) == checkpoint_bits(other)
    for again in (folder, other):
        shutil.rmtree(again / "iteration-0000000004")
        into = ("--checkpoint", str(again), "--resume", "newest", "--weights", str(tmp_path / again.name / "weights"))
        resumed = on_a_mesh(tmp_path / f"{again.name}.jsonl", *options, *into, grid="3x1x3")
        assert resumed.status == 0 and resumed.final == run.final, resumed.errors
        for file in (tmp_path / "weights").iterdir():
            assert file.read_bytes() == (tmp_path / again.name / "weights" / file.name).read_bytes()
    shutil.rmtree(folder / "iteration-0000000004")
    alone = ("--resume", "newest", "--ranks-per-worker", "1", "--mesh", "1x1")
    one = on_a_mesh(tmp_path / "alone.jsonl", *options, *alone, grid="3x1x3")
    assert one.status == 0, one.errors


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
@pytest.mark.parametrize(
    ("of", "grid", "kills"),
    [(job, "3x2x3", ("W1_1.1@1:F1", "W0_0@2:I1")), (on_a_mesh, "3x1x3", ("W1_0.1@1:F1", "W0_0.2@2:W1"))],
)
def test_two_hurt_workers_make_a_whole_one(of: Any, grid: str, kills: tuple[str, str], tmp_path: Path) -> None:
    killed = [part for kill in kills for part in ("--kill", kill)]
    hurt, whole = (of(tmp_path / f"{len(k)}.jsonl", *k, iterations=40, grid=grid) for k in (killed, ()))
    assert hurt.status == 0, hurt.errors
    assert hurt.losses == whole.losses and hurt.final == whole.final
    pipelines, stages, _ = map(int, grid.split("x"))
    assert hurt.iterations[-1]["living"] == pipelines * stages - 1


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


class Replicated(tensor_parallel.Gpt):
    """Held twice (HSDP)."""

    def parallelize(self, layer: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(layer, mesh=mesh)


class Turned(tensor_parallel.Gpt):
    """Each dimension for what the other one is for."""

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        return fully_shard(layer, mesh=mesh["tp"])


class Uneven(tensor_parallel.Gpt):
    """Columns that two ranks can't share evenly."""

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        layer.append(nn.Linear(32, 33))
        parallelize_module(layer[-1], mesh["tp"], ColwiseParallel())
        return fully_shard(layer, mesh=mesh["dp"])


class Own(tensor_parallel.Gpt):
    """Over a mesh of its own, whose groups nobody connects anew."""

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        return super().parallelize(layer, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"])


class Line(tensor_parallel.Gpt):
    """Over a mesh of its own, of a group that it was given. names: of its dimension."""

    names: tuple[str, ...] | None = ("x",)

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        own = DeviceMesh.from_group(mesh.get_group("tp"), "cpu", mesh_dim_names=self.names)
        for part in layer.modules():
            if isinstance(part, tensor_parallel.Block):
                parallelize_module(part, own, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return layer  # type: ignore[no-any-return]


class Unnamed(Line):
    """Without a name."""

    names = None


class Misnamed(tensor_parallel.Gpt):
    """With the other one's."""

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        own = DeviceMesh.from_group(mesh.get_group("tp"), "cpu", mesh_dim_names=("dp",))
        return fully_shard(layer, mesh=own)


class Apart(tensor_parallel.Gpt):
    """Tensor parallel over ranks that have other samples."""

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        return super().parallelize(layer, mesh["dp"])


def test_how_layers_are_split_is_found_out() -> None:
    assert parts_of_a_rank(fully_sharded.Gpt(width=32, heads=2, sequence=16), 3, (2,), 0)[0]
    assert not parts_of_a_rank(tensor_parallel.Gpt(width=32, heads=2, sequence=16), 3, (2,), 0)[0]
    divided, layers = parts_of_a_rank(tensor_parallel.Gpt(width=32, heads=2, sequence=16), 3, (4, 2), 0)
    shapes = {name: tuple(p.shape) for name, p in layers[1]}
    assert divided and shapes["1.0.up.weight"] == (16, 32) and shapes["1.0.down.weight"] == (8, 64)
    assert shapes["1.0.down.bias"] == shapes["1.0.norm1.bias"] == (8,)


def test_the_default_device_is_not_where_ranks_are_numbered() -> None:
    with torch.device("meta"), compat.imagined_ranks(2, 2) as mesh:
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(kind, (2,)) for kind in (Mixed, Alternating, Lower, Away, Columns, Fewer)]
    + [(Own, (4,))]
    + [(kind, (2, 2)) for kind in (fully_sharded.Gpt, Replicated, Turned, Uneven, Line, Unnamed, Misnamed, Apart)],
)
def test_what_can_not_be_run_is_refused(kind: type[gpt.Gpt], shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as refused:
        parts_of_a_rank(kind(width=32, heads=2, sequence=16), 3, shape, 0)
    assert refused.value.field == "parallelize"


def test_modules_that_were_given_are_left_as_they_were() -> None:
    task = Task(Residual)
    made = [task.build_layer(k, 2, 0) for k in range(2)]
    task.build_layer = lambda layer, layers, seed: made[layer]  # type: ignore[method-assign]
    before = [{name: (type(p), p.shape) for name, p in m.named_parameters()} for m in made]
    assert parts_of_a_rank(task, 2, (2,), 0)[0]  # type: ignore[arg-type]
    assert before == [{name: (type(p), p.shape) for name, p in m.named_parameters()} for m in made]
    assert all(type(part).__name__ != "FSDPResidual" for m in made for part in m.modules())


class Tied(Task):
    """Its layers share a parameter."""

    name = "scale.weight"

    def tied(self, layers: int) -> tuple[tuple[str, ...], ...]:
        return ((f"0.0.{self.name}", f"1.0.{self.name}"),)


class TiedColumns(Tied):
    """One that is tensor parallel over a mesh of two dimensions."""

    name = "up.weight"


class TiedParts(TiedColumns):
    """One that is tensor parallel alone."""

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        for part in layer:
            if isinstance(part, Even):
                part.split(mesh)
        return layer  # type: ignore[no-any-return]


class Rows(Even):
    """Is fully sharded alone, where others are tensor parallel alone."""


class TiedAcross(TiedColumns):
    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        if isinstance(layer[0], Rows):
            return fully_shard(layer, mesh=mesh["dp"])  # type: ignore[no-any-return]
        layer[0].split(mesh["tp"])
        return layer  # type: ignore[no-any-return]


def test_within_an_op_the_state_is_that_of_the_parts() -> None:
    """A hand-over reads it from another thread."""
    with compat.imagined_ranks(2) as mesh:
        workload: Any = Parallelized(Task(Residual), mesh, torch.clone, divided=True)  # type: ignore[arg-type]
        module = build_layers(workload, range(1), 2, 0)
        stage = stage_optimizer(workload, module, SUM_OF["fast"](module.parameters(), terms=1), Optimization())
        between = {name: tensor.data_ptr() for name, tensor in stage.state().tensors.items()}
        with OverRanks(layer for _, layer in module.layers).op(together=True):
            assert {name: tensor.data_ptr() for name, tensor in stage.state().tensors.items()} == between


@pytest.mark.parametrize(
    ("task", "shape"),
    [(Tied(Residual), (2,)), (TiedParts(Even), (2,)), (Tied(Even), (2, 2)), (TiedColumns(Even), (2, 2))],
    ids=lambda it: type(it).__name__ if isinstance(it, Task) else "x".join(map(str, it)),
)
def test_a_parameter_that_layers_share_stays_a_part(task: Tied, shape: tuple[int, ...]) -> None:
    divided, _ = parts_of_a_rank(task, 2, shape, 0)  # type: ignore[arg-type]
    with compat.imagined_ranks(*shape) as mesh:
        workload: Any = Parallelized(task, mesh, torch.clone, divided=divided)  # type: ignore[arg-type]
        module = build_layers(workload, range(2), 2, 0)
    named = dict(module.named_parameters())
    one, other = (named[name] for name in workload.tied(2)[0])
    assert torch.equal(one, other) and one is not other
    for part in (one, other):
        assert part.placed.split and part.placed.part_shape == part.shape  # type: ignore[attr-defined]
    if divided:
        units = [unit for _, layer in module.layers for unit in layer.over_ranks.units]  # type: ignore[union-attr]
        assert {id(one), id(other)} <= {id(shard.local) for unit in units for shard in unit.shards}


def test_what_layers_share_they_split_alike() -> None:
    """Else a rank's part of the one is not that of the other, though the first rank has the same of both."""
    with pytest.raises(InputError) as refused:
        parts_of_a_rank(TiedAcross(Rows), 2, (2, 2), 0)  # type: ignore[arg-type]
    assert refused.value.field == "tied"


class Wrapped(Task):
    """A wrapper puts something before the names of what it holds; one around the whole layer shows them without."""

    def __init__(self, *, part: bool) -> None:
        super().__init__(Residual)
        self.part = part

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        if not self.part:
            return checkpoint_wrapper(super().parallelize(layer, mesh))  # type: ignore[no-any-return]
        layer[0] = checkpoint_wrapper(layer[0])
        return super().parallelize(layer, mesh)


class WrappedAndTied(Wrapped, Tied):
    pass


def test_a_shared_parameter_that_gets_another_name_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        parts_of_a_rank(WrappedAndTied(part=True), 2, (2,), 0)  # type: ignore[arg-type]
    assert refused.value.field == "tied" and "0.0.scale.weight" in str(refused.value)
    plain, wrapped = (parts_of_a_rank(task, 2, (2,), 0) for task in (Tied(Residual), WrappedAndTied(part=False)))  # type: ignore[arg-type]
    assert [[name for name, _ in layer] for layer in wrapped[1]] == [[name for name, _ in layer] for layer in plain[1]]


@pytest.mark.parametrize("part", [True, False])
def test_a_state_dict_is_of_whole_parameters_whatever_wraps_them(part: bool) -> None:
    """It says their names without the wrapper's."""
    task: Any = Wrapped(part=part)
    with compat.imagined_ranks(2) as mesh:
        workload: Any = Parallelized(task, mesh, torch.clone, divided=True)
        ((_, layer),) = build_layers(workload, range(1), 2, 0).layers
        whole = gathered_tensors(layer, layer.state_dict())
    expected = task.build_layer(0, 2, 0).state_dict()
    assert {name: value.shape for name, value in whole.items()} == {name: t.shape for name, t in expected.items()}


def test_a_rank_keeps_its_part_alone_of_what_it_reads(tmp_path: Path) -> None:
    """Of a checkpoint of workers without ranks, in pieces and whole."""
    task: Any = Task(Residual)
    alone = build_layers(task, range(1), 2, 0)
    optimizer = stage_optimizer(task, alone, SUM_OF["fast"](alone.parameters(), terms=1), Optimization())
    for peer in range(2):
        identity = Identity("", 1, 1, 2, 1, 0)
        write_share(tmp_path, optimizer.share(Writer(peer, 2)), 0, 1, identity, 1, 1)
    with compat.imagined_ranks(2) as mesh:
        module = build_layers(Parallelized(task, mesh, torch.clone, divided=True), range(1), 2, 0)  # type: ignore[arg-type]
    state = load_layers(tmp_path, range(1), part_of_rank(module))
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.tensors.values()}
    parts = sum(t.nbytes for t in state.tensors.values())
    assert sum(memory.values()) == parts < sum(t.nbytes for t in optimizer.state().tensors.values())
    rank = stage_optimizer(task, module, SUM_OF["fast"](module.parameters(), terms=1), Optimization())
    rank.load_state(state, own=True)
    named = dict(alone.named_parameters())
    for name, parameter in module.named_parameters():
        part = parameter.placed.block if hasattr(parameter, "placed") else ()  # type: ignore[attr-defined]
        assert torch.equal(parameter, named[name][tuple(slice(*run) for run in part)])


def test_what_parallelize_draws_on_a_gpu_is_the_same_on_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with to_empty() and init_weights()."""
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))

    class Drawn(Task):
        def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.normal_(generator=gpu)
            return super().parallelize(layer, mesh)

    found = []
    for draws in range(3):
        torch.rand(draws, generator=gpu)
        before = gpu.get_state()
        with compat.imagined_ranks(2) as mesh:
            workload: Any = Parallelized(Drawn(Residual), mesh, torch.clone, divided=True)  # type: ignore[arg-type]
            module = build_layers(workload, range(1), 2, seed=draws // 2)
        assert torch.equal(gpu.get_state(), before)
        found.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


class TiedWithin(Task):
    """Two modules of a layer share a parameter, and parallelize_module makes one for each."""

    def __init__(self, *, again: bool) -> None:
        super().__init__(Even)
        self.again = again

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        pair = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        pair[1].weight = pair[0].weight
        return pair

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        parallelize_module(layer, mesh, {"0": ColwiseParallel(), "1": ColwiseParallel()})
        if self.again:
            layer[1].weight = layer[0].weight
        return layer  # type: ignore[no-any-return]


def test_what_modules_of_a_layer_share_stays_one_parameter() -> None:
    with pytest.raises(InputError) as refused:
        parts_of_a_rank(TiedWithin(again=False), 2, (2,), 0)  # type: ignore[arg-type]
    assert refused.value.field == "parallelize"
    _, (held, _) = parts_of_a_rank(TiedWithin(again=True), 2, (2,), 0)  # type: ignore[arg-type]
    assert [name for name, _ in held] == ["0.0.weight", "0.0.bias", "0.1.bias"]


def test_a_micro_batch_is_divided_into_runs_of_samples() -> None:
    class FourSamples:
        samples_per_micro_batch = 4

        def inputs(self, *_: int) -> Any:
            return torch.arange(4), {"mask": torch.arange(8).view(4, 2)}

    parts: list[Any] = [DividedBatches(FourSamples(), rank, 2).inputs(0, 0, 0, 0) for rank in range(2)]  # type: ignore[arg-type]
    assert [part[0].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert parts[1][1]["mask"].tolist() == [[4, 5], [6, 7]]
    with pytest.raises(InputError):
        DividedBatches(FourSamples(), 0, 3).inputs(0, 0, 0, 0)  # type: ignore[arg-type]


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
