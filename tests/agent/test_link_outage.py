"""A console that was away long hears of a death soon after it is back, before it gives up waiting for the report that
explains a broken connection: then it would have all connect anew, with the dead among them."""

from __future__ import annotations

import socket
import threading

import pytest

from agent import console_link
from agent.client import Backoff, ConsoleClient
from agent.console_link import ConsoleCoordination
from app.coordination.membership import Ladder
from planner.job import Worker

TRIES = 12
PATIENCE = 60.0


def test_tries_are_closer_together_than_the_console_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    waits: dict[str, list[float]] = {"reports": [], "_follow_epochs": [], "_follow_commands": []}
    enough = {name: threading.Event() for name in waits}

    class Watched(Backoff):
        """Says what it would wait, and waits only once it has said enough."""

        def seconds(self) -> float:
            mine = threading.current_thread().name
            waits[mine].append(super().seconds())
            if len(waits[mine]) < TRIES:
                return 0.0
            enough[mine].set()
            return PATIENCE

    monkeypatch.setattr(console_link, "Backoff", Watched)
    link = ConsoleCoordination(lambda: ConsoleClient(f"http://127.0.0.1:{port}"), "job", lambda text: None)
    link.exited(Worker(0, 1), "i1", "was killed by SIGKILL")
    assert all(event.wait(PATIENCE) for event in enough.values())
    link.close(0.0)
    for name, pauses in waits.items():
        assert max(pauses) <= Ladder().transfer_grace / 2, name
        assert min(pauses[4:]) >= 0.5, f"{name}: and not all the time"
