"""Which micro-batches need not be run again after a death. Pure: no processes, no torch.

Sums of gradients are order-proof and exact, and a micro-batch enters its stage's sum whole and once.
So what a survivor has summed in the iteration in flight is worth keeping: the iteration is finished
by running only the micro-batches of which some stage's share went with the dead. They run through
all stages (their neighbours need activations and gradients); a stage that has their share already
does not add it again, and leaves out their W.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from openrecycle.planner.jobs.job import Job, Worker

MicroBatch = tuple[int, int]
_BITS = 62
"""Per number: they travel as int64."""


@dataclass(frozen=True)
class Redo:
    """run: what is run again, on all stages. counted: of those, what the sum of some living worker of
    my stage has already."""

    run: frozenset[MicroBatch]
    counted: frozenset[MicroBatch]


def encode(finished: Collection[MicroBatch], job: Job) -> tuple[int, ...]:
    """As numbers: one bit for each of the job's micro-batches, the same length for every set."""
    slots = {p * job.micro_batches + m for p, m in finished}
    total = job.pipelines * job.micro_batches
    return tuple(sum(1 << (i - at) for i in range(at, min(at + _BITS, total)) if i in slots)
                 for at in range(0, total, _BITS))  # fmt: skip


def decode(numbers: Sequence[int], job: Job) -> frozenset[MicroBatch]:
    """What `encode` made them of."""
    return frozenset(
        divmod(at * _BITS + i, job.micro_batches)
        for at, number in enumerate(numbers)
        for i in range(_BITS)
        if number >> i & 1
    )


def redo(finished: Mapping[Worker, Collection[MicroBatch]], job: Job, stage: int) -> Redo:
    """finished: for each living worker, what is in its sum. stage: mine.

    Raises ValueError when two workers of a stage have summed the same micro-batch: it would be
    counted twice.
    """
    by_stage: dict[int, set[MicroBatch]] = {s: set() for s in range(job.stages)}
    for worker, keys in sorted(finished.items()):
        twice = by_stage[worker.stage] & set(keys)
        if twice:
            raise ValueError(f"micro-batch {min(twice)} is in the sums of two workers of stage {worker.stage}")
        by_stage[worker.stage] |= set(keys)
    everywhere = frozenset.intersection(*map(frozenset, by_stage.values()))
    run = frozenset(_all(job)) - everywhere
    return Redo(run, run & by_stage[stage])


def _all(job: Job) -> Iterable[MicroBatch]:
    return ((p, m) for p in range(job.pipelines) for m in range(job.micro_batches))
