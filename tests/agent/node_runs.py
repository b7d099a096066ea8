"""Two launchers on this machine as two nodes of a job, each in a process group of its own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.agent.launches import Launched
from tests.agent.runs import GRID, ITERATIONS, TINY


def free_port() -> int:
    """One that the system gives nobody who asks for any: until the launcher listens there, another test's would."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.randbelow(lowest_given - 10_000) + 10_000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start(log: Path, *command: str, **env: str) -> subprocess.Popen[bytes]:
    """In a process group of its own, which is the node."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **env},
        )


def launch_node(log: Path, *arguments: str, **env: str) -> Launched:
    """As `start` of `openrecycle train`, in a process that need not import torch first."""
    return Launched("train", *arguments, errors=log, alone=True, environment=env)


def kill_group(process: subprocess.Popen[bytes] | Launched) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def two_nodes(folder: Path, *options: str) -> Iterator[tuple[Launched, Launched]]:
    """(lead, node). The lead's record is folder/run.jsonl."""
    place = ("--nodes", "2", "--lead", f"127.0.0.1:{free_port()}")
    job = (*GRID, *TINY, "--iterations", str(ITERATIONS), *place, *options)
    lead = launch_node(folder / "lead.log", *job, "--node-rank", "0", "--record", str(folder / "run.jsonl"))
    node = launch_node(folder / "node.log", *job, "--node-rank", "1")
    try:
        yield lead, node
    finally:
        kill_group(lead)
        kill_group(node)


def lines(folder: Path, name: str = "run.jsonl") -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            out.append(int(stat.parent.name))
    return out
