"""What waits for a console: in order, bounded, and whole again when the console is back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.messages.client import ConsoleClient, ConsoleUnavailable, Outbox
from openrecycle.agent.messages.protocol import (
    FailureReport,
    Failures,
    Iteration,
    IterationReport,
    Message,
    Recovery,
    ValidationReport,
)
from openrecycle.agent.monitoring.console_link import (
    MAX_REPORTS,
    REPORTED_ITERATIONS,
    QueuedReport,
    ReportSender,
    outbox,
)
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
    outbox: Outbox[str] = Outbox(2, weight=str.isupper)
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


GONE = FailureReport(worker="W0_0", incarnation="a", cause="exit", reporter="launcher", detail="gone")
FAILURE = QueuedReport("/failures", Failures(failures=(GONE,)), 0.0)
TIMES = Recovery(worker="W0_0", generation=2, detected_ms=1, unblocked_ms=2, reformed_ms=3, resumed_ms=4)
RECOVERY = QueuedReport("/recoveries", TIMES, 0.0)
TIMEOUT = 60.0


def test_an_end_that_is_told_late_says_so() -> None:
    """A console that was away must not take it for a death of this moment."""
    before = GONE.model_copy(update={"age_milliseconds": 5_000})
    sent = FAILURE._replace(message=Failures(failures=(before, GONE)), at=time.monotonic() - 60.0).body
    assert isinstance(sent, Failures)
    first, second = (report.age_milliseconds for report in sent.failures)
    assert second >= 60_000 and first - second == pytest.approx(5_000)


def test_iterations_share_reports_that_a_console_takes() -> None:
    waiting = outbox()
    for n in range(REPORTED_ITERATIONS + 5):
        waiting.put(iterations(n))
    waiting.put(FAILURE)
    waiting.put(iterations(REPORTED_ITERATIONS + 5))
    seen, paths = [], []
    while (report := waiting.take()) is not None:
        path, message, at = report
        paths.append(path)
        if isinstance(message, IterationReport):
            whole = IterationReport.model_validate_json(message.model_dump_json())
            seen += [i.iteration for i in whole.iterations]
            assert at + 1e6 == seen[-1], "when the newest was committed"
            age = report.body.model_dump()["age"]
            assert age == pytest.approx(time.monotonic() - at, abs=60), "as it is when it is sent"
        waiting.sent()
    assert paths == ["/iterations", "/iterations", "/failures", "/iterations"]
    assert seen == list(range(REPORTED_ITERATIONS + 6))


class Away:
    """A console. It answers nothing the first time, and meanwhile `happens` is called."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self.happens, self.came = happens, list[tuple[str, ...]]()

    def post(self, path: str, message: Message) -> None:
        workers = message.failures if isinstance(message, Failures) else ()
        self.came.append(tuple(report.worker for report in workers))
        if len(self.came) == 1:
            self.happens()
            raise ConsoleUnavailable


def test_failures_of_several_turns_that_a_console_did_not_take_are_one_batch() -> None:
    """It opened a generation for each when it was back."""
    waiting = outbox()
    more = [FAILURE._replace(message=Failures(failures=(GONE.model_copy(update={"worker": w}),))) for w in ("B", "C")]

    def meanwhile() -> None:
        for report in (more[0], iterations(0), more[1]):
            waiting.put(report)

    console = Away(meanwhile)
    waiting.put(FAILURE)
    sender = ReportSender(lambda: cast(ConsoleClient, console), str, waiting)
    sender.stop()
    sender.join(TIMEOUT)
    assert console.came == [("W0_0",), ("W0_0", "B", "C"), ()]


def test_each_of_several_failures_is_as_old_as_it_is() -> None:
    now = time.monotonic()
    waiting = outbox()
    for seconds in (60, 20, 0):
        waiting.put(FAILURE._replace(at=now - seconds))
    (report,) = waiting.all
    sent = report.body
    assert isinstance(sent, Failures)
    ages = [one.age_milliseconds for one in sent.failures]
    assert [age - ages[-1] for age in ages] == pytest.approx([60_000, 20_000, 0])


def test_an_own_loop_keeps_its_newest_iterations() -> None:
    outbox: Outbox[QueuedReport] = Outbox(1, merge=newest_iterations)
    for n in range(MAX_ITERATIONS + 5):
        outbox.put(iterations(n))
    report = outbox.take()
    assert report is not None and isinstance(report.message, IterationReport) and outbox.dropped == 0
    assert [i.iteration for i in report.message.iterations] == list(range(5, MAX_ITERATIONS + 5))
    assert report.at + 1e6 == MAX_ITERATIONS + 4, "when the newest was done"


def test_a_full_outbox_forgets_history_and_no_exit() -> None:
    waiting = outbox()
    for n in range(MAX_REPORTS // 2):
        for report in (FAILURE, RECOVERY, iterations(n)):
            waiting.put(report)
    assert waiting.all == [FAILURE, RECOVERY] * (MAX_REPORTS // 2)


def test_steps_that_are_put_right_cost_no_iteration() -> None:
    """A console is away for hours, and every other iteration is clipped."""
    waiting, count = outbox(), 20 * MAX_REPORTS
    waiting.put(FAILURE)
    for n in range(count):
        waiting.put(iterations(n))
        if n % 2:
            clipped = ValidationReport(iteration=n, coefficient=0.5, redone=True)
            waiting.put(QueuedReport("/validations", clipped, 0.0))
    kept = [report.message for report in waiting.all]
    known = [i.iteration for message in kept if isinstance(message, IterationReport) for i in message.iterations]
    assert known == list(range(count)) and FAILURE in waiting.all
    assert isinstance(kept[-1], ValidationReport) and kept[-1].iteration == count - 1, "the newest of them, too"
