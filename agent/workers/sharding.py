"""What the workers of a stage exchange if the optimizer's state is sharded over them (ZeRO-1).

In a step, the gradients of each segment are summed for the workers that hold its state (`begin_reduce`). These step it,
and the parameters of each segment go from one of its holders to all other workers (`gather`). So a worker may have
taken a step while some of its parameters are of the step before. If a death comes in between, or a step is corrected or
undone, parameters are gathered again before anything reads them.

That is all that recovery has to know. A worker that has reduced an iteration has what the step of its own segments
needs, and takes it (agent.workers.recovery). It never needs what others step: each holder of a segment gets its sum,
and no worker steps before all living peers have the sums of what they hold. So if one worker has stepped, all living
holders of each segment can step; or none had stepped before the iteration broke, and all go back.

At the beginning of each generation, agent.stages.shards decides from what workers hold which of them are to own it.
What an owner lacks comes from the holders, beside the training, piece by piece like a newcomer's state
(agent.workers.state_transfer), and is stepped here from then on. When the owners have everything, the others give it
up. A newcomer only needs the parameters to take part, and then is like the others at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch import Tensor

from openrecycle.agent.models.layers import Span
from openrecycle.agent.models.state import AVERAGE, StageState, StateError, decode, layer_of, pack, runs_of, unpack
from openrecycle.agent.stages.optimizer import Shards, StageOptimizer
from openrecycle.agent.stages.shards import Ownership
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import Group, PendingTransfer, SummedPart, TransferError
from openrecycle.agent.workers import tags
from openrecycle.agent.workers.state_transfer import (
    Holder,
    SegmentReceiver,
    StateServer,
    large_untrained,
    receive_offer,
    receive_packed,
    send_no_offer,
    send_packed,
)
from openrecycle.planner.jobs.job import Worker

MESSAGE_BYTES = 1 << 20
"""The most bytes of parameters or state in a message."""
_AT_A_TIME = 4
"""How many messages are under way at a time."""


class ShardedStage:
    """One worker's part in a sharded stage, in one generation. All methods raise TransferError.

    ownership: the same on all peers. say: called with what people should know. complete: called once all owners have
    what they own, so that any worker can leave. whole: names of parameters whose sums all peers need.
    """

    def __init__(
        self,
        me: Worker,
        groups: Groups,
        optimizer: StageOptimizer,
        ownership: Ownership,
        say: Callable[[str], None],
        complete: Callable[[], None] = lambda: None,
        whole: Collection[str] = (),
    ) -> None:
        assert optimizer.shards is not None
        self._me, self._groups, self._optimizer, self._ownership = me, groups, optimizer, ownership
        self._shards: Shards = optimizer.shards
        self._group, self.peers = groups.peer_group, groups.peers
        shards = self._shards
        primaries = [ownership.primary[segment.shard] for segment in shards.segments]
        self._primaries = primaries
        places = {peer: place for place, peer in enumerate(self.peers)}
        self.primaries: Sequence[int] = [places[worker] for worker in primaries]
        """For each segment, the worker from which the others take its parameters, as its place among the peers."""
        shards.primary = frozenset(n for n, worker in enumerate(primaries) if worker == me)
        mine = frozenset(k for k, holders in enumerate(ownership.holders) if me in holders)
        optimizer.release([n for n in sorted(shards.held) if shards.segments[n].shard not in mine])
        self.filling = SegmentReceiver(optimizer, say, shards.segments_in(ownership.lacking(me)))
        self._complete, self._whole = complete, whole
        self._shared = False
        self._parts = self._steppers()
        if ownership.complete:
            self._trim()

    # -- what is lacking -----------------------------------------------------------------------

    def exchange_offers(self, server: Callable[[], StateServer]) -> None:
        """Begins to take what this worker lacks, and offers what others lack. server: returns this worker's server."""
        shards, ownership, sources = self._shards, self._ownership, list[tuple[Holder, Collection[int]]]()
        for peer in self.peers:
            gives: dict[Worker, set[int]] = {}
            for shard in sorted(ownership.lacking(peer)):
                for holder in ownership.holders[shard][:2]:
                    gives.setdefault(holder, set()).add(shard)
            if self._me in gives:
                try:
                    giving = server()
                except TransferError:
                    send_no_offer(self._groups, peer)  # another holder may give it, or the next generation
                else:
                    giving.send_offer(self._groups, peer)
            elif peer == self._me:
                for holder in sorted(gives):
                    offer = receive_offer(self._groups, holder)
                    if offer is not None:
                        sources.append((offer, shards.segments_in(gives[holder])))
        if sources:
            self.filling.begin_filling(sources)

    def stepped(self, incomplete: int) -> None:
        """Called after a step. incomplete: how many workers of the stage lacked something before it."""
        if not incomplete:
            self._trim()

    def _trim(self) -> None:
        if not self._shared:
            self._shared = True
            self.filling.stop()  # all came before a step that was taken since, so a correction takes nothing back
            self._optimizer.release(self._shards.segments_in(self._ownership.surplus(self._me)))
            self._parts = self._steppers()
            self._complete()

    def end(self) -> None:
        """Ends the exchanges of a generation that is being left."""
        self.filling.stop()

    # -- around a step -------------------------------------------------------------------------

    def _steppers(self) -> list[SummedPart]:
        """Returns which peers need which parts of the gradients' sums. Neighbouring parts for the same peers are
        one."""
        shards, out, place_of = self._shards, list[SummedPart](), self._optimizer.gradients.place_of
        for segment, part in zip(shards.segments, shards.parts, strict=True):
            steppers = self._ownership.steppers(segment.shard, shared=self._shared)
            if shards.parameter_names[segment.parameter] in self._whole:
                steppers = tuple(dict.fromkeys((steppers[0], *self.peers)))
            place, ranks = place_of(part), tuple(map(self.peers.index, steppers))
            if out and out[-1].ranks == ranks and out[-1].end == place.start:
                out[-1] = out[-1]._replace(end=place.stop)
            elif place:
                out.append(SummedPart(place.start, place.stop, ranks))
        return out

    def begin_reduce(self, tensor: Tensor) -> PendingTransfer | None:
        """Starts to sum a part of the gradients' buffer over the peers, in place: each segment for the workers that may
        step it, and what is in no segment for all. None: there are no peers. All must call it in the same order."""
        group, start = self._group, int(tensor.storage_offset())
        if group is None:
            return None
        end = start + tensor.numel()
        parts = [
            SummedPart(max(part.start, start) - start, min(part.end, end) - start, part.ranks)
            for part in self._parts
            if part.start < end and start < part.end
        ]
        covered = parts[-1].end if parts else 0
        if all(len(part.ranks) == len(self.peers) for part in parts):
            return group.begin_sum(tensor)
        if covered < len(tensor):
            parts.append(SummedPart(covered, len(tensor), tuple(range(len(self.peers)))))
        assert all(a.end == b.start for a, b in pairwise([SummedPart(0, 0, ()), *parts])), "sums are left out"
        return group.begin_scatter(tensor, parts)

    def measure(self) -> None:
        """Exchanges what the validation needs of all peers' sums, so that all get the same as if they had all sums."""
        optimizer = self._optimizer
        if not optimizer.tells_measures:
            return
        measures = optimizer.measures().to(optimizer.gradients.device)
        if self._group is not None:
            self._group.sum(measures)
        optimizer.take_measures(measures.cpu())

    def gather(self) -> None:
        """Takes the parameters that others step, if this worker's may be of another step. All peers call it
        together."""
        shards = self._shards
        if shards.stale and self._group is not None:
            parts = [part.detach() for part in shards.parts]
            broadcast(self._group, self._me, self.peers, parts, self._primaries)
        shards.caught_up()

    def gather_untrained(self, bare: Collection[Worker]) -> None:
        """Sends what is in no segment to the peers that lack it (`bare`). All peers call it together."""
        source = next((peer for peer in self.peers if peer not in bare), None)
        if bare and source is not None and self._group is not None:
            parts = [part for tensor in large_untrained(self._optimizer).values() for part in _cut(tensor)]
            broadcast(self._group, self._me, self.peers, parts, [source] * len(parts))
        self._shards.untrained_came()

    # -- averages, for the weights in the end ----------------------------------------------------

    def averages(self, to: Worker) -> dict[str, Tensor]:
        """Collects the moving averages of parameters that have one, by name, on the worker `to`; others return none.
        All peers call it together."""
        shards, optimizer = self._shards, self._optimizer
        runs = runs_of(_bytes(shards, range(len(shards.parts))), MESSAGE_BYTES, self._primaries)
        parameters, averages = dict(optimizer.module.named_parameters()), dict[str, Tensor]()

        def put(number: int, state: StageState) -> None:
            name, segment = shards.names[number].partition("@")[0], shards.segments[number]
            for average in decode(state.document["kept"], state.tensors).values():
                whole = averages.setdefault(name, torch.zeros(parameters[name].shape, dtype=average.dtype))
                whole.view(-1)[segment.start : segment.end].copy_(average.reshape(-1))

        for a, b in runs:
            there = self._primaries[a]
            if there == to == self._me:
                for number in range(a, b):
                    put(number, optimizer.segment_state(number, [AVERAGE]))
            elif to == self._me:
                self._receive_states(there, range(a, b), put)
            elif there == self._me:
                self._send_states(to, range(a, b), [AVERAGE])
        return averages

    def _send_states(self, to: Worker, numbers: range, keys: Collection[str] | None = None) -> None:
        states = [self._optimizer.segment_state(number, keys) for number in numbers]
        tensors = {name: tensor for state in states for name, tensor in state.tensors.items()}
        self._send_packed(to, StageState({"segments": [state.document for state in states]}, tensors))

    def _receive_states(self, source: Worker, numbers: range, put: Callable[[int, StageState], None]) -> None:
        state = self._receive_packed(source)
        try:
            for number, document in zip(numbers, state.document["segments"], strict=True):
                put(number, StageState(document, state.tensors))
        except (StateError, KeyError, TypeError, ValueError) as error:
            raise TransferError(f"the optimizer's state from {source} can't be used: {error}", source) from None

    def _send_packed(self, to: Worker, state: StageState) -> None:
        send_packed(self._groups, to, pack(state), tags.SHARDS)

    def _receive_packed(self, source: Worker) -> StageState:
        try:
            return unpack(*receive_packed(self._groups, source, tags.SHARDS))
        except StateError as error:
            raise TransferError(f"the state from {source} can't be used: {error}", source) from None

    # -- layers that move ----------------------------------------------------------------------

    def move_layers(self, moves: Sequence[tuple[Worker, Worker, Span]], coming: Mapping[Span, StageOptimizer]) -> None:
        """Sends parameters and optimizer state of layers that go to other stages. Called before an iteration, while all
        workers wait.

        moves: (to, source, layers), the same on all workers. coming: for layers that come to this worker, the optimizer
        that takes all of it; its layers and what is small are there already.

        This is not done beside the training, as with an optimizer that is not sharded. A worker that gets a layer needs
        all of its state, and each peer of the stage that has the layer holds only a part. The moves are done one after
        the other, so that no more than a message is copied.
        """
        shards, optimizer = self._shards, self._optimizer
        named = dict(optimizer.module.named_parameters())
        for to, source, span in moves:
            if to == self._me:
                self._take_layers(source, coming[span])
            elif source.stage == self._me.stage:
                mine = _numbers(shards, span)
                at = mine.start
                if source == self._me:
                    for name, tensor in large_untrained(optimizer, span).items():
                        self._send_packed(to, StageState({}, {name: tensor}))
                if source == self._me and mine:
                    primaries = torch.tensor([self._primaries[k].pipeline for k in mine], dtype=torch.int64)
                    self._send_packed(to, StageState({}, {"primaries": primaries}))
                    for name in _parameters(shards, span):
                        self._send_packed(to, StageState({}, {name: named[name].detach()}))
                for a, b in runs_of(_bytes(shards, mine), MESSAGE_BYTES, self._primaries[at : mine.stop]):
                    if self._primaries[at + a] == self._me:
                        self._send_states(to, range(at + a, at + b))

    def _take_layers(self, source: Worker, into: StageOptimizer) -> None:
        shards, named = into.shards, dict(into.module.named_parameters())
        assert shards is not None
        into.release(sorted(shards.held))

        def take(values: Mapping[str, Tensor]) -> None:
            with torch.no_grad():
                for name, own in values.items():
                    value = self._receive_packed(source).tensors[name]
                    if value.shape != own.shape:
                        raise StateError(f"{name}: shape {tuple(value.shape)}, expected {tuple(own.shape)}")
                    own.copy_(value)

        try:
            take(large_untrained(into))
            if not shards.parts:
                return
            told = self._receive_packed(source).tensors["primaries"].tolist()
            primaries = [Worker(pipeline, source.stage) for pipeline in told]
            if len(primaries) != len(shards.parts):
                raise StateError(f"{len(primaries)} segments, expected {len(shards.parts)}")
            take({name: named[name] for name in shards.parameter_names})
        except (StateError, KeyError) as error:
            raise TransferError(f"the layers from {source} can't be used: {error}", source) from None
        device = into.gradients.device

        def hold(number: int, state: StageState) -> None:
            into.hold(number, decode(state.document["kept"], state.tensors, device))

        for a, b in runs_of(_bytes(shards, range(len(shards.parts))), MESSAGE_BYTES, primaries):
            self._receive_states(primaries[a], range(a, b), hold)


def broadcast(
    group: Group, me: Worker, peers: Sequence[Worker], parts: Sequence[Tensor], sources: Sequence[Worker]
) -> None:
    """Sends each tensor from the worker that has it (`sources`) to all `peers`, which call it together. Its layout in
    memory may differ between workers. Raises TransferError."""
    under_way = deque[tuple[PendingTransfer, Sequence[Tensor]]]()

    def finish() -> None:
        pending, apart = under_way.popleft()
        came = pending.wait()
        if apart:
            for part, its in zip(apart, torch.split(came, [part.nbytes for part in apart]), strict=True):
                part.copy_(its.clone().view(part.dtype).view(part.shape))

    try:
        for a, b in runs_of([part.nbytes for part in parts], MESSAGE_BYTES, sources):
            run, mine = parts[a:b], sources[a] == me
            memory, apart = _one_piece(run), list[Tensor]()
            if memory is None and mine:
                memory = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in run])
            elif memory is None:
                apart = list(run)
                memory = torch.empty(sum(p.nbytes for p in run), dtype=torch.uint8, device=run[0].device)
            if memory.numel():
                under_way.append((group.begin_broadcast(memory, peers.index(sources[a])), apart))
            if len(under_way) == _AT_A_TIME:
                finish()
        while under_way:
            finish()
    except TransferError:
        for pending, _ in under_way:  # nothing may write to parameters once recovery begins
            with suppress(TransferError):
                pending.wait()
        raise


def _numbers(shards: Shards, span: Span) -> range:
    """Returns the numbers of the segments of these layers, which follow each other."""
    found = [k for k, name in enumerate(shards.names) if layer_of(name) in span]
    return range(found[0], found[-1] + 1) if found else range(0)


def _parameters(shards: Shards, span: Span) -> list[str]:
    return [name for name in shards.parameter_names if layer_of(name) in span]


def _bytes(shards: Shards, numbers: range) -> list[int]:
    return [shards.parts[k].nbytes for k in numbers]


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    """Cuts a tensor into parts that fit a message each, if it is contiguous."""
    return torch.split(tensor.view(-1), MESSAGE_BYTES // tensor.element_size()) if tensor.is_contiguous() else [tensor]


def _one_piece(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns the memory of these tensors as bytes, if they follow each other in one storage; None: they don't."""
    storage, first = parts[0].untyped_storage(), parts[0].data_ptr()
    end = first
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end:
            return None
        end += part.nbytes
    begin = first - storage.data_ptr()
    if begin + end - first > storage.nbytes():
        return None  # they are in other storages, and follow each other by chance
    return torch.empty(0, dtype=torch.uint8, device=parts[0].device).set_(storage, begin, (end - first,), (1,))
