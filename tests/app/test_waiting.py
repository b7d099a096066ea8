"""What operators have asked of a job, and when it waited for them."""

from __future__ import annotations

from openrecycle.agent.messages.protocol import Command
from openrecycle.app.jobs.throughput import CommandQueue, Wait, Waited, after_change, apart, pauses


def test_commands_are_kept_in_order_and_the_last_word_on_a_pause_counts() -> None:
    commands = CommandQueue()
    assert commands.paused_at is None and commands.after(0) == []
    commands.add(Command(seq=1, kind="kill", worker="W0_1"), 10.0)
    commands.add(Command(seq=2, kind="pause", worker=None), 20.0, now=5.0)
    assert commands.paused_at == 5.0 and [c.kind for c in commands.after(1)] == ["pause"]
    commands.add(Command(seq=3, kind="resume", worker=None), 30.0, now=15.0)
    assert commands.paused_at is None and pauses(commands.held) == (Wait(20.0, 30.0),)
    again = CommandQueue()
    again.read(
        [
            {"seq": 1, "kind": "kill", "worker": "W0_1", "at": 10.0},
            {"seq": 2, "kind": "pause", "worker": "", "at": 20.0},
            {"seq": 3, "kind": "resume", "worker": "", "at": 30.0},
        ]
    )
    assert (again.sent, again.held) == (commands.sent, commands.held), "as the database has them"


def test_a_pause_that_was_asked_for_twice_is_one_and_lasts_until_somebody_goes_on() -> None:
    assert pauses([("pause", 1.0), ("pause", 2.0), ("resume", 3.0), ("resume", 4.0), ("pause", 5.0)]) == (
        Wait(1.0, 3.0),
        Wait(5.0, None),
    )


def test_a_choice_is_waited_for_from_when_it_is_asked_for_until_it_is_made() -> None:
    waits = after_change((), True, 2, 10.0)
    assert waits == (Wait(10.0, None, 2),) and after_change(waits, True, 3, 11.0) == waits
    assert after_change(waits, False, 3, 12.0) == (Wait(10.0, 12.0, 3),)
    assert after_change((), False, 3, 12.0) == ()


def test_a_pause_in_a_choice_is_counted_once() -> None:
    """Of a recovery in which an operator paused the job before, in and after the time that the choice took."""
    choices = (Wait(10.0, 20.0, 2), Wait(30.0, None, 3))
    assert apart([Wait(12.0, 15.0)], choices) == ()
    assert apart([Wait(5.0, 12.0)], choices) == (Wait(5.0, 10.0),)
    assert apart([Wait(8.0, 22.0)], choices) == (Wait(8.0, 10.0), Wait(20.0, 22.0))
    assert apart([Wait(25.0, None)], choices) == (Wait(25.0, 30.0),)
    assert apart([Wait(22.0, None)], choices[:1]) == (Wait(22.0, None),)
    paused = apart([Wait(15.0, 24.0)], choices)
    waited = Waited(by_generation={2: 10.0}, pauses=paused)
    assert waited.in_recovery({"at": 26.0, "resumed_ms": 18_000.0, "generation": 2}) == (10.0, 4.0)


def test_of_a_wait_counts_what_is_between_two_times() -> None:
    waited = Waited(waits=(Wait(5.0, 12.0), Wait(20.0, 22.0), Wait(28.0, None)))
    assert waited.within(10.0, 30.0) == 2.0 + 2.0 + 2.0
    assert waited.within(10.0, 20.0) == 2.0, "what begins later is none of it"
    assert waited.within(30.0, 31.0) == 1.0
