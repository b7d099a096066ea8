"""A node that does not lead: it starts and ends worker processes for the leader, and passes on what they say.

It keeps what the leader knows, and what its own workers have said since. So it can follow another leader, or lead
itself (agent.nodes.succession), while its workers go on. One loop in one thread does all this.
"""

from __future__ import annotations

import errno
import signal
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from pydantic import ValidationError

from openrecycle.agent.config.devices import memory_limit
from openrecycle.agent.config.options import ALIVE_SECONDS, Timeouts
from openrecycle.agent.launcher.launch import Takeover
from openrecycle.agent.launcher.processes import LOOK_SECONDS, ProcessPool, RankOf, SpareRanks, WorkerProcess, preload
from openrecycle.agent.launcher.record import REMEMBERED
from openrecycle.agent.messages.client import Backoff, Say
from openrecycle.agent.models.workload import WorkloadSource
from openrecycle.agent.monitoring.liveness import MOST_OF_A_TURN, Clock, LoopLag
from openrecycle.agent.nodes.frames import HANDSHAKE_SECONDS, Frames, NotTrusted, greet
from openrecycle.agent.nodes.pool import NodeHub, SpreadPool, memory_shared_by, place
from openrecycle.agent.nodes.succession import SEEK_SECONDS, Arbiter, Copy, Follow, Lead, LeadStatus, Search, Spool
from openrecycle.agent.workers import worker
from openrecycle.agent.workers.spec import MACHINE, RunSpec, decode_run, decode_spec
from openrecycle.planner.jobs.errors import in_a_line
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.packed import from_text

FIRST_COPY_SECONDS = Timeouts().silence
"""How long a node waits for a silent leader whose job has begun, and which has not told it of the job yet."""


STARTING_SECONDS = 10.0
"""How long it is not reported that the leader does not answer yet, since that first looks at the model."""


class LeadLost(Exception):
    """The job did not come to its end here: the leader ended it, can't be reached, or turned this node away. The
    message says why."""


def make_pool(workload: WorkloadSource) -> ProcessPool:
    return ProcessPool(worker.main, preload(workload))


class NodeServer:
    """Serves one node. All methods but `stop` belong to the thread of `run`.

    nodes: how many the job has. front: where node 0 listens, and all nodes first look for the leader. token: shared by
    all nodes. address: at which this node's workers can be reached; None: the one from which this host reaches the
    leader. lead: where the leader listens, if not at `front`. make_pool: makes the pool of this node's workers, for
    their workload. clock: in seconds, by which the leader's silence is measured. same: what must be the same on all
    nodes (see agent.workers.spec.same_on_all). unused: is told of the job, and says which options of this node's own
    command it does not use; "": none.
    """

    def __init__(
        self,
        rank: int,
        nodes: int,
        front: tuple[str, int],
        token: str | None,
        address: str | None,
        say: Say,
        lead: tuple[str, int] | None = None,
        make_pool: Callable[[WorkloadSource], ProcessPool] = make_pool,
        clock: Clock = time.monotonic,
        same: Mapping[str, str] = MACHINE,
        unused: Callable[[RunSpec], str] = lambda _: "",
    ) -> None:
        self._make_pool, self._clock, self._same, self._unused = make_pool, clock, same, unused
        self._rank, self._nodes, self._front, self._token, self._say = rank, nodes, front, token or "", say
        self._address, self._process = address, uuid.uuid4().hex
        self._stop = 0
        self._backoff = Backoff(0.1, 2.0)
        """The pause between tries, until a leader has told of the job: a leader that takes this node in, and hangs up
        each time, must not be overrun."""
        self._begin((front,) if lead is None else (lead, front))

    def _begin(self, leads: Iterable[tuple[str, int]]) -> None:
        """Forgets all of the job, as if this node had just been started. leads: addresses where the leader, or a node
        that knows it, may listen. The first one is asked next, or has taken this node in."""
        self._leads = deque(leads)
        self._lead_status = LeadStatus(self._rank, process=self._process)
        self._hub: NodeHub | None = None
        self._frames: Frames | None = None
        """The connection with the leader; None: there is none, and this node looks for the next leader."""
        self._heard_at, self._lost_at = self._clock(), 0
        """When the leader last said something, by the clock, and when it was lost, in nanoseconds."""
        self._lag = LoopLag(self._clock)
        self._silence = float("inf")
        self._search: Search | None = None
        self._arbiter: Arbiter | None = None
        """Asks the job's console; None: the job has none."""
        self._resuming = False
        """Whether a new leader does not know yet what this node's workers have said."""
        self._copy: Copy | None = None
        self._record = Spool()
        self._said: dict[str, deque[dict[str, Any]]] = {}
        """By incarnation, what was passed on of it and may not be in the copy: numbered messages, and its end."""
        self._numbers: dict[str, int] = {}
        self._pool: ProcessPool | None = None
        self._started = 0
        self._entries: dict[str, WorkerProcess] = {}
        self._over, self._finished = "", False

    def stop(self, number: int) -> None:
        """Ends this node soon. May be called from the handler of signal `number`."""
        self._stop = self._stop or number

    def run(self, timeout: float) -> str | Succession:
        """Serves until the job has all its iterations, and returns the leader's last sentence; or until this node is to
        lead, and returns what it has for that.

        timeout: seconds to wait for the leader. Raises LeadLost. Leaves no process behind, unless this node leads.
        """
        while True:
            try:
                return self._serve(timeout)
            except _LeftOut as left_out:
                self._say(f"{left_out}: this node's workers are ended, and it comes back without them")
                self._begin(left_out.leads)
                timeout = min(timeout, SEEK_SECONDS)

    def _serve(self, timeout: float) -> str | Succession:
        leads = False
        try:
            self._join(timeout)
            while True:
                try:
                    self._turn()
                except _Moved:
                    self._hang_up()
                    self._join(min(timeout, SEEK_SECONDS))
                if self._stop:
                    raise LeadLost(f"stopped by {signal.Signals(self._stop).name}")
                if succession := self._look_for_lead():
                    leads = True
                    return succession
        except _Bye:
            if not self._finished:
                raise LeadLost(self._over) from None
            return self._over
        finally:
            self._hang_up()
            if not leads:
                if self._hub is not None:
                    self._hub.close("")
                if self._pool is not None:
                    self._pool.kill_all()

    def _join(self, timeout: float) -> None:
        began, said = time.monotonic(), set[str]()
        deadline = began + timeout
        while True:
            time.sleep(self._backoff.seconds())
            host, port = self._leads[0]
            try:
                connection = socket.create_connection((host, port), 5.0)
            except OSError as error:
                why, reason = f"no leader answers at {host}:{port}", str(error)
                self._ask_another()
                quiet = time.monotonic() - began < STARTING_SECONDS
            else:
                quiet = False
                try:
                    self._introduce(connection)
                    self._say(f"node {self._rank} works for {host}:{port}, its workers at {self._address}")
                    return
                except _Later as error:
                    why, reason = "the leader turned this node away", str(error)
                except OSError as error:  # the leader may be stopped
                    why, reason = f"no understanding with the leader at {host}:{port}", str(error)
                    self._ask_another()
                except (NotTrusted, KeyError) as error:
                    why, reason = f"no understanding with the leader at {host}:{port}", str(error)
                    if len(self._leads) == 1:
                        connection.close()
                        raise LeadLost(f"{why}: {reason}") from None
                    self._leads.popleft()  # another program listens there by now
                except LeadLost:
                    connection.close()
                    raise
                connection.close()
            if self._stop:
                raise LeadLost(f"stopped before the job could be joined: {why} ({reason})")
            if time.monotonic() > deadline:
                raise LeadLost(f"{why} within {timeout:.0f} s ({reason})")
            if reason not in said and not quiet:
                self._say(f"{why}: {reason}; it is tried again for {deadline - time.monotonic():.0f} s")
                said.add(reason)

    def _ask_another(self, lead: Iterable[Any] | None = None) -> None:
        """Puts the address that was asked last, so that another is asked next. lead: where the leader listens, as the
        asked one says."""
        self._leads.rotate(-1)
        if lead is not None:
            host, port = lead
            address = str(host), int(port)
            self._leads = deque(dict.fromkeys((address, *self._leads)))

    def _introduce(self, connection: socket.socket, **about: Any) -> None:
        """Introduces this node to a leader. Raises _Later or OSError for a problem that may pass; LeadLost, NotTrusted
        or KeyError for one that does not."""
        frames = greet(connection, self._token, "node")
        if self._hub is None:
            address = self._address or connection.getsockname()[0]
            host, port = self._front if self._rank == 0 else (address, 0)
            self._hub = self._listen(host, port)
            self._address = self._hub.host if self._rank == 0 else address
        about |= {"rank": self._rank, "nodes": self._nodes, "address": self._address, "port": self._hub.port}
        about |= {"process": self._process, "host": socket.gethostname()}
        about |= {"memory": memory_limit(), "memory_shared_by": memory_shared_by()}
        frames.send({"kind": "hello", **about, **self._same})
        answer = frames.receive(time.monotonic() + HANDSHAKE_SECONDS)
        if answer["kind"] != "welcome":
            if answer.get("again"):
                if "lead" in answer:  # the launcher there does not lead itself
                    self._ask_another(answer["lead"])
                raise _Later(answer["reason"])
            raise LeadLost(f"the leader turned this node away: {answer['reason']}")
        if not about.get("resumes"):
            self._lead_status.follow(0, 0)
            if answer.get("begun"):
                self._silence = FIRST_COPY_SECONDS
            others = ((str(host), int(port)) for host, port in answer.get("others", ()))
            self._leads = deque(dict.fromkeys((*self._leads, *others)))
        frames.open_outbox("to-lead")
        self._frames, self._heard_at = frames, self._clock()

    def _listen(self, host: str, port: int) -> NodeHub:
        """Starts to listen for other launchers. Raises LeadLost, and OSError for a problem that may pass, such as a
        port that is taken or a name that is not known yet."""
        try:
            return NodeHub(host, port, self._nodes, self._token, self._say, self._lead_status, self._same)
        except OSError as error:
            option = "--lead" if self._rank == 0 else "--node-address"
            text = f"{option}: got {host}, expected an address of this host ({error.strerror})"
            if error.errno == errno.EADDRNOTAVAIL:
                raise LeadLost(text) from None
            raise OSError(text) from None

    # -- the leader is lost -------------------------------------------------------------------

    def _hang_up(self) -> None:
        if self._frames is not None:
            self._frames.close()
            self._frames = None

    def _leave(self, why: object) -> None:
        """Handles that the connection with the leader is broken."""
        self._hang_up()
        self._lost_at = time.monotonic_ns()
        if self._over:
            raise _Bye
        if self._copy is None:
            # The job goes on without this node, or begins anew. This node knows too little to help choose a leader, and
            # others would wait for it. So it forgets that a leader had taken it in, as if it had just been started.
            raise _LeftOut(f"the connection with the leader broke ({why})", self._leads)
        self._say(f"the connection with the leader broke ({why}); the nodes find out who leads next")
        self._lead_status.lose_lead()

    def _look_for_lead(self) -> Succession | None:
        """Looks for the next leader if the present one is gone or silent, and does what follows from the search.
        Returns what this node leads with, if it is to lead."""
        # Time for which this node itself stood still, even in the turn just over, does not count as the leader's
        # silence.
        stood_still, now = self._lag.late(MOST_OF_A_TURN), self._clock()
        self._heard_at = min(now, self._heard_at + stood_still)
        copy, lead_status = self._copy, self._lead_status
        silent = now - self._heard_at > self._silence
        if copy is None:
            if silent:
                # The leader may be stopped, and its successor would wait for this node. It may also be back soon.
                self._ask_another()
                raise _LeftOut("the leader was silent before it had told of the job", self._leads)
            return None
        silent = silent and (len(copy.nodes) > 2 or self._arbiter is not None)
        if self._frames is not None and lead_status.lead is None:
            self._leave("it was silent, and the nodes choose another")
        if self._frames is not None and not silent:
            return None
        lead_status.lose_lead()
        if self._search is None:
            self._search = Search(lead_status, copy, self._token, self._arbiter)
        if (found := self._search.outcome) is None:
            return None
        self._search = None
        if isinstance(found, Lead):
            return self._succeed(copy, found)
        if isinstance(found, Follow):
            self._follow(copy, found)
        elif self._frames is None and found.to is not None:
            self._come_back(copy, found.to, found.why)
        elif self._frames is None:
            raise LeadLost(f"{found.why}; this node's workers are ended")
        return None

    def _follow(self, copy: Copy, found: Follow) -> None:
        self._hang_up()  # it may take more than one try
        try:
            connection = socket.create_connection(copy.nodes[found.rank], 5.0)
        except OSError:
            return  # the search goes on
        try:
            self._introduce(connection, resumes=[copy.term, len(self._record)])
        except (_Later, OSError):
            connection.close()
            return
        except LeadLost as error:
            connection.close()
            self._come_back(copy, found, str(error))
            return
        except (NotTrusted, KeyError) as error:
            connection.close()
            raise LeadLost(f"no understanding with node {found.rank}, which leads: {error}") from None
        if not self._lead_status.follow(found.rank, found.term):
            self._leave("it leads no more")
            return
        self._resuming = True
        self._say(f"node {found.rank} leads from here on, and this node's workers go on")

    def _come_back(self, copy: Copy, to: Follow, why: str) -> None:
        """Comes back to a leader like a node that was started again: its workers count as lost there. Does not do so if
        it has promised to leave that leader."""
        if self._lead_status.follow(to.rank, to.term):
            others = (address for rank, address in copy.nodes.items() if rank not in (to.rank, self._rank))
            raise _LeftOut(why, (copy.nodes[to.rank], *others))

    def _succeed(self, copy: Copy, won: Lead) -> Succession:
        self._hang_up()
        assert self._hub is not None
        members = {r: a for r, a in copy.nodes.items() if r != self._rank and r not in won.gone}
        self._hub.take_over(members, won.expected)
        if self._rank != 0:
            self._hub.call_back(self._front)
        return Succession(
            *(decode_run(copy.job), self._nodes, self._hub, copy, self._record),
            *(self._entries, self._said, self._lost_at or time.monotonic_ns()),
            SpareRanks() if self._pool is None else self._pool.spares,
        )

    # -- one turn of the loop -----------------------------------------------------------------

    def _turn(self) -> None:
        frames = self._frames
        pipes = {entry.pipe: incarnation for incarnation, entry in self._entries.items() if not entry.hung_up}
        sentinels = [sentinel for entry in self._entries.values() for sentinel in entry.sentinels]
        timeout = 0.5 if frames is not None and self._search is None else 0.02
        if any(entry.looked_for for entry in self._entries.values()):
            timeout = min(timeout, LOOK_SECONDS)
        connections = [] if frames is None else [frames.fileno()]
        ready = wait([*connections, *pipes, *sentinels], 0.0 if frames is not None and frames.waiting else timeout)
        for item in ready:
            if item in pipes:
                self._pass_on(pipes[item])  # type: ignore[index]
        for incarnation, entry in list(self._entries.items()):
            entry.tell_ranks()
            if entry.has_ended(ready):
                self._ended(incarnation)
        if frames is None or frames is not self._frames:
            return
        try:
            # `take` does not wait: a leader that stops within a message must not keep this node from its workers, from
            # a signal to stop, or from looking for another leader.
            if (message := frames.take()) is not None:
                self._obey(frames, message)
            self._vouch(frames)
        except ValidationError as error:  # its message has many lines
            self._leave(in_a_line(error))
        except (OSError, NotTrusted, ValueError) as error:
            self._leave(error)

    def _tell(self, message: dict[str, Any]) -> None:
        """Sends a message to the leader, if there is one that is to know."""
        if self._frames is None or self._resuming or self._lead_status.lead is None:
            return
        self._frames.post(message)

    def _vouch(self, frames: Frames) -> None:
        """Tells the leader that workers compute which can't speak but are seen at work. The leader can't see that."""
        now = time.monotonic()
        for incarnation, entry in self._entries.items() if not self._resuming else ():
            if now - entry.heard_at > 2.5 * ALIVE_SECONDS and now - entry.looked_at >= ALIVE_SECONDS:
                entry.look(now)
                if entry.lived_at == now:
                    message = {"kind": "computes", "at": time.monotonic_ns()}
                    frames.post({"kind": "from", "incarnation": incarnation, "message": message})

    def _pass_on(self, incarnation: str) -> None:
        """Passes on everything that is in the worker's pipe."""
        entry = self._entries[incarnation]
        entry.heard_at = time.monotonic()
        for message in entry.messages():
            item = {"kind": "from", "incarnation": incarnation, "message": message}
            if message["kind"] != "alive":  # that only matters at the moment
                message["number"] = self._numbers[incarnation] = self._numbers.get(incarnation, 0) + 1
                self._said.setdefault(incarnation, deque()).append(item)
            self._tell(item)

    def _ended(self, incarnation: str) -> None:
        self._pass_on(incarnation)
        entry = self._entries.pop(incarnation)
        self._numbers.pop(incarnation, None)
        if self._pool is not None:
            self._pool.forget(entry)
            self._pool.spare(entry)
        about = {"code": entry.first_end[1], "spare": list(entry.spare_ranks)}
        item = {"kind": "exited", "incarnation": incarnation, **about}
        self._said.setdefault(incarnation, deque()).append(item)
        self._tell(item)
        if entry.unknown or (entry.fenced and entry.asked):  # the leader does not hear of its end
            self._resumed()

    def _obey(self, frames: Frames, message: dict[str, Any]) -> None:
        self._heard_at = self._clock()
        if self._search is not None and self._lead_status.hear():
            self._search.cancel()
            self._search = None
        if self._lead_status.lead is None:
            return  # this node has promised to follow another leader
        entry = self._entries.get(str(message.get("incarnation")))
        match message["kind"]:
            case "start":
                self._start(message["spec"], [(str(i), int(rank)) for i, rank in message["fill"]])
            case "to" if entry is not None:
                entry.post(**message["message"])
            case "kill" if entry is not None:
                entry.fenced = bool(message["fenced"])
                entry.kill()
            case "end" if entry is not None:
                entry.end()
            case "clock":
                frames.send({"kind": "clock", "at": time.monotonic_ns()})
            case "lines":
                self._record.cut(message["first"])
                if warning := self._record.add_text(message["text"]):
                    self._say(warning)
            case "copy":
                self._take(frames, Copy.of(message, self._copy))
            case "resume":
                self._resume(frames, message)
            case "moved":
                self._ask_another(message["lead"])
                raise _Moved
            case "over":
                self._over, self._finished = str(message["reason"]), bool(message["finished"])
            case "bye":
                raise _Bye

    def _take(self, frames: Frames, copy: Copy) -> None:
        if not self._lead_status.take(copy):
            return
        self._backoff.reset()
        if self._copy is None:
            run = decode_run(copy.job)
            if text := self._unused(run):
                self._say(text)
            options = run.options
            self._silence = options.faults.timeouts.silence
            if (url := options.console.url) is not None:
                decides = copy.unpacked()["decides"]
                self._arbiter = Arbiter(url, decides["token"], decides["job"])
        self._copy = copy
        assert self._hub is not None
        self._hub.lead = copy.nodes[copy.lead]
        frames.post({"kind": "ack", "number": copy.number})
        for incarnation, said in list(self._said.items()):
            heard = copy.heard.get(incarnation)
            if heard is None and incarnation not in self._entries:
                del self._said[incarnation]
            while said and heard is not None and said[0].get("message", {}).get("number", heard + 1) <= heard:
                said.popleft()

    def _resume(self, frames: Frames, message: dict[str, Any]) -> None:
        """Tells a new leader what it has not heard, and ends workers that it does not know. Workers that it knows and
        this node does not are reported as ended: the leader before did not come to start them here, or could not; or
        they are on other nodes."""
        for said in self._said.values():
            for item in said:
                heard = message["heard"].get(item["incarnation"], 0)
                if item.get("message", {}).get("number", heard + 1) > heard:
                    frames.post(item)
        for incarnation, entry in self._entries.items():
            if incarnation not in message["workers"]:
                entry.unknown = entry.unknown or never_known(entry, incarnation, message["heard"])
                entry.fenced = True
                entry.kill()
        for incarnation in set(message["workers"]) - self._entries.keys() - self._said.keys():
            frames.post({"kind": "exited", "incarnation": incarnation, "code": None, "spare": []})
        self._resuming = False
        self._resumed()

    def _resumed(self) -> None:
        """Tells a new leader which ranks are spare here, as soon as the workers have ended of which it never knew: the
        spare ranks that these were made of are spare again. A silent worker that it does not have may leave more."""
        if any(entry.unknown for entry in self._entries.values()):
            return
        spares = [] if self._pool is None else [list(spare.rank) for spare in self._pool.spares.on(self._pool.own_node)]
        self._tell({"kind": "resumed", "spares": spares})

    def _start(self, document: dict[str, Any], fill: Collection[RankOf]) -> None:
        """Starts a worker. fill: the spare ranks in whose place it starts, as the leader says. If it can't be started,
        they stay spare."""
        spec = decode_spec(document)
        if self._pool is None:
            self._pool = self._make_pool(spec.run.workload)
        # The pool keeps processes by cell, but here a cell may have several, since workers move. So each gets a new
        # one.
        self._started += 1
        cell, spares = Worker(self._started, spec.worker.stage), self._pool.spares.take_named(self._pool.own_node, fill)
        try:
            entry = self._pool.start(cell, lambda _: spec, time.monotonic(), spares)
        except (OSError, EOFError) as error:
            self._pool.spares.put_back(spares, time.monotonic())
            self._say(f"a process for {spec.worker} can't be started ({error})")
            exited = {"kind": "exited", "incarnation": spec.incarnation, "code": 1, "spare": []}
            self._tell(exited | {"unstarted": True})
            return
        entry.incarnation = spec.incarnation
        self._entries[spec.incarnation] = entry


class _Later(Exception):
    """The leader can't take this node now, for a reason that may pass."""


class _Moved(Exception):
    """Another node leads already."""


class _LeftOut(Exception):
    """The leader goes on without this node, or was lost before it had told this node of the job. leads: where it
    listens, then the other known nodes, of which one may lead if it is lost."""

    def __init__(self, why: str, leads: Iterable[tuple[str, int]]) -> None:
        self.leads = tuple(leads)
        super().__init__(why)


class _Bye(Exception):
    """The leader has said its last word."""


# -- the next leader ---------------------------------------------------------------------------------

# How a node goes on as the leader: it makes a launcher's pool from its copy, its workers, and what they have said
# since.


def never_known(entry: WorkerProcess, incarnation: str, heard: Collection[str]) -> bool:
    """Says whether no leader has come to know of a worker that a new leader does not have. heard: of the new leader's
    copy. That a leader before the last one had given the worker up is in no copy: only the node knows it."""
    return not (entry.fenced or entry.asked or incarnation in heard)


FOLLOW_SECONDS = 5.0
"""How long the new leader waits for the nodes that live, and for what their workers have said."""


@dataclass(frozen=True)
class Succession:
    """What a node has that leads from now on. entries: its living workers, by incarnation. unheard: what these have
    said that may not be in the copy, by incarnation, in order. lost_at: when the leader before was lost, in
    nanoseconds. spares: of this node."""

    run: RunSpec
    nodes: int
    hub: NodeHub
    copy: Copy
    record: Spool
    entries: Mapping[str, WorkerProcess]
    unheard: Mapping[str, Iterable[Mapping[str, Any]]]
    lost_at: int
    spares: SpareRanks

    def take_over(self) -> tuple[SpreadPool, Takeover]:
        """Waits for the nodes that follow. Returns a launcher's pool, and what the launcher goes on from."""
        hub, copy = self.hub, self.copy
        links = hub.followers(FOLLOW_SECONDS)
        now = time.monotonic()
        self.record.cut(copy.lines)
        pool = SpreadPool(preload(self.run.workload), hub, place(self.run.options.job, self.nodes), self.record)
        document = copy.unpacked()
        lost = dict[Worker, str]()
        for about in document["workers"]:
            cell, incarnation, node = Worker.parse(about["worker"]), about["incarnation"], about["node"]
            if node == hub.lead_status.rank and incarnation in self.entries:
                entry = self.entries[incarnation]
                entry.worker, entry.heard_at = cell, now
                pool.adopt(entry)
            elif node in links:
                entry = pool.adopt_there(links[node], cell, incarnation, now)
            else:
                lost[cell] = incarnation
                continue
            entry.restore(about)
            entry.heard = copy.heard.get(incarnation, 0)
        pool.know_spares(self.spares)
        known = {about["incarnation"] for about in document["workers"]}
        for incarnation, entry in self.entries.items():
            if incarnation not in known:
                entry.unknown = entry.unknown or never_known(entry, incarnation, copy.heard)
                pool.fence(entry, "unknown to this launcher")
        for link in links.values():
            link.had(copy.term, copy.lines)
            link.post({"kind": "resume", "heard": dict(copy.heard), "workers": sorted(known)})
        until = now + FOLLOW_SECONDS

        def others_tell() -> bool:
            with hub.news:
                waiting = [link for link in links.values() if link.alive and not link.resumed]
                if waiting:
                    hub.news.wait(0.02)
            return bool(waiting) and time.monotonic() < until

        text = f"node {copy.lead}, which led, is lost: node {hub.lead_status.rank} leads from here on"
        return pool, Takeover(
            document=document,
            ahead=copy.ahead,
            plan=from_text(copy.plan),
            recorded=self.record.newest_losses(REMEMBERED),
            lost=lost,
            lost_at=self.lost_at,
            unheard=list(self._unheard(pool.running.values())),
            others_tell=others_tell,
            text=text,
        )

    def _unheard(self, entries: Collection[WorkerProcess]) -> Iterable[tuple[WorkerProcess, dict[str, Any]]]:
        for entry in entries:
            for item in self.unheard.get(entry.incarnation, ()) if not entry.elsewhere else ():
                message = dict(item.get("message", {}))
                if message.pop("number", 0) > entry.heard:
                    yield entry, message
