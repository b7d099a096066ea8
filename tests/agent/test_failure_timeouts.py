"""The console's time-outs and those of a job's agents, where both are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.planner.jobs.errors import InputError

pytestmark = pytest.mark.processes

SPEC = JobSpec(name="a job", pipelines=1, stages=1, micro_batches=1, iterations=10)


def open_console(path: Path, **timeouts: float) -> tuple[ConsoleService, Database]:
    database = Database(f"sqlite:///{path / 'console.db'}")
    database.upgrade()
    return ConsoleService(Store(database), failure_timeouts=FailureTimeouts(**timeouts)), database


def spec(timeouts: Timeouts) -> JobSpec:
    return SPEC.model_copy(update={"transfer_timeout": timeouts.transfer, "group_timeout": timeouts.group})


def test_the_defaults_of_both_sides_go_together() -> None:
    failure_timeouts, agents = FailureTimeouts(), Timeouts()
    assert (
        failure_timeouts.heartbeat < failure_timeouts.suspect < failure_timeouts.dead < agents.transfer < agents.group
    )


def test_a_job_whose_agents_give_up_before_the_console_does_is_refused(tmp_path: Path) -> None:
    console, database = open_console(tmp_path, dead=60)
    with pytest.raises(ConsoleError) as refused:
        console.jobs.create(spec(Timeouts(transfer=45.0)))
    assert refused.value.status == 422
    assert "transfer_timeout: got 45.0," in refused.value.detail
    created, _ = console.jobs.create(spec(Timeouts(transfer=61)))
    assert console.jobs.find(created.job_id).spec.transfer_timeout == 61
    console.jobs.create(SPEC)  # a loop of one's own does not say
    console.close()
    database.close()


def test_a_console_that_comes_back_with_other_time_outs_says_whom_it_does_not_suit(tmp_path: Path) -> None:
    console, database = open_console(tmp_path)
    job_id = console.jobs.create(spec(Timeouts(transfer=45.0)))[0].job_id
    console.close()
    database.close()
    console, database = open_console(tmp_path, dead=60)
    console.start()
    said = [event["text"] for event in console.queries.events(job_id, 0, 100) if event["severity"] == "warning"]
    console.close()
    database.close()
    assert len(said) == 1
    assert "transfer_timeout: got 45.0," in said[0]


@pytest.mark.parametrize("timeouts", [{"transfer": 0.0}, {"group": 120.0}, {"form": float("nan")}, {"transfer": 1e9}])
def test_time_outs_that_do_not_go_together(timeouts: dict[str, float]) -> None:
    with pytest.raises(InputError) as error:
        Timeouts(**timeouts)
    assert error.value.field == f"faults.timeouts.{next(iter(timeouts))}"
