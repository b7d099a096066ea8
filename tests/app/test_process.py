from __future__ import annotations

import subprocess
import sys

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
