"""Measures what plans are made from: for each part of a model, op times, step and bytes that stay; op times of whole
stages; transfers and reductions between real processes; and a whole profile made of these.

Bytes: one micro-batch runs through each part, with the `Stage`, sums and optimizer of the training, in this process.

Times: each stage, or part, runs through the executor of the training, in a process of its own, with neighbours that
answer at once. The time of an op is all time from its beginning to that of the next op. So it includes data loading,
seeding, and what Python does between ops. As many stages run at the same time as there will be workers on this machine,
since they share its memory and caches then, too; or as many as there are GPUs. A GPU itself records the times between
its ops.

Transfers and reductions use the same groups as training.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.config.devices import Platform, on_device, seed_for
from openrecycle.agent.config.faults import FaultInjector
from openrecycle.agent.config.options import LOOPBACK, Optimization, Timeouts
from openrecycle.agent.examples.gpt import Block, Embedding
from openrecycle.agent.launcher.processes import ProcessPool, WorkerProcess, preload
from openrecycle.agent.messages import channel
from openrecycle.agent.messages.client import Say
from openrecycle.agent.models.compat import LiveBytes
from openrecycle.agent.models.layers import (
    CPU,
    LOWER,
    StageCuts,
    StageIO,
    StageOutput,
    Tensors,
    kind_of,
    spans,
    tensors_of,
)
from openrecycle.agent.models.workload import NamedWorkload, Workload, WorkloadSource, probe_inputs, probe_targets
from openrecycle.agent.monitoring.liveness import describe_exception
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.memory import run_micro_batch
from openrecycle.agent.stages.optimizer import StageOptimizer, stage_optimizer
from openrecycle.agent.stages.shards import assign
from openrecycle.agent.stages.stage import Stage, assemble
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.ranks import Ranks
from openrecycle.agent.transport.transfers import GenerationGroups, Script, Transfers
from openrecycle.agent.workers.executor import Executor, OpError
from openrecycle.agent.workers.reduction import GradientReduction
from openrecycle.agent.workers.sharding import ShardedStage
from openrecycle.agent.workers.validation_exchange import Steps
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import MAX_LAYERS, Job, Worker
from openrecycle.planner.plans.schedule import MicroBatch, Op
from openrecycle.planner.profiles import Hardware, Measurements, Part, Reductions, Timing, shape_name

# -- measures what the planner wants to know of a model -----------------------------------------


@dataclass(frozen=True)
class ProfilingEffort:
    """How long to measure. repeats: timed rounds, after `warm_up` others."""

    repeats: int = 10
    warm_up: int = 2


def timing_of(seconds: list[float]) -> Timing:
    """Returns median and deciles in milliseconds, to the microsecond."""
    ms = sorted(1000 * s for s in seconds)
    deciles = statistics.quantiles(ms, n=10, method="inclusive") if len(ms) > 1 else [ms[0]] * 9
    return Timing(
        median=round(statistics.median(ms), 3), p10=round(deciles[0], 3), p90=round(deciles[8], 3), repeats=len(ms)
    )


def _clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock for ops that are timed one by one. On a GPU it waits for the end of what the GPU was given."""
    if device.type == "cpu":
        return time.perf_counter

    def when_done() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return when_done


def bytes_of_part(
    build: Callable[[], tuple[Stage, StageOptimizer]],
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor] | None,
    *,
    first: bool,
) -> tuple[dict[str, int], tuple[Tensor, ...]]:
    """Returns the bytes of a part, by their names in planner.profiles.Part, and the part's output (for the last part,
    its scaled loss). build: makes the stage and its optimizer. inputs: on its device."""
    weights, state = LiveBytes(), LiveBytes()
    with weights:
        stage, optimizer = build()
    gc.collect()
    weight_bytes = weights.now
    memory, outputs = run_micro_batch(stage, inputs, loss, first=first)
    with state:
        for _ in range(2):
            optimizer.step()
    found = {
        "activation_bytes": memory.forward + memory.given,  # the output, too, is held until I
        "weight_backward_bytes": memory.backward,
        "weight_bytes": weight_bytes,
        "optimizer_bytes": max(0, state.now),
        "reduced_bytes": size_of(stage.gradients.buffer),
    }
    return found, outputs


def size_of(tensors: Tensors) -> int:
    """Returns the bytes of tensors."""
    return sum(t.nbytes for t in (tensors if isinstance(tensors, tuple) else (tensors,)))


# -- how long transfers and reductions take between real processes ------------------------------

dist: Any = torch.distributed

MAX_REDUCED_BYTES = 1 << 26
"""Larger sums are measured with so many bytes; plans take them to last longer in proportion."""
_TRAFFIC_SECONDS = 300.0


class MeasuringError(RuntimeError):
    """A process that measures ended early, took too long, or could not run its task."""


@contextmanager
def _sentence(what: str) -> Iterator[None]:
    """Turns whatever a user's own code raises into a MeasuringError that begins with `what`."""
    try:
        yield
    except (PlannerError, MeasuringError):
        raise
    except Exception as error:
        raise MeasuringError(f"{what}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Returns an exception in words; of an OpError what it stands for."""
    raised = error.__cause__ if isinstance(error, OpError) else None
    return describe_exception(raised or error)


def hear(entry: WorkerProcess, kind: str, seconds: float, beside: Iterable[WorkerProcess] = ()) -> channel.Message:
    """Returns the next message of a process that measures, which must be of that kind. beside: other processes, which
    say nothing before that unless they fail. Raises MeasuringError."""
    pipes = [*(other.pipe for other in beside), entry.pipe]  # `entry` last: if it waits for another, it fails later
    ready = connection.wait(pipes, seconds)
    if not ready:
        raise MeasuringError(f"measuring did not end within {seconds:.0f} s")
    try:
        message = channel.receive(next(pipe for pipe in pipes if pipe in ready))
    except (EOFError, OSError):
        raise MeasuringError("a process that measures ended early") from None
    if message["kind"] != kind:
        raise MeasuringError(message["text"])
    return message


@dataclass(frozen=True)
class _PeerSpec:
    """What a process that measures traffic is told. sizes: bytes of the tensors to pass between peers 0 and 1. reduced:
    bytes to sum among the first 2, 3, ... peers; 0: none. optimization: given if the optimizer's state is sharded;
    None: all peers get all sums. shared: do peers share GPUs?"""

    number: int
    peers: int
    port: int
    sizes: tuple[int, ...]
    reduced: int
    repeats: int
    warm_up: int
    optimization: Optimization | None
    computes_on: Platform
    shared: bool


def measure_traffic(
    sizes: tuple[int, ...],
    reduced_bytes: int,
    peers: int,
    *,
    repeats: int,
    warm_up: int,
    optimization: Optimization | None = None,
    computes_on: Platform | None = None,
    say: Say = lambda _: None,
) -> tuple[tuple[Timing, ...], Reductions | None]:
    """Measures one-way transfers of `sizes` bytes, and reductions of `reduced_bytes` among 2 to `peers` peers. In a
    reduction all peers get the whole sum. If `optimization` shards the optimizer's state, they exchange sums and then
    parameters in the way of such a job.

    Every peer is a process of this machine, with its own GPU as long as there are enough. say: is told if peers share
    GPUs. Raises MeasuringError; InputError if they can't share them.
    """
    reduced = min(reduced_bytes, MAX_REDUCED_BYTES) if peers > 1 else 0
    processes = max(2 if sizes else 1, peers if reduced else 1)
    if processes < 2:
        return (), None
    computes_on = computes_on or Platform()
    if sharing := computes_on.check(processes):
        say(f"{sharing}; what passes between GPUs takes another time than is measured here")
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    pool = ProcessPool(_peer, ["openrecycle.agent.profiling"])
    try:
        for number in range(processes):
            sharded = optimization if optimization is not None and optimization.sharding == "zero1" else None
            spec = _PeerSpec(
                *(number, processes, store.port, sizes, reduced, repeats, warm_up, sharded),
                *(computes_on, bool(sharing)),
            )
            pool.start(Worker(number, 0), lambda _incarnation, spec=spec: spec, time.monotonic())  # type: ignore[misc]
        first, *others = pool.running.values()
        seconds = hear(first, "measured", _TRAFFIC_SECONDS, others)
    finally:
        pool.kill_all()

    transfers = tuple(timing_of([s / 2 for s in taken]) for taken in seconds["transfers"])
    reductions = Reductions(bytes=reduced, by_peers=tuple(map(timing_of, seconds["reductions"]))) if reduced else None
    return transfers, reductions


def _peer(spec: _PeerSpec, pipe: Connection) -> None:
    """Runs in a process. Peer 0 measures, and sends what it found."""
    try:
        _measure_as_peer(spec, pipe)
    except Exception as error:
        channel.send(pipe, "failed", text=f"transfers can't be measured: {type(error).__name__}: {error}")
        os._exit(_FAILED)


def _measure_as_peer(spec: _PeerSpec, pipe: Connection) -> None:
    torch.set_num_threads(1)
    device = spec.computes_on.take(spec.number, deterministic=False, shared=spec.shared)
    store = dist.TCPStore(LOOPBACK, spec.port, is_master=False, timeout=timedelta(seconds=_TRAFFIC_SECONDS))
    rounds = range(spec.warm_up + spec.repeats)
    # Over NCCL all groups stay until the process ends, since to end one means to wait for the other peers.
    stays = device.type == "cuda" and spec.computes_on.carrier == "ordered"
    kept, transfers, reductions = list[Groups](), list[list[float]](), list[list[float]]()

    def among(number: int, living: Sequence[Worker], neighbours: Sequence[Worker] = ()) -> Groups:
        groups = Groups(
            *(store, number, living[spec.number], living, Timeouts()),
            transport=spec.computes_on.carrier,
            device=device,
            neighbours=neighbours,
        )
        kept.extend([groups] if stays else [])
        return groups

    if spec.number < 2 and spec.sizes:
        neighbours = [Worker(0, 0), Worker(0, 1)]
        groups = among(1, neighbours, [neighbours[1 - spec.number]])
        transfers = [pass_on(groups.lines, spec.number, size, rounds, device) for size in spec.sizes]
    for size in range(2, spec.peers + 1) if spec.reduced else ():
        if spec.number < size:
            groups = among(size, [Worker(n, 0) for n in range(size)])
            exchange = _all_reduced(groups, spec.reduced, device)
            if spec.optimization is not None:
                exchange = _shared(groups, groups.peers[spec.number], spec.reduced, spec.optimization, device)
            reductions.append(_timed_together(groups, exchange, rounds, device))
    drop = spec.warm_up
    if spec.number == 0:
        channel.send(
            pipe, "measured", transfers=[t[drop:] for t in transfers], reductions=[t[drop:] for t in reductions]
        )
    # Waits to be ended from outside: a group that closes would break what others still receive.
    pipe.poll(_TRAFFIC_SECONDS)


def pass_on(lines: GenerationGroups, me: int, size: int, rounds: Sequence[int], device: torch.device) -> list[float]:
    """Returns the seconds there and back between peers 0 and 1, for each round. me: one of these two."""
    tensor, taken = torch.zeros(size, dtype=torch.uint8, device=device), []
    there, back, tag = lines.forward, lines.backward, 0  # one tag will do: one message is under way at a time
    for _ in rounds:
        started = time.perf_counter()
        if me == 0:
            there.send(1, tensor, tag).wait()
            back.receive(1, tensor, tag).wait()
        else:
            there.receive(0, tensor, tag).wait()
            back.send(0, tensor, tag).wait()
        taken.append(time.perf_counter() - started)
    return taken


def _timed_together(groups: Groups, exchange: Callable[[], object], rounds: range, device: torch.device) -> list[float]:
    """Returns the seconds of an exchange, for each round. All peers begin it at the same time."""
    together, taken = torch.zeros(1, dtype=torch.int64, device=device), []
    clock = _clock_of(device)
    for _ in rounds:
        groups.reduce(together)
        started = clock()
        exchange()
        taken.append(clock() - started)
    return taken


def _all_reduced(groups: Groups, size: int, device: torch.device) -> Callable[[], object]:
    return partial(groups.reduce, torch.zeros(max(1, size // 8), dtype=torch.int64, device=device))


def _shared(
    groups: Groups, me: Worker, size: int, optimization: Optimization, device: torch.device
) -> Callable[[], object]:
    """Returns what the peers of a sharded optimizer exchange in a step, for one parameter."""
    kind = SUM_OF[optimization.mode]
    elements = max(1, size // (8 if optimization.mode == "deterministic" else 4))
    parameter = nn.Parameter(torch.zeros(elements, device=device))
    sums = kind([parameter], terms=1, device=device, bucket_bytes=optimization.bucket_bytes)
    optimizer = StageOptimizer(
        nn.ParameterList([parameter]), torch.optim.SGD([parameter]), sums, pipelines=len(groups.peers)
    )
    sharded = _sharded(me, groups, optimizer)
    assert sharded is not None and optimizer.shards is not None
    shards = optimizer.shards

    def exchange() -> None:
        GradientReduction(sums, sharded.begin_reduce).finish()
        shards.lag()  # as after a step
        sharded.gather()

    return exchange


def _sharded(me: Worker, groups: Any, optimizer: StageOptimizer) -> ShardedStage | None:
    """Makes one of the peers of `groups`, each of which has its share; None where the state is not sharded."""
    shards = optimizer.shards
    if shards is None:
        return None
    peers, everything = groups.peers, range(len(shards.sizes))
    hosts = dict.fromkeys(peers, 0)
    ownership = assign(peers, dict.fromkeys(peers, everything), hosts, shards.sizes)
    return ShardedStage(me, groups, optimizer, ownership, lambda _: None)


_STAGES_SECONDS = 600.0

# -- op times of a workload's stages, as its workers take them ----------------------------------

_FAILED = 1
# The rounds of `measure_step`.
STEP_ROUNDS, STEP_WARM_UP = 5, 2


@dataclass(frozen=True)
class StageRun:
    """What a process that measures a stage is told; plain data. layers: of the model; None: as the workload says. slot:
    the number of the GPU it takes, if it runs on one."""

    cell: Worker
    job: Job
    workload: WorkloadSource
    optimization: Optimization
    effort: ProfilingEffort
    threads: int
    layers: int | None = None
    computes_on: Platform = field(default_factory=Platform)
    slot: int = 0


Rounds = dict[str, list[float]]
"""By op kind, the seconds of one op: for each round (iteration), the mean."""


def measure_stages(
    workload: NamedWorkload,
    job: Job,
    optimization: Optimization,
    effort: ProfilingEffort,
    say: Say,
    *,
    what: str = "stage",
    layers: int | None = None,
    computes_on: Platform | None = None,
) -> list[Rounds]:
    """Measures the op times of each stage. what: the word for a stage. layers: of the model; None: as the workload says
    for so many stages. Raises MeasuringError."""
    threads = torch.get_num_threads()
    found: list[Rounds] = [{} for _ in range(job.stages)]
    computes_on = computes_on or Platform()
    on_cpus = computes_on.device == "cpu"
    width = (os.cpu_count() or 1) // threads if on_cpus else torch.cuda.device_count()
    for together in batches(job, max(1, width)):
        beside = " at the same time" if len(together) > 1 else ""
        say("measuring ops of " + ", ".join(f"{what} {cell.stage}" for cell in together) + beside)
        pool = ProcessPool(_process, [*preload(workload), "openrecycle.agent.profiling"])
        try:
            running = []
            for place, cell in enumerate(together):
                run = StageRun(cell, job, workload, optimization, effort, threads, layers, computes_on, place)
                running.append(pool.start(Worker(place, 0), lambda _, run=run: run, time.monotonic()))  # type: ignore[misc]
            for entry in running:
                hear(entry, "ready", _STAGES_SECONDS)
            for entry in running:
                entry.post("go")
            for cell, entry in zip(together, running, strict=True):
                for kind, seconds in hear(entry, "measured", _STAGES_SECONDS)["seconds"].items():
                    found[cell.stage].setdefault(kind, []).extend(seconds)
        finally:
            pool.kill_all()
    return found


def measure_step(workload: WorkloadSource, job: Job, optimization: Optimization) -> float:
    """Returns the milliseconds of a stage's reduction and step on the CPU, for a plan whose other ops are paced. It
    takes about a second. The steps of all stages are taken in this process, and their median stands for each. The
    reduction is measured among as many processes as a stage has workers.
    """
    one, threads = replace(job, micro_batches=1), torch.get_num_threads()
    rounds: list[float] = []
    reduced = 0
    torch.set_num_threads(1)  # as workers have
    try:
        for stage in range(job.stages):
            bench = StageBenchmark(StageRun(Worker(0, stage), one, workload, optimization, ProfilingEffort(), 1))
            for number in range(STEP_WARM_UP + STEP_ROUNDS):
                seconds = bench.round()["O"]
                if number >= STEP_WARM_UP:
                    rounds.append(seconds)
            reduced = max(reduced, bench.reduced_bytes)
    finally:
        torch.set_num_threads(threads)
    _, sums = measure_traffic(
        (), reduced, job.pipelines, repeats=STEP_ROUNDS, warm_up=STEP_WARM_UP, optimization=optimization
    )
    reduction = sums.by_peers[-1].median if sums is not None else 0.0
    return round(1000 * statistics.median(rounds) + reduction, 1)


def batches(job: Job, width: int) -> list[list[Worker]]:
    """Returns which cells of the grid are measured at the same time. Every stage is in some batch; a batch has `width`
    cells, or fewer if the job has fewer workers. The last batch may repeat cells, to be as large as the others."""
    width = min(width, job.pipelines * job.stages)
    cells = [Worker(p, s) for p in range(max(1, min(job.pipelines, width // job.stages))) for s in range(job.stages)]
    out = [cells[i : i + width] for i in range(0, len(cells), width)]
    out[-1] += cells[: width - len(out[-1])]
    return out


# -- the process -------------------------------------------------------------------------------


def _process(run: StageRun, pipe: Connection) -> None:
    torch.set_num_threads(run.threads)
    try:
        device = run.computes_on.take(run.slot, deterministic=run.optimization.mode == "deterministic")
        bench = StageBenchmark(run, device=device)
        channel.send(pipe, "ready")
        channel.receive(pipe)
        for _ in range(run.effort.warm_up):
            bench.round()
        rounds = [bench.round() for _ in range(run.effort.repeats)]
        seconds = {kind: [one[kind] for one in rounds] for kind in rounds[0]}
        channel.send(pipe, "measured", seconds=seconds)
        # Goes on until it is ended: the other processes must not have the machine to themselves while they measure.
        while True:
            bench.round()
    except Exception as error:
        channel.send(pipe, "failed", text=f"stage can't be run: {_said(error)}")
        os._exit(_FAILED)


class StageBenchmark:
    """One stage with its executor, and a script of F, I and W in the order of 1F1B. clock: of seconds, unless given.
    device: where the stage computes."""

    def __init__(self, run: StageRun, clock: Callable[[], float] | None = None, device: torch.device = CPU) -> None:
        workload, me, job = _of_one_shape(run.workload.load()), run.cell, run.job
        cuts = StageCuts.of(workload, job.stages, autocast=run.optimization.autocast, device=device, layers=run.layers)
        between = cuts.stage_io
        stage, _ = assemble(workload, job, cuts, me.stage, 0, run.optimization, device)
        optimizer = stage_optimizer(workload, stage.module, stage.gradients, run.optimization, job.pipelines)
        steps = Steps(me, run.optimization, optimizer, cuts.partition, lambda *_: None)
        self._gradients = stage.gradients.buffer
        on_cpu = device.type == "cpu"
        self._clock: Callable[[], Any] = clock or (time.perf_counter if on_cpu else partial(_recorded, device))
        self._marks = list[Any]()
        self._executor = Executor(
            *(me, job, 0, workload, stage, steps, FaultInjector(me, [], lambda kill: None), {}),
            *(self._mark, lambda *_: None, between),
            device=device,
        )
        self._script = script_of(me, job)
        peers = [Worker(pipeline, me.stage) for pipeline in range(job.pipelines)]
        groups: Any = NullGroup(me, between, device, peers)  # it has as much of Groups as the executor uses
        if (sharded := _sharded(me, groups, optimizer)) is not None:
            self._executor.share(sharded)
        steps.begin(groups, [me], 0, {})
        self._groups = groups
        self._iteration = 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the sum over the stage's workers."""
        return size_of(self._gradients)

    def round(self) -> dict[str, float]:
        """Runs an iteration. Returns the mean time of one op of each kind, in seconds, unless the clock has another
        unit."""
        self._marks.clear()
        started = self._clock()
        self._executor.run(self._iteration, self._script, self._groups)
        started, *marks, before, ended = seconds_of([started, *self._marks, self._clock()])
        self._iteration += 1
        times: dict[str, list[float]] = {"O": [ended - before + marks[0] - started]}
        for op, begin, end in zip(self._script.ops, marks, [*marks[1:], before], strict=False):
            times.setdefault(op.kind, []).append(end - begin)
        return {kind: statistics.fmean(seconds) for kind, seconds in times.items()}

    def _mark(self) -> bool:
        """Notes the time. The executor calls this before every op."""
        self._marks.append(self._clock())
        return False


class _Largest:
    """A workload whose every micro-batch is the largest one. The neighbours of a stage that is measured send data of
    that shape, too."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._data = workload, (probe_inputs(workload, 0), probe_targets(workload, 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def inputs(self, *_: int) -> Any:
        return self._data[0]

    def targets(self, *_: int) -> Any:
        return self._data[1]


def _of_one_shape(workload: Workload) -> Any:
    return _Largest(workload) if getattr(workload, "varies", False) else workload


def _recorded(device: torch.device) -> Any:
    """Makes the GPU record the time at which it has done all that it was given so far."""
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_of(marks: Sequence[Any]) -> list[float]:
    """Returns the times of marks, in seconds; on a GPU, since the first mark."""
    if isinstance(marks[0], (int, float)):
        return list(marks)
    marks[-1].synchronize()
    return [marks[0].elapsed_time(mark) / 1000 for mark in marks]


def script_of(me: Worker, job: Job) -> Script:
    """Returns the script of 1F1B for the micro-batches of one pipeline, with each backward as I and W."""
    keys: list[MicroBatch] = [(me.pipeline, m) for m in range(job.micro_batches)]
    ahead = min(job.stages - me.stage, job.micro_batches)
    order = [("F", key) for key in keys[:ahead]]
    for m, key in enumerate(keys):
        order += [("I", key), ("W", key)]
        order += [("F", k) for k in keys[ahead + m : ahead + m + 1]]
    ops = tuple(Op(kind, *key, me.stage, me, 0, 0) for kind, key in order)
    step = Op("O", me.pipeline, -1, me.stage, me, 0, 0)
    before = {} if me.stage == 0 else dict.fromkeys(keys, Worker(me.pipeline, me.stage - 1))
    after = {} if me.stage == job.stages - 1 else dict.fromkeys(keys, Worker(me.pipeline, me.stage + 1))
    return Script((*ops, step), before, after, {})


class NullGroup:
    """Stands for the groups of one worker. Its neighbours have everything ready, and forget what they are sent. peers:
    those of its stage; nothing is exchanged with them."""

    ranks, peer_group = Ranks(), None

    def __init__(self, me: Worker, between: StageIO, device: torch.device = CPU, peers: Sequence[Worker] = ()) -> None:
        self.peers = peers
        generator = torch.Generator().manual_seed(0)
        incoming = between[me.stage - 1] if me.stage else ()
        self._incoming = on_device(_numbers(incoming, generator, 1.0), device)
        outgoing = between[me.stage] if me.stage < len(between) else ()
        # As small as gradients of a mean over the boundary.
        scale = 1.0 / max(1, sum(t.empty().numel() for t in outgoing))
        self._gradients = on_device(_numbers(outgoing, generator, scale), device)

    def transfers(self, layout: Any) -> Transfers:
        return _Instant(self._incoming, self._gradients, layout)


def _numbers(boundary: StageOutput, generator: torch.Generator, scale: float) -> dict[int, Tensor]:
    out = {}
    for i, spec in enumerate(boundary):
        tensor = spec.empty()
        # Zeros for integers, which may be indices: 0 is always a valid one.
        floating = tensor.is_floating_point()
        out[i] = tensor.normal_(generator=generator).mul_(scale) if floating else tensor.zero_()
    return out


class _Instant(Transfers):
    def __init__(self, incoming: Mapping[int, Tensor], gradients: Mapping[int, Tensor], layout: Any) -> None:
        nobody: Any = None
        super().__init__(nobody, layout)
        wanted = {i: gradients[i] for i, spec in enumerate(layout.outgoing) if spec.gradient}
        self._ready = {"F": incoming, "I": wanted}

    def send(self, kind: str, key: MicroBatch, tensors: Mapping[int, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.contiguous()

    def receive(self, kind: str, key: MicroBatch) -> dict[int, Tensor]:
        return {i: tensor.clone() for i, tensor in self._ready[kind].items()}

    def arrived(self, kind: str, key: MicroBatch) -> bool:
        return True

    def begin_reduce(self, tensor: Tensor) -> None:
        return None

    def reduced_by_all(self, count: int) -> int:
        return count

    def _post(self, kind: str, key: MicroBatch) -> None:
        pass

    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        return 0


# -- models that are profiled by name: the shapes of the GPT-3 family, in pieces ---------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only transformer. note: where they come from."""

    layers: int
    width: int
    heads: int
    note: str
    vocabulary: int = 50257
    sequence: int = 2048

    @property
    def parameters(self) -> int:
        """The number of parameters: of all layers (weights, biases, norms), both embeddings, and a head of its own."""
        layer = 12 * self.width**2 + 13 * self.width
        ends = (2 * self.vocabulary + self.sequence + 2) * self.width + self.vocabulary
        return self.layers * layer + ends


_PUBLISHED = "the GPT-3 paper's table of sizes"
SHAPES = {
    "gpt-3-medium": Shape(24, 1024, 16, _PUBLISHED),
    "gpt-3-3.35b": Shape(28, 3072, 24, "chosen here so that layers and one embedding make 3.3 billion parameters"),
    "gpt-3-6.7b": Shape(32, 4096, 32, _PUBLISHED),
}


def shape_of(name: str) -> Shape:
    """Returns a shape by its name. Raises InputError for an unknown name."""
    try:
        return SHAPES[name]
    except KeyError:
        raise InputError("--model", name, "one of " + ", ".join(SHAPES)) from None


PIECES = ("embedding", "layer", "head")


class Pieces:
    """A Workload of a built-in shape: the embedding, one layer and the head, for `batch` samples of full length, and
    AdamW."""

    def __init__(self, name: str, batch: int) -> None:
        self._shape = shape = shape_of(name)
        self.samples_per_micro_batch = batch
        self.stage_output_shape = (batch, shape.sequence, shape.width)
        self.stage_output_dtype = torch.float32

    def layer_count(self, stages: int) -> int:
        return len(PIECES)

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        shape = self._shape
        torch.manual_seed(seed_for("parameters", seed, layer))
        if PIECES[layer] == "embedding":
            return Embedding(shape.width, shape.sequence, shape.vocabulary)
        if PIECES[layer] == "layer":
            return Block(shape.width, shape.heads, 0.0)
        return nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary))

    def inputs(self, seed: int, *_: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        size = (self.samples_per_micro_batch, self._shape.sequence)
        return torch.randint(self._shape.vocabulary, size, generator=generator)

    targets = inputs

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.reshape(-1, self._shape.vocabulary), targets.reshape(-1))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)


# -- a whole profile ---------------------------------------------------------------------------------

Grid = tuple[int, int, int]
"""Pipelines, stages, micro-batches."""


def measure_model(
    name: str,
    batch: int,
    grid: Grid,
    optimization: Optimization,
    effort: ProfilingEffort,
    say: Say,
    computes_on: Platform | None = None,
) -> Measurements:
    """Measures a built-in shape: its embedding, one layer and head, each as if it were a stage.

    batch: samples per micro-batch. say: gets sentences about the progress. Raises InputError or MeasuringError.
    """
    name, (pipelines, stages, _) = shape_name(name), grid
    shape = shape_of(name)
    if stages > shape.layers:
        raise InputError("--stages", stages, f"at most {shape.layers}, the layers of {name}")
    # One micro-batch an iteration: those of the large shapes take many seconds.
    path, options, alone = f"{__name__}:{Pieces.__name__}", {"name": name, "batch": batch}, (pipelines, len(PIECES), 1)
    made = measure_workload(path, options, alone, optimization, effort, say, computes_on)
    about = (
        f"{shape.layers} layers, hidden {shape.width}, {shape.heads} heads, sequence {shape.sequence}, "
        f"vocabulary {shape.vocabulary}, {shape.parameters / 1e9:.2f} billion parameters; sizes: {shape.note}"
    )
    return made.model_copy(
        update={
            "model": name,
            "about": about,
            "cut": "layers",
            "layers": shape.layers,
            "parts": tuple(
                part.model_copy(update={"name": piece}) for part, piece in zip(made.parts, PIECES, strict=True)
            ),
            "transfers": made.transfers[:1],
        }
    )


def measure_workload(
    path: str,
    options: Mapping[str, Any],
    grid: Grid,
    optimization: Optimization,
    effort: ProfilingEffort,
    say: Say,
    computes_on: Platform | None = None,
) -> Measurements:
    """Measures any workload. Each layer is assembled and run as if it were a stage of a worker; of a workload that
    comes in stages, each stage. Bytes are those of one micro-batch, whose input is the output of the part before. Where
    inputs have several shapes, all figures are those of the largest micro-batch.

    The overhead of an op, beside its layers, would count once for each layer. So the stages of an even cut are
    measured, too, and a layer gets its share of the time of its stage.

    path, options: of the workload. Raises InputError or MeasuringError.
    """
    pipelines, stages, micro_batches = grid
    source, job = NamedWorkload(path, options), Job.uniform(*grid)
    workload = source.load()
    autocast, computes_on = optimization.autocast, computes_on or Platform()
    device = _taken(computes_on, optimization, grid)
    whole = StageCuts.of(workload, stages, autocast=autocast, device=device)
    what = kind_of(workload) if whole.layers <= MAX_LAYERS else "stage"
    cuts, alone, together = whole, job, tuple(range(k, k + 1) for k in range(stages))
    if what == "layer":
        together = spans(whole.partition)
        cuts = StageCuts((1,) * whole.layers, whole.layer_io)
        alone = Job.uniform(pipelines, cuts.layers, micro_batches)
    with _sentence("data can't be read"):
        inputs = on_device(tensors_of(probe_inputs(workload, 0), "data"), device)
        targets = on_device(probe_targets(workload, 0), device)

    def scaled_loss(output: Any) -> Tensor:
        return workload.loss(output, targets) / (pipelines * micro_batches)

    def trained(number: int) -> tuple[Stage, StageOptimizer]:
        made, _ = assemble(workload, alone, cuts, number, 0, optimization, device)
        return made, stage_optimizer(workload, made.module, made.gradients, optimization)

    kept, sizes = list[dict[str, int]](), list[int]()
    if getattr(workload, "varies", False):
        say("inputs have several shapes: all times and bytes are those of the largest micro-batch")
    say(f"measuring the bytes that {alone.stages} {what}s keep")
    for number in range(alone.stages):
        last = number == alone.stages - 1
        with _sentence(f"{what} {number} can't be run"):
            found, inputs = bytes_of_part(
                partial(trained, number), inputs, scaled_loss if last else None, first=not number
            )
        kept.append(found)
        if not last:
            sizes.append(size_of(inputs))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the processes that measure stages need the memory now
    measured = partial(measure_stages, source, layers=cuts.layers, computes_on=computes_on)
    rounds = measured(alone, optimization, effort, say, what=what)
    if alone.stages > stages:
        of_stages = measured(job, optimization, effort, say)
        rounds = [
            layer
            for number, (span, stage) in enumerate(zip(together, of_stages, strict=True))
            for layer in shared_out(stage, [rounds[k] for k in span], first=number == 0)
        ]
    parts = [_part(f"{what} {k}", kept[k], found) for k, found in enumerate(rounds)]
    reduced = max(sum(parts[k].reduced_bytes for k in span) for span in together)
    transfers, reductions = _traffic(tuple(sizes), reduced, pipelines, effort, optimization, say, computes_on)
    return Measurements(
        model=path,
        about=f"{alone.stages} {what}s of {path} with options {dict(options)}"[:300],
        samples_per_micro_batch=workload.samples_per_micro_batch,
        mode=optimization.mode,
        sharded_over=pipelines if optimization.sharding == "zero1" else 0,
        clipped=optimization.clip_norm is not None,
        hardware=_hardware(optimization, device),
        cut="each" if what == "layer" else "stages",
        layers=alone.stages if what == "layer" else 0,
        parts=tuple(parts),
        boundary_bytes=max(sizes, default=0),
        transfers=transfers,
        reductions=reductions,
    )


def _taken(computes_on: Platform, optimization: Optimization, grid: Grid) -> torch.device:
    """Returns the device of this process. Raises InputError, also where transfers could not be measured at the end."""
    if grid[:2] != (1, 1):
        computes_on.check(2)
    return computes_on.take(0, deterministic=optimization.mode == "deterministic")


def shared_out(stage: Rounds, layers: list[Rounds], *, first: bool = False) -> list[Rounds]:
    """Divides the seconds of a stage among its layers, in proportion to what each takes alone.

    first: is it the first stage? A backward that can't be split is done in I; but on the first stage, where nobody
    waits for I, in W. So there the backward is divided as a whole, and into I and W as each layer has them alone.
    """
    alone = [{kind: statistics.median(layer[kind]) for kind in stage} for layer in layers]
    made: list[Rounds] = [{} for _ in layers]
    for kind, seconds in stage.items():
        kinds = ("I", "W") if first and kind in ("I", "W") else (kind,)
        together = [sum(one) for one in zip(*(stage[k] for k in kinds), strict=True)]
        whole = sum(each[k] for each in alone for k in kinds)
        for out, mine in zip(made, alone, strict=True):
            out[kind] = [s * mine[kind] / whole for s in together] if whole else [s / len(layers) for s in seconds]
    return made


def _part(name: str, kept: Mapping[str, int], found: Rounds) -> Part:
    names = {"F": "forward", "I": "input_backward", "W": "weight_backward", "O": "step"}
    return Part(name=name, **kept, **{name: timing_of(found[kind]) for kind, name in names.items()})  # type: ignore[arg-type]


def _traffic(
    sizes: tuple[int, ...],
    reduced: int,
    pipelines: int,
    effort: ProfilingEffort,
    optimization: Optimization,
    say: Say,
    computes_on: Platform,
) -> tuple[tuple[Timing, ...], Reductions | None]:
    """Measures one transfer per boundary, and reductions. reduced: bytes of the largest sum."""
    say("measuring transfers and reductions")
    repeats, unlike = max(5, effort.repeats), tuple(sorted(set(sizes)))
    # On GPUs, among as many peers as there are GPUs: from these, plans extrapolate to more.
    peers = pipelines if computes_on.device == "cpu" else min(pipelines, max(2, torch.cuda.device_count()))
    found, reductions = measure_traffic(
        *(unlike, reduced, peers),
        repeats=repeats,
        warm_up=effort.warm_up,
        optimization=optimization,
        computes_on=computes_on,
        say=say,
    )
    by_size = dict(zip(unlike, found, strict=True))
    return tuple(by_size[size] for size in sizes), reductions


def _hardware(optimization: Optimization, device: torch.device) -> Hardware:
    return Hardware(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        accelerator="" if device.type == "cpu" else torch.cuda.get_device_name(device),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        dtype=_dtype(optimization),
        clock="wall",
        load=round(os.getloadavg()[0], 2),
        measured_on=datetime.now(UTC).date().isoformat(),
    )


def _processor() -> str:
    """Returns the processor's name, where the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _dtype(optimization: Optimization) -> str:
    if optimization.autocast is None:
        return "float32"
    return f"{str(LOWER[optimization.autocast]).removeprefix('torch.')} by autocast, float32 sums"
