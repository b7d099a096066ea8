"""ETTR and goodput: productive time / wall time, and the same weighted with throughput."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from ui_console import ConsoleHere, JobHere

from app.observing import goodput
from app.observing.goodput import Account, Accounts, figures
from db.observations import Observations
from db.store import Store


def account_of(*epochs: tuple[bool, list[float]]) -> Account:
    """(with all workers, seconds of its iterations) of one epoch after the other."""
    account, iteration = Account(), 0
    for epoch, (whole, seconds) in enumerate(epochs, start=1):
        for took in seconds:
            account.add(iteration, took, epoch, whole)
            iteration += 1
    return account


def test_a_job_without_failures_is_all_productive(here: ConsoleHere) -> None:
    job = here.console.job(JobHere(here.console, "healthy", iterations=400).register().job_id)
    account = account_of((True, [1.0] * 10))
    made = figures(account, job, begin=100.0, now=110.0)
    assert (made.fault_free, made.source) == (18.0, "measured")
    assert (made.ettr, made.goodput, made.wall, made.productive) == (1.0, 1.0, 10.0, 10.0)


def test_what_a_failure_cost_is_not_productive(here: ConsoleHere) -> None:
    """10 s of which the first start took 2, and a recovery and its redone work 3; then at half the rate."""
    job = here.console.job(JobHere(here.console, "failed", iterations=400).register().job_id)
    account = account_of((True, [3.0, 1.0, 1.0, 1.0]), (False, [5.0, 2.0, 2.0]))
    made = figures(account, job, begin=100.0, now=115.0)
    assert made.productive == 4 * 1.0 + 3 * 2.0
    assert made.ettr == pytest.approx(10 / 15)
    assert made.goodput == pytest.approx(7 / 15), "7 iterations in 15 s, where 15 would have been"


def test_standing_still_counts_against_it(here: ConsoleHere) -> None:
    job = here.console.job(JobHere(here.console, "waits", iterations=400).register().job_id)
    account = account_of((True, [1.0] * 5))
    assert figures(account, job, begin=100.0, now=120.0).ettr == 0.25


def test_the_first_iteration_of_a_new_epoch_is_judged_by_the_epoch_before(here: ConsoleHere) -> None:
    assert account_of((True, [1.0, 1.0, 1.0]), (False, [9.0])).productive == 4.0
    assert account_of((True, [9.0])).productive == 9.0, "nothing to compare it with yet"


def test_before_anything_is_known(here: ConsoleHere) -> None:
    console = here.console
    starting = console.accounts.of(console.job(JobHere(console, "starting").job_id))
    assert (starting.ettr, starting.goodput) == (None, None)
    assert starting.source in ("", "planned"), "the fault-free plan is made ahead, in its own time"
    job = console.job(JobHere(console, "no times", paced=False, durations={}).register().job_id)
    assert console.accounts.of(job).fault_free is None


def test_adding_up_in_the_database_gives_the_same(here: ConsoleHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many iterations are new, and also after the console has been away."""
    rng = random.Random(7)
    driven = JobHere(here.console, "long", iterations=5000).register()
    job, store = here.console.job(driven.job_id), Store(here.database)
    rows, epoch = [], 1
    for i in range(500):
        if rng.random() < 0.05:
            epoch += 1
        living = 12 if epoch % 2 else 11
        rows.append(
            {
                "iteration": i,
                "loss": 1.0,
                "loss_hex": (1.0).hex(),
                "seconds": rng.uniform(0.5, 2.0),
                "epoch": epoch,
                "living": living,
                "committed_at": 1000.0 + i,
            }
        )
    store.add_iterations(driven.job_id, rows)
    driven.commit(500, 500, epoch)
    assert job.state.committed == 501
    # So late that productive time is not cut to wall time.
    monkeypatch.setattr(goodput, "time", SimpleNamespace(time=lambda: 1e10))
    one_by_one = Accounts(store, Observations(here.database))
    expected = one_by_one.of(job)
    monkeypatch.setattr(goodput, "BATCH", 10)
    at_once = Accounts(store, Observations(here.database)).of(job)
    assert at_once.fault_free == pytest.approx(expected.fault_free)
    assert at_once.productive == pytest.approx(expected.productive)
    driven.commit(501, 505, epoch)
    more = one_by_one.of(job)
    assert more.productive > expected.productive
    assert Accounts(store, Observations(here.database)).of(job).productive == pytest.approx(more.productive)
