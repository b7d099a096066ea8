"""The agreement in every order of events: two deaths on 2 x 2, a death and a return on 3 x 2."""

from __future__ import annotations

import pytest

from openrecycle.planner.jobs.job import Worker
from tests.agent.agreement_model import IDLE, REPLICA, AgreementModel

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("waits", [False, True], ids=["staggered", "waits"])
@pytest.mark.parametrize("lazy", [frozenset(), IDLE, REPLICA], ids=["all-work", "one-idle", "replica-dropped"])
def test_two_deaths_on_two_by_two(lazy: frozenset[Worker], waits: bool) -> None:
    found = AgreementModel(2, 2, iterations=3, deaths=2, returns=1, lazy=lazy, waits=waits).explore()
    assert found > 100_000, "the model has moved"


@pytest.mark.parametrize("lazy", [IDLE, REPLICA], ids=["one-idle", "replica-dropped"])
def test_a_death_and_a_return_on_three_by_two(lazy: frozenset[Worker]) -> None:
    found = AgreementModel(3, 2, iterations=2, deaths=1, returns=1, lazy=lazy).explore()
    assert found > 100_000, "the model has moved"
