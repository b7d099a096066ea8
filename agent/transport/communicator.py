"""The groups of a generation: re-forming them after a death, and waking whoever waits in them.

The control plane (agreement, validations, state) is one gloo group over all living workers, whatever the
device. The data plane (see agent.transport) has what its kind of transport needs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from openrecycle.agent.config.devices import Transport
from openrecycle.agent.config.timeouts import Timeouts
from openrecycle.agent.models.stage_io import CPU
from openrecycle.agent.transport.group import GlooGroup, Group, PendingTransfer, TransferError, first_line, halt_all
from openrecycle.agent.transport.host import HostGroup
from openrecycle.agent.transport.nccl import NcclGroup
from openrecycle.agent.transport.ordered import OrderedTransfers, connect
from openrecycle.agent.transport.ranks import Ranks
from openrecycle.agent.transport.script import MicroBatch
from openrecycle.agent.transport.store import StoreClient
from openrecycle.agent.transport.transfers import Lines, TransferLayout, Transfers
from openrecycle.planner.jobs.job import Member, Worker

dist: Any = torch.distributed
LOOPBACK = "127.0.0.1"
Made = queue.SimpleQueue["Groups | BaseException | None"]
"""Brings groups that are connected, or why they are not; None: nobody is to wait for them any more."""

_GO = b"go"
_SUPERSEDED = b"superseded"


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
        begun: list[Group] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Blocks until all of `living` are there. device: where data and sums are. neighbours: with whom this worker
        exchanges data (Script.neighbours). begun: gets each group before anything is waited for in it. ranks: of this
        worker; each rank is in groups with those of the same number in other workers. Raises TransferError."""
        self.generation = generation
        self._rank = {w: i for i, w in enumerate(living)}
        self._me, self._ordered = me, transport == "ordered"
        self.ranks = ranks or Ranks()
        self.address = address
        """Of this host, as its peers reach it."""
        stage = [w for w in living if w.stage == me.stage]
        self.peers = tuple(stage)
        """The living workers of this one's stage, by their rank in `peer_group`."""

        plane = f"generation{generation}/" + (f"rank{self.ranks.rank}/" if self.ranks.size > 1 else "")
        on_cpu = device.type == "cpu"
        begun = [] if begun is None else begun

        def gloo(name: str, members: Sequence[Worker]) -> Group:
            return GlooGroup(store, plane + name, members.index(me), members, timeouts, address)

        def nccl(name: str, members: Sequence[Worker]) -> Group:
            return NcclGroup(store, plane + name, members.index(me), members, timeouts, device)

        def over_gloo(group: Group) -> Group:
            return group if on_cpu else HostGroup(group)

        def data(name: str, members: Sequence[Worker]) -> Group:
            over_nccl = device.type == "cuda" and self._ordered
            begun.append(nccl(name, members) if over_nccl else over_gloo(gloo(name, members)))
            return begun[-1]

        try:
            if self.ranks.size > 1:
                self.ranks.connect(dist.PrefixStore(f"generation{generation}/{me}/ranks", store), timeouts)
            self._control = gloo("world", living)
            peers = data(f"stage{me.stage}", stage) if len(stage) > 1 else None
            if self._ordered:
                forward, backward = data("forward", living), data("backward", living)
            else:
                forward = backward = over_gloo(self._control)
            self._lines = Lines(me, forward, backward, peers, self._rank)
            if self._ordered:
                connect(self._lines, neighbours, device)
        except RuntimeError as error:
            halt_all(begun)
            peer = error.peer if isinstance(error, TransferError) else None
            text = f"the groups of generation {generation} could not be formed: {first_line(error)}"
            raise TransferError(text, peer) from None

    def transfers(self, layout: TransferLayout) -> Transfers:
        """For the generation's iterations; once."""
        return (OrderedTransfers if self._ordered else TaggedTransfers)(self._lines, layout)

    def send(self, to: Worker, tensor: Tensor, tag: int) -> PendingTransfer:
        """Starts a send of the control plane; the receiver may ask for it in any order."""
        return self._control.send(self._rank[to], tensor, tag)

    def receive(self, source: Worker, buffer: Tensor, tag: int) -> PendingTransfer:
        """Starts a receive of the control plane into `buffer`."""
        return self._control.receive(self._rank[source], buffer, tag)

    @property
    def peer_group(self) -> Group | None:
        """That of the stage, for data; None where this worker is alone in it."""
        return self._lines.peers

    @property
    def ordered(self) -> bool:
        """Do messages find their receives by their order alone?"""
        return self._ordered

    def reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` (integer) over the living peers of the stage, in place."""
        if self._lines.peers is not None:
            self._lines.peers.sum(tensor)

    def gather_rows(self, values: Sequence[int]) -> dict[Member, tuple[int, ...]]:
        """Everybody's `values`, on everybody: of each rank of each worker. All must bring equally many."""
        rows = torch.zeros((len(self._rank), len(values)), dtype=torch.int64)
        rows[self._rank[self._me]] = torch.tensor(values, dtype=torch.int64)
        self._control.sum(rows)
        planes = self.ranks.gather(rows).tolist()
        return {Member(w, rank): tuple(plane[i]) for rank, plane in enumerate(planes) for w, i in self._rank.items()}

    def cancel(self) -> None:
        """Makes every wait on these groups fail within milliseconds. From any thread."""
        self.ranks.cancel()
        for group in self._all:
            group.cancel()

    def halt(self) -> None:
        """Ends the groups' life, when nobody exchanges anything in them any more."""
        # A group that was left in peace has its connections still, and gloo's destructor closes each of them under the
        # interpreter's lock: 10 ms for each, until gloo's thread has let go of it; with 12 workers 100 ms and with 64
        # 600 ms in which the next generation could not form. `cancel` closes them where the other threads run on.
        for group in self._all:
            group.cancel()
        halt_all(self._all)

    @property
    def _all(self) -> list[Group]:
        lines = self._lines
        return [g for g in dict.fromkeys((self._control, lines.peers, lines.forward, lines.backward)) if g is not None]


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
        groups in use live on until then: a peer may still be fetching what this worker sent last. Raises
        TransferError when it fails or a newer generation is announced meanwhile.
        """
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
            if meeting.add(f"generation{generation}/ready", 1) == len(living) * self.ranks.size:
                meeting.set(go, _GO)
            timeout = self._timeouts.transfer if at_boundary else self._timeouts.form
            meeting.wait([go], timedelta(seconds=timeout))
            if meeting.get(go) != _GO:
                raise TransferError(f"generation {generation} is superseded")
            self.abandon()
            begun: list[Group] = []

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
                    )
                )

            groups = self._connect(generation, make, begun)
        except (RuntimeError, OSError) as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"generation {generation} did not come together: {first_line(error)}") from None
        finally:
            with self._lock:
                self._forming = None
        with self._lock:
            if self._newest > generation:
                raise TransferError(f"generation {generation} is superseded by {self._newest}")
            self._live = groups
        return groups

    def _connect(self, generation: int, make: Callable[[], Groups], begun: list[Group]) -> Groups:
        """What `make` makes, in a thread of its own: gloo waits for one absent peer after the other, each for as long
        as a generation may take to form, and NCCL for ever for one that died while it connected; nothing wakes either.
        Such
        a thread is left behind, which costs a retry and no survivor; what it has begun is cancelled. Raises
        TransferError, when a newer generation is announced too, and when connecting takes longer than any transfer may.
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
            for group in list(begun):
                group.cancel()
        if groups is None:
            # It may wait at the store for long, and a connection to the store serves one caller at a time.
            self._stores.forget()
            raise TransferError(f"generation {generation} is superseded by {self._newest}")
        if isinstance(groups, BaseException):
            raise groups
        return groups

    def abandon(self) -> None:
        """Drops the groups in use. Their destructor waits for gloo's threads, so it runs aside."""
        with self._lock:
            groups, self._live = self._live, None
        if groups is not None:
            threading.Thread(target=_bury, args=([groups],), name="bury-groups", daemon=True).start()

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


def _bury(coffin: list[Groups]) -> None:
    coffin[0].halt()
    coffin.clear()


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
