"""The groups of a generation: the store through which they find each other, re-forming them after a death, and waking
whoever waits in them.

The control plane (agreement, validations, state) is one gloo group over all living workers, whatever the device. The
data plane (see agent.transport) has what its kind of transport needs.

While a generation trains, its workers connect once more, on standby (`Standby`): after a death the survivors meet at
the store and go on over these connections, where they would have had to make them. One set serves every failure, since
a connection does not care who else has died; groups made ahead for each failure would be as many as there are workers,
and would not serve two deaths. They are made anew for the generation after, since what wakes who waits in a gloo group
closes its connections.

torch's own reconfiguration (2.14) is not used: 12 workers took 70 to 112 ms to reconfigure a gloo group whose handles
all knew, and 10 to 18 ms to make a new one over the store (`bench_reconfigure`, by turns in one run).

Nor are gloo's lazy connections, of which only those come about that are used: a plain group of 256 processes forms in
a quarter of the processor time so (1.6 s for 6.8), and is closed in a fifteenth. But each that comes about takes as
much as several made at the outset, and such a group can't share what listens with that of its stage. By turns, with
the connections on standby for all neighbours that a death may give: 64 workers 0.33 s of processor time for 0.29
until they have agreed, 128 0.92 for 0.74, 256 4.7 for 3.1; without standby 1.3 for 1.2 s, and 5.1 for 4.7.

The store: torch serves it, in threads of its own: inside the launcher, and whatever the launcher's Python does. Groups
need it only while they form. Nothing is ever deleted from one, and a gloo group of n workers leaves 8 n² bytes there:
so every few generations a new one takes its place, whose address travels with the generation.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
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
    Begun,
    GlooDevice,
    GlooGroup,
    Group,
    HostGroup,
    LateGroup,
    NcclGroup,
    PendingTransfer,
    TransferError,
    first_line,
)
from openrecycle.agent.transport.ranks import Connections, Ranks
from openrecycle.agent.transport.transfers import Lines, OrderedTransfers, TransferLayout, Transfers, connect
from openrecycle.planner.jobs.job import Worker, WorkerRank
from openrecycle.planner.plans.schedule import MicroBatch

# -- the store through which the groups of a generation find each other -------------------------

dist: Any = torch.distributed

START_SECONDS, REPLACE_SECONDS = 30.0, 5.0
"""The launcher does nothing else meanwhile."""
GENERATIONS = 10
"""That one store serves."""


class StoreError(RuntimeError):
    """No store could be started; the sentence says why."""


class RendezvousStore:
    """A running store. host: the address it listens on, which workers must be able to reach."""

    def __init__(self, host: str = LOOPBACK) -> None:
        """Raises StoreError where it can't listen there."""
        self._host = host
        self._newest = self._served = 0
        self._before: Any = None
        """For those that train in the generation before, and form another group late."""
        with contextlib.suppress(OSError, ValueError):  # each worker has several connections here
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._now, self.address = _serve(host, START_SECONDS)

    def address_of(self, generation: int) -> tuple[str, int]:
        """Where the groups of that generation form, which is no older than the one before. The launcher asks."""
        if generation > self._newest:
            self._newest = generation
            self._served += 1
            if self._served > GENERATIONS:
                with contextlib.suppress(StoreError):  # for want of a descriptor, say: the one that there is serves on
                    now, self.address = _serve(self._host, REPLACE_SECONDS)
                    self._before, self._now, self._served = self._now, now, 1
        return self.address

    def close(self) -> None:
        """Who waits there is woken."""
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
    """A worker's connections to whichever store the generation names: one per thread that uses it.

    A TCPStore client serialises its calls, and the thread that cancels must not wait for the one
    that waits.
    """

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._waiting: Any = None
        self._cancelling: Any = None
        self._spare: list[tuple[tuple[str, int], Any]] = []
        self._lock = threading.Lock()

    def connect(self, address: tuple[str, int], timeout: float) -> Any:
        """The store for the thread that forms groups. Raises RuntimeError (torch's own kinds) or OSError."""
        if address != self._address:
            waiting = _client(address, timeout)
            cancelling = _client(address, timeout)
            with self._lock:
                self._address, self._waiting, self._cancelling = address, waiting, cancelling
        return self._waiting

    def forget(self) -> None:
        """The next `connect` connects anew: somebody else may still be waiting in the connection that there is."""
        with self._lock:
            self._address = None

    def borrow(self, address: tuple[str, int], timeout: float) -> Any:
        """A connection of the caller's own, from any thread. Raises RuntimeError or OSError."""
        with self._lock:
            spare, self._spare = self._spare, []
        return next((client for at, client in spare if at == address), None) or _client(address, timeout)

    def give_back(self, address: tuple[str, int], client: Any) -> None:
        """One that was borrowed, in which nobody waits."""
        with self._lock:
            self._spare = [(address, client)]

    def set_from_another_thread(self, key: str, value: bytes) -> None:
        """Sets `key`; a store that is gone does not matter: whoever waits on it has noticed."""
        with self._lock:
            if self._cancelling is not None:
                with contextlib.suppress(RuntimeError):
                    self._cancelling.set(key, value)


def _client(address: tuple[str, int], timeout: float) -> Any:
    # First with a plain socket: torch's client prints pages about a store that is gone.
    socket.create_connection(address, timeout).close()
    host, port = address
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


Made = queue.SimpleQueue["Groups | BaseException | None"]
"""Brings groups that are connected, or why they are not; None: nobody is to wait for them any more."""

_GO = b"go"
_ON_STANDBY = b"standby"
_SUPERSEDED = b"superseded"
_HAS_STANDBY = 2**32
"""What one adds who is ready, above the 1, and has connections that will do: where all have, all take them."""


# -- the groups of a generation -----------------------------------------------------------------


class Standby:
    """Connections between all workers of a generation, which it does not use itself: for the next one. `drop` may be
    called from any thread."""

    def __init__(
        self,
        stores: StoreClient,
        address_of_store: tuple[str, int],
        generation: int,
        me: Worker,
        members: Sequence[Worker],
        timeouts: Timeouts,
        address: str,
        ranks: Ranks,
        *,
        with_stage: bool,
        first: Callable[[], None],
    ) -> None:
        """Begins to connect, in a thread of its own; where a peer does not come, nothing follows but that there are no
        such connections. ranks: of this worker, which connect to each other, too. with_stage: for the sums of the
        stage, too. first: called in that thread."""
        self.generation, self._me, self.members = generation, me, tuple(members)
        self._lock = threading.Lock()
        self._dropped = False
        self._begun: list[GlooGroup] = []
        self._groups: list[GlooGroup] | None = None
        """Connected: of all members, and where asked for, of those of the stage."""
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
                store, device = stores.borrow(address_of_store, timeouts.form), GlooDevice(address)
                for name, workers in parts:
                    group = GlooGroup(store, plane + name, workers.index(me), workers, timeouts, address, device)
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
            ):  # somebody is gone, or stands still: the next generation will connect by itself
                self._dropped = True
            with self._lock:
                if not self._dropped:
                    self._groups = begun
                    return
            _close(begun)

        threading.Thread(target=connect, name=f"connect-standby-{generation}", daemon=True).start()

    @property
    def connected(self) -> bool:
        return self._groups is not None

    def serves(self, me: Worker, living: Sequence[Worker]) -> bool:
        """Are there connections of `me`, at the same place, with all of them? Where nobody is gone, it may be a
        connection that is broken, and all are to be made anew."""
        return self.connected and me == self._me and set(living) < set(self.members)

    def take(self) -> tuple[GlooGroup, GlooGroup | None]:
        """Of a connected one, the group of all members and that of the stage; they are the caller's from here on."""
        with self._lock:
            groups, self._groups, self._begun = self._groups, None, []
        assert groups is not None
        world, *stage = groups
        return world, stage[0] if stage else None

    def drop(self) -> None:
        with self._lock:
            self._dropped = True
            # Also those of one that still waits for a sibling, which it may do for as long as a group's time-out.
            groups, self._groups, self._begun = self._begun, None, []
        if groups:
            threading.Thread(target=_close, args=(groups,), name="close-standby", daemon=True).start()


def _close(groups: list[GlooGroup]) -> None:
    """Of a list that nobody else keeps."""
    for group in groups:
        group.cancel()  # see Groups.close
        group.close()
    groups.clear()


def _peers(me: Worker, workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """The workers of the stage, itself among them."""
    return tuple(w for w in workers if w.stage == me.stage)


def _plane(generation: int, ranks: Ranks) -> str:
    """Before the names of the groups that ranks of one number form."""
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
        address: str = LOOPBACK,
        transport: Transport = "tagged",
        device: torch.device = CPU,
        neighbours: Collection[Worker] = (),
        begun: Begun | None = None,
        ranks: Ranks | None = None,
        standby: Standby | None = None,
    ) -> None:
        """Blocks until all of `living` are there. device: where data and sums are. neighbours: with whom this worker
        exchanges data (Script.neighbours). begun: gets all of it before anything is waited for in it. ranks: of this
        worker; each rank is in groups with those of the same number in other workers. standby: connections that all of
        `living` have; they are taken, and nobody is waited for on their account. Raises TransferError."""
        self.generation = generation
        self._ordered, self._living = transport == "ordered", tuple(living)
        self.ranks = ranks or Ranks()
        self.address = address
        """Of this host, as its peers reach it."""
        self.peers = stage = _peers(me, living)
        """The living workers of this one's stage, by their rank in `peer_group`."""
        members = self._living if standby is None else standby.members
        self._rank = {w: i for i, w in enumerate(members)}
        """In the control plane."""
        plane = _plane(generation, self.ranks)
        on_cpu = device.type == "cpu"
        begun = begun or Begun()

        def gloo(name: str, members: Sequence[Worker], store: Any = store) -> GlooGroup:
            return GlooGroup(store, plane + name, members.index(me), members, timeouts, address, at)

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
                at = GlooDevice(address)
                self._control = gloo("world", living)
            else:
                self._control, whole = standby.take()
                at = self._control.device
            begun.add(self._control)
            if whole is not None:
                begun.add(whole)
            name, peers = f"stage{me.stage}", None
            if len(stage) > 1:
                if whole is not None and stage == _peers(me, members):
                    peers, whole = over_gloo(whole), None
                elif standby is not None and not self._ordered:
                    peers = over_gloo(late(name, stage))  # nobody needs it before the end of the iteration
                    begun.add(peers)
                else:
                    peers = data(name, stage)
            self._unused = whole
            """Of a stage that has lost a worker."""
            if self._ordered:
                rank = {w: i for i, w in enumerate(living)}
                forward, backward = data("forward", living), data("backward", living)
            else:
                rank, forward = self._rank, over_gloo(self._control)
                backward = forward
            self.lines = Lines(me, forward, backward, peers, rank)
            """For data."""
            if self._ordered:
                connect(self.lines, neighbours, device)
        except RuntimeError as error:
            begun.end()
            peer = error.peer if isinstance(error, TransferError) else None
            text = f"the groups of generation {generation} could not be formed: {first_line(error)}"
            raise TransferError(text, peer) from None

    def transfers(self, layout: TransferLayout) -> Transfers:
        """For the generation's iterations; once."""
        return (OrderedTransfers if self._ordered else TaggedTransfers)(self.lines, layout)

    def send(self, to: Worker, tensor: Tensor, tag: int) -> PendingTransfer:
        """Starts a send of the control plane; the receiver may ask for it in any order."""
        return self._control.send(self._rank[to], tensor, tag)

    def receive(self, source: Worker, buffer: Tensor, tag: int) -> PendingTransfer:
        """Starts a receive of the control plane into `buffer`."""
        return self._control.receive(self._rank[source], buffer, tag)

    @property
    def peer_group(self) -> Group | None:
        """That of the stage, for data; None where this worker is alone in it."""
        return self.lines.peers

    def reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` (integer) over the living peers of the stage, in place."""
        if self.lines.peers is not None:
            self.lines.peers.sum(tensor)

    def gather_rows(self, values: Sequence[int]) -> dict[WorkerRank, tuple[int, ...]]:
        """Everybody's `values`, on everybody: of each rank of each worker. All must bring equally many."""
        rows = self._control.gather(torch.tensor(values, dtype=torch.int64), [self._rank[w] for w in self._living])
        planes = self.ranks.gather(rows).tolist()
        return {
            WorkerRank(w, k): tuple(row)
            for k, plane in enumerate(planes)
            for w, row in zip(self._living, plane, strict=True)
        }

    def keep_alive(self) -> None:
        """From here on also connections that nothing passes over. From any thread."""
        for group in self._all:
            if isinstance(group, GlooGroup):
                group.keep_alive()

    def cancel(self) -> None:
        """Makes every wait on these groups fail within milliseconds. From any thread."""
        self.ranks.cancel()
        for group in self._all:
            group.cancel()

    def leave(self) -> None:
        """Ends what is under way on a device, when nobody exchanges anything in these groups any more. Returns at
        once."""
        for group in self._all:
            group.halt()

    def close(self) -> None:
        """Ends all connections, when nobody exchanges anything in them any more. It does not wait for the device: it
        is called aside, and others have that work on what waits for them."""
        # gloo's destructor closes each that there is still, under the interpreter's lock: 10 ms for each, until gloo's
        # thread has let go of it; with 12 workers 100 ms and with 64 600 ms in which nothing else is done. This closes
        # them where the other threads run on.
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
        self._timeouts, self.address, self._transport = timeouts or Timeouts(), address, transport
        self._stores = StoreClient()
        self._lock = threading.Lock()
        self._live: Groups | None = None
        self._forming: int | None = None
        self._connecting: Made | None = None
        self._newest = 0
        self._formed: tuple[tuple[str, int], int, Worker, Sequence[Worker]] | None = None
        """The store, and what else is known of the generation that was formed last."""
        self._standby: Standby | None = None
        self._left_in_haste: list[Groups] = []
        """They are closed when there is time."""
        self.ranks = Ranks()
        """Of this worker."""

    def form(
        self,
        generation: int,
        me: Worker,
        living: Sequence[Worker],
        store: tuple[str, int],
        device: torch.device = CPU,
        *,
        at_boundary: bool = False,
        neighbours: Collection[Worker] = (),
    ) -> Groups:
        """Waits until all of `living` are ready at the store (host, port), then connects; with `neighbours` for data.

        at_boundary: others finish an iteration first, so they are waited for as long as for a peer's data. The
        groups in use live on until then: a peer may still be fetching what this worker sent last. Where all have
        connections on standby that will do, nobody connects. Raises TransferError when it fails or a newer generation
        is announced meanwhile.
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
            # Without a `wait`, which `get` asks the store for by itself.
            meeting.set_timeout(timedelta(seconds=self._timeouts.transfer if at_boundary else self._timeouts.form))
            word = meeting.get(go)
            meeting.set_timeout(timedelta(seconds=self._timeouts.form))
            if word not in (_GO, _ON_STANDBY):
                raise TransferError(f"generation {generation} is superseded")
            taken = standby if word == _ON_STANDBY else None
            self.abandon()
            begun = Begun()

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
                        self.address,
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
                standby.drop()  # what was taken is its no more
            with self._lock:
                self._forming = None
        with self._lock:
            self._live = groups
            if self._newest > generation:
                raise TransferError(f"generation {generation} is superseded by {self._newest}")
        self._formed = store, generation, me, living
        return groups

    def stand_by(self) -> None:
        """Has connections made, beside the training, for the generation after the one formed last: for it alone, and
        whoever of this one dies. Returns at once; does nothing where they are there already, or under way. All workers
        of a generation call it."""
        self._close_left()
        groups = self._live
        if self._formed is None or groups is None:
            return
        (store, generation, me, living), self._formed = self._formed, None
        # A survivor alone has nobody to connect to but its ranks.
        if len(living) > (2 if self.ranks.size == 1 else 1):
            self._standby = Standby(
                *(self._stores, store, generation, me, living, self._timeouts, self.address, self.ranks),
                with_stage=self._transport == "tagged",
                first=groups.keep_alive,
            )

    @property
    def stands_by(self) -> bool:
        """Are these connections there?"""
        return self._standby is not None and self._standby.connected

    def _connect(self, generation: int, make: Callable[[], Groups], begun: Begun) -> Groups:
        """What `make` makes, in a thread of its own: gloo waits for one absent peer after the other, each for as long
        as a generation may take to form, and NCCL for ever for one that died while it connected; nothing wakes either.
        Such a thread is left behind, which costs a retry and no survivor; what it has begun is cancelled, and it begins
        nothing more. Raises TransferError, when a newer generation is announced too, and when connecting takes longer
        than any transfer may.
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
            # It may wait at the store for long, and a connection to the store serves one caller at a time.
            self._stores.forget()
            raise TransferError(f"generation {generation} is superseded by {self._newest}")
        if isinstance(groups, BaseException):
            raise groups
        return groups

    def abandon(self) -> None:
        """Drops the groups in use. Their destructor waits for gloo's threads, so it runs aside; and where another
        generation forms already, once that trains."""
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
        """Wakes whoever waits in groups, or for groups, of a generation before `newest_generation`."""
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
    """Where nobody waits for the groups any more, they end with this thread."""
    try:
        made.put(make())
    except BaseException as error:
        made.put(error)


def _close_and_drop(left: list[Groups]) -> None:
    for groups in left:
        groups.close()
    del groups
    left.clear()


# Tags tell apart the messages of this many iterations; two may be in flight, since steps are staggered.
_TAG_ITERATIONS = 4


class TaggedTransfers(Transfers):
    """One tag per iteration, direction, micro-batch and tensor."""

    def _post(self, kind: str, key: MicroBatch) -> None:
        self._listen(kind, key)

    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        layout = self._layout
        iteration, direction = self._iteration % _TAG_ITERATIONS, "FI".index(kind)
        slots = layout.job.pipelines * layout.job.micro_batches
        slot = (2 * iteration + direction) * slots + key[0] * layout.job.micro_batches + key[1]
        return slot * layout.widest + index
