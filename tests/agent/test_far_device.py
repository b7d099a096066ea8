"""Training on a second device, as far as a machine without one can tell: see tests.agent.far_device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.agent.launches import Launched
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

ITERATIONS = 3
"""Of tests.agent.far_device, which changes torch."""


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the recipes that these tests ask for."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    asked = sorted({str(item.callspec.params["recipe"]) for item in here})
    compared = ["--compare"] if any(item.originalname.endswith("to_the_bits_of_the_cpu") for item in here) else []
    folder = tmp_path_factory.mktemp("far")
    errors, prints = folder / "errors", folder / "prints"
    process = Launched(*compared, *asked, errors=errors, prints=prints, module="tests.agent.far_device")
    try:
        assert process.wait(240) == 0, errors.read_text()
    finally:
        process.end()
    found: dict[str, Any] = json.loads(prints.read_text())
    return found


@pytest.mark.chaos
@pytest.mark.parametrize("recipe", ["deterministic", "by the host", golden("ahead-of-it"), "clipped", "fast"])
def test_a_job_there_trains_to_the_bits_of_the_cpu(recipe: str, outcome: dict[str, Any]) -> None:
    """With a NaN in the second iteration, which all leave out; a hand-over of state, and a roll-back."""
    here, there = (outcome[recipe][device]["result"] for device in ("cpu", "far"))
    assert here == there
    assert here["skipped"].count(1) == len(here["losses"]) == 6
    assert (set(here["skipped"]) == {1}) == (recipe != "clipped")
    for worker, (trained, taken_over, rolled_back) in here["state"].items():
        assert trained == taken_over
        assert (trained == rolled_back) == worker.endswith("_1"), "the stage in the middle is not trained"


@pytest.mark.parametrize("recipe", [at_length("deterministic"), golden("ahead-of-it"), "clipped", at_length("fast")])
def test_the_host_looks_at_the_device_a_few_times_a_step(recipe: str, outcome: dict[str, Any]) -> None:
    """However many micro-batches there are: with a GPU each look waits for it."""
    looks = outcome[recipe]["far"]["looks"]
    assert len(looks) == 6 and min(looks) >= ITERATIONS, "looks are not counted"
    # What follows a stage's sum, who is incomplete, and one more: norms, or whether all is finite. Of the iteration
    # with the NaN whose it was, and the same once more as it is run again.
    assert max(looks) <= 3 * (ITERATIONS + 1) + 1, looks
