"""Agreement after a death: on which iteration everybody goes on. Pure; no processes, no torch.

Why one snapshot a worker is enough. A stage can commit iteration i + 1 only with the gradients of
all its micro-batches of i + 1, each of which has passed through every other stage; a stage works on
i + 1 only after its own step i (its worker's ops are in order, and a worker without ops still takes
part in its stage's reduction). So when anybody has committed i + 1, everybody has committed i:
committed counts differ by at most one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.job import Worker


class NoAgreementError(RuntimeError):
    """The survivors can't go on together; the sentence says why."""


@dataclass(frozen=True)
class Agreement:
    """iteration: the one everybody runs next. roll_back: workers that undo their last step.

    state_from: for each joining worker the peer of its stage that sends it its state.
    """

    iteration: int
    roll_back: frozenset[Worker]
    state_from: Mapping[Worker, Worker]
    reason: str


def agree(committed: Mapping[Worker, int | None], attempt: int = 0) -> Agreement:
    """committed: for each living worker the number of iterations it has committed, None if it joins.

    attempt: rises from one agreement to the next (an epoch's number does), so that a newcomer whose
    transfer failed asks another peer.

    Raises NoAgreementError when a joining worker's stage has no peer with state, or when counts
    differ by more than one.
    """
    counts = {w: c for w, c in committed.items() if c is not None}
    if not counts:
        raise NoAgreementError("no living worker holds any state")
    iteration = min(counts.values())
    ahead = {w for w, c in counts.items() if c > iteration}
    too_far = sorted(w for w in ahead if counts[w] > iteration + 1)
    if too_far:
        raise NoAgreementError(
            f"{too_far[0]} has committed {counts[too_far[0]]} iterations and another worker only {iteration}: "
            "they can't be of one run"
        )
    state_from: dict[Worker, Worker] = {}
    for worker in sorted(w for w, c in committed.items() if c is None):
        peers = sorted(w for w in counts if w.stage == worker.stage)
        if not peers:
            raise NoAgreementError(f"{worker} joins, and no living peer of stage {worker.stage} holds its state")
        # Spread several newcomers of one stage over its peers.
        turn = attempt + sum(w.stage == worker.stage for w in state_from)
        state_from[worker] = peers[turn % len(peers)]
    reason = (
        f"iteration {iteration} is redone by all"
        if not ahead
        else (f"iteration {iteration} is redone: {len(ahead)} of {len(counts)} workers had stepped and roll back")
    )
    return Agreement(iteration, frozenset(ahead), state_from, reason)


@dataclass(frozen=True)
class Makeup:
    """What must be equal on all workers for their numbers to be. threads: of torch, per worker.
    device: what kind it computes on, as a number."""

    torch_version: str
    threads: int
    device: int = 0

    def numbers(self) -> tuple[int, ...]:
        """(threads, device, major, minor, patch): how it travels. What follows the version's third number
        names a build (2.13.0+cpu) and shows less."""
        found = [int(n) for n in re.findall(r"\d+", self.torch_version.partition("+")[0])[:3]]
        return (self.threads, self.device, *found, *(0,) * (3 - len(found)))


def check_alike(rows: Mapping[Worker, tuple[int, ...]]) -> None:
    """rows: everybody's `Makeup.numbers`. Raises NoAgreementError naming two that differ."""
    first = min(rows)
    for worker in sorted(rows):
        mine, other = rows[worker], rows[first]
        if mine[0] != other[0]:
            raise NoAgreementError(
                f"{worker} computes with {mine[0]} threads and {first} with {other[0]}: the number shows in the "
                "bits of sums, so it must be the same on all workers (OMP_NUM_THREADS)"
            )
        if mine[1] != other[1]:
            raise NoAgreementError(
                f"{worker} and {first} compute on devices of different kinds, which shows in the bits: all workers of "
                "a job need the same model of GPU, and the same CUDA and NCCL"
            )
        if mine != other:
            version, expected = (".".join(map(str, row[2:])) for row in (mine, other))
            raise NoAgreementError(
                f"{worker} has torch {version} and {first} has {expected}: all workers need the same version"
            )
