"""What a launcher and a worker's process keep of each other, and how long a launcher waits for processes that don't
end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from openrecycle.agent.launcher import processes
from openrecycle.agent.launcher.processes import LOOK_SECONDS, UNKNOWN, WorkerProcess
from openrecycle.agent.messages import channel
from openrecycle.agent.messages.channel import KEPT_PLANS, WorkerChannel
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.agent.nodes.frames import MAX_MESSAGE_BYTES
from openrecycle.forking import fork_context
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans import packed
from openrecycle.planner.plans.packed import to_text
from openrecycle.planner.plans.plan import Plan
from tests.agent.consoles import until
from tests.agent.local_jobs import LocalJob
from tests.golden import golden

CELL = Worker(0, 0)


class Ended:
    """A process that has; `Lasting`: that never does, and keeps whoever waits for it waiting."""

    pid, exitcode, sentinel, ends = None, 0, -1, None

    def is_alive(self) -> bool:
        return False

    def is_ending(self) -> bool:
        return True

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


class Lasting(Ended):
    """until: it is asked so often; None: for ever."""

    exitcode: Any = None

    def __init__(self, until: int | None = None) -> None:
        self.until, self.asked = until, 0

    def is_ending(self) -> bool:
        self.asked += 1
        return self.until is not None and self.asked > self.until

    def join(self, timeout: float | None = None) -> None:
        raise AssertionError("nobody waits for it")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as launchers see it."""
    now = [100.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("silent", [False, True], ids=["died", "silent"])
def test_a_launcher_never_waits_for_ranks_that_do_not_end(silent: bool, now: list[float]) -> None:
    """It asks, and goes on with all others meanwhile; they are given the same time, all together."""
    seconds = (processes.JOIN_SECONDS if silent else processes.LATE_SECONDS) + processes.LAST_SECONDS
    ranks, pipe, began = tuple(Lasting() for _ in range(4)), cast(Any, None), now[0]
    entry = WorkerProcess(CELL, "a", Ended(), pipe, 0.0, siblings=ranks, asked=silent)
    while not entry.has_ended([Ended.sentinel] if entry.ended_at is None else []):
        assert entry.looked_for and entry.sentinels == [rank.sentinel for rank in ranks]
        assert now[0] <= began + seconds + 2 * LOOK_SECONDS
        now[0] += LOOK_SECONDS
    assert now[0] >= began + seconds and entry.ended_at == began


def test_a_worker_has_ended_as_soon_as_its_ranks_have(now: list[float]) -> None:
    pipe: Any = None
    entry = WorkerProcess(CELL, "a", Ended(), pipe, 0.0, siblings=(Lasting(1), Ended()))
    assert not entry.has_ended([]) and entry.ended_at is None, "nothing says so of its rank 0"
    assert not entry.has_ended([Ended.sentinel]) and entry.ended_at == now[0]
    assert entry.has_ended([])


class Slow(Connection):
    """Whoever is to write to its number has it, and does nothing with it until it is `free`."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self.asked, self.free = threading.Event(), threading.Event()

    def _send(self, data: Any, write: Any = os.write) -> None:
        def late(number: int, part: Any) -> int:
            self.asked.set()
            self.free.wait(20)
            return int(write(number, part))

        super()._send(data, late)  # type: ignore[misc]


def test_what_a_worker_that_has_ended_was_to_be_told_goes_nowhere_else(tmp_path: Path) -> None:
    """A file that was opened since, a checkpoint say, has the number of its pipe if that is free."""
    ours, theirs = socket.socketpair()
    slow = Slow(ours.detach())
    entry = WorkerProcess(CELL, "a", Ended(), slow, 0.0)
    entry.open_outbox("to-a")
    entry.post("deployment")
    assert slow.asked.wait(10)
    number = slow.fileno()
    entry.close()
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context((tmp_path / str(count)).open("wb", buffering=0)) for count in range(8)]
        assert number not in [file.fileno() for file in opened]
        slow.free.set()
        until(lambda: slow.closed, "the thread to close it", 10)
    theirs.close()


class Exits(Ended):
    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode  # type: ignore[assignment]

    def is_ending(self) -> bool:
        return self.exitcode is not None


def test_a_worker_has_ended_as_the_rank_did_that_ended_by_itself() -> None:
    """Not as those that ended since it had, or were told to."""
    pipe: Any = None
    for others in (channel.FENCED, channel.ORPHANED):
        entry = WorkerProcess(CELL, "a", Exits(others), pipe, 0.0, siblings=(Exits(-signal.SIGKILL),))
        assert entry.first_end == (1, -signal.SIGKILL)
        assert entry.spare_ranks == (0,)


def test_how_a_worker_ended_is_not_known_once_its_fork_server_is_gone() -> None:
    pipe: Any = None
    ended, unknown = (WorkerProcess(CELL, "a", Exits(code), pipe, 0.0) for code in (1, UNKNOWN))
    assert ended.not_as_wished and not unknown.not_as_wished
    assert unknown.ending == golden("also-said-if-nobody-saw-its")


class Late(Exits):
    """Ends once it is killed; held: not even then, as one that its driver holds."""

    def __init__(self, *, held: bool) -> None:
        super().__init__(None)
        self.held = held
        self.pid = os.getpid()  # type: ignore[assignment]

    def is_alive(self) -> bool:
        return self.exitcode is None


@pytest.mark.parametrize(
    ("silent", "held", "spare"),
    [(False, False, (0, 1)), (False, True, (0,)), (True, False, (0,))],
    ids=["late", "held", "silent"],
)
def test_a_rank_that_is_late_is_not_the_one_that_has_ended(
    silent: bool, held: bool, spare: tuple[int, ...], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed, since its worker has not ended before; and of a worker that was silent it was the one that hangs.
    Where even that does not end it, nobody may begin in its place."""
    pipe: Any = None
    late = Late(held=held)

    def kill(_pid: int, number: int) -> None:
        late.exitcode = None if held else -number  # type: ignore[assignment]

    monkeypatch.setattr(processes.os, "kill", kill)
    ranks = (late, Exits(1))
    entry = WorkerProcess(CELL, "a", Exits(channel.ORPHANED), pipe, 0.0, siblings=ranks, asked=silent)
    while not entry.has_ended([Ended.sentinel]):
        now[0] += LOOK_SECONDS
    assert entry.first_end == (2, 1) and entry.spare_ranks == spare


@pytest.mark.parametrize("asked", [True, False], ids=["silent", "gave up"])
def test_a_rank_is_not_late_before_it_can_have_heard_of_the_end_of_rank_0(asked: bool, now: list[float]) -> None:
    """Which ends for seconds where it has much memory, and only then closes what the others hear it by. Nobody is known
    to have died by itself: whoever did not end in time would be the one that hangs."""
    pipe: Any = None
    code = -signal.SIGKILL if asked else channel.GAVE_UP
    well, hangs, began = Exits(None), Exits(None), now[0]
    entry = WorkerProcess(CELL, "a", Exits(code), pipe, 0.0, siblings=(well, hangs), asked=asked, ends=True)
    for _ in range(9):
        assert not entry.has_ended([])
        now[0] += processes.JOIN_SECONDS / 2
    assert entry.ended_at == began and Ended.sentinel in entry.sentinels
    entry.hung_up = True
    assert not entry.has_ended([])
    well.exitcode = channel.ORPHANED if asked else channel.GAVE_UP  # type: ignore[assignment]
    while not entry.has_ended([]):
        now[0] += LOOK_SECONDS
    assert entry.spare_ranks == ((1,) if asked else (0, 1))


def test_the_other_ranks_are_told_of_a_dead_one_once_its_last_words_have_come(now: list[float]) -> None:
    pipe: Any = None
    dead = Exits(None)
    entry = WorkerProcess(CELL, "a", Exits(None), pipe, 0.0, siblings=(dead,), lingers=True)
    entry.tell_ranks()
    dead.exitcode = 1
    entry.tell_ranks()
    assert entry.outbox.empty()
    now[0] += 1.0
    assert not entry.has_ended([]) and entry.outbox.empty(), "to ask tells nobody"
    entry.tell_ranks()
    assert entry.outbox.get_nowait() == {"kind": "fenced"}
    entry.tell_ranks()
    assert entry.outbox.empty(), "once"


def echo(pipe: Connection) -> None:
    """A worker that says what each of its generations runs."""
    worker, generation = WorkerChannel(pipe, lambda _generation: None, lambda: None), 0
    while (orders := worker.wait_for_generation(generation)) is not None:
        generation = orders.generation
        plans = [plan for plan in (orders.schedule, orders.interim) if plan is not None]
        worker.say("runs", without=[sorted(map(str, plan.problem.failed)) for plan in plans])


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "checkpoint", "at_iteration": 10**9, "problem": None},
        {"kind": "validation", "iteration": "", "coefficient": 1.0, "redone": False},
        {"kind": "committed", "iteration": 1e308, "loss": "0x1p+0"},
        {"kind": "committed", "iteration": 1, "loss": "much"},
        {"kind": "committed", "iteration": 1, "loss": "0x1p+99999"},
        {"kind": "parameters", "iteration": 1, "sha256": 0},
    ],
)
def test_what_would_spoil_what_is_kept_of_a_job_is_not_taken_from_another_node(odd: dict[str, Any]) -> None:
    for said in ({"kind": "log", "lines": [[1.0, "text"]], "skipped": 3}, {"kind": "held", "iteration": -1}):
        assert not channel.misformed(said, 100)
    assert channel.misformed(odd, 100)


def talk(pipe: Connection) -> None:
    """A worker that has too much to say."""
    worker = WorkerChannel(pipe, lambda _generation: None, lambda: None)
    worker.say("fatal", text="x" * MAX_MESSAGE_BYTES)
    try:
        worker.say("committed", skipped="x" * MAX_MESSAGE_BYTES)
    except ValueError as error:
        worker.say("error", text=str(error))
    worker.wait_for_generation(0)


@pytest.mark.processes
def test_what_a_worker_says_fits_into_a_message_of_its_node() -> None:
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=talk, args=(theirs,))
    process.start()
    theirs.close()
    words, refusal = (channel.receive(ours) for _ in range(2))
    assert words["kind"] == "fatal" and f"{MAX_MESSAGE_BYTES:,}" in words["text"] and len(words["text"]) < 20_000
    assert refusal["kind"] == "error" and "committed" in refusal["text"]
    ours.close()
    process.join(20)
    # As a line of the record, in which each quotation mark is two characters, with what is around it.
    assert 4 * channel.LONGEST_MESSAGE < MAX_MESSAGE_BYTES


@pytest.mark.processes
def test_a_worker_has_every_plan_that_it_is_told_of_and_both_keep_the_newest() -> None:
    catalog = Catalog(Job.uniform(2, 3, 4), Technique.STAGGERED, MemoryLimit("uniform"))
    known = [catalog.plan_for(failed)[0] for failed in (set(), *({w} for w in catalog.job.workers()))]
    known += [catalog.plan_for({Worker(0, 0), Worker(1, s)})[0] for s in (1, 2)]
    known += [catalog.plan_for({Worker(0, 1), Worker(1, s)})[0] for s in (0, 2)]
    assert len({plan.fingerprint for plan in known}) > KEPT_PLANS + 2
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=echo, args=(theirs,))
    process.start()
    theirs.close()
    entry, choose, sent = WorkerProcess(CELL, "a", process, ours, 0.0), random.Random(0), 0
    for generation in range(1, 61):
        plan, interim = choose.sample(known, 2)
        named = [plan, interim] if choose.random() < 0.5 else [plan]
        new = entry.lacks(named)
        sent += len(new)
        deployment = Deployment(generation=generation, plan_fingerprint=plan.fingerprint, living=("W0_0",), failed=())
        channel.send(
            ours,
            "deployment",
            deployment=deployment.model_dump(),
            plans={p.fingerprint: to_text(p) for p in new},
            interim=interim.fingerprint if interim in named else None,
            cell="W0_0",
            store=("127.0.0.1", 1),
            after=None,
            restore=None,
            left_out=[],
            runs=[],
            partition=[],
            held=[],
        )
        assert channel.receive(ours)["without"] == [list(p.failed) for p in named]
        assert len(entry.plans) <= KEPT_PLANS
    assert sent < 60, "what it has is not sent again"
    channel.send(ours, "over")
    process.join(10)
    assert process.exitcode == 0


def woken(pipe: Connection) -> None:
    """A worker that says when it is to leave its iteration."""
    worker = WorkerChannel(pipe, lambda generation: worker.say("woken", generation=generation), lambda: None)
    worker.say("ready")
    worker.wait_for_generation(1)


@pytest.mark.processes
def test_who_waits_is_woken_before_the_plan_is_read() -> None:
    """Which takes as long as all else that it is told."""
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=woken, args=(theirs,))
    process.start()
    theirs.close()
    assert channel.receive(ours)["kind"] == "ready"
    deployment = Deployment(generation=1, plan_fingerprint="some", living=("W0_0",), failed=())
    about = {"cell": "W0_0", "store": ("127.0.0.1", 1), "after": None, "restore": None}
    rest = {"interim": None, "left_out": [], "runs": [], "partition": [], "held": []}
    channel.send(ours, "deployment", deployment=deployment.model_dump(), plans={"some": "none"}, **about, **rest)
    assert channel.receive(ours)["generation"] == 1
    assert channel.receive(ours)["kind"] == "error", "it could not be read"
    process.join(10)
    assert process.exitcode == 1


@pytest.mark.processes
def test_a_worker_that_can_not_be_told_something_dies_as_others_do(capfd: pytest.CaptureFixture[str]) -> None:
    """The loop of its launcher still looks at its pipe until its end is seen."""
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=echo, args=(theirs,))
    process.start()
    theirs.close()
    entry = WorkerProcess(CELL, "a", process, ours, 0.0)
    entry.open_outbox("to-a")
    entry.post("deployment", plans={1, 2})
    process.join(20)
    assert process.exitcode == -signal.SIGKILL and not ours.closed
    assert "TypeError" in capfd.readouterr().err
    entry.close()
    until(lambda: ours.closed, "the thread to close it", 10)


@pytest.mark.processes
def test_a_plan_is_written_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    written, pack = Counter[str](), packed.pack

    def counted(plan: Plan) -> bytes:
        written[plan.fingerprint] += 1
        return pack(plan)

    monkeypatch.setattr(packed, "pack", counted)
    job = LocalJob(iterations=4, kills=("W1_0@1:F1",)).run()
    assert job.dead == ["W1_0"] and set(written.values()) == {1}
