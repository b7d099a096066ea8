"""A job with something in every table, for tests of its history as a file."""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import select

from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    FailureReport,
    Heartbeat,
    Iteration,
    JobFinished,
    JobSpec,
    Recovery,
    Registration,
)
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.observing.as_run import IterationAsRun, WorkerOps
from openrecycle.app.observing.history import LEFT_OUT
from openrecycle.db.job_rows import MODELS, table
from openrecycle.db.session import Database
from openrecycle.db.store import Store

SPEC = JobSpec(name="job", pipelines=2, stages=2, micro_batches=2, iterations=50, demo=True)
NAMES = [f"W{p}_{s}" for p in range(2) for s in range(2)]


def lived_job(console: ConsoleService, *, finished: bool = True) -> str:
    """Workers register, one dies, an operator looks on and asks another one to leave; it ends."""
    job_id = console.jobs.create(SPEC)[0].job_id
    console.reports.register(
        job_id, [Registration(worker=name, incarnation=f"{name}-a", host="nöde", pid=7) for name in NAMES]
    )
    job = console.jobs.find(job_id)
    _resume(console, job_id, NAMES, 1)
    for seq in range(3):
        for name in NAMES:
            ops = {"F": 10.0 + seq, "I": 11.1, "W": 9.3, "O": 0.25}
            job.heard(
                Heartbeat(
                    worker=name,
                    incarnation=f"{name}-a",
                    seq=seq,
                    generation=1,
                    iteration=seq,
                    phase="training",
                    op_milliseconds=ops,  # type: ignore[arg-type]
                    resident_bytes=2**31,
                )
            )
    job.take_heartbeats()
    console.recorder.write(float("inf"))
    console.recorder.tidy(time.time() + 7200)
    console.flush()
    losses = [
        Iteration(iteration=i, loss=1 / (i + 3), loss_hex=(1 / (i + 3)).hex(), seconds=0.1, generation=1, living=4)
        for i in range(7)
    ]
    console.reports.committed(job_id, losses)
    console.operators.kill(job_id, "W1_0", "Ann")
    exit_report = FailureReport(worker="W1_0", incarnation="W1_0-a", cause="exit", reporter="launcher", detail="gone")
    console.reports.failures(job_id, [exit_report])
    _resume(console, job_id, [n for n in NAMES if n != "W1_0"], 2)
    times = {"detected_ms": 1.0, "unblocked_ms": 2.5, "reformed_ms": 3.0, "resumed_ms": 1e-3}
    console.reports.recovered(job_id, Recovery(worker="W1_0", generation=2, **times))
    console.operators.acknowledge(job_id, [1, 2], "Zoë 🚀")
    generation = job.state.current
    assert generation is not None
    ops = WorkerOps(
        kinds="FBO", pipelines=(0, 0, 0), micro_batches=(0, 0, -1), starts_us=(0, 5, 9), durations_us=(5, 4, 1)
    )
    measured = IterationAsRun(
        iteration=3,
        generation=2,
        plan_fingerprint=generation.plan_fingerprint,
        at=time.time(),
        uncertainty_us=4,
        workers=dict.fromkeys(generation.living, ops),
    )
    Store(console.database).put_measured(job_id, 3, measured.model_dump_json(), measured.at)
    console.operators.drain(job_id, "W1_1", "Ann")
    _resume(console, job_id, ["W0_0", "W0_1"], 3)
    if finished:
        console.reports.finish(job_id, JobFinished(state="finished", reason="all iterations are committed"))
    return job_id


def _resume(console: ConsoleService, job_id: str, names: list[str], generation: int) -> None:
    for name in names:
        for state in ("adopted", "formed", "resumed"):
            message = Acknowledgement(worker=name, incarnation=f"{name}-a", generation=generation, state=state)  # type: ignore[arg-type]
            console.reports.acknowledge(job_id, [message])


def everything(database: Database, job_id: str) -> dict[str, list[dict[str, Any]]]:
    """All rows of a job in each table that an import fills, without its id and what is not exported."""
    found = {}
    with database.engine.connect() as connection:
        for name in ("job", *MODELS):
            rows = table(name)
            of_job = rows.c.id if name == "job" else rows.c.job_id
            left_out = {"job_id", *LEFT_OUT.get(name, ()), *(("id",) if name == "job" else ())}
            query = select(rows).where(of_job == job_id)
            plain = [
                {k: v for k, v in row.items() if k not in left_out} for row in connection.execute(query).mappings()
            ]
            found[name] = sorted(map(_without_spaces, plain), key=repr)
    return found


def _without_spaces(row: dict[str, Any]) -> dict[str, Any]:
    """JSON in text may be spaced in another way."""
    return {k: json.loads(v) if isinstance(v, str) and v[:1] in ("[", "{") else v for k, v in row.items()}
