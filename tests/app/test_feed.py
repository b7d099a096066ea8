"""The event feed: validations on steps, and who has taken note of what; the newest lines of workers."""

from __future__ import annotations

import pytest
from ui_console import ConsoleHere, JobHere, console_refuses

from openrecycle.agent.messages.protocol import LogLine, LogLines, ValidationReport
from openrecycle.app.jobs import measurements
from openrecycle.app.runtime.errors import ConsoleError
from tests.golden import golden

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("report", "severity", "words"),
    [
        (ValidationReport(iteration=7, coefficient=None, redone=False), "warning", "iteration 7 is skipped"),
        (ValidationReport(iteration=7, coefficient=None, redone=True), "warning", golden("was-rolled-back")),
        (ValidationReport(iteration=7, coefficient=0.25, redone=True), "info", golden("clipped-to-0-25-of")),
        (ValidationReport(iteration=7, coefficient=1.0, redone=True), "info", golden("without-the-clipping")),
    ],
)
def test_a_validation_is_a_line_of_the_feed_once(
    here: ConsoleHere, report: ValidationReport, severity: str, words: str
) -> None:
    console = here.console
    job_id = JobHere(console, "steps").job_id
    for _ in range(2):
        console.reports.validated(job_id, report)
    lines = [e for e in console.queries.view(job_id).events if e.kind == "step"]
    assert [(e.severity, words in e.text) for e in lines] == [(severity, True)]


def test_what_somebody_has_taken_note_of_says_who(here: ConsoleHere) -> None:
    console = here.console
    job = JobHere(console, "noted").register().commit(0, 3, 1).die("W1_2").heal("W1_2", 2)
    notable = [e for e in console.queries.view(job.job_id).events if e.severity != "info"]
    assert notable and not any(e.seen_by for e in notable)
    assert console.operators.acknowledge(job.job_id, [notable[0].seq, 10_000], "Ann") == 1
    assert console.operators.acknowledge(job.job_id, [e.seq for e in notable], "Bob") == len(notable) - 1
    by = {e.seq: e.seen_by for e in console.queries.view(job.job_id).events}
    assert [by[e.seq] for e in notable] == ["Ann", *["Bob"] * (len(notable) - 1)]


def lines(*texts: str, worker: str = "W0_0", skipped: int = 0) -> LogLines:
    made = tuple(LogLine(at=1.0, text=text) for text in texts)
    return LogLines(worker=worker, incarnation=f"{worker}-a", lines=made, skipped=skipped)


def test_the_newest_lines_of_each_worker_are_kept(here: ConsoleHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "LINES", 21)
    console, job_id = here.console, JobHere(here.console, "logs").register().job_id
    book = console.jobs.find(job_id).measurements.logs
    for i in range(25):
        console.reports.printed(job_id, lines(str(i)))
    assert [line.text for line in book.lines("W0_0")] == [str(i) for i in range(4, 25)]
    console.reports.printed(job_id, lines("more", skipped=1234))
    assert [line.text for line in book.lines("W0_0")][-2:] == [golden("1-234-lines-left-out"), "more"]
    assert book.lines("W0_1") == ()
    with console_refuses("unknown_worker"):
        console.reports.printed(job_id, lines("x", worker="W8_8"))
    with pytest.raises(ConsoleError, match="expected 'W0_0-a', the newest"):
        console.reports.printed(job_id, LogLines(worker="W0_0", incarnation="other", lines=()))


def test_the_last_lines_of_one_that_is_out_are_kept(here: ConsoleHere) -> None:
    console, job = here.console, JobHere(here.console, "logs").register()
    book = console.jobs.find(job.job_id).measurements.logs
    job.die("W0_0")
    console.reports.printed(job.job_id, lines("why it ended"))
    job.back("W0_0")
    console.reports.printed(job.job_id, lines("late"))
    assert [line.text for line in book.lines("W0_0")] == ["why it ended", "late"]
