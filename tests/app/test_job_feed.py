"""Lines of the feed that repeat: one line with a count, in order with everything else that happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from ui_console import ConsoleHere, JobHere, console_refuses

from openrecycle.agent.coordination.membership import Note, Stalled
from openrecycle.app.console.view import EventView
from openrecycle.app.jobs.live_job import WITHIN, JobFeed
from openrecycle.app.ui.worker_dialog import feed_html
from tests.golden import golden

pytestmark = pytest.mark.processes


def stood_still(seconds: float) -> Note:
    text = f"the console stood still for {seconds} s; that time is not held against the workers"
    return Note("warning", "console", text)


def silent(worker: str, seconds: float) -> Note:
    return Note("warning", "worker", f"{worker} has not been heard for {seconds} s (dead at 20 s)", worker)


OPENED = Note("info", "generation", "generation 2 opened")


class Feed:
    """What the database would have of it."""

    def __init__(self) -> None:
        self.job = JobFeed()
        self.rows: list[dict[str, object]] = []

    def say(self, *notes: Note, now: float) -> None:
        fresh, repeats = self.job.split(notes, now)
        assert [row["seq"] for row in fresh] == list(range(len(self.rows) + 1, len(self.rows) + len(fresh) + 1))
        new = [{**row, "at": now, "last_at": now, "count": 1} for row in fresh]
        for row in repeats:
            self.rows[row["seq"] - 1].update(row)
        self.rows += new
        self.job.stored(new, repeats)
        assert self.job.last == len(self.rows)

    @property
    def told(self) -> list[tuple[object, ...]]:
        return [(row["count"], row["last_at"], str(row["text"]).partition(" for")[0]) for row in self.rows]


def test_what_is_said_again_and_again_is_one_line() -> None:
    feed = Feed()
    for at in range(40):
        feed.say(stood_still(2.5 + at), now=100.0 + at)
        feed.say(silent("W0_1", at / 7), now=100.0 + at)
    assert feed.told == [(40, 139.0, golden("the-console-stood-still")), (40, 139.0, golden("w0-1-has-not-been"))]
    assert "41.5 s" in str(feed.rows[0]["text"]), "it says what it said last"


def test_each_worker_has_its_own_line() -> None:
    feed = Feed()
    feed.say(silent("W0_1", 5.1), silent("W0_2", 5.2), now=1.0)
    feed.say(silent("W0_2", 6.1), now=2.0)
    assert [row["count"] for row in feed.rows] == [1, 2]


def test_what_happens_between_ends_it() -> None:
    feed = Feed()
    feed.say(stood_still(3), now=1.0)
    feed.say(stood_still(4), OPENED, now=2.0)
    feed.say(stood_still(5), now=3.0)
    feed.say(OPENED, now=4.0)
    feed.say(OPENED, now=5.0)
    said = [(row["count"], row["kind"]) for row in feed.rows]
    assert said == [(2, "console"), (1, "generation"), (1, "console"), (1, "generation"), (1, "generation")]


def test_a_long_silence_ends_it_too() -> None:
    feed = Feed()
    for at in (0.0, WITHIN, 2 * WITHIN, 3 * WITHIN + 1):
        feed.say(stood_still(3), now=at)
    assert [row["count"] for row in feed.rows] == [3, 1]


def test_it_goes_on_after_a_restart() -> None:
    feed = Feed()
    feed.say(silent("W0_1", 5.1), now=0.0)
    feed.say(OPENED, stood_still(3), silent("W0_1", 5.2), now=1.0)
    feed.job = JobFeed()
    feed.job.read(len(feed.rows), reversed(feed.rows))
    feed.say(stood_still(4), silent("W0_1", 6.2), now=2.0)
    assert [row["count"] for row in feed.rows] == [1, 1, 2, 2]


@pytest.fixture(scope="module")
def job(here: ConsoleHere) -> Iterator[JobHere]:
    yield JobHere(here.console, "folding").register()


def test_the_feed_of_a_job_has_few_rows(here: ConsoleHere, job: JobHere, monkeypatch: pytest.MonkeyPatch) -> None:
    console, live = here.console, here.console.jobs.find(job.job_id)
    before = live.feed.last
    for seconds in (2.0, 3.5, 61.25):
        live.apply(Stalled(seconds))
    (row,) = console.queries.events(job.job_id, before, 100)
    assert (row["seq"], row["count"], row["severity"]) == (before + 1, 3, "warning")
    assert row["last_at"] > row["at"] and "61.2 s" in row["text"]
    shown = console.queries.view(job.job_id).events[0]
    assert (shown.seq, shown.count, shown.last_at) == (row["seq"], 3, row["last_at"])
    # After an answer of the database that was lost, memory is what the database has.
    apply = here.store.apply

    def unanswered(*change: Any) -> None:
        apply(*change)
        raise OperationalError("a statement", {}, RuntimeError("answer lost"))

    with monkeypatch.context() as network, console_refuses("unavailable"):
        network.setattr(here.store, "apply", unanswered)
        live.apply(Stalled(4))
    live.apply(Stalled(4.5))
    rows = console.queries.events(job.job_id, before, 100)
    assert [r["count"] for r in rows if "stood still" in r["text"]] == [5]
    # What somebody has taken note of, and happens again, is to be seen again.
    console.operators.acknowledge(live.job_id, [before + 1], "ada")
    live.apply(Stalled(5))
    rows = console.queries.events(job.job_id, before, 100)
    assert [r["count"] for r in rows if "stood still" in r["text"]] == [5, 1]
    assert [r["seq"] for r in rows] == list(range(before + 1, live.feed.last + 1)), "no gaps"
    assert console.queries.events(job.job_id, 0, 1)[0]["count"] == 1


def test_what_went_wrong_is_shown_however_much_was_said_after_it(here: ConsoleHere) -> None:
    job = JobHere(here.console, "buried").register()
    live = here.console.jobs.find(job.job_id)
    live.record(Note("error", "failure", "gone", "W0_0"))
    for number in range(12):
        live.record(Note("info", "operator", str(number)))
    shown = here.console.queries.view(job.job_id, events=5).events
    assert [event.text for event in shown if event.severity == "info"] == ["11", "10", "9", "8", "7"]
    assert [event.text for event in shown[5:]] == ["gone"]


def test_the_page_says_how_often_and_when_last() -> None:
    line = EventView(1, 1_000_000.0, "warning", "console", None, "it stood still", "", 1_234, 1_000_600.0)
    shown = feed_html([line, replace(line, count=1)], None, 1_000_000.0)
    assert shown.count("or-times") == 1 and "1,234 times, last 13:56:40</b>" in shown
    overnight = replace(line, last_at=1_090_000.0)
    assert "last 14:46:40</b>" not in feed_html([overnight], "UTC") and "13 January</b>" in feed_html(
        [overnight], "UTC"
    )
