"""Who leads, stays, steps down, waits: what is decided from what is seen."""

from __future__ import annotations

import pytest

from openrecycle.app.console.leadership import Action, LeaseTimes, Seen, decide
from openrecycle.db.session import Lease
from tests.golden import golden

TIMES = LeaseTimes(renew=1.0, lease=4.0, poll=0.5)
OURS = Lease(3, "me", "http://me:8501", 0.1)
THEIRS = Lease(4, "other", "http://other:8501", 0.4)
SILENT = Lease(4, "other", "http://other:8501", 4.0)
RESIGNED = Lease(4, "", "http://other:8501", 0.2)


@pytest.mark.parametrize(
    ("seen", "action", "says"),
    [
        (Seen(True, True, OURS), Action.STAY, golden("this-console-leads-term-3")),
        (Seen(False), Action.STEP_DOWN, golden("the-connection-to-the-database")),
        (Seen(True, True, THEIRS), Action.STEP_DOWN, "http://other:8501 leads"),
        (Seen(True, False, OURS), Action.STEP_DOWN, golden("taken-from-this-console")),
        (Seen(True, True, Lease(3, "", "", 0.1)), Action.STEP_DOWN, golden("taken-from-this-console")),
        (Seen(True, True, None), Action.STEP_DOWN, golden("another-console-leads")),
    ],
)
def test_of_a_console_that_leads(seen: Seen, action: Action, says: str) -> None:
    decision = decide("me", 3, seen, TIMES)
    assert decision.action is action
    assert says in decision.reason


@pytest.mark.parametrize(
    ("seen", "action", "says"),
    [
        (Seen(False), Action.WAIT, golden("the-database-does-not-answer-2")),
        (Seen(True, True, None), Action.LEAD, "nobody leads"),
        (Seen(True, True, RESIGNED), Action.LEAD, "nobody leads after term 4"),
        # Its process is gone, and the lock with it: the lease need not run out.
        (Seen(True, True, THEIRS), Action.LEAD, "nobody leads after term 4"),
        (Seen(True, False, THEIRS), Action.WAIT, golden("http-other-8501-leads-term")),
        (Seen(True, False, SILENT), Action.EVICT, golden("http-other-8501-leads-but")),
        # Its own connection broke, and the database has not noticed.
        (Seen(True, False, OURS), Action.EVICT, golden("the-lead-of-term-3")),
        # The lock is taken and no lease tells by whom: that one is not ended.
        (Seen(True, False, None), Action.WAIT, golden("another-console-is-about-to")),
        (Seen(True, False, Lease(4, "", "", 1e9)), Action.WAIT, golden("another-console-is-about-to")),
    ],
)
def test_of_a_console_that_does_not(seen: Seen, action: Action, says: str) -> None:
    decision = decide("me", None, seen, TIMES)
    assert decision.action is action
    assert says in decision.reason


def test_a_takeover_takes_less_than_ten_seconds_by_default() -> None:
    times = LeaseTimes()
    assert times.renew < times.lease / 3, "one renewal may be lost, and another late"
    assert times.lease + 2 * times.poll <= 6, "which leaves time for the jobs to be taken up"
