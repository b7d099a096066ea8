"""Plans in their packed form: the same in all they say."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import check, checked
from openrecycle.planner.jobs.job import MAX_LAYERS, Job, LayerProfile, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.packed import (
    DIGEST,
    decode_header,
    from_text,
    pack,
    packed,
    schedule_from_text,
    to_text,
    unpack,
)
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.solvers.portfolio import best_solution, make_plan, plan_of
from tests.conftest import refuses
from tests.golden import golden

LARGE = Job.uniform(8, 8, 16, durations={"F": 40, "I": 41.5, "W": 39, "O": 3, "transfer": 0.5}, time_unit="ms")
FAILED = frozenset({Worker(3, 5), Worker(6, 2)})


def problem(technique: Technique = Technique.STAGGERED, failed: frozenset[Worker] = FAILED) -> Problem:
    return Problem(LARGE, failed, technique, MemoryLimit("uniform"))


@pytest.mark.parametrize(
    ("technique", "failed"),
    [(technique, FAILED) for technique in Technique if technique.reroutes] + [(Technique.FAULT_FREE, frozenset())],
)
def test_a_large_plan_is_the_same_as_its_document(technique: Technique, failed: frozenset[Worker]) -> None:
    solution = best_solution(problem(technique, failed), solver="list", look_ahead=False)
    made = checked(plan_of(solution, seconds=0.25))
    document = Plan.from_json(made.to_json())
    assert document.fingerprint == made.fingerprint == document.compute_fingerprint()
    assert document == made == plan_of(solution, seconds=0.25)
    assert unpack(pack(document)).to_json() == made.to_json() and decode_header(pack(document)).form == "columns"
    assert from_text(to_text(document)) == made
    schedule = schedule_from_text(to_text(document))
    assert schedule.ops == made.schedule().ops and schedule.problem == made.schedule().problem
    assert check(document) == []


@pytest.mark.parametrize(
    ("written", "otherwise"),
    [
        ('"duration":40}', '"duration":40.0}'),
        ('"forward":40,', '"forward":40.0,'),
    ],
    ids=["an op", "the job"],
)
def test_a_plan_that_is_written_otherwise_is_the_same_plan(written: str, otherwise: str) -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    assert written in made.to_json()
    odd = Plan.from_json(made.to_json().replace(written, otherwise, 1), source="a plan")
    assert odd == made and odd.to_json() == made.to_json() and pack(odd) == pack(made)
    assert odd.compute_fingerprint() == made.fingerprint


@pytest.mark.parametrize("text", ["", "é", "AAAA", "no base64"])
def test_what_is_no_text_of_a_plan_is_refused(text: str) -> None:
    for read in (from_text, schedule_from_text):
        with pytest.raises(PlanError):
            read(text)


def test_what_has_come_over_a_pipe_is_passed_on_as_it_is() -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    data = packed(made)
    assert packed(made) is data and packed(unpack(data)) is data and unpack(data) == made
    changed = made.model_copy(update={"metrics": made.metrics.model_copy(update={"lower_bound": 1.0})})
    assert unpack(packed(changed)) == changed != made


@pytest.mark.parametrize("data", [b"", b"C", b"C\x01\x00\x00\x00x", b"X{}", b"D{}"])
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match=golden("the-planning-process")):
        unpack(data, source="the planning process")


def sealed_again(data: bytes, payload: bytes | None = None, **changes: object) -> bytes:
    """Packed data with another header, and perhaps payload, whose checksum is right."""
    (size,) = struct.unpack("<I", data[4:8])
    header = json.loads(zlib.decompress(data[8 : 8 + size])) | changes
    text = zlib.compress(json.dumps(header).encode())
    body = data[:4] + struct.pack("<I", len(text)) + text + (payload or data[8 + size : -DIGEST])
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize("rows", [[2**70, *range(7)], [2**40, *range(7)], [8, *range(7)], [-9, *range(7)]])
def test_a_header_that_names_rows_beyond_the_grid_is_refused_before_they_are_made(rows: list[int]) -> None:
    """Else a few kilobytes could take any memory."""
    with pytest.raises(PlanError):
        unpack(sealed_again(packed(make_plan(problem(), solver="list", look_ahead=False)), rows=rows))


@pytest.mark.parametrize("payload", [b"no zlib", zlib.compress(b"{}")])
def test_a_payload_that_is_no_document_is_refused(payload: bytes) -> None:
    with pytest.raises(PlanError):
        unpack(sealed_again(packed(make_plan(problem(), solver="list", look_ahead=False)), payload, form="json"))


def test_pipelines_are_renamed_alike_in_what_was_made_and_in_what_was_read() -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    names = [(p + 3) % 8 for p in range(8)]
    renamed, expected = made.renamed(names), Plan.from_json(made.to_json()).renamed(names)
    assert renamed.fingerprint == expected.fingerprint
    assert renamed == expected
    assert made.renamed(range(8)) is made


def strange(change: Callable[[Any], object]) -> Plan:
    """A plan that can be read, and that the checker refuses."""
    document = json.loads(checked(make_plan(problem(), solver="list", look_ahead=False)).to_json())
    change(document)
    plan = Plan.from_document(document)
    assert check(plan)
    return plan


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (lambda plan: plan["workers"]["W0_0"][0].update(pipeline=8), "workers.pipeline", 8),
        (lambda plan: plan["workers"]["W0_0"][0].update(pipeline=-1), "workers.pipeline", -1),
        (lambda plan: plan["workers"].update(W9_0=plan["workers"].pop("W0_0")), "workers", "W9_0"),
        (lambda plan: plan["workers"].update(W0_8=plan["workers"].pop("W0_0")), "workers", "W0_8"),
        (lambda plan: plan["metrics"]["peak_activations"].update(W9_0=3), "metrics.peak_activations", "W9_0"),
    ],
)
def test_a_plan_beyond_its_grid_is_not_renamed(change: Callable[[Any], object], field: str, value: object) -> None:
    mirrored = range(8)[::-1]
    with refuses(field, value):
        strange(change).renamed(mirrored)
    with refuses(field, value):
        strange(change).renamed(range(8), [mirrored] * 8)


def test_a_plan_that_holds_activations_beyond_its_grid_is_not_packed() -> None:
    with refuses("metrics.peak_activations", "W0_9"):
        pack(strange(lambda plan: plan["metrics"]["peak_activations"].update(W0_9=3)))


def test_a_catalog_renames_the_pipelines_of_large_plans() -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    catalog = Catalog(LARGE, Technique.STAGGERED, MemoryLimit("uniform"))
    catalog.add(made)
    found = catalog.find({Worker(0, 5), Worker(1, 2)})
    assert found is not None
    assert check(found) == []


def test_the_header_of_a_large_job_fits_whose_layers_and_workers_all_differ() -> None:
    pipelines, stages = 2, 32

    def layer(n: int) -> LayerProfile:
        time, peers = round(n + 100.123, 3), tuple(round(n + p + 0.765, 3) for p in range(pipelines))
        return LayerProfile(time, time, time, 1.0, peers, *[10**11 + n] * 4, transfer=time, backward_transfer=n + 0.5)

    each = tuple(map(layer, range(MAX_LAYERS)))
    speeds = tuple((Worker(p, s), 1.00001 + (p * stages + s) / 1e5) for p in range(pipelines) for s in range(stages))
    job = Job(pipelines, stages, 1, time_unit="ms", layers=each, speeds=speeds)
    made = Catalog(job, Technique.STAGGERED, MemoryLimit("uniform")).plan_for([Worker(1, 0)])[0]
    assert from_text(to_text(made), grid=(pipelines, stages, 1)) == made


def test_what_another_host_has_sent_is_of_the_grid_and_takes_little_memory_to_read() -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    grid, data = (8, 8, 16), packed(made)
    assert from_text(to_text(made), grid=grid) == made
    cut = {name: ops for name, ops in made.workers.items() if name != "W0_0"}
    for text, asked in (
        (to_text(made), (8, 8, 17)),
        # Each of these few kilobytes would take many megabytes.
        (base64.b64encode(sealed_again(data, fingerprint="0" * (9 << 20))).decode(), grid),
        (base64.b64encode(sealed_again(data, peaks=[0] * (1 << 20))).decode(), grid),
        (base64.b64encode(sealed_again(data, zlib.compress(b" " * (9 << 20)), form="json")).decode(), grid),
        (to_text(made.model_copy(update={"workers": cut})), grid),
    ):
        with pytest.raises(PlanError):
            from_text(text, grid=asked)
