"""The plans that people keep: names, what a list says of them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ui_console import ConsoleHere, console_refuses
from ui_factory import plan

from openrecycle.app.plans.library import Library
from openrecycle.app.runtime.errors import ConsoleError

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    here = ConsoleHere(tmp_path_factory.mktemp("library"))
    yield here.console.plans.library
    here.close()


def test_a_saved_plan_comes_back_as_it_was(library: Library) -> None:
    made = plan(("W1_2",))
    fingerprint = library.save(made, "  without\n W1_2 ")
    assert fingerprint == made.fingerprint
    assert library.saved_plan(fingerprint) == made
    row = next(row for row in library.saved() if row["fingerprint"] == fingerprint)
    assert row["name"] == "without W1_2"
    assert (row["period"], row["gap"], row["failed"], row["workers"]) == (
        made.metrics.period,
        made.metrics.gap,
        ["W1_2"],
        12,
    )
    library.forget(fingerprint)
    for ask in (library.saved_plan, library.forget):
        with console_refuses("unknown_plan"):
            ask(fingerprint)


def test_a_plan_that_is_stored_with_a_better_proof_says_so(library: Library) -> None:
    proven = plan(("W1_2",))
    metrics = proven.metrics.model_copy(update={"lower_bound": proven.metrics.lower_bound - 1})
    found = proven.model_copy(update={"metrics": metrics})
    for made in (found, proven, found):
        fingerprint = library.save(made, "kept")
        bound = max(made.metrics.lower_bound, library.saved_plan(fingerprint).metrics.lower_bound)
        (row,) = library.saved()
        assert library.saved_plan(fingerprint).metrics.lower_bound == row["lower_bound"] == bound
    assert bound == proven.metrics.lower_bound
    library.forget(fingerprint)


@pytest.mark.parametrize("name", ["", "   ", "x" * 81, "bell\a"])
def test_a_name_that_is_none_is_refused(library: Library, name: str) -> None:
    with pytest.raises(ConsoleError, match="name: got") as error:
        library.save(plan(), name)
    assert error.value.status == 422
    assert all(row["fingerprint"] != plan().fingerprint for row in library.saved())


def test_a_fingerprint_that_no_database_takes_is_unknown(library: Library) -> None:
    with pytest.raises(ConsoleError, match="fingerprint"):
        library.saved_plan("\0")
