"""Decides which node leads a job when its leader is gone: what each node keeps for that, and how nodes agree on it.

The leader sends every node a `Copy` of what it knows before it tells any worker what it has decided, and each node
keeps what its workers have said since. So the state of the job can be rebuilt from a copy and what is kept.

A leader is gone if the system has closed its connection and nothing listens at its address any more: then its process
has ended, and it does not count any more. A leader that is stopped, slow or cut off shows neither. Of the nodes that
are not known to be gone, more than half must follow a node that begins to lead, and half must follow one that goes on
leading. So there are never two leaders; and if the nodes fall into two halves, the leader's half goes on.

If fewer follow, as with two nodes, the job's console decides, if there is one. It gives the next term to a node that
asks while the console does not hear the leader either, and takes nothing from that leader any more
(agent.coordination.membership).
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
"""How long it may take to find out whether a launcher listens at an address."""
STAND_SECONDS = 3.0
"""How long a node waits for one with a lower number to stand for election."""
SEEK_SECONDS = 120.0
"""How long a node looks for a leader before it gives up."""
ASK_SECONDS = 1.0
"""The time between two questions to the console."""
_PAUSE_SECONDS = 0.1
_CHUNK = 1 << 20
"""The bytes of the record in a message."""
_LINES = 4096
"""How many lines of the record are read at a time."""

Address = tuple[str, int]
Age = tuple[int, int]
"""The age of a copy: its term, and its number in that term. The greater one is later."""


@dataclass(frozen=True)
class Copy:
    """What the leader knew: the state of its launcher and its workers (`packed`), and where all nodes are.

    ahead: how many nanoseconds the leader's clock is ahead of this machine's. heard: for each incarnation, the number
    of the newest message that is in the copy. lines: how many lines of the record come before it. plan: the plan in
    force (planner.plans.packed.to_text). job: see agent.workers.spec.encode_run.
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
        """Reads a copy. before: an earlier one, for the job and the plan if the message is without them. Raises
        ValueError for any other message."""
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
    """Says whether a node may begin to lead, and why. voters: the nodes that follow it, and itself. nodes: the nodes of
    the job that are not known to be gone."""
    if 2 * voters > nodes:
        return True, f"{voters} of {nodes} nodes follow it"
    return False, f"{voters} of {nodes} nodes are not more than half: the others may have a lead"


def may_go_on(followers: int, nodes: int) -> tuple[bool, str]:
    """Says whether the leader may go on leading, and why. It needs half of the nodes, where `may_lead` asks for more:
    of two halves the leader's goes on."""
    if 2 * followers >= nodes:
        return True, f"{followers} of {nodes} nodes follow it"
    return False, f"only {followers} of {nodes} nodes follow it: the others may have another leader"


def may_ask_console(voters: int, nodes: int) -> tuple[bool, str]:
    """Says whether a node that half of the nodes follow may ask the console for the lead. With fewer it could not go on
    as the leader (`may_go_on`)."""
    if 2 * voters >= nodes:
        return True, f"{voters} of {nodes} nodes follow it, and the console decides"
    return False, f"only {voters} of {nodes} nodes follow it, and with fewer than half it could not lead"


def may_have_vote(free: bool, promised: int, own: Age, term: int, age: Age) -> tuple[bool, str]:
    """Says whether a node follows one that wants to lead in `term` with a copy of this age, and why.

    free: the leader that it followed is gone or silent. promised: the newest term in which it has promised to follow a
    node. own: the age of its own copy.
    """
    if not free:
        return False, "its lead is there"
    if term <= promised:
        return False, f"in term {promised} it follows another"
    if age < own:
        return False, "it knows more of the job"
    return True, "it knows no more of the job, and has no leader"


def first_to_lead(ages: Mapping[int, Age]) -> tuple[int, str]:
    """Returns which of several nodes should lead. ages: of their copies, by node."""
    newest = max(ages.values())
    first = min(rank for rank, age in ages.items() if age == newest)
    return first, f"node {first} has the lowest number of those with the newest copy"


# -- what a node keeps ----------------------------------------------------------------------------


class Spool:
    """The lines of the record so far, in a file without a name: the next leader writes the record anew from them. Lines
    that the file does not take, as on a full disk, stay in memory until it does. One thread adds lines; `parts` and
    `messages` may be read in others."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115 -- for as long as the job lasts
        self._ends = array("Q")
        """Where each line of the file ends."""
        self._late = deque[bytes]()
        """The lines after these, which are not in the file yet."""
        self._lock = threading.Lock()
        """Held while a line goes into the file: a reader would find that line twice, or not at all."""
        self._warned = False

    def __len__(self) -> int:
        return len(self._ends) + len(self._late)

    def add(self, lines: Iterable[Mapping[str, Any]]) -> str:
        """Adds lines. Returns a warning if the file takes nothing, for the first time; otherwise ""."""
        return self.add_text("".join(json.dumps(line) + "\n" for line in lines))

    def add_text(self, text: str) -> str:
        """Adds lines in the form of a message, like `add`."""
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
        """Writes a line, and returns where it ends in the file."""
        end, written = self._ends[-1] if self._ends else 0, 0
        while written < len(line):
            written += os.pwrite(self._file.fileno(), line[written:], end + written)
        return end + written

    def cut(self, lines: int) -> None:
        """Forgets all lines but the first so many."""
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
        """Yields all lines that are there now, in the form of a record."""
        with self._lock:
            size, late = self._ends[-1] if self._ends else 0, list(self._late)
        file = self._file
        written = (os.pread(file.fileno(), min(_CHUNK, size - at), at) for at in range(0, size, _CHUNK))
        return chain(written, late)

    def messages(self, first: int, end: int) -> Iterator[dict[str, Any]]:
        """Yields lines `first` to `end` as messages for a node. Each is read when it is asked for, since the whole
        record is large and takes long."""
        while first < end:
            text = self._chunk(first, end)
            yield {"kind": "lines", "first": first, "text": text.decode()}
            first += text.count(b"\n")

    def _chunk(self, first: int, end: int) -> bytes:
        """Returns the first of these lines: up to _CHUNK bytes, but at least one line."""
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
        """Returns the number and the loss of the last iterations, at most so many."""
        newest = deque[tuple[int, str]]()
        for found in self._iterations_from_the_end(most):
            newest.extendleft((line["iteration"], line["loss"]) for line in reversed(found))
            if len(newest) >= most:
                break
        return list(newest)[-most:]

    def iterations(self, first: int, last: int) -> list[dict[str, Any]]:
        """Returns the lines of these iterations."""
        lines = deque[dict[str, Any]]()
        for found in self._iterations_from_the_end(_LINES):
            lines.extendleft(line for line in reversed(found) if first <= line["iteration"] <= last)
            if found and found[0]["iteration"] <= first:
                break
        return list(lines)

    def _iterations_from_the_end(self, most: int) -> Iterator[list[dict[str, Any]]]:
        """Yields the lines of iterations, newest pieces first, each out of so many lines. The next leader waits for
        this, so no more is read than is asked for."""
        first = len(self)
        while first:
            first, end = max(0, first - most), first
            yield [line for line in self.lines(first, end) if "loss" in line]


class LeadStatus:
    """Which node a launcher follows (`lead`; itself if it leads), and in which term. Used by several threads.

    lead is None from the moment it promises to follow another node until that one leads. Meanwhile it ignores the
    leader before. process: identifies this launcher among those that are started one after the other on its node.
    """

    def __init__(self, rank: int, *, lead: int | None = None, term: int = 0, run: str = "", process: str = "") -> None:
        self._lock, self._process = threading.Lock(), process
        self.rank, self.lead, self.term, self.run = rank, lead, term, run
        self.age: Age = (0, 0)
        self._free = False
        self._promised: int | None = None
        """The node that it has promised to follow while `lead` is None; itself if it stands for election."""

    @property
    def promise(self) -> tuple[int, int | None]:
        """The term, and the node that it has promised to follow in it; None: that one leads already, or there is
        none."""
        with self._lock:
            return self.term, self._promised if self.lead is None else None

    @property
    def leads(self) -> bool:
        return self.lead == self.rank

    def follow(self, lead: int, term: int) -> bool:
        """Follows a leader. Returns False if it has promised to follow another one since."""
        with self._lock:
            if term >= self.term:
                self.lead, self.term, self._free = lead, term, False
            return term >= self.term

    def lose_lead(self) -> None:
        """Notes that the leader is gone or silent."""
        with self._lock:
            self._free = True

    def hear(self) -> bool:
        """Notes that the leader is there after all. Returns False if this node does not follow it any more."""
        with self._lock:
            if self.lead is not None:
                self._free = False
            return self.lead is not None

    def take(self, copy: Copy) -> bool:
        """Takes note of a copy. Returns False if the node that sent it is not the leader any more."""
        with self._lock:
            if self.lead is None or copy.term < self.term:
                return False
            self.run, self.age, self.lead, self.term = copy.run, copy.age, copy.lead, copy.term
            return True

    def stand(self, term: int) -> bool:
        """Stands for election in `term`. Returns False if it has promised otherwise."""
        with self._lock:
            if not self._free or term <= self.term:
                return False
            self.term, self.lead, self._promised = term, None, self.rank
            return True

    def win(self, term: int) -> bool:
        """Leads from now on. Returns False if it has promised otherwise since it stood."""
        with self._lock:
            if term != self.term:
                return False
            self.lead, self._free = self.rank, False
            return True

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answers another node's question (see `ask`), and promises to follow it if it may have the vote. Raises
        KeyError, TypeError and ValueError for any other message."""
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
class LauncherAnswer:
    """What a living launcher of the job answers; see LeadStatus."""

    term: int
    lead: int | None
    age: Age
    free: bool
    granted: bool
    process: str


_ANSWER = TypeAdapter(LauncherAnswer)
Reply = LauncherAnswer | Literal["gone", "silent"]


def ask(address: Address, token: str, run: str, question: Mapping[str, Any] | None = None) -> Reply:
    """Asks a launcher of this run, and returns its answer. `gone`: its process is not there any more. `silent`: that
    can't be known, as when it is stopped, or its host does not answer. question: asks for its vote; None: asks only how
    it stands."""
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
                return "gone"  # a launcher of another job listens there by now
            if not answer["run"]:
                # A launcher that a leader has taken in is about to be told of the job. One that has no leader, such as
                # one that was just started, has no part in the job.
                return "gone" if answer["lead"] is None else "silent"
            return _ANSWER.validate_python(answer)
        except NotTrusted:
            return "gone"  # another program listens there by now
        except (OSError, KeyError, TypeError, ValueError):
            return "silent"


def tell(address: Address, token: str, message: Mapping[str, Any]) -> None:
    """Sends a message to the launcher that listens there, if there is one."""
    with contextlib.suppress(OSError, NotTrusted):
        connection = socket.create_connection(address, LOOK_SECONDS)
        with contextlib.closing(connection):
            frames = greet(connection, token, "node", time.monotonic() + LOOK_SECONDS)
            frames.send(dict(message))
            frames.receive(time.monotonic() + LOOK_SECONDS)  # waits until the other side closes


class Arbiter:
    """Asks the console of a job, for a bounded time. A console that does not answer decides nothing."""

    def __init__(self, url: str, token: str | None, job_id: str) -> None:
        self._url, self._token, self._path = url, token, f"/jobs/{job_id}/lead"

    def decide(self, wanted: LeadTerm, after: int, *, ask: bool = False) -> tuple[bool, str]:
        """Asks whether that node may lead, and returns the reason, too. See LeadClaim."""
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
    """Another node leads."""

    rank: int
    term: int


@dataclass(frozen=True)
class Lead:
    """This node leads, in that term. expected: the nodes that will follow it. gone: nodes that are not there any
    more."""

    term: int
    expected: frozenset[int]
    gone: frozenset[int]


@dataclass(frozen=True)
class GiveUp:
    """This node gives up. to: the leader that goes on without this node; None: there is no leader."""

    why: str
    to: Follow | None = None


Outcome = Follow | Lead | GiveUp


class Search(threading.Thread):
    """A thread that finds out which node leads next, while this node goes on hearing its workers. outcome: set once
    that is known.

    copy: the newest one that this node has. arbiter: None: the job has no console.
    """

    def __init__(self, lead_status: LeadStatus, copy: Copy, token: str, arbiter: Arbiter | None = None) -> None:
        super().__init__(name="who leads", daemon=True)
        self._lead_status, self._copy, self._token, self._arbiter = lead_status, copy, token, arbiter
        self._ask_at, self._told = 0.0, (False, "")
        """When the console may be asked again, and what it has said."""
        self._cancelled = threading.Event()
        self._began = time.monotonic()
        self._enough_at: float | None = None
        """Since when, in each round, enough nodes were there or the console would let this one lead."""
        self._gone = set[int]()
        """Nodes that are gone, even if another process listens at their address by now."""
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
        """Asks all nodes once. Returns the outcome, or a sentence that says why there is none yet."""
        lead_status, copy = self._lead_status, self._copy
        seen = self._ask_all(copy.nodes.keys() - self._gone - {lead_status.rank})
        here = {rank: it for rank, it in seen.items() if isinstance(it, LauncherAnswer)}
        self._gone |= {rank for rank, it in seen.items() if it == "gone"}
        if leads := [(it.term, rank) for rank, it in here.items() if it.lead == rank]:
            term, rank = max(leads)
            # This is so even if that leader has just won and has sent no copy yet.
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
            # The console is asked before this node stands: a node that stands ignores its leader, which may be there
            # after all.
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
            # However the nodes vote, the console decides, so it is asked first, for the same reason.
            enough, why = self._arbiter.decide(wanted, copy.term)
        if self._cancelled.is_set() or not enough or not lead_status.stand(term):
            return why if not enough else "it follows another"
        votes = self._ask_all(free, {"term": term, "rank": lead_status.rank, "age": lead_status.age})
        voters = 1 + sum(isinstance(it, LauncherAnswer) and it.granted for it in votes.values())
        enough, why = may_lead(voters, nodes)
        if not enough and self._arbiter is not None and may_ask_console(voters, nodes)[0]:
            enough, why = self._arbiter.decide(wanted, copy.term)
        if not enough or not lead_status.win(term):
            return why
        return Lead(term, frozenset(here), frozenset(self._gone))

    def _stood_in_vain(self, here: Mapping[int, LauncherAnswer], leads: list[tuple[int, int]]) -> GiveUp | None:
        """Gives up if a node leads that this one has promised to leave, for itself or for another one which can't win,
        since too few have left that leader."""
        promised, whom = self._lead_status.promise
        if not leads or whom is None or max(leads)[0] >= promised:
            return None
        if whom not in (self._lead_status.rank, *self._gone):
            it = here.get(whom)
            if it is None or (it.term == promised and it.lead in (None, whom)):
                return None  # it may still win
        _, rank = max(leads)
        # It follows in the term of its promise, so it gives no other promise in that term.
        return GiveUp(f"node {rank} leads on without this one", Follow(rank, promised))

    def _ask_console(self, wanted: LeadTerm, voters: int, nodes: int, why: str) -> tuple[bool, str]:
        """Asks whether the console would let this node lead, and why. why: the reason for which the nodes alone
        don't."""
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
