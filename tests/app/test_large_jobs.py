"""Jobs of as many workers as the console takes, of every shape: nobody else waits for them, nor does a restart."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from typer.testing import CliRunner

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.cli import cli
from openrecycle.app.console.service import MAX_WORKERS, ConsoleService
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.store import Store
from tests.app.console_server import ConsoleServer, ForkedConsole
from tests.benchmarks.bench_api_stall import SHAPES, measure
from tests.conftest import at_length, new_database
from tests.databases import sqlite_in
from tests.golden import golden

pytestmark = pytest.mark.processes

# What tests beside this one may take from the processor; measured alone, nothing takes 0.5 s (bench_api_stall).
GENEROUS = 5.0


def body(pipelines: int, stages: int, micro_batches: int = 1) -> dict[str, object]:
    grid = {"pipelines": pipelines, "stages": stages, "micro_batches": micro_batches}
    return {"name": "x", "iterations": 5, **grid}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ConsoleServer]:
    server = ForkedConsole(f"sqlite:///{tmp_path / 'console.db'}", "--api-only")
    yield server
    server.close()


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("large jobs")
def test_long_pipelines_stop_neither_the_console_nor_its_next_start(server: ConsoleServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post("/jobs", body(1, 4096)), range(8)))
    assert [answer.status_code for answer in answers] == [201] * 8
    job = answers[0].json()["job_id"]
    for path in ("/healthz", "/readyz", "/api/v1/jobs", f"/api/v1/jobs/{job}"):
        assert requests.get(server.root + path, timeout=GENEROUS).status_code == 200
    assert server.stop() < 15
    begin = time.monotonic()
    server.start()
    assert time.monotonic() - begin < 60
    assert requests.get(f"{server.root}/readyz", timeout=GENEROUS).status_code == 200
    assert len(server.get("/jobs").json()["jobs"]) == 8


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("large jobs")
@pytest.mark.parametrize(("pipelines", "stages"), [*itertools.starmap(at_length, SHAPES)])
def test_no_answer_waits_for_jobs_that_are_created(server: ConsoleServer, pipelines: int, stages: int) -> None:
    asker, _ = measure(server, pipelines, stages, jobs=3)
    assert asker.refused == []
    assert min(map(len, asker.answers.values())) > 0
    waits = {path: max(times) for path, times in asker.answers.items()}
    assert max(waits.values()) < GENEROUS, waits


def test_a_catalog_that_takes_long_holds_up_no_other_answer(server: ConsoleServer) -> None:
    job = server.post("/jobs", body(2, 4096)).json()["job_id"]

    def ask(tolerance: int) -> int:
        path = f"{server.base}/jobs/{job}/catalog"
        return requests.get(path, params={"tolerance": tolerance}, timeout=200).status_code

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(2, 18)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert requests.get(f"{server.root}/readyz", timeout=GENEROUS).status_code == 200
    assert server.stop() < 15


def test_workers_of_all_live_jobs_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrecycle.app.console.service.MAX_LIVE_WORKERS", 20)
    database = sqlite_in(tmp_path)
    console = ConsoleService(Store(database), tolerance=0)
    try:
        spec = JobSpec.model_validate(body(4, 4))
        first, _ = console.jobs.create(spec, "its key")
        with pytest.raises(ConsoleError, match="at most 20") as refused:
            console.jobs.create(spec)
        assert (refused.value.status, refused.value.code) == (409, "full")
        assert console.jobs.create(spec, "its key") == (first, False), "whoever knows the job may join it"
        console.jobs.let_go(first.job_id)
        console.jobs.create(spec)
    finally:
        console.close()
        database.close()


def test_a_grid_beyond_the_limit_is_refused(server: ConsoleServer) -> None:
    for pipelines, stages in ((1, MAX_WORKERS + 1), (MAX_WORKERS, 2), (129, 128)):
        assert server.post("/jobs", body(pipelines, stages)).status_code == 422


@pytest.mark.parametrize("backend", [at_length("sqlite"), at_length("postgresql")])
def test_a_job_of_a_console_that_is_down_can_be_deleted(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whether it has ended or was killed; beside a console that runs it is refused."""
    sqlite = f"sqlite:///{tmp_path / 'console.db'}"
    url = sqlite if backend == "sqlite" else new_database(request.getfixturevalue("postgres_url"))
    server = ForkedConsole(url, "--api-only")
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            job = server.post("/jobs", body(1, 64)).json()["job_id"]
            delete = ["delete", "--job", job, "--database-url", url]
            refused = CliRunner().invoke(cli, delete)
            assert refused.exit_code == 2
            assert golden("a-console-runs-on-this") in refused.output
            server.stop(number)
            done = CliRunner().invoke(cli, delete)
            assert done.exit_code == 0, done.output
            again = CliRunner().invoke(cli, delete)
            assert again.exit_code == 2 and golden("expected-the-id-of-a") in again.output
            server.start()
            assert server.get(f"/jobs/{job}").status_code == 404
    finally:
        server.close()
