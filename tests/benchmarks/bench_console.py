"""From the report of a death to the new generation at 12 waiting agents, through a real console over HTTP.

Prints the time until the last of the 12 long-polls has its answer: median of 9 deaths, each in a job
of its own, with the plan made ahead.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time

import requests

from tests.app.console_server import Agents, ConsoleServer
from tests.benchmarks.machine import describe

DEATHS = 9


def main() -> None:
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        server = ConsoleServer(f"sqlite:///{folder}/console.db", "--api-only")
        try:
            times = [_last_answer(server) for _ in range(DEATHS)]
        finally:
            server.close()
    print("exit reported -> generation 2 at the last of 12 agents, ms: " + ", ".join(f"{1000 * t:.0f}" for t in times))
    print(f"median {1000 * statistics.median(times):.0f} ms")
    print(describe())


def _last_answer(server: ConsoleServer) -> float:
    """Seconds for one death."""
    agents = Agents(server)
    agents.register_all()
    agents.resume(agents.names, 1)
    while agents.job()["planned_ahead"] < agents.job()["plans_to_make"]:
        time.sleep(0.05)
    answered: list[float] = []
    waiting = threading.Barrier(len(agents.names) + 1)

    def wait() -> None:
        with requests.Session() as session:
            session.get(f"{server.base}/jobs", timeout=10)  # connected, as an agent is
            waiting.wait()
            answer = session.get(server.base + agents.path("/deployment"), params={"after": 1, "wait": 20}, timeout=30)
            answered.append(time.monotonic())
            assert answer.json()["generation"] == 2

    threads = [threading.Thread(target=wait) for _ in agents.names]
    for thread in threads:
        thread.start()
    waiting.wait()
    time.sleep(0.3)  # until all 12 requests are at the console
    began = time.monotonic()
    agents.exit("W1_2")
    for thread in threads:
        thread.join()
    return max(answered) - began


if __name__ == "__main__":
    main()
