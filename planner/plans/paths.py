"""Chains of ops in a schedule: what one micro-batch goes through, and what sets the period."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.schedule import Op, Schedule, inputs

_Key = tuple[int, int, int]  # home pipeline, micro-batch, stage


@dataclass(frozen=True)
class Link:
    """One op of a chain. waited: ticks between what it needed last and its start."""

    op: Op
    waited: int


def micro_batch_path(schedule: Schedule, pipeline: int, micro_batch: int) -> tuple[Op, ...]:
    """All ops of one micro-batch, in order of start; empty when there is no such micro-batch."""
    found = [op for op in schedule.compute_ops() if op.pipeline == pipeline and op.micro_batch == micro_batch]
    return tuple(sorted(found, key=lambda op: (op.start, op.end, op.stage)))


def critical_path(schedule: Schedule) -> tuple[Link, ...]:
    """The chain of ops that ends with the last op of the stage which sets the period, first op first.

    Each op is there because it is what the next one had to wait for longest: its input, its own
    forward, or the op before it on its worker. So without waits in it, nothing but shorter ops or
    another order makes the period shorter; a wait is what the order itself, or a memory limit, costs.
    """
    chain = _Chain(schedule)
    link = chain.last()
    links = [link]
    while (before := chain.cause(link.op)) is not None:
        cause, ready = before
        links[-1] = Link(link.op, link.op.start - ready)
        link = Link(cause, 0)
        links.append(link)
    return tuple(reversed(links))


class _Chain:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.job = schedule.problem.job
        self.at: dict[tuple[str, _Key], Op] = {}
        self.place: dict[Op, int] = {}
        for ops in schedule.ops.values():
            for i, op in enumerate(ops):
                self.place[op] = i
                if op.kind != "O":
                    self.at["I" if op.kind == "B" else op.kind, (op.pipeline, op.micro_batch, op.stage)] = op

    def last(self) -> Link:
        """The step of the stage that sets the period (without staggering: of the whole grid)."""
        schedule = self.schedule
        first: dict[int, int] = {}
        ends: dict[int, tuple[int, int, Op]] = {}
        for worker, ops in schedule.ops.items():
            stage = worker.stage
            first[stage] = min(first.get(stage, ops[0].start), ops[0].start)
            # Of peers that step together, the one that the step waited for.
            found = (ops[-1].end, ops[-2].end if len(ops) > 1 else 0, ops[-1])
            ends[stage] = max(ends.get(stage, found), found)
        if not schedule.problem.technique.staggers:
            return Link(max(ends.values())[-1], 0)
        return Link(ends[max(first, key=lambda s: ends[s][0] - first[s])][-1], 0)

    def cause(self, op: Op) -> tuple[Op, int] | None:
        """What `op` waited for longest, and the tick at which that let it go; None at the beginning."""
        return max(self._causes(op), key=lambda found: found[1], default=None)

    def _causes(self, op: Op) -> Iterator[tuple[Op, int]]:
        if op.kind == "O":
            yield from self._before_step(op)
            return
        place = self.place[op]
        if place:
            before = self.schedule.ops[op.worker][place - 1]
            yield before, before.end
        for kind, source, lag in inputs(op.kind, op.stage, self.job):
            given = self.at.get((kind, (op.pipeline, op.micro_batch, source)))
            if given is not None:
                yield given, given.end + lag

    def _before_step(self, step: Op) -> Iterator[tuple[Op, int]]:
        """A step waits for the last op of every peer, without staggering of every worker."""
        staggers = self.schedule.problem.technique.staggers
        for worker, ops in self.schedule.ops.items():
            if (worker.stage == step.stage or not staggers) and len(ops) > 1:
                yield ops[-2], ops[-2].end


def waited(path: tuple[Link, ...]) -> int:
    """Ticks of a chain in which none of its ops runs."""
    return sum(link.waited for link in path)


def workers_of(path: tuple[Link, ...]) -> list[Worker]:
    return sorted({link.op.worker for link in path})
