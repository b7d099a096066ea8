"""The Chrome trace, held to the trace event format and to the schedule that it shows."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from openrecycle.planner.export.text_formats import to_chrome_trace
from openrecycle.planner.jobs.job import Job, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Op
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.planner.plans import listed, worked_example
from tests.planner.problems import problems

Event = dict[str, Any]


def trace(plan: Plan) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(to_chrome_trace(plan))
    return document


def phases(document: dict[str, Any]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for event in document["traceEvents"]:
        found[event["ph"]].append(event)
    return found


def thread_names(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in phases(document)["M"] if e["name"] == "thread_name"}


def slice_around(slices: list[Event], ts: float) -> Event | None:
    """The slice in which an arrow's end at `ts` is, by the rule of the format: the one that encloses it."""
    around = [s for s in slices if s["ts"] <= ts < s["ts"] + s["dur"]]
    return around[0] if len(around) == 1 else None


def test_a_process_per_pipeline_and_a_sorted_named_thread_per_worker() -> None:
    document = trace(worked_example(Technique.STAGGERED, "W1_2"))
    meta = phases(document)["M"]
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    assert list(processes.values()) == ["pipeline 0", "pipeline 1", "pipeline 2"]
    names = thread_names(document)
    assert len(names) == 12
    assert names.pop(next(key for key, name in names.items() if "(out)" in name)) == "W1_2 (out)"
    for (pid, _), name in names.items():
        assert processes[pid] == f"pipeline {Worker.parse(name).pipeline}"
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in meta if e["name"] == "thread_sort_index"}
    assert all(order[key] == Worker.parse(name).stage for key, name in names.items())
    # 0 is the idle task, and a thread with its process's id the main thread, to Perfetto.
    ids = list(processes) + [tid for _, tid in thread_names(document)]
    assert 0 not in ids
    assert len(set(ids)) == len(ids)


def test_times_are_microseconds_and_a_slot_is_a_millisecond() -> None:
    document = trace(worked_example())
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["time_unit"] == "slot"
    assert document["otherData"]["microseconds_per_time_unit"] == 1000
    first = next(e for e in phases(document)["X"] if e["name"] == "F1")
    assert (first["ts"], first["dur"]) == (1000, 1000)


@pytest.mark.parametrize(
    ("unit", "microseconds"), [("us", 1.25), ("ms", 1250), ("s", 1_250_000), ("min", 75e6), ("tick", 1250)]
)
def test_units_of_time(unit: str, microseconds: float) -> None:
    job = Job(1, 1, 1, profiles=(StageProfile(1.25, 1, 1, 0),), time_unit=unit)
    document = trace(make_plan(Problem(job), solver="list", look_ahead=False))
    assert next(e for e in phases(document)["X"] if e["name"] == "F0")["dur"] == microseconds
    assert document["otherData"]["microseconds_per_time_unit"] == microseconds / 1.25


def test_args_say_where_a_rerouted_micro_batch_comes_from() -> None:
    plan = worked_example(Technique.ADAPTIVE, "W1_2")
    rerouted = [e for e in phases(trace(plan))["X"] if "rerouted_from" in e["args"]]
    assert len(rerouted) == 6 * 2
    for event in rerouted:
        args = event["args"]
        assert args["rerouted_from"] == "W1_2"
        assert (args["home_pipeline"], args["stage"]) == (1, 2)
        assert event["name"] == f"{event['name'][0]}1.{args['micro_batch']}"
        assert event["cat"].endswith(",rerouted")


def test_the_failed_worker_is_marked() -> None:
    document = trace(worked_example(Technique.STAGGERED, "W1_2"))
    (mark,) = phases(document)["i"]
    assert mark["name"] == "W1_2 out"
    assert mark["s"] == "t"
    assert thread_names(document)[mark["pid"], mark["tid"]] == "W1_2 (out)"
    assert not phases(trace(worked_example()))["i"]


def test_arrows_of_the_worked_example() -> None:
    """Per re-routed micro-batch: activations in and out, gradients in and out of stage 2."""
    found = phases(trace(worked_example(Technique.STAGGERED, "W1_2")))
    assert len(found["s"]) == len(found["f"]) == 6 * 4
    assert not phases(trace(worked_example()))["s"]


@examples(60)
@given(problem=problems())
def test_the_trace_shows_the_schedule(problem: Problem) -> None:
    plan = listed(problem)
    document = trace(plan)
    schedule, scale = plan.schedule(), 1000 / problem.job.ticks_per_unit
    found = phases(document)
    names = {key: name.removesuffix(" (out)") for key, name in thread_names(document).items()}
    rows: dict[str, list[Event]] = defaultdict(list)
    for event in found["X"]:
        rows[names[event["pid"], event["tid"]]].append(event)

    # Slices: each op at its time, none over another.
    assert rows.keys() == {str(w) for w in schedule.ops}
    for worker, ops in schedule.ops.items():
        slices = rows[str(worker)]
        assert [(e["ts"], e["dur"]) for e in slices] == [(op.start * scale, op.duration * scale) for op in ops]
        assert [e["name"][0] for e in slices] == [op.kind for op in ops]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(slices))

    # Counters: the steps of Schedule.held_activations, ending at nothing held.
    steps: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event in found["C"]:
        assert event["name"] == f"{names[event['pid'], event['tid']]} activations"
        steps[names[event["pid"], event["tid"]]].append((event["ts"], event["args"]["held"]))
    for worker in schedule.ops:
        assert steps[str(worker)] == [(tick * scale, held) for tick, held in schedule.held_activations(worker)]
        assert not steps[str(worker)] or steps[str(worker)][-1][1] == 0

    # Arrows: one per transfer of a re-routed micro-batch, both ends inside the slices they join.
    starts = {e["id"]: e for e in found["s"]}
    ends = {e["id"]: e for e in found["f"]}
    assert len(starts) == len(found["s"])
    assert len(ends) == len(found["f"])
    assert starts.keys() == ends.keys()
    joined = set()
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        sender = slice_around(rows[names[start["pid"], start["tid"]]], start["ts"])
        receiver = slice_around(rows[names[end["pid"], end["tid"]]], end["ts"])
        if sender is not None and receiver is not None:  # an op of no length encloses nothing
            joined.add((_key(sender), _key(receiver)))
    expected = set(_rerouted_transfers(list(schedule.compute_ops())))
    assert len(starts) == len(expected)
    lasting = {(_op_key(a), _op_key(b)) for a, b in expected if a.duration and b.duration}
    assert lasting <= joined


def _key(event: Event) -> tuple[str, int, int, int]:
    args = event["args"]
    return event["name"][0], args["home_pipeline"], args["micro_batch"], args["stage"]


def _op_key(op: Op) -> tuple[str, int, int, int]:
    return op.kind, op.pipeline, op.micro_batch, op.stage


def _rerouted_transfers(ops: list[Op]) -> list[tuple[Op, Op]]:
    """By the definition of precedence: F to F of the next stage, I or B to I or B of the one before."""
    forward = {(op.pipeline, op.micro_batch, op.stage): op for op in ops if op.kind == "F"}
    backward = {(op.pipeline, op.micro_batch, op.stage): op for op in ops if op.kind in "IB"}
    pairs = [(op, forward.get((p, j, s + 1))) for (p, j, s), op in forward.items()]
    pairs += [(op, backward.get((p, j, s - 1))) for (p, j, s), op in backward.items()]
    return [(a, b) for a, b in pairs if b is not None and (a.rerouted or b.rerouted)]
