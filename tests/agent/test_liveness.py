"""Evidence of life, with clocks that a test sets: nothing healthy is held for dead, and what hangs is noticed."""

from __future__ import annotations

import itertools
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.config.options import TIMES_LONGEST, Timeouts, TrainingOptions
from openrecycle.agent.launcher.processes import WorkerProcess
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.monitoring.heartbeat import Status
from openrecycle.agent.monitoring.liveness import (
    AT_REST,
    DATA,
    LONGEST_SAID,
    VALIDATION,
    WAITING,
    LoopLag,
    OpProgress,
    Silences,
    activity,
    describe_exception,
)
from openrecycle.agent.nodes.pool import RemoteProcess
from openrecycle.agent.workers.spec import RunSpec, WorkerSpec, encode_spec
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.jobs.job import Worker as Cell
from tests.agent.node_leads import GivenProcesses, node_with
from tests.golden import golden

LIMITS = Timeouts()
PAUSE, TURN = LIMITS.pause, 0.25


class World:
    """A judge and its workers, who beat every second; any of them may be suspended."""

    def __init__(self, workers: int = 12) -> None:
        self.now = 1000.0
        self.turns = LoopLag(lambda: self.now)
        self.silences = Silences(PAUSE, self.now)
        self.heard = dict.fromkeys(range(workers), self.now)
        self.waits = dict.fromkeys(range(workers), False)
        self.suspended: set[int] = set()
        self.dead: set[int] = set()

    def pass_(self, seconds: float, *, judge: bool = True) -> None:
        """judge: it runs, too."""
        for _ in range(round(seconds / TURN)):
            self.now += TURN
            if self.now % 1.0 == 0:
                for worker in self.heard.keys() - self.suspended - self.dead:
                    self.waits[worker] = True
            if judge:
                self._turn()

    def _turn(self) -> None:
        for worker, waits in self.waits.items():
            if waits:  # what was said comes with the time at which it is heard
                self.heard[worker], self.waits[worker] = self.now, False
        living = self.heard.keys() - self.dead
        if self.silences.turn(self.now, self.turns.late(TURN), [self.heard[w] for w in living]):
            self.dead |= {w for w in living if self.silences.of(self.heard[w], self.now) > LIMITS.silence}


@pytest.mark.parametrize("seconds", [5, 25, 120, 7200])
def test_a_group_that_is_suspended_costs_nobody(seconds: int) -> None:
    world = World()
    world.pass_(10)
    world.suspended = set(range(12))
    world.pass_(seconds, judge=False)
    world.suspended = set()
    world.pass_(60)
    assert not world.dead


@pytest.mark.parametrize("seconds", [25, 120])
def test_a_judge_that_stood_still_blames_nobody(seconds: int) -> None:
    """Its workers went on; the first look finds nothing heard for long, if it comes before what waits is heard."""
    world = World()
    world.pass_(10)
    world.pass_(seconds, judge=False)
    heard = dict(world.heard)
    assert not world.silences.turn(world.now, world.turns.late(TURN), heard.values())
    assert max(world.silences.of(at, world.now) for at in heard.values()) == 0
    world.pass_(60)
    assert not world.dead


@pytest.mark.parametrize("judge", [True, False], ids=["the judge runs", "the judge, too"])
@pytest.mark.parametrize("seed", range(5))
def test_those_who_are_woken_in_any_order_are_all_waited_for(seed: int, judge: bool) -> None:
    world, dice = World(), random.Random(seed)
    world.pass_(10)
    world.suspended = set(range(12))
    world.pass_(dice.choice([8, 30, 120]), judge=judge)
    order = list(range(12))
    dice.shuffle(order)
    for worker in order:
        world.suspended.discard(worker)
        world.pass_(dice.uniform(0, 1.5))
    world.pass_(60)
    assert not world.dead


def test_whoever_is_silent_alone_is_out_in_time() -> None:
    world = World()
    world.pass_(10)
    world.suspended = {7}
    world.pass_(LIMITS.silence - 1)
    assert not world.dead
    world.pass_(3)
    assert world.dead == {7}
    world.pass_(60)
    assert world.dead == {7}


def test_whoever_stays_silent_after_all_were_suspended_is_out_too() -> None:
    world = World()
    world.suspended = set(range(12))
    world.pass_(60)
    assert not world.dead and world.silences.nobody_heard > 50
    world.suspended = {3}
    world.pass_(LIMITS.silence + 3)
    assert world.dead == {3} and world.silences.nobody_heard == 0


def test_short_stalls_do_not_hide_a_death() -> None:
    """On a busy machine each turn is late; the silence is counted all the same."""
    world = World()
    world.suspended = {0}
    for _ in range(20):
        world.pass_(1, judge=False)
        world.pass_(0.5)
    assert world.dead == {0}


def test_time_in_which_the_machine_sleeps_is_seen() -> None:
    """The monotonic clock does not count it, the boot clock does."""
    now = [0.0]
    turns = LoopLag(lambda: now[0])
    now[0] += TURN
    assert turns.late(TURN) == 0
    now[0] += 300 + TURN
    assert turns.late(TURN) == pytest.approx(300)
    assert turns.late(TURN) == 0


# -- progress ------------------------------------------------------------------------------------


class Worker:
    """Runs ops, and beats once a second, unless it is suspended."""

    def __init__(self, timeouts: Timeouts = LIMITS) -> None:
        self.now = 0.0
        self.progress = OpProgress(timeouts, lambda: self.now)
        self.turns = LoopLag(lambda: self.now)
        self.beaten = 0.0

    def beat(self) -> None:
        self.current = self.progress.beat(self.turns.late(1.0))
        self.beaten = self.now

    def spend(self, seconds: float, *, suspended: bool = False) -> None:
        until = self.now + seconds
        while not suspended and self.beaten + 1.0 <= until:
            self.now = self.beaten + 1.0
            self.beat()
        self.now = until

    def op(self, kind: str, seconds: float, *, suspended: bool = False) -> None:
        self.progress.at(kind, (0, 1))
        self.spend(seconds, suspended=suspended)
        self.progress.at(AT_REST)

    def iteration(self, seconds: float = 0.04) -> None:
        for kind in (DATA, "F", "I", "W", "O"):
            self.op(kind, seconds)
        self.progress.warmed_up()


def trained(op: float = 0.04) -> Worker:
    worker = Worker()
    for _ in range(12):
        worker.iteration(op)
    worker.spend(1.0)
    return worker


@pytest.mark.parametrize("kind", ["F", "I", "W", "O", DATA])
def test_a_hang_is_seen_by_the_worker_s_own_times(kind: str) -> None:
    worker = trained()
    worker.progress.at(kind, (1, 2))
    worker.spend(9)
    assert not worker.current.overdue
    worker.spend(3)
    assert worker.current.overdue and (worker.current.pipeline, worker.current.micro_batch) == (1, 2)
    assert worker.current.limit == LIMITS.op == 10


def test_long_ops_have_long_limits() -> None:
    worker = trained(3.0)
    assert worker.progress.limit("F") == pytest.approx(TIMES_LONGEST * 3.0)


def test_to_put_a_step_right_may_take_as_long_as_a_step() -> None:
    worker = Worker()
    for _ in range(3):
        worker.op(VALIDATION, 0.001)
        worker.op("O", 8.0)
        worker.iteration()
    worker.spend(1.0)
    assert worker.progress.limit(VALIDATION) == worker.progress.limit("O") == TIMES_LONGEST * 8.0
    worker.progress.at(VALIDATION)
    worker.spend(30.0)
    assert not worker.current.overdue
    worker.spend(140.0)
    assert worker.current.overdue


def test_what_was_never_measured_may_be_compiled_first() -> None:
    worker = Worker()
    worker.progress.at("F", (0, 0))
    worker.spend(300)
    assert not worker.current.overdue
    worker.spend(301)
    assert worker.current.overdue


def test_a_long_first_compilation_makes_no_later_hang_longer() -> None:
    worker = Worker()
    worker.op("F", 60)
    worker.progress.warmed_up()
    for _ in range(3):
        worker.iteration()
    worker.spend(1)
    assert worker.progress.limit("F") == LIMITS.op
    worker.progress.forget()  # it takes another place
    assert worker.progress.limit("F") == LIMITS.first_op


def test_waiting_for_a_peer_is_never_held_against_the_waiter() -> None:
    worker = trained()
    worker.progress.at("O")
    with worker.progress.waiting():
        worker.spend(5000)
        assert worker.current.kind == WAITING and worker.current.limit is None and not worker.current.overdue
    worker.spend(5)
    assert worker.current.kind == "O" and worker.current.seconds < 6
    for kind in (AT_REST, "checkpoint"):
        assert worker.progress.limit(kind) is None


@pytest.mark.parametrize("seconds", [25, 120])
def test_a_suspension_in_an_op_is_neither_a_hang_nor_a_long_op(seconds: int) -> None:
    worker = trained()
    worker.progress.at("F", (0, 0))
    worker.spend(1.5)
    worker.spend(seconds, suspended=True)
    worker.beat()
    assert not worker.current.overdue and worker.current.seconds < 3
    worker.progress.at(AT_REST)
    worker.spend(1)
    assert (worker.progress.limit("F") or 0) < 60
    assert worker.progress.stood_still(150) == pytest.approx(seconds, abs=2)


def test_an_op_that_ends_before_the_thread_that_beats_is_woken_counts_without_the_suspension() -> None:
    worker = trained()
    worker.op("F", 120, suspended=True)
    assert worker.progress.stood_still(150) == pytest.approx(118, abs=2)
    worker.beat()
    assert (worker.progress.limit("F") or 0) < 60


@pytest.mark.parametrize(
    "wrong", [{"silence": 0.0}, {"silence": 3.0}, {"op": -1.0}, {"first_op": 5.0}, {"start": float("nan")}, {"op": 1e6}]
)
def test_limits_that_make_no_sense_are_refused_by_their_option(wrong: dict[str, float]) -> None:
    from openrecycle.planner.jobs.errors import InputError

    with pytest.raises(InputError) as error:
        Timeouts(**wrong)
    assert error.value.field == f"faults.timeouts.{next(iter(wrong))}"


def test_what_a_worker_is_at_travels_with_its_heartbeat() -> None:
    worker = trained()
    worker.progress.at("F", (1, 3))
    worker.spend(2)
    told = Status(progress=worker.progress).take()["doing"]
    assert told == {"kind": "F", "pipeline": 1, "micro_batch": 3, "limit": LIMITS.op, "seconds": pytest.approx(2)}
    worker.progress.at(AT_REST)
    assert Status(progress=worker.progress).take()["doing"] is None


# -- what the system says ------------------------------------------------------------------------


class Speechless(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_whatever_an_exception_says_is_a_line() -> None:
    assert describe_exception(ValueError("bad")) == "ValueError: bad"
    assert describe_exception(StopIteration()) == "StopIteration"
    assert describe_exception(Speechless()) == golden("speechless-what-it-says-could")
    long, noted = ValueError("x" * 1_000_000), ValueError("bad")
    noted.add_note("y" * 1_000_000)
    assert describe_exception(long) == "ValueError: " + "x" * LONGEST_SAID + "…"
    assert describe_exception(noted).startswith("ValueError: bad (yyy") and len(describe_exception(noted)) < 1000
    noted.__notes__ = None  # type: ignore[assignment]
    assert "\n" not in describe_exception(noted)


def test_an_exception_came_about_where_the_user_s_code_was_last() -> None:
    with pytest.raises(InputError) as caught:
        Job.uniform(0, 1, 1)
    place = describe_exception(caught.value).rpartition(", at ")[2]
    assert place.startswith(__file__) and place.endswith(sys._getframe().f_code.co_name)
    with pytest.raises(ValueError) as unread:
        json.loads("{")
    assert f", at {__file__}" in describe_exception(unread.value)
    users: dict[str, Any] = {"__name__": "queue"}  # as one of Python's
    exec(compile("def fail(): raise ValueError('bad')", "/home/ada/queue.py", "exec"), users)
    with pytest.raises(ValueError, match="bad") as raised:
        users["fail"]()
    assert describe_exception(raised.value) == "ValueError: bad, at /home/ada/queue.py:1 in fail"


def test_the_place_is_in_the_own_code_rather_than_in_a_package_that_it_calls(tmp_path: Path) -> None:
    """A layer that calls a package's attention with unfit data is what its author can mend."""
    package = tmp_path / "site-packages" / "attention.py"
    package.parent.mkdir()
    package.write_text("def attend():\n    raise ValueError('heads')\n")
    attend = runpy.run_path(str(package), run_name="attention")["attend"]
    with pytest.raises(ValueError) as called:
        attend_here(attend)
    assert f", at {__file__}" in describe_exception(called.value)
    alone = called.value.with_traceback(called.tb.tb_next.tb_next)
    assert f", at {package}:2 in attend" in describe_exception(alone)


def test_a_folder_of_one_s_own_may_be_named_like_those_of_packages(tmp_path: Path) -> None:
    own, package = tmp_path / "my-packages" / "model.py", tmp_path / "site-packages" / "attention.py"
    for path in (own, package):
        path.parent.mkdir()
    own.write_text("def forward(attend):\n    attend()\n")
    package.write_text("def attend():\n    raise ValueError\n")
    forward, attend = (runpy.run_path(str(p), run_name=p.stem)[f] for p, f in ((own, "forward"), (package, "attend")))
    with pytest.raises(ValueError) as raised:
        forward(attend)
    assert f", at {own}:2 in forward" in describe_exception(raised.value)


def attend_here(attend: Callable[[], None]) -> None:
    attend()


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_process_that_computes_sleeps_or_is_stopped_is_told_apart() -> None:
    def until(good: object, pid: int) -> bool:
        before = activity(pid)
        for _ in itertools.repeat(None, 400):
            time.sleep(0.02)
            after = activity(pid)
            assert after is not None
            if good(after, before):  # type: ignore[operator]
                return True
        return False

    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    try:
        assert until(lambda after, before: after.ticks > before.ticks and after.lives_since(before), busy.pid)
        assert idle.stdout is not None and idle.stdout.readline()
        assert until(lambda after, before: after.state == "S", idle.pid)
        before, after = activity(idle.pid), activity(idle.pid)
        assert before is not None and after is not None and not after.lives_since(before)
        os.kill(busy.pid, signal.SIGSTOP)
        assert until(lambda after, before: after.stopped and not after.lives_since(after), busy.pid)
    finally:
        for process in (busy, idle):
            process.kill()
            process.communicate()
    assert activity(busy.pid) is None


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_node_s_launcher_vouches_for_a_worker_that_computes_and_for_no_other() -> None:
    """The lead can't look at processes of another host."""
    busy, idle = "while True: pass", "import time; print(flush=True); time.sleep(600)"
    programs = {"idle": idle, "speaks": busy, "busy": busy}
    processes = {n: subprocess.Popen([sys.executable, "-c", text], stdout=-1) for n, text in programs.items()}
    entries, pipes = [], [Pipe() for _ in programs]
    try:
        out = processes["idle"].stdout
        assert out is not None and out.readline()
        for (name, process), (ours, _) in zip(processes.items(), pipes, strict=True):
            here = RemoteProcess(process.kill)
            here.pid = process.pid
            heard_at = float("inf" if name == "speaks" else "-inf")  # who speaks needs nobody to speak for it
            entries.append(WorkerProcess(Cell(0, 0), name, here, ours, heard_at=heard_at))
        run = RunSpec(TrainingOptions(job=Job.uniform(3, 1, 1)), NamedWorkload("a:b"))
        with node_with(GivenProcesses(entries)) as lead:
            assert lead.frames is not None
            for name in programs:
                spec = encode_spec(WorkerSpec(Cell(0, 0), name, run))
                lead.frames.send({"kind": "start", "spec": spec, "fill": []})
            said = [lead.frames.receive() for _ in range(3)]
        assert {(about["incarnation"], about["message"]["kind"]) for about in said} == {("busy", "computes")}
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_rank_that_is_stopped_is_excused_by_no_other() -> None:
    """One that computes and can't speak is, also where it is not the one that speaks for its worker."""
    programs = ("import time; print(flush=True); time.sleep(600)", "print(flush=True)\nwhile True: pass")
    waits, computes = (subprocess.Popen([sys.executable, "-c", text], stdout=-1) for text in programs)
    try:
        for process in (waits, computes):
            assert process.stdout is not None and process.stdout.readline()
        pipe, _ = Pipe()
        entry = WorkerProcess(Cell(0, 0), "a", waits, pipe, 0.0, siblings=(computes,))  # type: ignore[arg-type]
        entry.look(1.0)
        assert (entry.lived_at, entry.stopped) == (1.0, False)
        os.kill(waits.pid, signal.SIGSTOP)
        os.waitpid(waits.pid, os.WUNTRACED)
        entry.look(2.0)
        assert (entry.lived_at, entry.stopped) == (1.0, True)
    finally:
        for process in (waits, computes):
            process.kill()
            process.communicate()
