"""What waits for a console: in order, bounded, and whole again when the console is back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.messages.client import Outbox
from openrecycle.agent.messages.protocol import FailureReport, Iteration, IterationReport
from openrecycle.agent.monitoring.console_link import REPORTED_ITERATIONS, QueuedReport, is_history, merge_iterations
from openrecycle.agent.own_loops.reporter import MAX_ITERATIONS, newest_iterations


@given(st.lists(st.one_of(st.integers(0, 99), st.none()), max_size=60), st.integers(1, 10))
def test_the_newest_wait_in_order_and_what_is_sent_stays(script: list[int | None], limit: int) -> None:
    """None: the sender takes a message, and is done with it at its next turn."""
    outbox: Outbox[int] = Outbox(limit)
    waiting: list[int] = []
    in_hand: int | None = None
    for step in script:
        if step is None:
            if in_hand is not None:
                outbox.sent()
            in_hand = outbox.take()
            assert in_hand == (waiting.pop(0) if waiting else None)
        else:
            outbox.put(step)
            waiting = [*waiting, step][-limit:]
            if in_hand is not None:
                assert outbox.take() == in_hand, "what is being sent is not dropped"
    assert len(outbox) == len(waiting) + (in_hand is not None)


def test_what_may_be_dropped_goes_first() -> None:
    outbox: Outbox[str] = Outbox(2, droppable=str.islower)
    for message in ("EXIT", "a", "b", "END", "LAST"):
        outbox.put(message)
    assert outbox.take() == "END"
    outbox.sent()
    assert outbox.take() == "LAST"


def iterations(first: int, count: int = 1) -> QueuedReport:
    made = tuple(
        Iteration(iteration=first + n, loss=1.0, loss_hex=(1.0).hex(), seconds=0.1, generation=1, living=4)
        for n in range(count)
    )
    return QueuedReport("/iterations", IterationReport(iterations=made), first - 1e6)


def test_an_end_that_is_told_late_says_so() -> None:
    """A console that was away must not take it for a death of this moment."""
    failure = FailureReport(worker="W0_0", incarnation="a", cause="exit", reporter="launcher", detail="gone")
    sent = QueuedReport("/failures", failure, time.monotonic() - 60.0).body
    assert isinstance(sent, FailureReport) and sent.age_milliseconds >= 60_000


def test_iterations_share_reports_that_a_console_takes() -> None:
    outbox: Outbox[QueuedReport] = Outbox(10, merge=merge_iterations, droppable=is_history)
    failure = FailureReport(worker="W0_0", incarnation="a", cause="exit", reporter="launcher", detail="gone")
    for n in range(REPORTED_ITERATIONS + 5):
        outbox.put(iterations(n))
    outbox.put(QueuedReport("/failures", failure, 0.0))
    outbox.put(iterations(REPORTED_ITERATIONS + 5))
    seen, paths = [], []
    while (report := outbox.take()) is not None:
        path, message, at = report
        paths.append(path)
        if isinstance(message, IterationReport):
            whole = IterationReport.model_validate_json(message.model_dump_json())
            seen += [i.iteration for i in whole.iterations]
            assert at + 1e6 == seen[-1], "when the newest was committed"
            age = report.body.model_dump()["age"]
            assert age == pytest.approx(time.monotonic() - at, abs=60), "as it is when it is sent"
        outbox.sent()
    assert paths == ["/iterations", "/iterations", "/failures", "/iterations"]
    assert seen == list(range(REPORTED_ITERATIONS + 6))


def test_an_own_loop_keeps_its_newest_iterations() -> None:
    outbox: Outbox[QueuedReport] = Outbox(1, merge=newest_iterations)
    for n in range(MAX_ITERATIONS + 5):
        outbox.put(iterations(n))
    report = outbox.take()
    assert report is not None and isinstance(report.message, IterationReport) and outbox.dropped == 0
    assert [i.iteration for i in report.message.iterations] == list(range(5, MAX_ITERATIONS + 5))
    assert report.at + 1e6 == MAX_ITERATIONS + 4, "when the newest was done"


def test_a_full_outbox_forgets_history_and_no_exit() -> None:
    outbox: Outbox[QueuedReport] = Outbox(3, merge=merge_iterations, droppable=is_history)
    failure = FailureReport(worker="W0_0", incarnation="a", cause="exit", reporter="launcher", detail="gone")
    for n in range(3):
        outbox.put(QueuedReport("/failures", failure, 0.0))
        outbox.put(iterations(1000 * n, REPORTED_ITERATIONS))
    kept = []
    while (report := outbox.take()) is not None:
        kept.append(report.path)
        outbox.sent()
    assert kept == ["/failures"] * 3
