"""`--kill`, `--rejoin` and `--slow`: what they mean and what they refuse."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from openrecycle.agent.config.faults import FaultInjector, Kill, Rejoin, Slow, not_done, slowness
from openrecycle.agent.config.options import Faults
from openrecycle.agent.coordination.launcher import Coordination, Deploy, Event
from openrecycle.agent.launcher.launch import Stopped, Takeover
from openrecycle.agent.messages import channel
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.agent.nodes.pool import RemoteProcess
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from tests.agent.local_jobs import LocalJob
from tests.agent.pretended import PretendedWorker, PretendedWorkers, launcher, run
from tests.golden import golden

JOB = Job(3, 4, 6)
W1_0 = Worker(1, 0)


@pytest.mark.parametrize(
    ("text", "kill"),
    [
        ("W1_2@10:F3", Kill(Worker(1, 2), 10, "F", 1, 3)),
        ("W1_2@0:I0", Kill(Worker(1, 2), 0, "I", 1, 0)),
        ("W0_0@2:W5", Kill(Worker(0, 0), 2, "W", 0, 5)),
        ("W0_2@10:F1.3", Kill(Worker(0, 2), 10, "F", 1, 3)),
        ("W2_3@7:R", Kill(Worker(2, 3), 7, "R")),
        ("W2_3@7:O", Kill(Worker(2, 3), 7, "O")),
    ],
)
def test_reads(text: str, kill: Kill) -> None:
    assert Kill.parse(text, JOB) == kill and str(kill) == text


@pytest.mark.parametrize("text", ["", "W1_2", "W1_2@3", "W1_2@3:", "W1_2@3:B3", "W1_2@-1:F3", "W1_2@3:F6", "W9_0@3:F0"])
def test_refuses_with_field_and_value(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Kill.parse(text, JOB)
    assert caught.value.field == "faults.kill" and str(caught.value).startswith("faults.kill: got ")


def test_rejoin() -> None:
    assert Rejoin.parse("W1_2@15", JOB) == Rejoin(Worker(1, 2), 15)
    with pytest.raises(InputError, match="WORKER@ITERATION"):
        Rejoin.parse("W1_2", JOB)


def test_others_are_not_harmed() -> None:
    """Only the named worker dies, and only there: this process is still here afterwards."""
    injector = FaultInjector(Worker(0, 0), [Kill.parse("W1_2@10:F3", JOB)], lambda kill: None)
    for iteration in range(20):
        injector.before(iteration, "F", 1, 3)


def test_a_rank_is_read_and_written() -> None:
    assert str(Kill.parse("W1_2.1@10:F0.3", JOB, ranks=2)) == "W1_2.1@10:F0.3"


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (Kill(Worker(1, 2), 4, "F", 1, 3), "iterations 5 to 9"),
        (Kill(Worker(1, 2), 10, "O"), "iterations 5 to 9"),
        (Kill(Worker(1, 2), 5, "F", 0, 3), "F0.3"),
        (Rejoin(Worker(1, 2), 4), "iterations 5 to 9"),
        (Rejoin(Worker(1, 2), 9), "not gone"),
    ],
)
def test_why_a_wish_was_not_fulfilled(wish: Kill | Rejoin, why: str) -> None:
    said = not_done(wish, 5, 10)
    assert said.startswith(str(wish)) and why in said
    assert "iterations" not in not_done(wish, 10, 10)


@pytest.mark.processes
def test_a_kill_whose_word_may_be_lost_is_not_said_to_be_undone() -> None:
    """W1_0 is killed by somebody else, and it may have come to that point first; W2_0 by an earlier wish."""

    def on_line(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 2:
            job.signal("W1_0", signal.SIGKILL)

    kills, about = ("W1_0@8:F0", "W2_0@1:F0", "W2_0@8:F0"), {"pipelines": 3, "stages": 1, "micro_batches": 2}
    job = LocalJob(**about, iterations=10, kills=kills, on_line=on_line, pace=0.01).run()
    assert job.dead == ["W1_0", "W2_0"]
    said = [line["warning"] for line in job.lines if line.get("warning", "").startswith(kills)]
    assert said == [golden("a-kill-that-is-not-known"), golden("a-kill-that-did-not-happen")]


class _Decides(Coordination):
    """W1_0 is in the first of two generations. takes_over: both have been."""

    def __init__(self, catalog: Catalog, *, takes_over: bool = False) -> None:
        self._events: list[Event] = [] if takes_over else [generation(catalog, 1, W1_0), generation(catalog, 2)]

    def poll(self, now: float) -> list[Event]:
        return [self._events.pop(0)] if self._events else []


def generation(catalog: Catalog, number: int, *others: Worker) -> Deploy:
    plan, _ = catalog.plan_for({W1_0} - {*others})
    living = ("W0_0", *map(str, others))
    about = {"plan_fingerprint": plan.fingerprint, "living": living, "failed": (), "joining": ()}
    return Deploy(Deployment(generation=number, **about), plan)


class WithoutProcesses(PretendedWorkers):
    """Of a job that W1_0 ends in, by end(), when it has begun, and that W0_0 brings to its end. halts: it does not.
    copy: what another launcher would go on from."""

    def __init__(self, end: Callable[[PretendedWorker], object] = lambda entry: None, *, halts: bool = False) -> None:
        super().__init__(PretendedWorker.ready, self._told)
        self._end, self._halts = end, halts
        self.copy: dict[str, Any] = {}
        self.lines: list[dict[str, Any]] = []

    def hand_out(self, run: Any, saved: Callable[[], dict[str, Any] | None], *, last: bool = False) -> str:
        self.copy = saved() or self.copy
        return ""

    def run(self, takeover: Takeover | None = None) -> str:
        """What is said of the wish."""
        decides, wish = partial(_Decides, takes_over=takeover is not None), "W1_0@8:F0"
        about = Job.uniform(2, 1, 2), self, self.lines.append, decides, Faults(kill=(wish,))
        self.launcher = launcher(*about, takeover=takeover)
        run(self.launcher)
        (said,) = [line["warning"] for line in self.lines if line.get("warning", "").startswith(wish)]
        return str(said)

    def _told(self, entry: PretendedWorker, message: dict[str, Any]) -> None:
        if message["kind"] == "over":
            entry.process.kill()
        if message["kind"] != "deployment":
            return
        now = {"generation": message["deployment"]["generation"]}
        if entry.name == "W1_0":
            self._end(entry)
        elif now["generation"] == 2 and self._halts:
            self.launcher.stop(15)
        elif now["generation"] == 2:
            entry.say("formed", iteration=0, **now)
            for iteration in range(10):
                about = {"loss": (0.5).hex(), "skipped": (), "learning_rate": None, "data_seconds": 0.0}
                entry.say("committed", iteration=iteration, **about, **now)
            entry.say("done", sha256="00", **now)


def ends_with(code: int | None) -> Callable[[PretendedWorker], object]:
    return lambda entry: entry.process.ended(code)  # type: ignore[attr-defined]


def ends_after_another_rank(entry: PretendedWorker) -> None:
    other = RemoteProcess(lambda: None)
    other.ended(-signal.SIGKILL)
    entry.siblings = (other,)
    ends_with(1)(entry)


@pytest.mark.parametrize(
    ("end", "known"),
    [
        (ends_with(-signal.SIGABRT), True),
        (ends_with(1), True),
        (ends_with(-signal.SIGKILL), False),
        (ends_with(None), False),
        (ends_with(channel.ORPHANED), False),
        (ends_after_another_rank, False),
        (lambda entry: None, False),
        (lambda entry: entry.say("dying", kill="W1_0@3:F0"), True),
    ],
    ids=[
        *("another signal", "an error", "SIGKILL", "with its node", "without its launcher"),
        *("another rank by SIGKILL", "removed", "an earlier wish"),
    ],
)
def test_what_is_known_of_a_kill_by_how_its_worker_ended(end: Callable[[PretendedWorker], object], known: bool) -> None:
    said = WithoutProcesses(end).run()
    assert (said != golden("a-kill-that-is-not-known")) == known


def test_who_takes_over_knows_no_more_of_a_kill() -> None:
    first, second = WithoutProcesses(ends_with(None), halts=True), WithoutProcesses()
    with pytest.raises(Stopped):
        first.run()
    second.start(Worker(0, 0))
    document = json.loads(json.dumps(first.copy)) | {"workers": []}
    plan = first.launcher.deployed.plan
    said = second.run(Takeover(document, 0, plan, (), {}, 0, (), lambda: False, "node 0, which led, is lost"))
    assert said == golden("a-kill-that-is-not-known")


def test_a_worker_is_slow_by_the_newest_wish() -> None:
    wishes = [Slow.parse(text, JOB) for text in ("W1_2@10:2.5", "W1_2@30:1", "W1_2@20:4", "W0_2@0:3")]
    me = Worker(1, 2)
    assert [slowness(me, i, wishes) for i in (9, 10, 19, 20, 29, 30, 99)] == [1, 2.5, 2.5, 4, 4, 1, 1]
    for text in ("W1_2@10", "W1_2@10:-1", "W1_2@10:0", "W1_2@10:1000", "W1_9@10:2"):
        with pytest.raises(InputError, match=r"^faults.slow: got"):
            Slow.parse(text, JOB)
