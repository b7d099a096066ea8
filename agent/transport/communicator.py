"""Forms the process groups of a generation over a store, re-forms them after a death, and wakes threads that wait in
them.

The control plane (agreement, validations, state) is one gloo group over all living workers, whatever the device. The
data plane (see agent.transport) has what its kind of transport needs.

While a generation trains, its workers connect once more, on standby (`Standby`). After a death the survivors meet at
the store, and go on over these connections instead of making new ones first. One set serves every failure, since a
connection works whichever other worker has died. Groups made ahead for each failure would be as many as there are
workers, and would not serve two deaths. The standby connections are made again for each generation, since waking the
threads that wait in a gloo group closes its connections.

torch's own reconfiguration (2.14) is not used: 12 workers took 70 to 112 ms to reconfigure a gloo group whose handles
all knew, and 10 to 18 ms to make a new one over the store (`bench_reconfigure`, by turns in one run).

gloo's lazy connections, which are made when they are used, are not used either. With them, a plain group of 256
processes forms in a quarter of the CPU time (1.6 s instead of 6.8), and is closed in a fifteenth. But each connection
that is made later takes as much as several made at the outset, and such a group can't share its gloo device with that
of its stage. CPU time until all have agreed, lazy against eager, by turns, with the connections on standby for all
neighbours that a death may give: 64 workers 0.33 s against 0.29, 128 workers 0.92 against 0.74, 256 workers 4.7 against
3.1; without standby 1.3 against 1.2 s, and 5.1 against 4.7.

torch serves the store in threads of its own inside the launcher, whatever the launcher's Python does. Groups need it
only while they form. Nothing is ever deleted from a store, and a gloo group of n workers leaves 8 n² bytes in it. So a
new one takes its place every few generations, and its address is sent with the generation.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import resource
import socket
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from openrecycle.agent.config.devices import Transport
from openrecycle.agent.config.options import LOOPBACK, Timeouts
from openrecycle.agent.models.layers import CPU
from openrecycle.agent.transport.group import (
    Devices,
    GlooGroup,
    Group,
    HostGroup,
    LateGroup,
    NcclGroup,
    PendingConnections,
    PendingTransfer,
    TransferError,
    first_line,
)
from openrecycle.agent.transport.ranks import Connections, Ranks
from openrecycle.agent.transport.transfers import GenerationGroups, OrderedTransfers, TransferLayout, Transfers, connect
from openrecycle.planner.jobs.job import Worker, WorkerRank
from openrecycle.planner.plans.schedule import MicroBatch

# -- the store through which the groups of a generation find each other -------------------------

dist: Any = torch.distributed

START_SECONDS, REPLACE_SECONDS = 30.0, 5.0
"""How long starting a store may take. The launcher does nothing else meanwhile."""
GENERATIONS = 10
"""How many generations one store serves."""


class StoreError(RuntimeError):
    """No store could be started; the message says why."""


class RendezvousStore:
    """A running store. host: the address it listens on, which workers must be able to reach."""

    def __init__(self, host: str = LOOPBACK) -> None:
        """Starts the store. Raises StoreError if it can't listen there."""
        self._host = host
        self._newest = self._served = 0
        self._before: Any = None
        """The store before, for workers of the generation before that still form another group."""
        with contextlib.suppress(OSError, ValueError):  # each worker has several connections here
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._now, self.address = _serve(host, START_SECONDS)

    def address_of(self, generation: int) -> tuple[str, int]:
        """Returns the address of the store where the groups of that generation form. Generations must not fall."""
        if generation > self._newest:
            self._newest = generation
            self._served += 1
            if self._served > GENERATIONS:
                with contextlib.suppress(StoreError):  # there may be no free descriptor: then the present store stays
                    now, self.address = _serve(self._host, REPLACE_SECONDS)
                    self._before, self._now, self._served = self._now, now, 1
        return self.address

    def close(self) -> None:
        """Ends the store, which wakes the threads that wait there."""
        self._now = self._before = None


def _serve(host: str, seconds: float) -> tuple[Any, tuple[str, int]]:
    try:
        # Bound here, because torch's own listener binds every interface of the machine.
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
                master_listen_fd=os.dup(listener.fileno()),
            )
    except (OSError, RuntimeError) as error:
        raise StoreError(f"no store could be started on {host} ({type(error).__name__})") from None
    return store, (host, port)


class StoreClient:
    """A worker's connections to the store that the generation names: one for each thread that uses it.

    A TCPStore client serialises its calls, and the thread that cancels must not wait for the one that waits.
    """

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._waiting: Any = None
        self._cancelling: Any = None
        self._spare: list[tuple[tuple[str, int], Any]] = []
        self._lock = threading.Lock()

    def connect(self, address: tuple[str, int], timeout: float) -> Any:
        """Returns the store for the thread that forms groups. Raises RuntimeError (torch's own kinds) or OSError."""
        if address != self._address:
            waiting = _client(address, timeout)
            cancelling = _client(address, timeout)
            with self._lock:
                self._address, self._waiting, self._cancelling = address, waiting, cancelling
        return self._waiting

    def forget(self) -> None:
        """Has the next `connect` make a new connection, since another thread may still wait in the present one."""
        with self._lock:
            self._address = None

    def borrow(self, address: tuple[str, int], timeout: float) -> Any:
        """Returns a connection for the caller alone. May be called from any thread. Raises RuntimeError or OSError."""
        with self._lock:
            spare, self._spare = self._spare, []
        return next((client for at, client in spare if at == address), None) or _client(address, timeout)

    def give_back(self, address: tuple[str, int], client: Any) -> None:
        """Takes back a connection that was borrowed, and in which no thread waits."""
        with self._lock:
            self._spare = [(address, client)]

    def set_from_another_thread(self, key: str, value: bytes) -> None:
        """Sets `key`. A store that is gone does not matter, since the threads that wait on it have noticed."""
        with self._lock:
            if self._cancelling is not None:
                with contextlib.suppress(RuntimeError):
                    self._cancelling.set(key, value)


def _client(address: tuple[str, int], timeout: float) -> Any:
    # A plain socket is tried first, since torch's client prints pages about a store that is gone.
    socket.create_connection(address, timeout).close()
    host, port = address
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


Made = queue.SimpleQueue["Groups | BaseException | None"]
"""Brings groups that are connected, or the exception for which they are not; None: stop waiting for them."""

_GO = b"go"
_ON_STANDBY = b"standby"
_SUPERSEDED = b"superseded"
_HAS_STANDBY = 2**32
"""What a worker adds to the count of ready workers, beside 1, if it has standby connections that will do. If all have
them, all take them."""


# -- the groups of a generation -----------------------------------------------------------------


class Standby:
    """Connections between all workers of a generation that are made for the next one. `drop` may be called from any
    thread."""

    def __init__(
        self,
        stores: StoreClient,
        address_of_store: tuple[str, int],
        generation: int,
        me: Worker,
        members: Sequence[Worker],
        timeouts: Timeouts,
        devices: Devices,
        ranks: Ranks,
        *,
        with_stage: bool,
        first: Callable[[], None],
    ) -> None:
        """Begins to connect, in a thread of its own. If a peer does not come, there are just no such connections.

        ranks: of this worker, which also connect to each other. with_stage: also makes a group for the stage's sums.
        first: called in that thread before it connects.
        """
        self.generation, self._me, self.members = generation, me, tuple(members)
        self._lock = threading.Lock()
        self._dropped = False
        self._begun: list[GlooGroup] = []
        self._groups: list[GlooGroup] | None = None
        """The connected groups: that of all members, and that of the stage where it is asked for."""
        self.of_ranks: list[Connections] = []

        def connect() -> None:
            begun = self._begun
            plane = _plane(generation, ranks) + "standby/"
            parts = [("world", self.members)]
            stage = _peers(me, members)
            if with_stage and len(stage) > 1:
                parts.append((f"stage{me.stage}", stage))
            try:
                first()
                # A connection to the store serves one caller at a time, and gloo may wait in it for long.
                store = stores.borrow(address_of_store, timeouts.form)
                for name, workers in parts:
                    group = GlooGroup(store, plane + name, workers.index(me), workers, timeouts, devices)
                    begun.append(group)
                    if self._dropped:
                        break
                    group.keep_alive()
                if not self._dropped:
                    of_ranks = dist.PrefixStore(f"generation{generation}/{me}/standby", store)
                    self.of_ranks = ranks.connections(of_ranks, timeouts)
                stores.give_back(address_of_store, store)
            except (
                RuntimeError,
                OSError,
            ):  # a worker is gone, or stands still: the next generation will make its own connections
                self._dropped = True
            with self._lock:
                if not self._dropped:
                    self._groups = begun
                    return
            devices.retire()
            _close(begun)

        threading.Thread(target=connect, name=f"connect-standby-{generation}", daemon=True).start()

    @property
    def connected(self) -> bool:
        return self._groups is not None

    def serves(self, me: Worker, living: Sequence[Worker]) -> bool:
        """Says whether these connections will do for the next generation: `me` is at the same place, and they reach all
        of `living`. If no worker is gone, a connection may be broken, so all are to be made again."""
        return self.connected and me == self._me and set(living) < set(self.members)

    def take(self) -> tuple[GlooGroup, GlooGroup | None]:
        """Gives the caller the group of all members and that of the stage. Called only if they are connected."""
        with self._lock:
            groups, self._groups, self._begun = self._groups, None, []
        assert groups is not None
        world, *stage = groups
        return world, stage[0] if stage else None

    def drop(self) -> None:
        """Gives the connections up, and closes them in a thread."""
        with self._lock:
            self._dropped = True
            # Its thread may still wait for a sibling, for as long as a group's time-out.
            groups, self._groups, self._begun = self._begun, None, []
        if groups:
            threading.Thread(target=_close, args=(groups,), name="close-standby", daemon=True).start()


def _close(groups: list[GlooGroup]) -> None:
    """Closes groups that nothing else holds, and frees them."""
    for group in groups:
        group.cancel()  # see Groups.close
        group.close()
    groups.clear()


def _peers(me: Worker, workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """Returns the workers of the stage, with `me`."""
    return tuple(w for w in workers if w.stage == me.stage)


def _plane(generation: int, ranks: Ranks) -> str:
    """Returns the prefix of the names of the groups that ranks of one number form."""
    return f"generation{generation}/" + (f"rank{ranks.rank}/" if ranks.size > 1 else "")


class Groups:
    """The process groups of one generation, seen from one worker."""

    def __init__(
        self,
        store: Any,
        generation: int,
        me: Worker,
        living: Sequence[Worker],
        timeouts: Timeouts,
        devices: Devices | None = None,
        transport: Transport = "tagged",
        device: torch.device = CPU,
        neighbours: Collection[Worker] = (),
        begun: PendingConnections | None = None,
        ranks: Ranks | None = None,
        standby: Standby | None = None,
    ) -> None:
        """Waits until all of `living` are there. Raises TransferError.

        device: where data and sums are. neighbours: the workers with which this one exchanges data (Script.neighbours).
        begun: gets all connections before anything waits in them. ranks: of this worker; each rank is in groups with
        those of the same number in other workers. standby: connections that all of `living` have: they are taken, and
        need no waiting.
        """
        self.generation = generation
        self._ordered, self._living = transport == "ordered", tuple(living)
        self.ranks = ranks or Ranks()
        devices = devices or Devices(LOOPBACK)
        self.address = devices.address
        """The address of this host, as its peers reach it."""
        self.peers = stage = _peers(me, living)
        """The living workers of this one's stage, by their rank in `peer_group`."""
        members = self._living if standby is None else standby.members
        self._rank = {w: i for i, w in enumerate(members)}
        """The rank of each worker in the control plane."""
        plane = _plane(generation, self.ranks)
        on_cpu = device.type == "cpu"
        begun = begun or PendingConnections()

        def gloo(name: str, members: Sequence[Worker], store: Any = store) -> GlooGroup:
            return GlooGroup(store, plane + name, members.index(me), members, timeouts, devices)

        def nccl(name: str, members: Sequence[Worker]) -> Group:
            rank, messages = members.index(me), not name.startswith("stage")
            return NcclGroup(store, plane + name, rank, members, timeouts, device, messages=messages)

        def late(name: str, members: Sequence[Worker]) -> Group:
            # A connection to the store serves one caller at a time.
            return LateGroup(lambda: gloo(name, members, store.clone()), members.index(me), timeouts)

        def over_gloo(group: Group) -> Group:
            return group if on_cpu else HostGroup(group)

        def data(name: str, members: Sequence[Worker]) -> Group:
            over_nccl = device.type == "cuda" and self._ordered
            made = nccl(name, members) if over_nccl else over_gloo(gloo(name, members))
            begun.add(made)
            return made

        try:
            if self.ranks.size > 1:
                of_ranks = dist.PrefixStore(f"generation{generation}/{me}/ranks", store)
                self.ranks.connect(of_ranks, timeouts, () if standby is None else standby.of_ranks, begun)
            whole: Group | None = None
            if standby is None:
                self._control = gloo("world", living)
            else:
                self._control, whole = standby.take()
            begun.add(self._control)
            if whole is not None:
                begun.add(whole)
            name, peers = f"stage{me.stage}", None
            if len(stage) > 1:
                if whole is not None and stage == _peers(me, members):
                    peers, whole = over_gloo(whole), None
                elif standby is not None and not self._ordered:
                    peers = over_gloo(late(name, stage))  # it is not needed before the end of the iteration
                    begun.add(peers)
                else:
                    peers = data(name, stage)
            self._unused = whole
            """The standby group of a stage that has lost a worker, which is of no use."""
            if self._ordered:
                rank = {w: i for i, w in enumerate(living)}
                forward, backward = data("forward", living), data("backward", living)
            else:
                rank, forward = self._rank, over_gloo(self._control)
                backward = forward
            self.lines = GenerationGroups(me, forward, backward, peers, rank)
            """The groups for data."""
            if self._ordered:
                connect(self.lines, neighbours, device)
        except RuntimeError as error:
            begun.end()
            devices.retire()
            peer = error.peer if isinstance(error, TransferError) else None
            text = f"the groups of generation {generation} could not be formed: {first_line(error)}"
            raise TransferError(text, peer) from None

    def transfers(self, layout: TransferLayout) -> Transfers:
        """Returns the transfers for the generation's iterations."""
        return (OrderedTransfers if self._ordered else TaggedTransfers)(self.lines, layout)

    def send(self, to: Worker, tensor: Tensor, tag: int) -> PendingTransfer:
        """Starts a send of the control plane; the receiver may ask for it in any order."""
        return self._control.send(self._rank[to], tensor, tag)

    def receive(self, source: Worker, buffer: Tensor, tag: int) -> PendingTransfer:
        """Starts a receive of the control plane into `buffer`."""
        return self._control.receive(self._rank[source], buffer, tag)

    @property
    def peer_group(self) -> Group | None:
        """The group of the stage, for data; None: this worker is alone in it."""
        return self.lines.peers

    def reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` (integer) over the living peers of the stage, in place."""
        if self.lines.peers is not None:
            self.lines.peers.sum(tensor)

    def gather_rows(self, values: Sequence[int]) -> dict[WorkerRank, tuple[int, ...]]:
        """Gathers the `values` of each rank of each worker, on all of them. All must bring equally many."""
        rows = self._control.gather(torch.tensor(values, dtype=torch.int64), [self._rank[w] for w in self._living])
        table, width = self.ranks.gather(rows).numpy().tobytes(), 8 * len(values)
        # Many rows are equal, and a tuple for each different one is made in a third of the time that all take.
        encoded = [table[at : at + width] for at in range(0, len(table), width)]
        decoded = {row: struct.unpack(f"={len(values)}q", row) for row in set(encoded)}
        return dict(zip(self._members, map(decoded.__getitem__, encoded), strict=True))

    @functools.cached_property
    def _members(self) -> list[WorkerRank]:
        """All ranks of the living workers, in the order of the rows of a gathered table."""
        return [WorkerRank(w, k) for k in range(self.ranks.size) for w in self._living]

    def look_ahead(self) -> None:
        """Keeps connections alive over which nothing passes, and prepares their end. May be called from any thread."""
        for group in self._all:
            if isinstance(group, GlooGroup):
                group.keep_alive()
                group.look_ahead()

    def cancel(self) -> None:
        """Makes every wait on these groups fail within milliseconds. May be called from any thread."""
        self.ranks.cancel()
        for group in self._all:
            group.cancel()

    def leave(self) -> None:
        """Ends what is under way on a device, when nothing is exchanged in these groups any more. Does not wait."""
        for group in self._all:
            group.halt()

    def close(self) -> None:
        """Ends all connections, when nothing is exchanged in them any more. It does not wait for the device: it is
        called in a thread beside the training, and the device may run what waits for a peer."""
        # Otherwise gloo's destructor closes each connection under the interpreter's lock, which takes 10 ms for each,
        # until gloo's thread has let go of it: 100 ms with 12 workers and 600 ms with 64, in which no other thread
        # runs. Here they are closed while the other threads run on.
        for group in self._all:
            group.cancel()
        for group in self._all:
            group.close()

    @property
    def _all(self) -> list[Group]:
        lines = self.lines
        groups = (self._control, lines.peers, lines.forward, lines.backward, self._unused)
        return [g for g in dict.fromkeys(groups) if g is not None]


class Communicator:
    """Forms the groups of one generation after the other. `cancel` may be called from any thread."""

    def __init__(
        self, timeouts: Timeouts | None = None, *, address: str = LOOPBACK, transport: Transport = "tagged"
    ) -> None:
        """address: of this host, as its peers reach it."""
        self._timeouts, self._devices, self._transport = timeouts or Timeouts(), Devices(address), transport
        self._stores = StoreClient()
        self._lock = threading.Lock()
        self._live: Groups | None = None
        self._forming: int | None = None
        self._connecting: Made | None = None
        self._newest = 0
        self._formed: tuple[tuple[str, int], int, Worker, Sequence[Worker]] | None = None
        """Store, number, place and members of the generation that was formed last, until `stand_by` has used them."""
        self._standby: Standby | None = None
        self._left_in_haste: list[Groups] = []
        """Groups that are still to be closed, when there is time."""
        self.ranks = Ranks()
        """The ranks of this worker."""

    def form(
        self,
        generation: int,
        me: Worker,
        living: Sequence[Worker],
        store: tuple[str, int],
        device: torch.device = CPU,
        *,
        at_iteration_end: bool = False,
        neighbours: Collection[Worker] = (),
    ) -> Groups:
        """Waits until all of `living` are ready at the store (host, port), and then connects; for data with
        `neighbours`. If all have standby connections that will do, these are taken instead. The groups in use stay
        until all are ready, since a peer may still be fetching what this worker sent last.

        at_iteration_end: others first finish an iteration, so this waits for them as long as for a peer's data. Raises
        TransferError when it fails, or when a newer generation is announced meanwhile.
        """
        standby, self._standby, self._formed = self._standby, None, None
        if standby is not None and not standby.serves(me, living):
            standby.drop()
            standby = None
        with self._lock:
            if self._newest > generation:
                raise TransferError(f"generation {generation} is superseded by {self._newest}")
            self._forming = generation
        try:
            meeting = self._stores.connect(store, self._timeouts.form)
            # From here on `cancel` reaches this store; before, it may have missed it.
            if self._newest > generation:
                raise TransferError(f"generation {generation} is superseded by {self._newest}")
            go = f"generation{generation}/go"
            with_standby, there = divmod(
                meeting.add(f"generation{generation}/ready", 1 if standby is None else 1 + _HAS_STANDBY), _HAS_STANDBY
            )
            if there == len(living) * self.ranks.size:
                meeting.set(go, _ON_STANDBY if with_standby == there else _GO)
            # There is no separate `wait`: `get` waits by itself.
            meeting.set_timeout(timedelta(seconds=self._timeouts.transfer if at_iteration_end else self._timeouts.form))
            word = meeting.get(go)
            meeting.set_timeout(timedelta(seconds=self._timeouts.form))
            if word not in (_GO, _ON_STANDBY):
                raise TransferError(f"generation {generation} is superseded")
            taken = standby if word == _ON_STANDBY else None
            self.abandon()
            begun = PendingConnections()

            def make() -> Groups:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # each thread has its own
                return Groups(
                    *(
                        meeting,
                        generation,
                        me,
                        living,
                        self._timeouts,
                        self._devices,
                        self._transport,
                        device,
                        neighbours,
                        begun,
                        self.ranks,
                        taken,
                    )
                )

            connects = taken is None or self._transport == "ordered"
            groups = self._connect(generation, make, begun) if connects else make()
        except (RuntimeError, OSError) as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"generation {generation} did not come together: {first_line(error)}") from None
        finally:
            if standby is not None:
                standby.drop()  # it does not have what was taken any more
            with self._lock:
                self._forming = None
        with self._lock:
            self._live = groups
            if self._newest > generation:
                raise TransferError(f"generation {generation} is superseded by {self._newest}")
        self._formed = store, generation, me, living
        return groups

    def stand_by(self) -> None:
        """Starts to connect, beside the training, for the generation after the one that was formed last, whichever
        workers die until then. All workers of a generation call it. Returns at once, since a thread connects; does
        nothing if that is done or under way."""
        self._close_left()
        groups = self._live
        if self._formed is None or groups is None:
            return
        (store, generation, me, living), self._formed = self._formed, None
        # A survivor that is alone has nothing to connect to but its own ranks.
        if len(living) > (2 if self.ranks.size == 1 else 1):
            self._standby = Standby(
                *(self._stores, store, generation, me, living, self._timeouts, self._devices, self.ranks),
                with_stage=self._transport == "tagged",
                first=groups.look_ahead,
            )

    @property
    def stands_by(self) -> bool:
        """Whether the standby connections are there."""
        return self._standby is not None and self._standby.connected

    def _connect(self, generation: int, make: Callable[[], Groups], begun: PendingConnections) -> Groups:
        """Runs `make` in a thread of its own, and returns what it makes.

        gloo waits for one absent peer after the other, each for as long as a generation may take to form; NCCL waits
        for ever for a peer that died while it connected; and nothing wakes either. So such a thread is left behind,
        which costs a retry and no survivor: what it has begun is cancelled, and it begins nothing more. Raises
        TransferError, also when a newer generation is announced, or when connecting takes longer than any transfer may.
        """
        made: Made = queue.SimpleQueue()
        with self._lock:
            if self._newest > generation:
                raise TransferError(f"generation {generation} is superseded by {self._newest}")
            self._connecting = made
        threading.Thread(target=_make, args=(make, made), name=f"connect-generation-{generation}", daemon=True).start()
        try:
            groups = made.get(timeout=self._timeouts.group)
        except queue.Empty:
            groups = TransferError(f"generation {generation} did not connect within {self._timeouts.group:g} s")
            self._stores.forget()
        with self._lock:
            self._connecting = None
        if not isinstance(groups, Groups):
            begun.give_up()
        if groups is None:
            # The thread may wait at the store for long, and a connection to the store serves one caller at a time.
            self._stores.forget()
            raise TransferError(f"generation {generation} is superseded by {self._newest}")
        if isinstance(groups, BaseException):
            raise groups
        return groups

    def abandon(self) -> None:
        """Drops the groups in use. They are closed in another thread, since that waits for gloo's threads; if another
        generation is about to form, this happens once that one trains."""
        with self._lock:
            groups, self._live = self._live, None
            hurry = groups is not None and groups.generation < self._newest
        if groups is None:
            return
        groups.leave()
        self._close_left()
        self._left_in_haste = [groups]
        if not hurry:
            self._close_left()

    def _close_left(self) -> None:
        left, self._left_in_haste = self._left_in_haste, []
        if left:
            threading.Thread(target=_close_and_drop, args=(left,), name="close-groups", daemon=True).start()

    def cancel(self, newest_generation: int) -> None:
        """Wakes the threads that wait in groups, or for groups, of a generation before `newest_generation`."""
        with self._lock:
            self._newest = max(self._newest, newest_generation)
            groups, forming, connecting = self._live, self._forming, self._connecting
        if forming is not None and forming < newest_generation:
            if connecting is not None:
                connecting.put(None)
            self._stores.set_from_another_thread(f"generation{forming}/go", _SUPERSEDED)
        if groups is not None and groups.generation < newest_generation:
            groups.cancel()


def _make(make: Callable[[], Groups], made: Made) -> None:
    """Puts the groups, or the exception, into `made`. If nothing waits for the groups any more, they end with this
    thread."""
    try:
        made.put(make())
    except BaseException as error:
        made.put(error)


def _close_and_drop(left: list[Groups]) -> None:
    for groups in left:
        groups.close()
    del groups
    left.clear()


# The messages of this many iterations have different tags; two may be in flight, since steps are staggered.
_TAG_ITERATIONS = 4


class TaggedTransfers(Transfers):
    """Transfers with a tag for each iteration, direction, micro-batch and tensor."""

    def _post(self, kind: str, key: MicroBatch) -> None:
        self._listen(kind, key)

    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        layout = self._layout
        iteration, direction = self._iteration % _TAG_ITERATIONS, "FI".index(kind)
        slots = layout.job.pipelines * layout.job.micro_batches
        slot = (2 * iteration + direction) * slots + key[0] * layout.job.micro_batches + key[1]
        return slot * layout.widest + index
