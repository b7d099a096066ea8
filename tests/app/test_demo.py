"""`openrecycle demo` says what is wrong with a job, and leaves nothing running."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import at_length

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "65536"], "--port: got 65536"),
        (["--pace", "soon"], "--pace: got 'soon'"),
        at_length(["--layers", "3"], "layers: got 3"),
        at_length(["--pipelines", "0"], "pipelines: got 0"),
    ],
)
def test_a_wrong_job_is_refused(arguments: list[str], named: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    database = tmp_path / "console.db"
    command = [sys.executable, "-m", "app", "demo", "--database-url", f"sqlite:///{database}", "--port", port]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2 and named in done.stderr
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))), "the console has ended, too"
