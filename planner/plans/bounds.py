"""Proven lower bounds on the period. A bound that some plan beats is a bug.

Notation, for one stage s: F, I, W, O are its op times. n is the number of micro-batches that its busiest living worker
must run, at least ceil(all micro-batches / living peers) whatever the routing. C is the most activations that worker
can hold (n when there is no limit), and A the most of them whose I has not ended; A is less than C only where memory is
counted in bytes. A micro-batch *turns round* at s in
  r(s) = F(s) + transfers and F below s + all I below s and their transfers back,
the time from its F's start on s to the earliest start of its I on s. Where B is not split (the
adaptive technique), B takes the place of I on the way back, and W is 0.

Every bound holds for all routings, since each concerns one worker with at least n micro-batches
and the chain of ops of single micro-batches, and for both notions of period: a staggered period
is at least (end of stage a's O) - (first start of stage a) for each stage a, and the other is at
least that much for each a too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageTicks, Technique, Worker


@dataclass(frozen=True)
class Bound:
    """A lower bound in ticks, and the requirement it comes from, in words."""

    ticks: int
    reason: str


@dataclass(frozen=True)
class _Row:
    """What the bounds need to know about one worker, in ticks; see the module for the letters.

    Each method returns the least time for the worker's first n micro-batches. None falls as n grows.
    """

    F: int
    I: int  # noqa: E741 -- the field's name for it
    W: int
    A: int | None
    C: int | None
    turn: int

    def held(self, n: int) -> int:
        """C of the module, for n micro-batches."""
        return n if self.C is None else min(n, self.C)

    def ahead(self, n: int) -> int:
        """A of the module, for n micro-batches."""
        return n if self.A is None else min(n, self.A)

    def first_phase(self, n: int) -> int:
        """Least time from the worker's first F to the end of its n-th F and I, whatever the W's.

        Before the first I can start, r(s) after the first F, only F's can run, and no more than A
        of them; so at most min(r(s), A F) of that time is spent working.
        """
        ahead = self.ahead(n)
        return max(self.turn, ahead * self.F) + (n - ahead) * self.F + n * self.I

    def last_input_backward(self, n: int) -> int:
        """Least time from the worker's first F to the end of its last I.

        When its last I ends all n micro-batches have run F and I, and at most C are still held,
        so at least n - C W's have run, none of them before the first I.
        """
        return self.first_phase(n) + (n - self.held(n)) * self.W

    def span(self, n: int) -> int:
        """Least time from the worker's first F to the end of its last op: all W's as well.

        From the start of the last F to the end of its W at least r(s) + I + W pass, in which only that
        F and what is held by then can run: I and W of at most C micro-batches. The rest of that time
        is idle. With more than C micro-batches the last F waits for a W, so this time and that of
        `first_phase` do not overlap.
        """
        held = self.held(n)
        cool_down = max(0, self.turn + self.I + self.W - self.F - held * (self.I + self.W)) if n > held else 0
        return self.first_phase(n) + n * self.W + cool_down

    def residence(self, n: int) -> int:
        """Least time over which n micro-batches can be held C at a time, and A until their I's have ended.

        Each is held for at least r(s) + I + W. Intervals of which at most C overlap can be
        coloured with C colours so that those of one colour are disjoint (interval graphs are
        perfect), and some colour has at least ceil(n / C) of them. The same holds with A, where each is held for
        r(s) + I until its I has ended, and a W follows.
        """
        until_I = -(-n // self.ahead(n)) * (self.turn + self.I)
        return max(until_I + self.W, -(-n // self.held(n)) * (self.turn + self.I + self.W))

    def returns(self, n: int) -> int:
        """Least time to the start of the last W: `residence` without it, as what is held ends with that W."""
        return self.residence(n) - self.W


@dataclass(frozen=True)
class _StageBound:
    """One stage, in ticks. F, I, W: of its fastest peer, which any micro-batch may meet; O: the longest.

    n: the least number of micro-batches of its busiest peer. A, C: see the module. living: number of peers. rows: the
    living peers, equal ones together with their count. Some peer has to take n micro-batches; where peers differ in
    speed, a bound is the least time of the slowest peer over all ways of dividing `total` among them.
    """

    F: int
    I: int  # noqa: E741
    W: int
    O: int  # noqa: E741
    n: int
    A: int | None
    C: int | None
    total: int
    living: int
    rows: tuple[tuple[_Row, int], ...]

    @property
    def turn(self) -> int:
        return self.rows[0][0].turn - self.rows[0][0].F + self.F

    @property
    def groups(self) -> Iterator[tuple[int, int]]:
        """Yields (peers, the least number of micro-batches that some so many peers run together).

        First all peers; then, where `total` does not divide evenly, as many as must have n each if none has more.
        """
        yield self.living, self.total
        if extra := self.total % self.living:
            yield extra, extra * self.n

    @property
    def last_input_backward(self) -> int:
        return self._least(_Row.last_input_backward)

    @property
    def span(self) -> int:
        return self._least(_Row.span)

    @property
    def residence(self) -> int:
        return self._least(_Row.residence)

    @property
    def returns(self) -> int:
        return self._least(_Row.returns)

    def _least(self, time: Callable[[_Row, int], int]) -> int:
        """Least ticks within which the peers, each for itself, can run `total` micro-batches.

        `time` does not fall with the number of micro-batches, so bisection finds the most that a peer can run within
        some ticks, and then the ticks.
        """
        if len(self.rows) == 1:
            return time(self.rows[0][0], self.n)

        def most(row: _Row, ticks: int) -> int:
            return bisect_right(range(1, self.total + 1), ticks, key=lambda n: time(row, n))

        def suffice(ticks: int) -> bool:
            return sum(count * most(row, ticks) for row, count in self.rows) >= self.total

        return bisect_left(range(min(time(row, self.total) for row, _ in self.rows)), True, key=suffice)


def period_bound(problem: Problem) -> int:
    """Return a number of ticks that no valid schedule of `problem` can beat."""
    return best_bound(problem).ticks


@lru_cache(maxsize=256)
def best_bound(problem: Problem) -> Bound:
    """Return the largest of the bounds of this module, with the reason for it."""
    return max(_all(problem, _stages(problem)), key=lambda b: b.ticks)


class CountBounds:
    """The bounds of one job with all its failures on one stage, for any stage and any number of them. Each takes time
    in proportion to the number of stages. Speeds and all-reduces are left out, so that all peers are alike.

    Raises InfeasibleError where the job has no schedule even without failures.
    """

    def __init__(self, job: Job, technique: Technique, memory: MemoryLimit) -> None:
        plain = tuple(replace(profile, reductions=()) for profile in job.profiles)
        self._problem = Problem(replace(job.as_stages(), profiles=plain, speeds=()), frozenset(), technique, memory)
        self._stages = _stages(self._problem)

    def ticks(self, stage: int, dead: int) -> int:
        """Returns period_bound with `dead` failures (fewer than pipelines) on `stage`."""
        stages = list(self._stages)
        was = stages[stage]
        living = was.living - dead
        stages[stage] = replace(was, n=-(-was.total // living), living=living, rows=((was.rows[0][0], living),))
        return max(b.ticks for b in _all(self._problem, stages))


def _all(problem: Problem, stages: list[_StageBound]) -> list[Bound]:
    return _staggered(problem, stages) if problem.technique.staggers else _barrier(problem, stages)


def _stages(problem: Problem) -> list[_StageBound]:
    job = problem.job
    total = job.pipelines * job.micro_batches
    below = 0  # transfers and F below, all I below and their transfers
    stages: list[_StageBound] = []
    own: dict[int, set[Worker]] = defaultdict(set)
    for worker, _ in job.speeds:
        if worker not in problem.failed:
            own[worker.stage].add(worker)
    for s in reversed(range(job.stages)):
        t = problem.fastest[s]
        back = t.input_backward if problem.technique.splits else t.backward
        living = len(problem.living_peers(s))
        rows = Counter(_row(problem, problem.worker_ticks(w), s, below) for w in own[s])
        if living > len(own[s]):
            rows[_row(problem, problem.ticks[s], s, below)] += living - len(own[s])
        stages.append(
            _StageBound(
                F=t.forward,
                I=back,
                W=t.weight_backward if problem.technique.splits else 0,
                O=t.optimizer,
                n=-(-total // living),
                A=problem.most_held[s][0],
                C=problem.most_held[s][1],
                total=total,
                living=living,
                rows=tuple(rows.items()),
            )
        )
        if s > 0:
            below += t.forward + back + job.transfer_ticks[s - 1] + job.backward_transfer_ticks[s - 1]
    return stages[::-1]


def _row(problem: Problem, t: StageTicks, stage: int, below: int) -> _Row:
    splits, (ahead, held) = problem.technique.splits, problem.most_held[stage]
    return _Row(
        F=t.forward,
        I=t.input_backward if splits else t.backward,
        W=t.weight_backward if splits else 0,
        A=ahead,
        C=held,
        turn=t.forward + below,
    )


def _staggered(problem: Problem, stages: list[_StageBound]) -> list[Bound]:
    """For each stage its own span; for each pair a < s the way down, the last I of s, and the way up.

    Stage s starts no sooner than stage a's first start + F and transfers from a to s, for its
    first F follows an F of the same micro-batch on a. After the last I of a worker of s, that
    micro-batch still passes I on the stages between, then I and W on a.
    """
    bounds: list[Bound] = []
    # path[s]: F and I of all stages above s; differences give any stretch.
    path = list(accumulate((x.F + x.I for x in stages[:-1]), initial=0))
    both = zip(problem.job.transfer_ticks, problem.job.backward_transfer_ticks, strict=True)
    wire = list(accumulate(map(sum, both), initial=0))
    way = [p + t for p, t in zip(path, wire, strict=True)]
    best_above: int | None = None  # max over a of W(a) + O(a) - way[a]
    fewest = 0  # the first of the stages above that have the fewest living peers
    for s, x in enumerate(stages):
        bounds.append(Bound(x.span + x.O, f"stage {s} has {x.n} micro-batches per worker to run"))
        held = x.n if x.A is None else min(x.n, x.A)
        bounds.append(Bound(x.residence + x.O, f"stage {s} may hold only {held} activations"))
        if best_above is not None:
            bounds.append(
                Bound(
                    x.last_input_backward + way[s] + best_above,
                    f"the last backward of stage {s} must still reach the stages above",
                )
            )
            least = max(_supplied(stages[a], x, way[s] - way[a]) for a in {0, fewest})
            bounds.append(Bound(least, f"the last backwards of stage {s} must still be taken in by the stages above"))
        above = x.W + x.O - way[s]
        best_above = above if best_above is None else max(best_above, above)
        if x.living < stages[fewest].living:
            fewest = s
    return bounds


def _supplied(a: _StageBound, b: _StageBound, way: int) -> int:
    """Bounds the period by how fast stage a < b can take in the last gradients. way: F, I, transfers from a to b and
    back, those of a and not those of b.

    Let stage a end its work at e. On one of its workers the j-th last I starts no later than
    e - j u, u = I(a) + W(a), as j I's and their own W's are still to run; so over all its peers the k-th
    last does not start after e - ceil(k / L(a)) u. An I of stage b precedes the one of its micro-batch on
    a by I(b) and what lies between. So y before the last moment at which an I of b could start if u were 0,
    at t, no more than L(a) floor(y / u) of them are yet to start. The L(a) before those start at
    t - (u - y mod u) at the latest, those before them u sooner, and so on: as long as that is less than I(b)
    before t, what is left of those I's may run after t as well. While y <= r(b) + u - F(b), no F is left for
    after t, for its I would come too late. And at most C a worker are held at t, each with a W to run. All
    other work of stage b is done before t, by g peers: those of a group that has m micro-batches to run at
    least,
      g (x - idle) >= m (F + I + W) - g C W - I's after t,
    where x is the time from the first start of b to t, and idle = max(0, r(b) - C F) that of the warm-up,
    if it comes to more than C F. Since b starts after a by the way down, x <= period - O(a) - way down -
    way up - y.
    The same on one worker alone: its I's after t follow each other, so they take y - u + I(b) at most.
    """
    u = a.I + a.W
    turn = b.turn
    work = b.F + b.I + b.W
    # The latest y, and every y at which the next I's of all peers of a are about to come in.
    latest = turn + u - b.F
    jumps = {j * u - b.I for j in (1, latest // u if u else 1, (latest + b.I) // u if u else 1)}
    best = 0
    for y in {latest, *jumps}:
        if not 0 <= y <= latest:
            continue
        full, rest = divmod(y, u) if u else (b.total, 0)
        # This many groups still run, the i-th of them for I(b) + rest - i u.
        running = (b.I + rest) // u if u else 0
        part = running * (b.I + rest) - u * running * (running + 1) // 2
        for peers, count in b.groups:
            held = count if b.C is None else min(count, b.C * peers)
            supply = min(count * b.I, a.living * (full * b.I + part), peers * max(0, y - u + b.I))
            needed = -(-(count * work - held * b.W - supply) // peers)
            if b.C is not None and needed > b.C * b.F:
                needed += max(0, turn - b.C * b.F)
            best = max(best, a.O + way + b.I - a.I + y + max(0, needed))
    return best


def _barrier(problem: Problem, stages: list[_StageBound]) -> list[Bound]:
    """For each stage: the way down to it (head), its own least time, and the way up (tail).

    The period is the makespan and the longest O. The makespan counts from the first op, and the
    first F of stage s follows F's and transfers of all stages above. After the last I of s its
    micro-batch passes I on each stage above, and each of those ends with W.
    """
    longest = max(x.O for x in stages)
    up = accumulate(problem.job.backward_transfer_ticks, initial=0)
    backs = [f + t for f, t in zip(accumulate((x.I for x in stages[:-1]), initial=0), up, strict=True)]
    bounds: list[Bound] = []
    best_above: int | None = None  # max over a of W(a) - backs[a]
    for s, x in enumerate(stages):
        tail = x.W if best_above is None else max(x.W, backs[s] + best_above)
        own = max(x.span, x.last_input_backward + tail, x.returns + tail)
        bounds.append(Bound(problem.heads[s] + own + longest, f"stage {s} has {x.n} micro-batches per worker to run"))
        above = x.W - backs[s]
        best_above = above if best_above is None else max(best_above, above)
    return bounds
