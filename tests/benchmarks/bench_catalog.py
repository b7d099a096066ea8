"""How long catalogs take to make, how large they are, and how quick a look-up in them is.

2,048 workers (64 pipelines x 32 stages x 64 micro-batches) with up to 512 failures, and the grid of
the worked example with every pattern of up to 3. CPU seconds are beside the wall time, which other
work on the machine prolongs.
"""

from __future__ import annotations

import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from openrecycle.planner.catalogs.catalog import StoredCatalog
from openrecycle.planner.catalogs.catalog_build import build_catalog, make_engine
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.layers.migration import best_migrations
from openrecycle.planner.plans.packed import CatalogQuestion, Effort, name_prefix
from tests.benchmarks.machine import describe

PROCESSES = 2
LOOKUPS = 9


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def catalog(job: Job, tolerance: int) -> None:
    question = CatalogQuestion(job, Technique.STAGGERED, MemoryLimit("uniform"))
    with tempfile.TemporaryDirectory() as folder:
        begin, cpu = time.perf_counter(), cpu_seconds()
        engine = make_engine(PROCESSES)
        report = build_catalog(question, tolerance, Path(folder), engine=engine, effort=Effort(solver="list"))
        wall, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
        stored = report.catalog
        names = stored.blobs.names()
        headers = [stored.header(name) for name in names]
        sizes = [len(stored.blobs.get(name) or b"") for name in names]
        grid = f"{job.pipelines} x {job.stages} x {job.micro_batches}"
        optimal = sum(h.solver.status == "optimal" for h in headers)
        print(
            f"{grid}, up to {tolerance} failures: {len(names)} plans in {wall:.1f} s "
            f"({PROCESSES} processes, {cpu:.1f} s of CPU)"
        )
        print(f"  {sum(sizes) / 1e6:.2f} MB in all, the largest plan {max(sizes):,} bytes")
        print(f"  {optimal} proven optimal for their failures, worst gap {max(h.metrics.gap for h in headers):.2%}")
        lookups(stored, range(0, tolerance + 1, max(1, tolerance // LOOKUPS)))


def lookups(stored: StoredCatalog, counts: Sequence[int]) -> None:
    """From an opened catalog: read, and renamed to random pipelines of as many failures on each stage, as a Plan."""
    noise = random.Random(0)
    names = stored.blobs.names()
    stored.find(like(stored, noise, noise.choice(names)))
    times = []
    for count in counts:
        failed = like(stored, noise, noise.choice([n for n in names if n.startswith(name_prefix(count))]))
        begin = time.perf_counter()
        found = stored.find(failed)
        times.append(1000 * (time.perf_counter() - begin))
        assert found is not None
    print(f"  look-up of a plan: median {statistics.median(times):.1f} ms, longest {max(times):.1f} ms")


def like(stored: StoredCatalog, noise: random.Random, name: str) -> list[Worker]:
    """Failures that a stored plan is for but for the names of pipelines, on each stage other ones."""
    pipelines = range(stored.question.job.pipelines)
    return [
        Worker(p, s) for s, dead in enumerate(stored.header(name).failed) for p in noise.sample(pipelines, len(dead))
    ]


def survivable(job: Job, noise: random.Random, workers: list[Worker], count: int) -> list[Worker]:
    """Random failures that leave each stage a living worker."""
    while True:
        failed = noise.sample(workers, count)
        if all(sum(w.stage == s for w in failed) < job.pipelines for s in range(job.stages)):
            return failed


def migrations(job: Job, failures: int) -> None:
    failed = survivable(job, random.Random(1), list(job.workers()), failures)
    begin = time.perf_counter()
    result = best_migrations(job, failed)
    print(
        f"migrations for {failures} failures on {job.pipelines} x {job.stages}: {time.perf_counter() - begin:.2f} s; "
        f"{result.reason}"
    )


def main() -> None:
    print(describe())
    large, small = Job.uniform(64, 32, 64), Job.uniform(3, 4, 6)
    catalog(small, 3)
    catalog(large, 512)
    migrations(small, 3)
    migrations(large, 40)
    print(describe())


if __name__ == "__main__":
    main()
