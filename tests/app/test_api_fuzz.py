"""Whatever JSON comes: an answer of the API's own, never a 5xx, and errors as problem details."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient

from openrecycle.agent.messages.protocol import JobSpec, Registration
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.server import create_routes
from openrecycle.db.store import Store
from tests.conftest import examples
from tests.databases import sqlite_in

pytestmark = pytest.mark.processes

NAMES = ["W0_0", "W0_1", "W1_0", "W1_1"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, str]]:
    database = sqlite_in(tmp_path_factory.mktemp("fuzz"))
    console = ConsoleService(Store(database), tolerance=0)
    console.start()
    created, _ = console.jobs.create(JobSpec(name="n", pipelines=2, stages=2, micro_batches=2, iterations=9, demo=True))
    console.reports.register(
        created.job_id, [Registration(worker=name, incarnation="a", host="h", pid=1) for name in NAMES]
    )
    client = TestClient(Starlette(routes=create_routes(console)), raise_server_exceptions=False)
    yield client, created.job_id
    console.close()
    database.close()


worker = st.sampled_from([*NAMES, "W9_9", "W1", ""])
incarnation = st.sampled_from(["a", "b", "", "\u0000", "x" * 65])
number = st.one_of(st.integers(-2, 12), st.sampled_from([2**53, 2**63, 10**400, -(2**70)]), st.floats(), st.none())
short = st.text(max_size=90)
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), number, short),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(short, inner, max_size=3)),
    max_leaves=6,
)


def message(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Fields of which any may be missing or junk, one that does not belong, or no message at all."""
    some = {name: st.one_of(value, value, value, junk) for name, value in fields.items()}
    return st.one_of(st.fixed_dictionaries(some), st.fixed_dictionaries({}, optional={**some, "extra": junk}), junk)


iteration = message(
    iteration=number, loss=number, loss_hex=short, seconds=number, generation=st.integers(0, 3), living=number
)
BODIES = {
    "": message(
        name=short,
        pipelines=number,
        stages=number,
        micro_batches=number,
        iterations=number,
        durations=st.dictionaries(st.sampled_from(["F", "I", "W", "O", "transfer", "X"]), number, max_size=4),
        memory=st.sampled_from(["uniform", "1", "none", "0", "999999999", "1f1b"]),
    ),
    "/{job}/workers": message(
        registrations=st.lists(message(worker=worker, incarnation=incarnation, host=short, pid=number), max_size=3)
    ),
    "/{job}/heartbeats": message(
        heartbeats=st.lists(
            message(
                worker=worker,
                incarnation=incarnation,
                seq=number,
                generation=number,
                iteration=number,
                phase=st.sampled_from(["training", "draining", "asleep"]),
            ),
            max_size=3,
        )
    ),
    "/{job}/acknowledgements": message(
        acknowledgements=st.lists(
            message(
                worker=worker,
                incarnation=incarnation,
                generation=number,
                state=st.sampled_from(["adopted", "formed", "resumed", ""]),
                iteration=number,
            ),
            max_size=3,
        )
    ),
    "/{job}/failures": message(
        failures=st.lists(
            message(
                worker=worker,
                incarnation=incarnation,
                cause=st.sampled_from(["transfer", "exit"]),
                reporter=worker,
                detail=short,
                generation=number,
            ),
            max_size=3,
        )
    ),
    "/{job}/choice": message(name=st.sampled_from(["re-route", "stand by", ""]), failed=st.lists(worker)),
    "/{job}/iterations": message(iterations=st.lists(iteration, max_size=3)),
    "/{job}/recoveries": message(
        worker=worker, generation=number, detected_ms=number, unblocked_ms=number, reformed_ms=number, resumed_ms=number
    ),
}


@pytest.mark.parametrize("path", BODIES)
def test_no_body_breaks_the_api(api: tuple[TestClient, str], path: str) -> None:
    client, job_id = api

    @examples(60, suppress_health_check=[HealthCheck.too_slow])
    @given(body=BODIES[path])
    def send(body: Any) -> None:
        content = json.dumps(body).encode()
        answer = client.post(
            f"/api/v1/jobs{path.format(job=job_id)}", content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json()["detail"]

    send()
    assert client.get(f"/api/v1/jobs/{job_id}").status_code == 200


@examples(60)
@given(
    path=st.text(max_size=40).map(lambda s: s.replace("#", "").replace("?", "")),
    after=st.text(max_size=5),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
)
def test_no_address_breaks_the_api(api: tuple[TestClient, str], path: str, after: str, method: str) -> None:
    client, job_id = api
    for address in (f"/api/v1/jobs/{job_id}/{quote(path)}", f"/api/v1/jobs/{job_id}/events?after={quote(after)}"):
        assert client.request(method, address).status_code < 500
