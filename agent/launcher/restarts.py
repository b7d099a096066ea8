"""Decides which workers are started again automatically, when, and why not. Pure: no processes, no clock.

The launcher of a job keeps this state, with a console and without: it alone starts processes, and it is the first to
hear of their end.

- A process that has ended, or was removed from the job, gets a successor after a delay. The delay doubles with each
  further successor in a row. A process keeps its count even if it is given another place meanwhile.
- A process has recovered if it has trained for `RECOVERED_SECONDS`, and beyond the iteration in which the one before it
  ended: the count begins anew. Without the second condition, a job that goes back to a checkpoint and comes to the same
  deadly sample an hour later would do so for ever.
- After `most` successors in a row the place stays empty. A process that a person starts begins a new count.
- Successors run on the node of the process before them: on another node there may be no GPU for them. If that node is
  gone, or does not answer, they wait until it is back, which does not count as a try.
- No process is started for one that was asked to leave, nor where the place is filled by now. If a worker has moved in
  there, the place that it has left is filled instead.
- A process that has been started at a place, and has said nothing yet, may never run: its node may not be able to
  start it. Until it has said something, a restart that waits for that place goes on waiting, and is not replaced,
  unless its own node is gone, and the one of that process is not.
- In a job that was asked to end, only so many are started as it needs to come to its end: one for each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from openrecycle.agent.messages.protocol import Restart

LONGEST_SECONDS = 600.0
RECOVERED_SECONDS = 3600.0


@dataclass(frozen=True)
class RestartPolicy:
    """most: how many successors in a row; 0: none is started. first: seconds until the first of them."""

    most: int
    first: float

    def delay(self, number: int) -> float:
        """Returns the seconds until a restart. number: which one in a row it is, from 1."""
        return min(self.first * 2.0 ** min(number - 1, 64), LONGEST_SECONDS)


@dataclass(frozen=True)
class Gone:
    """A process that has ended, or was fenced. worker: its place. committed: iterations of the job so far. asked:
    it was to leave, or the job is to end and does not need it for that. spoke: it has said
    something."""

    worker: str
    incarnation: str
    node: int
    committed: int
    asked: bool = False
    spoke: bool = True


@dataclass(frozen=True)
class DueRestart:
    """A process that is to be started at the place `worker`.

    number: which one in a row it is, from 1. due: when, in monotonic seconds. held: it waits for its node, and that has
    been reported. incarnation: the process that it replaces. committed: iterations of the job when that one ended.
    """

    worker: str
    number: int
    due: float
    node: int
    incarnation: str
    committed: int
    held: bool = False


@dataclass(frozen=True)
class Successor:
    """A process that was started to replace another. number, committed: as in DueRestart. since: when it began to
    train, in monotonic seconds; None: it has not yet."""

    number: int
    committed: int
    since: float | None = None

    def recovered(self, now: float, committed: int) -> bool:
        return self.since is not None and now - self.since >= RECOVERED_SECONDS and committed > self.committed


@dataclass(frozen=True)
class Restarts:
    """waiting: processes that are to be started. successors: those that run, by incarnation."""

    waiting: tuple[DueRestart, ...] = ()
    successors: Mapping[str, Successor] = field(default_factory=dict)

    def earlier(self, seconds: float) -> Restarts:
        """Returns the same, with times of a clock that is so many seconds behind."""
        return Restarts(
            tuple(replace(one, due=one.due - seconds) for one in self.waiting),
            {i: s if s.since is None else replace(s, since=s.since - seconds) for i, s in self.successors.items()},
        )


@dataclass(frozen=True)
class Due:
    """What is due. restarts: the new state, without those whose place is filled. start: the processes to start now.
    held: those whose node was just found to be gone."""

    restarts: Restarts
    start: tuple[DueRestart, ...] = ()
    held: tuple[DueRestart, ...] = ()


def ended(
    restarts: Restarts, gone: Gone, policy: RestartPolicy, now: float, there: Callable[[int], bool]
) -> tuple[Restarts, Restart | None]:
    """Decides what to do about a process that is gone. there: says whether a node is there. Returns the new state, and
    what is done; None: nothing."""
    before = restarts.successors.get(gone.incarnation)
    successors = {i: s for i, s in restarts.successors.items() if i != gone.incarnation}
    here = (one for one in restarts.waiting if one.worker == gone.worker)
    if not gone.spoke and any(there(one.node) or not there(gone.node) for one in here):
        return replace(restarts, successors=successors), None
    # A restart that waits for that place is dropped: another process had been started there.
    known = Restarts(tuple(one for one in restarts.waiting if one.worker != gone.worker), successors)
    if gone.asked or not policy.most:
        return known, None
    tries = 0 if before is None or before.recovered(now, gone.committed) else before.number
    waiting = DueRestart(gone.worker, tries + 1, now, gone.node, gone.incarnation, gone.committed, not there(gone.node))
    return _again(known, waiting, policy, now)


def moved(restarts: Restarts, moves: Mapping[str, str]) -> Restarts:
    """Returns the state after processes have moved: what waits for a place that was taken now waits for the one that is
    empty instead. moves: by the place that a process has from now on, where it was."""

    def empty(taken: str) -> str:
        place = taken
        while (source := moves.get(place, taken)) != taken:  # one that was left may have been taken, too
            place = source
        return place  # in a circle, that of the process that made room, and may never run

    waiting = {(place := empty(one.worker)): replace(one, worker=place) for one in reversed(restarts.waiting)}
    return replace(restarts, waiting=tuple(reversed(waiting.values())))


def without(restarts: Restarts, places: Collection[str]) -> Restarts:
    """Returns the state without restarts at these places, whose workers had been asked to leave before they ended."""
    return replace(restarts, waiting=tuple(one for one in restarts.waiting if one.worker not in places))


def needed(restarts: Restarts, lacking: int, empty: Callable[[str], bool | None]) -> tuple[DueRestart, ...]:
    """Returns which processes are started in a job that was asked to end: those that are due first. lacking: how many
    workers the job still needs for that, beside those that have been started. empty: as for `due`."""
    waiting = (one for one in restarts.waiting if empty(one.worker))
    return tuple(sorted(waiting, key=lambda one: (one.held, one.due))[:lacking])


def not_started(restarts: Restarts, waiting: DueRestart, policy: RestartPolicy, now: float) -> tuple[Restarts, Restart]:
    """Decides what to do when a process could not be started, which counts as a try."""
    known = replace(restarts, waiting=tuple(one for one in restarts.waiting if one != waiting))
    return _again(known, replace(waiting, number=waiting.number + 1), policy, now)


def _again(restarts: Restarts, waiting: DueRestart, policy: RestartPolicy, now: float) -> tuple[Restarts, Restart]:
    if waiting.number > policy.most:
        return restarts, Restart(number=waiting.number, most=policy.most)
    delay = policy.delay(waiting.number)
    waiting = replace(waiting, due=now + delay)
    return replace(restarts, waiting=(*restarts.waiting, waiting)), told(waiting, policy, now)


def told(waiting: DueRestart, policy: RestartPolicy, now: float) -> Restart:
    """Returns a restart as people and consoles are told of it."""
    seconds = max(0.0, round(waiting.due - now, 3))
    node = waiting.node if waiting.held else None
    return Restart(number=waiting.number, most=policy.most, seconds=seconds, node=node)


def due(restarts: Restarts, now: float, there: Callable[[int], bool], empty: Callable[[str], bool | None]) -> Due:
    """Returns what is due. there: says whether a node is there. empty: says whether a place is empty; None: the process
    there has said nothing yet."""
    waiting, start, held = list[DueRestart](), list[DueRestart](), list[DueRestart]()
    for one in restarts.waiting:
        free = empty(one.worker)
        if free is False:
            continue
        if free and one.due <= now and not there(one.node):
            if not one.held:
                one = replace(one, held=True)
                held.append(one)
        elif free and one.due <= now:
            start.append(one)
        waiting.append(one)
    return Due(replace(restarts, waiting=tuple(waiting)), tuple(start), tuple(held))


def started(restarts: Restarts, waiting: DueRestart, incarnation: str) -> Restarts:
    successor = Successor(waiting.number, waiting.committed)
    return Restarts(
        tuple(one for one in restarts.waiting if one != waiting), {**restarts.successors, incarnation: successor}
    )


def trains(restarts: Restarts, incarnation: str, now: float) -> Restarts:
    """Notes that a process trains from now on, unless that is known."""
    successor = restarts.successors.get(incarnation)
    if successor is None or successor.since is not None:
        return restarts
    return replace(restarts, successors={**restarts.successors, incarnation: replace(successor, since=now)})
