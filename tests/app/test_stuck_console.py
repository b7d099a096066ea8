"""A console of which a thread hangs: whoever watches over it is told, and it ends all the same."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from console_server import ROOT
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import until

from openrecycle.app.console.service import ConsoleService
from openrecycle.app.runtime import runner
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.server import create_routes
from openrecycle.db.store import Store
from tests.conftest import at_length
from tests.databases import sqlite_in

pytestmark = pytest.mark.processes

HANGING = """
import sys, threading, time
from openrecycle.app.runtime import runner
from openrecycle.app.server import serve
from openrecycle.app.runtime.settings import Settings
import openrecycle.app.server
openrecycle.app.server.END_SECONDS = 2.0

def hang(settings):
    runner._pool._pool.submit(time.sleep, 600)
    if sys.argv[2] == "loop":
        # The event loop too, shortly after it has said that it is ready.
        import asyncio
        asyncio.get_running_loop().call_later(0.5, time.sleep, 600)
    print("hangs", flush=True)

serve(Settings(port=0, database_url=sys.argv[1], api_only=True), on_ready=hang)
"""


@pytest.mark.parametrize(
    ("what", "number"),
    [
        at_length("thread", signal.SIGTERM),
        ("loop", signal.SIGINT),
        at_length("thread", signal.SIGINT),
        at_length("loop", signal.SIGTERM),
    ],
)
def test_it_ends_in_time_whatever_hangs(tmp_path: Path, what: str, number: int) -> None:
    command = [sys.executable, "-c", HANGING, f"sqlite:///{tmp_path / 'console.db'}", what]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("hangs" in line for line in process.stdout)
            time.sleep(1.5 if what == "loop" else 0)  # for the loop to hang, too
            process.send_signal(number)
            process.wait(30)
        finally:
            process.kill()


def end_thread() -> NoReturn:
    raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_that_stand_still_are_said_to_whoever_starts_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = sqlite_in(tmp_path)
    console = ConsoleService(Store(database), tolerance=0)
    console.start()
    release = threading.Event()
    threads = runner.Threads(2, "some threads")
    monkeypatch.setattr(runner, "new_job_threads", threads)
    asked = TestClient(Starlette(routes=create_routes(console)))
    try:
        assert asked.get("/healthz").json() == {"status": "ok"}

        async def hang(how_many: int) -> None:
            began = threading.Barrier(how_many + 1)

            def hold() -> None:
                began.wait(10)
                release.wait()

            hanging = [asyncio.ensure_future(threads.run(hold)) for _ in range(how_many)]
            await asyncio.to_thread(began.wait, 10)
            threads.stuck_seconds = 0.0
            stuck.append(threads.stuck)
            if how_many == 2:
                answer = await asyncio.to_thread(asked.get, "/healthz")
                assert (answer.status_code, answer.json()["code"]) == (503, "stuck")
                assert answer.headers["retry-after"] == "1"
                assert "some threads" in answer.json()["detail"]
            threads.stuck_seconds = runner.STUCK_SECONDS
            release.set()
            await asyncio.gather(*hanging)
            release.clear()

        stuck: list[bool] = []
        asyncio.run(hang(1))
        asyncio.run(hang(2))
        assert stuck == [False, True], "one that is left can still work"
        assert asked.get("/healthz").status_code == 200
        with monkeypatch.context() as ending:
            ending.setattr(console.jobs, "live", end_thread)
            until(lambda: asked.get("/healthz").status_code == 503, "the one that looks for silent workers is gone")
    finally:
        release.set()
        console.close()
        database.close()


def test_more_exports_than_are_made_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, release = runner.Threads(2, "exports"), threading.Event()
    monkeypatch.setattr(runner, "export_threads", threads)

    async def ask() -> None:
        made = [asyncio.ensure_future(runner.exporting(release.wait)) for _ in range(2)]
        await asyncio.sleep(0)  # each has its place
        with pytest.raises(ConsoleError) as refused:
            await runner.exporting(release.wait)
        assert (refused.value.status, refused.value.code) == (429, "too_many")
        assert await runner.in_thread(lambda: 1) == 1, "others have threads"
        release.set()
        assert await asyncio.gather(*made) == [True, True]
        assert await runner.exporting(release.wait), "there is room again"

    asyncio.run(ask())
