"""What workers of a sharded optimizer get from each other, without processes: segments, and what no segment has."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openrecycle.agent.models.state import AVERAGE
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import ExponentialMovingAverage, StageOptimizer, make_optimizer
from openrecycle.agent.stages.post_validation import CLEAN, SKIP, ValidationResult
from openrecycle.agent.stages.shards import assign
from openrecycle.agent.workers import state_transfer
from openrecycle.agent.workers.sharding import ShardedStage, broadcast
from openrecycle.agent.workers.state_transfer import SegmentReceiver, StateReceiver, StateServer, receive_offer
from openrecycle.planner.jobs.job import Worker

A, B = Worker(0, 0), Worker(1, 0)
LARGE = 300


class _Layer(nn.Module):
    """With a parameter that is empty, and much that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LARGE, 300))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.randn(LARGE, LARGE).t(), requires_grad=False)
        self.register_buffer("table", torch.randn(LARGE, 2000))


def _stage(seed: int, optimizer: Callable[[Any], Any] = torch.optim.AdamW) -> StageOptimizer:
    torch.manual_seed(seed)
    module = _Layer()
    gradients = GradientSum([p for p in module.parameters() if p.requires_grad], terms=1)
    named = [(f"0.{name}", parameter) for name, parameter in module.named_parameters()]
    return StageOptimizer(module, make_optimizer(optimizer, named), gradients, pipelines=2)


def _step(stage: StageOptimizer, validation: ValidationResult | None = CLEAN) -> None:
    generator = torch.Generator().manual_seed(stage.committed)
    for parameter in stage.gradients.parameters:
        stage.gradients.add(parameter, torch.randn(parameter.shape, generator=generator))
    stage.gradients.add_loss(torch.tensor(1.0))
    stage.step(validation)


@contextmanager
def _filled(source: StageOptimizer, target: StageOptimizer, wanted: Sequence[int]) -> Iterator[SegmentReceiver]:
    """Once the segments that are wanted have come."""
    server, wire = StateServer(source, "127.0.0.1", None), _Wire()
    receiver = SegmentReceiver(target, lambda text: None, wanted)
    try:
        server.send_offer(wire.of(A), B)
        holder = receive_offer(wire.of(B), A)
        assert holder is not None
        receiver.begin_filling([(holder, wanted)])
        receiver.wait(10)
        assert not receiver.missing
        yield receiver
    finally:
        receiver.stop()
        server.close()


def _two(steps: int = 1) -> tuple[StageOptimizer, StageOptimizer, list[int]]:
    """A worker with everything, another that lacks what the optimizer keeps, and the numbers of that."""
    have, lack = _stage(0), _stage(0)
    for stage in (have, lack):
        for _ in range(steps):
            _step(stage)
    assert lack.shards is not None
    numbers = sorted(lack.shards.held)
    lack.release(numbers)
    return have, lack, numbers


def test_a_segment_of_nothing_comes_too() -> None:
    have, lack, numbers = _two()
    assert lack.shards is not None and any(not segment.elements for segment in lack.shards.segments)
    with _filled(have, lack, numbers):
        assert lack.shards.held == {*numbers}


def test_a_segment_that_can_not_be_cut_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large its parameter is beside what other pieces have."""
    monkeypatch.setattr(state_transfer, "PIECE_ELEMENTS", 64)
    have, lack, numbers = _two()
    with _filled(have, lack, numbers):
        assert lack.shards is not None and lack.shards.held == {*numbers}


@pytest.mark.parametrize("undo", ["roll back", "put right"])
def test_what_has_come_after_a_step_that_is_undone_is_given_up(undo: str) -> None:
    """It is of the step as it was."""
    have, lack, numbers = _two()
    for stage in (have, lack):
        _step(stage, None)
    with _filled(have, lack, numbers):
        pass
    if undo == "put right":
        assert lack.settle(SKIP)
    else:
        lack.settle(CLEAN)
        lack.roll_back()
    assert lack.shards is not None and not lack.shards.held and lack.shards.stale


# -- between workers ------------------------------------------------------------------------------


class _Wire:
    """Groups of two peers, each in a thread of its own."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._broadcasts: SimpleQueue[Tensor] = SimpleQueue()
        self._meet = threading.Barrier(2, timeout=20)
        self.sent: dict[tuple[Worker, Worker], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self.largest = 0

    def of(self, me: Worker) -> Any:
        def sum_(tensor: Tensor) -> None:
            self._sums[me.pipeline] = tensor.clone()
            self.largest = max(self.largest, tensor.numel() * tensor.element_size())
            self._meet.wait()
            tensor.copy_(self._sums[0] + self._sums[1])
            self._meet.wait()

        def begin_broadcast(tensor: Tensor, source: int) -> Any:
            self.largest = max(self.largest, tensor.nbytes)
            if source == me.pipeline:
                self._broadcasts.put(tensor.clone())
                return SimpleNamespace(wait=lambda: tensor)
            return SimpleNamespace(wait=lambda: tensor.copy_(self._broadcasts.get(timeout=20)))

        def send(to: Worker, tensor: Tensor, tag: int) -> Any:
            self.sent[me, to].put(tensor.clone())
            return SimpleNamespace(wait=lambda: tensor)

        def receive(source: Worker, buffer: Tensor, tag: int) -> Any:
            return SimpleNamespace(wait=lambda: buffer.copy_(self.sent[source, me].get(timeout=20)))

        group = SimpleNamespace(sum=sum_, begin_broadcast=begin_broadcast)
        return SimpleNamespace(peer_group=group, peers=(A, B), send=send, receive=receive, address="127.0.0.1")


def _together(*parts: Callable[[], Any]) -> list[Any]:
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = parts[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == len(parts)
    return [found[i] for i in range(len(parts))]


def _sharded(wire: _Wire, stages: dict[Worker, StageOptimizer]) -> dict[Worker, ShardedStage]:
    held = {w: stage.shards.shards_held for w, stage in stages.items() if stage.shards is not None}
    shards = stages[A].shards
    assert shards is not None
    ownership = assign([A, B], held, {A: 0, B: 0}, shards.sizes)
    return {w: ShardedStage(w, wire.of(w), stage, ownership, lambda text: None) for w, stage in stages.items()}


def _untrained(stage: StageOptimizer) -> list[Tensor]:
    named = dict(stage.module.named_parameters()) | dict(stage.module.named_buffers())
    return [named["0.frozen"], named["0.table"]]


def test_what_has_come_stays_when_a_generation_ends() -> None:
    """Whoever gave it may be dead by now."""
    have, lack, numbers = _two()
    sharded, server = _sharded(_Wire(), {A: have, B: lack}), StateServer(have, "127.0.0.1", None)
    try:
        _together(*(lambda one=one: one.exchange_offers(lambda: server) for one in sharded.values()))
        sharded[B].filling.wait(10)
        sharded[B].end()
    finally:
        server.close()
    assert lack.shards is not None and lack.shards.held == {*numbers}
    _step(lack)
    lack.roll_back()  # one that was stepped here is undone here
    assert lack.shards.held == {*numbers}


def test_a_newcomer_gets_what_no_segment_has() -> None:
    """Not with the description, for which all others wait, but in messages of a bounded size."""
    have, lack = _stage(0), _stage(1)
    for _ in range(2):
        _step(have)
    wire, described = _Wire(), _Wire()
    server, receiver = StateServer(have, "127.0.0.1", None), StateReceiver(lack, lambda text: None)
    try:
        server.send_description(described.of(A), B, at_once=1 << 30)
        sizes = [tensor.numel() for tensor in list(_drained(described, A, B))]
        assert max(sizes) < 20_000
        receiver.receive_description(described.of(B), [A])
    finally:
        server.close()
    assert lack.committed == 2 and not any(map(torch.equal, _untrained(lack), _untrained(have)))
    sharded = _sharded(wire, {A: have, B: lack})
    _together(*(lambda w=w: sharded[w].gather_untrained({B}) for w in (A, B)))
    assert all(map(torch.equal, _untrained(lack), _untrained(have)))
    assert wire.largest <= 1 << 20


def test_parameters_come_whatever_way_they_lie_in_memory() -> None:
    """In one piece here and apart there; of several types in one message; with none at all."""
    flat = torch.arange(8, dtype=torch.float32)
    whole = [flat[:4], flat[4:], torch.ones(3, dtype=torch.bfloat16), torch.rand(3, 2).t(), torch.tensor(True)]
    lacking = [torch.zeros_like(part) for part in whole]
    sources, wire = [A] * 5, _Wire()

    def share(me: Worker, parts: list[Tensor]) -> None:
        broadcast(wire.of(me).peer_group, me, (A, B), [*parts, torch.zeros(0)], [*sources, B])

    _together(lambda: share(A, whole), lambda: share(B, lacking))
    assert all(map(torch.equal, whole, lacking))


def _drained(wire: _Wire, source: Worker, to: Worker) -> Iterator[Tensor]:
    """What was sent, which stays to be received."""
    sent = [wire.sent[source, to].get() for _ in range(wire.sent[source, to].qsize())]
    for tensor in sent:
        wire.sent[source, to].put(tensor)
    yield from sent


def test_layers_that_move_bring_what_no_segment_has() -> None:
    have, peer, comes = _stage(0), _stage(0), _stage(1)
    for stage in (have, peer, comes):
        _step(stage)
    wire, to = _Wire(), Worker(0, 1)
    sharded = _sharded(wire, {A: have, B: peer})
    own, groups = _stage(0), wire.of(to)
    groups.peers = (to,)
    assert own.shards is not None
    alone = assign([to], {to: own.shards.shards_held}, {to: 0}, own.shards.sizes)
    taking = ShardedStage(to, groups, own, alone, lambda text: None)
    moves, span = [(to, A, range(1))], range(1)
    _together(
        *(lambda w=w: sharded[w].move_layers(moves, {}) for w in (A, B)),
        lambda: taking.move_layers(moves, {span: comes}),
    )
    assert all(map(torch.equal, _untrained(comes), _untrained(have)))
    assert comes.parameters_sha256() == have.parameters_sha256()
    assert comes.shards is not None and have.shards is not None and len(comes.shards.held) == len(have.shards.parts)


_averaged = ExponentialMovingAverage(torch.optim.AdamW, decay=0.9)


def test_averages_are_put_together_on_the_one_who_writes_the_weights() -> None:
    stages, alone = {w: _stage(0, _averaged) for w in (A, B)}, _stage(0, _averaged)
    for stage in (*stages.values(), alone):
        _step(stage)
    sharded = _sharded(_Wire(), stages)
    assert alone.shards is not None
    mine, theirs = _together(*(lambda w=w: sharded[w].averages(B) for w in (A, B)))
    assert not mine and sorted(theirs) == ["0.empty", "0.weight"]
    kept = {segment: alone.segment_state(n, [AVERAGE]).tensors for n, segment in enumerate(alone.shards.segments)}
    for segment, tensors in kept.items():
        for tensor in tensors.values():
            name = alone.shards.parameter_names[segment.parameter]
            assert torch.equal(theirs[name].view(-1)[segment.start : segment.end], tensor.view(-1))
