"""Which workers are started again by themselves, when, and why not. Pure: no processes, no clock.

The launcher of a job keeps this, with a console and without: it alone starts processes, and hears first of their end.

- A process that has ended, or was removed from the job, gets a successor after a delay, which doubles with each further
  one in a row. Of which it is the successor a process keeps, whatever place it is given meanwhile.
- One that has trained for `RECOVERED_SECONDS`, and beyond the iteration in which the one before it ended, has
  recovered: the count begins anew. Without the second condition, a job that goes back to a checkpoint and comes to the
  same deadly sample an hour later would do so for ever.
- After `most` in a row the place stays empty. Whom a person starts begins a new count.
- Successors run on the node where the one before them ran: on another one there may be no GPU for them. Where that node
  is gone they wait until it is back, which is no try.
- Nobody replaces a process that was asked to leave, nor one whose place others have filled meanwhile. Where one has
  moved in, the place that it has left is filled.
- Of a job that was asked to end only so many are replaced as it needs to come to that: one for each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from openrecycle.agent.messages.protocol import Restart

LONGEST_SECONDS = 600.0
RECOVERED_SECONDS = 3600.0


@dataclass(frozen=True)
class RestartPolicy:
    """most: in a row; 0: nobody is started again. first: seconds until the first of them."""

    most: int
    first: float

    def delay(self, number: int) -> float:
        """Seconds until the restart of that number, from 1."""
        return min(self.first * 2.0 ** min(number - 1, 64), LONGEST_SECONDS)


@dataclass(frozen=True)
class Gone:
    """A process that has ended, or was fenced. worker: its place. there: is its node? committed: iterations of the
    job. asked: was it to leave, or is the job to end, and can without it?"""

    worker: str
    incarnation: str
    node: int
    there: bool
    committed: int
    asked: bool = False


@dataclass(frozen=True)
class DueRestart:
    """A process that is to be started. worker: at which place. number: of it in a row. due: monotonic seconds. held: it
    waits for its node, and that has been said. incarnation, committed: of whom it replaces, and how many iterations the
    job had then."""

    worker: str
    number: int
    due: float
    node: int
    incarnation: str
    committed: int
    held: bool = False


@dataclass(frozen=True)
class Successor:
    """A process that was started in another one's place. number, committed: as of DueRestart. since: when it began to
    train, in monotonic seconds; None: it has not yet."""

    number: int
    committed: int
    since: float | None = None

    def recovered(self, now: float, committed: int) -> bool:
        return self.since is not None and now - self.since >= RECOVERED_SECONDS and committed > self.committed


@dataclass(frozen=True)
class Restarts:
    """successors: those that run, by incarnation."""

    waiting: tuple[DueRestart, ...] = ()
    successors: Mapping[str, Successor] = field(default_factory=dict)

    def earlier(self, seconds: float) -> Restarts:
        """The same by a clock that is so much behind."""
        return Restarts(
            tuple(replace(one, due=one.due - seconds) for one in self.waiting),
            {i: s if s.since is None else replace(s, since=s.since - seconds) for i, s in self.successors.items()},
        )


@dataclass(frozen=True)
class Due:
    """start: these now. held: whose node is found to be gone. Those whose place is filled are in `restarts` no more."""

    restarts: Restarts
    start: tuple[DueRestart, ...] = ()
    held: tuple[DueRestart, ...] = ()


def ended(restarts: Restarts, gone: Gone, policy: RestartPolicy, now: float) -> tuple[Restarts, Restart | None]:
    """A process is gone. What is done about it; None: nothing."""
    before = restarts.successors.get(gone.incarnation)
    successors = {i: s for i, s in restarts.successors.items() if i != gone.incarnation}
    # Who waits for that place waits no more: somebody was started there.
    known = Restarts(tuple(one for one in restarts.waiting if one.worker != gone.worker), successors)
    if gone.asked or not policy.most:
        return known, None
    tries = 0 if before is None or before.recovered(now, gone.committed) else before.number
    waiting = DueRestart(gone.worker, tries + 1, now, gone.node, gone.incarnation, gone.committed, not gone.there)
    return _again(known, waiting, policy, now)


def moved(restarts: Restarts, source: str, to: str) -> Restarts:
    """The process of one place has taken another, and left its own."""
    waiting = tuple(replace(one, worker=source) if one.worker == to else one for one in restarts.waiting)
    return replace(restarts, waiting=waiting)


def without(restarts: Restarts, places: Collection[str]) -> Restarts:
    """Nobody is started at those: whoever was there had been asked to leave before it ended."""
    return replace(restarts, waiting=tuple(one for one in restarts.waiting if one.worker not in places))


def needed(restarts: Restarts, lacking: int) -> tuple[DueRestart, ...]:
    """Of a job that was asked to end, who is started nevertheless: those that come first. lacking: so many more than
    there are it needs."""
    return tuple(sorted(restarts.waiting, key=lambda one: (one.held, one.due))[:lacking])


def not_started(restarts: Restarts, waiting: DueRestart, policy: RestartPolicy, now: float) -> tuple[Restarts, Restart]:
    """Its process could not be started, which was a try."""
    known = replace(restarts, waiting=tuple(one for one in restarts.waiting if one != waiting))
    return _again(known, replace(waiting, number=waiting.number + 1), policy, now)


def _again(restarts: Restarts, waiting: DueRestart, policy: RestartPolicy, now: float) -> tuple[Restarts, Restart]:
    if waiting.number > policy.most:
        return restarts, Restart(number=waiting.number, most=policy.most)
    delay = policy.delay(waiting.number)
    waiting = replace(waiting, due=now + delay)
    return replace(restarts, waiting=(*restarts.waiting, waiting)), told(waiting, policy, now)


def told(waiting: DueRestart, policy: RestartPolicy, now: float) -> Restart:
    """As people and consoles are told of it."""
    seconds = max(0.0, round(waiting.due - now, 3))
    node = waiting.node if waiting.held else None
    return Restart(number=waiting.number, most=policy.most, seconds=seconds, node=node)


def due(restarts: Restarts, now: float, there: Callable[[int], bool], empty: Callable[[str], bool]) -> Due:
    """there: is that node? empty: is that place?"""
    waiting, start, held = list[DueRestart](), list[DueRestart](), list[DueRestart]()
    for one in restarts.waiting:
        if not empty(one.worker):
            continue
        if one.due <= now and not there(one.node):
            if not one.held:
                one = replace(one, held=True)
                held.append(one)
        elif one.due <= now:
            start.append(one)
        waiting.append(one)
    return Due(replace(restarts, waiting=tuple(waiting)), tuple(start), tuple(held))


def started(restarts: Restarts, waiting: DueRestart, incarnation: str) -> Restarts:
    successor = Successor(waiting.number, waiting.committed)
    return Restarts(
        tuple(one for one in restarts.waiting if one != waiting), {**restarts.successors, incarnation: successor}
    )


def trains(restarts: Restarts, incarnation: str, now: float) -> Restarts:
    """That process does, from now on, or has done already."""
    successor = restarts.successors.get(incarnation)
    if successor is None or successor.since is not None:
        return restarts
    return replace(restarts, successors={**restarts.successors, incarnation: replace(successor, since=now)})
