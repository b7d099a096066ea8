"""The agreement in every order of events that two pipelines of two stages can have with one death and one return;
with more of them, and on more workers, in tests/chaos."""

from __future__ import annotations

import pytest

from openrecycle.planner.jobs.job import Worker
from tests.agent.agreement_model import IDLE, REPLICA, AgreementModel, Violation
from tests.conftest import at_length


@pytest.mark.parametrize(
    ("lazy", "waits"),
    [
        pytest.param(frozenset(), False, id="all work"),
        pytest.param(IDLE, True, id="one idle, steps wait"),
        pytest.param(REPLICA, False, id="replica dropped"),
        at_length(frozenset(), True),
        at_length(IDLE, False),
        at_length(REPLICA, True),
    ],
)
def test_every_order_leads_to_an_agreement(lazy: frozenset[Worker], waits: bool) -> None:
    found = AgreementModel(2, 2, iterations=3, deaths=1, returns=1, lazy=lazy, waits=waits).explore()
    assert found > 10_000, "the model has moved"


@pytest.mark.parametrize("without", ["barrier", "finishes", "settles"])
def test_each_rule_is_needed(without: str) -> None:
    """The model finds the order of events in which a stage's last survivor is two iterations behind, or somebody who is
    to go back has nothing to go back to any more."""
    model = AgreementModel(2, 2, iterations=3, deaths=1, returns=0, lazy=IDLE, **{without: False})  # type: ignore[arg-type]
    with pytest.raises(Violation):
        model.explore()
