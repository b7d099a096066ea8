"""No token reaches a worker: its launcher reports for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import multiprocessing, os, subprocess
from openrecycle.agent.launcher.processes import start_worker_server

start_worker_server([])
worker = multiprocessing.get_context("forkserver").Process(target=subprocess.check_call, args=(["env"],))
worker.start()
worker.join()
print("still", os.environ["OPENRECYCLE_TOKEN"])
raise SystemExit(worker.exitcode)
"""


@pytest.mark.processes
def test_workers_are_forked_without_the_token_in_their_environment() -> None:
    environment = {**os.environ, "OPENRECYCLE_TOKEN": "an-operators-token", "FOR_WORKERS": "as well"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    inherited, _, own = done.stdout.rpartition("still ")
    assert own.strip() == "an-operators-token"
    assert "FOR_WORKERS=as well" in inherited
    assert "OPENRECYCLE_TOKEN" not in inherited
