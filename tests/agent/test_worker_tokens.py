"""Workers get the token of their job, and no other reaches them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from openrecycle.agent.nodes.frames import Frames, NotTrusted, greet

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import multiprocessing, os, subprocess
from openrecycle.agent.processes import start_server

start_server([])
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


@pytest.fixture
def pair() -> tuple[Frames, Frames]:
    """The two ends of a trusted connection."""
    made = dict[str, Frames]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname()[:2], timeout=30)
        connection, _ = server.accept()
    node = threading.Thread(target=lambda: made.update(node=greet(other, "shared", "node")))
    node.start()
    lead = greet(connection, "shared", "lead")
    node.join(30)
    return lead, made["node"]


def test_a_token_travels_sealed(pair: tuple[Frames, Frames]) -> None:
    lead, node = pair
    token = "orc_0123456789ab_" + "x" * 43
    sealed = lead.seal(token)
    assert token not in bytes.fromhex(sealed).decode("latin-1")
    assert node.unseal(sealed) == token
    assert lead.seal(token) != sealed
    with pytest.raises(NotTrusted, match="can't be read"):
        node.unseal("no hexadecimal")
    lead.close()
    node.close()
