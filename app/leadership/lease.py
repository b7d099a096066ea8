"""Keeps the lead, or waits for it: what a console does about it is a function without a clock or a database (`decide`),
and a thread of its own does that and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.db.leadership import LeaderSession, Lease
from openrecycle.db.session import Database, DatabaseError

log = structlog.get_logger()


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds. renew: between two renewals of the lease. lease: without renewal, after which it has run out.
    poll: between two looks of a console that does not lead. A takeover takes at most about lease + 2 poll,
    and the reading of the jobs."""

    renew: float = 1.0
    lease: float = 4.0
    poll: float = 0.5


class Action(Enum):
    STAY = "stay"  # and renew the lease again
    STEP_DOWN = "step down"
    LEAD = "lead"  # claim a new term
    EVICT = "evict"  # end the sessions of a leader that does not run, or those that this console had before
    WAIT = "wait"


@dataclass(frozen=True)
class Seen:
    """reached: the database answered. locked: this console's session holds the lock. lease: None where there
    is none yet."""

    reached: bool
    locked: bool = False
    lease: Lease | None = None


@dataclass(frozen=True)
class Decision:
    """reason: a sentence for people, without a full stop."""

    action: Action
    reason: str


def decide(me: str, term: int | None, seen: Seen, times: LeaseTimes) -> Decision:
    """me: this console. term: the one in which it leads, or None."""
    return _waiting(me, seen, times) if term is None else _leading(me, term, seen)


def _leading(me: str, term: int, seen: Seen) -> Decision:
    if not seen.reached:
        return Decision(Action.STEP_DOWN, "the connection to the database is lost, and the lead with it")
    lease = seen.lease
    if lease is None or lease.term != term:
        return Decision(Action.STEP_DOWN, f"{leader(lease)} leads since")
    if lease.holder != me or not seen.locked:
        return Decision(Action.STEP_DOWN, f"the lead of term {term} was taken from this console")
    return Decision(Action.STAY, f"this console leads (term {term})")


def _waiting(me: str, seen: Seen, times: LeaseTimes) -> Decision:
    if not seen.reached:
        return Decision(Action.WAIT, "the database does not answer; nobody is known to lead")
    lease = seen.lease
    if seen.locked:
        return Decision(Action.LEAD, f"nobody leads{_after(lease)}")
    if lease is None or not lease.holder:
        # Between a lock and a lease; or a version of this program that knew the lock alone.
        return Decision(Action.WAIT, "another console is about to lead")
    if lease.holder == me:
        # Its connection broke, and the database has not noticed: nobody but this console knows that.
        reason = f"the database still holds the lead of term {lease.term} for an earlier connection of this console"
        return Decision(Action.EVICT, reason)
    if lease.age >= times.lease:
        return Decision(Action.EVICT, f"{leader(lease)} leads, but was not heard for {lease.age:.1f} s")
    return Decision(Action.WAIT, f"{leader(lease)} leads (term {lease.term}); it was heard {lease.age:.1f} s ago")


def leader(lease: Lease | None) -> str:
    return lease.address if lease is not None and lease.address else "another console"


def _after(lease: Lease | None) -> str:
    return f" after term {lease.term}" if lease is not None and lease.term else ""


def boot_seconds() -> float:
    """Seconds that also count while the machine sleeps, where the system has such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True)
class LeaderStatus:
    """Who leads, as this console knows it.

    term: the one in which this console leads; None: it does not. leader: the address of who does, "" where
    that is not known. reason: a sentence for people, without a full stop. doubt: this console led last, and nobody
    else is known to. again: seconds from one look to the next.
    """

    term: int | None
    leader: str
    reason: str
    doubt: bool = False
    again: float = 0.0

    @property
    def sentence(self) -> str:
        """What is told to whoever asks while no console is up here; without a full stop."""
        if self.doubt:
            return f"this console may no longer lead: {self.reason}; it tries again every {self.again:g} s"
        return f"this console is a standby: {self.reason}; " + (f"ask {self.leader}" if self.leader else "try again")


class Leadership:
    """Thread-safe. me: what this process calls itself; address: where others reach it.

    prepare: brings the tables of `database` up to date; called with the lock held where there is no lease yet.
    """

    def __init__(
        self,
        database: Database,
        me: str,
        address: str,
        *,
        prepare: Callable[[], None],
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self.times = times or LeaseTimes()
        self._database, self._me, self._address = database, me, address
        self._prepare, self._clock = prepare, clock
        self._session: LeaderSession | None = None
        self._locked = False
        self._confirmed = 0.0  # when the lease was renewed last, at the latest
        self._led = False  # was it this console that led last, as far as is known?
        self._status = LeaderStatus(None, "", "this console is starting")
        self._changed = threading.Condition()
        self._wake, self._stop, self._unfit = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

    # -- for others -----------------------------------------------------------------------------

    @property
    def status(self) -> LeaderStatus:
        return self._status

    def leads(self, term: int) -> bool:
        """Does this console lead in that term, beyond doubt? Not after a standstill of its own: another
        one may lead by then."""
        return self._status.term == term and self._clock() - self._confirmed < self.times.lease

    @property
    def unconfirmed(self) -> float:
        """Seconds since the database has confirmed that this console leads."""
        return self._clock() - self._confirmed

    def wait_change(self, term: int | None, stop: threading.Event) -> int | None:
        """The term in which this console leads, as soon as it is another one than `term`, or `stop` is set:
        call `notify` after that."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.term != term or stop.is_set())
            return self._status.term

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def look(self) -> None:
        """Looks at once: something says that another console leads."""
        self._wake.set()

    def start(self) -> None:
        """After the first look; raises DatabaseError where there is no database to look at."""
        self._session = LeaderSession(self._database, self._me)
        self._step()
        self._thread.start()

    def give_up(self) -> None:
        """Leaves the lead to others for a while: this console can't take the jobs up."""
        self._unfit.set()
        self._wake.set()

    def close(self) -> None:
        """Another console may lead from now on."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._resign("this console has ended")

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self.times.renew if self._status.term is not None else self.times.poll)
            self._wake.clear()
            if self._unfit.is_set():
                self._unfit.clear()
                self._resign("this console could not take the jobs up; its log says why")
                self._stop.wait(2 * self.times.lease)
            elif not self._stop.is_set():
                self._step()

    def _step(self) -> None:
        asked = self._clock()
        term = self._status.term
        try:
            seen = self._see(term)
            decision = decide(self._me, term, seen, self.times)
            self._act(decision, seen.lease, asked)
        except (SQLAlchemyError, DatabaseError) as error:
            log.warning("the database could not be asked about the lead", reason=_first_line(error))
            self._drop()
            self._act(decide(self._me, term, Seen(False), self.times), None, asked)

    def _see(self, term: int | None) -> Seen:
        if self._session is None:
            self._session = LeaderSession(self._database, self._me)
        if term is not None:
            self._session.renew(term)
        elif not self._locked:
            self._locked = self._session.try_lock()
        return Seen(True, self._locked, self._session.lease())

    def _act(self, decision: Decision, lease: Lease | None, asked: float) -> None:
        action, reason = decision.action, decision.reason
        if action is Action.STAY:
            self._confirmed = asked
        elif action is Action.STEP_DOWN:
            log.warning("this console does not lead any more", reason=reason)
            self._drop()
            self._stand(None, lease, reason)
        elif action is Action.LEAD:
            self._lead(lease)
        else:
            self._stand(None, lease, reason)
            if action is Action.EVICT:
                assert self._session is not None and lease is not None
                ended = self._session.evict(lease.holder, 0.0 if lease.holder == self._me else self.times.lease)
                log.warning("sessions that held the lead were ended", reason=reason, ended=ended)
                if ended:
                    self._wake.set()

    def _lead(self, lease: Lease | None) -> None:
        assert self._session is not None
        if lease is None:
            self._prepare()
        elif lease.holder not in ("", self._me):
            # What it left behind may hold locks, where its machine is gone and its connections are not.
            self._session.evict(lease.holder, 0.0)
        asked = self._clock()
        term = self._session.claim(self._address)
        self._confirmed, self._led = asked, True
        log.info("this console leads", term=term, address=self._address)
        self._stand(term, None, f"this console leads (term {term})")

    def _stand(self, term: int | None, lease: Lease | None, reason: str) -> None:
        other = lease is not None and lease.holder != self._me
        self._led = self._led and not other
        leader = lease.address if lease is not None and lease.holder not in ("", self._me) else ""
        with self._changed:
            self._status = LeaderStatus(term, leader, reason, self._led and term is None, self.times.poll)
            self._changed.notify_all()

    def _drop(self) -> None:
        """Closes the session: the lock is free, if it is ours."""
        session, self._session, self._locked = self._session, None, False
        if session is not None:
            session.close()

    def _resign(self, reason: str) -> None:
        term = self._status.term
        if term is not None and self._session is not None:
            with suppress(SQLAlchemyError):
                self._session.resign(term)
        self._drop()
        self._led = False
        self._stand(None, None, reason)


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", error)).strip().partition("\n")[0]
