"""How long a standby takes to lead, on a real PostgreSQL, with a job of 3 x 4 workers in the database.

Prints seconds from the leader's end (kill -9; SIGSTOP; SIGTERM) until the other console answers
`/readyz` with 200, and until a report is stored through it: median and longest of ROUNDS each.
"""

from __future__ import annotations

import signal
import statistics
import time

import requests

from tests.app.console_server import Agents, ConsoleServer
from tests.benchmarks.machine import describe
from tests.conftest import new_database, postgres_cluster

ROUNDS = 5
LIMIT = 60.0


def main() -> None:
    print(describe())
    with postgres_cluster() as server:
        url = new_database(server)
        leader, standby = ConsoleServer(url, "--api-only"), ConsoleServer(url, "--api-only")
        try:
            agents = Agents(leader)
            agents.register_all()
            agents.resume(agents.names, 1)
            iteration = 0
            for name, number in (("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP), ("SIGTERM", signal.SIGTERM)):
                ready, stored = [], []
                for _ in range(ROUNDS):
                    begin = time.monotonic()
                    leader.process.send_signal(number)
                    ready.append(_until_ready(standby) - begin)
                    _report(standby, agents, iteration)
                    stored.append(time.monotonic() - begin)
                    iteration += 1
                    _bring_back(leader, number)
                    leader, standby = standby, leader
                print(
                    f"{name}: leads after {_summary(ready)}, has stored a report after {_summary(stored)}", flush=True
                )
        finally:
            for console in (leader, standby):
                if console.process.poll() is None:
                    console.process.send_signal(signal.SIGCONT)
                console.close()
    print(describe())


def _until_ready(server: ConsoleServer) -> float:
    deadline = time.monotonic() + LIMIT
    while requests.get(f"{server.root}/readyz", timeout=LIMIT).status_code != 200:
        if time.monotonic() > deadline:
            raise SystemExit(f"{server.root} does not lead after {LIMIT:.0f} s")
        time.sleep(0.01)
    return time.monotonic()


def _report(server: ConsoleServer, agents: Agents, iteration: int) -> None:
    row = {"iteration": iteration, "loss": 1.0, "loss_hex": (1.0).hex(), "seconds": 1.0, "generation": 1, "living": 12}
    server.post(agents.path("/iterations"), {"iterations": [row]}).raise_for_status()


def _bring_back(server: ConsoleServer, number: int) -> None:
    """As a standby that has seen who leads."""
    if number == signal.SIGSTOP:
        server.process.send_signal(signal.SIGCONT)
    else:
        server.process.wait(LIMIT)
        server.start()
    deadline = time.monotonic() + LIMIT
    while "leads (term" not in server.get("/jobs").text:
        if time.monotonic() > deadline:
            raise SystemExit(f"{server.root} is no standby after {LIMIT:.0f} s")
        time.sleep(0.05)


def _summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} s (longest {max(seconds):.1f})"


if __name__ == "__main__":
    main()
