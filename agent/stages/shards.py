"""Which worker of a stage keeps which part of the optimizer's state, where it is sharded (ZeRO-1). Pure.

A stage's parameters are cut into segments, and those of a layer are grouped into shards. A segment follows from its
parameter alone, and a shard from its layer and the job: they are the same on all peers, whoever is alive, and wherever
the model is cut into stages. Every shard has two owners, which step its parameters alike: a death loses none. Which of
the living peers they are is decided anew in each generation, from what everybody holds (`assign`): nothing has to be
remembered, and nothing can be remembered differently.

Segments are as long as norms are summed at a time, or a multiple of that, from the parameter's beginning: so they are
stepped, and their norms summed, with the same bits as the whole. (Of torch's optimizers that step each element by
itself, all do with segments of a multiple of 32,768 elements, also fused and foreach ones, with one and two threads.
A fused AdamW does not with 999 or 4,097.)

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
"""Of each layer, at most. With N peers no one keeps more than 1 / (4 N) above its share of a layer."""
MAX_SEGMENT = 1 << 18
"""Elements. With AdamW in fp32 its state is 2 MiB: 40 ms on a link of 50 MB/s."""


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `end` of a parameter, by its place among those that are trained."""

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
    """sizes: elements of each parameter that is trained, in order. layers: of each the layer; those of one layer are
    neighbours. whole: places of those that can't be cut. align: segments begin at multiples of this. Shards are
    numbered from 0, and none is empty."""
    wanted, out, shards = SHARDS_PER_PIPELINE * pipelines, list[Segment](), 0
    for _, places in groupby(range(len(sizes)), layers.__getitem__):
        cut: list[tuple[int, int, int]] = []
        for place in places:
            size = sizes[place]
            longest = max(align, min(-(-size // (wanted * align)) * align, MAX_SEGMENT // align * align))
            # One that is empty has a segment, too: where parameters are split over ranks, others may have rows of it.
            starts = range(0, max(1, size), max(1, size) if place in whole else longest)
            cut += [(place, start, size if place in whole else min(start + longest, size)) for start in starts]
        ends = list(accumulate(end - start for _, start, end in cut))
        # By the middle of each, so that shards are as even as segments allow.
        raw = [(2 * end - (b - a)) * wanted // max(1, 2 * ends[-1]) for end, (_, a, b) in zip(ends, cut, strict=True)]
        number = {shard: shards + i for i, shard in enumerate(dict.fromkeys(raw))}
        out += [Segment(*piece, number[shard]) for piece, shard in zip(cut, raw, strict=True)]
        shards += len(number)
    return tuple(out)


class ShardLostError(RuntimeError):
    """Nobody alive holds some shard; `shards` are their numbers."""

    def __init__(self, shards: Sequence[int]) -> None:
        count = "1 part" if len(shards) == 1 else f"{len(shards)} parts"
        super().__init__(f"all workers that kept {count} of the optimizer's state are gone")
        self.shards = tuple(shards)


@dataclass(frozen=True)
class Ownership:
    """Of each shard, by number. primary: whose parameters the others take after a step. owners: who keeps it, one or
    two. holders: who has it now, and steps it until all owners have it."""

    primary: tuple[Worker, ...]
    owners: tuple[tuple[Worker, ...], ...]
    holders: tuple[tuple[Worker, ...], ...]

    def lacking(self, peer: Worker) -> frozenset[int]:
        """What `peer` owns, and has to get from its holders."""
        return frozenset(
            k for k, (owners, held) in enumerate(zip(self.owners, self.holders, strict=True))
            if peer in owners and peer not in held
        )  # fmt: skip

    def surplus(self, peer: Worker) -> frozenset[int]:
        """What `peer` holds and others own: to be given up once all of them have it. Not what the others' parameters
        come from: a worker that is to go steps that until it has gone."""
        return frozenset(
            k for k, (owners, held) in enumerate(zip(self.owners, self.holders, strict=True))
            if peer in held and peer not in owners and self.primary[k] != peer
        )  # fmt: skip

    def steppers(self, shard: int, *, shared: bool) -> tuple[Worker, ...]:
        """Who steps it, or may before the next step; the primary first. shared: have those who are to own it got it,
        and the others given it up?"""
        first = self.primary[shard]
        found = {*self.owners[shard], *(() if shared else self.holders[shard])} - {first}
        return (first, *sorted(found))

    @property
    def complete(self) -> bool:
        """Has every owner what it owns?"""
        return all(set(owners) <= set(held) for owners, held in zip(self.owners, self.holders, strict=True))


def lost_together(places: Mapping[Worker, tuple[int, int]]) -> dict[Worker, int]:
    """`hosts` for `assign`. places: of each peer, its machine and its node, as numbers.

    A machine takes its nodes with it, whatever they are: so where there are several machines they count. On one, as
    where each node is a container of it, the nodes do: a launcher takes its workers with it.
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
    """Who owns what, of the living `peers` of a stage.

    held: the shards that each has whole, at the iteration agreed on. hosts: where each is, as any number: the two
    owners are on different ones where there are several (`lost_together`). sizes: of the shards, in elements. leaving:
    peers that are to go, and own nothing, unless all are: others take what they hold first.

    The same for the same arguments in any order. As it was where that is balanced; else as little moves as a greedy
    choice finds. Raises ShardLostError.
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
        # One that is to go alone has it: the others take its parameters until they have its state.
        able = [p for p in found if p in holders[k]] or holders[k]
        first = min(able, key=lambda p: (loads[p], p))
        loads[first] += sizes[k]
        primary.append(first)
    return Ownership(tuple(primary), owners, holders)


def _weigh(owners: Sequence[Sequence[Worker]], hosts: Mapping[Worker, int], sizes: Sequence[int]) -> tuple[int, int]:
    """The elements of whoever owns the most, and how many shards are on more than one host."""
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
        """Among equals, another one comes first with each shard: so who shares one with a peer differs, and when that
        peer is gone, many have what others are to get."""
        return ((k + 1) * 2654435761 ^ (place[peer] + 1) * 2246822519) >> 7 & 0xFFFF

    def least(first: Worker, *, apart: bool) -> Worker | None:
        """The one with the least beside `first`; on another host, if it must be."""
        seen, found = list[tuple[int, int, Worker]](), None
        while heap and found is None:
            load, at, peer = heappop(heap)
            if load != loads[peer]:
                continue  # it has got something since
            seen.append((load, at, peer))
            if peer != first and (hosts[peer] != hosts[first] or not apart):
                found = peer
        for entry in seen:
            heappush(heap, entry)
        return found

    # What few hold comes first: whoever holds much else can still be spared elsewhere.
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
