from __future__ import annotations

import logging
import subprocess
import sys
from asyncio import CancelledError

import pytest

from openrecycle.app.runtime.patches import SWITCH_SECONDS
from openrecycle.app.runtime.processes import worth_saying

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


def test_requests_that_are_given_up_as_the_console_ends_have_no_traceback_each() -> None:
    def logged(error: BaseException) -> logging.LogRecord:
        text = "Exception in ASGI application"
        return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, text, (), (type(error), error, None))

    assert not worth_saying(logged(CancelledError())) and worth_saying(logged(ValueError()))
    assert worth_saying(logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Cancel 2 tasks", (), None))
