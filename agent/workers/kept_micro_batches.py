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

from openrecycle.agent.messages.int64 import from_words, to_words
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.schedule import MicroBatch


@dataclass(frozen=True)
class Redo:
    """run: what is run again, on all stages. counted: of those, what the sum of some living worker of
    my stage has already."""

    run: frozenset[MicroBatch]
    counted: frozenset[MicroBatch]


def encode(finished: Collection[MicroBatch], job: Job) -> tuple[int, ...]:
    """As numbers: one bit for each of the job's micro-batches, the same length for every set."""
    return to_words([p * job.micro_batches + m for p, m in finished], job.pipelines * job.micro_batches)


def decode(numbers: Sequence[int], job: Job) -> frozenset[MicroBatch]:
    """What `encode` made them of."""
    return frozenset(divmod(slot, job.micro_batches) for slot in from_words(numbers))


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
