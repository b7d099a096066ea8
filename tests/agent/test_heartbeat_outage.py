"""A console that does not answer is asked again as often as it expects heartbeats: when it is back, it must not take
the pause between two tries for a death."""

from __future__ import annotations

import socket

import pytest

from agent.client import ConsoleClient
from agent.heartbeat import HeartbeatThread, Status

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
