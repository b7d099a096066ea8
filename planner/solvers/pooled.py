"""A relaxation whose optimum bounds the period for every routing: the peers of a stage as one pool.

Take any valid schedule, with any routing, and let a stage have L living peers, each of which may
hold C activations. Sort the stage's F starts, its I (or B) starts and its W starts each on their
own, and call the k-th of each those of "micro-batch" k. Then
- at most L ops run at once, since each peer runs one at a time; so the k-th F starts no sooner
  than the (k - L)-th F has ended (as all last equally long), and likewise I's and W's;
- the k-th F of stage s + 1 starts no sooner than the k-th F of stage s has ended and been sent,
  for every F of stage s + 1 follows one of stage s by that much, and this survives sorting (see
  reduction); so do I(s) after I(s + 1), I after F and W after I on one stage;
- at most C L activations are held in the stage, so the (k + C L)-th F starts no sooner than the
  k-th W has ended;
- first start and last end of the stage are what they were.
So the times satisfy this model, whose optimum is therefore no larger than any schedule's period.

It forgets that F, I and W of a micro-batch share a worker, and that memory is not shared. Where
peers differ in speed, an op lasts as long as on the fastest of them: each of the above holds all
the more for one that takes longer. What it gains is that all of its ops are ordered beforehand: no
routes, little to branch on.
"""

from __future__ import annotations

from itertools import pairwise

from ortools.sat.python import cp_model

from openrecycle.planner.jobs.job import Problem


class PooledModel:
    """Looks for a relaxed period of `lower` to `upper` ticks, O included."""

    def __init__(self, problem: Problem, lower: int, upper: int) -> None:
        self.problem = problem
        self.model = cp_model.CpModel()
        self.period = self.model.new_int_var(lower, upper, "period")
        job = problem.job
        self.count = job.pipelines * job.micro_batches
        self.kinds = "FIW" if problem.technique.splits else "FI"
        # See ScheduleModel: a stage starts before stage 0 ends and lasts a period at most.
        horizon = 2 * upper if problem.technique.staggers else upper
        self.starts: dict[tuple[str, int], list[cp_model.IntVar]] = {}
        head = 0
        for stage in range(job.stages):
            for kind in self.kinds:
                self.starts[kind, stage] = [self.model.new_int_var(head, horizon, "") for _ in range(self.count)]
            self._pool(stage)
            self._span(stage, head, upper)
            self._chain(stage)
            if stage < job.stages - 1:
                head += problem.fastest[stage].forward + job.transfer_ticks[stage]
        self.model.minimize(self.period)

    @staticmethod
    def ops(problem: Problem) -> int:
        """Starts in the model: its size."""
        job = problem.job
        return (3 if problem.technique.splits else 2) * job.pipelines * job.micro_batches * job.stages

    def _duration(self, kind: str, stage: int) -> int:
        ticks = self.problem.fastest[stage]
        if kind == "F":
            return ticks.forward
        if kind == "W":
            return ticks.weight_backward
        return ticks.input_backward if self.problem.technique.splits else ticks.backward

    def _pool(self, stage: int) -> None:
        """The order of the stage's ops, its peers and their memory together."""
        add = self.model.add
        peers, limit = len(self.problem.living_peers(stage)), self.problem.limits[stage]
        intervals = []
        for kind in self.kinds:
            row, length = self.starts[kind, stage], self._duration(kind, stage)
            intervals += [self.model.new_fixed_size_interval_var(start, length, "") for start in row]
            for before, after in pairwise(row):
                add(after >= before)
            for before, after in zip(row, row[peers:], strict=False):
                add(after >= before + length)
        if peers == 1:
            self.model.add_no_overlap(intervals)
        else:
            self.model.add_cumulative(intervals, [1] * len(intervals), peers)
        if limit is not None:
            last = self.kinds[-1]
            for release, forward in zip(
                self.starts[last, stage], self.starts["F", stage][limit * peers :], strict=False
            ):
                add(forward >= release + self._duration(last, stage))

    def _span(self, stage: int, head: int, upper: int) -> None:
        """The stage within the period."""
        ticks = self.problem.fastest
        last = self.kinds[-1]
        end = self.starts[last, stage][-1] + self._duration(last, stage)
        if not self.problem.technique.staggers:
            self.model.add(end + self.problem.longest_optimizer <= self.period)
        elif stage == 0:
            self.model.add(end + ticks[0].optimizer <= self.period)
        else:
            first = self.model.new_int_var(head, upper, f"first{stage}")
            self.model.add(self.starts["F", stage][0] >= first)
            self.model.add(end + ticks[stage].optimizer <= first + self.period)

    def _chain(self, stage: int) -> None:
        """Backward after forward, W after I, and both after what the neighbour sends."""
        add, job = self.model.add, self.problem.job
        for k in range(self.count):
            add(self.starts["I", stage][k] >= self.starts["F", stage][k] + self._duration("F", stage))
            if "W" in self.kinds:
                add(self.starts["W", stage][k] >= self.starts["I", stage][k] + self._duration("I", stage))
            if stage:
                above = stage - 1
                sent = self.starts["F", above][k] + self._duration("F", above) + job.transfer_ticks[above]
                add(self.starts["F", stage][k] >= sent)
                back = self.starts["I", stage][k] + self._duration("I", stage) + job.backward_transfer_ticks[above]
                add(self.starts["I", above][k] >= back)
