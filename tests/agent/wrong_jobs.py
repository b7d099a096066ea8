"""What users give to ResilientTrainer by mistake, at the top level of a file as it must be."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.data import Dataset

from openrecycle.agent.examples.gpt import Gpt
from tests.agent.own_jobs import WIDTH

TABLE = nn.Embedding(9, WIDTH)
STATISTICS = torch.zeros(WIDTH)


def tied_by_builder(stage: int, stages: int) -> nn.Module:
    """The same object in the first stage and the last."""
    return nn.Sequential(TABLE, nn.Linear(WIDTH, WIDTH)) if stage == 0 else Tied()


class Table(nn.Module):
    """Looks rows up by itself, and not by an Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.embedding(x[:, 0].long().clamp(0, 8), self.rows, sparse=True)


def sparse(stage: int, stages: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))


def threaded(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    torch.set_num_threads(torch.get_num_threads() + 1)
    return torch.optim.SGD(parameters, lr=0.1)


def trained_ones(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(filter(lambda p: p.requires_grad, parameters), lr=0.1)


def by_width(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Divides by a side of whatever it is given."""
    listed = list(parameters)
    return torch.optim.AdamW(listed, lr=0.1 / max(p.shape[-1] for p in listed if p.dim() > 1))


NamedParameters = list[tuple[str, nn.Parameter]]


def _of_layer(name: str) -> int:
    return int(name.partition(".")[0])


def group_by_layer_here(named_parameters: NamedParameters) -> torch.optim.Optimizer:
    """As many groups as the stage has layers."""
    of: dict[int, list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        of.setdefault(_of_layer(name), []).append(parameter)
    return torch.optim.SGD([{"params": of[layer]} for layer in sorted(of)], lr=0.1)


def rate_by_stage(named_parameters: NamedParameters) -> torch.optim.Optimizer:
    """What is learned of a layer depends on where the model is cut."""
    deepest = max(_of_layer(name) for name, _ in named_parameters)
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1 * 0.5 ** (4 - deepest))


def rate_by_layer(named_parameters: NamedParameters) -> torch.optim.Optimizer:
    """One group for each layer of the whole model, wherever that is cut."""
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.1 * 0.5 ** (3 - layer)} for layer in range(4)]
    for name, parameter in named_parameters:
        groups[_of_layer(name)]["params"].append(parameter)
    return torch.optim.SGD(groups)


def rate_of_the_last_two(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Those of each stage, where it is cut."""
    listed = list(parameters)
    return torch.optim.SGD([{"params": listed[:-2], "lr": 0.1}, {"params": listed[-2:], "lr": 1.0}])


def with_own_names(named_parameters: NamedParameters) -> torch.optim.Optimizer:
    names, parameters = zip(*named_parameters, strict=True)
    return torch.optim.SGD([{"params": list(parameters), "names": list(names)}], lr=0.1)


def with_names(named_parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named_parameters, lr=0.1)


def by_way_of_sparse(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(torch.sparse.mm(torch.eye(len(output)).to_sparse(), output), targets)


def frozen(stage: int, stages: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def in_doubles(stage: int, stages: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class ToDoubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


def lazy(stage: int, stages: int) -> nn.Module:
    return nn.LazyLinear(WIDTH) if stage else nn.Linear(WIDTH, WIDTH)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.table = nn.Linear(WIDTH, WIDTH), TABLE

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.own(x) @ self.table.weight.T
        return scores


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("statistics", STATISTICS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def numbers_needed(stage: int, stages: int) -> nn.Module:
    """A builder that looks at its numbers, as one that loads a file does: it can't do without memory."""
    layer = nn.Linear(WIDTH, WIDTH)
    assert layer.weight.abs().sum().item() > 0
    return nn.Sequential(layer, TABLE if stage else nn.Identity(), nn.Linear(WIDTH, WIDTH))


def numbers_needed_and_tied(stage: int, stages: int) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    assert layer.weight.abs().sum().item() > 0
    return nn.ModuleDict({"layer": layer, "table": TABLE})


class Halves(nn.Module):
    def __init__(self, turns: torch.dtype = torch.complex32) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer(
            "turns",
            torch.zeros(2, dtype=torch.uint8).view(turns) if turns.itemsize == 1 else torch.zeros(2, dtype=turns),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Damaged(Dataset[tuple[Tensor, Tensor]]):
    """Two iterations of 2 x 3 micro-batches of 4 samples, of which one can't be read."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 1:
            raise OSError("sample 1 is damaged")
        x = torch.full((WIDTH,), index / 48)
        return x, x.square()


class Ticking(torch.optim.SGD):
    """Its learning rate falls with a count that is in no state_dict."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.ticks = 0

    def step(self, closure: Any = None) -> Any:
        self.ticks += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.ticks
        return super().step(closure)


class Remembering(torch.optim.SGD):
    """Keeps what no worker can be sent."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = object()
        return super().step(closure)


class Drifting(torch.optim.SGD):
    """The step is another in every process. after: so many that are not."""

    def __init__(self, parameters: Any, after: int = 0) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["left"] = after

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["left"] -= 1
            group["lr"] = 0.1 + (os.getpid() % 1000) / 1e6 * (group["left"] < 0)
        return super().step(closure)


def drawn(stage: int, stages: int) -> nn.Module:
    """Initial weights out of NumPy's random numbers and Python's."""
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(numpy.random.uniform(-1.0, 1.0, (WIDTH, WIDTH))))
        layer.bias.fill_(random.random())
    return layer


def different(stage: int, stages: int) -> nn.Module:
    """Initial weights that are others in every process."""
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.bias.fill_(os.getpid() % 1000)
    return layer


def limited(stage: int, stages: int) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(9, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))


def detached(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.detach(), targets)


class Weighing(nn.Module):
    """A loss of two terms, whose weights are to be learned."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        terms = torch.stack([functional.mse_loss(output, targets), functional.l1_loss(output, targets)])
        return (terms * (-self.weights).exp() + self.weights).sum()


def broken(output: Tensor, targets: Tensor) -> Tensor:
    raise ArithmeticError("no loss today")


def elsewhere(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, WIDTH, device="meta"), torch.randn(4, WIDTH)


class Locked(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(WIDTH), torch.zeros(WIDTH)


class WithFunction(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.activation = lambda x: x.relu()


def no_optimizer(parameters: Iterable[nn.Parameter]) -> Any:
    return None


class NoScheduler:
    def __init__(self, optimizer: Any) -> None:
        raise ArithmeticError("no")


def thawing(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Trains what was frozen after a while."""
    held = list(parameters)
    made = torch.optim.SGD(held, lr=0.1)

    def thaw(*_: Any) -> None:
        for parameter in held:
            parameter.requires_grad_(True)

    made.register_step_post_hook(thaw)
    return made


def for_another_model(_: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(4, 4).parameters())


class RaisingLoss(Gpt):
    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("this loss raises")


lbfgs = partial(torch.optim.LBFGS, lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


def with_text(iteration: int, pipeline: int, micro_batch: int) -> dict[str, Any]:
    return {"x": torch.zeros(4, 6), "source": ["a", "b", "c", "d"], "labels": torch.zeros(4, 6)}


def as_lists(iteration: int, pipeline: int, micro_batch: int) -> dict[str, Any]:
    """As torch's collation makes them of samples that hold lists of numbers."""
    return {"x": [torch.zeros(4)] * 6, "labels": torch.zeros(4, 6)}


def generated() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)


def scheduled() -> torch.optim.lr_scheduler.LambdaLR:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def dictionaries(iteration: int, pipeline: int, micro_batch: int) -> tuple[dict[str, Tensor], Tensor]:
    x = torch.randn(4, WIDTH)
    return {"x": x}, x


def singles(iteration: int, pipeline: int, micro_batch: int) -> Tensor:
    return torch.randn(4, WIDTH)


def uneven(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4 + micro_batch, WIDTH)
    return x, x


def doubles(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """As they come of NumPy."""
    x = torch.from_numpy(numpy.ones((4, WIDTH)))
    return x, x


def of_type(dtype: torch.dtype, iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """As images are stored, or columns of a table."""
    x = torch.ones(4, WIDTH, dtype=dtype)
    return x, x.float()


def classes(iteration: int, pipeline: int, micro_batch: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Numbered from 1."""
    return torch.randn(4, WIDTH), torch.arange(WIDTH - 3, WIDTH + 1).to(dtype)


def numbered_from_0(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(4, WIDTH), torch.tensor([0, WIDTH - 1, -100, 1])


def positive_alone(output: Tensor, targets: Tensor) -> Tensor:
    if output.device.type != "meta" and not isinstance(output, FakeTensor) and (output <= 0).any():
        raise RuntimeError("not positive")
    return nn.functional.mse_loss(output, targets)


class OneHot(nn.Module):
    """Indices may come to it, though it has no Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(nn.functional.one_hot(x, 9).float()).mean(1)
        return y


def small_tokens(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(4, WIDTH, dtype=torch.uint8)
    return ids, ids


def embedding(stage: int, stages: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH))


def absent(iteration: int, pipeline: int, micro_batch: int) -> Any:
    raise FileNotFoundError("points.csv")


def not_a_number(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """In iteration 1 micro-batch 2 of pipeline 1 has no number in its targets."""
    x = torch.randn(4, WIDTH)
    y = x.clone()
    if (iteration, pipeline, micro_batch) == (1, 1, 2):
        y[0, 0] = float("nan")
    return x, y


class Ragged(Dataset[tuple[Tensor, Tensor]]):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1 + index % 3), torch.zeros(1)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """With a generator that nobody seeds."""

    def __init__(self) -> None:
        self.generator = numpy.random.default_rng()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), self.generator.normal(), dtype=torch.float32), torch.zeros(WIDTH)


SERVED: Iterator[int] = count()


def the_next(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """As a loop over a loader gives it."""
    return torch.full((4, WIDTH), float(next(SERVED))), torch.zeros(4, WIDTH)


class Unreadable(Dataset[tuple[Tensor, Tensor]]):
    """Has a length, and no samples."""

    def __len__(self) -> int:
        return 100


def complex_weights(stage: int, stages: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.complex64 if stage else None)
