"""Failed workers: reading their names, counting them, and the pattern they make.

Pipelines are interchangeable: they run the same stages on different data. Two failure sets that
differ only in which pipeline is called which are therefore one pattern, and one plan serves both.
Where workers have speeds of their own, no pipeline stands for another: each set is its own pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement

from planner.job import Job, Worker


def parse_failed(names: Iterable[str], job: Job, *, field: str = "--fail") -> frozenset[Worker]:
    """Workers of `job` by name, W<pipeline>_<stage>. Raises InputError for any other text."""
    return frozenset(job.check_worker(Worker.parse(name, field=field), field=field) for name in names)


def failures_per_stage(failed: Iterable[Worker], job: Job) -> tuple[int, ...]:
    """How many workers of each stage are in `failed`."""
    counts = [0] * job.stages
    for worker in failed:
        counts[worker.stage] += 1
    return tuple(counts)


def canonical_pattern(failed: Iterable[Worker], job: Job) -> tuple[frozenset[Worker], tuple[int, ...]]:
    """The one failure set that stands for all that are equal to `failed` up to pipeline names.

    Returns (pattern, permutation): pipeline p of `failed` is pipeline permutation[p] of the
    pattern. In a pattern the pipelines with most failures come first.
    """
    if job.speeds:
        return frozenset(failed), tuple(range(job.pipelines))
    rows: list[list[int]] = [[] for _ in range(job.pipelines)]
    for worker in failed:
        rows[worker.pipeline].append(worker.stage)
    keys = [_row_key(row) for row in rows]
    order = sorted(range(job.pipelines), key=lambda p: (keys[p], p))
    permutation = [0] * job.pipelines
    for position, pipeline in enumerate(order):
        permutation[pipeline] = position
    pattern = frozenset(Worker(permutation[p], s) for p, row in enumerate(rows) for s in row)
    return pattern, tuple(permutation)


def patterns(job: Job, count: int) -> Iterator[frozenset[Worker]]:
    """Every canonical pattern of `count` failures that leaves each stage a living peer.

    Their number grows quickly with `count`; it is an iterator so that a caller can stop.
    """
    if job.speeds:
        sets = map(frozenset, combinations(job.workers(), count))
        yield from (dead for dead in sets if max(failures_per_stage(dead, job)) < job.pipelines)
        return
    for sizes in _partitions(count, job.pipelines, job.stages):
        yield from _fill(job, sizes, [])


def _row_key(stages: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    return (-len(stages), tuple(sorted(stages)))


def _partitions(total: int, parts: int, largest: int) -> Iterator[tuple[int, ...]]:
    """`total` as a falling sequence of at most `parts` numbers, none above `largest`."""
    if total == 0:
        yield ()
        return
    if parts == 0:
        return
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, parts - 1, first):
            yield (first, *rest)


def _fill(job: Job, sizes: Sequence[int], rows: list[tuple[int, ...]]) -> Iterator[frozenset[Worker]]:
    """Gives rows of equal size in every non-falling order of their stages."""
    if not sizes:
        counts = [sum(s in row for row in rows) for s in range(job.stages)]
        if max(counts, default=0) < job.pipelines:
            yield frozenset(Worker(p, s) for p, row in enumerate(rows) for s in row)
        return
    equal = sum(size == sizes[0] for size in sizes)
    for group in combinations_with_replacement(list(combinations(range(job.stages), sizes[0])), equal):
        yield from _fill(job, sizes[equal:], [*rows, *group])
