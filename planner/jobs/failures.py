"""Failed workers: parsing their names, counting them by stage, and finding the pattern that they form.

Pipelines are interchangeable: they run the same stages on different data. Two failure sets that
differ only in which pipeline is called which are therefore one pattern, and one plan serves both.
Where workers have speeds of their own, pipelines are not interchangeable: each set is its own pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from openrecycle.planner.jobs.job import Job, Worker


def parse_workers(names: Iterable[str], *, field: str = "failed") -> frozenset[Worker]:
    """Parse workers' names. Raises InputError."""
    return frozenset(Worker.parse(name, field=field) for name in names)


def parse_failed(names: Iterable[str], job: Job) -> frozenset[Worker]:
    """Parse names, W<pipeline>_<stage>, of workers of `job`. Raises InputError for any other text."""
    return frozenset(job.check_worker(worker, field="--fail") for worker in parse_workers(names, field="--fail"))


def failures_per_stage(failed: Iterable[Worker], job: Job) -> tuple[int, ...]:
    """How many workers of each stage are in `failed`."""
    return tuple(map(len, by_stage(failed, job)))


def by_stage(failed: Iterable[Worker], job: Job) -> tuple[tuple[int, ...], ...]:
    """Return by stage the pipelines whose worker has failed, ascending."""
    rows: list[list[int]] = [[] for _ in range(job.stages)]
    for worker in sorted(failed):
        rows[worker.stage].append(worker.pipeline)
    return tuple(map(tuple, rows))


def workers_in(rows: Sequence[Iterable[int]]) -> frozenset[Worker]:
    """The inverse of `by_stage`: the workers that such rows name."""
    return frozenset(Worker(p, s) for s, row in enumerate(rows) for p in row)


def inverse(permutation: Sequence[int]) -> list[int]:
    """Return the inverse permutation."""
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def canonical_pattern(failed: Iterable[Worker], job: Job) -> tuple[frozenset[Worker], tuple[int, ...]]:
    """Return the one failure set that stands for all that equal `failed` up to the names of pipelines.

    Returns (pattern, permutation): pipeline p of `failed` is pipeline permutation[p] of the
    pattern. In a pattern the pipelines with most failures come first.
    """
    if job.speeds:
        return frozenset(failed), tuple(range(job.pipelines))
    rows: list[list[int]] = [[] for _ in range(job.pipelines)]
    for worker in failed:
        rows[worker.pipeline].append(worker.stage)
    keys = [(-len(row), tuple(sorted(row))) for row in rows]
    order = sorted(range(job.pipelines), key=lambda p: (keys[p], p))
    permutation = [0] * job.pipelines
    for position, pipeline in enumerate(order):
        permutation[pipeline] = position
    pattern = frozenset(Worker(permutation[p], s) for p, row in enumerate(rows) for s in row)
    return pattern, tuple(permutation)


def levelled(failed: Iterable[Worker], job: Job) -> frozenset[Worker]:
    """Add failures to `failed` until every stage has as many as the stage with most, preferably in pipelines that have
    failures already.

    A plan for the larger set also serves for `failed`. It is often as short, since the stage with most failures sets
    the period.
    """
    dead = set(failed)
    counts = failures_per_stage(dead, job)
    per_pipeline = [0] * job.pipelines
    for worker in dead:
        per_pipeline[worker.pipeline] += 1
    order = sorted(range(job.pipelines), key=lambda p: (-per_pipeline[p], p))
    for stage, count in enumerate(counts):
        spare = (Worker(p, stage) for p in order if Worker(p, stage) not in dead)
        dead.update(islice(spare, max(counts) - count))
    return frozenset(dead)


def with_one_more(failed: Iterable[Worker], job: Job) -> Iterator[frozenset[Worker]]:
    """Yield `failed` with one more worker, once for each pattern that leaves every stage a living peer."""
    dead = frozenset(failed)
    counts = failures_per_stage(dead, job)
    seen: set[frozenset[Worker]] = set()
    for worker in job.workers():
        if worker in dead or counts[worker.stage] == job.pipelines - 1:
            continue
        pattern = canonical_pattern(dead | {worker}, job)[0]
        if pattern not in seen:
            seen.add(pattern)
            yield dead | {worker}


def patterns(job: Job, count: int) -> Iterator[frozenset[Worker]]:
    """Yield every canonical pattern of `count` failures that leaves each stage a living peer.

    Their number grows quickly with `count`, so this is an iterator that a caller can stop. The search never runs into a
    dead end: whatever it begins can be completed, so the time for each pattern is proportional to the grid.
    """
    if count > job.stages * (job.pipelines - 1):
        return
    if job.speeds:
        yield from _unlike(job, count)
        return
    if job.stages == 1:  # there is only one pattern, and finding it row by row takes milliseconds
        yield frozenset(Worker(p, 0) for p in range(count))
        return
    for sizes in _partitions(count, job.pipelines, job.stages):
        yield from _fill(job, sizes)


def _unlike(job: Job, count: int) -> Iterator[frozenset[Worker]]:
    """Yield every set of `count` workers that leaves each stage one, in the order of itertools.combinations."""
    workers = list(job.workers())
    last = (job.pipelines - 1) * job.stages  # only from this index on can a choice take a stage's last peer
    chosen: list[int] = []
    held = [0] * job.stages
    at = 0
    while True:
        room = len(chosen) + len(workers) - at
        if count > room - job.stages and count >= job.pipelines:
            # In the last pipeline, workers of stages that have lost all others can't be chosen.
            room -= sum(held[workers[i].stage] == job.pipelines - 1 for i in range(max(at, last), len(workers)))
        if len(chosen) < count <= room:
            while held[workers[at].stage] == job.pipelines - 1:
                at += 1
            chosen.append(at)
            held[workers[at].stage] += 1
            at += 1
            continue
        if len(chosen) == count:
            yield frozenset(workers[i] for i in chosen)
        if not chosen:
            return
        at = chosen.pop()
        held[workers[at].stage] -= 1
        at += 1


def _partitions(total: int, parts: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield `total` as falling sequences of at most `parts` numbers, none above `largest`."""
    chosen: list[int] = []
    left, bound = total, largest
    while True:
        # Takes the largest number possible, as long as the rest fits into the parts that are left.
        while left and bound and len(chosen) < parts and left <= (parts - len(chosen)) * bound:
            chosen.append(min(left, bound))
            left -= chosen[-1]
            bound = chosen[-1]
        if not left:
            yield tuple(chosen)
        if not chosen:
            return
        bound = chosen.pop() - 1
        left += bound + 1


def _fill(job: Job, sizes: Sequence[int]) -> Iterator[frozenset[Worker]]:
    """Yield the failures for given numbers per pipeline (`sizes`); pipelines of equal size are in non-falling order.

    A stage has no living worker if every pipeline's row contains it. So a row may contain only so many of the stages
    that all rows before it contain, as the rows after it can still leave out.
    """
    if not sizes:
        yield frozenset()
        return
    later = [(job.pipelines - len(sizes)) * job.stages]
    for size in reversed(sizes[1:]):
        later.append(later[-1] + job.stages - size)
    spared = later[::-1]
    everywhere = [frozenset(range(job.stages))]
    choices = [_rows(job.stages, tuple(range(sizes[0])), everywhere[0], spared[0])]
    rows: list[tuple[int, ...]] = []
    while choices:
        row = next(choices[-1], None)
        if row is None:
            choices.pop()
            everywhere.pop()
            if rows:
                rows.pop()
            continue
        done = len(rows) + 1
        if done == len(sizes):
            yield frozenset(Worker(p, s) for p, r in enumerate((*rows, row)) for s in r)
            continue
        rows.append(row)
        everywhere.append(everywhere[-1].intersection(row))
        first = row if sizes[done - 1] == sizes[done] else tuple(range(sizes[done]))
        choices.append(_rows(job.stages, first, everywhere[-1], spared[done]))


def _rows(stages: int, first: tuple[int, ...], scarce: frozenset[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield every choice of len(first) stages, in order from `first` on, with at most `most` of the `scarce` ones."""
    size = len(first)
    free = [0] * (stages + 1)  # how many stages from this one on are not scarce
    for s in reversed(range(stages)):
        free[s] = free[s + 1] + (s not in scarce)
    row: list[int] = []
    used = 0  # how many of `row` are scarce

    def completes(at: int) -> bool:
        """Can `row` be completed with stages from `at` on?"""
        return len(row) + free[at] + min(stages - at - free[at], most - used) >= size

    # Begins with as much of `first` as is allowed, and goes on from there.
    for s in first:
        if used + (s in scarce) > most:
            break
        row.append(s)
        used += s in scarce
    at = first[len(row)] if len(row) < size else stages
    while True:
        if len(row) == size:
            yield tuple(row)
        else:
            while at < stages and at in scarce and used == most:
                at += 1
            if at < stages and completes(at):
                row.append(at)
                used += at in scarce
                at += 1
                continue
        if not row:
            return
        at = row.pop()
        used -= at in scarce
        at += 1
