"""Random changes of who is in a job, one after the other, while something else goes wrong all the time: training goes
on, no bit differs, and the console's books account for everything once. Each disturbance can be run alone, with -k.

`make chaos`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.app.console_server import ConsoleServer
from tests.chaos.accounts import check
from tests.chaos.chaotic_job import DEAD_SECONDS, FAILURE_TIMEOUTS, ChaoticJob, Disturbance
from tests.chaos.disturbances import (
    ClockJumps,
    ConsoleKilled,
    ConsoleStopped,
    DiskFull,
    InTurn,
    PostgresKilled,
    small_disk,
)
from tests.chaos.faulty_network import Faults, FaultyNetwork
from tests.conftest import new_database, postgres_cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]

SEED = 1
CHANGES = 20
BAD_NETWORK = Faults(cut=0.05, unanswered=0.05, late=0.1, again=0.1)


def play(
    server: ConsoleServer,
    folder: Path,
    changes: Callable[[ChaoticJob], None],
    *,
    room_for: int,
    faults: Faults | None = None,
    skew: float = 0.0,
) -> ChaoticJob:
    """A whole job, to which `changes` does things, `room_for` changes at most; its numbers and books are checked."""
    with ExitStack() as stack:
        stack.callback(server.close)
        network = FaultyNetwork(server.port, SEED, faults)
        stack.callback(network.close)
        job = ChaoticJob(server, network, folder, room_for, seed=SEED, skew=skew)
        stack.callback(job.close)
        job.begin()
        changes(job)
        job.finish()
        print(f"\n{job.summary}")
        check(job)
        return job


def run(
    server: ConsoleServer,
    folder: Path,
    disturbance: Disturbance | None = None,
    *,
    changes: int = CHANGES,
    every: int = 2,
    faults: Faults | None = None,
    skew: float = 0.0,
) -> ChaoticJob:
    """A whole job with that many changes; the disturbance falls into one of `every`."""

    def random_changes(job: ChaoticJob) -> None:
        for number in range(changes):
            job.change(disturbance if number % every == 0 else None)

    return play(server, folder, random_changes, room_for=changes, faults=faults, skew=skew)


def on_sqlite(folder: Path, **options: dict[str, str]) -> ConsoleServer:
    return ConsoleServer(f"sqlite:///{folder / 'console.db'}", "--api-only", *FAILURE_TIMEOUTS, **options)


def test_the_console_is_killed(tmp_path: Path) -> None:
    server = on_sqlite(tmp_path)
    run(server, tmp_path, ConsoleKilled(server))


def test_the_console_stands_still(tmp_path: Path) -> None:
    server = on_sqlite(tmp_path)
    run(server, tmp_path, ConsoleStopped(server, 1.5 * DEAD_SECONDS), changes=8)


def test_the_database_is_killed(tmp_path: Path) -> None:
    with postgres_cluster() as cluster:
        url = new_database(cluster)
        run(ConsoleServer(url, "--api-only", *FAILURE_TIMEOUTS), tmp_path, PostgresKilled(url))


def test_the_network_cuts_delays_repeats_and_re_orders(tmp_path: Path) -> None:
    job = run(on_sqlite(tmp_path), tmp_path, faults=BAD_NETWORK)
    assert min(job.network.counts[name] for name in ("cut", "unanswered", "late", "again")) > 10


def test_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run(on_sqlite(disk), tmp_path, DiskFull(disk))


def test_clocks_are_wrong(tmp_path: Path) -> None:
    """Those of all workers, and the console's, which jumps."""
    clock = ClockJumps(tmp_path / "clock", SEED)
    run(on_sqlite(tmp_path, environment=clock.environment), tmp_path, clock, skew=3600.0)


def test_all_of_it_for_a_hundred_changes(tmp_path: Path) -> None:
    clock = ClockJumps(tmp_path / "clock", SEED)
    with small_disk(tmp_path / "disk") as disk:
        server = on_sqlite(disk, environment=clock.environment)
        turns = InTurn(ConsoleKilled(server), clock, DiskFull(disk))
        run(server, tmp_path, turns, changes=100, every=4, faults=BAD_NETWORK, skew=3600.0)


def test_all_of_it_with_a_database_server_for_a_hundred_changes(tmp_path: Path) -> None:
    clock = ClockJumps(tmp_path / "clock", SEED)
    with postgres_cluster() as cluster:
        url = new_database(cluster)
        server = ConsoleServer(url, "--api-only", *FAILURE_TIMEOUTS, environment=clock.environment)
        turns = InTurn(ConsoleKilled(server), clock, PostgresKilled(url))
        run(server, tmp_path, turns, changes=100, every=4, faults=BAD_NETWORK, skew=3600.0)
