"""Agreement after a death: on which iteration everybody goes on, and which micro-batches need not be run again. Pure;
no processes, no torch.

Why one snapshot a worker is enough. Counts are of committed iterations; m(s) is the largest of stage s.

1. Who has reduced iteration i has what its step needs, and takes it whatever breaks meanwhile (where the optimizer is
   sharded, its step is that of the segments that it holds, and needs their sums alone: agent.workers.sharding). Nobody
   steps i before all living peers of its stage have reduced i (agent.workers.executor). So when a worker has
   committed i + 1, each living peer of its stage has committed i + 1 by the time of the next agreement,
   or is one that could not finish the reduction because the iteration broke; and then nobody of the
   stage had stepped before it broke.
2. A stage reduces i + 1 only with gradients that have passed through every other stage, on workers that
   had stepped i. So m(s) differs by at most one between stages, and by 1. also after some have died.

So all counts differ by at most one: who is ahead rolls back. 1. is what makes this hold for each worker:
without it, one that nobody waits for (it has no micro-batches, or its pipeline has no worker on other
stages) may be two behind, be the last survivor of its stage, and leave the job without a way on. Should counts
differ by more all the same, the smallest m(s) is what most can go back to; who is behind takes the state of
a peer then, as a newcomer does.

Why it is needed only until the next gradient. A stage tells the others its share of the validation of i once all
its living workers have reduced i, and not where one of them may not have (Steps.take). Before anything is added to a
sum of i + 1, the validation of i is waited for (agent.workers.executor): then every stage has told, so by 1. every
living worker steps i whatever breaks, and no agreement goes back to i. So the snapshot may lie in the memory of the
sums (agent.stages.optimizer). The wait is short: a gradient of i + 1 has passed through workers that have told.

tests/agent/test_agreement_model.py explores a model of this to its end, and finds what goes wrong without each rule.

Which micro-batches are kept: sums of gradients are order-proof and exact, and a micro-batch enters its stage's sum
whole and once. So what a survivor has summed in the iteration in flight is worth keeping: the iteration is finished by
running only the micro-batches of which some stage's share went with the dead. They run through all stages (their
neighbours need activations and gradients); a stage that has their share already does not add it again, and leaves out
their W.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from openrecycle.planner.jobs.job import Job, Worker, WorkerRank
from openrecycle.planner.plans.schedule import MicroBatch

# -- rows of whole numbers of 64 bits, which are gathered ---------------------------------------

_BITS = 62
"""Of a word: it stays above zero."""


def to_words(members: Collection[int], of: int) -> tuple[int, ...]:
    """Which numbers below `of` these are; equally many words whichever they are."""
    out = [0] * -(-of // _BITS)
    for number in members:
        out[number // _BITS] |= 1 << number % _BITS
    return tuple(out)


def from_words(words: Sequence[int]) -> frozenset[int]:
    return frozenset(i * _BITS + bit for i, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1)


# -- which micro-batches need not be run again after a death ------------------------------------


@dataclass(frozen=True)
class Redo:
    """run: what is run again, on all stages. counted: of those, what the sum of some living worker of
    my stage has already."""

    run: frozenset[MicroBatch]
    counted: frozenset[MicroBatch]


def encode_finished(finished: Collection[MicroBatch], job: Job) -> tuple[int, ...]:
    """As numbers: one bit for each of the job's micro-batches, the same length for every set."""
    return to_words([p * job.micro_batches + m for p, m in finished], job.pipelines * job.micro_batches)


def decode_finished(numbers: Sequence[int], job: Job) -> frozenset[MicroBatch]:
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


# -- agreement after a death --------------------------------------------------------------------


class NoAgreementError(RuntimeError):
    """The survivors can't go on together; the sentence says why."""


class UnlikeError(RuntimeError):
    """This newcomer computes otherwise than the job does; the sentence says how."""


class StateHolder(Protocol):
    """Of a stage's state: a worker, or one of its ranks, which holds a part of it. stage: alike of those that hold the
    same."""

    @property
    def stage(self) -> Any: ...

    def __lt__(self, other: Any, /) -> bool: ...


H = TypeVar("H", bound=StateHolder)


@dataclass(frozen=True)
class Agreement(Generic[H]):
    """iteration: the one everybody runs next. roll_back: workers that undo their last step.

    state_from: for each worker that has not its stage's whole state, the peers that it takes it from, at once; the
    first of them describes it.
    anew: those of them that begin with nothing; the others go on with what they have. rolls_back, hands_over: does
    anybody roll back, or take state?
    """

    iteration: int
    roll_back: frozenset[H]
    state_from: Mapping[H, tuple[H, ...]]
    reason: str
    anew: frozenset[H] = frozenset()
    rolls_back: bool = False
    hands_over: bool = False

    def of_rank(self: Agreement[WorkerRank], rank: int) -> Agreement[Worker]:
        """What of it concerns the ranks of this number."""

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
"""Peers of which one worker asks state at once: each takes a thread and a connection, and a few fill its link."""


def in_turn(holders: Sequence[H], turn: int) -> tuple[H, ...]:
    """Of whom one worker asks the state that all of them hold. Several that ask are spread over the holders by their
    turns: over who describes the state, and where there are many, over who gives it."""
    first = turn % len(holders)
    return (*holders[first:], *holders[:first])[:MAX_HOLDERS]


def agree(committed: Mapping[H, int | None], incomplete: Collection[H] = (), attempt: int = 0) -> Agreement[H]:
    """committed: for each living worker the number of iterations it has committed, None if it has no state.

    incomplete: workers that have begun to take their stage's state from a peer, and step what they have.
    attempt: rises from one agreement to the next (a generation's number does), so that another peer is the first
    of a newcomer whose transfer failed.

    Raises NoAgreementError when nobody holds the whole state of some stage, or when a stage can't go back far
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
    """The layers per stage that all go on with. rows: of each worker that has any, the generation in which it took its
    layers into use, and layers per stage. Where some have gone over and others have not come to it, those others have
    all that they lack (agent.workers.loop). Raises NoAgreementError."""
    first, newest = min(rows), max(rows)
    if any(row[0] == newest[0] and row != newest for row in rows) or len({row[1:] for row in rows}) > 2:
        cuts = " and ".join(", ".join(map(str, row[1:])) for row in (first, newest))
        raise NoAgreementError(f"workers have cut the model in different ways, into {cuts} layers per stage")
    return newest[1:]


def _text(stage: Any) -> str:
    return str(stage[0] if isinstance(stage, tuple) else stage)


def environment(torch_version: str, threads: int, device: int = 0, settings: int = 0) -> tuple[int, ...]:
    """What must be equal on all workers for their numbers to be: (threads, device, settings, major, minor, patch).
    threads: of torch, per worker. device: what kind it computes on, as a number. settings: of torch, besides. What
    follows the version's third number names a build (2.13.0+cpu) and shows less."""
    found = [int(n) for n in re.findall(r"\d+", torch_version.partition("+")[0])[:3]]
    return (threads, device, settings, *found, *(0,) * (3 - len(found)))


def check_alike(
    rows: Mapping[H, tuple[int, ...]],
    known: Collection[H] = (),
    differing: Callable[[int, int], Collection[str]] = lambda *_: (),
) -> dict[H, str]:
    """Those that compute otherwise than the job, and in words, how. rows: everybody's `environment`. known:
    those that have been in the job before, by which it goes; none: by all. differing: the names of what differs between
    two numbers of settings. Raises NoAgreementError where these differ among themselves: the others can do without a
    newcomer, and not without one of them."""
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
