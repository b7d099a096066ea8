"""Decides which worker of a stage keeps which part of a sharded optimizer's state (ZeRO-1). Pure.

A stage's parameters are cut into segments, and the segments of a layer are grouped into shards. A segment depends only
on its parameter, and a shard only on its layer and the job. So they are the same on all peers, whichever are alive, and
wherever the model is cut into stages. Every shard has two owners, which both step its parameters, so one death loses
none. The owners are decided again in each generation, from what the living peers hold (`assign`): nothing has to be
remembered, and nothing can be remembered differently.

A segment has as many elements as norms are summed at a time, or a multiple of that, counted from the parameter's
beginning. So its step and its norms have the same bits as those of the whole parameter. (Of torch's optimizers that
step each element by itself, this holds for all, also fused and foreach ones, with one and two threads, if segments are
a multiple of 32,768 elements. It does not hold for a fused AdamW with 999 or 4,097.)

After "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., SC'20), where each
shard has one owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, groupby

from openrecycle.planner.jobs.job import Worker

SHARDS_PER_PIPELINE = 8
"""The most shards of a layer, for each pipeline. With N peers, none keeps more than 1 / (4 N) above its share of a
layer."""
MAX_SEGMENT = 1 << 18
"""The most elements of a segment. With AdamW in fp32 its state is 2 MiB: 40 ms on a link of 50 MB/s."""


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `end` of a parameter. parameter: its place among those that are trained."""

    parameter: int
    start: int
    end: int
    shard: int

    @property
    def elements(self) -> int:
        return self.end - self.start


def segments_of(
    sizes: Sequence[int], layers: Sequence[int], whole: Collection[int], align: int, pipelines: int
) -> tuple[Segment, ...]:
    """Cuts a stage's parameters into segments. Their shards are numbered from 0, and none is empty.

    sizes: elements of each trained parameter, in order. layers: the layer of each; parameters of one layer follow each
    other. whole: places of parameters that can't be cut. align: segments begin at multiples of this.
    """
    wanted, out, shards = SHARDS_PER_PIPELINE * pipelines, list[Segment](), 0
    for _, places in groupby(range(len(sizes)), layers.__getitem__):
        cut: list[tuple[int, int, int]] = []
        for place in places:
            size = sizes[place]
            longest = max(align, min(-(-size // (wanted * align)) * align, MAX_SEGMENT // align * align))
            # An empty parameter has a segment, too: if it is split over ranks, other ranks may have rows of it.
            starts = range(0, max(1, size), max(1, size) if place in whole else longest)
            cut += [(place, start, size if place in whole else min(start + longest, size)) for start in starts]
        ends = list(accumulate(end - start for _, start, end in cut))
        # The middle of a segment decides on its shard, so that shards are as even as segments allow.
        raw = [(2 * end - (b - a)) * wanted // max(1, 2 * ends[-1]) for end, (_, a, b) in zip(ends, cut, strict=True)]
        number = {shard: shards + i for i, shard in enumerate(dict.fromkeys(raw))}
        out += [Segment(*piece, number[shard]) for piece, shard in zip(cut, raw, strict=True)]
        shards += len(number)
    return tuple(out)


class ShardLostError(RuntimeError):
    """No living worker holds some of the shards; `shards` has their numbers."""

    def __init__(self, shards: Sequence[int]) -> None:
        count = "1 part" if len(shards) == 1 else f"{len(shards)} parts"
        super().__init__(f"all workers that kept {count} of the optimizer's state are gone")
        self.shards = tuple(shards)


@dataclass(frozen=True)
class Ownership:
    """Who keeps each shard, by its number. primary: the worker from which the others take its parameters after a step.
    owners: the one or two workers that are to keep it. holders: the workers that have it now, and step it until all
    owners have it."""

    primary: tuple[Worker, ...]
    owners: tuple[tuple[Worker, ...], ...]
    holders: tuple[tuple[Worker, ...], ...]

    def lacking(self, peer: Worker) -> frozenset[int]:
        """Returns the shards that `peer` owns and has to get from their holders."""
        return frozenset(
            k for k, (owners, held) in enumerate(zip(self.owners, self.holders, strict=True))
            if peer in owners and peer not in held
        )  # fmt: skip

    def surplus(self, peer: Worker) -> frozenset[int]:
        """Returns the shards that `peer` holds and others own: it gives them up once all owners have theirs. Those
        whose parameters the others take from it are not among them: a worker that is to leave steps these until it has
        left.
        """
        return frozenset(
            k for k, (owners, held) in enumerate(zip(self.owners, self.holders, strict=True))
            if peer in held and peer not in owners and self.primary[k] != peer
        )  # fmt: skip

    def steppers(self, shard: int, *, shared: bool) -> tuple[Worker, ...]:
        """Returns the workers that step a shard, or may do so before the next step, the primary first. shared: all
        owners have what they own, and the others have given it up."""
        first = self.primary[shard]
        found = {*self.owners[shard], *(() if shared else self.holders[shard])} - {first}
        return (first, *sorted(found))

    @property
    def complete(self) -> bool:
        """Whether every owner has what it owns."""
        return all(set(owners) <= set(held) for owners, held in zip(self.owners, self.holders, strict=True))


def lost_together(places: Mapping[Worker, tuple[int, int]]) -> dict[Worker, int]:
    """Returns which peers would be lost together, as the `hosts` for `assign`. places: the machine and the node of each
    peer, as numbers.

    When a machine fails, its nodes fail with it: so if there are several machines, they count. On one machine, as when
    its nodes are containers, the nodes count: workers end with their launcher.
    """
    several = len({machine for machine, _ in places.values()}) > 1
    return {peer: machine if several else node for peer, (machine, node) in places.items()}


def assign(
    peers: Sequence[Worker],
    held: Mapping[Worker, Collection[int]],
    hosts: Mapping[Worker, int],
    sizes: Sequence[int],
    leaving: Collection[Worker] = (),
) -> Ownership:
    """Decides which of the living `peers` of a stage own which shards.

    held: the shards that each peer has whole, at the iteration agreed on. hosts: where each is, as a number: the two
    owners of a shard are on different hosts if there are several (`lost_together`). sizes: of the shards, in elements.
    leaving: peers that are to leave. They own nothing, unless all are to leave: others first take what they hold.

    The result does not depend on the order of the arguments. If what is held is balanced, it stays; otherwise as little
    moves as a greedy choice finds. Raises ShardLostError.
    """
    holders = tuple(tuple(p for p in sorted(peers) if k in held.get(p, ())) for k in range(len(sizes)))
    order = sorted(set(peers) - set(leaving)) or sorted(peers)
    if lost := [k for k, found in enumerate(holders) if not found]:
        raise ShardLostError(lost)
    wanted = min(2, len(order))
    slack = sum(sizes) // (8 * len(order)) + max(sizes, default=0)
    staying = tuple(tuple(p for p in found if p in order) for found in holders)
    owners = _choose(order, staying, hosts, sizes, slack)
    if all(len(found) == wanted for found in staying):
        most, apart = _weigh(staying, hosts, sizes)
        most_then, apart_then = _weigh(owners, hosts, sizes)
        if apart >= apart_then and most <= most_then + slack:
            owners = staying
    loads = dict.fromkeys(sorted(peers), 0)
    primary = []
    for k, found in enumerate(owners):
        # If only a leaving worker has the shard, the others take its parameters from it until they have its state.
        able = [p for p in found if p in holders[k]] or holders[k]
        first = min(able, key=lambda p: (loads[p], p))
        loads[first] += sizes[k]
        primary.append(first)
    return Ownership(tuple(primary), owners, holders)


def _weigh(owners: Sequence[Sequence[Worker]], hosts: Mapping[Worker, int], sizes: Sequence[int]) -> tuple[int, int]:
    """Returns the most elements that a worker owns, and how many shards are on more than one host."""
    loads = Counter[Worker]()
    for found, size in zip(owners, sizes, strict=True):
        for peer in found:
            loads[peer] += size
    return max(loads.values(), default=0), sum(len({hosts[p] for p in found}) > 1 for found in owners)


def _choose(
    order: Sequence[Worker],
    holders: Sequence[Sequence[Worker]],
    hosts: Mapping[Worker, int],
    sizes: Sequence[int],
    slack: int,
) -> tuple[tuple[Worker, ...], ...]:
    loads = dict.fromkeys(order, 0)
    chosen: dict[int, tuple[Worker, ...]] = {}
    place = {p: i for i, p in enumerate(order)}
    heap = [(0, i, p) for i, p in enumerate(order)]

    def turn(k: int, peer: Worker) -> int:
        """Orders equal peers, in another way for each shard. So a peer shares its shards with many others, and when it
        is gone, many can give what others are to get."""
        return ((k + 1) * 2654435761 ^ (place[peer] + 1) * 2246822519) >> 7 & 0xFFFF

    def least(first: Worker, *, apart: bool) -> Worker | None:
        """Returns the peer with the least load beside `first`. apart: only on another host."""
        seen, found = list[tuple[int, int, Worker]](), None
        while heap and found is None:
            load, at, peer = heappop(heap)
            if load != loads[peer]:
                continue  # its load has grown since, and it has a newer entry
            seen.append((load, at, peer))
            if peer != first and (hosts[peer] != hosts[first] or not apart):
                found = peer
        for entry in seen:
            heappush(heap, entry)
        return found

    # Shards that few hold come first: their holders can still be relieved of other shards.
    for k in sorted(range(len(sizes)), key=lambda k: (len(holders[k]), k)):
        first = min(holders[k] or order, key=lambda p: (loads[p], turn(k, p)))
        apart = True
        second = least(first, apart=True)
        if second is None:
            apart, second = False, least(first, apart=False)
        if second is not None:
            near = [
                p for p in holders[k]
                if p != first and loads[p] <= loads[second] + slack // 8 and (hosts[p] != hosts[first] or not apart)
            ]  # fmt: skip
            second = min(near, key=lambda p: (loads[p], turn(k, p)), default=second)
        chosen[k] = (first,) if second is None else tuple(sorted((first, second)))
        for peer in chosen[k]:
            loads[peer] += sizes[k]
            heappush(heap, (loads[peer], turn(k, peer), peer))
    return tuple(chosen[k] for k in range(len(sizes)))
