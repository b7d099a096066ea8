"""What a job may compute on, and what it is told where it may not. No GPU is needed, or used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from torch import Tensor
from typer.testing import CliRunner

from openrecycle.agent import compat
from openrecycle.agent.cli import app
from openrecycle.agent.devices import Platform, completion, kind_number, on_device
from openrecycle.agent.processes import ProcessPool
from openrecycle.agent.timeouts import Timeouts
from openrecycle.agent.transport import nccl
from openrecycle.agent.transport.group import TransferError
from openrecycle.planner.errors import InputError
from openrecycle.planner.job import Worker
from tests.agent import own_jobs
from tests.golden import golden

CPU = torch.device("cpu")
WITHOUT_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")


@pytest.mark.parametrize(
    ("device", "transport", "words"),
    [
        ("tpu", None, r"platform\.device: got 'tpu', expected cpu or cuda"),
        ("cpu", "pigeon", r"platform\.transport: got 'pigeon', expected tagged or ordered"),
        ("cuda", "tagged", r"platform\.transport: got 'tagged', expected ordered"),
    ],
)
def test_what_there_is_not(device: str, transport: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Platform(device=device, transport=transport)  # type: ignore[arg-type]


def test_what_suits_the_device() -> None:
    assert Platform().carrier == Platform(device="cpu").carrier == "tagged"
    assert Platform(transport="ordered").carrier == Platform(device="cuda").carrier == "ordered"
    Platform().check(10_000)
    assert Platform().take(7, deterministic=True) == CPU
    assert kind_number(CPU) == 0 and completion(CPU) is None


@WITHOUT_CUDA
def test_without_cuda_in_torch_one_sentence_says_so() -> None:
    done = CliRunner().invoke(app, ["launch", "--device", "cuda"])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert golden("device-got-cuda-expected-cpu") in done.stderr
    assert golden("is-built-without-cuda") in done.stderr


@pytest.mark.processes
@WITHOUT_CUDA
def test_the_trainer_names_its_argument() -> None:
    with pytest.raises(InputError, match=r"^platform\.device: got 'cuda', expected cpu, since"):
        own_jobs.trainer(platform=Platform(device="cuda")).fit(iterations=1)
    with pytest.raises(InputError, match=r"^platform\.transport: got 'tagged'"):
        own_jobs.trainer(platform=Platform(device="cuda", transport="tagged"))


@pytest.mark.parametrize(
    ("built", "with_nccl", "available", "gpus", "words"),
    [
        (True, False, True, 8, "is built without NCCL"),
        (True, True, False, 0, "a GPU and a driver that torch can use"),
        (
            True,
            True,
            True,
            5,
            "a GPU of its own for each of the 6 workers on this node, which has 5: NCCL takes no two",
        ),
        (True, True, True, 6, ""),
    ],
)
def test_what_a_node_must_have(
    built: bool, with_nccl: bool, available: bool, gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: with_nccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if not words:
        Platform(device="cuda").check(6)
        return
    with pytest.raises(InputError, match=words):
        Platform(device="cuda").check(6)


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
    """So a GPU of its own: one that is put out keeps it until it has ended."""
    pool = ProcessPool(say_slot, [])
    try:
        entries = [pool.start(Worker(n, 0), lambda _: Told(), 0.0) for n in range(3)]
        assert [e.slot for e in entries] == [0, 1, 2]
        assert [e.pipe.recv_bytes() for e in entries] == [b"0", b"1", b"2"]
        pool.fence(entries[1], "silent")
        assert pool.start(Worker(1, 0), lambda _: Told(), 0.0).slot == 3
        entries[1].process.join(10)
        pool.forget(entries[1])
        assert pool.start(Worker(3, 0), lambda _: Told(), 0.0).slot == 1
    finally:
        pool.kill_all()


# -- NCCL's waiting and cancelling, with stand-ins for what only a GPU has ------------------------


class _Work:
    """An operation that is over when `done` says so."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.is_completed = done
        self.joined = False

    def wait(self) -> None:
        self.joined = True


class _Backend:
    """ProcessGroupNCCL as the code sees it: operations go on until they are done, or aborted."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.done, self.aborted, self.tags = False, 0, set[int]()
        self.works: list[_Work] = []

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        self.tags.add(tag)
        return self.allreduce(tensors)

    recv = send

    def allreduce(self, tensors: list[Tensor]) -> _Work:
        self.works.append(_Work(lambda: self.done or self.aborted > 0))
        return self.works[-1]

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    backend: Any = type("Backend", (_Backend,), {"Options": SimpleNamespace})
    monkeypatch.setattr(compat, "dist", SimpleNamespace(ProcessGroupNCCL=backend))
    monkeypatch.setattr(nccl, "dist", SimpleNamespace(PrefixStore=lambda name, store: store))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made: Any = nccl.NcclGroup(
        None, "generation1/forward", 0, [Worker(0, 0), Worker(0, 1)], Timeouts(transfer=0.2), CPU
    )
    return made


def test_a_transfer_is_over_when_the_device_says_so(group: Any) -> None:
    pending = group.receive(1, torch.zeros(2), 0)
    group._group.done = True
    assert pending.wait() is pending.tensor
    assert group._group.works[0].joined and group._group.tags == {0}
    group.sum(torch.zeros(1))


def test_a_peer_that_says_nothing_is_given_up(group: Any) -> None:
    with pytest.raises(TransferError, match=golden("no-answer-from-a-peer")):
        group.send(1, torch.zeros(2), 0).wait()


def test_what_an_abort_ends_is_no_data(group: Any) -> None:
    """The device says that the operation is over; nobody may take what is in the tensor for an answer."""
    group._seconds = 30.0
    pending = group.receive(1, torch.zeros(2), 0)
    canceller = threading.Timer(0.05, group.cancel)
    canceller.start()
    with pytest.raises(TransferError, match="cancelled"):
        pending.wait()
    canceller.join()
    for start in (lambda: group.send(1, torch.zeros(1), 0), lambda: group.sum(torch.zeros(1))):
        with pytest.raises(TransferError, match="cancelled"):
            start()
    assert not group._group.works[0].joined and len(group._group.works) == 1
    group.halt()
    group.halt()
    assert group._group.aborted == 1, "an aborted communicator must not be aborted again"


def test_what_breaks_says_with_whom(group: Any) -> None:
    with pytest.raises(TransferError) as waiting:
        group.send(1, torch.zeros(2), 0).wait()
    assert waiting.value.peer == Worker(0, 1)
