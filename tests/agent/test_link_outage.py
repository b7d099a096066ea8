"""A console that was away long hears of a death soon after it is back, before it gives up waiting for the report that
explains a broken connection: then it would have all connect anew, with the dead among them. One that is away when a
job ends is told of it when it is back. That a job stands still for a console that is away is said."""

from __future__ import annotations

import json
import math
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from openrecycle.agent.coordination.launcher import Deploy, Failure, Halt, LauncherWarning
from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.agent.launcher.record import iteration_line, iteration_of
from openrecycle.agent.messages.client import Backoff, ConsoleClient, ConsoleUnavailable
from openrecycle.agent.messages.protocol import (
    BATCH,
    UNKNOWN_PLAN,
    Command,
    Deployment,
    FailureReport,
    Iteration,
    JobSpec,
    Restart,
)
from openrecycle.agent.monitoring import console_link
from openrecycle.agent.monitoring.console_link import (
    AWAY_SECONDS,
    Absence,
    ConsoleCoordination,
    create_job,
    failure_batches,
)
from openrecycle.agent.nodes.succession import Spool
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans.packed import from_text, packed
from openrecycle.planner.plans.plan import PlanError
from tests.agent.consoles import until
from tests.golden import golden

TRIES = 12
TIMEOUT = 60.0


def test_tries_are_closer_together_than_the_console_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    waits: dict[str, list[float]] = {"reports": [], "_follow_generations": [], "_follow_commands": []}
    enough = {name: threading.Event() for name in waits}

    class Watched(Backoff):
        """Says what it would wait, and waits only once it has said enough."""

        def seconds(self) -> float:
            mine = threading.current_thread().name
            waits[mine].append(super().seconds())
            if len(waits[mine]) < TRIES:
                return 0.0
            enough[mine].set()
            return TIMEOUT

    monkeypatch.setattr(console_link, "Backoff", Watched)
    monkeypatch.setattr(console_link, "STOPPED_TIMEOUT_SECONDS", 0.0)
    link = ConsoleCoordination(lambda: ConsoleClient(f"http://127.0.0.1:{port}"), "job", lambda text: None)
    link.failed(Failure("exit", Worker(0, 1), "i1", detail="was killed by SIGKILL"))
    link.poll(0.0)
    assert all(event.wait(TIMEOUT) for event in enough.values())
    link.close(lambda: True)
    for name, pauses in waits.items():
        assert max(pauses) <= FailureTimeouts().transfer_grace / 2, name
        assert min(pauses[4:]) >= 0.5, f"{name}: and not all the time"


class Console(ThreadingHTTPServer):
    """Not there (503) until `back`; keeps the paths and bodies that it took. It takes no registration, as one
    of another version, and counts those that it refuses. offers: what it answers, by how the path ends; "":
    nothing; an error: 404, and why. given: the paths of what it has, in order. full: what is only asked is
    answered, with nothing, and 503 is said to reports. came: how the paths of all reports end, in order.
    unready: how often 503 is said to the end of a process first. strange: its database is another one, without
    the job. standby: it answers all that is asked with 503, and why."""

    daemon_threads = True

    def __init__(self) -> None:
        self.back = threading.Event()
        self.strange = self.full = self.standby = False
        self.refused = self.unready = 0
        self.came: list[str] = []
        self.taken: list[tuple[str, dict[str, Any]]] = []
        self.offers: dict[str, str | bytes | Exception] = {}
        self.refuses: dict[str, tuple[str, str]] = {}
        self.given: list[str] = []
        console = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                if console.standby:
                    self._refuse(503, "standby", "this console may no longer lead: the database does not answer")
                    return
                if console.strange:
                    self._refuse(404, "unknown_job", "job: got 'job', expected the id of a job of this console")
                    return
                offered = "" if console.full else console.offers.get(path.rsplit("/", 1)[1])
                if offered == "":
                    self.send_response(204)
                    self.end_headers()
                    return
                if isinstance(offered, Exception):
                    self._refuse(404, UNKNOWN_PLAN, str(offered))
                    return
                if offered is None or (query and not {"after=0", "packed=true"}.intersection(query.split("&"))):
                    self.send_error(503)
                    return
                data = offered if isinstance(offered, bytes) else offered.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                console.given.append(path)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not console.back.is_set():
                    self.send_error(503)
                    return
                if self.path.endswith("/failures") and console.unready:
                    console.unready -= 1
                    self.send_error(503)
                    return
                console.came.append(self.path.rsplit("/", 1)[1])
                if console.strange:
                    console.refused += 1
                    self._refuse(404, "unknown_job", "job: got 'job', expected the id of a job of this console")
                    return
                if self.path.endswith("/workers"):
                    console.refused += 1
                    self._refuse(422, "invalid", "worker: missing")
                    return
                if why := console.refuses.get(console.came[-1]):
                    self._refuse(422 if why[0] == "invalid" else 409, *why)
                    return
                console.taken.append((self.path, body))
                self.send_response(204)
                self.end_headers()

            def _refuse(self, status: int, code: str, detail: str) -> None:
                answer = json.dumps({"title": "", "status": status, "code": code, "detail": detail}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def failures(self) -> list[list[dict[str, Any]]]:
        """The batches of failures that it has taken."""
        return [body["failures"] for path, body in self.taken if path.endswith("/failures")]


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    monkeypatch.setattr(console_link, "STOPPED_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(console_link, "LAST_TRIES_SECONDS", 0.01)
    with Console() as console:
        yield console
        console.shutdown()


def link_to(console: Console, say: list[str]) -> ConsoleCoordination:
    link = ConsoleCoordination(lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}"), "job", say.append)
    link.failed(Failure("exit", Worker(0, 1), "i1", detail="was killed by SIGKILL"))
    link.finished("stopped", "nobody is left to do stage 1")
    return link


def test_a_console_that_comes_back_learns_how_the_job_ended(console: Console) -> None:
    said: list[str] = []

    def hurried() -> bool:
        if said:  # the first time-out is over
            console.back.set()
        return False

    link_to(console, said).close(hurried)
    assert [path.rsplit("/", 1)[1] for path, _ in console.taken] == ["failures", "finish"]
    assert console.taken[1][1]["reason"] == golden("nobody-is-left-to-do")
    assert len(said) == 1
    assert golden("for-up-to-60-s") in said[0]


def test_a_job_that_can_not_begin_for_want_of_its_console_says_so() -> None:
    said: list[str] = []
    spec = JobSpec.of(Job(1, 1, 1), name="job", iterations=1)
    with pytest.raises(ConsoleUnavailable), socket.create_server(("127.0.0.1", 0)) as taken:
        client = ConsoleClient(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout=0.05)
        create_job(client, spec, said.append, timeout=0.1, quiet=0.0)
    (text,) = said
    assert text.startswith("warning: http://127.0.0.1") and golden("the-job-begins-once-the") in text


def test_a_launcher_whose_workers_can_not_register_says_why_and_says_it_once(console: Console) -> None:
    console.back.set()
    said: list[str] = []
    link = ConsoleCoordination(
        lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}"), "job", said.append, interval=0.01
    )
    link.ready(Worker(0, 0), "i1", "node1", [1])
    deadline = time.monotonic() + TIMEOUT
    while console.refused < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    told = list(said)
    link.finished("stopped", "nobody is left to do stage 0")
    link.close(lambda: True)
    assert console.refused >= 3, "it is tried again"
    assert len(told) == 1 and told[0].endswith("worker: missing")


def test_what_the_console_refuses_is_said_once_unless_it_is_no_news(console: Console) -> None:
    """An interim plan that it found invalid was run, and nobody learned of it."""
    console.refuses = {
        "interim": ("invalid", "plan: expected a valid plan: W0_0 has 0 O, expected 1"),
        "iterations": ("fenced", "incarnation: 'i1' was fenced"),
        "finish": ("job_over", "the job has ended"),
    }
    console.back.set()
    said: list[str] = []
    link = ConsoleCoordination(lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}"), "job", said.append)
    plan = Catalog(Job(2, 1, 1), Technique.STAGGERED, MemoryLimit("uniform")).plan_for([Worker(1, 0)])[0]
    for generation in (2, 3):
        link.meanwhile(generation, plan)
    link.committed([Iteration(iteration=7, loss=1.0, loss_hex="0x1p+0", seconds=0.5, generation=3, living=1)])
    link.finished("stopped", "enough")
    link.close(lambda: False)
    assert console.came == ["interim", "interim", "iterations", "finish"]
    (text,) = [text for text in said if text.endswith("W0_0 has 0 O, expected 1")]
    assert text.startswith("warning: ") and not any("fenced" in text or "has ended" in text for text in said)


def test_a_large_interim_plan_is_sent_packed(console: Console) -> None:
    console.back.set()
    link = connected(console)
    plan = Catalog(Job(16, 16, 32), Technique.STAGGERED, MemoryLimit("uniform")).plan_for([Worker(1, 0)])[0]
    assert plan.op_count > 20_000
    link.meanwhile(2, plan)
    link.finished("stopped", "enough")
    link.close(lambda: False)
    (body,) = [body for path, body in console.taken if path.endswith("/interim")]
    assert from_text(body["plan"], grid=(16, 16, 32)) == plan and len(body["plan"]) < 10_000


def test_a_console_hears_of_an_end_before_it_hears_who_has_come_in_that_place(console: Console) -> None:
    """Both are sent by threads of their own: a console that was away for both may take either first, and what it takes
    for a new process in a place that is not empty hides why the earlier one has ended."""
    console.unready = 3
    console.back.set()
    address = f"http://127.0.0.1:{console.server_port}"
    link = ConsoleCoordination(lambda: ConsoleClient(address, known=True), "job", lambda _: None, interval=0.01)
    try:
        link.failed(Failure("exit", Worker(0, 1), "i1", detail="was killed by SIGKILL"))
        link.ready(Worker(0, 1), "i2", "host", [7])
        link.poll(0.0)
        until(lambda: "workers" in console.came, "the next one to be registered", TIMEOUT)
    finally:
        link.close(lambda: True)
    assert console.came[0] == "failures"


def connected(console: Console, **options: Any) -> ConsoleCoordination:
    client = ConsoleClient(f"http://127.0.0.1:{console.server_port}", known=True)
    return ConsoleCoordination(lambda: client, "job", lambda _: None, **options)


def node_is_lost(link: ConsoleCoordination, pipeline: int) -> None:
    for stage in range(3):
        link.failed(Failure("exit", Worker(pipeline, stage), f"i{pipeline}{stage}", detail="was lost with its node"))
        link.restarts(Worker(pipeline, stage), f"i{pipeline}{stage}", Restart(number=1, most=3, node=pipeline))


def told(batch: Sequence[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    return [(report["worker"], report["incarnation"], report["restart"] is not None) for report in batch]


def of_node(pipeline: int) -> list[tuple[str, str, bool]]:
    return [(f"W{pipeline}_{s}", f"i{pipeline}{s}", restart) for s in range(3) for restart in (False, True)]


def test_all_failures_of_one_turn_are_one_batch(console: Console) -> None:
    """A console opened a generation for each of the workers that a lost node had."""
    console.back.set()
    link = connected(console)
    try:
        node_is_lost(link, 1)
        link.poll(0.0)
        until(lambda: console.taken, "the first report", TIMEOUT)
        node_is_lost(link, 2)
        link.failed(Failure("transfer", Worker(0, 1), "i01", 1, "reset", peer="W2_1"))
        link.failed(Failure("exception", Worker(0, 0), "i00", 1, "all form anew"))
        link.poll(0.0)
        until(lambda: len(console.taken) == 2, "the reports", TIMEOUT)
    finally:
        link.close(lambda: True)
    others = [("W2_1", "i01", False), ("W0_0", "i00", False)]
    assert [told(batch) for batch in console.failures] == [of_node(1), [*of_node(2), *others]]
    assert [console.failures[1][at]["reporter"] for at in (-2, -1)] == ["W0_1", "launcher"]


def test_a_failure_after_the_poll_of_a_turn_wakes_the_launcher_and_is_in_a_copy_before_it_is_sent(
    console: Console,
) -> None:
    console.back.set()
    link = connected(console)
    try:
        link.poll(0.0)
        assert not select.select([link.wake_fd], [], [], 0.0)[0]
        node_is_lost(link, 1)
        assert select.select([link.wake_fd], [], [], 0.0)[0]
        copy = json.loads(json.dumps(link.saved()))
        assert not console.taken
    finally:
        link.close(lambda: False)
    assert [told(batch) for batch in console.failures] == [of_node(1)], "it is told at the end, too"
    after = connected(console, saved=copy)
    try:
        until(lambda: len(console.taken) == 2, "what the lead before could not tell", TIMEOUT)
    finally:
        after.close(lambda: True)
    assert told(console.failures[1]) == of_node(1)


def test_failures_come_before_what_is_reported_after_them(console: Console) -> None:
    console.back.set()
    link = connected(console)
    try:
        node_is_lost(link, 1)
        link.committed([Iteration(iteration=7, loss=1.0, loss_hex="0x1p+0", seconds=0.5, generation=1, living=4)])
        link.poll(0.0)
        until(lambda: len(console.taken) == 2, "the reports", TIMEOUT)
    finally:
        link.close(lambda: True)
    assert [path.rsplit("/", 1)[1] for path, _ in console.taken] == ["failures", "iterations"]


def test_a_batch_of_failures_is_no_larger_than_a_console_takes() -> None:
    def reports(count: int, detail: str) -> list[FailureReport]:
        about = {"incarnation": "a", "cause": "exit", "reporter": "launcher", "detail": detail}
        return [FailureReport.model_validate(about | {"worker": f"W{n}_0"}) for n in range(count)]

    for made, batches in ((reports(2048, "was lost with node 1"), 1), (reports(2048, "\N{SNOWMAN}" * 2000), 5)):
        cut = list(failure_batches(made))
        assert [report for batch in cut for report in batch.failures] == made and len(cut) == batches
        assert max(len(batch.model_dump_json().encode()) for batch in cut) < 4 * 2**20
    assert [len(batch.failures) for batch in failure_batches(reports(BATCH + 1, ""))] == [BATCH, 1]


def test_what_a_console_hears_of_workers_lost_with_the_lead_says_what_their_processes_did(console: Console) -> None:
    """It puts "its process" before that; what was told is a sentence of its own."""
    console.back.set()
    address = f"http://127.0.0.1:{console.server_port}"
    link = ConsoleCoordination(lambda: ConsoleClient(address, known=True), "job", lambda _: None)
    try:
        link.lead_changed({Worker(0, 1): "i1"}, "node 7 has vanished", time.monotonic())
        link.poll(0.0)
        until(lambda: console.taken, "the report", TIMEOUT)
    finally:
        link.close(lambda: True)
    (body,) = console.failures[0]
    assert (body["worker"], body["detail"]) == ("W0_1", "ended: node 7 has vanished")


def test_of_a_generation_that_has_just_opened_a_launcher_does_not_say_that_nobody_trains(console: Console) -> None:
    """It opened after one question for it was answered, and before the next."""

    def standing(generation: int) -> str:
        return json.dumps({"state": "recovering", "sentence": f"{generation}", "generation": generation})

    said: list[str] = []
    console.offers |= {"deployment": "", "job": standing(1)}
    link = ConsoleCoordination(lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}"), "job", said.append)
    until(lambda: console.given, "the console to be asked why the job stands still")
    console.offers["job"] = standing(0)
    until(lambda: said, "it to be said")
    link.finished("stopped", "")
    link.close(lambda: True)
    assert said[0] == "0"


@pytest.mark.parametrize("again", [True, False], ids=["once", "always"])
def test_a_folder_of_checkpoints_that_can_not_be_read_is_read_again_or_ends_the_job(
    console: Console, again: bool
) -> None:
    plan, _ = Catalog(Job(1, 1, 1), Technique.STAGGERED, MemoryLimit("uniform")).plan_for(())
    deployment = Deployment(
        generation=1, plan_fingerprint=plan.fingerprint, living=("W0_0",), failed=(), joining=(), restore=True
    )
    console.offers |= {"deployment": deployment.model_dump_json(), plan.fingerprint: packed(plan)}
    asked: list[int] = []

    def newest() -> str:
        asked.append(len(asked))
        if again and len(asked) > 1:
            return "point-7"
        raise OSError("stale file handle")

    link = ConsoleCoordination(
        lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}"),
        "job",
        lambda text: None,
        checkpoint=newest,
        retry_seconds=TIMEOUT if again else 0.0,
    )
    deadline = time.monotonic() + TIMEOUT
    while not (events := link.poll(time.monotonic())) and time.monotonic() < deadline:
        time.sleep(0.01)
    link.close(lambda: True)
    (event,) = events
    if again:
        assert isinstance(event, Deploy) and event.restore == "point-7"
    else:
        assert isinstance(event, Halt) and "stale file handle" in event.reason


def test_a_console_that_does_not_know_the_job_ends_no_training(console: Console) -> None:
    """Somebody has started it with another database; then with the right one. No report is lost meanwhile."""
    console.strange = True
    console.back.set()
    plan, _ = Catalog(Job(1, 1, 1), Technique.STAGGERED, MemoryLimit("uniform")).plan_for(())
    deployment = Deployment(generation=1, plan_fingerprint=plan.fingerprint, living=("W0_0",), failed=(), joining=())
    console.offers |= {"deployment": deployment.model_dump_json(), plan.fingerprint: packed(plan)}
    said: list[str] = []
    link = ConsoleCoordination(
        lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}", known=True), "job", said.append
    )
    try:
        link.failed(Failure("exit", Worker(0, 1), "i1", detail="was killed by SIGKILL"))
        link.failed(Failure("transfer", Worker(0, 0), "i2", 1, "reset"))
        told: list[Any] = []

        def later() -> bool:
            told.extend(link.poll(time.monotonic() + AWAY_SECONDS))
            return bool(told) and console.refused >= 6

        until(later, "it to say so, and to try again", TIMEOUT)
        assert len(told) == 1 and isinstance(told[0], LauncherWarning) and "this console" in told[0].text
        console.strange = False
        until(lambda: console.failures, "the reports to arrive", TIMEOUT)
        assert {one["cause"] for batch in console.failures for one in batch} == {"exit", "transfer"}
        until(lambda: any(isinstance(e, Deploy) for e in link.poll(time.monotonic())), "the generation", TIMEOUT)
        assert not said
    finally:
        link.close(lambda: True)


def test_a_console_whose_plan_is_damaged_is_not_away(console: Console) -> None:
    """It answers. Until the job has another plan, its workers do what they can."""
    plan, _ = Catalog(Job(1, 1, 1), Technique.STAGGERED, MemoryLimit("uniform")).plan_for(())
    deployment = Deployment(generation=1, plan_fingerprint=plan.fingerprint, living=("W0_0",), failed=(), joining=())
    console.offers |= {"deployment": deployment.model_dump_json(), plan.fingerprint: PlanError("damaged")}
    said: list[str] = []
    link = ConsoleCoordination(lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}"), "job", said.append)
    try:
        until(lambda: console.given.count("/api/v1/jobs/job/deployment") >= 3, "it to be asked again", TIMEOUT)
        assert not list(link.poll(time.monotonic() + AWAY_SECONDS))
        assert len(said) == 1 and "damaged" in said[0]
        console.offers[plan.fingerprint] = packed(plan)
        until(lambda: any(isinstance(e, Deploy) for e in link.poll(time.monotonic())), "the generation", TIMEOUT)
    finally:
        link.close(lambda: True)


def test_that_a_job_stands_still_for_its_console_is_said_once() -> None:
    absence, how = Absence(begun=True), "http://c does not answer"
    absence.decided(["W0_0", "W0_1", "W1_0", "W1_1"])
    said: list[tuple[int, str]] = []

    def pass_time(seconds: int) -> None:
        """The console is away since second 0."""
        begin = said[-1][0] if said else 0
        for now in range(begin, begin + seconds):
            if text := absence.turn(now, (0, how), clock=1e9 + now):
                said.append((now, text))

    pass_time(3600)
    at = time.strftime("%H:%M:%S", time.localtime(1e9))
    ((first, text),) = said
    assert first == AWAY_SECONDS and golden("training-goes-on-but-once") in text and how in text and at in text
    absence.broken()
    absence.lost("W0_1")
    said[0] = 3600, text
    pass_time(24 * 3600)
    ((now, text),) = said[1:]
    assert now == 3600, "at once"
    assert golden("the-job-stands-still-until-it-answers") in text and at in text
    assert absence.turn(now + 1, None, 1e9) == golden("the-console-answers-again")
    assert absence.turn(now + 2, None, 1e9) == ""
    absence.decided(["W0_0", "W1_1"])
    assert golden("training-goes-on-but-once") in absence.turn(now + 9, (now, how), 1e9), "nothing stands still"


def test_a_console_that_answers_and_takes_no_reports_is_said_to() -> None:
    """Its disk is full: whoever dies is waited for, and nobody knew why."""
    absence, full = Absence(begun=True), (0.0, "http://c answered 503 (the disk is full)")
    absence.lost("W0_1")
    assert absence.turn(1, None, 1e9, full) == "", "it may be for a moment"
    text = absence.turn(6, None, 1e9, full)
    assert golden("the-job-stands-still-until-it-takes") in text and full[1] in text
    assert absence.turn(7, None, 1e9, full) == ""
    assert absence.turn(8, None, 1e9) == golden("the-console-takes-reports-again")


def test_a_console_that_is_back_and_takes_no_reports_is_no_longer_said_to_be_away() -> None:
    """Its disk is full, and to start it once more would not help; or it has stopped since, and must be started."""
    absence, away, full = Absence(begun=True), (0.0, "it does not answer"), (0.0, "503 (the disk is full)")
    absence.lost("W0_1")
    assert golden("the-job-stands-still-until-it-answers") in absence.turn(60, away, 1e9, full)
    assert absence.turn(61, None, 1e9, full) == "", "it may take them in a moment"
    assert absence.turn(62, away, 1e9, full) == "", "as was said"
    assert absence.turn(63, None, 1e9, full) == ""
    text = absence.turn(63 + AWAY_SECONDS, None, 1e9, full)
    assert golden("the-job-stands-still-until-it-takes") in text and full[1] in text
    assert absence.turn(100, (99, away[1]), 1e9, full) == ""
    text = absence.turn(100 + AWAY_SECONDS, (99, away[1]), 1e9, full)
    assert golden("the-job-stands-still-until-it-answers") in text and away[1] in text
    assert absence.turn(120, None, 1e9) == golden("the-console-answers-again")


def test_a_job_that_trains_again_is_no_longer_said_to_stand_still() -> None:
    """Without that, nobody would be told when the next worker is lost, either."""
    absence, stands = Absence(begun=True), golden("the-job-stands-still")
    absence.lost("W0_1")
    assert stands in absence.turn(60, (0, "x"), 1e9)
    absence.decided(["W0_0", "W1_0", "W1_1"])  # the console answered for less than a turn
    assert absence.turn(61, (61, "x"), 1e9) == ""
    assert golden("training-goes-on-but-once") in absence.turn(61 + AWAY_SECONDS, (61, "x"), 1e9)
    absence.broken()
    assert stands in absence.turn(70, (61, "x"), 1e9)
    absence.trains()
    assert absence.turn(71, (61, "x"), 1e9) == "", "it may have been on its way"
    absence.broken()
    assert absence.turn(72, (61, "x"), 1e9) == "", "as was said"
    absence.trains()
    absence.turn(73, (61, "x"), 1e9)
    assert golden("training-goes-on-but-once") in absence.turn(73 + AWAY_SECONDS, (61, "x"), 1e9)
    absence.lost("W1_1")
    assert stands in absence.turn(90, (61, "x"), 1e9)


@pytest.mark.parametrize("what", ["full", "standby"])
def test_that_a_console_takes_no_reports_is_found_by_what_it_says(console: Console, what: str) -> None:
    """To what is sent to it, or to all: then its database is away, and to start it again would not help."""
    setattr(console, what, True)
    link = ConsoleCoordination(
        lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}", known=True), "job", lambda text: None
    )

    def said(ahead: float = AWAY_SECONDS) -> list[str]:
        return [e.text for e in link.poll(time.monotonic() + ahead) if isinstance(e, LauncherWarning)]

    try:
        link.failed(Failure("exit", Worker(0, 1), "i1", detail="was killed by SIGKILL"))
        told: list[str] = []
        until(lambda: bool(told.extend(said()) or told), "it to say so", TIMEOUT)
        assert golden("the-job-stands-still-until-it-takes") in told[0]
        console.full, console.standby = True, False
        console.back.set()
        until(lambda: said(0.0) == [golden("the-console-takes-reports-again")], "it to say so", TIMEOUT)
        assert [one["cause"] for batch in console.failures for one in batch] == ["exit"]
    finally:
        link.close(lambda: True)


def test_a_paused_job_whose_console_is_away_is_not_said_to_train(console: Console) -> None:
    console.offers["commands"] = json.dumps({"commands": [{"seq": 1, "kind": "pause"}]})
    now, link = time.monotonic(), connected(console)

    def said(link: ConsoleCoordination) -> list[str]:
        nonlocal now
        now += AWAY_SECONDS
        return [event.text for event in link.poll(now) if isinstance(event, LauncherWarning)]

    try:
        until(lambda: any(isinstance(event, Command) for event in link.poll(now)), "the pause", TIMEOUT)
        copy = json.loads(json.dumps({**link.saved(), "generation": 2}))
    finally:
        link.close(lambda: True)
    console.offers.clear()
    after = connected(console, saved=copy)
    try:
        told: list[str] = []
        until(lambda: bool(told.extend(said(after)) or told), "it to be away", TIMEOUT)
        assert golden("the-job-is-paused-and-nobody-can") in told[0]
    finally:
        after.close(lambda: True)


def test_what_broke_in_an_earlier_generation_or_broke_nothing_stands_still_for_nobody(console: Console) -> None:
    """All train, and the console is away: that was said to stand still, again and again."""

    def connect() -> ConsoleClient:
        return ConsoleClient(f"http://127.0.0.1:{console.server_port}", known=True)

    before = ConsoleCoordination(connect, "job", print)
    before.close(lambda: True)
    link = ConsoleCoordination(connect, "job", print, saved={**before.saved(), "generation": 2})
    now = time.monotonic()

    def said() -> str:
        """While the console is away."""
        nonlocal now
        now += AWAY_SECONDS
        return "".join(event.text for event in link.poll(now) if isinstance(event, LauncherWarning))

    try:
        until(lambda: golden("training-goes-on-but-once") in said(), "it to be away", TIMEOUT)
        stands = golden("the-job-stands-still")
        link.failed(Failure("transfer", Worker(0, 0), "i0", 1, "connection reset"))
        assert stands not in said(), "generation 2 has begun without"
        link.failed(Failure("exception", Worker(0, 0), "i0", 2, "all form anew"))
        link.committed([Iteration(iteration=7, loss=1.0, loss_hex="0x1p+0", seconds=0.5, generation=2, living=4)])
        assert stands not in said(), "all went on until the next generation"
        link.failed(Failure("transfer", Worker(0, 0), "i0", 2, "connection reset"))
        assert stands in said()
    finally:
        link.close(lambda: True)


def test_a_console_that_refused_one_connection_is_not_away() -> None:
    """It answers again at once, with what it has; what it hasn't takes as long as a question waits."""
    asked, closed = list[float](), threading.Event()

    class Blip:
        """A client. The first question for a generation is refused; those that wait are never answered."""

        token = None

        def get(self, path: str, reply: Any, *, wait: float = 0.0, **params: Any) -> None:
            if path.endswith("/deployment"):
                asked.append(wait)
                if len(asked) == 1:
                    raise ConsoleUnavailable("connection refused")
            if wait:
                closed.wait(TIMEOUT)

        def post(self, *args: Any, **params: Any) -> None:
            """Takes whatever comes."""

    link = ConsoleCoordination(lambda: cast("Any", Blip()), "job", print)
    try:
        until(lambda: len(asked) > 1 and asked[-1], "it to wait for an answer", TIMEOUT)
        assert not link.poll(time.monotonic() + AWAY_SECONDS)
    finally:
        closed.set()
        link.close(lambda: True)


def test_a_job_whose_console_is_away_before_the_first_generation_stands_still() -> None:
    assert golden("the-job-stands-still") in Absence(begun=False).turn(60, (0, "x"), 1e9)


def test_a_death_while_the_console_is_away_is_said(console: Console) -> None:
    link = ConsoleCoordination(lambda: ConsoleClient(f"http://127.0.0.1:{console.server_port}"), "job", print)
    try:
        link.failed(Failure("exit", Worker(0, 1), "i1", detail="was killed by SIGKILL"))
        (event,) = until(lambda: link.poll(time.monotonic() + AWAY_SECONDS), "it to be said", TIMEOUT)
        # Until it answers, or takes reports: whichever thread has found the console away first.
        assert isinstance(event, LauncherWarning) and golden("the-job-stands-still") in event.text
        assert f":{console.server_port}" in event.text, "where it is looked for"
    finally:
        link.close(lambda: True)


def test_what_waits_for_a_console_is_little_in_a_copy_and_whole_with_the_next_lead(console: Console) -> None:
    """Each copy had all iterations that waited: with several nodes and the console away for hours, a second of work
    and megabytes, in each turn of the launcher. One iteration has no loss."""

    def connect() -> ConsoleClient:
        return ConsoleClient(f"http://127.0.0.1:{console.server_port}", known=True)

    count, spool = 2500, Spool()
    iterations = [
        Iteration(iteration=i, loss=loss, loss_hex=loss.hex(), seconds=0.5, generation=1, living=4)
        for i, loss in enumerate([*map(float, range(700)), math.nan, *map(float, range(701, count))])
    ]
    before = ConsoleCoordination(lambda: ConsoleClient("http://127.0.0.1:9"), "job", lambda text: None)
    for iteration in iterations:
        spool.add([iteration_line(iteration), {"warning": "of no matter"}])
        before.committed([iteration])
        if iteration.iteration == 1200:
            before.failed(Failure("exit", Worker(0, 1), "i1", detail="was killed by SIGKILL"))
    text = json.dumps(before.saved())
    before.close(lambda: True)
    assert not console.taken and len(text) < 2000
    console.back.set()
    after = ConsoleCoordination(
        connect,
        "job",
        lambda text: None,
        saved=json.loads(text),
        recorded=lambda first, last: map(iteration_of, spool.iterations(first, last)),
    )
    try:
        until(lambda: sum(len(body.get("iterations", ())) for _, body in console.taken) >= count, "all", TIMEOUT)
        kinds = [path.rsplit("/", 1)[1] for path, _ in console.taken]
        assert kinds.count("failures") == 1 and kinds[0] == "iterations" == kinds[-1]
        told = [i for _, body in console.taken for i in body.get("iterations", ())]
        assert [(i["iteration"], i["loss"]) for i in told] == [(i, None if i == 700 else i) for i in range(count)]
    finally:
        after.close(lambda: True)


def test_nobody_waits_for_long_once_the_launcher_is_told_to_stop(console: Console) -> None:
    said: list[str] = []
    link_to(console, said).close(lambda: bool(said))
    assert console.taken == []
    assert golden("the-console-was-not-told") in said[1] and len(said) == 2
