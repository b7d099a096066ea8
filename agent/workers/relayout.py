"""Moves layers to other stages, beside the training.

A worker whose stage gets layers builds them beside its own, with an optimizer of their own. This takes every step on
the reduced sums of the stage that still has the layers, which one of its workers sends. Its values come piece by piece,
like a newcomer's (agent.workers.state_transfer). When all workers have what they are to get, and all know it, every
worker begins the same iteration with its new layers; nothing is copied then. Until that moment all run the plan of the
old partition, and a death costs only the layers that are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.config.options import Optimization
from openrecycle.agent.models.layers import LayerStack, Partition, Span, build_layers, spans
from openrecycle.agent.models.workload import Workload
from openrecycle.agent.stages.backward import StrategyName
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer, stage_optimizer
from openrecycle.agent.stages.stage import sums_of
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import PendingTransfer, TransferError
from openrecycle.agent.workers import tags
from openrecycle.agent.workers.state_transfer import Holder, StateReceiver
from openrecycle.planner.jobs.job import Job, Worker

_MOST_LAYERS = 1 << 16


@dataclass(frozen=True, order=True)
class Move:
    """The layers from `first` to before `after` go to the worker `to`, from `source` of the stage that has them."""

    to: Worker
    source: Worker
    first: int
    after: int

    @property
    def span(self) -> Span:
        return range(self.first, self.after)


def moves(current: Partition, target: Partition, living: Collection[Worker], attempt: int = 0) -> tuple[Move, ...]:
    """Returns which layers move from worker to worker, in order. The receivers of a stage's layers are spread over its
    workers.

    living: the workers, which have their stage's state by the current partition. attempt: rises with each generation,
    so that a transfer that failed is asked of another peer.
    """
    peers: dict[int, list[Worker]] = {}
    for worker in sorted(living):
        peers.setdefault(worker.stage, []).append(worker)
    old, new = spans(current), spans(target)
    out, turns = [], dict.fromkeys(peers, attempt)
    for worker in sorted(living):
        for stage, own in enumerate(old):
            mine = new[worker.stage]
            first, after = max(own.start, mine.start), min(own.stop, mine.stop)
            if stage != worker.stage and first < after:
                source = peers[stage][turns[stage] % len(peers[stage])]
                turns[stage] += 1
                out.append(Move(worker, source, first, after))
    return tuple(sorted(out))


class IncomingLayers:
    """Layers that come to this worker from another stage. They are built here, filled, and take every step of that
    stage. say: called with what people should know."""

    def __init__(
        self,
        span: Span,
        layers: int,
        workload: Workload,
        job: Job,
        seed: int,
        optimization: Optimization,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self.span = span
        module = build_layers(workload, span, layers, seed).to(device)

        def sums(moving: Sequence[Tensor]) -> GradientSum:
            return sums_of(module, moving, workload, job, optimization, device)

        self._sums = sums
        self.optimizer = stage_optimizer(workload, module, sums(()), optimization, job.pipelines, seed)
        self.state = StateReceiver(self.optimizer, say)
        self.strategy: StrategyName | None = None
        self.lost = False
        """Whether the layers have missed a step."""

    @property
    def gradients(self) -> GradientSum:
        return self.optimizer.gradients

    @property
    def missing(self) -> int:
        """The number of pieces that are missing; at least 1 while anything is still to come."""
        shards = self.optimizer.shards
        there = self.state.complete and not self.lost and (shards is None or len(shards.held) == len(shards.parts))
        return 0 if there else max(1, self.state.missing)

    def begin(self, description: Mapping[str, Any], holders: Sequence[Holder]) -> None:
        """Begins to take the layers that some peer has described. From here on that stage's steps are taken here,
        too."""
        optimizer, moving = self.optimizer, set(description["moving"])
        buffers = [buffer for name, buffer in optimizer.module.named_buffers() if name in moving]
        optimizer.gradients = self._sums(buffers)
        self.strategy = description["split"]
        self.lost = False
        self.state.begin(description, holders)

    def missed(self) -> None:
        """Notes that the sums of a step did not come."""
        self.lost = True

    def undone(self) -> None:
        """Notes that a step which it may have missed was taken by no worker."""
        self.lost = False


class Exchange:
    """Sends, in each iteration of a generation, the reduced sums of layers that move to the workers that get them."""

    def __init__(
        self,
        me: Worker,
        groups: Groups,
        planned: Iterable[Move],
        coming: Mapping[Span, IncomingLayers],
        own: StageOptimizer,
    ) -> None:
        self._groups, self._coming, self._own = groups, coming, own
        self._gives = [move for move in planned if move.source == me]
        self._takes = [move for move in planned if move.to == me]
        self._sent: list[PendingTransfer] = []

    def _post(self, iteration: int) -> list[tuple[IncomingLayers, PendingTransfer]]:
        """Sends what others need of this worker's reduced sums, and starts to receive what it needs. Raises
        TransferError."""
        for pending in self._sent:
            pending.wait()
        self._sent = []
        for move in self._gives:
            part = self._own.gradients.part(self._own.tensors_of(move.span))
            self._sent.append(self._groups.send(move.to, part.cpu(), _tag(iteration, move)))
        asked = []
        for move in self._takes:
            coming = self._coming[move.span]
            like = torch.empty_like(coming.gradients.buffer, device="cpu")
            asked.append((coming, self._groups.receive(move.source, like, _tag(iteration, move))))
        return asked

    @property
    def stepped(self) -> list[StageOptimizer]:
        """The optimizers of the layers that have missed no step."""
        return [coming.optimizer for coming in self._coming.values() if not coming.lost]

    def take(self, iteration: int) -> None:
        """Waits for the sums of an iteration. Raises TransferError. Layers whose sums did not come are lost then, and
        the training goes on without them."""
        broken: TransferError | None = None
        try:
            asked = self._post(iteration)
        except TransferError as error:
            asked, broken = [], error
        arrived = set()
        for coming, pending in asked:
            try:
                coming.gradients.buffer.copy_(pending.wait())
                arrived.add(coming.span)
            except TransferError as error:
                broken = error
        for span, coming in self._coming.items():
            if span not in arrived:
                coming.missed()
        if broken is not None:
            raise broken


def _tag(iteration: int, move: Move) -> int:
    return tags.in_iteration(tags.LAYERS, iteration, move.first, _MOST_LAYERS)


def regrouped(
    workload: Workload,
    own: StageOptimizer,
    coming: Sequence[StageOptimizer],
    span: Span,
    optimization: Optimization,
    job: Job,
) -> StageOptimizer:
    """Returns an optimizer of the layers of `span`, which must be here, with all state that is kept of them. Copies
    nothing."""
    parts = [own, *coming]
    here: dict[int, nn.Module] = {number: layer for part in parts for number, layer in part.module.layers}
    module = LayerStack({number: here[number] for number in span}, own.module.copies, own.module.form)
    moving_here = {id(buffer) for part in parts for buffer in part.gradients.moving}
    moving: list[Tensor] = [b for b in module.buffers() if id(b) in moving_here]
    gradients = sums_of(module, moving, workload, job, optimization, own.gradients.device)
    made = stage_optimizer(workload, module, gradients, optimization, job.pipelines, own.seed)
    made.adopt(parts)
    return made


def common_strategy(names: Iterable[StrategyName | None]) -> StrategyName | None:
    """Returns how to split the backward of layers that come from several stages, given how each of these is split;
    None: they differ, and it has to be tried."""
    found = set(names)
    return found.pop() if len(found) == 1 else None
