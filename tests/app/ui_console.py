"""A real console in this process, with jobs brought into the states that the pages must show."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from openrecycle.agent.coordination.membership import FailureTimeouts
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
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.models import PlanRow
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.databases import sqlite_in

DEADLINE = 60.0
MAIN = str(Path(__file__).resolve().parents[2] / "app" / "ui" / "main.py")


def turn_to(test: AppTest, page: str) -> AppTest:
    """Has its next run be that of the page with this address. By itself AppTest finds only pages that are files."""
    test._page_hash = calc_hash(page)
    return test


def errors(test: AppTest) -> list[str]:
    """As a person reads them."""
    return [re.sub(r"\\(\W|_)", r"\1", element.value) for element in test.error]


@contextmanager
def console_refuses(code: str, field: str = "") -> Iterator[pytest.ExceptionInfo[ConsoleError]]:
    """Expects a ConsoleError with that code, of that field, where it is given."""
    with pytest.raises(ConsoleError) as refused:
        yield refused
    assert refused.value.code == code and field in ("", refused.value.field), refused.value


class Address(dict[str, Any]):
    """An address' names, as `st.query_params` has them."""

    def __setitem__(self, name: str, words: Any) -> None:
        super().__setitem__(name, words[0] if isinstance(words, list) and len(words) == 1 else words)

    def get_all(self, name: str) -> list[str]:
        words = self.get(name, [])
        return words if isinstance(words, list) else [words]


class ConsoleHere:
    """Console and database below `folder`; `close` ends both."""

    def __init__(self, folder: Path, failure_timeouts: FailureTimeouts | None = None, *, tolerance: int = 1) -> None:
        self.database: Database = sqlite_in(folder)
        self.store = Store(self.database)
        # No silence is ever too long here: tests pause as they like.
        self.console = ConsoleService(
            self.store,
            failure_timeouts=failure_timeouts or FailureTimeouts(1.0, 80_000.0, 86_000.0),
            tolerance=tolerance,
        )
        self.console.start()

    def damage(self, fingerprint: str) -> None:
        """What is stored of a plan is no plan any more."""
        with self.database.write() as session:
            session.execute(update(PlanRow).where(PlanRow.fingerprint == fingerprint).values(data=b"nonsense"))
        self.console.plans.cache.stored_anew(fingerprint)

    def close(self) -> None:
        self.console.close()
        self.database.close()


class JobHere:
    """A job of 3 pipelines x 4 stages, driven as its launcher and its workers would."""

    def __init__(self, console: ConsoleService, name: str, **changes: object) -> None:
        self.console = console
        values: dict[str, object] = {
            "name": name,
            "pipelines": 3,
            "stages": 4,
            "micro_batches": 6,
            "iterations": 40,
            "durations": {"F": 40.0, "I": 40.0, "W": 40.0},
            "paced": True,
            "demo": True,
        }
        self.spec = JobSpec.model_validate(values | changes)
        self.job_id = console.jobs.create(self.spec)[0].job_id
        self.names = [f"W{p}_{s}" for p in range(self.spec.pipelines) for s in range(self.spec.stages)]
        self.living = list(self.names)
        self.turns: dict[str, str] = {}

    def process(self, name: str) -> str:
        """The incarnation that holds the role now."""
        return f"{name}-{self.turns.get(name, 'a')}"

    def back(self, name: str) -> JobHere:
        """Another process asks to re-join in the place of one that has ended."""
        self.turns[name] = chr(ord(self.turns.get(name, "a")) + 1)
        self.living.append(name)
        self.console.reports.register(
            self.job_id, [Registration(worker=name, incarnation=self.process(name), host="node1", pid=200)]
        )
        return self

    def register(self) -> JobHere:
        """All workers register; generation 1 opens with the fault-free plan and all resume in it."""
        self.console.reports.register(
            self.job_id,
            [
                Registration(worker=name, incarnation=self.process(name), host="node1", pid=100 + i)
                for i, name in enumerate(self.names)
            ],
        )
        self.resume(1)
        return self

    def resume(self, generation: int) -> None:
        until(lambda: self.console.queries.view(self.job_id).generation == generation, f"generation {generation} opens")
        for state in ("adopted", "formed", "resumed"):
            for name in self.living:
                ack = Acknowledgement(worker=name, incarnation=self.process(name), generation=generation, state=state)  # type: ignore[arg-type]
                self.console.reports.acknowledge(self.job_id, [ack])

    def commit(self, first: int, last: int, generation: int, *, falls: float = 0.05, begins: float = 5.0) -> JobHere:
        """Iterations first..last are committed, each in a second. falls, begins: of the loss."""
        rows = [
            Iteration(
                iteration=i,
                loss=begins - falls * i,
                loss_hex=(begins - falls * i).hex(),
                seconds=1.0 + 0.1 * (generation - 1),
                generation=generation,
                living=len(self.living),
            )
            for i in range(first, last + 1)
        ]
        self.console.reports.committed(self.job_id, rows)
        return self

    def beat(self, iteration: int, generation: int, phase: str = "training") -> JobHere:
        for name in self.living:
            beat = Heartbeat(
                worker=name,
                incarnation=self.process(name),
                seq=iteration + 1,
                generation=generation,
                iteration=iteration,
                phase=phase,  # type: ignore[arg-type]
                op_milliseconds={"F": 40.5},
                resident_bytes=300 * 2**20,
            )
            self.console.reports.heartbeats(self.job_id, [beat])
        return self

    def die(self, name: str) -> JobHere:
        """The launcher sees the worker's process end."""
        self.living.remove(name)
        report = FailureReport(
            worker=name,
            incarnation=self.process(name),
            cause="exit",
            reporter="launcher node1",
            detail="killed by signal 9",
        )
        self.console.reports.failures(self.job_id, [report])
        return self

    def heal(self, name: str, generation: int) -> JobHere:
        self.resume(generation)
        self.console.reports.recovered(
            self.job_id,
            Recovery(
                worker=name, generation=generation, detected_ms=12, unblocked_ms=61, reformed_ms=107, resumed_ms=283
            ),
        )
        return self

    def finish(self) -> JobHere:
        self.console.reports.finish(self.job_id, JobFinished(state="finished"))
        return self


def until(condition: Callable[[], object], what: str = "it comes about") -> None:
    """Waits for a condition that another thread or process brings about."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {DEADLINE:g} s until {what}"
        time.sleep(0.01)
