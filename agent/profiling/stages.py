"""Op times of a workload's stages, as its workers take them.

Each stage runs through the executor that trains, in a process of its own, with neighbours that answer
at once: an op's time is all that passes from its beginning to the next one's, data loading, seeding and
what Python does between ops included. As many stages run at the same time as workers will on this
machine, since they share its memory and caches then, too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.config.devices import on_device
from openrecycle.agent.config.faults import FaultInjector
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.launcher.processes import ProcessPool, preload
from openrecycle.agent.messages import channel
from openrecycle.agent.models.stage_io import CPU, StageCuts, StageIO, StageOutput
from openrecycle.agent.models.workload import NamedWorkload, WorkloadSource
from openrecycle.agent.profiling.profiler import CLOCKS, ProfilingEffort, size_of
from openrecycle.agent.profiling.traffic import hear, measure_traffic
from openrecycle.agent.stages.assembly import assemble
from openrecycle.agent.stages.optimizer import stage_optimizer
from openrecycle.agent.transport.ranks import Ranks
from openrecycle.agent.transport.script import Script
from openrecycle.agent.transport.transfers import Transfers
from openrecycle.agent.workers.executor import Executor
from openrecycle.agent.workers.validation_exchange import Steps
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.schedule import MicroBatch, Op

_TIMEOUT_SECONDS = 600.0
_FAILED = 1
# Of `measure_step`.
STEP_ROUNDS, STEP_WARM_UP = 5, 2


@dataclass(frozen=True)
class StageRun:
    """What a process that measures is told; plain data. layers: of the model; None: as the workload says."""

    cell: Worker
    job: Job
    workload: WorkloadSource
    optimization: Optimization
    effort: ProfilingEffort
    threads: int
    layers: int | None = None


Rounds = dict[str, list[float]]
"""By op kind, seconds of one op: the mean of each round (iteration)."""


def measure_stages(
    workload: NamedWorkload,
    job: Job,
    optimization: Optimization,
    effort: ProfilingEffort,
    say: Callable[[str], None],
    *,
    what: str = "stage",
    layers: int | None = None,
) -> list[Rounds]:
    """By stage. what: it is called. layers: of the model; None: as the workload says for so many stages. Raises
    MeasuringError."""
    threads = torch.get_num_threads()
    found: list[Rounds] = [{} for _ in range(job.stages)]
    for together in batches(job, max(1, (os.cpu_count() or 1) // threads)):
        say("measuring ops of " + ", ".join(f"{what} {cell.stage}" for cell in together) + " at the same time")
        pool = ProcessPool(_process, [*preload(workload), "openrecycle.agent.profiling.stages"])
        try:
            running = []
            for place, cell in enumerate(together):
                run = StageRun(cell, job, workload, optimization, effort, threads, layers)
                running.append(pool.start(Worker(place, 0), lambda _, run=run: run, time.monotonic()))  # type: ignore[misc]
            for entry in running:
                hear(entry, "ready", _TIMEOUT_SECONDS)
            for entry in running:
                entry.post("go")
            for cell, entry in zip(together, running, strict=True):
                for kind, seconds in hear(entry, "measured", _TIMEOUT_SECONDS)["seconds"].items():
                    found[cell.stage].setdefault(kind, []).extend(seconds)
        finally:
            pool.kill_all()
    return found


def measure_step(workload: WorkloadSource, job: Job, optimization: Optimization) -> float:
    """Milliseconds of a stage's reduction and step, on the CPU, in about a second: what a plan is to reckon with
    whose other ops are paced. The steps are taken in this process, those of all stages, and their median stands for
    each; the reduction is measured among as many processes as a stage has workers.
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
    _, sums = measure_traffic((), reduced, job.pipelines, repeats=STEP_ROUNDS, warm_up=STEP_WARM_UP)
    reduction = sums.by_peers[-1].median if sums is not None else 0.0
    return round(1000 * statistics.median(rounds) + reduction, 1)


def batches(job: Job, width: int) -> list[list[Worker]]:
    """Cells of the grid that are measured at the same time: every stage, `width` at once, or fewer where
    the job has fewer workers. Of the last batch some may have been measured before."""
    width = min(width, job.pipelines * job.stages)
    cells = [Worker(p, s) for p in range(max(1, min(job.pipelines, width // job.stages))) for s in range(job.stages)]
    out = [cells[i : i + width] for i in range(0, len(cells), width)]
    out[-1] += cells[: width - len(out[-1])]
    return out


# -- the process -------------------------------------------------------------------------------


def _process(run: StageRun, pipe: Connection) -> None:
    torch.set_num_threads(run.threads)
    try:
        bench = StageBenchmark(run)
        channel.send(pipe, "ready")
        channel.receive(pipe)
        for _ in range(run.effort.warm_up):
            bench.round()
        rounds = [bench.round() for _ in range(run.effort.repeats)]
        seconds = {kind: [one[kind] for one in rounds] for kind in rounds[0]}
        channel.send(pipe, "measured", seconds=seconds)
        # The others must not have the machine to themselves before they are done, too.
        while True:
            bench.round()
    except Exception as error:
        channel.send(pipe, "failed", text=f"{type(error).__name__}: {error}")
        os._exit(_FAILED)


class StageBenchmark:
    """One stage with its executor, and a script of F, I and W in 1F1B's order. clock: the effort's, unless given.
    device: where it computes."""

    def __init__(self, run: StageRun, clock: Callable[[], float] | None = None, device: torch.device = CPU) -> None:
        workload, me, job = run.workload.load(), run.cell, run.job
        cuts = StageCuts.of(workload, job.stages, autocast=run.optimization.autocast, device=device, layers=run.layers)
        between = cuts.stage_io
        stage, _ = assemble(workload, job, cuts, me.stage, 0, run.optimization, device)
        optimizer = stage_optimizer(workload, stage.module, stage.gradients, run.optimization)
        steps = Steps(me, run.optimization, optimizer, cuts.partition, lambda *_: None)
        self._gradients = stage.gradients.buffer
        self._clock, self._marks = clock or CLOCKS[run.effort.clock], list[float]()
        self._executor = Executor(
            *(me, job, 0, workload, stage, steps, FaultInjector(me, [], lambda: None), {}),
            *(self._mark, lambda *_: None, between),
            device=device,
        )
        self._script = script_of(me, job)
        groups: Any = NullGroup(me, between, device)  # as far as the executor asks
        steps.begin(groups, [me], 0, {})
        self._groups = groups
        self._iteration = 0

    @property
    def reduced_bytes(self) -> int:
        """Of the sum over the stage's workers."""
        return size_of(self._gradients)

    def round(self) -> dict[str, float]:
        """Mean of one op of each kind, over one iteration; in seconds, unless the clock has another unit."""
        self._marks.clear()
        started = self._clock()
        self._executor.run(self._iteration, self._script, self._groups)
        ended = self._clock()
        self._iteration += 1
        *marks, before = self._marks
        times: dict[str, list[float]] = {"O": [ended - before + marks[0] - started]}
        for op, begin, end in zip(self._script.ops, marks, [*marks[1:], before], strict=False):
            times.setdefault(op.kind, []).append(end - begin)
        return {kind: statistics.fmean(seconds) for kind, seconds in times.items()}

    def _mark(self) -> bool:
        """The executor asks this before every op."""
        self._marks.append(self._clock())
        return False


def script_of(me: Worker, job: Job) -> Script:
    """1F1B with each backward as I and W, of one pipeline's micro-batches."""
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
    """Groups of one worker whose neighbours have everything ready, and forget what they are sent."""

    ranks = Ranks()

    def __init__(self, me: Worker, between: StageIO, device: torch.device = CPU) -> None:
        generator = torch.Generator().manual_seed(0)
        incoming = between[me.stage - 1] if me.stage else ()
        self._incoming = on_device(_numbers(incoming, generator, 1.0), device)
        outgoing = between[me.stage] if me.stage < len(between) else ()
        # Gradients of a mean over the boundary are as small.
        scale = 1.0 / max(1, sum(t.empty().numel() for t in outgoing))
        self._gradients = on_device(_numbers(outgoing, generator, scale), device)

    def transfers(self, layout: Any) -> Transfers:
        return _Instant(self._incoming, self._gradients, layout)


def _numbers(boundary: StageOutput, generator: torch.Generator, scale: float) -> dict[int, Tensor]:
    out = {}
    for i, spec in enumerate(boundary):
        tensor = spec.empty()
        # Integers may be indices: 0 is always one.
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

    def begin_reduce(self, tensor: Tensor) -> None:
        return None

    def reduced_by_all(self, count: int) -> int:
        return count

    def _post(self, kind: str, key: MicroBatch) -> None:
        pass

    def _tag(self, kind: str, key: MicroBatch, index: int) -> int:
        return 0
