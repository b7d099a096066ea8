"""A process that was given another place reports under its old one until it has heard of it: it counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ui_console import ConsoleHere, JobHere, console_refuses

from openrecycle.agent.coordination.membership import Candidate, Offer, Offered, State
from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    FailureReport,
    Heartbeat,
    LogLine,
    LogLines,
    MeasuredOps,
)
from openrecycle.planner.jobs.words import MIGRATE

pytestmark = pytest.mark.processes

OUT = ("W0_2", "W1_2")


def known(state: State) -> State:
    """`state` without the times of heartbeats: the console takes these up on its next tick, whenever that is."""
    return replace(state, members={name: replace(one, last_heard=0.0) for name, one in state.members.items()})


def test_every_report_of_a_mover_is_taken(tmp_path: Path) -> None:
    here = ConsoleHere(tmp_path)
    try:
        console = here.console
        job = JobHere(console, "moves").register()
        job.die("W0_2").resume(2)
        job.die("W1_2").resume(3)
        live = console.jobs.find(job.job_id)
        move = Candidate(MIGRATE, ("W1_2", "W2_1"), (("W2_1", "W0_2"),))
        live.apply(Offered(OUT, Offer(OUT, (move,), MIGRATE)))
        assert live.state.generation == 4 and live.state.members["W0_2"].incarnation == "W2_1-a"
        mover = {"worker": "W2_1", "incarnation": "W2_1-a"}
        beat = Heartbeat(**mover, seq=9, generation=3, iteration=1, phase="waiting")  # type: ignore[arg-type]
        assert not console.reports.heartbeats(job.job_id, [beat]).refused
        console.reports.printed(job.job_id, LogLines(**mover, lines=(LogLine(at=1.0, text="moves"),)))
        assert [line.text for line in live.measurements.logs.lines("W0_2")] == ["moves"]
        ops = MeasuredOps(
            **mover,
            generation=3,
            iteration=1,
            clock="one",
            started_us=0,
            offset_us=0,
            uncertainty_us=0,
            kinds="FO",
            pipelines=(2, 2),
            micro_batches=(0, -1),
            starts_us=(0, 1),
            durations_us=(1, 1),
        )
        console.measuring.take(live, ops)
        console.reports.acknowledge(job.job_id, [Acknowledgement(**mover, generation=4, state="adopted")])
        assert live.state.members["W0_2"].acknowledged == "adopted"
        broken = FailureReport(**mover, cause="transfer", reporter="W2_1", generation=3)
        before = known(live.state)
        assert not console.reports.failures(job.job_id, [broken]).refused and known(live.state) == before
        # One that never was in the job does not.
        with console_refuses("fenced"):
            console.reports.printed(job.job_id, LogLines(worker="W2_1", incarnation="stranger", lines=()))
    finally:
        here.close()
