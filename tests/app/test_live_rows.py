"""What Live's charts send: the rows as they are, and nothing where nothing has changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
import ui_factory as factory
from ui_console import ConsoleHere, JobHere, until

from openrecycle.app.charts.progress import generation_marks, progress_rows, throughput, worker_grid
from openrecycle.app.charts.theme import LIGHT
from openrecycle.app.charts.vega import arrow
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import generation_row
from openrecycle.db.store import JobUpdate

pytestmark = pytest.mark.processes


def test_a_quiet_grid_is_not_sent_again() -> None:
    """Streamlit sends a chart again if a byte of it differs, and 2,048 workers take 55 kB."""

    def grid(iteration: int, *, age: float = 0.4, late: int = 0) -> bytes:
        view = factory.large()
        workers = [
            replace(w, iteration=iteration, heartbeat_age=age + (i % 7) / 10) for i, w in enumerate(view.workers)
        ]
        workers[5] = replace(workers[5], iteration=iteration - late)
        return arrow(worker_grid(replace(view, workers=tuple(workers)), LIGHT).rows)

    quiet = grid(30)
    assert len(quiet) < 60_000
    assert grid(31, age=1.1, late=1) == quiet, "another iteration, other moments of it"
    assert grid(31, age=6.0) != quiet != grid(31, late=2)


def test_rows_come_out_of_arrow_as_they_went_in() -> None:
    view = factory.failed()
    progress = progress_rows(
        view.iterations, generation_marks(view.iterations, view.recoveries, view.generations), 36.7
    )
    for chart in (worker_grid(view, LIGHT), throughput(progress, LIGHT)):
        read = pa.ipc.open_stream(arrow(chart.rows)).read_all().to_pydict()
        for name, values in chart.rows.items():
            expected = [None if isinstance(v, float) and np.isnan(v) else v for v in np.asarray(values).tolist()]
            assert read[name] == expected, name


def test_all_who_look_at_a_large_job_within_a_second_share_what_they_see(console: ConsoleService) -> None:
    job = JobHere(console, "shared").register().commit(0, 9, 1)
    own = console.queries.view(job.job_id).workers
    assert console.queries.view(job.job_id).workers is not own, "of a small one everybody sees the newest"
    console.queries.shared, console.queries.shared_seconds = 12, 1e9

    def shared() -> bool:
        return console.queries.view(job.job_id).workers is console.queries.view(job.job_id, 5, 5).workers

    until(shared, "nothing more is stored, as of plans that are made ahead")
    job.die("W1_2")
    assert {w.name: w.state for w in console.queries.view(job.job_id).workers}["W1_2"] == "failed", (
        "what is stored is seen"
    )
    console.queries.shared_seconds = 0.0
    job.resume(2)  # what is kept is of another state
    assert console.queries.view(job.job_id).workers is not console.queries.view(job.job_id).workers


def test_of_generations_that_commit_nothing_none_is_read(here: ConsoleHere) -> None:
    """A job may form anew for days: of 20,000 of them no mark was made, and all were read at each look."""
    console = here.console
    job = JobHere(console, "forming anew").register().commit(0, 9, 1).die("W1_2").commit(10, 12, 2)
    live = console.jobs.find(job.job_id)
    current = live.state.current
    assert current is not None and current.number == 2
    for number in range(3, 9):
        row = generation_row(replace(current, number=number))
        here.store.apply(job.job_id, JobUpdate(generation=row))
    live.stored()
    view = console.queries.view(job.job_id)
    assert [g.generation for g in view.generations] == [2]
    assert [mark.iteration for mark in generation_marks(view.iterations, (), view.generations)] == [10]
