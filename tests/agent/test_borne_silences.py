"""How long a launcher bears that a worker says nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from openrecycle.agent.config.options import ALIVE_SECONDS, Faults, Timeouts
from openrecycle.agent.launcher.launch import Stopped
from openrecycle.planner.jobs.job import Job
from tests.agent.pretended import PretendedWorker, PretendedWorkers, launcher, run
from tests.golden import golden

SHORT = Timeouts(silence=4 * ALIVE_SECONDS)


def says(entry: PretendedWorker, current: dict[str, Any], *, again: bool) -> None:
    """What it is at; again: until it is taken out, or the job is over."""

    def talk() -> None:
        with contextlib.suppress(OSError):
            while entry.process.is_alive():
                time.sleep(ALIVE_SECONDS / 2)
                entry.say("alive", op_limit=None, current=current)

    entry.say("alive", op_limit=None, current=current)
    if again:
        threading.Thread(target=talk, daemon=True).start()


def test_that_a_stage_was_late_as_a_whole_is_no_excuse_for_a_later_silence() -> None:
    out, late = list[str](), {"kind": "data", "seconds": 61.0, "limit": 60.0}

    def told(entry: PretendedWorker, message: dict[str, Any]) -> None:
        if message["kind"] == "deployment" and not out:
            says(entry, late, again=entry.name == "W0_0")

    def heard(line: dict[str, Any]) -> None:
        if golden("was-silent-for") in line.get("warning", ""):
            out.append(line["warning"][:4])
            one.stop(15)

    one = launcher(
        Job.uniform(2, 1, 2), PretendedWorkers(PretendedWorker.ready, told), heard, faults=Faults(timeouts=SHORT)
    )
    with pytest.raises(Stopped):
        run(one)
    assert out == ["W1_0"]
