"""What the history of a job costs: bytes per worker and day at each level, and processor time per second of
2,048 workers that report once a second, on SQLite and PostgreSQL.

Op times vary by 2 % from heartbeat to heartbeat, memory by some pages: noise that does not pack. Bytes
are of the blocks, and of the tables with all that the database adds. Processor time is that of this
process, which on SQLite is all there is.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import text

from openrecycle.agent.messages.protocol import Heartbeat, JobSpec
from openrecycle.app.jobs.measurements import Recording
from openrecycle.app.observing.history import export, import_history
from openrecycle.app.runtime.settings import RetentionLimits
from openrecycle.db.heartbeats import (
    GROUP,
    METRICS,
    HeartbeatStore,
    Level,
    Samples,
    from_beats,
    groups,
    joined,
    pack,
    rolled_up,
)
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.benchmarks.machine import describe
from tests.conftest import new_database, postgres_cluster
from tests.databases import history_bytes

WORKERS, STAGES, MINUTES, HOURS, DAY = 2048, 32, 60, 24, 86_400
BEGIN = 1_700_000_000 // DAY * DAY
ITERATIONS = 20_000


def main() -> None:
    print(describe())
    print(f"a heartbeat on its way into the history: {1e6 * recording_seconds():.2f} us")
    with tempfile.TemporaryDirectory() as folder:
        measure("SQLite", f"sqlite:///{folder}/console.db", Path(folder))
        with postgres_cluster() as server:
            measure("PostgreSQL", new_database(server), Path(folder))
    print(describe())


def recording_seconds() -> float:
    """Processor seconds per heartbeat."""
    names = [f"W{i // STAGES}_{i % STAGES}" for i in range(WORKERS)]
    ops = {"F": 40.1, "I": 42.2, "W": 39.3, "O": 5.4}
    fields = {"generation": 1, "iteration": 7, "phase": "training", "op_milliseconds": ops, "resident_bytes": 2**31}
    beats = [Heartbeat(worker=n, incarnation="a", seq=1, **fields) for n in names]  # type: ignore[arg-type]
    recording = Recording(names, STAGES)

    def take() -> None:
        for second in range(60):
            recording.take((beat, float(second)) for beat in beats)

    return processor(take) / (60 * WORKERS)


def measure(name: str, url: str, folder: Path) -> None:
    database = Database(url)
    database.upgrade()
    store, history = Store(database), HeartbeatStore(database)
    spec = JobSpec(name="job", pipelines=WORKERS // STAGES, stages=STAGES, micro_batches=STAGES, iterations=10**9)
    workers = [{"name": f"W{i // STAGES}_{i % STAGES}", "state": "running"} for i in range(WORKERS)]
    store.create_job("job", name="job", spec=spec.model_dump_json(), state="finished", created_at=1, workers=workers)
    before = size(database)

    minutes = [minute_of(BEGIN + 60 * i) for i in range(MINUTES)]

    def write() -> None:
        for part in (part for minute in minutes for part in batches(minute)):
            history.add("job", part)

    writing = processor(write) / (60 * MINUTES)
    sizes = history_bytes(database, "job")
    print(f"{name}: an hour of {WORKERS:,} workers written with {100 * writing:.2f} % of a core")
    second = sizes[Level.SECOND] / (WORKERS * 60 * MINUTES)
    loose = sizes[Level.MINUTE] / (WORKERS * MINUTES)
    hour_in_parts = (size(database) - before) / WORKERS
    spans = history.spans_to_pack(BEGIN + 3600 + 120, 10**6)

    def pack_all() -> None:
        for span in spans:
            history.pack(span)

    packing = processor(pack_all) / 3600
    sizes = history_bytes(database, "job")
    minute = sizes[Level.MINUTE] / (WORKERS * MINUTES)
    print(f"  its minutes made one block each: {100 * packing:.2f} % of a core")
    # Of a day's hours one minute each: they vary more than whole hours do.
    hours = joined([replace(rolled_up(m[0], Level.HOUR), at=_at(h)) for h, m in enumerate(minutes[:HOURS])])
    hour_bytes = len(pack(hours)) / len(hours)
    keep = RetentionLimits()
    kept = {
        "1 s": (second, second * DAY, second * keep.seconds),
        "1 min": (minute, minute * DAY / 60, minute * keep.minutes / 60),
        "1 h": (hour_bytes, hour_bytes * DAY / 3600, hour_bytes * keep.hours / 3600),
    }
    for level, (sample, day, bound) in kept.items():
        growth, most = f"{day / 1e3:.1f} kB per worker-day", f"at most {bound / 1e3:.0f} kB a worker"
        print(f"  {level}: {sample:.1f} B a sample, {growth}, {most}")
    added = hour_in_parts / (60 * MINUTES * second + MINUTES * loose)
    print(f"  minutes before they are one block: {loose:.1f} B; the tables and indexes: {added:.2f} x their blocks")
    bound = sum(b for _, _, b in kept.values())
    print(
        f"  all levels: at most {bound / 1e3:.0f} kB a worker, {bound * WORKERS / 1e6:.0f} MB for {WORKERS:,} workers"
    )

    ask = partial(history.read, "job", Level.SECOND, since=BEGIN, until=BEGIN + 900)
    reads = [timed(partial(ask, worker=worker)) for worker in range(0, WORKERS, 97)]
    print(f"  15 min of one worker's seconds read in {1000 * float(np.median(reads)):.0f} ms")
    rows_of_job(name, store, database, folder)
    database.close()


def rows_of_job(name: str, store: Store, database: Database, folder: Path) -> None:
    before = size(database)
    for first in range(0, ITERATIONS, 1000):
        numbers = range(first, first + 1000)
        rows: list[dict[str, Any]] = [
            {
                "iteration": i,
                "loss": 1 / (i + 1),
                "loss_hex": (1 / (i + 1)).hex(),
                "seconds": 1 + 1e-7 * i,
                "generation": 1,
            }
            for i in numbers
        ]
        store.add_iterations("job", [{**r, "living": WORKERS, "committed_at": BEGIN + r["iteration"]} for r in rows])
    each = (size(database) - before) / ITERATIONS
    print(f"  an iteration: {each:.0f} B; one a second: {each * DAY / 1e6:.1f} MB a day, whatever the workers")
    file = folder / f"{name}.zip"
    seconds = timed(lambda: export(database, "job", file))
    print(f"  exported in {seconds:.1f} s, {file.stat().st_size / 1e6:.1f} MB with {ITERATIONS:,} iterations")
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = timed(lambda: import_history(database, file, new_id="copy", rest=lambda _: None))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) / 1024
    print(f"  checked and imported in {seconds:.1f} s; the process grew by {grown:.0f} MiB")


def minute_of(begin: int) -> list[Samples]:
    """A minute of all workers, by group."""
    noise = np.random.default_rng(begin)
    n = WORKERS * 60
    rows = np.full((n, 4 + len(METRICS)), np.nan)
    rows[:, 0] = np.repeat(np.arange(WORKERS), 60)
    rows[:, 1] = np.tile(np.arange(60), WORKERS) + begin + 0.3 + noise.normal(0, 0.02, n)
    rows[:, 2], rows[:, 3] = (rows[:, 1] - BEGIN) // 2, 3
    for column, usual in ((4, 40.0), (5, 42.0), (6, 39.0), (8, 5.0)):
        rows[:, column] = usual * (1 + noise.normal(0, 0.02, n))
    rows[:, 9] = 2**31 + rows[:, 0] * 1e6 + noise.integers(0, 50, n) * 2**18
    rows[:, 10] = 1 + noise.normal(0, 0.01, n)
    return list(groups(from_beats(rows)))


def _at(hour: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.full(GROUP, BEGIN + 3600 * hour)


def batches(parts: list[Samples], size: int = 8) -> Iterator[list[Samples]]:
    for i in range(0, len(parts), size):
        yield parts[i : i + size]


def size(database: Database) -> int:
    """Bytes of all tables and indexes."""
    with database.engine.connect() as connection:
        if database.is_sqlite:
            pages, free, each = (
                connection.scalar(text(f"pragma {what}")) or 0 for what in ("page_count", "freelist_count", "page_size")
            )
            return int((pages - free) * each)
        total = "select sum(pg_total_relation_size(oid)) from pg_class where relkind = 'r' and relname !~ '^(pg|sql)_'"
        return int(connection.scalar(text(total)) or 0)


def processor(function: Callable[[], object]) -> float:
    """Seconds of all of this process's threads."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
