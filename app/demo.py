"""`openrecycle demo`: a console and a real training job on this machine.

It starts two child processes, the console's server and the job's launcher. Both end with this one, however it ends: it
ends them on Ctrl-C and SIGTERM, and the kernel does if this process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import requests

from openrecycle.agent.messages.protocol import API
from openrecycle.app.runtime.errors import SettingsError
from openrecycle.app.runtime.processes import LEVEL
from openrecycle.app.runtime.settings import Settings

_PR_SET_PDEATHSIG = 1
# A busy machine may take long to import torch a dozen times.
_START_SECONDS = 300.0
_END_SECONDS = 8.0


@dataclass(frozen=True)
class DemoOptions:
    """The options of a demo. settings: the console's. serve, launch: further arguments for `openrecycle serve` and
    `openrecycle train`."""

    settings: Settings
    serve: tuple[str, ...]
    launch: tuple[str, ...]


def run(options: DemoOptions, say: Callable[[str], None]) -> int:
    """Runs until Ctrl-C or until one of the two ends; returns the exit status.

    say: called with each line for the user. Raises SettingsError when it can't start.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    settings = replace(options.settings, port=_free_port(options.settings.host, options.settings.port))
    host, port, address = settings.host, settings.port, settings.address
    job = ["train", "--console", address, "--demo", *options.launch]
    children: dict[str, subprocess.Popen[bytes]] = {}
    began = time.monotonic()
    try:
        say(f"starting the console at {address}, and the training processes ...")
        # Both start at the same time, since each takes a processor for some seconds. The job checks its options before
        # it needs the console, and then waits for it.
        children["console"] = _start(["serve", "--host", host, "--port", str(port), *options.serve])
        children["training job"] = _start(job)
        if not _wait(f"{address}/healthz", children, ended, lambda answer: answer.status_code == 200):
            return _outcome(children, ended)
        say(f"console ready ({time.monotonic() - began:.1f} s)")
        if not _wait(f"{address}{API}/jobs", children, ended, _trains):
            return _outcome(children, ended)
        say(f"training ({time.monotonic() - began:.1f} s)")
        say("")
        say(f"  Open {address}")
        say("")
        say("  Kill a worker there and watch the job heal. Ctrl-C ends everything.")
        while not ended.wait(0.3):
            if any(child.poll() is not None for child in children.values()):
                break
        return _outcome(children, ended)
    finally:
        _end(children)
        if ended.is_set():
            say("stopped; no process is left")


def _outcome(children: dict[str, subprocess.Popen[bytes]], ended: threading.Event) -> int:
    """Returns 0 if the user ended the demo, or the job is done. Raises SettingsError if a child failed."""
    if ended.is_set():
        return 0
    for name, child in children.items():
        status = child.poll()
        if status is not None and status < 0:
            raise SettingsError(f"the {name} was ended from outside, by {signal.Signals(-status).name}")
        if status is not None and status != 0:
            raise SettingsError(f"the {name} ended with status {status}; what it said of that is above")
    return 0


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    # The children only report problems, on stderr; this process says the rest.
    environment = {LEVEL: "warning", **os.environ}
    # In a session of its own, so that Ctrl-C only reaches this process, which then ends both in order.
    return subprocess.Popen(
        [sys.executable, "-m", "openrecycle", *arguments],
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(
    url: str,
    children: dict[str, subprocess.Popen[bytes]],
    ended: threading.Event,
    good: Callable[[requests.Response], bool],
) -> bool:
    """Waits until `good(answer)`. Returns False if a child has ended or the user ends the demo. Raises SettingsError
    after a while."""
    token = os.environ.get("OPENRECYCLE_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(requests.RequestException, ValueError, LookupError):
            if good(requests.get(url, headers=headers, timeout=2.0)):
                return True
        if ended.wait(0.1) or any(child.poll() is not None for child in children.values()):
            return False
    raise SettingsError(f"{url} gave no good answer within {_START_SECONDS:.0f} s")


def _trains(answer: requests.Response) -> bool:
    jobs: list[dict[str, Any]] = answer.json()["jobs"]
    return any(job["state"] == "running" for job in jobs)


def _free_port(host: str, port: int) -> int:
    """Returns the port, or a free one for 0. Raises SettingsError if it is taken."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        raise SettingsError(f"--port: got {port}, expected a free port on {host} ({error.strerror})") from None


def _end(children: dict[str, subprocess.Popen[bytes]]) -> None:
    """Ends both processes, the job first, so that it can report its end to the console."""
    for child in reversed(list(children.values())):
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
