"""Sums gradients over workers: those of a stage, in buckets, and those of parameters that several layers share.

The reduction of a bucket begins as soon as this worker's last micro-batch has added its terms to it, beside the rest of
that micro-batch's backward, as in DistributedDataParallel. All peers begin the same buckets in the same order, so a
worker holds a bucket back until those before it have begun. A worker that runs no micro-batch begins all at its step.

Of shared parameters, such as the embedding and the head of many language models, each layer has a copy of its own, with
the same first values. The gradients of the copies are summed apart, whether or not the layers are in one stage, and are
added once they are reduced: every copy gets the sum of all, and takes the same step. So the copies stay equal, and it
does not matter where the model is cut. Norms count only the first copy.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrecycle.agent.models.layers import Partition, Tied, spans
from openrecycle.agent.models.state import layer_of
from openrecycle.agent.stages.gradients import TRAILING, GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import PendingTransfer, TransferError
from openrecycle.agent.workers import tags
from openrecycle.planner.jobs.job import Worker

# -- the reduction of a stage's gradients, in buckets -------------------------------------------


def from_one(groups: Groups, source: Worker) -> Callable[[Tensor], PendingTransfer | None]:
    """Returns a function that begins the sum of a tensor over the peers, in place, if all know that only `source` has
    any terms, as while its only peer takes its state. The tensor of `source` is copied, which sends half as many bytes
    and adds nothing."""
    group = groups.peer_group
    return lambda tensor: None if group is None else group.begin_broadcast(tensor, groups.peers.index(source))


class GradientReduction:
    """The reduction of one iteration. It takes the terms of the last micro-batch (agent.models.parallelized.Sums), and
    passes them on.

    begin: starts the sum of a tensor over the peers, in place; it returns None if there are no peers. If it raises a
    TransferError, `finish` raises that: the op that is running ends as if nothing were wrong.
    """

    def __init__(self, sums: GradientSum, begin: Callable[[Tensor], PendingTransfer | None]) -> None:
        self._sums, self._begin = sums, begin
        self._waiting = deque(sums.buckets())
        self._lacking = [set(bucket.tensors) for bucket in self._waiting]
        self._pending: list[PendingTransfer] = []
        self._problem: TransferError | None = None
        self.begun = False
        """Whether some sums may be those of several workers already."""

    # -- the last micro-batch's terms ----------------------------------------------------------

    def add(self, tensor: Tensor, term: Tensor) -> None:
        self._sums.add(tensor, term)
        self._has(tensor)

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor) -> None:
        self._sums.add_product(tensor, left, right)
        self._has(tensor)

    def add_change(self, buffer: Tensor, change: Tensor) -> None:
        self._sums.add_change(buffer, change)

    def _has(self, tensor: Tensor) -> None:
        for lacking in self._lacking:
            lacking.discard(id(tensor))
        # The last bucket holds what belongs to no parameter, and is complete only at the step.
        while len(self._lacking) > 1 and not self._lacking[0] and self._problem is None:
            self._begin_next()

    # -- the step ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins the buckets that have not begun."""
        self._sums.buffer  # noqa: B018 (what is lent is taken back, and the terms are counted)
        while self._waiting and self._problem is None:
            self._begin_next()

    def finish(self) -> None:
        """Waits until all sums are there. Raises TransferError."""
        self.begin()
        if self._problem is not None:
            raise self._problem
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def let_go(self) -> None:
        """Waits, after the reduction was given up, until nothing writes to the sums any more. That is soon, since the
        group has been cancelled. Errors are ignored: the op that runs now belongs to the next generation."""
        for pending in self._pending:
            with contextlib.suppress(Exception):
                pending.wait()
        self._pending.clear()

    def _begin_next(self) -> None:
        bucket = self._waiting.popleft()
        self._lacking.pop(0)
        self.begun = True
        try:
            pending = self._begin(bucket.sums)
        except TransferError as error:
            self._problem = error
            return
        if pending is not None:
            self._pending.append(pending)


# -- parameters that several layers share -------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """The sums of the copies `names`, which the worker `source` sends to `to`."""

    source: Worker
    to: Worker
    names: tuple[str, ...]


def routes(tied: Tied, partition: Partition, living: Collection[Worker]) -> tuple[Route, ...]:
    """Returns who sends whom which sums. Every worker gets the sums of all copies of its shared parameters that are on
    other stages, from one worker of each of these stages. The workers of a stage take turns in sending."""
    stage_of = {layer: stage for stage, span in enumerate(spans(partition)) for layer in span}
    peers: dict[int, list[Worker]] = {}
    for worker in sorted(living):
        peers.setdefault(worker.stage, []).append(worker)
    needed: dict[tuple[int, int], list[str]] = {}
    for group in tied:
        holders = {name: stage_of[layer_of(name)] for name in group}
        for to in sorted(set(holders.values())):
            for name, source in holders.items():
                if source != to:
                    needed.setdefault((source, to), []).append(name)
    return tuple(
        Route(peers[source][turn % len(peers[source])], worker, tuple(names))
        for (source, to), names in sorted(needed.items())
        for turn, worker in enumerate(peers[to])
    )


class TiedSums:
    """One worker's part in summing shared parameters, in one generation and partition."""

    def __init__(self, me: Worker, groups: Groups, tied: Tied, partition: Partition, living: Sequence[Worker]) -> None:
        self._groups = groups
        mine = spans(partition)[me.stage]
        self._tied = [group for group in tied if any(layer_of(name) in mine for name in group)]
        all_routes = routes(tied, partition, living)
        self._gives = [route for route in all_routes if route.source == me]
        self._takes = [route for route in all_routes if route.to == me]
        self._sent: list[PendingTransfer] = []

    def sum(self, iteration: int, optimizer: StageOptimizer) -> None:
        """Makes the sum of each copy here the sum over all copies. Called once the stage's sums are reduced. Raises
        TransferError."""
        if not self._tied:
            return
        for pending in self._sent:
            pending.wait()
        sums, own = optimizer.gradients, dict(optimizer.module.named_parameters())
        own = {name: p for name, p in own.items() if p.requires_grad}
        tag = tags.in_iteration(tags.TIED, iteration)
        # Parameters that are not trained have no sums, and neither have their copies.
        shape = {name: own[here] for group in self._tied for name in group for here in group if here in own}
        gives = [(route.to, trained) for route in self._gives if (trained := [n for n in route.names if n in own])]
        self._sent = [self._groups.send(to, sums.part([own[name] for name in names]).cpu(), tag) for to, names in gives]
        coming = []
        for route in self._takes:
            if names := [name for name in route.names if name in shape]:
                like = sums.part_like([shape[name] for name in names])
                coming.append((names, self._groups.receive(route.source, like, tag)))
        terms: dict[str, Tensor] = {}
        for names, pending in coming:
            part = pending.wait().to(sums.buffer.device)
            sizes = [shape[name].numel() for name in names]
            *values, counts = torch.split(part[:-TRAILING], [*sizes, len(sizes)])
            terms |= {name: torch.cat([v, c]) for name, v, c in zip(names, values, torch.split(counts, 1), strict=True)}
        for group in self._tied:
            if group[0] not in shape:
                continue
            total: Tensor | None = None
            for name in group:  # in the same order on all workers, which matters for sums of floats
                term = terms[name] if name in terms else sums.part([own[name]])[:-TRAILING]
                total = term if total is None else sums.plus(total, term)
            assert total is not None
            for name in group:
                if name in own:
                    sums.put(own[name], total)
