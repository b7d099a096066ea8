"""Do workers have the memory for the layers that a partition gives them, and for those that are on their way?

While layers move a worker has what it had, and what comes: with its parameters, what the optimizer keeps, and sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import Field

from openrecycle.planner.jobs.words import counts, gigabytes
from openrecycle.planner.plans.plan import INTEGER

_Bytes = Annotated[int, Field(ge=0, le=2**53), INTEGER]


@dataclass(frozen=True)
class LayerRoom:
    """What workers take, in bytes, by the layers that they hold, and what they may have.

    beside: by stage, what a worker takes whatever its layers. layers: what each takes without what is sharded over the
    workers of a stage, and with all of that, of which each of n workers keeps 2 parts of n. activations: by layer, of a
    micro-batch; held: by stage, how many of them at a time. places: what some workers may have together, and how many
    of each stage these are: those of a machine, or one of a stage.
    """

    beside: tuple[_Bytes, ...]
    layers: tuple[tuple[_Bytes, _Bytes], ...]
    activations: tuple[_Bytes, ...]
    held: tuple[_Bytes, ...]
    places: tuple[tuple[_Bytes, tuple[_Bytes, ...]], ...]

    def suits(self, stages: int, layers: int) -> bool:
        """Is it of a job of that form?"""
        by_stage = (self.beside, self.held, *(workers for _, workers in self.places))
        return all(len(x) == stages for x in by_stage) and len(self.layers) == len(self.activations) == layers

    def refusal(self, partition: Sequence[int], present: Sequence[int], living: Sequence[int]) -> str:
        """Why layers can't move there from `present`; "": they can. living: workers of each stage."""
        before = self.taken(present, present, living)
        # Nothing is in flight from the last iteration with the old layers to the first with the new ones.
        moments = [self.taken(partition, present, living, running=now) for now in (present, partition)]
        for has, workers in self.places:
            grown = max(moments, key=lambda each: _together(workers, each))
            grows = any(n and b > a for n, a, b in zip(workers, before, grown, strict=True))
            if grows and (together := _together(workers, grown)) > has:
                who = (
                    f"the {sum(workers)} workers of a machine"
                    if sum(workers) > 1
                    else f"a worker of stage {_of(workers)}"
                )
                return (
                    f"layers per stage can't become {counts(partition)}: while they move, {who} would come to take "
                    f"{gigabytes(together)}, and may have {gigabytes(has)}"
                )
        return ""

    def furthest(self, present: Sequence[int], living: Sequence[int], growing: int) -> tuple[tuple[int, ...], ...]:
        """By stage and where it begins, where it may end, that its workers have room for what comes to them if that is
        so for `growing` stages at a time."""
        before = self.taken(present, present, living)
        out = []
        for stage, (start, end) in enumerate(pairwise([0, *accumulate(present)])):
            spare = [
                max(0, has - _together(workers, before)) // _of_some(workers, stage, growing)
                for has, workers in self.places
                if workers[stage]
            ]
            new = [0 if start <= k < end else each for k, each in enumerate(self._each(stage, living[stage]))]
            sums = [0, *accumulate(new)]
            most = min(spare, default=sums[-1])
            out.append(tuple(bisect_right(sums, at + most) - 1 for at in sums[:-1]))
        return tuple(out)

    def _each(self, stage: int, living: int) -> list[int]:
        """By layer, of a worker of the stage that runs it."""
        state = self._states(living)
        return [kept + self.held[stage] * one for kept, one in zip(state, self.activations, strict=True)]

    def _states(self, living: int) -> list[int]:
        """By layer, without activations."""
        return [least + -(-(most - least) * 2 // max(2, living)) for least, most in self.layers]

    def taken(
        self, partition: Sequence[int], present: Sequence[int], living: Sequence[int], running: Sequence[int] = ()
    ) -> list[int]:
        """By stage, of a worker that has the layers of both, and micro-batches in those of `running`; (): of
        `partition`."""
        out = []
        of_each = (list(pairwise([0, *accumulate(layers)])) for layers in (partition, present, running or partition))
        for stage, ((a, b), (c, d), (e, f)) in enumerate(zip(*of_each, strict=True)):
            state = self._states(living[stage])
            kept = sum(state[k] for k in {*range(a, b), *range(c, d)})
            out.append(self.beside[stage] + kept + self.held[stage] * sum(self.activations[e:f]))
        return out


def _together(workers: Sequence[int], each: Sequence[int]) -> int:
    return sum(n * one for n, one in zip(workers, each, strict=True))


def _of_some(workers: Sequence[int], stage: int, growing: int) -> int:
    """Those of the stage, and of others that have most."""
    return workers[stage] + sum(sorted((*workers[:stage], *workers[stage + 1 :]), reverse=True)[: growing - 1])


def _of(workers: Sequence[int]) -> int:
    return next(stage for stage, n in enumerate(workers) if n)
