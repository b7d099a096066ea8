"""What a job may compute on, and what it is told where it may not. No GPU is needed, or used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from torch import Tensor
from typer.testing import CliRunner

from openrecycle.agent.cli import app
from openrecycle.agent.config import devices
from openrecycle.agent.config.devices import Platform, kind_number, on_device, pinned_sizes
from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.launcher.processes import ProcessPool
from openrecycle.agent.models import compat
from openrecycle.agent.transport import communicator
from openrecycle.agent.transport import group as groups
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import TransferError, halt_all
from openrecycle.agent.transport.ranks import Connections, ReplaceableGroup
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Worker
from tests.agent import own_jobs
from tests.conftest import refuses
from tests.golden import golden

CPU = torch.device("cpu")
WITHOUT_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")


@pytest.mark.parametrize(
    ("device", "transport", "words"),
    [
        ("tpu", None, r"platform\.device: got 'tpu', expected cpu or cuda"),
        ("cpu", "pigeon", r"platform\.transport: got 'pigeon',"),
    ],
)
def test_what_there_is_not(device: str, transport: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Platform(device=device, transport=transport)  # type: ignore[arg-type]


def test_what_suits_the_device() -> None:
    assert Platform().carrier == Platform(device="cpu").carrier == "tagged"
    assert Platform(transport="ordered").carrier == Platform(device="cuda").carrier == "ordered"
    assert Platform(device="cuda", transport="tagged").carrier == "tagged"
    assert not Platform().check(10_000)
    assert Platform().take(7, deterministic=True) == CPU
    assert kind_number(CPU) == 0


@WITHOUT_CUDA
def test_without_cuda_in_torch_one_sentence_says_so() -> None:
    done = CliRunner().invoke(app, ["train", "--device", "cuda"])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "--device: got 'cuda'," in done.stderr
    assert golden("is-built-without-cuda") in done.stderr


@pytest.mark.processes
@WITHOUT_CUDA
def test_the_trainer_names_its_argument() -> None:
    with pytest.raises(InputError, match=r"^platform\.device: got 'cuda', expected cpu, since"):
        own_jobs.trainer(platform=Platform(device="cuda")).fit(iterations=1)


class Node(NamedTuple):
    """What torch says of one."""

    built: bool = True
    with_nccl: bool = True
    available: bool = True
    gpus: int = 6
    nccl: tuple[int, int, int] = (2, 29, 7)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: self.built)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: self.with_nccl)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: self.available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.gpus)
        monkeypatch.setattr(devices, "nccl_version", lambda: self.nccl)


@pytest.mark.parametrize(
    ("node", "transport", "words"),
    [
        (Node(built=False), None, golden("is-built-without-cuda")),
        (Node(with_nccl=False), None, golden("is-built-without-nccl")),
        (Node(available=False, gpus=0), None, golden("a-gpu-and-a-driver")),
        (Node(available=False, gpus=0), "tagged", golden("a-gpu-and-a-driver")),
        (Node(gpus=5), None, golden("a-gpu-for-each-of")),
    ],
)
def test_what_a_node_lacks(node: Node, transport: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node.stand_in(monkeypatch)
    with pytest.raises(InputError, match=words):
        Platform(device="cuda", transport=transport).check(6)


@pytest.mark.parametrize(
    ("node", "transport", "shares"),
    [
        (Node(), None, False),
        (Node(with_nccl=False), "tagged", False),
        (Node(gpus=1), "tagged", True),
        (Node(gpus=4, nccl=(2, 30, 0)), None, True),
    ],
)
def test_workers_share_gpus_where_there_are_fewer(
    node: Node, transport: Any, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL, where it can do that, or over gloo."""
    node.stand_in(monkeypatch)
    assert bool(Platform(device="cuda", transport=transport).check(6)) == shares


@pytest.fixture
def untouched_settings() -> Iterator[None]:
    """`take` is for a process of its own."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@pytest.mark.usefixtures("untouched_settings")
def test_a_worker_takes_the_gpu_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What must be settled before CUDA starts is settled then; one that shares its GPU takes little of it."""
    Node(gpus=2, nccl=(2, 30, 7)).stand_in(monkeypatch)
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, os.environ["CUBLAS_WORKSPACE_CONFIG"]))
    )
    platform = Platform(device="cuda")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    Platform(device="cuda", transport="tagged").take(1, deterministic=False)
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1"
    chosen.clear()
    assert platform.take(1, deterministic=False) == torch.device("cuda", 1)
    assert os.environ["CUDA_LAUNCH_BLOCKING"] == "0", "each receive would wait for its message"
    assert not torch.are_deterministic_algorithms_enabled() and "NCCL_MAX_CTAS" not in os.environ
    assert platform.take(2, deterministic=True, shared=True) == torch.device("cuda", 0)
    assert torch.are_deterministic_algorithms_enabled() and "NCCL_MAX_CTAS" in os.environ
    assert chosen == [(1, ":4096:8"), (0, ":4096:8")]


def test_a_worker_whose_server_has_touched_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Node().stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with refuses("platform.device"):
        Platform(device="cuda").take(0, deterministic=False)


class _Batch(NamedTuple):
    tokens: Tensor
    name: str


def test_data_of_any_form_goes_to_the_device() -> None:
    meta = torch.device("meta")
    data = {"a": [torch.zeros(2), 3], "b": (_Batch(torch.zeros(1), "x"), None)}
    moved = on_device(data, meta)
    assert moved["a"][0].device == meta and moved["a"][1] == 3
    assert isinstance(moved["b"][0], _Batch) and moved["b"][0].tokens.device == meta
    assert moved["b"][0].name == "x" and moved["b"][1] is None


def test_memory_for_micro_batches_is_there_before_training() -> None:
    """Of all sizes that they may have: to take some from the system may be to wait for a receive."""
    batch = {"tokens": torch.zeros(3, 1 << 10, dtype=torch.int64), "masks": (torch.zeros(1 << 12), None)}
    small = pinned_sizes(None)
    assert min(small) == 8 and max(small) == 1 << 12 and small.count(8) > 2
    assert sorted(pinned_sizes(batch)) == sorted([*small, 1 << 15, 1 << 15, 1 << 14, 1 << 14])
    assert pinned_sizes(torch.zeros(1 << 13, dtype=torch.uint8))[len(small) :] == [1 << 13, 1 << 13]
    varied = pinned_sizes(batch, varies=True)[len(small) :]
    assert {size: varied.count(size) for size in varied} == {1 << 15: 2, 1 << 14: 4, 1 << 13: 4}


@dataclass(frozen=True)
class Told:
    """What a process is told here."""

    slot: int = -1


def say_slot(told: Told, pipe: Connection) -> None:
    """The process."""
    pipe.send_bytes(str(told.slot).encode())
    pipe.poll(60.0)


@pytest.mark.processes
def test_every_process_of_a_node_has_a_slot_of_its_own() -> None:
    """So a GPU of its own: one that is fenced keeps it until it has ended."""
    pool = ProcessPool(say_slot, [])
    try:
        entries = [pool.start(Worker(n, 0), lambda _: Told(), 0.0) for n in range(3)]
        assert [e.slots for e in entries] == [(0,), (1,), (2,)]
        assert [e.pipe.recv_bytes() for e in entries] == [b"0", b"1", b"2"]
        pool.fence(entries[1], "silent")
        assert pool.start(Worker(1, 0), lambda _: Told(), 0.0).slots == (3,)
        entries[1].process.join(10)
        pool.forget(entries[1])
        assert pool.start(Worker(3, 0), lambda _: Told(), 0.0).slots == (1,)
    finally:
        pool.kill_all()


@pytest.mark.chaos
@pytest.mark.processes
def test_what_workers_are_forked_from_leaves_cuda_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.untouched_cuda"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"] == ["openrecycle.agent.workers.worker", "torch._dynamo"]
    assert found["would_note"] == ["is_available"], "what is asked would not have been seen"
    assert found["asked"] == [] and not found["initialized"] and not found["bad_fork"]
    assert found["nvml"] == "1"


# -- NCCL's waiting and cancelling, with stand-ins for what only a GPU has ------------------------


class _Work:
    """An operation that is over when `done` says so."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.is_completed = done
        self.joined = False
        self.failure: BaseException | None = None

    def exception(self) -> BaseException | None:
        return self.failure

    def wait(self, timeout: object = None) -> None:
        self.joined = True


class _Backend:
    """ProcessGroupNCCL as the code sees it: operations go on until they are done, or aborted."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options, self.done, self.aborted, self.tags = options, False, 0, set[int]()
        self.works: list[_Work] = []

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        self.tags.add(tag)
        return self.allreduce(tensors)

    recv = send

    def allreduce(self, tensors: list[Tensor]) -> _Work:
        self.works.append(_Work(lambda: self.done or self.aborted > 0))
        return self.works[-1]

    def alltoall_base(self, into: Tensor, tensor: Tensor, sizes_into: list[int], sizes: list[int]) -> _Work:
        return self.allreduce([into])

    def abort(self) -> None:
        self.aborted += 1


def _joined(name: str) -> None:
    """Threads of this name have ended."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10.0)


def _options() -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(max_ctas=None))


PAIR = [Worker(0, 0), Worker(0, 1)]


def _group(name: str = "generation1/forward", seconds: float = 0.2) -> groups.NcclGroup:
    """Of the two workers of a pipeline."""
    return groups.NcclGroup(None, name, 0, PAIR, Timeouts(transfer=seconds), CPU)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[_Backend]:
    """Those of all groups that are made."""
    made: list[_Backend] = []

    class Backend(_Backend):
        Options = staticmethod(_options)

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    gloo = compat.dist.ProcessGroupGloo
    monkeypatch.setattr(compat, "dist", SimpleNamespace(ProcessGroupNCCL=Backend, ProcessGroupGloo=gloo))
    monkeypatch.setattr(groups, "dist", SimpleNamespace(PrefixStore=lambda name, store: store))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


@pytest.fixture
def group(backends: list[_Backend]) -> groups.NcclGroup:
    return _group()


@pytest.fixture
def backend(group: groups.NcclGroup, backends: list[_Backend]) -> _Backend:
    """That of `group`."""
    return backends[0]


def test_a_transfer_is_over_when_the_device_says_so(group: Any, backend: _Backend) -> None:
    pending = group.receive(1, torch.zeros(2), 0)
    backend.done = True
    assert pending.wait() is pending.tensor
    assert backend.works[0].joined and backend.tags == {0}
    group.sum(torch.zeros(1))


def test_what_failed_is_no_data(group: Any, backend: _Backend) -> None:
    """An operation whose peer's machine has gone counts as completed, with an error."""
    pending = group.receive(1, torch.zeros(2), 0)
    backend.works[0].failure = RuntimeError("remote process has exited")
    backend.done = True
    with pytest.raises(TransferError, match="remote process has exited") as failed:
        pending.wait()
    assert failed.value.peer == Worker(0, 1) and not backend.works[0].joined


def test_what_the_device_fails_in_is_no_fault_of_a_peer(group: Any, backend: _Backend) -> None:
    pending = group.receive(1, torch.zeros(2), 0)
    backend.works[0].failure = torch.AcceleratorError("CUDA error: device-side assert triggered")
    backend.done = True
    with pytest.raises(torch.AcceleratorError):
        pending.wait()


def test_all_groups_are_ended_before_one_is_waited_for(
    backends: list[_Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of one that waits for a dead peer holds up the device, and so whoever waits for another's."""
    every = [_group(str(number)) for number in range(3)]
    seen: list[int] = []

    def synchronize(device: torch.device) -> None:
        """Returns when no kernel of any group runs."""
        deadline = time.monotonic() + 10.0
        while sum(backend.aborted for backend in backends) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(sum(backend.aborted for backend in backends))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    halt_all(every)
    assert seen == [3, 3, 3]


def test_a_peer_that_says_nothing_is_given_up(group: Any) -> None:
    with pytest.raises(TransferError, match=golden("no-answer-from-a-peer")):
        group.send(1, torch.zeros(2), 0).wait()


def test_what_an_abort_ends_is_no_data(backends: list[_Backend]) -> None:
    """The device says that the operation is over; nobody may take what is in the tensor for an answer."""
    group: Any = _group(seconds=30.0)
    (backend,) = backends
    pending = group.receive(1, torch.zeros(2), 0)
    canceller = threading.Timer(0.05, group.cancel)
    canceller.start()
    with pytest.raises(TransferError, match="cancelled"):
        pending.wait()
    canceller.join()
    for start in (lambda: group.send(1, torch.zeros(1), 0), lambda: group.sum(torch.zeros(1))):
        with pytest.raises(TransferError, match="cancelled"):
            start()
    assert not backend.works[0].joined and len(backend.works) == 1
    group.halt()
    group.halt()
    _joined("abort-group")
    assert backend.aborted == 1, "an aborted communicator must not be aborted again"


def test_nothing_is_received_before_an_abort_has_given_its_memory_back(group: Any, backend: _Backend) -> None:
    """It waits for what the device was given, and a receive may wait for what is launched later: for ever, both."""
    returned = threading.Event()
    backend.abort = returned.wait
    made: list[Any] = []

    def next_generation() -> None:
        made.append(_group("generation2/forward"))

    group.cancel()
    forming = threading.Thread(target=next_generation)
    forming.start()
    forming.join(0.05)
    assert not made
    returned.set()
    forming.join(10.0)
    assert made


@pytest.mark.timeout(20)
def test_an_abort_that_hangs_is_waited_for_once(group: Any, backend: _Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer was just connecting: nothing ends that wait, and no later generation is to pay for it again."""
    monkeypatch.setattr(groups, "ABORT_SECONDS", 0.5)
    never = threading.Event()
    backend.abort = never.wait
    group.cancel()
    for _ in range(100):
        _group("x")
    never.set()


def test_what_begins_while_its_group_is_aborted_is_aborted_too(group: Any, backend: _Backend) -> None:
    """The first message makes a communicator, of which the abort did not know: its kernel would wait for ever."""

    def recv(tensors: list[Tensor], source: int, tag: int) -> _Work:
        group.cancel()
        _joined("abort-group")
        assert backend.aborted == 1
        return _Work(lambda: backend.aborted > 1)

    backend.recv = recv
    pending = group.receive(1, torch.zeros(2), 0)
    _joined("abort-group")
    assert backend.aborted == 2
    with pytest.raises(TransferError, match="cancelled"):
        pending.wait()


def _alone(begun: groups.PendingConnections) -> Groups:
    """All groups of a generation that has one worker."""
    me = Worker(0, 0)
    store: Any = torch.distributed.HashStore()
    return Groups(
        *(store, 1, me, [me], Timeouts(), None, "ordered", torch.device("cuda")),
        begun=begun,
    )


@pytest.mark.processes
def test_a_kernel_that_waits_for_a_neighbour_takes_few_multiprocessors(backends: list[_Backend]) -> None:
    """Left alone, those that wait for a few neighbours would take all, and nothing would compute what they wait for."""
    _alone(groups.PendingConnections())
    _group("sums")
    ctas = [backend.options.config.max_ctas for backend in backends]
    assert ctas == [groups.MESSAGE_CTAS, groups.MESSAGE_CTAS, None]


@pytest.mark.processes
def test_groups_that_are_given_up_wait_for_no_device(backends: list[_Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """That runs aside, while the next generation has receives on it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("waits for the device"))
    _alone(groups.PendingConnections()).close()
    _joined("abort-group")
    assert [backend.aborted for backend in backends] == [1, 1]


@pytest.mark.processes
def test_a_thread_that_is_left_behind_connects_no_more(
    backends: list[_Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has the device wait for, and the end of that, would hold up the generation that trains by then."""
    begun = groups.PendingConnections()

    class Made(groups.NcclGroup):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            begun.give_up()

    monkeypatch.setattr(communicator, "NcclGroup", Made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("waits for the device"))
    with pytest.raises(TransferError, match=golden("nobody-waits-for-these-connections")):
        _alone(begun)
    assert [backend.aborted for backend in backends] == [1]


def test_what_breaks_says_with_whom(group: Any) -> None:
    with pytest.raises(TransferError) as waiting:
        group.send(1, torch.zeros(2), 0).wait()
    assert waiting.value.peer == Worker(0, 1)


# -- the same among the ranks of a worker ----------------------------------------------------------


@pytest.fixture
def among_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group whose tensors of other devices than the CPU go over a stand-in for NCCL; with that stand-in."""
    backend = _Backend(None, 0, 2, None)
    gloo = SimpleNamespace(recv=lambda *_: _Work(lambda: True))

    def allreduce(tensors: list[Tensor], options: Any) -> _Work | None:
        """As torch has it: what is not asynchronous is in the caller's stream, with nothing to wait for."""
        work = backend.allreduce(tensors)
        return work if options is None or options.asyncOp else None

    whole = SimpleNamespace(allreduce=allreduce)
    for name, found in {"gloo_device": None, "gloo_group": gloo, "process_group": whole, "nccl_group": backend}.items():
        monkeypatch.setattr(compat, name, lambda *_, found=found, **__: found)
    monkeypatch.setattr(compat, "add_nccl", lambda group, nccl: None)
    connections = Connections(None, 0, 2, Timeouts())
    backend.done = True
    connections.add_nccl(None, CPU)
    backend.done = False
    found = ReplaceableGroup(0, 2)
    found.connections = connections
    return found, backend


THERE = torch.device("meta")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_collective_of_ranks_is_over_when_the_device_says_so(asynchronous: bool, among_ranks: Any) -> None:
    group, backend = among_ranks
    torch_: Any = torch
    options = torch_.distributed.AllreduceOptions()
    options.asyncOp = asynchronous
    work = group.allreduce([torch.zeros(2, device=THERE)], options)
    waiting = threading.Thread(target=work.wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    backend.done = True
    waiting.join()


@pytest.mark.parametrize("end", ["cancel", "halt"])
def test_what_an_abort_ends_among_ranks_is_no_data(end: str, among_ranks: Any) -> None:
    """The news of a generation does it, and who leaves an iteration before that; then nothing begins any more."""
    group, backend = among_ranks
    work = group.allreduce([torch.zeros(2, device=THERE)], None)
    ending = threading.Timer(0.05, getattr(group.connections, end))
    ending.start()
    with pytest.raises(TransferError, match="cancelled"):
        work.wait()
    ending.join()
    with pytest.raises(RuntimeError, match="cancelled"):
        group.allreduce([torch.zeros(2, device=THERE)], None)
    group.connections.halt()
    assert backend.aborted == 1 and len(backend.works) == 3, "the first two connect"


def test_ranks_that_connect_are_ended_too(among_ranks: Any) -> None:
    """A sibling may have left for a newer generation: the kernel that waits for it would hold up the device."""
    group, backend = among_ranks
    backend.works.clear()
    failed = list[BaseException]()

    def connect() -> None:
        try:
            group.connections.add_nccl(None, CPU)
        except RuntimeError as error:
            failed.append(error)

    connecting = threading.Thread(target=connect)
    connecting.start()
    while not backend.works:
        time.sleep(0.001)
    group.connections.cancel()
    connecting.join(10.0)
    assert len(failed) == 1 and backend.aborted and len(backend.works) == 1
