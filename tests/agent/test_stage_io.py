"""What passes between stages is found out without running them where torch can, and by running them where not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.models.layers import StageIO, StageIOError, TensorSpec, check_output, layer_io_of
from openrecycle.planner.jobs.errors import InputError
from tests.golden import golden


class Masked(nn.Module):
    """Passes tensors on beside what it computes: ids as they are, and a mask no gradient flows into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (2, 8), ids: (2,) int64."""
        return self.layer(x), ids, torch.ones(2, 1)


class Joined(nn.Module):
    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        assert ids.dtype == torch.int64
        return x * mask


class Picky(nn.Module):
    """Looks at its data, so that only a real run tells what it returns."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x[: int(ids.sum())]


class Drawing(nn.Module):
    """Augments, say, with the random numbers of three libraries."""

    def forward(self, x: Tensor, *ids: Tensor) -> Tensor:
        return x * random.random() * float(numpy.random.rand()) + torch.rand(2, 8)


class Nested(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x, (ids,)


class Told(nn.Module):
    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": x * mask}


class Parts:
    """A workload as far as inference needs one."""

    samples_per_micro_batch = 2

    def __init__(self, *builders: Callable[[], nn.Module]) -> None:
        self.builders = builders
        self.built: list[str] = []

    def build_stage(self, stage: int, stages: int, seed: int) -> nn.Module:
        module = self.builders[stage]()
        self.built += [str(p.device) for p in module.parameters()][:1]
        return module

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        return torch.rand(2, 8), torch.tensor([0, 1])

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        return torch.zeros(2)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return output.sum()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


def of(workload: Parts, stages: int, **options: str) -> StageIO:
    return layer_io_of(workload, stages, 0, **options)  # type: ignore[arg-type]


class Does(nn.Module):
    """A layer that does this to what comes."""

    def __init__(self, does: Callable[[nn.Linear, Tensor, Tensor], Any], *, trained: bool = True) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(8, 8).requires_grad_(trained), does

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.does(self.layer, x, ids)


LAYER = partial(Does, lambda layer, x, ids: (layer(x), ids))
FROZEN = partial(LAYER, trained=False)
DETACHED = partial(Does, lambda layer, x, ids: (layer(x.detach()), ids))
NUMBERS = partial(Does, lambda layer, x, ids: x.argmax(1))
ALIVE = partial(Does, lambda layer, x, ids: (checkpoint(layer, x, use_reentrant=True), ids))


@pytest.mark.parametrize(
    ("layers", "cut"),
    [
        ((LAYER, FROZEN, DETACHED, LAYER), 2),
        ((LAYER, LAYER, NUMBERS), 2),
        ((LAYER, partial(Does, lambda layer, x, ids: (x.detach(), ids)), LAYER), 1),
        ((partial(Does, lambda layer, x, ids: (layer(x).detach(), ids)), LAYER), 0),
        ((LAYER, LAYER, LAYER), None),
        ((FROZEN, FROZEN, DETACHED, LAYER), None),
        ((DETACHED, LAYER), None),
        ((LAYER, ALIVE, FROZEN, LAYER), None),
        ((LAYER, partial(Does, lambda layer, x, ids: (x, ids)), LAYER), None),
        # What is detached is also passed on as it is.
        ((LAYER, partial(Does, lambda layer, x, ids: (x + layer(x.detach()), ids)), LAYER), None),
        ((LAYER, partial(Does, lambda layer, x, ids: {"loss": layer(x)})), None),
        ((LAYER, partial(Does, lambda layer, x, ids: SimpleNamespace(logits=layer(x)))), None),
    ],
)
def test_layers_that_get_no_gradient_are_told_of(layers: Sequence[Any], cut: int | None) -> None:
    """Not those with nothing to train."""
    told: list[str] = []
    layer_io_of(Parts(*layers), len(layers), 0, warn=told.append)  # type: ignore[arg-type]
    assert len(told) == (cut is not None)
    assert all(f"stage {cut}" in text and "0.layer.weight" in text for text in told)


def test_what_is_shared_with_a_later_layer_is_trained_by_that() -> None:
    told: list[str] = []
    workload: Any = Parts(LAYER, DETACHED)
    workload.tied = lambda layers: [["0.layer.weight", "1.layer.weight"], ["0.layer.bias", "1.layer.bias"]]
    layer_io_of(workload, 2, 0, warn=told.append)
    assert not told


def test_the_caller_s_random_numbers_go_on_from_where_they_were() -> None:
    found = []
    for looks in (False, True):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        if looks:
            of(Parts(Drawing, Drawing), 2)
        found.append((random.random(), numpy.random.rand(), float(torch.rand(()))))
    assert found[0] == found[1]


def test_several_tensors_with_and_without_gradients() -> None:
    workload = Parts(Masked, Joined)
    assert of(workload, 2) == (
        (TensorSpec((2, 6), "float32"), TensorSpec((2,), "int64", False), TensorSpec((2, 1), "float32", False)),
    )
    assert workload.built == ["meta"], "no memory was taken for it"


def test_autocast_shows_in_the_types() -> None:
    assert of(Parts(Masked, Joined), 2, autocast="bf16")[0][0] == TensorSpec((2, 6), "bfloat16")


class Doubles(nn.Linear):
    """Takes the ids, too, which it has no use for."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).double()


def test_the_layer_whose_output_does_not_fit_is_named() -> None:
    with pytest.raises(InputError) as refused:
        of(Parts(lambda: Doubles(8, 8), lambda: nn.Linear(7, 8)), 2)
    assert refused.value.field == "stage 1" and refused.value.value == "float64[2, 8] from stage 0"


def test_what_symbols_can_not_tell_is_run_for_real() -> None:
    workload = Parts(Picky, lambda: nn.Linear(8, 8))
    assert of(workload, 2) == ((TensorSpec((1, 8), "float32"),),)
    assert workload.built[-1] == "cpu"


def test_a_module_that_exists_already_will_do() -> None:
    ready = [Masked(), Joined()]
    before = ready[0].layer.weight.clone()  # type: ignore[union-attr,operator]
    assert len(of(Parts(lambda: ready[0], lambda: ready[1]), 2)[0]) == 3
    assert torch.equal(ready[0].layer.weight, before)  # type: ignore[union-attr,arg-type]


class Normed(nn.Sequential):
    """looks: at its data, too."""

    def __init__(self, looks: bool) -> None:
        super().__init__(nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.looks = looks

    def forward(self, x: Tensor, *ids: Tensor) -> Tensor:
        assert not self.looks or x.sum().item() < 1e9
        y: Tensor = super().forward(x)
        return y


@pytest.mark.parametrize("looks", [False, True])
def test_a_module_that_exists_already_is_not_changed_by_a_run(looks: bool) -> None:
    ready = [Normed(looks), Normed(looks)]
    before = [buffer.clone() for module in ready for buffer in module.buffers()]
    assert of(Parts(lambda: ready[0], lambda: ready[1]), 2) == ((TensorSpec((2, 8), "float32"),),)
    assert all(map(torch.equal, before, (buffer for module in ready for buffer in module.buffers())))


class Locked(nn.Linear):
    """Can't be copied."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.lock = threading.Lock()

    def forward(self, x: Tensor, *ids: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


def test_a_module_that_can_not_be_copied_will_do() -> None:
    assert of(Parts(Locked, Locked), 2) == ((TensorSpec((2, 8), "float32"),),)


def test_the_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    of(Parts(Picky, lambda: nn.Linear(8, 8)), 2)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("builders", "words"),
    [
        ((Masked, lambda: nn.Linear(8, 8)), ["stage 1", "float32[2, 6]", "int64[2]", "TypeError"]),
        ((Masked, Joined, lambda: nn.Linear(9, 9)), ["stage 2", "float32[2, 6]", "9"]),
        ((Nested, Joined), ["0: got 'Tensor, tuple'", "nn.LSTM"]),
    ],
)
def test_a_stage_that_can_not_be_run_is_named(builders: Sequence[Callable[[], nn.Module]], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        of(Parts(*builders), len(builders))
    for word in words:
        assert word in str(caught.value)


def test_the_last_one_may_give_the_loss_whatever_it_takes() -> None:
    assert of(Parts(Masked, Told), 2) == of(Parts(Masked, Joined), 2)


def test_declared_stage_io_is_taken_and_checked() -> None:
    workload = Gpt(width=32, heads=2, sequence=16, batch=2)
    declared = layer_io_of(workload, 3, 0)
    assert declared == ((TensorSpec((2, 16, 32), "float32"),),) * 2
    del workload.stage_output_shape
    assert layer_io_of(workload, 3, 0) == declared, "what it declares is what is found out"
    workload.stage_io = declared  # type: ignore[attr-defined]
    assert layer_io_of(workload, 3, 0) == declared
    with pytest.raises(InputError, match=r"stage_io: got 2, expected .* 3 in all"):
        layer_io_of(workload, 4, 0)
    workload.stage_io = ((TensorSpec((1,), "float33"),),)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"stage_io\[0\]: got 'float33'"):
        layer_io_of(workload, 2, 0)


class Spectrum(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.fft.fft(x)


def test_complex_numbers_do_not_go_to_other_stages() -> None:
    """Nobody would take their gradient back."""
    with pytest.raises(InputError) as caught:
        of(Parts(Spectrum, nn.Identity), 2)
    assert caught.value.field == "stage_io"


def test_an_output_that_varies_is_refused() -> None:
    boundary = (TensorSpec((2, 6), "float32"), TensorSpec((2,), "int64", False))
    good = torch.zeros(2, 6), torch.tensor([1, 2])
    assert check_output(1, boundary, good) == good
    for bad in ((torch.zeros(3, 6), good[1]), good[:1], (good[0], torch.zeros(2)), "text", ()):
        with pytest.raises(StageIOError, match=golden("output-of-stage-1-got")):
            check_output(1, boundary, bad)
