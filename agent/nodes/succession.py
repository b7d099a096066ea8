"""Who leads a job when its lead is gone: what each node keeps for that, whom it asks, and how many must agree.

The lead hands every node a `Copy` of what it knows before it tells any worker what it has decided, and each node keeps
what its workers have said since. So a copy and what is kept make the state of the job again.

A lead is gone when the system has closed its connection and nobody listens at its address any more: so its process has
ended, and it is counted no more. One that is stopped, slow or cut off shows nothing of the kind. Of the nodes that are
not known to be gone more than half must follow whoever begins to lead, and half must follow whoever goes on: so there
are never two, and in two halves it is the lead's that goes on.

Where fewer follow, as with two nodes, the job's console decides, if it has one: it gives the next term to whoever asks
while the lead is not heard by it either, and takes nothing from that one any more (agent.coordination.membership).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any, Literal

from pydantic import TypeAdapter

from openrecycle.agent.coordination.membership import LeadTerm
from openrecycle.agent.messages.client import ConsoleClient, ConsoleRefused, ConsoleUnavailable
from openrecycle.agent.messages.protocol import LeadAnswer, LeadClaim
from openrecycle.agent.nodes.frames import NotTrusted, greet

LOOK_SECONDS = 2.0
"""To find out whether anybody listens at an address."""
STAND_SECONDS = 3.0
"""So long a node waits for one with a lower number to stand for the lead."""
SEEK_SECONDS = 120.0
"""After so long without a lead a node gives up."""
ASK_SECONDS = 1.0
"""Between two questions to the console."""
_PAUSE_SECONDS = 0.1
_CHUNK = 1 << 20
"""Bytes of the record in a message."""
_LINES = 4096
"""Of the record, that are read at a time."""

Address = tuple[str, int]
Age = tuple[int, int]
"""Of a copy: its term, and its number in that; the greater is the later."""


@dataclass(frozen=True)
class Copy:
    """What the lead knew: of its launcher and its workers (`packed`), and where the nodes are, itself among them.

    ahead: nanoseconds of its clock before this machine's. heard: by incarnation, the newest message that is in it.
    lines: of the record, that come before it. plan: in force (planner.plans.packed.to_text). job: see
    agent.workers.spec.encode_run.
    """

    run: str
    term: int
    number: int
    lead: int
    ahead: int
    nodes: Mapping[int, Address]
    heard: Mapping[str, int]
    lines: int
    packed: str
    plan: str
    job: Mapping[str, Any]

    @property
    def age(self) -> Age:
        return self.term, self.number

    def to_message(self) -> dict[str, Any]:
        return {"kind": "copy"} | vars(self)

    @classmethod
    def of(cls, message: Mapping[str, Any], before: Copy | None = None) -> Copy:
        """before: has the job and the plan, where they are the same. Raises ValueError for what is none."""
        known = {} if before is None else {"plan": before.plan, "job": before.job}
        return _COPY.validate_python(known | dict(message))

    def unpacked(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(self.packed)))
        return document


_COPY = TypeAdapter(Copy)


def pack(document: Mapping[str, Any]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(document).encode(), 1)).decode()


# -- decisions ------------------------------------------------------------------------------------


def may_lead(voters: int, nodes: int) -> tuple[bool, str]:
    """May a node begin to? voters: that follow it, and itself. nodes: of the job, that are not known to be gone."""
    if 2 * voters > nodes:
        return True, f"{voters} of {nodes} nodes follow it"
    return False, f"{voters} of {nodes} nodes are not more than half: the others may have a lead"


def may_go_on(followers: int, nodes: int) -> tuple[bool, str]:
    """May the lead? As in `may_lead`; but of two halves only the lead's goes on."""
    if 2 * followers >= nodes:
        return True, f"{followers} of {nodes} nodes follow it"
    return False, f"only {followers} of {nodes} nodes follow it: the others may have another leader"


def may_ask_console(voters: int, nodes: int) -> tuple[bool, str]:
    """May a node that is followed by no more than half ask for the lead there? By fewer it could not go on as the lead
    (`may_go_on`)."""
    if 2 * voters >= nodes:
        return True, f"{voters} of {nodes} nodes follow it, and the console decides"
    return False, f"only {voters} of {nodes} nodes follow it, and with fewer than half it could not lead"


def may_have_vote(free: bool, promised: int, own: Age, term: int, age: Age) -> tuple[bool, str]:
    """Does a node that has promised itself in the term `promised`, and has a copy of age `own`, follow one that wants
    to lead in `term` with a copy of that age? free: its own lead is gone, or silent."""
    if not free:
        return False, "its lead is there"
    if term <= promised:
        return False, f"in term {promised} it follows another"
    if age < own:
        return False, "it knows more of the job"
    return True, "it knows no more of the job, and has no leader"


def first_to_lead(ages: Mapping[int, Age]) -> tuple[int, str]:
    """ages: by node, of the copies of those that would follow each other."""
    newest = max(ages.values())
    first = min(rank for rank, age in ages.items() if age == newest)
    return first, f"node {first} has the lowest number of those with the newest copy"


# -- what a node keeps ----------------------------------------------------------------------------


class Spool:
    """The lines of the record so far, in a file without a name: who leads next writes them anew. What the file does not
    take, as on a full disk, is kept in memory until it does. `parts` and `messages` may be read in another thread than
    the one that adds."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115 -- for as long as the job lasts
        self._ends = array("Q")
        """Of the lines in the file."""
        self._late = deque[bytes]()
        """Those after them."""
        self._lock = threading.Lock()
        """While a line goes from there to the file: who reads then would find it twice, or not at all."""
        self._warned = False

    def __len__(self) -> int:
        return len(self._ends) + len(self._late)

    def add(self, lines: Iterable[Mapping[str, Any]]) -> str:
        """Returns a warning where the file takes nothing, at the first time; else ""."""
        return self.add_text("".join(json.dumps(line) + "\n" for line in lines))

    def add_text(self, text: str) -> str:
        """As `add`, of lines as a message has them."""
        self._late.extend(line + b"\n" for line in text.encode().splitlines())
        try:
            while self._late:
                end = self._written(self._late[0])
                with self._lock:
                    self._ends.append(end)
                    self._late.popleft()
        except OSError as error:
            told, self._warned = self._warned, True
            if not told:
                return (
                    f"the record's lines for other nodes can't be written to {tempfile.gettempdir()} "
                    f"({error.strerror}): they are kept in memory, and writing is tried again"
                )
        return ""

    def _written(self, line: bytes) -> int:
        """Returns where it ends in the file."""
        end, written = self._ends[-1] if self._ends else 0, 0
        while written < len(line):
            written += os.pwrite(self._file.fileno(), line[written:], end + written)
        return end + written

    def cut(self, lines: int) -> None:
        """Forgets all but the first so many."""
        while self._late and len(self) > lines:
            self._late.pop()
        del self._ends[lines:]

    def lines(self, first: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
        written, late, after = self._ends[first:end], list(self._late), len(self._ends)
        begin = self._ends[first - 1] if first and written else 0
        for at in written:
            yield json.loads(os.pread(self._file.fileno(), at - begin, begin))
            begin = at
        for line in late[max(0, first - after) : None if end is None else max(0, end - after)]:
            yield json.loads(line)

    def parts(self) -> Iterator[bytes]:
        """All lines that are there now, as they stand in a record."""
        with self._lock:
            size, late = self._ends[-1] if self._ends else 0, list(self._late)
        file = self._file
        written = (os.pread(file.fileno(), min(_CHUNK, size - at), at) for at in range(0, size, _CHUNK))
        return chain(written, late)

    def messages(self, first: int, end: int) -> Iterator[dict[str, Any]]:
        """Lines `first` to `end`, as a node is told them. Each message is read when it is asked for: the whole record
        is much, and takes long."""
        while first < end:
            text = self._chunk(first, end)
            yield {"kind": "lines", "first": first, "text": text.decode()}
            first += text.count(b"\n")

    def _chunk(self, first: int, end: int) -> bytes:
        """Of those lines, the first ones: _CHUNK bytes, but a whole line at least."""
        with self._lock:
            written = len(self._ends)
            if first >= written:
                late = list(islice(self._late, first - written, end - written))
                sizes = accumulate(map(len, late))
                return b"".join(late[: 1 + sum(size <= _CHUNK for size in islice(sizes, 1, None))])
            begin = self._ends[first - 1] if first else 0
            last = max(first + 1, bisect_right(self._ends, begin + _CHUNK, first, min(end, written)))
            size = self._ends[last - 1] - begin
        return os.pread(self._file.fileno(), size, begin)

    def newest_losses(self, most: int) -> list[tuple[int, str]]:
        """Of the last iterations: number and loss."""
        newest = deque[tuple[int, str]]()
        for found in self._iterations_from_the_end(most):
            newest.extendleft((line["iteration"], line["loss"]) for line in reversed(found))
            if len(newest) >= most:
                break
        return list(newest)[-most:]

    def iterations(self, first: int, last: int) -> list[dict[str, Any]]:
        """The lines of those iterations."""
        lines = deque[dict[str, Any]]()
        for found in self._iterations_from_the_end(_LINES):
            lines.extendleft(line for line in reversed(found) if first <= line["iteration"] <= last)
            if found and found[0]["iteration"] <= first:
                break
        return list(lines)

    def _iterations_from_the_end(self, most: int) -> Iterator[list[dict[str, Any]]]:
        """Lines of iterations, in pieces out of so many lines; who leads next waits for it, so no more is read than is
        asked for."""
        first = len(self)
        while first:
            first, end = max(0, first - most), first
            yield [line for line in self.lines(first, end) if "loss" in line]


class LeadStatus:
    """What a launcher has promised: whom it follows (`lead`; itself where it leads), and in which term. For any thread.

    lead is None from when it promises to follow another until that one leads: what the one before says is not heard.
    process: which launcher it is, of those that are started one after the other.
    """

    def __init__(self, rank: int, *, lead: int | None = None, term: int = 0, run: str = "", process: str = "") -> None:
        self._lock, self._process = threading.Lock(), process
        self.rank, self.lead, self.term, self.run = rank, lead, term, run
        self.age: Age = (0, 0)
        self._free = False
        self._promised: int | None = None
        """Whom, as long as `lead` is None: itself, where it stands for the lead."""

    @property
    def promise(self) -> tuple[int, int | None]:
        """The term, and whom it has promised to follow in it, where that one is not known to lead yet."""
        with self._lock:
            return self.term, self._promised if self.lead is None else None

    @property
    def leads(self) -> bool:
        return self.lead == self.rank

    def follow(self, lead: int, term: int) -> bool:
        """False: it has promised to follow another since."""
        with self._lock:
            if term >= self.term:
                self.lead, self.term, self._free = lead, term, False
            return term >= self.term

    def lose_lead(self) -> None:
        """It is gone, or silent."""
        with self._lock:
            self._free = True

    def hear(self) -> bool:
        """The lead is there after all. False: it is the lead no more."""
        with self._lock:
            if self.lead is not None:
                self._free = False
            return self.lead is not None

    def take(self, copy: Copy) -> bool:
        """A copy has come. False: the one who sent it is the lead no more."""
        with self._lock:
            if self.lead is None or copy.term < self.term:
                return False
            self.run, self.age, self.lead, self.term = copy.run, copy.age, copy.lead, copy.term
            return True

    def stand(self, term: int) -> bool:
        """It is to lead in `term`, if enough follow. False: it has promised otherwise."""
        with self._lock:
            if not self._free or term <= self.term:
                return False
            self.term, self.lead, self._promised = term, None, self.rank
            return True

    def win(self, term: int) -> bool:
        with self._lock:
            if term != self.term:
                return False
            self.lead, self._free = self.rank, False
            return True

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """To who asks (`look`, `ask`). Raises KeyError, TypeError and ValueError for what is no question."""
        with self._lock:
            granted = False
            if message["kind"] == "vote" and message["run"] == self.run:
                term, rank, (of_term, number) = int(message["term"]), int(message["rank"]), message["age"]
                granted, _ = may_have_vote(self._free, self.term, self.age, term, (int(of_term), int(number)))
                if granted:
                    self.term, self.lead, self._promised = term, None, rank
            return {"kind": "here", "run": self.run, "term": self.term, "lead": self.lead, "age": self.age} | {
                "free": self._free,
                "granted": granted,
                "process": self._process,
            }


# -- asking the others ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Here:
    """A launcher of the job that lives; see LeadStatus."""

    term: int
    lead: int | None
    age: Age
    free: bool
    granted: bool
    process: str


_HERE = TypeAdapter(Here)
Reply = Here | Literal["gone", "silent"]


def ask(address: Address, token: str, run: str, question: Mapping[str, Any] | None = None) -> Reply:
    """What is at the address of a launcher of this run? `gone`: its process is not there any more; `silent`: that can't
    be known, as of one that is stopped, or whose host does not answer. question: a vote; None: how it stands."""
    until = time.monotonic() + LOOK_SECONDS
    try:
        connection = socket.create_connection(address, LOOK_SECONDS)
    except ConnectionRefusedError:
        return "gone"
    except OSError:
        return "silent"
    with contextlib.closing(connection):
        try:
            frames = greet(connection, token, "node", until)
            frames.send({"kind": "look"} if question is None else {"kind": "vote", "run": run, **question})
            answer = frames.receive(until)
            if answer["kind"] != "here" or answer["run"] not in (run, ""):
                return "gone"  # another job's
            if not answer["run"]:
                # One that a lead has taken in is about to be told of the job; one that none has, or that has lost it
                # before, has no part in it, as one that has just been started.
                return "gone" if answer["lead"] is None else "silent"
            return _HERE.validate_python(answer)
        except NotTrusted:
            return "gone"  # another program's
        except (OSError, KeyError, TypeError, ValueError):
            return "silent"


def tell(address: Address, token: str, message: Mapping[str, Any]) -> None:
    """Whoever listens there, if anybody does."""
    with contextlib.suppress(OSError, NotTrusted):
        connection = socket.create_connection(address, LOOK_SECONDS)
        with contextlib.closing(connection):
            frames = greet(connection, token, "node", time.monotonic() + LOOK_SECONDS)
            frames.send(dict(message))
            frames.receive(time.monotonic() + LOOK_SECONDS)  # until it closes


class Arbiter:
    """The console of a job. All it takes is bounded, and one that is away decides nothing."""

    def __init__(self, url: str, token: str | None, job_id: str) -> None:
        self._url, self._token, self._path = url, token, f"/jobs/{job_id}/lead"

    def decide(self, wanted: LeadTerm, after: int, *, ask: bool = False) -> tuple[bool, str]:
        """Is the lead that node's? See LeadClaim."""
        client = ConsoleClient(self._url, token=self._token, timeout=LOOK_SECONDS, known=True)
        claim = LeadClaim(term=wanted.term, node=wanted.node, after=after, ask=ask)
        try:
            answer = client.post(self._path, claim, LeadAnswer)
        except (ConsoleUnavailable, ConsoleRefused) as error:
            return False, f"the console can't decide ({error})"
        assert answer is not None
        return answer.granted, f"the console says: {answer.reason}"


@dataclass(frozen=True)
class Follow:
    """Another leads."""

    rank: int
    term: int


@dataclass(frozen=True)
class Lead:
    """This node leads, in that term. expected: those that will follow it. gone: those that are not there any more."""

    term: int
    expected: frozenset[int]
    gone: frozenset[int]


@dataclass(frozen=True)
class GiveUp:
    """to: who leads on without this node; None: nobody leads."""

    why: str
    to: Follow | None = None


Outcome = Follow | Lead | GiveUp


class Search(threading.Thread):
    """Finds who leads next, while this node goes on hearing its workers. outcome: once it is known.

    copy: the newest that this node has. arbiter: None: the job has no console.
    """

    def __init__(self, lead_status: LeadStatus, copy: Copy, token: str, arbiter: Arbiter | None = None) -> None:
        super().__init__(name="who leads", daemon=True)
        self._lead_status, self._copy, self._token, self._arbiter = lead_status, copy, token, arbiter
        self._ask_at, self._told = 0.0, (False, "")
        """When the console may be asked again, and what it has said."""
        self._cancelled = threading.Event()
        self._began = time.monotonic()
        self._enough_at: float | None = None
        """Since when one after the other round enough nodes are there, or the console would have this one lead."""
        self._gone = set[int]()
        """Also where another process listens at the same address by now."""
        self.outcome: Outcome | None = None
        self.start()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        why = ""
        while time.monotonic() < self._began + SEEK_SECONDS:
            found = self._round()
            if isinstance(found, str):
                why = found
            else:
                self.outcome = found
                return
            if self._cancelled.wait(_PAUSE_SECONDS):
                return
        self.outcome = GiveUp(f"the leader is gone, and for {SEEK_SECONDS:.0f} s nobody could take its place: {why}")

    def _round(self) -> Outcome | str:
        """A sentence: not yet, since."""
        lead_status, copy = self._lead_status, self._copy
        seen = self._ask_all(copy.nodes.keys() - self._gone - {lead_status.rank})
        here = {rank: it for rank, it in seen.items() if isinstance(it, Here)}
        self._gone |= {rank for rank, it in seen.items() if it == "gone"}
        if leads := [(it.term, rank) for rank, it in here.items() if it.lead == rank]:
            term, rank = max(leads)
            # Also where it has won just now, and has handed out no copy yet.
            if (term, rank) == (lead_status.term, lead_status.lead):
                return GiveUp(f"node {rank} leads on without this one", Follow(rank, term))
            if term > copy.term and term >= lead_status.term:
                return Follow(rank, term)
        nodes = len(copy.nodes) - len(self._gone)
        free = {rank: it.age for rank, it in here.items() if it.free}
        term = 1 + max(lead_status.term, *(it.term for it in here.values()), 0)
        wanted = LeadTerm(term, lead_status.rank)
        enough, why = may_lead(1 + len(free), nodes)
        if not enough:
            # Before it stands: a node that does hears its lead no more, which may be there after all.
            enough, why = self._ask_console(wanted, 1 + len(free), nodes, why)
        if not enough:
            self._enough_at = None
            return self._stood_in_vain(here, leads) or why
        self._enough_at = self._enough_at or time.monotonic()
        first, why = first_to_lead({lead_status.rank: lead_status.age, **free})
        if first != lead_status.rank and time.monotonic() < self._enough_at + STAND_SECONDS:
            return why
        if self._cancelled.is_set():
            return "it follows another"
        if self._arbiter is not None and not may_lead(1 + len(free), nodes)[0]:
            # However they vote, the console decides: its word comes first, for the same reason.
            enough, why = self._arbiter.decide(wanted, copy.term)
        if self._cancelled.is_set() or not enough or not lead_status.stand(term):
            return why if not enough else "it follows another"
        votes = self._ask_all(free, {"term": term, "rank": lead_status.rank, "age": lead_status.age})
        voters = 1 + sum(isinstance(it, Here) and it.granted for it in votes.values())
        enough, why = may_lead(voters, nodes)
        if not enough and self._arbiter is not None and may_ask_console(voters, nodes)[0]:
            enough, why = self._arbiter.decide(wanted, copy.term)
        if not enough or not lead_status.win(term):
            return why
        return Lead(term, frozenset(here), frozenset(self._gone))

    def _stood_in_vain(self, here: Mapping[int, Here], leads: list[tuple[int, int]]) -> GiveUp | None:
        """One leads whom this node has promised to leave, for itself or for another that does not lead by that, and too
        few have left it."""
        promised, whom = self._lead_status.promise
        if not leads or whom is None or max(leads)[0] >= promised:
            return None
        if whom not in (self._lead_status.rank, *self._gone):
            it = here.get(whom)
            if it is None or (it.term == promised and it.lead in (None, whom)):
                return None  # it may lead yet
        _, rank = max(leads)
        # In the term of the promise: unless it has given another one by then, it gives none any more.
        return GiveUp(f"node {rank} leads on without this one", Follow(rank, promised))

    def _ask_console(self, wanted: LeadTerm, voters: int, nodes: int, why: str) -> tuple[bool, str]:
        """Would it give this node the lead? why: the nodes themselves don't."""
        now = time.monotonic()
        if self._arbiter is None:
            return False, why
        may, why = may_ask_console(voters, nodes)
        if not may:
            return False, why
        if now >= self._ask_at:
            self._told = self._arbiter.decide(wanted, self._copy.term, ask=True)
            self._ask_at = time.monotonic() + ASK_SECONDS
        return self._told

    def _ask_all(self, ranks: Iterable[int], question: Mapping[str, Any] | None = None) -> dict[int, Reply]:
        nodes, run = self._copy.nodes, self._copy.run
        with ThreadPoolExecutor(16) as several:
            asked = {rank: several.submit(ask, nodes[rank], self._token, run, question) for rank in ranks}
            return {rank: answer.result() for rank, answer in asked.items()}
