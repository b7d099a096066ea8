"""A plan as text: a trace for Perfetto, the CSV of torch.distributed.pipelining, a CSV with one line per op, and the
plan document as YAML for people, with one op per line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import SECONDS, Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Op, Schedule

if TYPE_CHECKING:
    import yaml

# -- Chrome trace ------------------------------------------------------------------------------------

# Chrome Trace Event JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.
#
# A process per pipeline and a thread per worker; a slice per op; arrows for the transfers of
# re-routed micro-batches; a counter of held activations per worker; a mark on workers that are out.

# A unit that is no unit of time, such as a slot, is drawn as a millisecond.
SECONDS_OF_OTHERS = 1e-3

CATEGORY = {"F": "forward", "I": "backward-input", "W": "backward-weight", "B": "backward", "O": "optimizer"}


def to_chrome_trace(plan: Plan) -> str:
    """Export a trace. `otherData` says how many microseconds one unit of the plan's times has in it."""
    schedule = plan.schedule()
    unit = plan.job.time_unit
    per_unit = round(1e6 * SECONDS.get(unit, SECONDS_OF_OTHERS), 3)
    trace = _ChromeTrace(schedule, per_unit)
    document = {
        "traceEvents": list(trace.events()),
        "displayTimeUnit": "ms",
        "otherData": {
            "time_unit": unit,
            "microseconds_per_time_unit": per_unit,
            "fingerprint": plan.fingerprint,
            "technique": plan.technique.value,
            "memory": plan.memory,
            "failed": ", ".join(plan.failed) or "none",
            "period": plan.metrics.period,
            "lower_bound": plan.metrics.lower_bound,
        },
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False) + "\n"


class _ChromeTrace:
    def __init__(self, schedule: Schedule, per_unit: float) -> None:
        self.schedule = schedule
        self.job = schedule.problem.job
        self.per_unit = per_unit
        self.ticks_per_unit = self.job.ticks_per_unit
        self.threads = {worker: self._thread_of(worker) for worker in self.job.workers()}

    def events(self) -> Iterator[dict[str, Any]]:
        yield from self._names()
        for ops in self.schedule.ops.values():
            yield from map(self._slice, ops)
        yield from self._flows()
        for worker in self.schedule.ops:
            yield from self._counter(worker)
        for worker in sorted(self.schedule.problem.failed):
            mark = {"name": f"{worker} out", "cat": "failure", "ph": "i", "s": "t", "ts": 0}
            yield {**mark, **self.threads[worker], "args": {"stage": worker.stage}}

    def _time(self, ticks: float) -> float | int:
        value = round(ticks * self.per_unit / self.ticks_per_unit, 6)
        return int(value) if value == int(value) else value

    def _thread_of(self, worker: Worker) -> dict[str, int]:
        """Chooses ids from 1 on, and no thread id equal to a process id: Perfetto takes 0 for the idle task, and a
        thread with its process's id for the main thread, which it lists first."""
        job = self.job
        return {
            "pid": worker.pipeline + 1,
            "tid": job.pipelines + 1 + worker.pipeline * job.stages + worker.stage,
        }

    def _names(self) -> Iterator[dict[str, Any]]:
        for p in range(self.job.pipelines):
            for name, args in (
                ("process_name", {"name": f"pipeline {p}"}),
                ("process_sort_index", {"sort_index": p}),
            ):
                yield {"name": name, "ph": "M", "pid": p + 1, "args": args}
        for worker in self.job.workers():
            out = " (out)" if worker in self.schedule.problem.failed else ""
            for name, args in (
                ("thread_name", {"name": f"{worker}{out}"}),
                ("thread_sort_index", {"sort_index": worker.stage}),
            ):
                yield {"name": name, "ph": "M", **self.threads[worker], "args": args}

    def _slice(self, op: Op) -> dict[str, Any]:
        args: dict[str, Any] = {"stage": op.stage}
        if op.kind != "O":
            args |= {"micro_batch": op.micro_batch, "home_pipeline": op.pipeline}
        if op.rerouted:
            args["rerouted_from"] = str(Worker(op.pipeline, op.stage))
        return {
            "name": _name(op),
            "cat": CATEGORY[op.kind] + (",rerouted" if op.rerouted else ""),
            "ph": "X",
            "ts": self._time(op.start),
            "dur": self._time(op.duration),
            **self.threads[op.worker],
            "args": args,
        }

    def _flows(self) -> Iterator[dict[str, Any]]:
        """Yields an arrow for each transfer that begins or ends at a worker of another pipeline."""
        forward: dict[tuple[int, int, int], Op] = {}
        backward: dict[tuple[int, int, int], Op] = {}
        for op in self.schedule.compute_ops():
            if op.kind != "W":
                (forward if op.kind == "F" else backward)[op.pipeline, op.micro_batch, op.stage] = op
        number = 0
        for towards, ops in ((1, forward), (-1, backward)):
            for (p, j, s), sender in ops.items():
                receiver = ops.get((p, j, s + towards))
                if receiver is None or not (sender.rerouted or receiver.rerouted):
                    continue
                number += 1
                what = {"name": "activation" if towards > 0 else "gradient", "cat": "transfer", "id": number}
                # The arrow starts inside the slice, since the next one may begin at its very end.
                leaves = self._time(sender.end - sender.duration / 64)
                yield {**what, "ph": "s", "ts": leaves, **self.threads[sender.worker]}
                yield {**what, "ph": "f", "bp": "e", "ts": self._time(receiver.start), **self.threads[receiver.worker]}

    def _counter(self, worker: Worker) -> Iterator[dict[str, Any]]:
        for tick, held in self.schedule.held_activations(worker):
            # Perfetto joins both names for the track: "W0_0 activations held".
            event = {"name": f"{worker} activations", "ph": "C", "ts": self._time(tick)}
            yield {**event, **self.threads[worker], "args": {"held": held}}


def _name(op: Op) -> str:
    """`F3`: micro-batch 3 of the worker's own pipeline; `F1.3`: of pipeline 1, re-routed."""
    if op.kind == "O":
        return "O"
    return f"{op.kind}{op.pipeline}.{op.micro_batch}" if op.rerouted else f"{op.kind}{op.micro_batch}"


# -- PyTorch pipelining ------------------------------------------------------------------------------

# The schedule CSV of torch.distributed.pipelining (torch 2.13, `_load_csv(format="compute_only")`).
#
# No header, one line per stage (its rank), cells such as `0F3` = stage, kind, micro-batch; an empty
# cell is a bubble. Torch runs each stage on one rank, so a file holds one pipeline, and a plan that
# re-routes micro-batches has no such file.

ONE_RANK = "torch.distributed.pipelining runs each stage of a pipeline on one rank"


def to_torch_csv(plan: Plan, pipeline: int | None = None) -> str:
    """Export one pipeline of a fault-free plan. pipeline: its number; None when all are alike.

    A cell is one slot where the ops fit a grid of slots as long as the shortest op (an op of n slots has n - 1 empty
    cells behind it). Otherwise a line is the stage's ops by start time, without bubbles. Torch runs them in that order,
    which is consistent with the dependencies because the plan's times are.

    Raises InputError for a plan that re-routes, and for pipelines that differ when none is named.
    """
    schedule = plan.schedule()
    _refuse_rerouted(schedule)
    if pipeline is None:
        pipeline = _the_one_of_all(schedule)
    lines = [_compute_ops(schedule, Worker(pipeline, s)) for s in range(plan.job.stages)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(_slots(lines) or [[_cell(op) for op in line] for line in lines])
    return out.getvalue()


def _refuse_rerouted(schedule: Schedule) -> None:
    problem = schedule.problem
    if problem.failed:
        names = [str(w) for w in sorted(problem.failed)]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise InputError("--format", "torch-csv", f"another format for a plan with {shown} failed, since {ONE_RANK}")
    moved = next((op for op in schedule.compute_ops() if op.rerouted), None)
    if moved is not None:
        raise InputError("--format", "torch-csv", f"another format for a plan that re-routes {moved}, since {ONE_RANK}")


def _the_one_of_all(schedule: Schedule) -> int:
    """Return 0 if every pipeline does the same at the same time; else raise InputError."""
    job = schedule.problem.job

    def shape(pipeline: int) -> list[list[tuple[str, int, int]]]:
        workers = (Worker(pipeline, s) for s in range(job.stages))
        return [[(op.kind, op.micro_batch, op.start) for op in _compute_ops(schedule, w)] for w in workers]

    first = shape(0)
    other = next((p for p in range(1, job.pipelines) if shape(p) != first), None)
    if other is not None:
        raise InputError(
            "--pipeline",
            None,
            f"a pipeline from 0 to {job.pipelines - 1}: {other} runs otherwise than 0, and a file holds one",
        )
    return 0


def _compute_ops(schedule: Schedule, worker: Worker) -> list[Op]:
    return [op for op in schedule.ops[worker] if op.kind != "O"]


# The most cells of a file; one op may be a billion times as long as another.
MOST_CELLS = 1_000_000


def _slots(lines: list[list[Op]]) -> list[list[str]] | None:
    """Fill one cell per slot; None when an op doesn't fill whole slots, or there would be more than MOST_CELLS."""
    slot = min(op.duration for line in lines for op in line)
    if slot == 0 or any(op.start % slot or op.duration % slot for line in lines for op in line):
        return None
    slots = max(op.end for line in lines for op in line) // slot
    if slots * len(lines) > MOST_CELLS:
        return None
    cells = [[""] * slots for _ in lines]
    for row, line in zip(cells, lines, strict=True):
        for op in line:
            row[op.start // slot] = _cell(op)
    return cells


def _cell(op: Op) -> str:
    return f"{op.stage}{op.kind}{op.micro_batch}"


# -- one line per op, for spreadsheets and data frames -----------------------------------------------

COLUMNS = (
    "worker",
    "stage",
    "kind",
    "home_pipeline",
    "micro_batch",
    "start",
    "duration",
    "end",
    "rerouted_from",
    "time_unit",
)


def to_tidy_csv(plan: Plan) -> str:
    """Export one line per op. Times are in `time_unit`; micro_batch is empty for O, rerouted_from for ops at home."""
    unit = _no_formula(plan.job.time_unit)
    schedule = plan.schedule()
    units = schedule.problem.job.units
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for worker, ops in schedule.ops.items():
        for op in ops:
            writer.writerow(
                (
                    worker,
                    op.stage,
                    op.kind,
                    op.pipeline,
                    "" if op.kind == "O" else op.micro_batch,
                    units(op.start),
                    units(op.duration),
                    units(op.end),
                    Worker(op.pipeline, op.stage) if op.rerouted else "",
                    unit,
                )
            )
    return out.getvalue()


def _no_formula(text: str) -> str:
    """Keep a spreadsheet from running the unit as a formula: it is free text from the plan's author."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


# -- the plan document as YAML, for people ------------------------------------------------------

# PyYAML takes 0.1 ms per op.
MAX_OPS = 50_000


def to_yaml(plan: Plan) -> str:
    """Export as YAML. Raises PlannerError for a plan above MAX_OPS ops: YAML is for people to read."""
    ops = plan.op_count
    if ops > MAX_OPS:
        raise PlannerError(f"the plan has {ops:,} ops and YAML is written for at most {MAX_OPS:,}; use json or csv")
    import yaml

    class Dumper(yaml.SafeDumper):
        """Puts leaves on one line. Quotes text that begins with a digit, since YAML 1.2 readers take more such text
        for numbers (12e34) than PyYAML, a YAML 1.1 writer, does."""

        def ignore_aliases(self, data: Any) -> bool:
            return True  # equal tuples are written out, for the people who read them

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if value[:1].isdigit() else None)

    Dumper.add_representer(str, text)
    return yaml.dump(
        plan.model_dump(mode="json"),
        Dumper=Dumper,
        sort_keys=False,
        default_flow_style=None,
        width=1_000_000,
        allow_unicode=True,
    )
