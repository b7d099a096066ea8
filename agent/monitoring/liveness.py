"""What a worker is doing: evidence of life, and when each op ran.

Evidence of life tells a worker that is slow, busy or suspended from one that hangs or is gone. This file has no torch,
no threads, and no clocks but those that are given. A silence counts only if the listener could have heard, and the
other one could have spoken. So time in which either did not get to run counts against nobody: a suspended process
group, a frozen cgroup, a callback that takes half a minute, a machine that sleeps.

The ops of an iteration are recorded if the console has asked for it by number, before it begins, so that all workers
record the same iteration. In any other iteration this costs a comparison per op.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from openrecycle.agent.config.options import ALIVE_SECONDS, TIMES_LONGEST, Timeouts
from openrecycle.agent.messages.protocol import Doing
from openrecycle.planner.jobs.errors import where_raised
from openrecycle.planner.jobs.words import encodable
from openrecycle.planner.plans.schedule import Op

# -- when each op of one iteration ran, and how long ops take -----------------------------------

_NONE = -1


@dataclass(frozen=True)
class IterationTimeline:
    """The ops of one whole iteration, in the order they ran. ends: of each, on this process's monotonic clock. seconds:
    what each took on the device, without waiting for inputs."""

    generation: int
    iteration: int
    ops: Sequence[Op]
    ends: Sequence[float]
    seconds: Sequence[float]


class Timeline:
    """Records the ops of an iteration. The training thread fills it; the reporting thread calls `want` and `take`.

    generation: the generation of the iterations to come. recording: is this iteration wanted?
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
        """Asks for an iteration that has not begun. To ask again, or too late, has no effect."""
        self._wanted = iteration

    def take(self) -> IterationTimeline | None:
        """Returns the iteration that was asked for, once, when it is complete; else None."""
        return self._done.pop() if self._done else None

    # -- the training thread --------------------------------------------------------------------

    def begin(self, iteration: int, ops: int) -> None:
        """An iteration begins. ops: how many it has, all of which will run here; 0: not all of them will."""
        self.recording = iteration == self._wanted and ops > 0
        if self.recording:
            self._iteration, self._count = iteration, 0
            if len(self._ends) != ops:
                self._ends, self._seconds = array("d", bytes(8 * ops)), array("d", bytes(8 * ops))

    def add(self, end: float, seconds: float) -> None:
        """The next op has ended. Call it only while `recording`."""
        self._ends[self._count] = end
        self._seconds[self._count] = seconds
        self._count += 1

    def finish(self, ops: Sequence[Op]) -> None:
        """The iteration of `begin` is done. ops: those that have run."""
        if self.recording:
            self.recording, self._wanted = False, _NONE
            if self._count == len(ops):
                self._done.append(
                    IterationTimeline(
                        self.generation, self._iteration, ops, self._ends.tolist(), self._seconds.tolist()
                    )
                )

    def drop(self) -> None:
        """The iteration under way is given up, or its times do not count."""
        self.recording = False


@dataclass
class OpSeconds:
    """Seconds spent per op kind since the last `take`, without waiting for inputs."""

    total: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        self.total[kind] = self.total.get(kind, 0.0) + seconds
        self.count[kind] = self.count.get(kind, 0) + 1

    def take(self) -> dict[str, float]:
        """Returns the mean milliseconds per kind, and starts anew."""
        total, count = self.total, self.count
        self.total, self.count = {}, {}
        return {kind: 1000 * total[kind] / count[kind] for kind in total if kind in count}


# -- evidence of life ---------------------------------------------------------------------------

Clock = Callable[[], float]

AT_REST, WAITING, DATA, VALIDATION, LEAVING = "", "waiting", "data", "validation", "leaving"
"""What a training thread may be doing, beside ops: nothing; waiting for a peer; loading a micro-batch; validating the
step before; giving up an iteration."""
LIMITED = frozenset({"F", "I", "W", "B", "O", DATA, VALIDATION, LEAVING})
"""What has a time limit here. Waiting for a peer, forming groups, hand-over of state and checkpoints do not: they have
time-outs of their own, or end with their peer."""
STALLS = 64
"""How many stalls of a process are remembered, the newest ones."""


def boot_clock() -> float:
    """Returns monotonic seconds. They go on while the machine is suspended, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


MOST_OF_A_TURN = 2.0
"""Seconds that one turn of a launcher's loop may take. If it takes longer, the launcher stood still."""


class LoopLag:
    """Measures how much later than it meant to a loop runs."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()

    def late(self, asked: float) -> float:
        """Returns the seconds since the last call beyond the `asked` ones; at least 0."""
        now = self._clock()
        before, self._at = self._at, now
        return max(0.0, now - before - asked)


class Silences:
    """Measures silences, for a judge that listens to several others. Times are seconds of one monotonic clock.

    pause: if the judge has heard nobody for so many seconds, it was the judge, or all the others, that did not get to
    run. Then all silences begin anew: when the judge runs again, and when somebody is heard again. So one that gets to
    run later than the others still has all of its time.
    """

    def __init__(self, pause: float, now: float) -> None:
        self.pause = pause
        self.since = now
        """No silence counts from before this time."""
        self.nobody_heard = 0.0
        """Seconds without a word from anybody; 0: somebody was heard lately."""

    def turn(self, now: float, late: float, heard: Iterable[float]) -> bool:
        """Looks at all of them, after all that has arrived was heard. Returns whether silences mean anything now.

        late: by how many seconds the judge looks later than it meant to. heard: for each that should speak, when it was
        heard last.
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
        """Returns the seconds of silence that count, for one that was last heard at `heard`."""
        return max(0.0, now - max(heard, self.since))


class OpProgress:
    """What one worker's training thread is doing, and the longest time of each kind of op. There are no locks: the
    training thread calls `at` and `waiting`, one other thread calls `beat`, and any thread calls `current`.

    Ops of the first iteration do not count, since they may be compiled in it.
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
        """The thread begins with `kind`, and what it did before has ended. index: of an op's micro-batch."""
        now = self._clock()
        before, _, since = self._now
        self._now = kind, index, now
        if self._warm and before in LIMITED:
            longest = self._candidates.get(before)
            if longest is None or now - since > longest[1] - longest[0]:
                self._candidates[before] = since, now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the block as waiting for a peer, in the middle of what the thread is doing."""
        kind, index, _ = self._now
        self.at(WAITING)
        try:
            yield
        finally:
            self.at(kind, index)

    def warmed_up(self) -> None:
        """A whole iteration has been run. From now on ops are counted."""
        self._warm = True

    def forget(self) -> None:
        """Forgets what was measured, which belongs to another place."""
        self._warm = False
        self._longest, self._candidates = {}, {}

    # -- the thread that beats ------------------------------------------------------------------

    def beat(self, late: float) -> Doing:
        """Takes over new longest times, and returns what the thread is doing. late: seconds, up to now, in which this
        process did not get to run."""
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
        """Returns the seconds that the thread may spend on `kind`; None: there is no limit."""
        if kind not in LIMITED:
            return None
        longest = self._longest.get(kind)
        limit = self._first if longest is None else max(self._least, TIMES_LONGEST * longest)
        # Now and then a validation undoes a step and takes it anew, which may take as long as a step.
        return max(limit, self.limit("O") or 0.0) if kind == VALIDATION else limit

    @property
    def longest_limit(self) -> float:
        """The longest limit of any measured op. It holds for a worker that is not heard: it may be running any op."""
        return max((self.limit(kind) or 0.0 for kind in list(self._longest)), default=self._first)

    def stood_still(self, seconds: float) -> float:
        """Returns for how many of the last `seconds` this process did not get to run."""
        now = self._clock()
        # A thread that is woken before the one that beats sees the gap first.
        unseen = max(0.0, now - self._beaten - 2 * ALIVE_SECONDS)
        return self._stalled(now - seconds, now) + min(unseen, seconds)

    def _stalled(self, since: float, until: float) -> float:
        return sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in list(self._stalls))


@dataclass(frozen=True)
class Activity:
    """What the system says of a process. state: of its main thread (R, S, D, T, ...). ticks: processor time so far."""

    state: str
    ticks: int

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    def lives_since(self, before: Activity | None) -> bool:
        """Does it run or wait for a disk, or has it computed since `before`?"""
        return self.state in ("R", "D") or (before is not None and self.ticks > before.ticks)


def activity(pid: int) -> Activity | None:
    """Returns the activity of a process on this machine; None where that can't be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Activity(fields[0], int(fields[11]) + int(fields[12]))
    except (OSError, IndexError, ValueError):
        return None


# -- where the threads of this process stand ---------------------------------------------------------

# For people who have to find out why this process does not do what it was told.

FRAMES = 4
"""How many frames of each thread are shown, the innermost first."""


def thread_stacks() -> str:
    """Returns a sentence: `MainThread at group.py:62 wait < transfers.py:96 receive < ...; launcher-pipe at ...`.

    It has all Python threads of this process except the calling one. What a library does inside is not seen.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    frames = sys._current_frames()
    places = [f"{names.get(ident, 'a thread')} at {_place(frame)}" for ident, frame in frames.items() if ident != mine]
    return "; ".join(sorted(places))


LONGEST_SAID = 700
"""At most so many characters of an exception's text: it may have a whole tensor in it."""


def describe_exception(error: BaseException) -> str:
    """Returns an exception in a line, and where in the user's own code it arose: `, at model.py:12 in forward`."""
    try:
        text = str(error) + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    except Exception as unsaid:
        text = f"what it says could not be made ({type(unsaid).__name__})"
    if len(text) > LONGEST_SAID:
        text = f"{text[:LONGEST_SAID]}…"
    what = type(error).__name__ + (f": {text}" if text else "")
    return encodable(f"{what}{where_raised(error)}")


def _place(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < FRAMES:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places)
