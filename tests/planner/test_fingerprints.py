"""What documents have said of themselves stays so: their fingerprints, to the letter of their numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from openrecycle.planner.check import check
from openrecycle.planner.plans.packed import pack, unpack
from openrecycle.planner.plans.plan import Plan, PlanError
from tests.conftest import at_length

GOLDEN = json.loads((Path(__file__).parent / "documents.json").read_text())
DOCUMENTS = {name: document for name, document, *_ in GOLDEN["documents"]}


def is_what_it_was(document: dict[str, Any], fingerprint: str, wrong: int) -> None:
    plan = Plan.from_json(json.dumps(document))
    assert plan.compute_fingerprint() == fingerprint
    plan = plan.model_copy(update={"fingerprint": fingerprint})
    assert len(check(plan)) == wrong
    for again in (Plan.from_json(plan.to_json()), Plan.from_json(plan.model_dump_json()), unpack(pack(plan))):
        assert again == plan
        assert again.to_json() == plan.to_json()
        assert again.compute_fingerprint() == fingerprint


@pytest.mark.parametrize(("name", "fingerprint", "wrong"), [(n, f, w) for n, _, f, w in GOLDEN["documents"]])
def test_a_valid_plan_has_the_fingerprint_it_had(name: str, fingerprint: str, wrong: int) -> None:
    assert wrong == 0
    is_what_it_was(DOCUMENTS[name], fingerprint, wrong)


@pytest.mark.parametrize(
    ("name", "op", "field", "value", "fingerprint", "wrong"),
    [
        pytest.param(*change) if (i // 3 + i) % 3 == 0 else at_length(*change)
        for i, change in enumerate(GOLDEN["changes"])
    ],
    ids=lambda v: f"{v!r:.30}" if not isinstance(v, str) or len(v) < 30 else "",
)
def test_a_plan_with_one_other_number_is_what_it_was(
    name: str, op: int, field: str, value: object, fingerprint: str | None, wrong: int
) -> None:
    """1.0 for 1, whole numbers beyond 64 bits, an O with a micro-batch and an F without, ops of no grid."""
    document = copy.deepcopy(DOCUMENTS[name])
    document["workers"]["W0_0"][op][field] = value
    if fingerprint is None:
        with pytest.raises(PlanError):
            Plan.from_json(json.dumps(document))
    else:
        is_what_it_was(document, fingerprint, wrong)
