"""Large-neighbourhood search: which part of a schedule to take up again.

Outside the window the order of ops on each worker stays; their times may still move. So a better
order inside shortens everything that follows it, and a window of a hundred ops is solved in
fractions of a second in a schedule of thousands.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator

from planner.job import Worker
from planner.solvers.cp_sat_model import OpKey, start_of
from planner.solvers.reduction import Reduction, Times


class Windows:
    """Chooses windows of about `size` ops; the size adapts to how hard they prove to be.

    Shapes, by turns: a time slice over all workers; a longer slice over neighbouring stages; a
    still longer one over a few pipelines; the ops on and near a critical worker.
    """

    SMALLEST, LARGEST = 24, 400

    def __init__(self, reduction: Reduction, *, seed: int) -> None:
        self.reduction = reduction
        self.size = 90
        self._random = random.Random(seed)
        self._turn = 0
        kinds = "FIW" if reduction.problem.technique.splits else "FI"
        self._keys: dict[Worker, list[OpKey]] = {
            worker: [(kind, i, worker.stage) for c in classes for i in c for kind in kinds]
            for worker, classes in sorted(reduction.by_worker().items())
        }

    def easier(self) -> None:
        """The last window wasn't solved in its time."""
        self.size = max(self.SMALLEST, self.size * 3 // 4)

    def harder(self) -> None:
        """The last window was solved to optimality."""
        self.size = min(self.LARGEST, self.size * 5 // 4)

    def next(self, times: Times) -> frozenset[OpKey]:
        """Ops contiguous on each worker, in the order of `times`."""
        workers = self._workers()
        rows = {}
        for worker in workers:
            row = sorted((start_of(times, key), key) for key in self._keys[worker])
            rows[worker] = row
        moments = sorted(start for row in rows.values() for start, _ in row)
        count = min(self.size, len(moments))
        # The ends of a schedule decide its period, so they come up more often than by chance.
        where = self._random.choice((0.0, 1.0, self._random.random(), self._random.random(), self._random.random()))
        first = round(where * (len(moments) - count))
        begin, end = moments[first], moments[first + count - 1]
        chosen: set[OpKey] = set()
        for row in rows.values():
            low, high = bisect_left(row, (begin,)), bisect_left(row, (end + 1,))
            chosen.update(key for _, key in row[low:high])
        return frozenset(chosen)

    def _workers(self) -> list[Worker]:
        everyone = list(self._keys)
        shape = self._turn = (self._turn + 1) % 4
        stages = self.reduction.problem.job.stages
        if shape == 1:
            low = self._random.randrange(stages)
            return [w for w in everyone if low <= w.stage <= low + self._random.randint(1, 2)]
        if shape == 2:
            pipelines = sorted({w.pipeline for w in everyone})
            some = set(self._random.sample(pipelines, min(len(pipelines), self._random.randint(1, 3))))
            return [w for w in everyone if w.pipeline in some]
        if shape == 3:
            return list(self._neighbours(self._random.choice(everyone)))
        return everyone

    def _neighbours(self, worker: Worker) -> Iterator[Worker]:
        """The worker and those that its micro-batches pass just before and after it."""
        routes = self.reduction.routes
        near = set()
        for members in self.reduction.by_worker()[worker]:
            for stage in range(max(0, worker.stage - 1), min(len(routes), worker.stage + 2)):
                near.add(Worker(routes[stage][members[0]], stage))
        yield from sorted(near)
