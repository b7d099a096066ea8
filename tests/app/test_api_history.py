"""Whole jobs over the API and the command line: out, in, and away, beside a console that runs."""

from __future__ import annotations

import io
import time
import zipfile
from pathlib import Path

import pytest
from console_server import Agents, ConsoleServer
from history_job import SPEC
from typer.testing import CliRunner, Result

from openrecycle.app.cli import cli
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.conftest import at_length
from tests.databases import sqlite_in
from tests.golden import golden

pytestmark = pytest.mark.processes


@pytest.fixture
def ended(server: ConsoleServer) -> Agents:
    """A job that has run and is over."""
    agents = Agents(server, pipelines=2, stages=3, micro_batches=2)
    agents.register_all()
    agents.resume(agents.names, 1)
    agents.heartbeat("W1_2", op_milliseconds={"F": 12.5}, resident_bytes=2**30)
    iteration = {"iteration": 0, "loss": 0.5, "loss_hex": (0.5).hex(), "seconds": 0.1, "generation": 1, "living": 6}
    assert agents.server.post(agents.path("/iterations"), {"iterations": [iteration]}).status_code == 204
    end = time.monotonic() + 150  # plans are made at the lowest priority: on a busy machine they wait
    while (job := agents.job())["planned_ahead"] < job["plans_to_make"]:  # none is stored while it is read
        assert time.monotonic() < end
        time.sleep(0.1)
    assert agents.server.post(agents.path("/finish"), {"state": "finished"}).status_code == 204
    return agents


def run(database_url: str, *arguments: str) -> Result:
    """`python -m app`, in this process."""
    return CliRunner().invoke(cli, list(arguments), env={"DATABASE_URL": database_url})


def status(server: ConsoleServer, job_id: str) -> int:
    return server.get(f"/jobs/{job_id}").status_code


def wait_for(server: ConsoleServer, job_id: str, wanted: int) -> None:
    end = time.monotonic() + 60
    while status(server, job_id) != wanted:
        assert time.monotonic() < end, f"job {job_id} did not answer {wanted}"
        time.sleep(0.1)


@pytest.mark.parametrize("server", ["sqlite", at_length("postgresql")], indirect=True)
def test_out_away_and_in_again(ended: Agents, tmp_path: Path) -> None:
    server, job_id, file = ended.server, ended.job_id, tmp_path / "job.zip"

    def imported(*more: str) -> Result:
        return run(server.database_url, "import", str(file), *more)

    before = {
        what: server.get(ended.path(what)).json() for what in ("/events", "/iterations", "/generations", "/plans")
    }
    answer = server.get(ended.path("/history.zip"))
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/zip"
    assert f'filename="{job_id}-history.zip"' in answer.headers["content-disposition"]
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None and "manifest.json" in archive.namelist()
    file.write_bytes(answer.content)
    refused = imported()
    assert refused.exit_code == 2 and golden("is-not-overwritten") in refused.stderr, refused.output
    assert server.session.delete(server.base + ended.path(), timeout=30).status_code == 202
    assert status(server, job_id) == 404
    assert server.session.delete(server.base + ended.path(), timeout=30).status_code == 404
    done = imported()
    assert done.exit_code == 0 and done.stdout.startswith(f"job {job_id}: "), done.output
    wait_for(server, job_id, 200)
    assert {what: server.get(ended.path(what)).json() for what in before} == before
    assert ended.job()["state"] == "finished"
    assert imported("--as", f"{job_id}-copy").exit_code == 0
    wait_for(server, f"{job_id}-copy", 200)
    assert server.get(f"/jobs/{job_id}-copy/iterations").json() == before["/iterations"]
    assert imported("--as", "no id").exit_code == 2


def test_what_the_api_refuses(agents: Agents) -> None:
    server = agents.server
    for register in (lambda: agents.register(agents.names[0]), agents.register_all):
        register()
        alive = server.session.delete(server.base + agents.path(), timeout=30)
        assert alive.status_code == 409 and alive.json()["code"] == "job_runs"
    assert status(server, agents.job_id) == 200
    assert server.get("/jobs/nobody/history.zip").json()["code"] == "unknown_job"


def test_what_heartbeats_brought(agents: Agents) -> None:
    agents.register_all()
    for forward in (10.0, 30.0):
        agents.heartbeat("W1_2", op_milliseconds={"F": forward}, resident_bytes=2**30)
    path = agents.path("/workers/W1_2/history")
    end = time.monotonic() + 30
    while sum((series := agents.server.get(path).json()["series"])["beats"]) < 2:
        assert time.monotonic() < end, series
        time.sleep(0.05)
    assert series["step"] == 1 and max(series["metrics"]["F"]["high"]) == 30
    assert set(series["metrics"]) == {"F", "resident_bytes", "silence_seconds"}
    minutes = agents.server.get(path, params={"step": "minute"}).json()["series"]
    assert minutes["step"] == 60 and sum(minutes["beats"]) == 2
    long_ago = agents.server.get(path, params={"since": 1e9, "until": 1e9 + 60}).json()["series"]
    assert long_ago["step"] == 3600 and long_ago["at"] == []
    for wrong in ({"since": "soon"}, {"since": -1}, {"until": 5, "since": 7}, {"step": "day"}, {"since": "nan"}):
        assert agents.server.get(path, params=wrong).status_code == 422, wrong


@pytest.mark.parametrize("server", ["sqlite", at_length("postgresql")], indirect=True)
def test_the_command_line_beside_a_console(ended: Agents, tmp_path: Path) -> None:
    server, file, copy = ended.server, str(tmp_path / "job.zip"), f"{ended.job_id}-cli"
    url = server.database_url
    done = run(url, "export", "--job", ended.job_id, "--out", file)
    assert done.exit_code == 0 and done.stdout.startswith(f"{file}: job {ended.job_id}, "), done.output
    done = run(url, "import", file, "--as", copy)
    assert done.exit_code == 0 and done.stdout.startswith(f"job {copy}: "), done.output
    wait_for(server, copy, 200)
    assert server.get(f"/jobs/{copy}/iterations").json() == server.get(ended.path("/iterations")).json()
    assert run(url, "delete", "--job", copy).exit_code == 0
    wait_for(server, copy, 404)
    assert status(server, ended.job_id) == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "--job", "nobody", "--out", "{}/a.zip"), "--job: got 'nobody',"),
        (("import", "{}/nothing.zip"), golden("nothing-zip-cant-be-read")),
        (("import", "{}"), golden("cant-be-read-is-a")),
        (("import", "{}/console.db"), golden("file-it-is-not-a")),
        (("delete", "--job", "nobody"), "--job: got 'nobody'"),
        (("serve", "--port", "0", "--keep-minutes", "5m"), "--keep-minutes: got 300 s,"),
        (("serve", "--port", "0", "--keep-hours", "long"), "--keep-hours: got 'long',"),
    ],
)
def test_what_the_command_line_refuses(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    url = f"sqlite:///{tmp_path / 'console.db'}"
    sqlite_in(tmp_path).close()
    done = run(url, *(a.replace("{}", str(tmp_path)) for a in arguments))
    assert done.exit_code == 2 and words in done.stderr and not done.stdout, done.output
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'console.db'}"
    database = Database(url)
    database.upgrade()
    Store(database).create_job(
        "job", name="n", spec=SPEC.model_dump_json(), state="finished", created_at=1.5, workers=[]
    )
    database.close()
    done = run(url, "export", "--job", "job", "--out", str(tmp_path / "no" / "a.zip"))
    assert done.exit_code == 2 and golden("expected-a-file-in-a") in done.stderr, done.output
