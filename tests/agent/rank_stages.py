"""Stages whose layers are fully sharded, in processes of their own: what ranks make together of two micro-batches, and
what one process makes of the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.examples import fully_sharded
from openrecycle.agent.models.layers import build_layers
from openrecycle.agent.models.parallelized import Parallelized
from openrecycle.agent.stages.backward import STRATEGIES, MovingBuffers, StrategyName, moved_by
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.ranks import Ranks
from openrecycle.planner.plans.schedule import MicroBatch

SAMPLES, WIDTH = 6, 5
KEYS: list[MicroBatch] = [(0, 0), (1, 3)]


class Residual(nn.Module):
    """Rows that no number of ranks divides, a normalization, and what is computed of parameters alone."""

    hidden = 7

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, self.hidden), nn.Linear(self.hidden, WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm(x)))) * self.scale(self.table)
        return y


class Even(Residual):
    """Is tensor parallel, too, over a mesh of two dimensions."""

    hidden = 8

    def split(self, mesh: Any) -> None:
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Positions(nn.Module):
    """Between its products ranks have parts of a sequence, and so parts of the gradients of what they all hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return y

    def split(self, mesh: Any) -> None:
        part, all_of_it = Shard(1), Replicate()
        parallelize_module(
            self,
            mesh,
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=part, use_local_output=False),
                "down": RowwiseParallel(output_layouts=part, use_local_output=False),
            },
        )
        enter = PrepareModuleInput(input_layouts=(all_of_it,), desired_input_layouts=(part,))
        parallelize_module(self, mesh, enter)
        parallelize_module(self, mesh, PrepareModuleOutput(output_layouts=part, desired_output_layouts=all_of_it))


class Recomputed(Residual):
    """With activation checkpointing inside of it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Partly(Residual):
    """Has a layer that nothing goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class Counting(Residual):
    """Counts in a buffer the sum of what it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean()
        return super().forward(x)


class Shared(Residual):
    """The same parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.scale.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(super().forward(x))
        return y


class Words(nn.Module):
    """A first layer: integers come in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.embedding(x))
        return y


KINDS: list[type[nn.Module]] = [Residual, Recomputed, Partly, Counting, Shared, Words]


class Task:
    """A Workload of two layers. kind: of the first; whole: is the second not fully sharded?"""

    samples_per_micro_batch = SAMPLES

    def __init__(self, kind: type[nn.Module], *, whole: bool = False) -> None:
        self._kind, self._whole = kind, whole

    def layer_count(self, stages: int) -> int:
        return 2

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        torch.manual_seed(layer)
        return nn.Sequential(Even() if layer else self._kind(), Residual())

    def parallelize(self, layer: Any, mesh: Any) -> nn.Module:
        if mesh.ndim == 2:
            if isinstance(layer[0], (Even, Positions)):
                layer[0].split(mesh["tp"])
            mesh = mesh["dp"]
        if self._whole and isinstance(layer[0], Even):
            return layer  # type: ignore[no-any-return]
        fully_shard(layer[0], mesh=mesh)
        return fully_shard(layer, mesh=mesh)  # type: ignore[no-any-return]

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * pipeline + micro_batch)
        if self._kind is Words:
            return torch.randint(11, (SAMPLES, 4), generator=generator)
        return torch.randn(SAMPLES, 4, WIDTH, generator=generator)

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * pipeline + micro_batch)
        return torch.randn(SAMPLES, 4, WIDTH, generator=generator)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(output, targets)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


class Evaluated(fully_sharded.Gpt):
    """Is evaluated on two micro-batches. bad: a sample of the second is no text, which one rank alone sees."""

    def __init__(self, bad: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self._bad = bad

    @property
    def evaluation(self) -> Any:
        return EvaluationOf(self, self._bad)


class EvaluationOf:
    """metrics: one that says how many samples it is given."""

    micro_batches = 2

    def __init__(self, model: fully_sharded.Gpt, bad: bool) -> None:
        self._model, self._bad = model, bad
        self.metrics = {"samples": lambda output, targets: float(len(targets)), "loss again": model.loss}

    def inputs(self, seed: int, index: int) -> Tensor:
        tokens = self._model.inputs(seed, 10_000, 0, index).clone()
        if self._bad and index:
            tokens[-1, 0] = 100_000
        return tokens

    def targets(self, seed: int, index: int) -> Tensor:
        return self._model.targets(seed, 10_000, 0, index)


Result = dict[str, Tensor]


def train(
    workload: Any, split: StrategyName, whole: Callable[[nn.Parameter, Tensor], Tensor], *, turned: bool
) -> Result:
    """What two interleaved micro-batches add up to: gradients and changes of buffers by name, the loss, and what each
    gives back as the gradient of its inputs. whole: of a parameter's part and its gradient, all of that."""
    module = build_layers(workload, range(2), 2, 0)

    def place(key: MicroBatch) -> tuple[int, int, int, int]:
        return 0, 0, *key

    first = workload.inputs(*place(KEYS[0]))

    def forward(buffers: MovingBuffers) -> None:
        Stage(module, GradientSum((), terms=9), buffers=buffers).forward(KEYS[0], first, seed=1)

    moving = moved_by(module, forward)
    sums = GradientSum(module.parameters(), terms=9, buffers=moving)
    stage = Stage(module, sums, split=STRATEGIES[split](module))
    keys, out = KEYS[::-1] if turned else KEYS, Result()
    for key in keys:
        targets = workload.targets(*place(key))
        stage.forward(key, workload.inputs(*place(key)), seed=1, loss=partial(_loss, workload, targets))
    for key in keys:
        dx = stage.input_backward(key, None)
        if isinstance(dx, Tensor):
            out[f"of the input {key}"] = dx
    held = sum(p.untyped_storage().nbytes() for p in stage.split.parameters) if split == "torch" else 0
    for key in keys[::-1]:
        stage.weight_backward(key)
    out["loss"] = torch.tensor(sums.loss)
    out["bits"] = sums.buffer.clone()
    out["held"] = torch.tensor(held)
    out["counted"] = torch.tensor(sum(p.numel() for p in module.parameters() if not getattr(p, "duplicate", False)))
    sums.write_gradients()
    sums.write_buffers()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            out[name] = whole(parameter, parameter.grad)
    return out | dict(module.named_buffers())


def _loss(workload: Any, targets: Tensor, output: Tensor) -> Tensor:
    loss: Tensor = workload.loss(output, targets)
    return loss


def as_rank(rank: int, shape: tuple[int, ...], meeting: str, pipe: Connection) -> None:
    """Answers (kind, whole, split, turned) with a Result, until it is told nothing more. shape: of the mesh."""
    torch.set_num_threads(1)
    among = Ranks.begin(rank, prod(shape), meeting, Timeouts(), shape=shape)

    def whole(parameter: Any, gradient: Tensor) -> Tensor:
        if not hasattr(parameter, "placed"):
            return gradient
        found: Tensor = parameter.placed.whole(gradient)
        assert torch.equal(found[tuple(slice(*run) for run in parameter.placed.block)], gradient)
        return found

    while (asked := pipe.recv()) is not None:
        kind, some_whole, split, turned = asked
        task = Parallelized(Task(kind, whole=some_whole), among.mesh, among.gather, divided=True)
        pipe.send({k: v.detach().numpy() for k, v in train(task, split, whole, turned=turned).items()})
