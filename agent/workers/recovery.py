"""Decides after a death from which iteration all workers go on, and which micro-batches need not be run again. Pure: no
processes, no torch.

Why one snapshot per worker is enough. A worker's count is the number of iterations that it has committed; m(s) is the
largest count of stage s.

1. A worker that has reduced iteration i has what its step needs, and takes the step whatever breaks meanwhile. (With a
   sharded optimizer its step is that of the segments that it holds, and needs only their sums: agent.workers.sharding.)
   No worker steps i before all living peers of its stage have reduced i (agent.workers.executor). So when a worker has
   committed i + 1, each living peer of its stage has committed i + 1 by the time of the next agreement, or could not
   finish the reduction because the iteration broke; and then no worker of the stage had stepped before it broke.
2. A stage reduces i + 1 only with gradients that have passed through every other stage, on workers that had stepped i.
   So m(s) differs by at most one between stages; by 1. that is so even after some workers have died.

So all counts differ by at most one, and workers that are ahead roll back. Rule 1 makes this hold for each worker.
Without it, a worker for which no other waits (it has no micro-batches, or its pipeline has no worker on other stages)
might be two behind and be the last survivor of its stage: then the job could not go on. Should counts differ by more
nevertheless, most workers can go back to the smallest m(s). A worker that is further behind takes the state of a peer,
as a newcomer does.

Why the snapshot is needed only until the next gradient. A stage tells the others its share of the validation of i once
all its living workers have reduced i, and not if one of them may not have (Steps.take). Before anything is added to a
sum of i + 1, a worker waits for the validation of i (agent.workers.executor). Then every stage has told its share, so
by 1. every living worker steps i whatever breaks, and no agreement goes back to i. So the snapshot may lie in the
memory of the sums (agent.stages.optimizer). The wait is short: a gradient of i + 1 has passed through workers that have
told.

tests/agent/test_agreement_model.py explores a model of this to its end, and finds what goes wrong without each rule.

Why finished micro-batches can be kept: sums of gradients are exact and do not depend on the order, and a micro-batch
enters its stage's sum whole and once. So survivors keep what they have summed in the iteration in flight. To finish the
iteration, only those micro-batches are run of which some stage's share is lost with the dead. They run through all
stages, since neighbours need activations and gradients. A stage that has their share already does not add it again, and
leaves out their W.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from openrecycle.planner.jobs.job import Job, Worker, WorkerRank
from openrecycle.planner.plans.schedule import MicroBatch

# -- rows of 64-bit integers, which workers gather ----------------------------------------------

_BITS = 62
"""Bits of a word that are used, so that it is never negative."""


def to_words(members: Collection[int], of: int) -> tuple[int, ...]:
    """Returns a set of numbers below `of` as words, always equally many."""
    out = [0] * -(-of // _BITS)
    for number in members:
        out[number // _BITS] |= 1 << number % _BITS
    return tuple(out)


def from_words(words: Sequence[int]) -> frozenset[int]:
    """Returns the numbers from which `to_words` has made the words."""
    return frozenset(i * _BITS + bit for i, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1)


# -- which micro-batches need not be run again after a death ------------------------------------


@dataclass(frozen=True)
class Redo:
    """run: the micro-batches that are run again, on all stages. counted: those of them that the sum of some living
    worker of my stage has already."""

    run: frozenset[MicroBatch]
    counted: frozenset[MicroBatch]


def encode_finished(finished: Collection[MicroBatch], job: Job) -> tuple[int, ...]:
    """Returns a set of micro-batches as words, with one bit for each of the job's micro-batches."""
    return to_words([p * job.micro_batches + m for p, m in finished], job.pipelines * job.micro_batches)


def decode_finished(numbers: Sequence[int], job: Job) -> frozenset[MicroBatch]:
    """Returns the micro-batches from which `encode_finished` has made the words."""
    return frozenset(divmod(slot, job.micro_batches) for slot in from_words(numbers))


def redo(finished: Mapping[Worker, Collection[MicroBatch]], job: Job, stage: int) -> Redo:
    """Decides which micro-batches are run again. finished: those in the sum of each living worker. stage: mine.

    Raises ValueError when two workers of a stage have summed the same micro-batch, which would be counted twice.
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


# -- agreement after a death --------------------------------------------------------------------


class NoAgreementError(RuntimeError):
    """The survivors can't go on together; the message says why."""


class UnlikeError(RuntimeError):
    """This newcomer computes in another way than the job's workers; the message says how."""


H = TypeVar("H", bound=Worker | WorkerRank)
"""A holder of a stage's state: a worker, or one of its ranks, which holds a part of it. `stage` is equal for holders of
the same state."""


@dataclass(frozen=True)
class Agreement(Generic[H]):
    """What all workers do next. iteration: the one that all run. roll_back: workers that undo their last step.

    state_from: for each worker that lacks some of its stage's state, the peers from which it takes it, all at once; the
    first of them describes it. anew: those of them that begin with nothing; the others go on with what they have.
    rolls_back, hands_over: whether any worker rolls back, or takes state.
    """

    iteration: int
    roll_back: frozenset[H]
    state_from: Mapping[H, tuple[H, ...]]
    reason: str
    anew: frozenset[H] = frozenset()
    rolls_back: bool = False
    hands_over: bool = False

    def of_rank(self: Agreement[WorkerRank], rank: int) -> Agreement[Worker]:
        """Returns the part that concerns the ranks of this number."""

        def mine(members: Iterable[WorkerRank]) -> frozenset[Worker]:
            return frozenset(m.worker for m in members if m.rank == rank)

        state_from = {
            to.worker: tuple(source.worker for source in sources)
            for to, sources in self.state_from.items()
            if to.rank == rank
        }
        return Agreement(
            *(self.iteration, mine(self.roll_back), state_from, self.reason, mine(self.anew)),
            *(self.rolls_back, self.hands_over),
        )


MAX_HOLDERS = 16
"""The most peers from which one worker takes state at once: each needs a thread and a connection, and a few fill the
worker's link."""


def in_turn(holders: Sequence[H], turn: int) -> tuple[H, ...]:
    """Returns the holders from which one worker takes state that all of them have, the one that describes it first.
    turn: differs between workers, so that they are spread over the holders."""
    first = turn % len(holders)
    return (*holders[first:], *holders[:first])[:MAX_HOLDERS]


def agree(committed: Mapping[H, int | None], incomplete: Collection[H] = (), attempt: int = 0) -> Agreement[H]:
    """Decides on the iteration from which all go on.

    committed: how many iterations each living worker has committed; None: it has no state. incomplete: workers that
    have begun to take their stage's state from peers, and step what they have. attempt: rises with each agreement, as
    the generation's number does, so that a newcomer whose transfer failed next asks another peer first.

    Raises NoAgreementError when no worker holds the whole state of some stage, or when a stage can't go back far
    enough.
    """
    holders: dict[Any, dict[H, int]] = {w.stage: {} for w in committed}
    for worker, count in sorted(committed.items()):
        if count is not None and worker not in incomplete:
            holders[worker.stage][worker] = count
    if not any(holders.values()):
        raise NoAgreementError("no living worker holds any state")
    for stage, counts in sorted(holders.items()):
        if not counts:
            first = min(w for w in committed if w.stage == stage)
            raise NoAgreementError(f"{first} joins, and no living peer of stage {_text(stage)} holds its state")
    every = [count for counts in holders.values() for count in counts.values()]
    iteration = min(every)
    if max(every) > iteration + 1:
        iteration = min(max(counts.values()) for counts in holders.values())
    state_from: dict[H, tuple[H, ...]] = {}
    able = {s: [w for w, count in its.items() if count in (iteration, iteration + 1)] for s, its in holders.items()}
    for worker in sorted(set(committed).difference(*able.values())):
        peers = able[worker.stage]
        if not peers:
            ahead, count = max(holders[worker.stage].items(), key=lambda entry: entry[1])
            raise NoAgreementError(
                f"{ahead} has committed {count} iterations and another stage only {iteration}: they can't be of one run"
            )
        state_from[worker] = in_turn(peers, attempt + sum(w.stage == worker.stage for w in state_from))
    near = {w for w, count in committed.items() if count in (iteration, iteration + 1)}
    anew = frozenset(w for w in state_from if w not in incomplete or w not in near)
    ahead_by_one = frozenset(w for w, count in committed.items() if count == iteration + 1 and w not in anew)
    reason = f"iteration {iteration} is redone by all"
    if ahead_by_one:
        counted = sum(c is not None for c in committed.values())
        reason = f"iteration {iteration} is redone: {len(ahead_by_one)} of {counted} workers had stepped and roll back"
    behind = sorted(w for w in anew if committed[w] is not None)
    if behind:
        reason += f"; {', '.join(map(str, behind))} had fallen behind and take the state of a peer"
    return Agreement(iteration, ahead_by_one, state_from, reason, anew, bool(ahead_by_one), bool(state_from))


def newest_partition(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the layers per stage with which all go on. rows: for each worker that has layers, the generation in which
    it took them into use, and its layers per stage. If only some workers have changed over, the others have received
    all that they need for it (agent.workers.loop). Raises NoAgreementError."""
    different = set(rows)
    first, newest = min(different), max(different)
    if any(row[0] == newest[0] and row != newest for row in different) or len({row[1:] for row in different}) > 2:
        cuts = " and ".join(", ".join(map(str, row[1:])) for row in (first, newest))
        raise NoAgreementError(f"workers have cut the model in different ways, into {cuts} layers per stage")
    return newest[1:]


def _text(stage: Any) -> str:
    return str(stage[0] if isinstance(stage, tuple) else stage)


def environment(torch_version: str, threads: int, device: int = 0, settings: int = 0) -> tuple[int, ...]:
    """Returns what must be equal on all workers, so that their results are: (threads, device, settings, major, minor,
    patch). threads: torch's threads per worker. device: the kind of device, as a number. settings: other settings of
    torch, as a number. What follows the version's third number names a build (2.13.0+cpu), and matters less."""
    found = [int(n) for n in re.findall(r"\d+", torch_version.partition("+")[0])[:3]]
    return (threads, device, settings, *found, *(0,) * (3 - len(found)))


def check_alike(
    rows: Mapping[H, tuple[int, ...]],
    known: Collection[H] = (),
    differing: Callable[[int, int], Collection[str]] = lambda *_: (),
) -> dict[H, str]:
    """Returns the workers that compute in another way than the job, and how, in words.

    rows: each worker's `environment`. known: the workers that have been in the job before, which set the standard; if
    there are none, all are compared. differing: returns the names of settings that differ between two numbers. Raises
    NoAgreementError when known workers differ: the job can go on without a newcomer, but not without one of them.
    """
    if len(set(rows.values())) == 1:
        return {}
    known = known or rows
    first, found = min(known), {}
    for worker in sorted(rows):
        mine, other = rows[worker], rows[first]
        if mine[0] != other[0]:
            found[worker] = (
                f"{worker} computes with {mine[0]} threads and {first} with {other[0]}: the number shows in the "
                "bits of sums, so it must be the same on all workers (OMP_NUM_THREADS)"
            )
        elif mine[1] != other[1]:
            found[worker] = (
                f"{worker} and {first} compute on devices of different kinds, which shows in the bits: all workers of "
                "a job need the same model of GPU, and the same CUDA and NCCL"
            )
        elif mine[2] != other[2]:
            found[worker] = (
                f"{worker} and {first} have set torch in different ways ({', '.join(differing(mine[2], other[2]))}), "
                "which shows in the bits: what the job's files set while they are imported must be the same everywhere"
            )
        elif mine != other:
            version, expected = (".".join(map(str, row[3:])) for row in (mine, other))
            found[worker] = (
                f"{worker} has torch {version} and {first} has {expected}: all workers need the same version"
            )
    if fatal := next((text for worker, text in found.items() if worker in known), None):
        raise NoAgreementError(fatal)
    return found
