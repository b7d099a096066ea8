"""How long a launcher bears that a worker says nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from openrecycle.agent.config.options import ALIVE_SECONDS, Faults, Timeouts
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.launcher.launch import JobFailed, Stopped
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


class _Judges(LocalCoordination):
    """As a console does."""

    judges_silence = True


def test_a_stage_that_is_stopped_is_not_waited_for_where_a_console_removes_it() -> None:
    def told(entry: PretendedWorker, message: dict[str, Any]) -> None:
        if message["kind"] == "deployment":
            entry.stopped = entry.name == "W0_1"
            says(entry, {"kind": "waiting", "seconds": 0.0}, again=not entry.stopped)

    pool, lines = PretendedWorkers(PretendedWorker.ready, told), list[dict[str, Any]]()
    faults = Faults(timeouts=SHORT)
    one = launcher(Job.uniform(1, 2, 2), pool, lines.append, _Judges, faults)
    with pytest.raises(JobFailed, match="W0_1"):
        run(one)
    assert not any(golden("waiting-for-sigcont") in line.get("warning", "") for line in lines)
