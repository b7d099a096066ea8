"""Orders of a problem's ops (see `order_times`): what they are worth, and a part of one dispatched anew."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from openrecycle.planner.solvers import order_times, windows
from openrecycle.planner.solvers.compiled import compiled_windows
from openrecycle.planner.solvers.table import Result, Table

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class DispatchRule:
    """How a window is dispatched, one number per stage; see `windows.redispatch`.

    target: ticks within which each stage should be done.
    """

    depth: tuple[int, ...]
    final: tuple[int, ...]
    open_limit: tuple[int, ...]
    max_wait: tuple[int, ...]
    max_wait_w: tuple[int, ...]
    target: int


class OpOrders:
    """The orders of one problem whose B's are all split. Not for two threads at once.

    compiled: use machine code.
    """

    def __init__(self, table: Table, *, compiled: bool = True) -> None:
        self.table = table
        job = table.problem.job
        self.n, self.items, self.stages = table.n, table.items, job.stages
        loops = compiled_windows() if compiled else {**vars(order_times), **vars(windows)}
        self._mirror, self._earliest = loops["mirror"], loops["earliest"]
        self._weight_starts, self._redispatch = loops["weight_starts"], loops["redispatch"]
        self.route = np.asarray(table.route, dtype=np.int64)
        forward, backward, weight = (np.asarray(ticks, dtype=np.int64) for ticks in table.times)
        sent, returned = (np.asarray(ticks, dtype=np.int64) for ticks in table.transfers)
        # Of down, up and W, and of both transfers: forwards, backwards.
        self._lengths = ((forward, backward, weight, sent, returned), (backward, forward, weight, returned, sent))
        self._capacity = np.asarray(table.capacity, dtype=np.int64)
        self._base = np.asarray(table.base, dtype=np.int64)
        self._load = np.asarray(table.load, dtype=np.int64)
        fastest = table.problem.fastest
        self._optimizer = np.array([t.optimizer for t in fastest], dtype=np.int64)
        down = [t.forward + wire for t, wire in zip(fastest[:-1], job.transfer_ticks, strict=True)]
        self._heads = np.array(list(accumulate(down, initial=0)), dtype=np.int64)
        self._stage = np.arange(table.workers) // job.pipelines
        self._down, self._up = self._zeros(self.items), self._zeros(self.items)
        self._free = self._zeros(table.workers)
        self._first, self._last = self._zeros(self.stages), self._zeros(self.stages)
        self._mirrored = self._zeros(3 * self.items)
        self._queues = self._zeros(self.items), self._zeros(self.items)

    def of(self, result: Result) -> Array:
        """The order of a schedule; of ops that start together, one without duration first."""
        forward, backward, weight = (np.asarray(starts, dtype=np.int64) for starts in result.starts)
        lengths = [ticks[self.route] for ticks in self._lengths[0][:3]]
        whole = np.array(self.table.split(result.split))[self.route] == 0
        weight = np.where(whole, backward + lengths[1], weight)
        items = np.arange(self.items)
        starts = np.concatenate((forward, backward, weight))
        ends = starts + np.concatenate(lengths)
        codes = np.concatenate((items, self.items + items, 2 * self.items + self.route))
        stage = np.tile(items // self.n, 3)
        order: Array = codes[np.lexsort((codes, -stage, ends, starts))]
        return order

    def rank(self, order: Array) -> tuple[int, int]:
        """(period, sum of the stages' spans) in ticks, when each stage starts as late as it can."""
        last, first = self._ends(order)
        spans = last - first
        if self.table.problem.technique.staggers:
            return int((spans + self._optimizer).max()), int(spans.sum())
        return int(last.max() - first.min() + self._optimizer.max()), int(spans.sum())

    def _ends(self, order: Array) -> tuple[Array, Array]:
        """By stage: the end of its last op, each as early as can be, and the latest start of its first."""
        self._run(False, order, self._zeros(self.stages), len(order))
        last = self._last.copy()
        latest = int(last.max())
        if not self.table.problem.technique.staggers:
            last[:] = latest
        self._mirror(order, self.items, self._mirrored)
        self._run(True, self._mirrored, latest - last, len(order))
        return last, latest - self._last

    def _run(self, backwards: bool, order: Array, release: Array, count: int) -> None:
        self._earliest(
            self.n,
            self.route,
            *self._lengths[backwards],
            release,
            order,
            count,
            self._down,
            self._up,
            self._free,
            self._first,
            self._last,
        )

    def again(
        self, order: Array, begin: int, end: int, manner: DispatchRule, keys: tuple[Array, Array], *, backwards: bool
    ) -> Array | None:
        """`order` with order[begin:end] dispatched anew, or None where memory locks it.

        keys: of the downs and the ups, smaller first.
        """
        job = self.table.problem.job
        made: Array
        due = self._heads + manner.target - self._optimizer
        if backwards:
            latest = int(due.max())
            begin, end = len(order) - end, len(order) - begin
            made = self._zeros(len(order))
            self._mirror(order, self.items, made)
            release, due = latest - due, latest - self._heads
        else:
            made, release = order.copy(), self._zeros(self.stages)
        lengths = self._lengths[backwards]
        self._run(backwards, made, release, begin)
        work = self._load * (lengths[0] + lengths[1] + lengths[2])
        slack = due[self._stage] - work
        started = self._redispatch(
            job.pipelines,
            self.n,
            self.route,
            *lengths,
            int(backwards),
            self._capacity,
            *keys,
            *(
                np.array(row, dtype=np.int64)
                for row in (manner.depth, manner.final, manner.open_limit, manner.max_wait, manner.max_wait_w)
            ),
            slack,
            self._base,
            begin,
            end,
            self._down,
            self._up,
            self._free,
            *self._queues,
            self._zeros(5 * self.items),
            self._zeros(windows.WINDOW_STATE * self.table.workers),
            self._zeros(self.table.workers),
            made,
        )
        if started < end - begin:
            return None
        if not backwards:
            return made
        back = self._zeros(len(made))
        self._mirror(made, self.items, back)
        return back

    def result(self, order: Array) -> Result:
        """The schedule of an order: stages start as late, and then ops as early, as they can."""
        _, first = self._ends(order)
        self._run(False, order, first, len(order))
        weights, zeros = self._zeros(self.items), self._zeros(self.table.workers)
        self._weight_starts(
            self.route,
            *self._lengths[0][:3],
            order,
            self._down,
            self._up,
            self._base,
            zeros.copy(),
            zeros,
            weights,
        )
        weight = self._zeros(self.items)
        weight[np.lexsort((self._up, self.route))] = weights
        return self.table.result((self._down.copy(), self._up.copy(), weight))

    def _zeros(self, count: int) -> Array:
        zeros: Array = np.zeros(count, dtype=np.int64)
        return zeros
