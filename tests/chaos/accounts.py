"""What must be true of a job that was disturbed, when it is over."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

from tests.agent.local_jobs import LocalJob
from tests.chaos.chaotic_job import MICRO_BATCHES, NAMES, PIPELINES, STAGES, ChaoticJob


@functools.cache
def undisturbed(iterations: int) -> LocalJob:
    """The same job when nothing happens to it."""
    return LocalJob(pipelines=PIPELINES, stages=STAGES, micro_batches=MICRO_BATCHES, iterations=iterations).run()


def pages(job: ChaoticJob, what: str, number: str, after: int) -> list[dict[str, Any]]:
    """Every row, page by page. number: the column that counts them; after: the one before the first."""
    rows: list[dict[str, Any]] = []
    while page := job.book(f"/{what}?after={after}&limit=500")[what]:
        rows += page
        after = page[-1][number]
    return rows


def check(job: ChaoticJob) -> None:
    """No bit differs, and the console's books account for everything once."""
    plain, seed = undisturbed(job.iterations), f"seed {job.seed}"
    assert job.losses == plain.losses, seed
    assert [job.final] == [line["final"] for line in plain.lines if "final" in line], seed

    iterations = pages(job, "iterations", "iteration", -1)
    assert [row["iteration"] for row in iterations] == list(range(job.iterations)), seed
    assert [row["loss_hex"] for row in iterations] == plain.losses, seed

    generations = job.book("/generations")["generations"]
    assert [row["generation"] for row in generations] == list(range(1, len(generations) + 1)), seed
    for row in generations:
        assert sorted((*row["living"], *row["failed"])) == sorted(NAMES), (seed, row)
    # Each iteration ran in one generation, which had as many members as it says, and generations follow one another.
    ran = [row["generation"] for row in iterations]
    assert ran == sorted(ran) and set(ran) <= {row["generation"] for row in generations}, seed
    assert all(row["living"] == len(generations[row["generation"] - 1]["living"]) for row in iterations), seed

    events = pages(job, "events", "seq", 0)
    assert [row["seq"] for row in events] == list(range(1, len(events) + 1)), seed
    opened = [
        int(found[1])
        for row in events
        if row["kind"] == "generation" and (found := re.match(r"generation (\d+)", row["text"]))
    ]
    assert opened == [row["generation"] for row in generations], seed
    lost = Counter(row["worker"] for row in events if row["text"].startswith(f"{row['worker']} failed: "))
    assert lost == job.deaths, seed
    asked = Counter(row["worker"] for row in events if row["text"].endswith(f" asked {row['worker']} to leave"))
    assert asked == job.left, seed
