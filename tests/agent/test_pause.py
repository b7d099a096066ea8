"""A job that an operator pauses stops whole between two iterations, and goes on with the same bits."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from pydantic import TypeAdapter

from openrecycle.agent.launcher.launch import PauseRequest
from openrecycle.agent.messages.protocol import Command
from tests.agent.local_jobs import LocalJob, fault_free_losses

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
PAUSE, RESUME = Command(seq=1, kind="pause"), Command(seq=2, kind="resume")


def test_all_stop_before_the_same_iteration_also_when_one_dies_meanwhile() -> None:
    """Every worker says which iteration it is in. When all have committed the last of these and nobody has gone
    beyond, one is killed: the others form anew, and wait on. Then the job is resumed."""
    resumed = threading.Event()
    killed: list[int] = []

    def on_line(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 2:
            job.launcher.obey(PAUSE)
        if resumed.is_set() and len([i for i in job.iterations if i["generation"] == 2]) >= 3:
            job.stop()

    def on_message(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        if message["kind"] != "alive" or len(job.said("held")) < 4 or resumed.is_set():
            return
        last = max(said["iteration"] for _, said in job.messages if said["kind"] == "held")
        if not killed and job.iterations[-1]["iteration"] == last:
            killed.append(last)
            job.signal("W1_1", signal.SIGKILL)
        # All three are in the next generation, and have had time to run an iteration, if they would.
        if len({*job.said("formed", generation=2)}) == 3:
            assert job.iterations[-1]["iteration"] == killed[0] == last
            resumed.set()
            job.launcher.obey(RESUME)

    job = LocalJob(**GRID, on_line=on_line, on_message=on_message).run()
    assert resumed.is_set() and job.dead == ["W1_1"]
    assert killed[0] == max(m["iteration"] for _, m in job.messages if m["kind"] == "held") >= 2
    assert job.losses == fault_free_losses(len(job.losses), **GRID)
    assert not [w for w, m in job.messages if m["kind"] == "left" and m["generation"] == 1 and not m["whole"]]


class Told:
    """A worker's process, as far as a Hold knows it."""

    def __init__(self, incarnation: str = "") -> None:
        self.incarnation = incarnation
        self.told: list[tuple[str, dict[str, Any]]] = []

    def post(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    @property
    def messages(self) -> list[tuple[str, Any]]:
        return [(kind, fields.get("after")) for kind, fields in self.told]


def test_the_last_iteration_that_anybody_is_in_counts() -> None:
    hold, all_of_them = PauseRequest(), [Told(), Told()]
    entries: Any = all_of_them
    hold.heard(7, entries)
    assert hold.after is None
    hold.begin(entries)
    hold.begin(entries)
    for iteration in (3, 4, 3, -1):
        hold.heard(iteration, entries)
    newcomer: Any = Told()
    hold.tell(newcomer)
    hold.end(entries)
    assert [t.messages for t in all_of_them] == [[("hold", None), ("hold", 3), ("hold", 4), ("go", None)]] * 2
    assert newcomer.messages == [("hold", 4)] and hold.after is None


def test_who_leads_next_tells_that_the_job_goes_on() -> None:
    """The lead before ended when its nodes knew that the job goes on, and before its workers did."""
    hold, worker = PauseRequest(), Told("i1")
    entry: Any = worker
    hold.begin([entry])
    hold.heard(3, [entry], "i1")
    hold.end([])
    told = TypeAdapter(PauseRequest)
    successor = told.validate_json(told.dump_json(hold))
    assert successor == hold
    successor.tell(entry)
    assert worker.messages[-1] == ("go", None)


def test_an_answer_to_an_earlier_pause_is_none_to_this_one() -> None:
    """A job that is paused, resumed and asked to end within moments must not end where a worker stood before."""
    hold, worker = PauseRequest(), Told("i1")
    entries: Any = [worker]
    hold.begin(entries)
    hold.end(entries)
    hold.begin(entries)
    earlier, newest = (fields["pause"] for kind, fields in worker.told if kind == "hold")
    hold.heard(3, entries, "i1", earlier)
    assert not hold.settled(entries) and hold.after == 3
    hold.heard(4, entries, "i1", newest)
    assert hold.settled(entries) and hold.after == 4
