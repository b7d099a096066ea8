"""What a worker is at: evidence of life, and when each op ran.

Evidence of life tells a worker that is slow, at work or suspended from one that hangs or is gone. No torch, no threads,
and no clock but those that are given. A silence means something only to one who could have heard, and of one who could
have spoken: time in which either did not get to run (a suspended process group, a frozen cgroup, a callback that takes
half a minute, a machine that sleeps) is held against nobody.

An iteration's ops are recorded when the console has asked for it by its number, ahead of time, so that all workers
record the same one; any other costs a comparison per op.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from openrecycle.agent.config.options import ALIVE_SECONDS, TIMES_LONGEST, Timeouts
from openrecycle.agent.messages.protocol import Doing
from openrecycle.planner.jobs.errors import in_user_code
from openrecycle.planner.jobs.words import encodable
from openrecycle.planner.plans.schedule import Op

# -- when each op of one iteration ran, and how long ops take -----------------------------------

_NONE = -1


@dataclass(frozen=True)
class IterationTimeline:
    """One whole iteration. ops: in the order they ran. ends, seconds: of each, on this process's
    monotonic clock; seconds is what it took on the device, waiting for inputs not counted."""

    generation: int
    iteration: int
    ops: Sequence[Op]
    ends: Sequence[float]
    seconds: Sequence[float]


class Timeline:
    """Filled by the training thread; `want` and `take` are for the reporting one.

    generation: the one that the iterations to come belong to. recording: is this iteration wanted?
    """

    def __init__(self) -> None:
        self.generation = 0
        self.recording = False
        self._wanted = _NONE
        self._iteration = _NONE
        self._count = 0
        self._ends = array("d")
        self._seconds = array("d")
        self._done: deque[IterationTimeline] = deque(maxlen=1)

    def want(self, iteration: int) -> None:
        """Asks for an iteration that has not begun; said again, or too late, it changes nothing."""
        self._wanted = iteration

    def take(self) -> IterationTimeline | None:
        """What was asked for, once it is there; once."""
        return self._done.pop() if self._done else None

    # -- the training thread --------------------------------------------------------------------

    def begin(self, iteration: int, ops: int) -> None:
        """Iteration `iteration` begins, of so many ops, all of which run here; 0: not all of them will."""
        self.recording = iteration == self._wanted and ops > 0
        if self.recording:
            self._iteration, self._count = iteration, 0
            if len(self._ends) != ops:
                self._ends, self._seconds = array("d", bytes(8 * ops)), array("d", bytes(8 * ops))

    def add(self, end: float, seconds: float) -> None:
        """The next op has ended. Only while `recording`."""
        self._ends[self._count] = end
        self._seconds[self._count] = seconds
        self._count += 1

    def finish(self, ops: Sequence[Op]) -> None:
        """The iteration that `begin` spoke of is done, with these ops."""
        if self.recording:
            self.recording, self._wanted = False, _NONE
            if self._count == len(ops):
                self._done.append(
                    IterationTimeline(
                        self.generation, self._iteration, ops, self._ends.tolist(), self._seconds.tolist()
                    )
                )

    def drop(self) -> None:
        """The iteration in flight is abandoned, or its numbers count no more."""
        self.recording = False


@dataclass
class OpSeconds:
    """Seconds spent per op kind since the last `take`; waiting for inputs does not count."""

    total: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        self.total[kind] = self.total.get(kind, 0.0) + seconds
        self.count[kind] = self.count.get(kind, 0) + 1

    def take(self) -> dict[str, float]:
        """Mean milliseconds per kind; starts anew."""
        total, count = self.total, self.count
        self.total, self.count = {}, {}
        return {kind: 1000 * total[kind] / count[kind] for kind in total if kind in count}


# -- evidence of life ---------------------------------------------------------------------------

Clock = Callable[[], float]

AT_REST, WAITING, DATA, VALIDATION, LEAVING = "", "waiting", "data", "validation", "leaving"
"""What a training thread is at, beside its ops: nothing in hand; waiting for a peer; loading a micro-batch; settling
the step before; dropping an iteration."""
LIMITED = frozenset({"F", "I", "W", "B", "O", DATA, VALIDATION, LEAVING})
"""What has a limit. Waiting for a peer, forming groups, state that is handed over and checkpoints have none here: they
have time-outs of their own, or end with their peer."""
STALLS = 64
"""So many of a process's own are remembered, the newest."""


def boot_clock() -> float:
    """Monotonic seconds that go on while the machine is suspended, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


MOST_OF_A_TURN = 2.0
"""Seconds that a turn of a launcher's loop may take: one that takes longer stood still."""


class LoopLag:
    """Of a loop that asks to run every so often: how much later than that it did."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()

    def late(self, asked: float) -> float:
        """Seconds since the call before, beyond the `asked` ones; 0 or more."""
        now = self._clock()
        before, self._at = self._at, now
        return max(0.0, now - before - asked)


class Silences:
    """What a judge that listens to several others holds for a silence. Times are seconds of one monotonic clock.

    pause: after so many seconds without hearing anybody it is the judge, or all of them, that did not get to run.
    All silences begin anew then: when the judge runs again, and when somebody is heard again. Who is woken
    later than the others has all of its time.
    """

    def __init__(self, pause: float, now: float) -> None:
        self.pause = pause
        self.since = now
        """No silence began before."""
        self.nobody_heard = 0.0
        """For how many seconds there has been no word from anybody; 0: somebody was heard lately."""

    def turn(self, now: float, late: float, heard: Iterable[float]) -> bool:
        """One look at all of them, after everything that waited has been heard; does it mean anything?

        late: seconds by which the judge was later to look than it meant to. heard: when each of those who should
        speak did so last.
        """
        if late > self.pause:
            self.since = now
            return False
        times = list(heard)
        silent = now - max([self.since, *times])
        if len(times) > 1 and silent > self.pause:
            self.nobody_heard = silent
            return False
        if self.nobody_heard:
            self.nobody_heard = 0.0
            self.since = now
            return False
        return True

    def of(self, heard: float, now: float) -> float:
        """Seconds that count, of one who was heard last at `heard`."""
        return max(0.0, now - max(heard, self.since))


class OpProgress:
    """What one worker's training thread is at, and what its ops have taken at most. No locks: `at` and `waiting` are
    the training thread's, `beat` that of one other thread, and `current` anybody's.

    Ops of the first iteration are not counted, in which they may be compiled.
    """

    def __init__(self, timeouts: Timeouts | None = None, clock: Clock = time.monotonic) -> None:
        timeouts = timeouts or Timeouts()
        self._least, self._first, self._clock = timeouts.op, timeouts.first_op, clock
        self._now: tuple[str, tuple[int, int] | None, float] = AT_REST, None, clock()
        self._warm = False
        self._longest: dict[str, float] = {}
        self._candidates: dict[str, tuple[float, float]] = {}
        self._stalls: deque[tuple[float, float]] = deque(maxlen=STALLS)
        self._beaten = self._now[2]

    # -- the training thread --------------------------------------------------------------------

    def at(self, kind: str, index: tuple[int, int] | None = None) -> None:
        """What it was at has ended; it begins with this."""
        now = self._clock()
        before, _, since = self._now
        self._now = kind, index, now
        if self._warm and before in LIMITED:
            longest = self._candidates.get(before)
            if longest is None or now - since > longest[1] - longest[0]:
                self._candidates[before] = since, now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """For a peer, in the middle of what it is at."""
        kind, index, _ = self._now
        self.at(WAITING)
        try:
            yield
        finally:
            self.at(kind, index)

    def warmed_up(self) -> None:
        """A whole iteration has been run: the ops of those to come are counted."""
        self._warm = True

    def forget(self) -> None:
        """What was measured is of another place."""
        self._warm = False
        self._longest, self._candidates = {}, {}

    # -- the thread that beats ------------------------------------------------------------------

    def beat(self, late: float) -> Doing:
        """late: seconds, up to now, in which this process did not get to run."""
        now = self._beaten = self._clock()
        if late > ALIVE_SECONDS:
            self._stalls.append((now - late, now))
        candidates, self._candidates = self._candidates, {}
        for kind, (since, until) in candidates.items():
            seconds = until - since - self._stalled(since, until)
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        return self.current()

    def current(self) -> Doing:
        kind, index, since = self._now
        now = self._clock()
        pipeline, micro_batch = index or (None, None)
        seconds = max(0.0, now - since - self._stalled(since, now))
        return Doing(kind=kind, pipeline=pipeline, micro_batch=micro_batch, seconds=seconds, limit=self.limit(kind))

    def limit(self, kind: str) -> float | None:
        """Seconds that it may be at `kind`; None: that has no limit."""
        if kind not in LIMITED:
            return None
        longest = self._longest.get(kind)
        limit = self._first if longest is None else max(self._least, TIMES_LONGEST * longest)
        # Now and then a step is undone and taken anew, which is no glance at it any more.
        return max(limit, self.limit("O") or 0.0) if kind == VALIDATION else limit

    @property
    def longest_limit(self) -> float:
        """Of any op that has been measured: who is not heard may be at any."""
        return max((self.limit(kind) or 0.0 for kind in list(self._longest)), default=self._first)

    def stood_still(self, seconds: float) -> float:
        """Of the last so many, those in which this process did not get to run."""
        now = self._clock()
        # Whoever is woken before the thread that beats sees the gap first.
        unseen = max(0.0, now - self._beaten - 2 * ALIVE_SECONDS)
        return self._stalled(now - seconds, now) + min(unseen, seconds)

    def _stalled(self, since: float, until: float) -> float:
        return sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in list(self._stalls))


@dataclass(frozen=True)
class Activity:
    """What the system says of a process. state: R, S, D, T, ... of its main thread. ticks: processor time so far."""

    state: str
    ticks: int

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    def lives_since(self, before: Activity | None) -> bool:
        """Does it run, wait for a disk, or has it computed since then?"""
        return self.state in ("R", "D") or (before is not None and self.ticks > before.ticks)


def activity(pid: int) -> Activity | None:
    """Of a process of this machine; None where that can't be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Activity(fields[0], int(fields[11]) + int(fields[12]))
    except (OSError, IndexError, ValueError):
        return None


# -- where the threads of this process stand ---------------------------------------------------------

# For who has to find out why this process does not do what it was told.

FRAMES = 4
"""Innermost first, of each thread."""


def thread_stacks() -> str:
    """One sentence: `MainThread at group.py:62 wait < transfers.py:96 receive < ...; launcher-pipe at ...`.

    Of this process's Python threads but the one that asks; what a library does inside is not seen.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    frames = sys._current_frames()
    describe_exception = [
        f"{names.get(ident, 'a thread')} at {_place(frame)}" for ident, frame in frames.items() if ident != mine
    ]
    return "; ".join(sorted(describe_exception))


LONGEST_SAID = 700
"""Characters of what an exception says: it may have a whole tensor in it."""


def describe_exception(error: BaseException) -> str:
    """An exception in a line, and where in the user's own code it came about: `, at model.py:12 in forward`."""
    own = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if in_user_code(frame)]
    place = "".join(f", at {code.co_filename}:{line} in {code.co_name}" for code, line in own[-1:])
    try:
        text = str(error) + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    except Exception as unsaid:
        text = f"what it says could not be made ({type(unsaid).__name__})"
    if len(text) > LONGEST_SAID:
        text = f"{text[:LONGEST_SAID]}…"
    what = type(error).__name__ + (f": {text}" if text else "")
    return encodable(f"{what}{place}")


def _place(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < FRAMES:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places)
