"""Which worker of a stage keeps which part of the optimizer's state, where it is sharded (ZeRO-1). Pure.

A stage's parameters are cut into segments, and these are grouped into shards; both follow from the model and the job
alone, so they are the same on all peers and whoever is alive. Every shard has two owners, which step its parameters
alike: a death loses none. Which of the living peers they are is decided anew in each generation, from what everybody
holds (`assign`): nothing has to be remembered, and nothing can be remembered differently.

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
from itertools import accumulate

from openrecycle.planner.jobs.job import Worker

SHARDS_PER_PIPELINE = 8
"""With N peers no one keeps more than 1 / (4 N) above its share, and a generation's agreement tells 8 bits for each."""
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


def segments_of(sizes: Sequence[int], whole: Collection[int], align: int, pipelines: int) -> tuple[Segment, ...]:
    """sizes: elements of each parameter that is trained, in order. whole: places of those that can't be cut. align:
    segments begin at multiples of this. Shards are numbered from 0, and none is empty."""
    total, wanted = sum(sizes), SHARDS_PER_PIPELINE * pipelines
    fair = -(-max(1, total) // wanted)
    longest = max(align, min(-(-fair // align) * align, MAX_SEGMENT // align * align))
    cut = [
        (place, start, size if place in whole else min(start + longest, size))
        for place, size in enumerate(sizes)
        for start in ((0,) if place in whole else range(0, size, longest))
        if size
    ]
    ends = list(accumulate(end - start for _, start, end in cut))
    # By the middle of each, so that shards are as even as segments allow.
    raw = [(2 * end - (b - a)) * wanted // (2 * total) for end, (_, a, b) in zip(ends, cut, strict=True)]
    number = {shard: i for i, shard in enumerate(dict.fromkeys(raw))}
    return tuple(Segment(*piece, number[shard]) for piece, shard in zip(cut, raw, strict=True))


class ShardLostError(RuntimeError):
    """Nobody alive holds some shard; `shards` are their numbers."""

    def __init__(self, shards: Sequence[int]) -> None:
        super().__init__(f"all workers that kept {len(shards)} shards of the optimizer's state are gone")
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
        """What `peer` holds and others own: to be given up once all of them have it."""
        return frozenset(
            k for k, (owners, held) in enumerate(zip(self.owners, self.holders, strict=True))
            if peer in held and peer not in owners
        )  # fmt: skip

    def summed_at(self, shard: int) -> tuple[Worker, ...]:
        """Who needs the sum of its gradients, or may before the generation is over."""
        return tuple(sorted({*self.owners[shard], *self.holders[shard]}))

    @property
    def complete(self) -> bool:
        """Has every owner what it owns?"""
        return all(set(owners) <= set(held) for owners, held in zip(self.owners, self.holders, strict=True))


def assign(
    peers: Sequence[Worker], held: Mapping[Worker, Collection[int]], hosts: Mapping[Worker, int], sizes: Sequence[int]
) -> Ownership:
    """Who owns what, of the living `peers` of a stage.

    held: the shards that each has whole, at the iteration agreed on. hosts: where each is, as any number: the two
    owners are on different ones where there are several. sizes: of the shards, in elements.

    The same for the same arguments in any order. As it was where that is balanced; else as little moves as a greedy
    choice finds. Raises ShardLostError.
    """
    order = sorted(peers)
    holders = tuple(tuple(p for p in order if k in held.get(p, ())) for k in range(len(sizes)))
    if lost := [k for k, found in enumerate(holders) if not found]:
        raise ShardLostError(lost)
    wanted = min(2, len(order))
    slack = sum(sizes) // (8 * len(order)) + max(sizes, default=0)
    owners = _choose(order, holders, hosts, sizes, slack)
    if all(len(found) == wanted for found in holders):
        most, apart = _weigh(holders, hosts, sizes)
        most_then, apart_then = _weigh(owners, hosts, sizes)
        if apart >= apart_then and most <= most_then + slack:
            owners = holders
    loads = dict.fromkeys(order, 0)
    primary = []
    for k, found in enumerate(owners):
        first = min((p for p in found if p in holders[k]), key=lambda p: (loads[p], p))
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
    # What few hold comes first: whoever holds much else can still be spared elsewhere.
    for k in sorted(range(len(sizes)), key=lambda k: (len(holders[k]), k)):
        first = min(holders[k], key=lambda p: (loads[p], p))
        others = [p for p in order if p != first]
        apart = [p for p in others if hosts[p] != hosts[first]] or others
        least = min((loads[p] for p in apart), default=0)
        near = [p for p in apart if p in holders[k] and loads[p] <= least + slack // 8]
        second = min(near or apart, key=lambda p: (loads[p], p), default=None)
        chosen[k] = (first,) if second is None else tuple(sorted((first, second)))
        for peer in chosen[k]:
            loads[peer] += sizes[k]
    return tuple(chosen[k] for k in range(len(sizes)))


# -- what peers tell each other -------------------------------------------------------------------

_BITS = 62
"""Of one of the whole numbers that an agreement gathers."""


def words(pipelines: int) -> int:
    """How many whole numbers say which shards a worker holds."""
    return -(-(SHARDS_PER_PIPELINE * pipelines) // _BITS)


def to_words(held: Collection[int], pipelines: int) -> tuple[int, ...]:
    out = [0] * words(pipelines)
    for shard in held:
        out[shard // _BITS] |= 1 << shard % _BITS
    return tuple(out)


def from_words(row: Sequence[int]) -> frozenset[int]:
    return frozenset(i * _BITS + bit for i, word in enumerate(row) for bit in range(_BITS) if word >> bit & 1)
