"""The rules that the list scheduler tries, best first.

A rule is a way to settings that suits any problem. The list was chosen by measurement: greedily
the rule that lowers the mean gap most, over the grids of tests/benchmarks/bench_planner.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice

from openrecycle.planner.jobs.job import Problem
from openrecycle.planner.solvers.table import ALWAYS, UNLIMITED, DispatchSettings

# Rules tried so long as the ops of all tries together stay below this.
EFFORT = 800_000
FEWEST = 4
HUGE = 1_000_000  # ops; from here on two rules must do
MOST = 64


@dataclass(frozen=True)
class Rule:
    """depth: forwards that a stage runs ahead before it prefers backwards: `eager` none, `1f1b`
    stages - s, `zb` 2 (stages - s) - 1.

    open_limit: pending W's that force one. `never`; `one`; `half` of the memory limit; `full-k`
    k + 1 less than the limit; `turn-k` so that as many activations as micro-batches turn round
    below at full speed, and k more, stay free for forwards.
    max_wait, max_wait_w: percent, the same on all stages. target: multiple of the lower bound.
    final: last forwards that go first, as a multiple of the micro-batches that turn round below.
    alike: see DispatchSettings; no help where F, I and W last equally long anyway.
    """

    depth: str
    open_limit: str
    max_wait: int = 0
    max_wait_w: int = 0
    target: float = 1.0
    final: float = 0.0
    alike: bool = False
    order: str | int = "index"
    split: str = "all"

    def settings(self, problem: Problem, bound: int) -> DispatchSettings:
        job = problem.job
        stages = range(job.stages)
        depths = {"eager": 0, "1f1b": 1, "zb": 2}[self.depth]
        # By stage, F's and I's from there to the last: the time in which a micro-batch turns round.
        turns = [*accumulate((t.forward + t.input_backward for t in reversed(job.ticks)), initial=0)][:0:-1]
        slowest = max(t.work for t in job.ticks)
        return DispatchSettings(
            depth=tuple(depths * (job.stages - s) - (depths > 1) for s in stages),
            final=tuple(int(self.final * turns[s] / job.ticks[s].work) for s in stages),
            open_limit=tuple(self._open_limit(problem, s, turns[s], slowest) for s in stages),
            max_wait=(self.max_wait,) * job.stages,
            max_wait_w=(self.max_wait_w,) * job.stages,
            target=int(bound * self.target),
            order=self.order,
            split=self.split,
            alike=self.alike,
        )

    def _open_limit(self, problem: Problem, stage: int, turn: int, slowest: int) -> int:
        if self.open_limit == "never":
            return UNLIMITED
        if self.open_limit == "one":
            return 1
        job = problem.job
        most = -(-job.pipelines * job.micro_batches // len(problem.living_peers(stage)))
        limit = problem.limits[stage]
        limit = most if limit is None else min(limit, most)
        if self.open_limit == "half":
            return max(1, limit // 2)
        name, _, less = self.open_limit.partition("-")
        if name == "full":
            return max(1, limit - 1 - int(less))
        return max(1, limit - int(less) - -(-turn // slowest))


# depth, open_limit, max_wait, max_wait_w, target, final
EVERY = [
    Rule("1f1b", "never", 100, 100),
    Rule("1f1b", "turn-0", 100, 100, alike=True),
    Rule("1f1b", "never", alike=True),
    Rule("zb", "turn-1"),
    Rule("1f1b", "never", 100, 0, 1.03),
    Rule("1f1b", "turn-0", 100, 100),
    Rule("1f1b", "never"),
    Rule("1f1b", "turn-2", 100, 100),
    Rule("zb", "turn-0", 100),
    Rule("zb", "turn-2"),
    Rule("1f1b", "turn-1", 100, 100),
    Rule("1f1b", "turn-1", 100, 100, 1.0, 1.5),
    Rule("1f1b", "turn-2", 100, 100, 1.0, 2.0),
    Rule("zb", "turn-2", 100, 100),
    Rule("zb", "turn-0"),
    Rule("1f1b", "full-0", ALWAYS, ALWAYS),
    Rule("1f1b", "never", ALWAYS, ALWAYS, 1.03),
    Rule("1f1b", "full-1", 100, 100, alike=True),
    Rule("zb", "never", alike=True),
    Rule("1f1b", "half", 100),
    Rule("zb", "half", 100, 100),
    Rule("zb", "full-0", 100),
    Rule("1f1b", "turn-1", 100),
    Rule("1f1b", "turn-0", 100),
    Rule("1f1b", "full-1", 100, 100),
    Rule("zb", "full-2", 100),
    Rule("eager", "never"),
    Rule("zb", "never"),
    Rule("1f1b", "full-0"),
    Rule("eager", "one"),
]


ORDERS = ("index", "guests", "own")


def rules(problem: Problem) -> Iterator[Rule]:
    """Their number depends on the size of the problem and on nothing else.

    Large problems get the first few of EVERY; small ones all, in every order of micro-batches,
    then shuffled ones.
    """
    job = problem.job
    ops = 3 * job.pipelines * job.stages * job.micro_batches
    in_step = all(t.forward == t.input_backward == t.weight_backward for t in job.ticks)
    yield from islice((rule for rule in _endless(problem) if not (rule.alike and in_step)), tries(ops))


def tries(ops: int) -> int:
    """How many rules are tried on a problem of so many ops."""
    return 2 if ops > HUGE else max(FEWEST, min(MOST, EFFORT // ops))


def _endless(problem: Problem) -> Iterator[Rule]:
    if not problem.technique.splits:
        yield from _coupled(problem)
    some = EVERY[:8]
    for order in ORDERS if problem.failed else ORDERS[:1]:
        yield from (replace(rule, order=order) for rule in (EVERY if order == "index" else some))
    if problem.failed:
        yield from (replace(rule, split="peers") for rule in some)
    for seed in count():
        yield replace(EVERY[seed % len(EVERY)], order=seed)


def _coupled(problem: Problem) -> Iterator[Rule]:
    """Without W's of their own only depth, max_wait and order matter."""
    plain = [Rule(depth, "never", max_wait, split="none") for max_wait in (0, 100) for depth in ("1f1b", "eager", "zb")]
    orders: Iterator[str | int] = chain(ORDERS, count())
    for order in orders:
        yield from (replace(rule, order=order) for rule in plain)
