"""A console that does not answer is asked again as often as it expects heartbeats: when it is back, it must not take
the pause between two tries for a death. And what all workers of a launcher say is posted together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from openrecycle.agent.coordination.launcher import Failure
from openrecycle.agent.messages.client import ConsoleClient, ConsoleUnavailable, Offset
from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    BatchReply,
    ClockReading,
    Failures,
    Heartbeats,
    LogLines,
    Message,
    RefusedReport,
    Registration,
    Registrations,
    clock_name,
)
from openrecycle.agent.monitoring import heartbeat
from openrecycle.agent.monitoring.console_link import failure_report
from openrecycle.agent.monitoring.heartbeat import Status, WorkerReports
from openrecycle.planner.jobs.job import Worker

TRIES = 12
NAMES = ("W0_0", "W0_1", "W1_0", "W1_1")


def registration(name: str) -> Registration:
    return Registration(worker=name, incarnation=f"{name}-a", host="h", pid=1)


class Turns(WorkerReports):
    """Runs the thread's loop here, without its waits. turn: what happens instead of each, with its seconds."""

    turn: Callable[[float], None]

    def pause(self, seconds: float) -> None:
        self.turn(seconds)


@pytest.mark.parametrize("interval", [0.1, 0.5, 30.0])
def test_tries_are_no_further_apart_than_heartbeats(interval: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = ConsoleClient(f"http://127.0.0.1:{port}")
    reports = Turns(client, "job", interval=interval, fenced=lambda incarnation: None)
    reports.add(registration("W0_0"))
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == TRIES:
            reports.stop()

    reports.turn = wait
    reports.run()
    assert len(waits) == TRIES
    assert max(waits) <= interval
    assert min(waits[4:]) >= min(interval, 2.0) / 2  # and not all the time


class Recording(ConsoleClient):
    """Takes everything but those that are `lost` (so many messages of a kind are not answered at first), the heartbeats
    of those that are `fenced`, and those that `come` with a code against them."""

    def __init__(
        self,
        fenced: frozenset[str] = frozenset(),
        measure: int | None = None,
        come: Mapping[str, str] = MappingProxyType({}),
        **lost: int,
    ) -> None:
        super().__init__("http://127.0.0.1:9")
        self.lost, self.fenced, self.measure, self.come = lost, fenced, measure, come
        self.posted: list[str] = []
        self.messages: list[Message] = []

    def post(self, path: str, message: Message, reply: Any = None, *, key: str | None = None) -> Any:
        kind = path.rsplit("/", 1)[1]
        self.posted.append(kind)
        if self.lost.get(kind):
            self.lost[kind] -= 1
            raise ConsoleUnavailable("away")
        self.messages.append(message)
        if isinstance(message, Registrations):
            workers, against = [r.worker for r in message.registrations], self.come
        elif isinstance(message, Heartbeats):
            workers, against = [beat.worker for beat in message.heartbeats], dict.fromkeys(self.fenced, "fenced")
        else:
            return None
        refused = [
            RefusedReport(index=i, worker=worker, code=against[worker], detail="")
            for i, worker in enumerate(workers)
            if worker in against
        ]
        taken = len(workers) - len(refused)
        return BatchReply(generation=1, measure=self.measure, taken=taken, refused=tuple(refused))

    def get(self, path: str, reply: Any) -> Any:
        assert path == "/clock"
        return ClockReading(name=clock_name(), microseconds=0)


@pytest.mark.parametrize("refused", [False, True])
def test_that_a_process_leaves_is_the_last_that_is_said_of_it(refused: bool) -> None:
    """Whatever is queued meanwhile; and nothing is said of one that has no place."""
    client, status = Recording(come={"W0_0": "job_over"} if refused else {}), Status(phase="draining")
    link = failure_report(Failure("transfer", Worker(0, 0), "W0_0-a", 1, "broke"))
    left = failure_report(Failure("exit", Worker(0, 0), "W0_0-a"))
    gathered: list[None] = []

    def gather() -> None:
        gathered.append(None)
        reports.heard({"W0_0-a": ("W0_0", status.take())})
        if len(gathered) == 2:
            reports.failed(link)

    reports = Turns(client, "job", interval=3600.0, fenced=lambda incarnation: None, gather=gather)
    reports.turn = lambda seconds: reports.stop(left)
    reports.add(registration("W0_0"))
    reports.run()
    said = [message.failures[0].cause for message in client.messages if isinstance(message, Failures)]
    assert said == (["transfer"] if refused else ["transfer", "exit"])
    assert refused or client.posted[-1] == "failures"


Turn = Callable[[WorkerReports], None]


def reporting(
    client: Recording,
    turns: list[Turn],
    interval: float = 3600.0,
    names: tuple[str, ...] = ("W0_0",),
    speaking: tuple[str, ...] | None = None,
) -> dict[str, list[Any]]:
    """Runs the thread's loop here; each of `turns` is what happens in one of its waits, the last of which ends it.
    speaking: who says how it is, before each batch. Returns what it was called with."""
    said: dict[str, list[Any]] = {"fenced": [], "measure": []}
    status = Status()

    def gather() -> None:
        reports.heard({f"{name}-a": (name, status.take()) for name in (names if speaking is None else speaking)})

    reports = Turns(
        client,
        "job",
        interval=interval,
        fenced=said["fenced"].append,
        measure=said["measure"].append,
        gather=gather,
    )
    for name in names:
        reports.add(registration(name))
    left = iter(turns)

    def wait(seconds: float) -> None:
        turn = next(left, None)
        if turn is None:
            reports.stop()
        else:
            turn(reports)

    reports.turn = wait
    reports.run()
    return said


def taken(state: str, names: tuple[str, ...] = ("W0_0",)) -> Turn:
    """They have all taken that step."""
    said = [
        Acknowledgement(worker=name, incarnation=f"{name}-a", generation=1, state=state)  # type: ignore[arg-type]
        for name in names
    ]
    return lambda reports: reports.acknowledge(said)


def nothing(reports: WorkerReports) -> None: ...


def test_an_acknowledgement_brings_no_heartbeat_of_its_own() -> None:
    client = Recording()
    reporting(client, [taken(state) for state in ("adopted", "formed", "resumed")])
    assert client.posted == ["workers", "heartbeats", *3 * ["acknowledgements"]]


def test_a_heartbeat_that_was_lost_is_sent_again_at_once() -> None:
    client = Recording(heartbeats=2)
    reporting(client, [nothing, nothing])
    assert client.posted == ["workers", *3 * ["heartbeats"]]


def test_a_report_that_hangs_is_no_silence() -> None:
    client = Recording(acknowledgements=3)
    reporting(client, [taken("adopted"), *3 * [nothing]], interval=0.0)
    assert client.posted == ["workers", "heartbeats", *4 * ["heartbeats", "acknowledgements"]]


def test_many_reports_do_not_hold_up_heartbeats() -> None:
    client = Recording()

    def broken(reports: WorkerReports) -> None:
        for peer in NAMES[1:]:
            reports.failed(failure_report(Failure("transfer", Worker(0, 0), "W0_0-a", 1, "timed out", peer)))

    reporting(client, [broken, nothing, nothing], interval=0.0)
    assert client.posted == ["workers", "heartbeats", *3 * ["heartbeats", "failures"]]


def test_what_workers_print_does_not_hold_up_heartbeats_and_is_posted_in_turn() -> None:
    """256 of them that print each second had a console 50 ms away wait for thirteen seconds."""
    client = Recording()

    def printed(reports: WorkerReports) -> None:
        for name in NAMES[:3]:
            reports.wrote(f"{name}-a", [(1.0, name)], 0)
        reports.wrote(f"{NAMES[3]}-a", [(1.0, "farewell")], 0)
        reports.remove(f"{NAMES[3]}-a")

    def again(reports: WorkerReports) -> None:
        reports.wrote(f"{NAMES[0]}-a", [(1.0, "more")], 0)

    reporting(client, [printed, nothing, again, nothing, nothing], interval=0.0, names=NAMES[:4])
    assert client.posted[:12] == ["workers", "heartbeats", *5 * ["heartbeats", "logs"]]
    lines = [line.text for message in client.messages if isinstance(message, LogLines) for line in message.lines]
    assert lines == ["farewell", NAMES[0], NAMES[1], NAMES[2], "more"]


def test_what_is_measured_does_not_hold_up_heartbeats() -> None:
    client = Recording()
    fields = {"generation": 1, "iteration": 3, "clock": clock_name(), "started_us": 0, "kinds": "F"}
    fields |= {"pipelines": (0,), "micro_batches": (0,), "starts_us": (0,), "durations_us": (1,)}

    def measured(reports: WorkerReports) -> None:
        for name in NAMES[:3]:
            reports.measured({**fields, "worker": name, "incarnation": f"{name}-a"}, Offset(0, 0))

    reporting(client, [measured, nothing, nothing], interval=0.0, names=NAMES[:3])
    assert client.posted == ["workers", "heartbeats", *3 * ["heartbeats", "measured"]]


def test_all_workers_of_a_launcher_are_posted_together() -> None:
    client = Recording(measure=7)
    said = reporting(client, [taken("adopted", NAMES), taken("formed", NAMES)], names=NAMES)
    assert client.posted == ["workers", "heartbeats", *2 * ["acknowledgements"]]
    came, batch = client.messages[:2]
    assert isinstance(came, Registrations) and isinstance(batch, Heartbeats)
    assert [(r.worker, r.incarnation) for r in came.registrations] == [(n, f"{n}-a") for n in NAMES]
    assert [(b.worker, b.incarnation, b.seq) for b in batch.heartbeats] == [(n, f"{n}-a", 1) for n in NAMES]
    assert said == {"fenced": [], "measure": [7]}


def registered(client: Recording) -> list[list[str]]:
    return [
        [r.worker for r in message.registrations] for message in client.messages if isinstance(message, Registrations)
    ]


def test_who_comes_up_later_is_registered_at_once() -> None:
    client = Recording()

    def come(*names: str) -> Turn:
        return lambda reports: [reports.add(registration(name)) for name in names].clear()

    reporting(client, [come("W0_1"), come("W1_0", "W1_1"), nothing])
    assert registered(client) == [["W0_0"], ["W0_1"], ["W1_0", "W1_1"]]


def test_registrations_that_were_lost_are_sent_again_with_those_that_have_come() -> None:
    client = Recording(workers=1)
    reporting(client, [lambda reports: reports.add(registration("W0_1")), nothing])
    assert registered(client) == [["W0_0", "W0_1"]]
    assert client.posted == ["workers", "workers", "heartbeats"]


def test_who_was_given_another_place_before_it_could_register_asks_for_that() -> None:
    """Its former place has been given to another process and taken, which the console would take for gone."""
    client = Recording(workers=1)
    fields = Status().take()
    reporting(client, [lambda reports: reports.heard({"W0_0-a": ("W1_0", fields)})], speaking=())
    assert registered(client) == [["W1_0"]]


def test_one_whose_registration_is_refused_keeps_nobody_out() -> None:
    client = Recording(come={"W0_1": "fenced", "W1_0": "job_over"})
    said = reporting(client, [nothing], interval=0.0, names=NAMES)
    assert said["fenced"] == ["W0_1-a"]
    assert registered(client)[:2] == [list(NAMES), ["W1_0"]], "what may be taken later is tried again"
    batches = [m for m in client.messages if isinstance(m, Heartbeats)]
    assert {beat.worker for batch in batches for beat in batch.heartbeats} == {"W0_0", "W1_1"}


def test_who_says_nothing_is_not_spoken_for() -> None:
    client = Recording()
    reporting(client, [nothing], interval=0.0, names=NAMES, speaking=NAMES[:2])
    batches = [m for m in client.messages if isinstance(m, Heartbeats)]
    assert [[beat.worker for beat in batch.heartbeats] for batch in batches] == 2 * [list(NAMES[:2])]
    assert [batch.heartbeats[0].seq for batch in batches] == [1, 2]


def test_what_was_said_long_ago_is_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console that was away must not take a worker for alive that has been silent since."""
    client, now = Recording(heartbeats=1), [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    reports = Turns(client, "job", interval=1.0, fenced=lambda incarnation: None)
    reports.add(registration("W0_0"))
    reports.heard({"W0_0-a": ("W0_0", Status().take())})
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        now[0] += 60.0
        if len(waits) == 2:
            reports.stop()

    reports.turn = wait
    reports.run()
    assert client.posted == ["workers", "heartbeats"]


def test_one_that_is_fenced_ends_and_the_others_go_on() -> None:
    client = Recording(frozenset({"W0_1"}))
    said = reporting(client, [nothing], interval=0.0, names=NAMES)
    assert said["fenced"] == ["W0_1-a"]
    last = client.messages[-1]
    assert isinstance(last, Heartbeats)
    assert [beat.worker for beat in last.heartbeats] == ["W0_0", "W1_0", "W1_1"]


def test_op_times_that_were_not_posted_go_with_the_next_heartbeat() -> None:
    """A worker speaks twice as often as a console is told, and its times start anew each time."""
    client = Recording()

    def speak(*times: dict[str, float]) -> Turn:
        said = [{**Status().take(), "op_milliseconds": of} for of in times]
        return lambda reports: [reports.heard({"W0_0-a": ("W0_0", fields)}) for fields in said].clear()

    turns = [speak({"F": 1.0, "I": 2.0}, {"F": 3.0}), speak({"W": 4.0})]
    reporting(client, turns, interval=0.0, speaking=("nobody",))
    batches = [m for m in client.messages if isinstance(m, Heartbeats)]
    assert [batch.heartbeats[0].op_milliseconds for batch in batches] == [{"F": 3.0, "I": 2.0}, {"W": 4.0}]


def test_what_one_wrote_before_it_ended_is_posted_once_the_console_answers() -> None:
    client = Recording(logs=2)

    def end(reports: WorkerReports) -> None:
        reports.wrote("W0_0-a", [(1.0, "farewell")], 0)
        reports.remove("W0_0-a")

    reporting(client, [end, nothing, nothing, nothing], interval=0.0, names=NAMES[:2], speaking=NAMES[1:2])
    posted = [(m.incarnation, [line.text for line in m.lines]) for m in client.messages if isinstance(m, LogLines)]
    assert posted == [("W0_0-a", ["farewell"])]


def test_what_was_written_at_the_very_end_is_posted() -> None:
    client = Recording()

    def end(reports: WorkerReports) -> None:
        reports.wrote("W0_0-a", [(1.0, "farewell")], 0)
        reports.remove("W0_0-a")
        reports.stop()

    reporting(client, [end])
    assert client.posted[-1] == "logs"


def test_what_one_process_says_wrongly_does_not_silence_the_others() -> None:
    client = Recording()
    wrong = [{"phase": "asleep"}, {"op_milliseconds": {"F": float("nan")}}, {"iteration": -1}, {"more": 1}]

    def odd(fields: dict[str, object]) -> Turn:
        def turn(reports: WorkerReports) -> None:
            status = Status()
            reports.heard({"W0_0-a": ("W0_0", {**status.take(), **fields}), "W0_1-a": ("W0_1", status.take())})
            reports.wrote("W0_0-a", [(-1.0, "before 1970"), (1.0, "x" * 10_000)], 0)
            reports.measured({"worker": "W0_0", "incarnation": "W0_0-a", "kinds": "Q"}, Offset(0, 0))

        return turn

    turns = [odd(fields) for fields in wrong]
    reporting(client, turns, interval=0.0, names=NAMES[:2], speaking=NAMES[1:2])
    batches = [m for m in client.messages if isinstance(m, Heartbeats)]
    assert len(batches) >= len(wrong)
    assert {beat.worker for batch in batches for beat in batch.heartbeats} == {"W0_1"}
