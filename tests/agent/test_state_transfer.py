"""A stage's state from a peer, beside the training: whole and bit by bit, or refused with a sentence."""

from __future__ import annotations

import ctypes
import queue
import random
import resource
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from openrecycle.agent.models.state import memory, read_tensors, write_tensors
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import CLEAN, SKIP, Slot, ValidationResult
from openrecycle.agent.workers import state_transfer
from openrecycle.agent.workers.state_transfer import (
    StateReceiver,
    StateServer,
    StateTransferError,
    StateTransferFailed,
    columns,
    send_no_offer,
)
from openrecycle.planner.jobs.job import Worker
from tests.conftest import examples
from tests.golden import golden

A, B, C, D = (Worker(p, 0) for p in range(4))
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
}


class _Whole(torch.optim.SGD):
    """By its name not one of those that step each element by itself."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "PIECE_ELEMENTS", 300)


def _stage(seed: int, optimizer: Any = OPTIMIZERS["AdamW"], width: int = 48) -> StageOptimizer:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(width, 64), nn.BatchNorm1d(64), nn.Linear(64, 48))
    buffers = [b for b in module.buffers() if b.is_floating_point()]
    gradients = GradientSum(module.parameters(), terms=4, buffers=buffers)
    made = optimizer(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(made, step_size=2, gamma=0.5)
    return StageOptimizer(module, made, gradients, scheduler, clips=True)


def _step(stage: StageOptimizer, iteration: int, validation: ValidationResult | None = CLEAN) -> None:
    """On gradients that depend on the iteration alone, as peers of a stage have them."""
    generator = torch.Generator().manual_seed(iteration)
    for tensor in stage.gradients.parameters:
        stage.gradients.add(tensor, torch.randn(tensor.shape, generator=generator))
    for tensor in stage.gradients.moving:
        stage.gradients.add_change(tensor, torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    stage.step(validation, Slot((1.0,), 0))


def _everything(stage: StageOptimizer) -> tuple[Any, dict[str, Tensor]]:
    state = stage.state()
    return state.document, dict(state.tensors)


def _equal(one: StageOptimizer, other: StageOptimizer) -> bool:
    (document, tensors), (expected, values) = _everything(one), _everything(other)
    return document == expected and all(torch.equal(tensors[n], values[n]) for n in values)


class _Wire:
    """The groups of a newcomer and its peers, as far as the description needs them. sender: who sends now."""

    def __init__(self) -> None:
        self._sent: dict[Worker, queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self.sender = A

    def send(self, to: Worker, tensor: Tensor, tag: int) -> Any:
        self._sent[self.sender].put(tensor.clone())
        return SimpleNamespace(wait=lambda: tensor)

    def receive(self, source: Worker, buffer: Tensor, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: buffer.copy_(self._sent[source].get(timeout=10)))


def _describe(
    source: StageOptimizer, target: StageOptimizer, at_once: int = 0, rate: float | None = None
) -> tuple[StateServer, StateReceiver, Any]:
    wire: Any = _Wire()
    server, receiver = StateServer(source, "127.0.0.1", rate), StateReceiver(target, lambda text: None)
    server.send_description(wire, B, at_once)
    return server, receiver, receiver.receive_description(wire, [A])


@contextmanager
def _held_by(
    sources: dict[Worker, StageOptimizer], receiver: StateReceiver, **rates: float
) -> Iterator[dict[Worker, StateServer]]:
    """All of them offer their state, the first describes it, and the receiver begins to ask. rates: of a worker."""
    wire: Any = _Wire()
    servers = {w: StateServer(held, "127.0.0.1", rates.get(str(w))) for w, held in sources.items()}
    try:
        for number, (wire.sender, server) in enumerate(servers.items()):
            if number:
                server.send_offer(wire, Worker(9, 0))
            else:
                server.send_description(wire, Worker(9, 0), 0)
        receiver.begin(*receiver.receive_description(wire, list(sources)))
        yield servers
    finally:
        receiver.stop()
        for server in servers.values():
            server.close()


def _watched(servers: dict[Worker, StateServer], monkeypatch: pytest.MonkeyPatch) -> Counter[Worker]:
    """Counts the pieces that each has given."""
    given: Counter[Worker] = Counter()

    def watch(worker: Worker, server: StateServer) -> None:
        piece = server.piece

        def counted(number: int) -> tuple[bytes, list[Tensor]]:
            given[worker] += 1
            return piece(number)

        monkeypatch.setattr(server, "piece", counted)

    for worker, server in servers.items():
        watch(worker, server)
    return given


def test_a_small_state_comes_at_once() -> None:
    source, target = _stage(0), _stage(1)
    _step(source, 0)
    server, receiver, _ = _describe(source, target, at_once=1 << 20)
    with closing(server):
        assert receiver.complete and _equal(target, source) and target.committed == 1


def test_nothing_that_is_large_is_written_until_nobody_waits_for_it() -> None:
    """While the description is taken, all others do. 16 MiB of parameters, 32 MiB of Adam's."""
    source, target = _stage(0, width=1 << 16), _stage(1, width=1 << 16)
    _step(source, 0)
    parameters = _resident(target)
    server, receiver, _ = _describe(source, target)
    with closing(server):
        assert receiver.missing and not receiver.complete
        assert _resident(target) - parameters < 1 << 20
        shapes = [[(n, t.shape) for n, t in stage.state().tensors.items()] for stage in (source, target)]
        assert shapes[0] == shapes[1]
        answers = [False] * 5 + [True]
        receiver.write_once(lambda: answers.pop(0))
        assert not answers, "it has asked before each piece"
        receiver.write_once(lambda: bool(answers.append(False)))
        assert _resident(target) - parameters > 31 << 20
        assert len(answers) == receiver.missing - 5, "where it was"


def test_memory_of_a_device_is_not_written_to_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all there once it is taken, and the host would give the device ops of which nothing comes."""
    source, target = _stage(0, width=1 << 14), _stage(1, width=1 << 14)
    _step(source, 0)
    server, receiver, _ = _describe(source, target)
    monkeypatch.setattr(type(target.gradients), "device", torch.device("cuda"))
    with closing(server):
        receiver.write_once(lambda: pytest.fail("there is nothing to do"))


def _resident(stage: StageOptimizer) -> int:
    """For how many bytes of its state, of large tensors, the system has provided memory. Its own pages are asked: what
    the whole process has changes with what other tests leave behind."""
    page, libc = resource.getpagesize(), ctypes.CDLL(None, use_errno=True)
    total = 0
    for tensor in stage.state().tensors.values():
        start = -(-tensor.data_ptr() // page) * page
        pages = (tensor.data_ptr() + tensor.nbytes - start) // page
        if pages > 0:
            present = (ctypes.c_ubyte * pages)()
            if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), present):
                raise OSError(ctypes.get_errno(), "mincore")
            total += page * sum(flag & 1 for flag in present)
    return total


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3])
def test_beside_the_training_it_ends_with_the_same_bits(optimizer: str, before: int) -> None:
    """before: steps of the source until it is asked; after none, the optimizer keeps nothing yet."""
    source, target = _stage(0, OPTIMIZERS[optimizer]), _stage(1, OPTIMIZERS[optimizer])
    for i in range(before):
        _step(source, i)
    server, receiver, described = _describe(source, target, rate=4e5)
    with closing(server):
        assert receiver.missing > 10 and not receiver.blocking
        receiver.begin(*described)
        for i in range(before, before + 2000):
            # A step first: a machine that stands still for a second may have the rest of it after one wait.
            for stage in (target, source) if i % 2 else (source, target):
                _step(stage, i)
            receiver.wait(0.03)
            if i == before:  # some of it has come
                receiver.write_once(lambda: False)
            if receiver.complete:
                break
        assert receiver.complete, "it never got there"
        assert _equal(target, source), f"after {i} steps"
    _step(source, i + 1)
    _step(target, i + 1)
    assert _equal(target, source)


def test_all_that_hold_it_give_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the training, in which each of them is a step ahead or behind now and then."""
    order = random.Random(0)
    sources, target = {w: _stage(0) for w in (A, B, C)}, _stage(1)
    for held in sources.values():
        _step(held, 0)
    receiver = StateReceiver(target, lambda text: None)
    with _held_by(sources, receiver, **dict.fromkeys(map(str, sources), 2e5)) as servers:
        given = _watched(servers, monkeypatch)
        for i in range(1, 2000):
            stages = [*sources.values(), target]
            order.shuffle(stages)
            for stage in stages:
                _step(stage, i)
                receiver.wait(order.choice([0, 0.02]))
            if receiver.complete:
                break
        assert receiver.complete and _equal(target, sources[A]), f"after {i} steps"
    assert i > 1 and set(given) == set(sources)


@pytest.mark.parametrize("dies", [A, B], ids=["the first", "another"])
def test_a_holder_that_dies_costs_its_pieces_asked_again(dies: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, target, said = {w: _stage(0) for w in (A, B, C)}, _stage(1), list[str]()
    for held in sources.values():
        _step(held, 0)
    receiver = StateReceiver(target, said.append)
    with _held_by(sources, receiver, **dict.fromkeys(map(str, sources), 1e5)) as servers:
        given, whole = _watched(servers, monkeypatch), receiver.missing
        while not given[dies] or receiver.missing > whole - 3:
            receiver.wait(0.01)
        servers[dies].close()
        before = given[dies]
        receiver.wait(20)
        assert receiver.complete and _equal(target, sources[A])
    assert given[dies] <= before + 1, "one may have been under way"
    assert any(str(dies) in text for text in said)


@pytest.mark.parametrize("slow", [A, B], ids=["the first", "another"])
def test_a_holder_that_is_slow_keeps_nobody_waiting(slow: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked of it is asked of another; it would take minutes for these."""
    monkeypatch.setattr(state_transfer, "ASK_ANOTHER_SECONDS", 0.1)
    sources, target = {w: _stage(0) for w in (A, B)}, _stage(1)
    receiver = StateReceiver(target, lambda text: None)
    with _held_by(sources, receiver, **{str(slow): 100.0}):
        receiver.wait(20)
        assert receiver.complete and _equal(target, sources[A])
        # What comes late from it finds its place taken, and the next step as well.
        for i in range(3):
            for stage in (target, *sources.values()):
                _step(stage, i)
            receiver.wait(0.05)
        assert receiver.complete and _equal(target, sources[A])


@pytest.mark.parametrize("why", ["numbers", "offers none"])
def test_a_holder_that_can_give_nothing_is_not_asked(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lays its tensors out in another way, so its numbers are of other pieces; or it can't listen."""
    sources, target = {w: _stage(0) for w in (A, B)}, _stage(1)
    receiver, wire = StateReceiver(target, lambda text: None), _Wire()
    first = StateServer(sources[A], "127.0.0.1", None)
    monkeypatch.setattr(state_transfer, "PIECE_ELEMENTS", 500)
    other = StateServer(sources[B], "127.0.0.1", None)
    monkeypatch.setattr(state_transfer, "PIECE_ELEMENTS", 300)
    groups: Any = wire
    with closing(first), closing(other):
        first.send_description(groups, D, 0)
        wire.sender = B
        if why == "numbers":
            other.send_offer(groups, D)
        else:
            send_no_offer(groups, D)
        description, holders = receiver.receive_description(groups, [A, B])
        assert [h.worker for h in holders] == [A]
        receiver.begin(description, holders)
        receiver.wait(10)
        assert receiver.complete and _equal(target, sources[A])


VALIDATIONS = st.sampled_from([CLEAN, CLEAN, CLEAN, SKIP, ValidationResult(0.5)])


@examples(8)
@given(validations=st.lists(VALIDATIONS, min_size=3, max_size=20), seed=st.integers(0, 2**32))
def test_steps_that_are_put_right_take_back_what_came_since(validations: list[ValidationResult], seed: int) -> None:
    """Any of them may hear of a validation first, and pieces arrive at any moment, from any holder."""
    order = random.Random(seed)
    source, another, target = _stage(0), _stage(0), _stage(1)
    for stage in (source, another):
        _step(stage, 0)
    receiver = StateReceiver(target, lambda text: None)
    with _held_by({A: source, B: another}, receiver, W0_0=1e6, W1_0=1e6):
        i = 1
        for validation in [*validations, *[CLEAN] * 200]:
            stages = [source, another, target]
            order.shuffle(stages)
            for stage in stages:
                _step(stage, i, None)
                receiver.wait(order.choice([0, 0.03]))
            order.shuffle(stages)
            for stage in stages:
                stage.settle(validation)
                receiver.wait(order.choice([0, 0.03]))
            i += 1
            if receiver.complete and i > len(validations):
                break
        assert receiver.complete and _equal(target, source)


def test_a_break_costs_nothing_of_what_has_come() -> None:
    """Of the connection, and of the generation: another peer goes on with the rest."""
    source, target = _stage(0), _stage(1)
    _step(source, 0)
    server, receiver, described = _describe(source, target, rate=1e5)
    whole = receiver.missing
    receiver.begin(*described)
    while receiver.missing > whole - 3:
        receiver.wait(0.01)
    server.close()
    receiver.stop()
    kept = receiver.missing
    assert 0 < kept <= whole - 3
    for stage in (source, target):
        _step(stage, 1)
    receiver.agreed()
    wire: Any = _Wire()
    with closing(StateServer(source, "127.0.0.1", None)) as other:
        other.send_description(wire, B, 0)
        receiver.begin(*receiver.receive_description(wire, [A]))
        assert receiver.missing <= kept
        receiver.wait(10)
    assert receiver.complete and _equal(target, source)


@pytest.mark.parametrize("corrected", [False, True])
def test_an_agreement_takes_back_what_came_later(corrected: bool) -> None:
    source, target = _stage(0), _stage(1)
    _step(source, 0)
    server, receiver, described = _describe(source, target)
    for stage in (source, target):
        _step(stage, 1, None if corrected else CLEAN)
    receiver.begin(*described)  # all pieces are of two steps
    receiver.wait(10)
    server.close()
    receiver.stop()
    assert receiver.complete
    for stage in (source, target):
        if corrected:
            stage.settle(ValidationResult(0.5))
        else:
            stage.roll_back()
    receiver.agreed()
    assert receiver.missing > 10


CLIPPED = ValidationResult(0.5)


@pytest.mark.parametrize("of_source, of_target", [(None, CLIPPED), (CLIPPED, None), (None, SKIP), (None, CLEAN)])
def test_a_step_in_doubt_is_not_taken_for_one_by_its_validation(
    of_source: ValidationResult | None, of_target: ValidationResult | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have waited for it, and where it did not come with somebody's death, stepped as if it were clean. A hand-over
    goes on for as long as the news takes."""
    source, target = _stage(0), _stage(1)
    _step(source, 0)
    server, receiver, described = _describe(source, target)
    given = _watched({A: server}, monkeypatch)
    with closing(server):
        _step(source, 1, of_source)
        _step(target, 1, of_target)
        receiver.begin(*described)
        while given[A] < 10:
            receiver.wait(0.01)
        receiver.stop()
    validation = of_source or of_target
    assert validation is not None
    for stage in (source, target):
        if not stage.settled:
            stage.settle(validation)
    receiver.agreed()
    for stage in (source, target):
        _step(stage, 2)
    wire: Any = _Wire()
    with closing(StateServer(source, "127.0.0.1", None)) as again:
        again.send_description(wire, B, 0)
        receiver.begin(*receiver.receive_description(wire, [A]))
        receiver.wait(10)
    assert receiver.complete and _equal(target, source)


def test_what_comes_after_a_roll_back_is_put_into_the_tensors_that_it_has_left() -> None:
    """Some pieces come, all step and roll that back, and the rest comes, of the same step as the first."""
    source, target = _stage(0), _stage(1)
    _step(source, 0)
    server, receiver, described = _describe(source, target, rate=1e5)
    whole = receiver.missing
    receiver.begin(*described)
    while receiver.missing > whole - 3:
        receiver.wait(0.01)
    server.close()
    receiver.stop()
    assert receiver.missing, "some are still to come"
    for stage in (source, target):
        _step(stage, 1)
        stage.roll_back()
    receiver.agreed()
    wire: Any = _Wire()
    with closing(StateServer(source, "127.0.0.1", None)) as other:
        other.send_description(wire, B, 0)
        receiver.begin(*receiver.receive_description(wire, [A]))
        receiver.wait(10)
    assert receiver.complete and _equal(target, source)


def _whole(parameters: Any) -> torch.optim.Optimizer:
    return _Whole(parameters, lr=0.1, momentum=0.9)


def _normed(parameters: Any) -> torch.optim.Optimizer:
    """By its hook, each step mixes the elements of a row."""
    parameters = list(parameters)
    made = torch.optim.AdamW(parameters, lr=0.1)

    @torch.no_grad()
    def norm(*_: Any) -> None:
        for parameter in parameters:
            parameter.div_(parameter.norm(dim=-1, keepdim=True))

    made.register_step_post_hook(norm)
    return made


@pytest.mark.parametrize("make", [_whole, _normed])
def test_all_wait_for_a_state_whose_optimizer_mixes_elements(make: Any) -> None:
    source, target = _stage(0, make), _stage(1, make)
    _step(source, 0)
    server, receiver, described = _describe(source, target)
    with closing(server):
        assert receiver.blocking
        receiver.begin(*described)
        receiver.wait(10)
        assert receiver.complete and not receiver.blocking and _equal(target, source)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float4_e2m1fn_x2", "uint16", "uint32", "uint64"])
def test_frozen_weights_and_tables_of_any_type_come(dtype: str, tmp_path: Path) -> None:
    """In the description, piece by piece, and in a file."""

    def stage() -> StageOptimizer:
        module, kind = nn.Linear(8, 8), getattr(torch, dtype)
        for name, elements in (("small", 5), ("large", 2 * state_transfer.SMALL_ELEMENTS)):
            numbers = torch.randint(1, 100, (elements * kind.itemsize,), dtype=torch.uint8)
            module.register_buffer(name, numbers.view(kind))
        return StageOptimizer(module, OPTIMIZERS["SGD"](module.parameters()), GradientSum(module.parameters(), terms=1))

    def held(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        return {name: memory(tensor).tobytes() for name, tensor in tensors.items()}

    source, target = stage(), stage()
    server, receiver, described = _describe(source, target)
    with closing(server):
        assert receiver.missing
        receiver.begin(*described)
        receiver.wait(10)
    state = source.state().tensors
    assert receiver.complete and held(target.state().tensors) == held(state)
    write_tensors(tmp_path / "state", state)
    assert held(read_tensors(tmp_path / "state")[0]) == held(state)


def test_all_who_got_an_offer_are_served_at_once() -> None:
    """As when the layers of a stage with one worker left move to workers of many pipelines. Each keeps its connection:
    a step that is put right may take back what it has."""
    source, wire, receivers = _stage(0), _Wire(), list[StateReceiver]()
    with closing(StateServer(source, "127.0.0.1", None)) as server:
        for _ in range(state_transfer.MAX_CONNECTIONS + 2):
            receivers.append(receiver := StateReceiver(_stage(1), lambda text: None))
            server.send_description(wire, B, 0)  # type: ignore[arg-type]
            receiver.begin(*receiver.receive_description(wire, [A]))  # type: ignore[arg-type]
        for receiver in receivers:
            receiver.wait(10)
        assert [receiver.missing for receiver in receivers] == [0] * len(receivers)
        for receiver in receivers:
            receiver.stop()


# -- what must not pass ----------------------------------------------------------------------------


def test_a_damaged_piece_is_not_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for again, and people are told."""
    source, target = _stage(0), _stage(1)
    _step(source, 0)
    said: list[str] = []
    wire: Any = _Wire()
    server, receiver = StateServer(source, "127.0.0.1", None), StateReceiver(target, said.append)
    piece, damaged = server.piece, []

    def once_damaged(number: int) -> tuple[bytes, list[Tensor]]:
        header, parts = piece(number)
        if number == 2 and not damaged:
            damaged.append(number)
            parts[0].view(-1).view(torch.uint8)[0] ^= 1
        return header, parts

    monkeypatch.setattr(server, "piece", once_damaged)
    with closing(server):
        server.send_description(wire, B, 0)
        receiver.begin(*receiver.receive_description(wire, [A]))
        receiver.wait(10)
        assert receiver.complete and _equal(target, source)
    assert damaged and any("checksum" in text and "W0_0" in text for text in said)


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    target = _stage(1, width=16)
    before = target.parameters_sha256()
    receiver = StateReceiver(target, lambda text: None)
    wire: Any = _Wire()
    with closing(StateServer(_stage(0), "127.0.0.1", None)) as server:
        for attempt in range(state_transfer.STATE_ATTEMPTS):
            server.send_description(wire, B, 1 << 20)
            last = attempt == state_transfer.STATE_ATTEMPTS - 1
            with pytest.raises(
                StateTransferFailed if last else StateTransferError, match=golden("the-state-from-w0-0")
            ):
                receiver.receive_description(wire, [A])
    assert target.parameters_sha256() == before and not receiver.begun


@pytest.fixture
def server() -> Iterator[StateServer]:
    with closing(StateServer(_stage(0), "127.0.0.1", None)) as made:
        yield made


@pytest.mark.parametrize("opening", [b"", b"x" * 32, b"\x00" * 4096], ids=["nothing", "another", "much"])
def test_nothing_is_given_without_the_secret(server: StateServer, opening: bytes) -> None:
    with socket.create_connection(server.address, 5) as stranger:
        with suppress(OSError):  # it may have been turned away by then
            stranger.sendall(opening)
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        assert _end_of(stranger) == b""


def test_strangers_do_not_use_up_threads(server: StateServer) -> None:
    before = threading.active_count()
    strangers = [socket.create_connection(server.address, 5) for _ in range(3 * state_transfer.MAX_CONNECTIONS)]
    try:
        strangers[-1].settimeout(5)
        assert _end_of(strangers[-1]) == b""
        assert threading.active_count() - before <= state_transfer.MAX_CONNECTIONS
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_server_that_can_open_no_file_for_a_moment_goes_on(server: StateServer) -> None:
    """Whoever has connected meanwhile waits without a time-out."""
    most, limits = resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as first, socket.socket() as waits:
        # Below these three nothing becomes free, whatever other tests have left to be closed.
        resource.setrlimit(most, (3, limits[1]))
        try:
            first.connect(server.address)  # for which the system may have kept a number
            waits.connect(server.address)
            waits.sendall(b"x" * 32)
            waits.settimeout(0.2)
            with pytest.raises(TimeoutError):
                waits.recv(1)
        finally:
            resource.setrlimit(most, limits)
        waits.settimeout(5)
        assert _end_of(waits) == b""


def _end_of(connection: socket.socket) -> bytes:
    """What comes before the other end closes."""
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def test_a_buffer_that_a_forward_changes_is_not_read_beside_it() -> None:
    """It comes with the description, between two iterations, however large it is."""
    module = nn.Sequential(nn.BatchNorm1d(2048), nn.Linear(2048, 2))
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    gradients = GradientSum(module.parameters(), terms=1, buffers=buffers)
    optimizer = StageOptimizer(module, torch.optim.SGD(module.parameters()), gradients)
    moving = set(optimizer.moving_names())
    found = {column.name for column in columns(optimizer.state(), optimizer.moving_names())}
    assert moving and found and not found & moving
    assert {column.name for column in columns(optimizer.state(), ())} >= moving
