"""Schemathesis over the OpenAPI document: what it says is what the real application does."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS, not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.applications import Starlette
from starlette.middleware import Middleware

from openrecycle.agent.messages.protocol import Acknowledgement, Iteration, JobSpec, Registration
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.security.guard import BodyLimit
from openrecycle.app.server import create_routes
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc
from tests.databases import sqlite_in

CURSOR = "a cursor is one that the console has given"
PIPELINE = "a pipeline is one of the plan's, and not every format holds one alone"
# Rules between fields, and sizes that only their product says, which JSON Schema has no words for. What these
# refuse that the document allows is a 422 all the same, which the other checks see to.
RELATIONS = {
    "POST /jobs": "pipelines x stages and the ops have limits; memory and profile must fit together",
    "POST /jobs/{job_id}/iterations": "an iteration must be below the number that the job runs",
    "POST /jobs/{job_id}/interim": "the text of a plan is one",
    "POST /jobs/{job_id}/measured": "columns have one entry per op",
    "POST /plans": "either a plan or a solve",
    "POST /solves": "profile, grid and technique must make a job",
    "POST /tokens": "only an agent's has a job; which characters can be printed is beyond a pattern",
    "POST /catalogs": "each stage needs a living worker",
    "PUT /profiles/{name}": "op times and grid must make a job",
    "GET /jobs": CURSOR,
    "GET /jobs/{job_id}/plans": CURSOR,
    "GET /jobs/{job_id}/plans/{fingerprint}/export": PIPELINE,
    "GET /plans/{fingerprint}/export": PIPELINE,
    "GET /jobs/{job_id}/workers/{worker}/history": "the time between since and until, in steps, has a limit",
    "GET /plans": CURSOR,
    "GET /solves": CURSOR,
    "GET /catalogs": CURSOR,
    "GET /profiles": CURSOR,
}
# What they do to the job that all others are about can't be undone.
FINAL = ("POST /jobs/{job_id}/finish", "DELETE /jobs/{job_id}")
# By path: the list that has its resource, and which part of the list's answer goes into the path.
_FIRST = "$response.body#"
LISTED = {
    "/jobs/{job_id}": ("/jobs", {"job_id": f"{_FIRST}/jobs/0/job_id"}),
    "/jobs/{job_id}/workers/{worker}": (
        "/jobs/{job_id}/workers",
        {"job_id": "$request.path.job_id", "worker": f"{_FIRST}/workers/0/name"},
    ),
    "/jobs/{job_id}/plans/{fingerprint}": (
        "/jobs/{job_id}/plans",
        {"job_id": "$request.path.job_id", "fingerprint": f"{_FIRST}/plans/0/fingerprint"},
    ),
    "/plans/{fingerprint}": ("/plans", {"fingerprint": f"{_FIRST}/plans/0/fingerprint"}),
    "/catalogs/{fingerprint}": ("/catalogs", {"fingerprint": f"{_FIRST}/catalogs/0/fingerprint"}),
    "/catalogs/{fingerprint}/plans/{name}": (
        "/catalogs/{fingerprint}",
        {"fingerprint": "$request.path.fingerprint", "name": f"{_FIRST}/lines/0/plans/0/name"},
    ),
    "/solves/{solve_id}": ("/solves", {"solve_id": f"{_FIRST}/solves/0/id"}),
    "/profiles/{name}": ("/profiles", {"name": f"{_FIRST}/profiles/0/name"}),
    "/tokens/{token_id}": ("/tokens", {"token_id": f"{_FIRST}/tokens/0/id"}),
}
_BEYOND = re.compile("[\U00010000-\U0010ffff]-[\U00010000-\U0010ffff]")
SPEC = {"name": "schema", "pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": 90, "demo": True}


def linked(document: dict[str, Any]) -> dict[str, Any]:
    """The document with links from each list to the operations on its items, which the stateful phase follows."""
    for path, operations in document["paths"].items():
        about = [place for place in LISTED if path == place or path.startswith(f"{place}/")]
        if not about:
            continue
        source, parameters = LISTED[max(about, key=len)]
        links = document["paths"][source]["get"]["responses"]["200"].setdefault("links", {})
        for operation in operations.values():
            name = operation["operationId"]
            links[name] = {"operationId": name, "parameters": parameters}
    return document


class Api:
    """A console with a job that runs, in this process. call: one operation, so many examples.

    few_characters: what names are made of has nothing beyond the characters of 16 bits. Hypothesis looks at each
    character of a pattern, of which names have a million: 20 of the 23 seconds that all operations take."""

    def __init__(self, folder: Path, *, few_characters: bool = False) -> None:
        self._database = sqlite_in(folder)
        self.console = ConsoleService(Store(self._database), tolerance=0)
        self.console.start()
        self.app = Starlette(routes=create_routes(self.console), middleware=[Middleware(BodyLimit)])
        self._listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self.app, log_config=None, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        # A server of its own, since what waits for something is bound to one event loop.
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()
        self.root = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        address = f"{self.root}/api/v1/openapi.json"
        self.schema = schemathesis.openapi.from_url(address, wait_for_schema=60)
        if few_characters:
            fewer = _BEYOND.sub("", requests.get(address, timeout=60).text)
            self.schema = schemathesis.openapi.from_dict(json.loads(fewer))
            self.schema.config.update(base_url=f"{self.root}/api/v1")
        self.job_id = self._job()
        self._others()
        self.seen: set[int] = set()

    def _job(self) -> str:
        job_id = self.console.jobs.create(JobSpec.model_validate(SPEC))[0].job_id
        names = [f"W{p}_{s}" for p in range(2) for s in range(2)]
        self.console.reports.register(
            job_id, [Registration(worker=name, incarnation="a", host="h", pid=1) for name in names]
        )
        for state in ("adopted", "formed", "resumed"):
            for name in names:
                message = {"worker": name, "incarnation": "a", "generation": 1, "state": state}
                self.console.reports.acknowledge(job_id, [Acknowledgement.model_validate(message)])
        row = {"loss": 1.0, "loss_hex": "0x1p+0", "seconds": 0.2, "generation": 1, "living": 4}
        self.console.reports.committed(job_id, [Iteration.model_validate({"iteration": i, **row}) for i in range(3)])
        return job_id

    def _others(self) -> None:
        """A solve that is done, and one each of what lists have rows of: programs go on from there."""

        def call(method: str, path: str, body: Any = None) -> Any:
            answer = requests.request(method, f"{self.root}/api/v1{path}", json=body, timeout=60)
            answer.raise_for_status()
            return answer.json() if answer.content else None

        def wait(path: str, field: str, value: Any) -> None:
            deadline = time.monotonic() + 120
            while call("GET", path)[field] != value:
                assert time.monotonic() < deadline, path
                time.sleep(0.05)

        job = job_doc(Job.uniform(2, 2, 2)).model_dump(mode="json")
        solve = call("POST", "/solves", {"kind": "plan", "job": job, "failed": [], "solver": "list"})["id"]
        wait(f"/solves/{solve}", "state", "done")
        call("POST", "/plans", {"name": "kept", "solve": solve})
        call("PUT", "/profiles/mine", job)
        filling = call("POST", "/catalogs", {"job_id": self.job_id, "tolerance": 1})["fingerprint"]
        wait(f"/catalogs/{filling}/filling", "state", "done")
        call("POST", "/tokens", {"role": "view", "name": "somebody"})

    def operations(self) -> list[str]:
        labels = [found.ok().label for found in self.schema.get_all_operations()]
        return sorted(labels, key=FINAL.__contains__)

    def call(self, label: str, examples: int, *, negative: bool) -> int:
        """Raises for an answer that is not as the document says. Returns how many requests were made."""
        operation = next(o for o in (found.ok() for found in self.schema.get_all_operations()) if o.label == label)
        mode = schemathesis.GenerationMode.NEGATIVE if negative else schemathesis.GenerationMode.POSITIVE
        made = 0

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def each(case: Any) -> None:
            nonlocal made
            made += 1
            known = {"job_id": self.job_id, "worker": "W0_0"}
            if case.path_parameters and made % 2 and label not in FINAL:
                # Else nearly all would be about jobs that are not there.
                case.path_parameters.update({k: v for k, v in known.items() if k in case.path_parameters})
            if case.query:
                case.query.pop("wait", None)  # what a long-poll does in time has tests of its own
            answer = case.call(timeout=120)
            self.seen.add(answer.status_code)
            loose = label in RELATIONS and answer.status_code == 422
            # On a path that was put right the data may be right after all.
            excluded = [positive_data_acceptance] if loose else []
            case.validate_response(answer, excluded_checks=excluded)
            if answer.status_code >= 400:
                assert answer.headers["content-type"] == ["application/problem+json"], answer.headers
                assert set(json.loads(answer.content)) == {"type", "title", "status", "code", "detail", "field"}

        if negative and not (operation.body or operation.query):
            return 0  # all that can be wrong is the path, and then it is that of another operation
        with suppress(Unsatisfiable) if negative else nullcontext():
            each()
        return made

    def close(self) -> None:
        self.console.stop_waiting()
        self._server.should_exit = True
        self._thread.join(30)
        self.console.close()
        self._database.close()


@contextmanager
def api_in(folder: Path, *, few_characters: bool = False) -> Iterator[Api]:
    assert not_a_server_error in CHECKS.get_all()
    api = Api(folder, few_characters=few_characters)
    try:
        yield api
    finally:
        api.close()
