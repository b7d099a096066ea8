"""What one worker does in every iteration of a generation, and what it exchanges with its neighbours. No torch here."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.schedule import MicroBatch, Op, Schedule

Transfer = tuple[str, MicroBatch]
"""`F`: what a forward hands to the next stage; `I`: the gradient that comes back."""
Lane = tuple[str, Worker]
"""All transfers of a kind that come from one worker."""


@dataclass(frozen=True)
class Script:
    """ops: in order. before, after: for each micro-batch, who runs it on the previous and next stage.

    arrivals: per lane the micro-batches that come to this worker, in the order in which that worker
    sends them, which need not be the order in which this one wants them.
    """

    ops: tuple[Op, ...]
    before: Mapping[MicroBatch, Worker]
    after: Mapping[MicroBatch, Worker]
    arrivals: Mapping[Lane, tuple[MicroBatch, ...]]

    @classmethod
    def of(cls, schedule: Schedule, me: Worker, runs: Mapping[Worker, Sequence[Worker]] | None = None) -> Script:
        """runs: whose part of the plan a worker does, of its stage, where that is not just its own. By the plan's times
        all of it is still in an order that can't deadlock.

        A worker that the plan does without runs nothing but its stage's reduction and step.
        """
        roles = dict(schedule.ops)
        roles[me] = roles.get(me) or (Op("O", me.pipeline, -1, me.stage, me, 0, 0),)
        for worker, parts in (runs or {}).items():
            planned = ([op for op in schedule.ops[part] if op.kind != "O"] for part in parts)
            own = (op for op in schedule.ops[worker] if op.kind == "O")
            roles[worker] = (*heapq.merge(*planned, key=lambda op: op.start), *own)
        mine = {(op.pipeline, op.micro_batch) for op in roles[me] if op.kind == "F"}
        neighbours: dict[int, dict[MicroBatch, Worker]] = {me.stage - 1: {}, me.stage + 1: {}}
        arrivals: dict[Lane, tuple[MicroBatch, ...]] = {}
        for worker, ops in roles.items():
            if worker.stage not in neighbours:
                continue
            for op in ops:
                if op.kind == "F":
                    neighbours[worker.stage][op.pipeline, op.micro_batch] = worker
            kind, senders = ("F", "F") if worker.stage < me.stage else ("I", "IB")
            keys = ((op.pipeline, op.micro_batch) for op in ops if op.kind in senders)
            if coming := tuple(key for key in keys if key in mine):
                arrivals[kind, worker] = coming
        return cls(roles[me], neighbours[me.stage - 1], neighbours[me.stage + 1], arrivals)

    def without(self, keys: Collection[MicroBatch]) -> Script:
        """The same order without the ops of these micro-batches."""
        return self.only({(op.pipeline, op.micro_batch) for op in self.ops} - set(keys)) if keys else self

    def only(self, keys: Collection[MicroBatch]) -> Script:
        """The same order with the ops of these micro-batches, and the step; the lanes stay, be they empty."""
        ops = tuple(op for op in self.ops if op.kind == "O" or (op.pipeline, op.micro_batch) in keys)
        arrivals = {lane: tuple(key for key in coming if key in keys) for lane, coming in self.arrivals.items()}
        return replace(self, ops=ops, arrivals=arrivals)

    def forwards(self, keys: Collection[MicroBatch]) -> Script:
        """The same order with the forwards of these micro-batches alone."""
        script = self.only(keys)
        ops = tuple(op for op in script.ops if op.kind == "F")
        arrivals = {lane: coming if lane[0] == "F" else () for lane, coming in script.arrivals.items()}
        return replace(script, ops=ops, arrivals=arrivals)

    def receives(self) -> list[Transfer]:
        """Of every op that waits for a transfer, in order."""
        out = []
        for op in self.ops:
            key = (op.pipeline, op.micro_batch)
            if op.kind == "F" and key in self.before:
                out.append(("F", key))
            elif op.kind in ("I", "B") and key in self.after:
                out.append(("I", key))
        return out

    @property
    def neighbours(self) -> frozenset[Worker]:
        """Everybody with whom this worker exchanges anything; each of them says the same of this one."""
        return frozenset(worker for _, worker in self.arrivals)
