"""The CP-SAT model in which routes are free: any living peer may run any micro-batch of its stage.

Its bound holds for the problem as such, not only for one routing. Every op is there once per peer,
so it is for small grids.

Micro-batches differ in nothing but their routes, and peers of a stage in nothing but what they are
given, since transfers take as long from any peer to any other. So without loss of generality
(rename micro-batches, then peers, stage by stage):
- micro-batches start on stage 0 in the order of their index;
- on each stage, peer q + 1 gets its first micro-batch after peer q has one (by index).
"""

from __future__ import annotations

from itertools import pairwise

from ortools.sat.python import cp_model

from openrecycle.planner.jobs.job import Problem, Worker
from openrecycle.planner.plans.schedule import Op, Schedule
from openrecycle.planner.solvers.reduction import whole_backwards


class RoutingModel:
    """Looks for a period of `lower` to `upper` ticks, O included, with free times and routes.

    Peers must be alike: for jobs without speeds.
    """

    def __init__(self, problem: Problem, lower: int, upper: int) -> None:
        self.problem = problem
        job = problem.job
        self.ticks = problem.ticks
        self.wire, self.wire_back = job.transfer_ticks, job.backward_transfer_ticks
        self.count = job.pipelines * job.micro_batches
        self.splits = problem.technique.splits
        self.staggers = problem.technique.staggers
        self.model = cp_model.CpModel()
        self.period = self.model.new_int_var(lower, upper, "period")
        # See ScheduleModel: a stage starts before stage 0 ends and lasts a period at most.
        self.horizon = 2 * upper if self.staggers else upper
        heads = [0]
        for s in range(1, job.stages):
            heads.append(heads[-1] + self.ticks[s - 1].forward + self.wire[s - 1])
        self.heads = heads
        self.first: list[cp_model.IntVar | int] = [
            self.model.new_int_var(heads[s], upper, "") if s and self.staggers else 0 for s in range(job.stages)
        ]
        self.forward, self.backward, self.weight = ([self._row() for _ in range(self.count)] for _ in range(3))
        self.on: list[list[list[cp_model.IntVar]]] = []  # [stage][micro-batch][peer]
        for index in range(self.count):
            self._chain(index)
        for before, after in pairwise(range(self.count)):
            self.model.add(self.forward[after][0] >= self.forward[before][0])
        for stage in range(job.stages):
            self._stage(stage)
        self.model.minimize(self.period)

    @staticmethod
    def ops(problem: Problem) -> int:
        """Optional intervals that the model would need: its size."""
        job = problem.job
        kinds = 3 if problem.technique.splits else 2
        peers = sum(len(problem.living_peers(s)) for s in range(job.stages))
        return kinds * job.pipelines * job.micro_batches * peers

    def _row(self) -> list[cp_model.IntVar]:
        return [self.model.new_int_var(head, self.horizon, "") for head in self.heads]

    def _back(self, stage: int) -> int:
        """Duration of what the stage above waits for: I, or B where it isn't split."""
        return self.ticks[stage].input_backward if self.splits else self.ticks[stage].backward

    def _end(self, index: int, stage: int) -> cp_model.LinearExpr:
        if self.splits:
            return self.weight[index][stage] + self.ticks[stage].weight_backward
        return self.backward[index][stage] + self.ticks[stage].backward

    def _chain(self, index: int) -> None:
        add = self.model.add
        forward, backward, weight = self.forward[index], self.backward[index], self.weight[index]
        longest = max(t.optimizer for t in self.ticks)
        for s, ticks in enumerate(self.ticks):
            add(backward[s] >= forward[s] + ticks.forward)
            # Where B is not split, W stands for the end of its first part and nothing else.
            add(weight[s] >= backward[s] + ticks.input_backward)
            if not self.splits:
                add(weight[s] == backward[s] + ticks.input_backward)
            if self.staggers:
                add(forward[s] >= self.first[s])
                add(self._end(index, s) + ticks.optimizer <= self.first[s] + self.period)
            else:
                add(self._end(index, s) + longest <= self.period)
            if s:
                add(forward[s] >= forward[s - 1] + self.ticks[s - 1].forward + self.wire[s - 1])
                add(backward[s - 1] >= backward[s] + self._back(s) + self.wire_back[s - 1])

    def _stage(self, stage: int) -> None:
        """Routes of the stage; one op at a time per peer; memory; the peers' order."""
        model, ticks = self.model, self.ticks[stage]
        peers = self.problem.living_peers(stage)
        limit = self.problem.limits[stage]
        on = [[model.new_bool_var("") for _ in peers] for _ in range(self.count)]
        self.on.append(on)
        parts = [(self.forward, ticks.forward), (self.backward, self._back(stage))]
        if self.splits:
            parts.append((self.weight, ticks.weight_backward))
        held = [
            (self.forward[i][stage], model.new_int_var(ticks.work, self.horizon, ""), self._end(i, stage))
            for i in range(self.count)
        ]
        for row in on:
            model.add_exactly_one(row)
        for q in range(len(peers)):
            model.add_no_overlap(
                model.new_optional_fixed_size_interval_var(starts[i][stage], length, on[i][q], "")
                for starts, length in parts
                for i in range(self.count)
            )
            if limit is not None and limit < self.count:
                spans = [model.new_optional_interval_var(*held[i], on[i][q], "") for i in range(self.count)]
                model.add_cumulative(spans, [1] * self.count, limit)
            # What a peer runs fits between the stage's first start and the period's end.
            load = sum(on[i][q] for i in range(self.count)) * ticks.work
            if self.staggers:
                model.add(load + ticks.optimizer <= self.period)
            else:
                model.add(self.heads[stage] + load + max(t.optimizer for t in self.ticks) <= self.period)
            for i in range(self.count if q else 0):
                model.add(sum(on[j][q - 1] for j in range(i)) >= on[i][q])
        # Redundant: all peers together.
        model.add_cumulative(
            [
                model.new_fixed_size_interval_var(starts[i][stage], length, "")
                for starts, length in parts
                for i in range(self.count)
            ],
            [1] * (len(parts) * self.count),
            len(peers),
        )
        if limit is not None and limit * len(peers) < self.count:
            model.add_cumulative(
                [model.new_interval_var(*span, "") for span in held], [1] * self.count, limit * len(peers)
            )

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """The schedule of a solution.

        Which pipeline a micro-batch belongs to is free too, and chosen so that few are re-routed:
        each goes home to the pipeline that runs most of it, while that still takes any.
        """
        job, problem = self.problem.job, self.problem
        routes = [
            [
                next(p for q, p in enumerate(problem.living_peers(s)) if solver.value(self.on[s][i][q]))
                for s in range(job.stages)
            ]
            for i in range(self.count)
        ]
        room = {p: list(range(job.micro_batches))[::-1] for p in range(job.pipelines)}
        names: dict[int, tuple[int, int]] = {}
        wishes = sorted((-route.count(p), i, p) for i, route in enumerate(routes) for p in room)
        for _, i, p in wishes:
            if i not in names and room[p]:
                names[i] = (p, room[p].pop())
        ops = []
        for i, route in enumerate(routes):
            for s, ticks in enumerate(self.ticks):
                place = (*names[i], s, Worker(route[s], s))
                ops.append(Op("F", *place, solver.value(self.forward[i][s]), ticks.forward))
                back = solver.value(self.backward[i][s])
                if self.splits:
                    ops.append(Op("I", *place, back, ticks.input_backward))
                    ops.append(Op("W", *place, solver.value(self.weight[i][s]), ticks.weight_backward))
                else:
                    ops.append(Op("B", *place, back, ticks.backward))
        return Schedule.build(problem, whole_backwards(problem, ops))
