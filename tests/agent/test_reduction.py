"""A stage's gradients are reduced in buckets, beside the last backward: no bit differs for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.stages.backward import STRATEGIES, StrategyName
from openrecycle.agent.stages.gradients import SUM_OF, GradientSum
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.group import LateGroup, TransferError
from openrecycle.agent.workers.reduction import GradientReduction
from tests.agent.runs import Run, fault_free, small
from tests.conftest import at_length

WIDTH = 8
ROW = 8 * WIDTH * (WIDTH + 1)
"""Bytes of a layer's sums."""
KEYS = [(0, m) for m in range(3)]


class Begun:
    """Sums of two workers that have the same terms: what is begun is doubled at once, and may be added to no more.
    fails: at the bucket of this number."""

    def __init__(self, fails: int | None = None) -> None:
        self.sums: list[Tensor] = []
        self.waited = 0
        self._fails = fails

    def __call__(self, tensor: Tensor) -> Begun:
        if len(self.sums) == self._fails:
            raise TransferError("a peer has died")
        self.sums.append(tensor.mul_(2).clone())
        self.tensor = tensor
        return self

    def wait(self) -> Tensor:
        self.waited += 1
        return self.tensor


def layers(count: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def backward(stage: Stage) -> Iterator[int]:
    """Runs all micro-batches, W's last; yields the place of each that is about to be brought into the sum."""
    for _, m in KEYS:
        torch.manual_seed(m)
        stage.forward((0, m), torch.randn(2, WIDTH, requires_grad=True), seed=m, loss=lambda y: y.square().mean())
    for m, key in enumerate(KEYS):
        stage.input_backward(key, None)
        yield m
        stage.weight_backward(key)


@pytest.mark.parametrize("split", ["deferred", "torch", "fused"])
def test_each_bucket_begins_once_it_is_complete(split: StrategyName) -> None:
    module, whole = layers(), layers()
    reference = Stage(whole, GradientSum(whole.parameters(), terms=3), split=STRATEGIES[split](whole))
    for _ in backward(reference):
        pass
    sums = GradientSum(module.parameters(), terms=3, bucket_bytes=2 * ROW)
    stage, begun = Stage(module, sums, split=STRATEGIES[split](module)), Begun()
    reduction = GradientReduction(sums, begun)
    stage.expect(len(KEYS), reduction)
    for m in backward(stage):
        assert not begun.sums or (split == "fused" and m == len(KEYS) - 1), "nothing begins before the last one"
    assert len(begun.sums) == 2 and reduction.begun
    reduction.finish()
    assert len(begun.sums) == begun.waited == 3
    # The last layers' first, and what is of no parameter at the end.
    assert [t.numel() for t in begun.sums[:2]] == [2 * ROW // 8] * 2
    assert torch.equal(sums.buffer, reference.gradients.buffer * 2)


def test_without_micro_batches_all_begin_at_the_step_in_the_same_order() -> None:
    module = layers()
    sums, begun = GradientSum(module.parameters(), terms=1, bucket_bytes=ROW), Begun()
    reduction = GradientReduction(sums, begun)
    assert not reduction.begun
    reduction.finish()
    assert [t.numel() for t in begun.sums] == [ROW // 8] * 4 + [sums.buffer.numel() - 4 * ROW // 8]


WEIGHT = 8 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("bucket_bytes", "count"), [(1, 5), (WEIGHT + 1, 3), (3 * WEIGHT, 3), (4 * WEIGHT, 1), (1 << 30, 1)]
)
def test_buckets_are_whole_parameters_from_the_end_and_cover_everything_once(bucket_bytes: int, count: int) -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    sums = GradientSum(module.parameters(), terms=1, bucket_bytes=bucket_bytes)
    found = sums.buckets()
    assert len(found) == count
    for bucket in found:
        bucket.sums.add_(1)
    assert sums.buffer.eq(1).all()
    ends = [bucket.sums.data_ptr() for bucket in found[:-1]]
    assert ends == sorted(ends, reverse=True)


def test_a_parameter_without_a_gradient_holds_its_bucket_back_until_the_step() -> None:
    module = layers()
    sums, begun = GradientSum(module.parameters(), terms=1, bucket_bytes=ROW), Begun()
    reduction = GradientReduction(sums, begun)
    for parameter in list(module.parameters())[:-1]:  # all but the last layer's bias
        reduction.add(parameter, torch.ones_like(parameter))
    assert not begun.sums
    reduction.finish()
    assert len(begun.sums) == 5


def test_what_can_not_begin_is_raised_at_the_step() -> None:
    module = layers()
    sums, begun = GradientSum(module.parameters(), terms=1, bucket_bytes=ROW), Begun(fails=1)
    reduction = GradientReduction(sums, begun)
    for parameter in module.parameters():
        reduction.add(parameter, torch.ones_like(parameter))
    with pytest.raises(TransferError, match="a peer has died"):
        reduction.finish()
    # What has begun may still be written to: it is waited for with the next term.
    sums.clear(reduction.let_go)
    assert begun.waited == 0
    first = next(module.parameters())
    sums.add(first, torch.ones_like(first))
    assert begun.waited == 1
    assert int(sums.buffer.count_nonzero()) == first.numel() + 1


def test_fast_sums_have_the_same_buckets() -> None:
    module = layers()
    sums = SUM_OF["fast"](module.parameters(), terms=1, bucket_bytes=ROW // 2)
    assert [bucket.sums.numel() for bucket in sums.buckets()[:-1]] == [ROW // 8] * 4


class Connected:
    """Notes the sums that begin."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.breaks = False

    def begin_sum(self, tensor: Tensor) -> Connected:
        if self.breaks:
            raise TransferError("the connection was closed")
        self.begun.append(int(tensor))
        return self

    def begin_broadcast(self, tensor: Tensor, source: int) -> Connected:
        self.begun.append(10 * source + int(tensor))
        return self

    def wait(self) -> Tensor:
        return torch.zeros(1)

    def keep_alive(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


def still_connecting() -> tuple[LateGroup, threading.Event, Connected]:
    """A group, which is connected once the event is set, and what its sums begin on."""
    connect, there = threading.Event(), Connected()

    def form() -> Any:
        connect.wait()
        return there

    return LateGroup(form, 0, Timeouts()), connect, there


def test_a_group_that_still_connects_lets_sums_begin_later_and_in_order() -> None:
    """Nobody waits in the middle of a backward."""
    group, connect, there = still_connecting()
    first, second = group.begin_sum(torch.tensor(1)), group.begin_broadcast(torch.tensor(2), 2)
    assert not there.begun
    connect.set()
    second.wait()
    group.begin_sum(torch.tensor(3)).wait()
    first.wait()
    assert there.begun == [1, 22, 3]


def test_sums_that_never_began_end_with_their_group() -> None:
    group, connect, there = still_connecting()
    late = group.begin_sum(torch.tensor(1))
    group.cancel()
    for pending in (late, group.begin_sum(torch.tensor(2))):
        with pytest.raises(TransferError):
            pending.wait()
    connect.set()
    assert not there.begun


def test_sums_behind_one_that_could_not_begin_end_as_it_did() -> None:
    """Or whoever waits for them would end its process instead of its generation."""
    group, connect, there = still_connecting()
    there.breaks = True
    late = [group.begin_sum(torch.tensor(n)) for n in (1, 2)]
    connect.set()
    for pending in (*late, *late):
        with pytest.raises(TransferError):
            pending.wait()


@pytest.fixture(scope="module")
def reference() -> Run:
    return fault_free()


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    "faults",
    [
        "--kill W1_1@2:R --keep-finished",
        at_length(""),
        at_length("--kill W0_2@1:W3"),
        at_length("--kill W0_2@1:W3 --keep-finished"),
        at_length("--kill W1_1@2:O"),
        at_length("--kill W1_0@3:R --transport ordered"),
        at_length("--kill W1_0@3:R --optimizer-sharding zero1"),
        at_length("--kill W1_0@2:W3 --synchronous"),
    ],
)
def test_no_bit_differs(faults: str, reference: Run, tmp_path: Path) -> None:
    run = small(tmp_path / "run.jsonl", "--bucket-cap-mb", "0.01", *faults.split())
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert [f["worker"] for f in run.failures] == [w[:4] for w in faults.split() if ":" in w]
