from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given

from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.baseline import one_forward_one_backward, reference_schedule
from openrecycle.planner.plans.bounds import best_bound, period_bound
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from tests.conftest import examples
from tests.planner.problems import problems


def worked(technique: str, memory: str, *failed: Worker) -> Problem:
    return Problem(Job.uniform(3, 4, 6), frozenset(failed), Technique(technique), MemoryLimit(memory))


@pytest.mark.parametrize(
    ("technique", "memory", "failed", "bound"),
    [
        ("fault-free", "1f1b", False, 27),
        ("adaptive", "1f1b", True, 36),
        ("adaptive", "3", True, 34),
        ("adaptive", "4", True, 33),
        ("adaptive", "none", True, 33),
        ("decoupled", "none", True, 29),
        ("staggered", "none", True, 27),
        ("staggered", "uniform", True, 29),
        ("staggered", "1f1b", True, 32),
        ("staggered", "5", True, 28),
        ("staggered", "uniform", False, 21),
        ("staggered", "none", False, 19),
    ],
)
def test_bounds_of_the_worked_example_are_its_known_optima(
    technique: str, memory: str, failed: bool, bound: int
) -> None:
    assert period_bound(worked(technique, memory, *([Worker(1, 2)] if failed else []))) == bound


def test_the_reason_names_the_stage() -> None:
    assert "stage 2" in best_bound(worked("staggered", "none", Worker(1, 2))).reason


@examples(150)
@given(problems())
def test_no_schedule_of_the_list_scheduler_beats_the_bound(problem: Problem) -> None:
    assert ListScheduler().solve(problem).schedule.period >= period_bound(problem)


@examples(60)
@given(problems(techniques=[Technique.FAULT_FREE], memories=["none"]))
def test_no_reference_schedule_beats_the_bound(problem: Problem) -> None:
    bound = period_bound(problem)
    assert one_forward_one_backward(problem).period >= bound
    assert reference_schedule(problem, "gpipe").period >= bound


@pytest.mark.parametrize("memory", [1, 2, 3])
@pytest.mark.parametrize(
    "times", [(1, 1, 1, 0), (1, 2, 1, 1), (2, 1, 0, 1), (1, 0, 2, 0), (3, 1, 2, 2)], ids=lambda t: "-".join(map(str, t))
)
@pytest.mark.parametrize("technique", [Technique.DECOUPLED, Technique.STAGGERED])
def test_the_bound_holds_against_every_order_of_a_tiny_grid(
    technique: Technique, times: tuple[int, ...], memory: int
) -> None:
    """1 pipeline x 2 stages x 2-3 micro-batches: every order of ops per worker, one by one."""
    f, i, w, o = times
    for micro_batches in (2, 3) if memory < 3 else (3,):
        job = Job.uniform(1, 2, micro_batches, durations={"F": f, "I": i, "W": w, "O": o})
        bound = period_bound(Problem(job, technique=technique, memory=MemoryLimit(str(memory))))
        best = best_period(micro_batches, times, memory, technique)
        assert bound <= best
        assert (
            best
            <= ListScheduler().solve(Problem(job, technique=technique, memory=MemoryLimit(str(memory)))).schedule.period
        )


def worker_orders(micro_batches: int, memory: int) -> list[tuple[str, ...]]:
    """Orders of F, I, W of one worker in which each kind goes by index and memory suffices."""
    found = []

    def extend(order: list[str], f: int, i: int, w: int) -> None:
        if w == micro_batches:
            found.append(tuple(order))
            return
        if f < micro_batches and f - w < memory:
            extend([*order, "F"], f + 1, i, w)
        if i < f:
            extend([*order, "I"], f, i + 1, w)
        if w < i:
            extend([*order, "W"], f, i, w + 1)

    extend([], 0, 0, 0)
    return found


def best_period(micro_batches: int, times: tuple[int, ...], memory: int, technique: Technique) -> int:
    """Brute force. Micro-batches are alike, so F's go by index; I's of stage 1 in any order."""
    f, i, w, o = times
    orders = worker_orders(micro_batches, memory)
    best = 10**9
    for first, second in product(orders, orders):
        for backward in permutations(range(micro_batches)):
            ends = timed(first, second, backward, (f, i, w))
            if ends is None:
                continue
            (start0, end0), (start1, end1) = ends
            if technique is Technique.STAGGERED:
                best = min(best, max(end0 - start0, end1 - start1) + o)
            else:
                best = min(best, max(end0, end1) - min(start0, start1) + o)
    return best


def timed(
    first: tuple[str, ...], second: tuple[str, ...], backward: tuple[int, ...], lengths: tuple[int, int, int]
) -> list[tuple[int, int]] | None:
    """Earliest times of two workers' orders, stage 1's as late as its ends allow; None: deadlock."""
    f, i, w = lengths
    n = len(backward)
    f0, f1, i1 = [-1] * n, [-1] * n, [-1] * n
    orders = (first, second)
    at, free, count = [0, 0], [0, 0], [dict.fromkeys("FIW", 0) for _ in range(2)]
    rows: list[list[tuple[str, int, int]]] = [[], []]
    moved = True
    while moved:
        moved = False
        for s in (0, 1):
            while at[s] < len(orders[s]):
                kind = orders[s][at[s]]
                k = count[s][kind]
                m = k if kind == "F" else backward[k]
                ready = {
                    (0, "F"): 0,
                    (1, "F"): f0[m],
                    (1, "I"): f1[m],
                    (0, "I"): i1[m] if f0[m] >= 0 else -1,
                }.get((s, kind), 0)
                if ready < 0:
                    break
                start = max(ready, free[s])
                end = start + {"F": f, "I": i, "W": w}[kind]
                if kind == "F":
                    (f0, f1)[s][m] = end
                elif kind == "I" and s == 1:
                    i1[m] = end
                rows[s].append((kind, start, end))
                free[s], moved = end, True
                count[s][kind] += 1
                at[s] += 1
    if at != [len(first), len(second)]:
        return None
    # Stage 1's first F can start as late as the next op of its worker allows; later than that
    # would only shift the whole stage. This is the best a staggered period can make of an order
    # whose ends are earliest: its end stays, its start moves right.
    later = rows[1][1][1] - (rows[1][0][2] - rows[1][0][1]) if len(rows[1]) > 1 else rows[1][0][1]
    return [(rows[0][0][1], free[0]), (max(rows[1][0][1], later), free[1])]
