"""The JSON of a plan that is in columns, and its fingerprint, without an object for each op.

A plan of 8,192 workers has 200,000 ops: as documents first they take ten times as long, and 150 MB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.job import Job, Worker
from planner.op_rows import Ints
from planner.plan import SCHEMA_VERSION, Plan, job_doc

if TYPE_CHECKING:
    from planner.plan_columns import Columns

KINDS = "FIWB"
_OPTIMIZER = 3  # in Columns.durations


class WorkerOps(NamedTuple):
    """One living worker's ops by their start, O last (its micro-batch None). Times in the job's own unit."""

    worker: Worker
    kinds: list[str]
    pipelines: list[int]
    micro_batches: list[int | None]
    starts: list[int | float]
    durations: list[int | float]

    def canonical(self) -> str:
        """As Plan.compute_fingerprint hashes them."""
        stage = self.worker.stage
        return "[" + ",".join([
            f'{{"duration":{d!r},"kind":"{kind}","micro_batch":{"null" if m is None else m},'
            f'"pipeline":{p},"stage":{stage},"start":{a!r}}}'
            for kind, p, m, a, d in zip(*self[1:], strict=True)
        ]) + "]"  # fmt: skip

    def document(self) -> str:
        """As the Plan document has them."""
        stage = self.worker.stage
        return "[" + ",".join([
            f'{{"kind":"{kind}","pipeline":{p},"micro_batch":{"null" if m is None else m},'
            f'"stage":{stage},"start":{a!r},"duration":{d!r}}}'
            for kind, p, m, a, d in zip(*self[1:], strict=True)
        ]) + "]"  # fmt: skip


def worker_ops(columns: Columns) -> Iterator[WorkerOps]:
    """Of every living worker, pipeline by pipeline."""
    job, rows = columns.problem.job, columns.rows()
    starts, lengths = units(job, rows.start), units(job, rows.duration)
    kinds, homes, numbers = rows.kind.tolist(), rows.home.tolist(), rows.micro_batch.tolist()
    steps, lasts = units(job, columns.step), [units(job, row) for row in columns.durations[_OPTIMIZER]]
    for worker in columns.problem.living_workers():
        part, (pipeline, stage) = rows.of(worker), worker
        yield WorkerOps(
            worker,
            [*(KINDS[kind] for kind in kinds[part]), "O"],
            [*homes[part], pipeline],
            [*numbers[part], None],
            [*starts[part], steps[stage]],
            [*lengths[part], lasts[stage][pipeline]],
        )


def fingerprint(columns: Columns) -> str:
    """Plan.compute_fingerprint, without the detour over documents."""
    return _hashed(columns, {str(ops.worker): ops.canonical() for ops in worker_ops(columns)})


def document(columns: Columns, head: Plan) -> str:
    """The Plan document. head: the plan, of which `workers` is not read."""
    parts = (f'"{ops.worker}":{ops.document()}' for ops in worker_ops(columns))
    return head.json_with(parts)


def units(job: Job, ticks: Ints) -> list[int | float]:
    """Job.units of each."""
    if job.ticks_per_unit == 1:
        whole: list[int | float] = ticks.tolist()
        return whole
    return [int(v) if v.is_integer() else v for v in (ticks / job.ticks_per_unit).tolist()]


def _hashed(columns: Columns, workers: dict[str, str]) -> str:
    problem = columns.problem
    body: dict[str, Any] = {
        "failed": list(map(str, sorted(problem.failed))),
        "job": job_doc(problem.job).model_dump(mode="json"),
        "memory": problem.memory.text,
        "schema_version": SCHEMA_VERSION,
        "technique": problem.technique.value,
    }
    head = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(f'{head[:-1]},"workers":{{'.encode())
    for i, name in enumerate(sorted(workers)):
        digest.update(f'{"," if i else ""}"{name}":{workers[name]}'.encode())
    digest.update(b"}}")
    return digest.hexdigest()[:32]
