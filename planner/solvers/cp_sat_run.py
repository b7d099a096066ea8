"""Runs a CP-SAT model so that it can be watched and stopped from the calling thread."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from openrecycle.planner.solvers.base import Cancelled

_log = logging.getLogger(__name__)

# Seconds between two looks at `cancelled` while the solver has nothing to say.
POLL = 0.05

Watcher = Callable[[int | None, int], None]
"""Called in the calling thread with (objective of the incumbent, bound), each time one improves."""


@dataclass(frozen=True)
class CpSatOutcome:
    """status: CP-SAT's. objective: None without a solution. bound: of the objective, rounded up.

    cancelled: whether the caller ended it. solver: to read values from; only where `solved`.
    """

    status: cp_model.CpSolverStatus
    objective: int | None
    bound: int
    solver: cp_model.CpSolver
    cancelled: bool

    @property
    def solved(self) -> bool:
        return self.objective is not None

    @property
    def infeasible(self) -> bool:
        return bool(self.status == cp_model.INFEASIBLE)

    @property
    def proven(self) -> bool:
        """Optimal, or proven to have no solution."""
        return self.status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)


class _Incumbents(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    def __init__(self, events: queue.SimpleQueue[tuple[float | None, float] | None]) -> None:
        super().__init__()
        self._events = events

    def on_solution_callback(self) -> None:
        self._events.put((self.objective_value, self.best_objective_bound))


def run(
    model: cp_model.CpModel,
    *,
    time_limit: float,
    workers: int,
    seed: int,
    watch: Watcher | None = None,
    cancelled: Cancelled | None = None,
) -> CpSatOutcome:
    """Minimizes `model` for at most `time_limit` seconds.

    The search runs in a thread of its own: CP-SAT holds neither the GIL nor the calling thread, so
    `cancelled` is polled, and Ctrl-C answered, while it works. Raises ValueError for a model that
    CP-SAT calls invalid, which is a mistake of ours.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.catch_sigint_signal = False
    events: queue.SimpleQueue[tuple[float | None, float] | None] = queue.SimpleQueue()
    solver.best_bound_callback = lambda bound: events.put((None, bound))
    status = cp_model.UNKNOWN
    proven = -math.inf
    stopped = False

    def work() -> None:
        nonlocal status, proven
        try:
            status = solver.solve(model, _Incumbents(events))
            proven = solver.best_objective_bound
        except Exception:
            # CP-SAT 9.15 now and then throws from within. What the caller has is still good.
            _log.warning("CP-SAT broke off its search", exc_info=True)
        finally:
            events.put(None)

    thread = threading.Thread(target=work, name="cp-sat", daemon=True)
    thread.start()
    deadline = time.monotonic() + time_limit
    try:
        best: float | None = None
        while True:
            try:
                event = events.get(timeout=POLL)
            except queue.Empty:
                event = (None, -math.inf)
            if event is None:
                break
            objective, bound = event
            if objective is not None:
                best = objective
            if watch and bound > -math.inf:
                watch(None if best is None else round(best), _whole(bound))
            stopped = stopped or bool(cancelled and cancelled())
            # CP-SAT looks at its own limit too seldom while it presolves.
            if stopped or time.monotonic() > deadline:
                solver.stop_search()
    finally:
        while thread.is_alive():  # a stop before the search has begun is not heeded
            solver.stop_search()
            thread.join(POLL)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT refuses the model: {model.validate()}")
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    objective_value = round(solver.objective_value) if found else None
    return CpSatOutcome(status, objective_value, 0 if math.isinf(proven) else _whole(proven), solver, stopped)


def _whole(bound: float) -> int:
    """A bound of a whole objective, rounded up but for the noise of floating point."""
    return math.ceil(bound - 1e-6)
