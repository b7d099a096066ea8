"""Stage times and bytes as a table, and back."""

from __future__ import annotations

import pytest

from openrecycle.app.plans.profiles import HELP, edited, table
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc

PLAIN = job_doc(Job.uniform(2, 3, 4))


def test_a_cell_changes_one_number() -> None:
    made = edited(PLAIN, {1: {"F": 1.5, "send on": 0.25}, 2: {"W": 2}})
    job = made.job()
    assert [p.forward for p in job.profiles] == [1, 1.5, 1]
    assert job.profiles[2].weight_backward == 2
    assert (job.transfers, job.backward_transfers) == ((0, 0.25), (0, 0))
    assert edited(made, {1: {"send back": 0.25}}).backward_transfers == (), "the same both ways needs no words"


def test_bytes_are_in_megabytes() -> None:
    edits = {s: {"activation": 1.5, "weights": 100, "capacity": 4000} for s in range(3)}
    job = edited(PLAIN, edits).job()
    assert job.profiles[0].activation_bytes == 1_500_000 and job.capacity_bytes == (4_000_000_000,) * 3
    rows = table(edited(PLAIN, edits), memory=True)
    assert rows["activation"] == [1.5] * 3 and rows["capacity"] == [4000] * 3
    assert set(rows) == {"stage", *HELP}


def test_what_is_shown_comes_back_unchanged() -> None:
    made = edited(PLAIN, {0: {"O": 0.5, "send on": 0.1, "send back": 0.2, "weights": 3}})
    rows = table(made, memory=True)
    cells = {s: {name: column[s] for name, column in rows.items() if name != "stage"} for s in range(3)}
    assert edited(made, cells) == made


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({1: {"F": None}}, "stage 1, F: got None"),
        ({1: {"F": -1}}, "stage 1, F: got -1"),
        ({1: {"I": float("nan")}}, "stage 1, I: got nan"),
        ({2: {"send on": 1}}, "stage 2, send on: got 1, expected nothing"),
    ],
)
def test_a_cell_that_is_none_is_named(edits: dict[int, dict[str, object]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        edited(PLAIN, edits)


def test_what_the_cells_mean_together_is_said_by_the_job() -> None:
    with pytest.raises(InputError, match=r"profiles\[0\].forward: got 0"):
        edited(PLAIN, {0: {"F": 0}}).job()
