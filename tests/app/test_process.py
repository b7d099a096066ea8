from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrecycle.app.runtime.patches import SWITCH_SECONDS

pytestmark = pytest.mark.processes

_CHILD = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from openrecycle.app.runtime.patches import tune_process
tune_process()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard, sys.getswitchinterval())
"""


def test_a_console_takes_all_the_files_it_may_have_and_hands_the_interpreter_on_quickly() -> None:
    done = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=60, check=True)
    whole, interval = done.stdout.split()
    assert whole == "True"
    assert abs(float(interval) - SWITCH_SECONDS) < 1e-6


_LOGS = """
import asyncio, logging, structlog
from openrecycle.app.runtime.processes import configure_logging
configure_logging()
for given_up in (asyncio.CancelledError(), ValueError()):
    try:
        raise given_up
    except BaseException as error:
        logging.getLogger("uvicorn.error").error("failed: %r", error, exc_info=error)
logging.getLogger("uvicorn.error").error("cancelled: 2")
for _ in range(3):
    structlog.get_logger().warning("disk-full", of="x" * 9000)
print("lives")
"""


def test_requests_that_are_given_up_as_the_console_ends_have_no_traceback_each() -> None:
    done = subprocess.run([sys.executable, "-c", _LOGS], capture_output=True, text=True, timeout=60, check=True)
    assert "CancelledError" not in done.stderr
    assert done.stderr.count("Traceback") == done.stderr.count("failed: ValueError()") == 1
    assert "cancelled: 2" in done.stderr and done.stderr.count("disk-full") == 3


@pytest.mark.parametrize("closed", [False, True])
def test_whoever_logs_lives_on_where_the_log_has_no_room(closed: bool) -> None:
    """A thread that says so would end of it: the console's ticks, or what renews its lead."""
    read, write = os.pipe()
    os.close(read)
    with Path("/dev/full").open("w") as full, os.fdopen(write, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", _LOGS],
            stdout=subprocess.PIPE,
            stderr=pipe if closed else full,
            text=True,
            timeout=60,
        )
    assert done.stdout == "lives\n"


def test_whoever_logs_lives_on_without_standard_error() -> None:
    program = [sys.executable, "-c", _LOGS]
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "lives"
