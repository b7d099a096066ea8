"""Pipeline templates, as Oobleck (SOSP'23) plans them: pipelines of unlike depth that use every worker.

Layers are partitioned over the stages of each template; templates are instantiated so that their
depths add up to the living workers; micro-batches are distributed so that the slowest is quickest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

# Up to so many workers every multiset of depths is looked at; beyond, the most even one of each size.
ENUMERATED = 40
# Micro-batches beside its share by depth that a pipeline is tried with.
MARGIN = 3


def template_depths(workers: int, least: int, tolerated: int, most: int) -> range:
    """Consecutive depths from the fewest workers that hold the model on.

    With depths n0 to N - f n0 any number of workers of at least (f + 1) n0 is a sum of depths (no
    gap between consecutive numbers: the Frobenius argument). `most`: no more stages than layers.
    """
    return range(least, max(least, min(most, workers - tolerated * least)) + 1)


def instantiations(workers: int, depths: range, pipelines: int) -> Iterator[tuple[int, ...]]:
    """Multisets of at most `pipelines` depths that add up to `workers`, each in falling order."""
    if workers <= ENUMERATED:
        yield from _sums(workers, depths, pipelines, depths.stop - 1)
        return
    for count in range(1, pipelines + 1):
        depth, longer = divmod(workers, count)
        if depth >= depths.start and depth + (longer > 0) < depths.stop:
            yield (depth + 1,) * longer + (depth,) * (count - longer)


def _sums(total: int, depths: range, parts: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
        return
    if parts == 0 or total < depths.start:
        return
    for first in range(min(total, largest), depths.start - 1, -1):
        if first * parts < total:
            return
        for rest in _sums(total - first, depths, parts - 1, first):
            yield (first, *rest)


def distribute(total: int, depths: tuple[int, ...], time: Callable[[int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The least time within which pipelines of these depths run `total` micro-batches, and how many each has.

    time(depth, micro_batches): of one pipeline; does not fall as micro-batches grow. The least time
    is one that some pipeline has, and is found by bisection over those.
    """
    kinds = set(depths)
    workers = sum(depths)
    # By depth each would have its share: in any best distribution somebody is close to it, and at
    # the top of the range every pipeline can have as many as the deepest.
    least, most = min(depths) * total // workers, -(-max(depths) * total // workers)
    near = range(max(0, least - MARGIN), min(total, most + MARGIN) + 1)
    candidates = sorted({time(kind, n) for kind in kinds for n in near})

    def room(limit: float) -> dict[int, int]:
        return {kind: _most(kind, limit, near.stop - 1, time) for kind in kinds}

    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        share = room(candidates[middle])
        if sum(share[depth] for depth in depths) >= total:
            high = middle
        else:
            low = middle + 1
    share = room(candidates[low])
    left = total
    out = []
    for depth in depths:
        out.append(min(share[depth], left))
        left -= out[-1]
    return candidates[low], tuple(out)


def _most(depth: int, limit: float, high: int, time: Callable[[int, int], float]) -> int:
    """Most micro-batches within `limit`, up to `high`."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if time(depth, middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
