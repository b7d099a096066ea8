"""How many workers one console bears: simulated launchers at 1 Hz over real HTTP, deaths and returns meanwhile.

Prints heartbeat latencies, what a recovery costs, and what the console's process uses of the machine
(instructions too, which a busy machine does not change), while somebody looks at the Live page. SQLite,
or with --postgres a throw-away PostgreSQL.

    python -m tests.benchmarks.bench_console_load --grid 64x32
    python -m tests.benchmarks.bench_console_load --grid 128x64 --postgres
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from tests.app.console_server import ConsoleServer
from tests.benchmarks.instructions import counter, process_counter
from tests.benchmarks.machine import describe
from tests.benchmarks.page_session import PageSession
from tests.benchmarks.simulated_agents import Load, Told, simulate
from tests.conftest import postgres_cluster

GOAL_P99, GOAL_REFRESH = 0.050, 1.0
MIB = 2**20


class Usage:
    """What a process has used since now."""

    def __init__(self, pid: int) -> None:
        self._stat, self._status = Path(f"/proc/{pid}/stat"), Path(f"/proc/{pid}/statm")
        self._began, self._seconds = time.monotonic(), self._processor()

    def _processor(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def seconds(self) -> float:
        return self._processor() - self._seconds

    @property
    def cores(self) -> float:
        return self.seconds / (time.monotonic() - self._began)

    @property
    def resident(self) -> float:
        """MiB."""
        return int(self._status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


@contextlib.contextmanager
def database(postgres: bool) -> Iterator[str]:
    if postgres:
        with postgres_cluster() as url:
            yield f"{url}/postgres"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/console.db"


def measure(server: ConsoleServer, load: Load, *, look: bool) -> Told:
    told: Told
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    generator = context.Process(target=simulate, args=(load, theirs))
    whole = Usage(server.process.pid)
    generator.start()
    theirs.close()
    try:
        _, job, seconds = ours.recv()
        print(f"all registered after {seconds:.1f} s; processor time of the console: {whole.seconds:.1f} s", flush=True)
        _, job, seconds = ours.recv()
        print(f"all train after {seconds:.1f} s; {whole.seconds:.1f} s of processor time", flush=True)
        steady, counted = Usage(server.process.pid), process_counter(server.process.pid)
        in_loop = counter(server.process.pid) or (lambda: 0.0)
        refreshes = _look(ours, server.port, job) if look else []
        _, told, _ = ours.recv()
        print(f"console: {steady.cores:.2f} cores, {steady.resident:.0f} MiB resident; {describe()}")
        if told.requests and counter() is not None:
            print(
                f"  {counted():.0f} million instructions in user space, {counted() / told.requests:.2f} per request; "
                f"of these {in_loop() / told.requests:.2f} in the event loop"
            )
        if refreshes:
            pages = [seconds for seconds, _ in refreshes]
            size = statistics.median(size for _, size in refreshes) / 1e6
            print(
                f"Live page, a refresh with all that it sends ({size:.2f} MB): "
                f"median {statistics.median(pages):.2f} s, longest {max(pages):.2f} s of {len(pages)}"
            )
    finally:
        generator.join(5)
        if generator.is_alive():
            generator.kill()
    return told


def _look(pipe: Pipe, port: int, job: str) -> list[tuple[float, int]]:
    """Refreshes the Live page every two seconds, as it refreshes itself, until the generator is done."""
    session, out = PageSession(port, f"job={job}"), []
    session.run()
    while not pipe.poll(2.0):
        out.append(session.refresh())
    session.close()
    return out


def report(load: Load, told: Told) -> None:
    count, batches = told.heartbeats, len(told.latency)
    rate = load.pipelines * load.stages / load.heartbeat
    print(
        f"heartbeats: {count:,} in {load.seconds:.0f} s ({count / load.seconds:.0f}/s of {rate:.0f}/s due), "
        f"in {batches:,} batches"
    )
    print(f"  sent to answered, ms:   {_percentiles(told.answered)}")
    print(f"  due to answered, ms:    {_percentiles(told.latency)}")
    print(f"  of those in recoveries: {_percentiles(told.in_recovery)}")
    print(f"  sent late by, ms:      {_percentiles(told.late)}  (the generator's doing)")
    print(f"all requests: {told.requests:,}; generator: {told.processor:.1f} s of processor time")
    if told.detected:
        waiting = f"the last of {math.ceil(load.pipelines * load.stages / load.launcher):,} launchers"
        print(
            f"deaths: {len(told.detected)}; end reported -> new generation at {waiting}: "
            f"median {1000 * statistics.median(told.detected):.0f} ms, longest {1000 * max(told.detected):.0f} ms; "
            f"all train again after {statistics.median(told.resumed):.1f} s (of it 1.5 s simulated)"
        )
    print(f"errors: {sum(told.errors.values())}")
    for text, times in told.errors.most_common(8):
        print(f"  {times} x {text}")


def _percentiles(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return "none"
    cuts = statistics.quantiles(seconds, n=1000)
    found = {"p50": cuts[499], "p95": cuts[949], "p99": cuts[989], "p99.9": cuts[998], "max": max(seconds)}
    return ", ".join(f"{name} {1000 * value:.1f}" for name, value in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--grid", default="64x32", help="pipelines x stages")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--failures", type=int, default=3)
    parser.add_argument("--launcher", type=int, default=8, help="workers of each launcher; 1: Reporter's")
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--unseen", action="store_true", help="nobody looks at the Live page")
    options = parser.parse_args()
    if options.postgres and not (shutil.which("initdb") or list(Path("/usr/lib/postgresql").glob("*"))):
        print("no PostgreSQL found: skipped")
        return
    pipelines, stages = (int(text) for text in options.grid.split("x"))
    print(describe())
    store = "PostgreSQL" if options.postgres else "SQLite"
    print(f"{pipelines * stages:,} workers, {options.launcher} to a launcher, {store}")
    with database(options.postgres) as url:
        server = ConsoleServer(url, *(("--api-only",) if options.unseen else ()))
        try:
            load = Load(
                server.port,
                pipelines,
                stages,
                options.micro_batches,
                options.seconds,
                options.failures,
                options.launcher,
            )
            report(load, measure(server, load, look=not options.unseen))
        finally:
            server.close()
        if server.errors:
            print(f"the console said, {len(server.errors)} lines: {''.join(server.errors[-5:])}")


if __name__ == "__main__":
    main()
