"""The pipe between a worker and the launcher of its node: one JSON document per message, no pickle.

The launcher sends generations, and the end of the job. The worker reports what happens to it. Each message has the
sender's monotonic time, so that the launcher can put the times of all its workers on one clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from openrecycle.agent.messages.protocol import Deployment, hexadecimal
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import encodable
from openrecycle.planner.plans.packed import schedule_from_text
from openrecycle.planner.plans.schedule import Schedule

Message = dict[str, Any]

LONGEST_TEXT = 10_000
"""At most so many characters of text in a worker's message: an exception may have a whole tensor in its text."""
_WORDS = ("text", "detail", "problem", "error")
"""The fields that hold such text."""
LONGEST_MESSAGE = 1 << 23
"""The most bytes of a worker's message. Another node passes messages on in frames that may have eight times as many
(agent.nodes.frames), and a message that becomes a line of the record is twice as long there."""


def send(pipe: Connection, kind: str, **fields: Any) -> None:
    """Sends a message. Raises OSError (BrokenPipeError) when the other end is gone."""
    pipe.send_bytes(json.dumps({"kind": kind, "at": time.monotonic_ns(), **fields}).encode())


def receive(pipe: Connection) -> Message:
    """Receives a message. Raises EOFError or OSError when the other end is gone."""
    encoded = pipe.recv_bytes()
    message: Message = json.loads(encoded)
    # The text of an exception may hold lone surrogates, which no console and no other worker could read.
    return _encodable(message) if b"\\ud" in encoded else message


_Number = Annotated[int, Field(ge=-1, le=2**53)]


_Hex = Annotated[str, AfterValidator(hexadecimal)]


class _Said(BaseModel):
    """The fields that a worker's message may have. Which of them it has depends on its kind."""

    model_config = ConfigDict(strict=True, extra="allow")

    at: Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)] = 0
    number: _Number = 0
    pause: _Number = 0
    generation: _Number = 0
    iteration: _Number = 0
    at_iteration: _Number = 0
    micro_batch: _Number = 0
    host: str = ""
    text: str = ""
    detail: str = ""
    peer: str = ""
    op: str = ""
    error: str = ""
    setting: str = ""
    sha256: str = ""
    problem: str | None = None
    loss: _Hex = ""
    norm: _Hex = ""
    values: dict[str, _Hex] = {}
    settled: bool | None = None
    whole: bool = False
    redone: bool = False
    ends: bool = False
    pids: list[_Number] = []
    skipped: list[_Number] | _Number = []
    samples: list[int | str] = []
    traceback: list[str] = []
    learning_rate: float | None = None
    op_limit: float | None = None
    data_seconds: float = 0.0
    stall_ms: float = 0.0
    coefficient: float | None = None
    current: dict[str, Any] = {}
    beat: dict[str, Any] = {}


def misformed(message: Message, iterations: int) -> str:
    """Checks a message from another node, since odd values would be kept and passed on to the next leader. Returns the
    error, in words; "": none. iterations: how many the job has."""
    try:
        _Said.model_validate(message)
        newest = max(message.get("iteration", 0), message.get("at_iteration", 0))
    except (ValueError, TypeError) as error:
        return type(error).__name__
    return f"iteration {newest} of {iterations}" if newest > iterations else ""


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    return {name: _encodable(one) for name, one in value.items()} if isinstance(value, dict) else value


M = TypeVar("M")

KEPT_PLANS = 8
"""How many plans stay in memory, the newest ones. A generation runs at most two."""


def keep_newest(plans: dict[str, M], name: str, plan: M) -> None:
    """Notes that `plan`, whose fingerprint is `name`, is in use. Of too many plans, those unused for longest go."""
    plans.pop(name, None)
    plans[name] = plan
    while len(plans) > KEPT_PLANS:
        del plans[next(iter(plans))]


def follow(
    receive: Callable[[], M | None],
    on_message: Callable[[M], object],
    on_end: Callable[[], object] = lambda: None,
    *,
    name: str,
    gone: tuple[type[Exception], ...] = (EOFError, OSError, ValueError),
) -> None:
    """Starts a thread called `name`. It gives on_message what `receive` returns, in order, until that is None or either
    of them raises; then it calls on_end. gone: the exceptions raised where the other end is gone, or sends what can't
    be understood. Any other exception is printed."""

    def run() -> None:
        try:
            while (message := receive()) is not None:
                on_message(message)
        except gone:
            pass
        except Exception:
            traceback.print_exc()
        on_end()

    threading.Thread(target=run, name=name, daemon=True).start()


class ToldPlan:
    """A plan in the form in which workers get it. It is parsed when its schedule is first asked for, by one thread."""

    def __init__(self, text: str) -> None:
        self._text, self._reading = text, threading.Lock()
        self._schedule: Schedule | None = None

    @property
    def schedule(self) -> Schedule:
        """Raises PlanError."""
        with self._reading:
            if self._schedule is None:
                self._schedule = schedule_from_text(self._text)
            return self._schedule


@dataclass(frozen=True)
class GenerationSpec:
    """One generation, as this worker is told of it.

    plan: a worker needs only its schedule.
    cell: the place in the grid that this worker has from this generation on.
    restore: as in agent.coordination.launcher.Deploy.
    store: host and port of the store through which the generation's groups are formed.
    after: if this generation only adds workers, the iteration up to which the earlier members go on first; None: they
        leave their iteration at once.
    meanwhile: the plan that is run while members still take their state from a peer; None: all wait for them.
    partition: the layers per stage that the plan is for; (): they stay as they are. Workers with other layers take
        what they lack from peers, and run `meanwhile` until then. held: the layers per stage until then.
    left_out: (iteration, micro-batch, numbered over the pipelines) of micro-batches that nobody runs.
    runs: see agent.transport.transfers.
    """

    deployment: Deployment
    plan: ToldPlan
    cell: Worker
    store: tuple[str, int]
    after: int | None = None
    restore: str | None = None
    meanwhile: ToldPlan | None = None
    left_out: frozenset[tuple[int, int]] = frozenset()
    runs: Mapping[Worker, tuple[Worker, ...]] = field(default_factory=dict)
    partition: tuple[int, ...] = ()
    held: tuple[int, ...] = ()

    @property
    def generation(self) -> int:
        return self.deployment.generation

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def interim(self) -> Schedule | None:
        return None if self.meanwhile is None else self.meanwhile.schedule


class Relay(Protocol):
    """Connects rank 0 of a worker with its other ranks; see agent.workers.worker."""

    def hand_on(self, message: bytes) -> None: ...

    def take(self, rank: int, message: Message) -> None: ...


FENCED = 3
"""The exit code of a process that was told that it does not count any more."""
ORPHANED = 4
"""The exit code of a process whose launcher, or another rank of whose worker, is gone."""
GAVE_UP = 5
"""The exit code of a process that has waited in vain for another rank of its worker."""


class WorkerChannel:
    """The worker's end of the pipe. A thread, `launcher-pipe`, reads it, and calls all the functions below. When the
    launcher dies, the worker ends.

    announced: called with the number of each new generation for which this worker must leave its iteration, and with a
    number above all generations when the job is over. fenced: called when this process no longer counts, and must end.
    measure: called with an iteration whose ops are to be recorded. relay: given in rank 0 of several, to pass messages
    on to the other ranks. last_words: called with the error by which this process ends, if it can't understand a
    message. gave_up: has this process waited in vain for another rank? Then its exit code says so, even if it ends
    because that other process has ended.
    """

    OVER = 2**53

    def __init__(
        self,
        pipe: Connection,
        announced: Callable[[int], None],
        fenced: Callable[[], None],
        measure: Callable[[int], None] = lambda _iteration: None,
        relay: Relay | None = None,
        last_words: Callable[[BaseException], None] = lambda _error: None,
    ) -> None:
        self._pipe, self._relay, self._last_words = pipe, relay, last_words
        self._announced, self._fenced, self._measure = announced, fenced, measure
        self._news = threading.Condition()
        self._orders: GenerationSpec | None = None
        self._plans: dict[str, ToldPlan] = {}
        """Plans by their fingerprints."""
        self._over = False
        self._iteration = -1
        self._hold: int | None = None
        """Not None while the job is paused: no iteration after this one is begun."""
        self.last: int | None = None
        """The number of iterations, if the job ends early."""
        self._sending = threading.Lock()
        self._taken_up = 0
        self.gave_up = False
        self._told_at: float | None = None
        """Since when a generation waits to be taken up, for which this worker must leave its iteration."""
        # Without its launcher nobody would end this process, so it ends itself.
        follow(pipe.recv_bytes, self._hear_or_end, self.orphaned, name="launcher-pipe")

    @property
    def over(self) -> bool:
        return self._over

    def say(self, kind: str, **fields: Any) -> None:
        """Sends a message to the launcher. Texts that are too long are cut. Raises ValueError if the message is still
        too long: then this process ends, and not the connection of its node."""
        message = {"kind": kind, "at": time.monotonic_ns(), **fields}
        for name in _WORDS:
            if isinstance(text := fields.get(name), str) and len(text) > LONGEST_TEXT:
                message[name] = f"{text[:LONGEST_TEXT]}… ({len(text):,} characters)"
        if self._relay is None:
            self.send(message)
        else:
            self._relay.take(0, message)

    def send(self, message: Message) -> None:
        """Sends a message to the launcher directly, without the relay."""
        encoded = json.dumps(message).encode()
        if len(encoded) > LONGEST_MESSAGE:
            said = f"what is to be said ({message['kind']}) takes {len(encoded):,} bytes"
            raise ValueError(f"{said}, at most {LONGEST_MESSAGE:,} can be said at once")
        # If the launcher is gone, the thread that reads ends this process.
        with self._sending, contextlib.suppress(OSError):
            self._pipe.send_bytes(encoded)

    def orphaned(self) -> None:
        """Ends this process, since its launcher or another rank is gone."""
        os._exit(GAVE_UP if self.gave_up else ORPHANED)

    def take_up(self, generation: int, iteration: int) -> None:
        """The training thread has left its iteration for `generation`. iteration: how many are committed."""
        with self._news:
            self._taken_up = generation
            if self._told_at is not None:
                self._told_at = None if self._newer(generation) is None else time.monotonic()
        self.say("adopted", generation=generation, iteration=iteration)

    @property
    def pending(self) -> float:
        """For how many seconds a generation has waited for the training thread to leave its iteration; 0: none
        waits."""
        told = self._told_at
        return 0.0 if told is None else time.monotonic() - told

    def wait_for_generation(self, after: int) -> GenerationSpec | None:
        """Waits for a generation above `after`, and returns the newest; None when the job is over."""
        with self._news:
            self._iteration = -1
            self._news.wait_for(lambda: self._over or self._newer(after) is not None)
            return None if self._over else self._newer(after)

    def may_begin(self, generation: int, iteration: int, paused: Callable[[], None] = lambda: None) -> bool:
        """Returns whether `iteration` is still to be run in `generation`; False if another generation waits. While the
        job is paused, it calls `paused` and then waits."""

        def go() -> bool:
            return self._over or self._newer(generation) is not None or self._hold is None or iteration <= self._hold

        with self._news:
            self._iteration = iteration
            if not go():
                paused()
                self._news.wait_for(go)
            return not self.superseded(generation)

    def superseded(self, generation: int) -> bool:
        """Must this worker leave `generation` now, in the middle of its iteration?"""
        newer = self._newer(generation)
        return self._over or (newer is not None and (newer.after is None or self._iteration > newer.after))

    def _newer(self, generation: int) -> GenerationSpec | None:
        orders = self._orders
        return orders if orders is not None and orders.generation > generation else None

    def _hear_or_end(self, encoded: bytes) -> None:
        """Handles a message. If that fails, this process ends: a worker that hears nothing more would hold up all
        others for good."""
        try:
            self._hear(encoded)
        except BaseException as error:
            self._last_words(error)
            self.say("error", text=f"{type(error).__name__}: {error}")
            os._exit(1)

    def _hear(self, encoded: bytes) -> None:
        if self._relay is not None:
            self._relay.hand_on(encoded)
        message = json.loads(encoded)
        held: int | None = None
        with self._news:
            if message["kind"] == "deployment":
                self._take(message)
            elif message["kind"] == "hold":
                held = self._iteration if message["after"] is None else None
                before = -1 if self._hold is None else self._hold
                self._hold = self._iteration if message["after"] is None else max(before, message["after"])
            elif message["kind"] == "go":
                self._hold = None
            elif message["kind"] == "last":
                self.last, self._hold = message["iterations"], None
            elif message["kind"] == "over":
                self._over = True
            elif message["kind"] == "fenced":
                self._fenced()
            elif message["kind"] == "measure":
                self._measure(message["iteration"])
            newest = self._orders.generation if self._orders else 0
            interrupts = self.superseded(newest - 1)
            if interrupts and self._told_at is None and newest > self._taken_up and not self._over:
                self._told_at = time.monotonic()
            self._news.notify_all()
        if held is not None:
            self.say("held", iteration=held, pause=message["pause"])
        if interrupts:
            self._announced(self.OVER if self._over else newest)
        if message["kind"] == "deployment":
            # Parsed only after `announced` has woken the training thread, which must first leave its group's waits.
            for name in message["plans"]:
                _ = self._plans[name].schedule

    def _take(self, message: Message) -> None:
        deployment = Deployment.model_validate(message["deployment"])
        new = {name: ToldPlan(plan) for name, plan in message["plans"].items()}
        for name in (deployment.plan_fingerprint, message["interim"]):  # in the order of WorkerProcess.lacks
            if name is not None:
                keep_newest(self._plans, name, new.get(name) or self._plans[name])
        host, port = message["store"]
        self._orders = GenerationSpec(
            deployment,
            self._plans[deployment.plan_fingerprint],
            Worker.parse(message["cell"]),
            (str(host), int(port)),
            message["after"],
            message["restore"],
            self._plans[message["interim"]] if message["interim"] is not None else None,
            frozenset((iteration, micro_batch) for iteration, micro_batch in message["left_out"]),
            {Worker.parse(worker): tuple(map(Worker.parse, parts)) for worker, parts in message["runs"]},
            tuple(message["partition"]),
            tuple(message["held"]),
        )
