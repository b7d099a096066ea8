"""Plans that people ask for: real planning processes, their progress, their end."""

from __future__ import annotations

import errno
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from ui_console import console_refuses, until

from openrecycle.app.plans import solving
from openrecycle.app.plans.solving import MigrationsAsked, PlanAsked, Solve, Solves, answer
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.processes import Channel
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.job import Job, LayerProfile
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import refuses
from tests.golden import golden

pytestmark = pytest.mark.processes

SMALL = job_doc(Job.uniform(3, 4, 6))
# Uneven stages, so that the bound is not met and a search goes on for as long as it may.
HARD = job_doc(Job.uniform(6, 6, 12, durations={"F": 1, "I": 1.3, "W": 0.7, "transfer": 0.4}))
LONG = PlanAsked(job=HARD, failed=("W0_1", "W1_4", "W2_4"), memory="7", solver="cp-sat", time_limit=300)


@pytest.fixture
def make() -> Iterator[Callable[..., Solves]]:
    made: list[Solves] = []

    def build(**options: object) -> Solves:
        made.append(Solves(**options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for solves in made:
        solves.close()


def ended(solve: Solve) -> Solve:
    until(lambda: solve.over, "the solve is over")
    return solve


def sleeper(channel: Channel, document: bytes) -> None:
    """A planning process that listens to nobody."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def overtime(channel: Channel, document: bytes) -> None:
    """A search that heeds no time limit, and ends when it is told to."""
    while channel.wanted():
        time.sleep(0.01)
    raise ConsoleError(422, "invalid", "told to end")


def test_a_search_ends_when_its_time_is_over(make: Callable[..., Solves]) -> None:
    asked = PlanAsked(job=SMALL, time_limit=0.5)
    solve = ended(make(work=overtime).start(asked))
    assert solve.error == golden("told-to-end") and not solve.stopped


def test_the_worked_example_of_the_paper_is_proven(make: Callable[..., Solves]) -> None:
    solves = make()
    asked = [
        PlanAsked(job=SMALL, technique=technique, memory=memory, failed=failed)  # type: ignore[arg-type]
        for technique, memory, failed in (
            ("fault-free", "1f1b", ()),
            ("adaptive", "1f1b", ("W1_2",)),
            ("decoupled", "none", ("W1_2",)),
            ("staggered", "none", ("W1_2",)),
        )
    ]
    for solve, period in zip([solves.start(request) for request in asked], (27, 36, 29, 27), strict=True):
        plan = ended(solve).plan
        assert solve.state == "done" and plan is not None and check(plan) == []
        assert plan.metrics.period == plan.metrics.lower_bound == period
        assert solve.points[-1].incumbent == solve.points[-1].bound == period
        assert solves.find(solve.request) is solve


def test_equal_requests_share_one_result(make: Callable[..., Solves]) -> None:
    solves = make()
    first = solves.start(PlanAsked(job=SMALL, failed=("W1_2",)))
    assert solves.start(PlanAsked(job=SMALL, failed=("W1_2",))) is first
    ended(first)
    assert solves.start(PlanAsked(job=SMALL, failed=("W1_2",))) is first
    assert solves.find(PlanAsked(job=SMALL, failed=("W1_1",))) is None, "looking starts nothing"


def test_a_process_that_stands_ready_takes_the_next_request(make: Callable[..., Solves]) -> None:
    solves = make()
    others = set(multiprocessing.active_children())
    solves.warm()
    (ready,) = set(multiprocessing.active_children()) - others
    solve = ended(solves.start(PlanAsked(job=SMALL)))
    assert solve.child is not None and solve.child.process is ready and solve.plan is not None
    # One that has died meanwhile is replaced.
    until(lambda: ready not in multiprocessing.active_children(), "the first is gone")
    others = set(multiprocessing.active_children())
    solves.warm()
    (spare,) = set(multiprocessing.active_children()) - others
    spare.kill()
    spare.join(30)
    assert ended(solves.start(PlanAsked(job=SMALL, failed=("W0_0",)))).plan is not None


def test_stopping_keeps_the_best_plan_so_far(make: Callable[..., Solves]) -> None:
    solves = make()
    solve = solves.start(LONG)
    until(lambda: bool(solve.points), "the first plan is there")
    solves.stop(solve.id)
    assert solve.stopped and solve.state in ("stopping", "done")
    plan = ended(solve).plan
    assert solve.state == "done" and plan is not None and check(plan) == []
    assert plan.metrics.gap > 0 and "stopped" in plan.solver.message
    assert plan.metrics.period <= solve.points[0].incumbent  # type: ignore[operator]
    periods = [p.incumbent for p in solve.points]
    assert periods == sorted(periods, reverse=True), "an incumbent never gets worse"  # type: ignore[type-var]
    again = solves.start(LONG)
    assert again is not solve, "what was stopped may be asked for again"


def test_more_than_can_run_at_once_wait_their_turn(make: Callable[..., Solves]) -> None:
    solves = make(running=1, waiting=2)
    running = solves.start(LONG)
    second, third = (solves.start(PlanAsked(job=SMALL, failed=(name,))) for name in ("W0_0", "W0_1"))
    assert [running.state, second.state, third.state] == ["running", "waiting", "waiting"]
    with console_refuses("too_many"):
        solves.start(PlanAsked(job=SMALL))
    solves.stop(second.id)
    assert (second.state, second.error) == ("failed", golden("stopped-before-it-had-begun"))
    solves.stop(running.id)
    assert ended(third).plan is not None and ended(running).plan is not None


def test_a_process_that_dies_or_does_not_stop_is_told_of(make: Callable[..., Solves]) -> None:
    solves = make(work=sleeper, stop_grace=0.1)
    dies, hangs = solves.start(PlanAsked(job=SMALL)), solves.start(PlanAsked(job=SMALL, failed=("W0_0",)))
    assert dies.child is not None and hangs.child is not None
    dies.child.process.kill()
    assert golden("ended-before-it-was-done-exit") in ended(dies).error
    solves.stop(hangs.id)
    assert golden("was-not-done-after") in ended(hangs).error
    # Its own thread waits for it as well, and of two who do one is told nothing: so by its number.
    pid = hangs.child.process.pid
    until(lambda: not Path(f"/proc/{pid}").exists(), "it is gone")


def test_migrations_that_help_are_found(make: Callable[..., Solves]) -> None:
    solves = make()
    solve = ended(solves.start(MigrationsAsked(job=SMALL, failed=("W0_2", "W1_2"), memory="none")))
    found = solve.migrations
    assert found is not None and (found.period_now, found.period) == (54, 27)
    assert [(m.worker, m.takes, m.source) for m in found.migrations] == [("W1_3", "W0_2", "W2_2")]
    assert found.failed == ["W1_2", "W1_3"]
    # A stage without a living peer has no plan; a migration gives it one, from the last checkpoint.
    all_dead = MigrationsAsked(job=SMALL, failed=("W0_2", "W1_2", "W2_2"), memory="none")
    made = answer(all_dead, print, lambda: True)["migrations"]
    assert made["period_now"] is None and made["migrations"][0]["source"] is None


def test_migrations_are_of_the_layers_that_the_plan_has() -> None:
    layered = job_doc(Job.uniform(3, 4, 6, layers=44))
    asked = partial(MigrationsAsked, job=layered, failed=("W0_2", "W1_2"), memory="none")
    plan = PlanAsked(job=layered, failed=("W0_2", "W1_2"), memory="none", solver="list")

    def period(layers: dict[str, object], failed: list[str]) -> float:
        asked = plan.model_copy(update={**layers, "failed": tuple(failed)})
        layout = asked.layout()
        return make_plan(layout.problem if layout else asked.problem(), solver="list", layout=layout).metrics.period

    choices: list[dict[str, object]] = [{"partition": (12, 12, 8, 12)}, {"over": "partitions"}]
    for layers in choices:
        found = answer(asked(**layers), print, lambda: True)["migrations"]
        assert found["period_now"] == period(layers, ["W0_2", "W1_2"]), "it is compared with the plan without them"
        assert found["period"] == period(layers, found["failed"]) < found["period_now"]
    # A pause longer than what is left until the repair is not worth it, whatever becomes of the layers.
    dear = asked(over="partitions", state_bytes=10**9, bandwidth=1e9, heals_in=0.5)
    assert answer(dear, print, lambda: True)["migrations"]["migrations"] == []
    # A stage without a living worker has no plan, and a migration gives it one.
    dead = asked(over="partitions").model_copy(update={"failed": ("W0_2", "W1_2", "W2_2")})
    found = answer(dead, print, lambda: True)["migrations"]
    assert found["period_now"] is None and found["migrations"][0]["source"] is None


def test_copies_cost_what_the_profile_or_the_request_says() -> None:
    heavy = SMALL.model_copy(
        update={"profiles": tuple(p.model_copy(update={"weight_bytes": 4 * 10**9}) for p in SMALL.profiles)}
    )
    asked = MigrationsAsked(job=heavy, failed=("W0_2", "W1_2"), memory="none", bandwidth=1e9, heals_in=1)
    found = answer(asked, print, lambda: True)["migrations"]
    assert golden("leave-the-2-failures-where") in found["reason"]
    free = asked.model_copy(update={"state_bytes": 0})
    assert answer(free, print, lambda: True)["migrations"]["pause"] == 0
    assert answer(free, print, lambda: True)["migrations"]["migrations"]
    asked = MigrationsAsked(job=SMALL, failed=("W0_2", "W1_2"), memory="none", bandwidth=1e9, state_bytes=5 * 10**9)
    assert answer(asked, print, lambda: True)["migrations"]["pause"] == 5.0
    derived: dict[str, object] = {"profiles": (), "transfers": (), "backward_transfers": ()}
    layer = LayerProfile(weight_bytes=10**9)  # the stages' profiles follow from those of layers, and are in no document
    layered = job_doc(Job(3, 4, 6, layers=(layer,) * 8)).model_copy(update=derived)
    asked = MigrationsAsked(job=layered, failed=("W0_2", "W1_2"), memory="none", bandwidth=1e9)
    assert answer(asked, print, lambda: True)["migrations"]["pause"] == 2.0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"solver": "magic"}, InputError, "solver: got 'magic',"),
        ({"memory": "lots"}, InputError, "memory: got 'lots'"),
        ({"failed": ("W9_0",)}, InputError, "failed: got 'W9_0',"),
        ({"failed": ("W0_1", "W1_1", "W2_1")}, InfeasibleError, golden("stage-1-has-no-living-worker-2")),
    ],
)
def test_what_can_not_be_planned_is_said_by_the_child_too(
    make: Callable[..., Solves], changes: dict[str, object], error: type[Exception], words: str
) -> None:
    request = PlanAsked.model_validate({"job": SMALL, **changes})
    with pytest.raises(error, match=words):
        request.problem()
    assert words in ended(make().start(request)).error


def test_absurd_sizes_are_refused_before_memory_is_taken() -> None:
    absurd = SMALL.model_copy(update={"pipelines": 10**6, "micro_batches": 10**6})
    with pytest.raises(InputError, match="at most 400,000 ops here"):
        PlanAsked(job=absurd).check()


@pytest.mark.parametrize("kind", [PlanAsked, MigrationsAsked])
def test_a_page_that_asks_without_a_look_at_the_size_is_refused_by_the_child(
    kind: type[PlanAsked] | type[MigrationsAsked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved plan may be larger, and Planner offers to look for migrations beside it."""
    monkeypatch.setattr(solving, "MAX_SOLVED_OPS", 215)
    asked = kind(job=SMALL, failed=("W1_2",))
    with refuses("pipelines x stages x micro_batches x 3 ops", 216):
        answer(asked, print, lambda: True)


def test_old_results_are_let_go(make: Callable[..., Solves]) -> None:
    solves = make(kept_ops=500)
    made = [ended(solves.start(PlanAsked(job=SMALL, failed=(f"W{p}_0",), solver="list"))) for p in range(3)]
    assert solves.all() == made[1:], "216 ops each"
    with console_refuses("unknown_solve"):
        solves.get(made[0].id)


class NotToBeHad:
    """Work for which there is no process at first."""

    def __init__(self) -> None:
        self.none = True

    def __call__(self, channel: Channel, request: object) -> None:
        raise ConsoleError(422, "invalid", "was asked")

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if self.none:  # as it is sent to the process that is to begin
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return NotToBeHad, ()


def test_where_no_process_is_to_be_had_it_has_failed_and_can_be_asked_for_again(make: Callable[..., Solves]) -> None:
    work = NotToBeHad()
    solves = make(work=work, running=1)
    for _ in range(2):
        solve = solves.start(PlanAsked(job=SMALL))
        assert solve.state == "failed" and "temporarily unavailable" in solve.error
    work.none = False
    solve = ended(solves.start(PlanAsked(job=SMALL)))
    assert solve.error == "was asked"
