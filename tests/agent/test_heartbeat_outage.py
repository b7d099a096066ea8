"""A console that does not answer is asked again as often as it expects heartbeats: when it is back, it must not take
the pause between two tries for a death."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from openrecycle.agent.client import ConsoleClient, ConsoleUnavailable
from openrecycle.agent.heartbeat import HeartbeatThread, Status
from openrecycle.agent.protocol import Message

TRIES = 12


@pytest.mark.parametrize("interval", [0.1, 0.5, 30.0])
def test_tries_are_no_further_apart_than_heartbeats(interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    thread = HeartbeatThread(
        ConsoleClient(f"http://127.0.0.1:{port}"),
        "job",
        "W0_0",
        "i1",
        Status(),
        interval=interval,
        fenced=lambda: None,
    )
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == TRIES:
            thread.stop()

    monkeypatch.setattr(thread._wake, "wait", wait)
    thread.run()
    assert len(waits) == TRIES
    assert max(waits) <= interval
    assert min(waits[4:]) >= min(interval, 2.0) / 2  # and not all the time


class Recording(ConsoleClient):
    """Takes everything but those that are `lost`: so many messages of a kind are not answered at first."""

    def __init__(self, **lost: int) -> None:
        super().__init__("http://127.0.0.1:9")
        self.lost = lost
        self.posted: list[str] = []

    def post(self, path: str, message: Message, reply: Any = None, *, key: str | None = None) -> Any:
        kind = path.rsplit("/", 1)[1]
        self.posted.append(kind)
        if self.lost.get(kind):
            self.lost[kind] -= 1
            raise ConsoleUnavailable("away")


def reporting(
    client: Recording,
    monkeypatch: pytest.MonkeyPatch,
    turns: list[Callable[[HeartbeatThread], None]],
    interval: float = 3600.0,
) -> None:
    """Runs the thread's loop here; each of `turns` is what happens in one of its waits, the last of which ends it."""
    thread = HeartbeatThread(client, "job", "W0_0", "i1", Status(), interval=interval, fenced=lambda: None)
    left = iter(turns)

    def wait(seconds: float) -> None:
        turn = next(left, None)
        if turn is None:
            thread.stop()
        else:
            turn(thread)

    monkeypatch.setattr(thread._wake, "wait", wait)
    thread.run()


def test_an_acknowledgement_brings_no_heartbeat_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Recording()
    acknowledge = [lambda t, state=state: t.acknowledge(1, state, 0) for state in ("adopted", "formed", "resumed")]
    reporting(client, monkeypatch, acknowledge)
    assert client.posted == ["workers", "heartbeats", *3 * ["acknowledgements"]]


def test_a_heartbeat_that_was_lost_is_sent_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Recording(heartbeats=2)
    reporting(client, monkeypatch, [lambda t: None, lambda t: None])
    assert client.posted == ["workers", *3 * ["heartbeats"]]


def test_a_report_that_hangs_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Recording(acknowledgements=3)
    turns: list[Callable[[HeartbeatThread], None]] = [lambda t: t.acknowledge(1, "adopted", 0), *3 * [lambda t: None]]
    reporting(client, monkeypatch, turns, interval=0.0)
    assert client.posted == ["workers", "heartbeats", *4 * ["heartbeats", "acknowledgements"], "logs"]
