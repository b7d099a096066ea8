"""Checks whether workers have memory for the layers that a partition gives them, and for layers on their way.

While layers move, a worker has its old layers and the new ones: parameters, optimizer state and accumulators. After
they have moved, the job may have to go back to a checkpoint. With a sharded optimizer each worker then reads the whole
state of its layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import Field

from openrecycle.planner.jobs.words import counts, gigabytes
from openrecycle.planner.plans.plan import INTEGER

_Bytes = Annotated[int, Field(ge=0, le=2**53), INTEGER]
_Host = Annotated[str, Field(max_length=255)]


@dataclass(frozen=True)
class LayerRoom:
    """The memory that workers need, in bytes, by the layers that they hold, and the memory that they may use.

    beside: by stage, what a worker needs whatever its layers. layers: by layer, what a worker needs without the state
    that is sharded over the workers of a stage, and with all of it; each of n workers keeps 2/n of that state.
    activations: by layer, of one micro-batch; held: by stage, how many of them at a time. places: (bytes that a group
    of workers may use together, number of them by stage, their host). The host is "" for the workers of a host without
    a name, and for a place that stands for one worker of a stage, wherever it is. resumed: by layer, what a worker
    needs that reads it from a checkpoint; (): the job has no checkpoints.
    """

    beside: tuple[_Bytes, ...]
    layers: tuple[tuple[_Bytes, _Bytes], ...]
    activations: tuple[_Bytes, ...]
    held: tuple[_Bytes, ...]
    places: tuple[tuple[_Bytes, tuple[_Bytes, ...], _Host], ...]
    resumed: tuple[_Bytes, ...] = ()

    def suits(self, stages: int, layers: int) -> bool:
        """Does it have these numbers of stages and layers?"""
        by_stage = (self.beside, self.held, *(workers for _, workers, _ in self.places))
        by_layer = (self.layers, self.activations, self.resumed or self.layers)
        return all(len(x) == stages for x in by_stage) and all(len(x) == layers for x in by_layer)

    def with_hosts(self, hosts: Iterable[tuple[int, str]]) -> LayerRoom:
        """Counts the workers of each place anew. hosts: by worker its stage, and the host where it is or was last."""
        there = Counter(hosts)
        places = tuple(
            (has, tuple(there[stage, host] for stage in range(len(workers))) if host else workers, host)
            for has, workers, host in self.places
        )
        return replace(self, places=tuple(place for place in places if any(place[1])))

    def refusal(self, partition: Sequence[int], present: Sequence[int], living: Sequence[int]) -> str:
        """Returns why layers can't move from `present` to `partition`; "": they can. living: workers of each stage."""
        for when, before, grown in self._moments(partition, present, living):
            for has, workers, _ in self.places:
                grows = any(n and b > a for n, a, b in zip(workers, before, grown, strict=True))
                if grows and (together := _together(workers, grown)) > has:
                    who = (
                        f"the {sum(workers)} workers of a machine"
                        if sum(workers) > 1
                        else f"a worker of stage {_of(workers)}"
                    )
                    return (
                        f"layers per stage can't become {counts(partition)}: {when}, {who} would come to take "
                        f"{gigabytes(together)}, and may have {gigabytes(has)}"
                    )
        return ""

    def _moments(
        self, partition: Sequence[int], present: Sequence[int], living: Sequence[int]
    ) -> list[tuple[str, list[int], list[int]]]:
        """Lists the moments at which workers need more: (when, what a worker of each stage needs at such a moment with
        the present layers, what it would need)."""
        now, whole = self.taken(present, present, living), [*accumulate(self.resumed, initial=0)]
        # Nothing is in flight from the last iteration with the old layers to the first with the new ones.
        moments = [
            ("while they move", now, self.taken(partition, present, living, running=running))
            for running in (present, partition)
        ]
        if self.resumed:
            before, after = ([whole[b] - whole[a] for a, b in _spans(layers)] for layers in (present, partition))
            moments.append(("when they go back to a checkpoint", before, after))
        return moments

    def furthest(self, present: Sequence[int], living: Sequence[int], growing: int) -> tuple[tuple[int, ...], ...]:
        """Returns by stage, for each layer at which it may begin, the last end for which its workers have room, if
        workers of `growing` stages need more at the same time."""
        before, whole, out = self.taken(present, present, living), [*accumulate(self.resumed, initial=0)], []
        back = [whole[b] - whole[a] for a, b in _spans(present)] if self.resumed else []
        for stage, (start, end) in enumerate(_spans(present)):
            new = [0 if start <= k < end else each for k, each in enumerate(self._each(stage, living[stage]))]
            sums = [*accumulate(new, initial=0)]
            more = self._more(stage, before, growing)
            ends = [len(new) if more is None else bisect_right(sums, at + more) - 1 for at in sums[:-1]]
            if back and (more := self._more(stage, back, growing)) is not None:
                most = back[stage] + more
                ends = [min(end, bisect_right(whole, at + most) - 1) for end, at in zip(ends, whole[:-1], strict=True)]
            out.append(tuple(ends))
        return tuple(out)

    def _more(self, stage: int, each: Sequence[int], growing: int) -> int | None:
        """Returns what a worker of `stage` may use beside what the workers of all stages use; None: any amount."""
        spare = [
            max(0, has - _together(workers, each)) // _of_some(workers, stage, growing)
            for has, workers, _ in self.places
            if workers[stage]
        ]
        return min(spare, default=None)

    def _each(self, stage: int, living: int) -> list[int]:
        """Returns by layer what a worker of the stage needs that runs it."""
        state = self._states(living)
        return [kept + self.held[stage] * one for kept, one in zip(state, self.activations, strict=True)]

    def _states(self, living: int) -> list[int]:
        """Returns by layer what a worker needs without activations."""
        return [least + -(-(most - least) * 2 // max(2, living)) for least, most in self.layers]

    def taken(
        self, partition: Sequence[int], present: Sequence[int], living: Sequence[int], running: Sequence[int] = ()
    ) -> list[int]:
        """Returns by stage what a worker needs that has the layers of both partitions, and the activations of those of
        `running`; (): of `partition`."""
        out = []
        of_each = map(_spans, (partition, present, running or partition))
        for stage, ((a, b), (c, d), (e, f)) in enumerate(zip(*of_each, strict=True)):
            state = self._states(living[stage])
            kept = sum(state[k] for k in {*range(a, b), *range(c, d)})
            out.append(self.beside[stage] + kept + self.held[stage] * sum(self.activations[e:f]))
        return out


def _spans(partition: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(partition, initial=0)))


def _together(workers: Sequence[int], each: Sequence[int]) -> int:
    return sum(n * one for n, one in zip(workers, each, strict=True))


def _of_some(workers: Sequence[int], stage: int, growing: int) -> int:
    """Count the workers of the stage, and those of the `growing` - 1 other stages that have most."""
    return workers[stage] + sum(sorted((*workers[:stage], *workers[stage + 1 :]), reverse=True)[: growing - 1])


def _of(workers: Sequence[int]) -> int:
    return next(stage for stage, n in enumerate(workers) if n)
