"""The policies: those that read measured tables, with the readers of these tables, and those that use plans made from a
job's profile.
"""

from __future__ import annotations

import csv
import heapq
import io
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.jobs.words import DROP, REROUTE, number_of
from openrecycle.planner.plans.plan import read_whole
from openrecycle.planner.simulation.engine import (
    MILLISECOND,
    SECOND,
    Cluster,
    KeepTraining,
    MembershipChange,
    Pace,
    Policy,
    Reaction,
    RecoveryCosts,
    Stop,
)
from openrecycle.planner.simulation.planned import PlannedJob, Rate
from openrecycle.planner.simulation.policy import REPARTITION, Option, best_option

# -- the tables --------------------------------------------------------------------------------------

# Two CSV tables: measured throughput by node count, and the constants that say what a failure costs:
#
#     system,model,nodes,samples_per_second
#     system,model,samples_per_iteration,failure_pause_s,checkpoint_save_s,checkpoint_every_iterations,notes
#
# The form is that of the Oobleck artefact's tables.

THROUGHPUT = ("system", "model", "nodes", "samples_per_second")
COSTS = (
    "system",
    "model",
    "samples_per_iteration",
    "failure_pause_s",
    "checkpoint_save_s",
    "checkpoint_every_iterations",
)
RESTARTS = ("system", "model", "nodes", "restart_s")
DATA = Path(__file__).parent / "data"
MOST_SECONDS = 1e7
MOST_SPARES = 100_000


@dataclass(frozen=True)
class NodeTable:
    """A number by node count. For other counts it gives the number of the nearest one."""

    by_nodes: Mapping[int, float]

    def at(self, nodes: int) -> float:
        return self.by_nodes[min(max(nodes, min(self.by_nodes)), max(self.by_nodes))]

    @property
    def best(self) -> float:
        """The number at the most nodes."""
        return self.by_nodes[max(self.by_nodes)]


@dataclass(frozen=True)
class Costs:
    """Costs of one system and model. samples: per iteration. pause: seconds per failure, by node count; None: it runs
    out of memory and never trains.

    checkpoint: seconds to save one; every: iterations between two.
    """

    samples: float
    pause: NodeTable | None
    checkpoint: float | None
    every: int | None


def read_throughput(path: Path, system: str, model: str) -> NodeTable:
    """Read the samples per second of one system and model; 0 where it runs out of memory. Raises InputError."""
    return _by_nodes(path, THROUGHPUT, system, model)


def read_costs(path: Path, system: str, model: str) -> Costs:
    """Read the row of one system and model. Raises InputError.

    A pause that is a range, 49.1-112, depends on the node count. For the systems where it is known, data/oobleck/
    restart-by-node-count.csv has the pause of each count.
    """
    for where, row in _rows(path, COSTS):
        if (row["system"], row["model"]) != (system, model):
            continue
        every = _number(row, "checkpoint_every_iterations", where, least=1)
        if every is not None and every != int(every):
            raise InputError(f"{where} checkpoint_every_iterations", every, "a whole number of at least 1")
        samples = _number(row, "samples_per_iteration", where)
        if not samples:
            raise InputError(f"{where} samples_per_iteration", row["samples_per_iteration"], "a number above 0")
        return Costs(
            samples=samples,
            pause=_pause(row, where, system, model),
            checkpoint=_number(row, "checkpoint_save_s", where),
            every=None if every is None else int(every),
        )
    raise InputError(str(path), f"no row for {system}, {model}", _known(path, COSTS, system))


def _pause(row: dict[str, str], where: str, system: str, model: str) -> NodeTable | None:
    text = row["failure_pause_s"]
    low, dash, high = text.partition("-")
    if not (dash and low and high):
        seconds = _number(row, "failure_pause_s", where)
        return None if seconds is None else NodeTable({1: seconds})
    bounds = [_number({"failure_pause_s": part}, "failure_pause_s", where) for part in (low, high)]
    try:
        table = _by_nodes(DATA / "oobleck" / "restart-by-node-count.csv", RESTARTS, system, model)
    except InputError:
        raise InputError(
            f"{where} failure_pause_s", text, f"one number of seconds: by node count {system}, {model} is not known"
        ) from None
    if bounds != [min(table.by_nodes.values()), max(table.by_nodes.values())]:
        known = f"{min(table.by_nodes.values()):g}-{max(table.by_nodes.values()):g}"
        raise InputError(
            f"{where} failure_pause_s", text, f"{known}, the only range known by node count, or one number"
        )
    return table


def _by_nodes(path: Path, columns: tuple[str, ...], system: str, model: str) -> NodeTable:
    out: dict[int, float] = {}
    for where, row in _rows(path, columns):
        if (row["system"], row["model"]) != (system, model):
            continue
        nodes, value = _number(row, "nodes", where, least=1), _number(row, columns[3], where)
        if nodes is None or nodes != int(nodes):
            raise InputError(f"{where} nodes", row["nodes"], "a whole number of at least 1")
        if value is None:
            raise InputError(f"{where} {columns[3]}", "", "a number")
        if int(nodes) in out:
            raise InputError(f"{where} nodes", int(nodes), f"one row per node count of {system}, {model}")
        out[int(nodes)] = value
    if not out:
        raise InputError(str(path), f"no row for {system}, {model}", _known(path, columns, system))
    return NodeTable(out)


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """Return (file and line, fields) of each row."""
    try:
        reader = csv.DictReader(io.StringIO(read_whole(path).decode(), newline=""))
        missing = [column for column in columns if column not in (reader.fieldnames or [])]
        if missing:
            raise InputError(f"{path} line 1", ",".join(reader.fieldnames or [])[:120], ",".join(columns))
        out = []
        for row in reader:
            where = f"{path} line {reader.line_num}"
            fields = {column: (row[column] or "").strip() for column in columns}
            if any(row[column] is None for column in columns):
                raise InputError(where, f"{sum(v is not None for v in row.values())} fields", ",".join(columns))
            out.append((where, fields))
        return out
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a CSV file that can be read") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), str(error), "a CSV file in UTF-8") from None


def _number(row: dict[str, str], column: str, where: str, *, least: float = 0) -> float | None:
    """Parse a number; None for an empty field. Raises InputError."""
    text = row[column]
    if not text:
        return None
    value = number_of(text)
    if value is None or not least <= value <= MOST_SECONDS:
        raise InputError(f"{where} {column}", text, f"a number from {least:g} to {MOST_SECONDS:g}")
    return value


def _known(path: Path, columns: tuple[str, ...], system: str) -> str:
    pairs = sorted({(row["system"], row["model"]) for _, row in _rows(path, columns)})
    models = [model for of, model in pairs if of == system]
    if models:
        return f"for {system} one of {', '.join(models)}"
    return "one of the systems " + ", ".join(dict.fromkeys(of for of, _ in pairs))


# -- common parts of the policies: the pace by node count, and when they start ------------------------

# With fewer nodes there is no pipeline: the published simulations have 12 stages throughout.
STAGES = 12
# The time from a node's arrival until it can train.
READY_AFTER = 45 * SECOND


class MeasuredPolicy:
    """A policy with a table of samples per second by node count. stages: the fewest nodes that make a pipeline.

    A node that comes while the job trains takes part from the next reconfiguration on.
    """

    name = ""
    extra_workers = 0

    def __init__(self, throughput: NodeTable, costs: Costs, *, stages: int = STAGES) -> None:
        self.stages = stages
        self.throughput = throughput
        self.costs = costs
        self.fault_free = throughput.best
        self.workers = max(throughput.by_nodes)

    def pause(self, nodes: int) -> int:
        """Microseconds from a loss that leaves `nodes` nodes until training goes on."""
        return 0 if self.costs.pause is None else round(self.costs.pause.at(nodes) * SECOND)

    def rate(self, nodes: int) -> float:
        """Samples per second with `nodes` nodes."""
        return self.throughput.at(nodes)

    def cut(self, iteration: float) -> int:
        """The microseconds of an iteration that count: whole milliseconds, as in the published simulations."""
        return max(1, int(iteration) // MILLISECOND) * MILLISECOND

    def start(self, nodes: int) -> Reaction:
        """The reaction at the first start, and at every start after the job had to wait for nodes."""
        return Stop(self.pause(nodes))

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if not training and not paused:
            return self.start(cluster.usable) if change.ready else KeepTraining()
        if not change.lost:
            return KeepTraining()
        return self.loss(cluster.usable)

    def loss(self, left: int) -> Reaction:
        """The reaction to a loss that leaves `left` nodes."""
        return Stop(self.pause(left))

    def iteration_end(self, cluster: Cluster) -> Reaction:
        return KeepTraining()

    def pace(self, cluster: Cluster) -> Pace | None:
        rate = self.rate(cluster.usable)
        if cluster.usable < self.stages or not rate:
            return None
        return Pace(self.cut(self.costs.samples / rate * SECOND), self.costs.samples)


# -- Bamboo ------------------------------------------------------------------------------------------

# Bamboo (NSDI'23), from throughput by node count. Every node also runs the forwards of the next stage, so when the
# node of a stage is lost, the one of the stage before it (its shadow) takes over. The throughput in the table includes
# this redundant work.

# After a take-over, the rest of the iteration and all iterations until the next re-balance take so much longer.
FAIL_OVER = 1.5
# The pause when two neighbouring stages are lost: all nodes restart.
GLOBAL_RESTART = 30 * SECOND
# A re-balance is due when the loss of more than this fraction of the nodes would be fatal.
EXPOSED = 0.05

Place = tuple[int, int]  # (pipeline, stage)


class BambooTable(MeasuredPolicy):
    """Bamboo. corrected: leaves out an artefact of the published simulation, in which even the loss of a node that only
    stands by slows training down."""

    def __init__(self, throughput: NodeTable, costs: Costs, *, corrected: bool = False, stages: int = STAGES) -> None:
        super().__init__(throughput, costs, stages=stages)
        self.corrected = corrected
        self.name = "bamboo-corrected" if corrected else "bamboo"
        self.global_restart = GLOBAL_RESTART
        self.places: dict[str, list[Place]] = {}
        self.order: list[str] = []  # the order in which the next layout takes the nodes
        self.pipelines = 0
        self.waiting = 0
        self.slowed = False
        self.current: Pace | None = None

    def start(self, nodes: int) -> Reaction:
        return Stop(self.global_restart)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if not training:
            earlier = self.order if paused else [n for n in cluster.ready if n not in change.ready]
            self.order = [*earlier, *change.ready]
        if not training and not paused:
            return super().changed(cluster, change, training=training, paused=paused)
        if paused:
            # The next layout counted on the lost node, so the pause begins anew.
            return Stop(self.pause(cluster.usable)) if change.lost else KeepTraining()
        self.waiting += len(change.ready)
        slower = False
        for name in change.lost:
            places = self.places.pop(name, [])
            if places and not self._taken_over(places):
                self.order = cluster.ready
                return Stop(self.global_restart)
            slower = slower or bool(places) or not self.corrected
        if self.corrected and change.lost and not slower:
            self.current = super().pace(cluster)
            return KeepTraining(pace=self.current, ask=self._due())
        if not slower or self.slowed:
            return KeepTraining(ask=self._due())
        self.slowed = True
        assert self.current is not None
        self.current = replace(self.current, iteration=self.cut(self.current.iteration * FAIL_OVER))
        return KeepTraining(stretch=FAIL_OVER, pace=self.current, ask=self._due())

    def _taken_over(self, places: list[Place]) -> bool:
        """Lets the predecessor take the place. Returns False if it can't: the lost node held two places, or the
        predecessor already does."""
        if len(places) > 1:
            return False
        pipeline, stage = places[0]
        shadow = (pipeline, (stage - 1) % self.stages)
        for held in self.places.values():
            if shadow in held:
                if len(held) > 1:
                    return False
                held.append(places[0])
                return True
        return True

    def _due(self) -> bool:
        """Is a re-balance due at the end of this iteration?"""
        overloaded = sum(len(held) > 1 for held in self.places.values())
        active = self.pipelines * self.stages - overloaded
        if overloaded and (self.waiting >= overloaded or 2 * overloaded / active > EXPOSED):
            return True
        return (active + self.waiting) // self.stages > self.pipelines

    def iteration_end(self, cluster: Cluster) -> Reaction:
        if not self._due():
            return KeepTraining()
        self.order = cluster.ready
        return Stop(self.pause(cluster.usable))

    def pace(self, cluster: Cluster) -> Pace | None:
        """Makes a new layout of whole pipelines: first with the nodes that were there, in the order in which they came,
        then with those that got ready during the pause. The rest stand by."""
        there = set(cluster.ready)
        ready = [name for name in self.order if name in there]
        self.pipelines = len(ready) // self.stages
        used = ready[: self.pipelines * self.stages]
        self.places = {name: [divmod(i, self.stages)] for i, name in enumerate(used)}
        self.waiting = len(ready) - len(used)
        self.slowed = False
        self.current = super().pace(cluster)
        return self.current


# -- the other systems, and all by name ---------------------------------------------------------------


class OobleckTable(MeasuredPolicy):
    """A loss stops training for the model's constant time; an iteration that ends within it still counts."""

    name = "oobleck"

    def loss(self, left: int) -> Reaction:
        return Stop(self.pause(left), grace=True)


class ReCycleTable(MeasuredPolicy):
    """Workers that return take part from the next iteration on. ReCycle needs a living worker on each stage, which the
    table does not tell: here it goes on as long as any worker lives."""

    name = "recycle"

    def __init__(self, throughput: NodeTable, costs: Costs) -> None:
        super().__init__(throughput, costs, stages=1)

    def start(self, nodes: int) -> Reaction:
        return Stop(0)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if training and not change.lost:
            return KeepTraining(ask=True)
        return super().changed(cluster, change, training=training, paused=paused)

    def iteration_end(self, cluster: Cluster) -> Reaction:
        return KeepTraining(pace=self.pace(cluster))


class VarunaTable(MeasuredPolicy):
    """A loss drops the work since the last checkpoint. The measured restart time includes saving a checkpoint, which
    does not happen at a loss, so that time is subtracted."""

    name = "varuna"

    def __init__(self, throughput: NodeTable, costs: Costs) -> None:
        if costs.checkpoint is None or costs.every is None:
            raise InputError("checkpoint_save_s", costs.checkpoint, "checkpoint_save_s and checkpoint_every_iterations")
        super().__init__(throughput, costs)
        self.checkpoint = round(costs.checkpoint * SECOND)
        self.every = costs.every

    def pause(self, nodes: int) -> int:
        return max(0, super().pause(nodes) - self.checkpoint)

    def loss(self, left: int) -> Reaction:
        return Stop(self.pause(left), rollback=True)

    def pace(self, cluster: Cluster) -> Pace | None:
        made = super().pace(cluster)
        return made and replace(made, checkpoint_every=self.every, checkpoint=self.checkpoint)


# name: (the system whose rows it reads, its constructor)
PUBLISHED: dict[str, tuple[str, Callable[[NodeTable, Costs], MeasuredPolicy]]] = {
    "oobleck": ("oobleck", OobleckTable),
    "varuna": ("varuna", VarunaTable),
    "bamboo": ("bamboo", BambooTable),
    "bamboo-corrected": ("bamboo", partial(BambooTable, corrected=True)),
    "recycle": ("recycle", ReCycleTable),
}


def published(name: str, throughput: Path, costs: Path, model: str) -> MeasuredPolicy:
    """Make a new policy for one run. Raises InputError."""
    if name not in PUBLISHED:
        raise InputError("--policy", name, "with --throughput one of " + ", ".join(PUBLISHED))
    system, make = PUBLISHED[name]
    return make(read_throughput(throughput, system, model), read_costs(costs, system, model))


# -- common parts of planned policies: which workers are in the job, and which stand by ---------------


class GridPolicy(ABC):
    """When it loses a worker, the job stops; a worker that comes back joins at the end of an iteration.

    Subclasses define how many workers take part (`used`), how fast the job then is (`rate`), and what losses and
    returns cost (`loss`, `growth`). The loss of a worker that stands by costs nothing. A job that had to wait for
    workers pays a restart and loses no work: its last checkpoint is taken to be from when it stopped.
    """

    name = ""

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts) -> None:
        self.planned = planned
        self.costs = costs
        self.workers = planned.workers
        self.fault_free = planned.full.per_second
        self.extra_workers = 0
        self.started = False
        self.active: set[str] = set()
        self.standby: deque[str] = deque()

    # -- for subclasses --------------------------------------------------------------------------

    def used(self, workers: int) -> int:
        """How many of `workers` take part."""
        return min(workers, self.workers)

    @abstractmethod
    def rate(self, workers: int) -> Rate | None:
        """The rate with so many workers in the job; None: it can't train."""

    def loss(self, left: int, replaced: int) -> Stop:
        """The reaction when workers of the job were lost: `left` will take part, `replaced` of them new in the job."""
        return Stop(self.recovery(replaced))

    def growth(self, workers: int) -> Stop:
        """The reaction when more workers than before can take part."""
        return Stop(seconds(self.costs.rejoin))

    def recovery(self, replaced: int, further: float = 0.0) -> int:
        """Microseconds until all workers know and have new groups, and workers that are new or move have their
        state."""
        copies = max(further, self.costs.rejoin if replaced else 0.0)
        return seconds(self.costs.detect + self.costs.recover + copies)

    # -- Policy ------------------------------------------------------------------------------------

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        self.standby.extend(change.ready)
        hit = 0
        for name in change.lost:
            if name in self.active:
                self.active.remove(name)
                hit += 1
            else:
                self.standby.remove(name)
        left = self.used(len(self.active) + len(self.standby))
        if not training and not paused:
            if self.rate(left) is None:
                return KeepTraining()
            return Stop(seconds(self.costs.restart) if self.started else 0)
        if hit:
            return self.loss(left, max(0, min(hit, left - len(self.active))))
        return KeepTraining(ask=training and left > len(self.active))

    def iteration_end(self, cluster: Cluster) -> Reaction:
        grown = self.used(len(self.active) + len(self.standby))
        return self.growth(grown) if grown > len(self.active) else KeepTraining()

    def pace(self, cluster: Cluster) -> Pace | None:
        self._staff()
        made = self.rate(len(self.active))
        if made is None:
            return None
        self.started = True
        return Pace(max(1, round(made.seconds * SECOND)), made.samples)

    def _staff(self) -> None:
        """Fills the job from the workers that stand by, or makes those stand by that it has no use for."""
        wanted = self.used(len(self.active) + len(self.standby))
        while len(self.active) < wanted:
            self.active.add(self.standby.popleft())
        for name in heapq.nlargest(len(self.active) - wanted, self.active):
            self.active.remove(name)
            self.standby.append(name)


def seconds(value: float) -> int:
    """Convert seconds to microseconds."""
    return round(value * SECOND)


# -- checkpoint and restart --------------------------------------------------------------------------

# All workers begin anew from the last checkpoint: in as many whole pipelines as there are (`CheckpointRestart`) or, as
# Varuna (EuroSys'22) does, in pipelines of the depth that is best for the number of workers (`Varuna`).


class CheckpointRestart(GridPolicy):
    """All micro-batches are kept, so fewer pipelines take longer. Workers beyond whole pipelines stand by."""

    name = "checkpoint-restart"

    def used(self, workers: int) -> int:
        stages = self.planned.job.stages
        return min(workers, self.workers) // stages * stages

    def rate(self, workers: int) -> Rate | None:
        return self.planned.fewer_pipelines(workers // self.planned.job.stages)

    def loss(self, left: int, replaced: int) -> Stop:
        return Stop(seconds(self.costs.detect + self.costs.restart), rollback=True)

    def growth(self, workers: int) -> Stop:
        return Stop(seconds(self.costs.checkpoint + self.costs.restart), save=True)

    def pace(self, cluster: Cluster) -> Pace | None:
        made = super().pace(cluster)
        if made is None:
            return None
        every = max(1, round(self.costs.checkpoint_interval * SECOND / made.iteration))
        return replace(made, checkpoint_every=every, checkpoint=seconds(self.costs.checkpoint))


class Varuna(CheckpointRestart):
    """The grid changes its shape: depth and number of pipelines follow the number of workers, always with 1F1B."""

    name = "varuna"

    def used(self, workers: int) -> int:
        morphed = self.planned.morphed(min(workers, self.workers))
        return 0 if morphed is None else morphed[0]

    def rate(self, workers: int) -> Rate | None:
        morphed = self.planned.morphed(workers)
        return None if morphed is None else morphed[1]


# -- drop the replica --------------------------------------------------------------------------------


class Places:
    """The places of a job's grid and the workers that have them: the number of whole pipelines depends on which workers
    were lost. A worker takes the place that it is named for, as in a job's own history, or the first one that is free;
    without a free one it waits."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.place: dict[str, int] = {}
        self.waiting: deque[str] = deque()
        self.free = set(range(job.pipelines * job.stages))  # places, pipeline by pipeline
        self.order = list(self.free)  # a heap that has all free places, and others
        self.empty = [job.stages] * job.pipelines  # empty places of each pipeline

    @property
    def whole(self) -> int:
        """Number of pipelines without an empty place."""
        return self.empty.count(0)

    def leave(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.place:
                self.waiting.remove(name)
                continue
            place = self.place.pop(name)
            self.free.add(place)
            heapq.heappush(self.order, place)
            self.empty[place // self.job.stages] += 1

    def take(self, names: Iterable[str]) -> None:
        """Gives places to workers that have come, and to those that wait."""
        self.waiting.extend(names)
        while self.waiting and self.free:
            name = self.waiting.popleft()
            place = self._named(name)
            while place not in self.free:
                place = heapq.heappop(self.order)
            self.free.remove(place)
            self.place[name] = place
            self.empty[place // self.job.stages] -= 1

    def _named(self, name: str) -> int:
        """Returns the place that a worker of the job's grid is named for; -1 for another name."""
        try:
            worker = self.job.check_worker(Worker.parse(name), field="worker")
        except InputError:
            return -1
        return worker.pipeline * self.job.stages + worker.stage


class DropReplica(GridPolicy):
    """As torchft and elastic data parallel: a pipeline with a dead worker stands still. The others go on with their
    own micro-batches, so an iteration trains on fewer samples. Only `ours` may do so, too; no other policy here changes
    the samples of an update."""

    name = "drop-replica"

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts) -> None:
        super().__init__(planned, costs)
        self.places = Places(planned.job)
        self.running = 0

    def rate(self, workers: int) -> Rate | None:
        return self.planned.replicas(self.places.whole)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        before = self.places.whole
        self.places.leave(change.lost)
        left = self.places.whole
        self.places.take(change.ready)
        whole = self.places.whole
        if not training and not paused:
            if not whole:
                return KeepTraining()
            return Stop(seconds(self.costs.restart) if self.started else 0)
        if left < before:
            return self.loss(0, whole - left)
        return KeepTraining(ask=whole > self.running)

    def iteration_end(self, cluster: Cluster) -> Reaction:
        return self.growth(0) if self.places.whole > self.running else KeepTraining()

    def pace(self, cluster: Cluster) -> Pace | None:
        self.running = self.places.whole
        return super().pace(cluster)

    def _staff(self) -> None:
        """Does nothing: workers take places when they come."""


# -- others ------------------------------------------------------------------------------------------


class Bamboo(BambooTable):
    """Every worker also runs the forwards of the next stage. A re-balance costs as much as a re-partition, and a loss
    that nobody can take over as much as a restart."""

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts) -> None:
        self.planned = planned
        full = NodeTable({planned.workers: planned.redundant(planned.job.pipelines).per_second})
        pause = NodeTable({1: costs.detect + costs.recover + costs.repartition})
        constants = Costs(planned.samples, pause, None, None)
        super().__init__(full, constants, corrected=True, stages=planned.job.stages)
        self.name = "bamboo"
        self.fault_free = planned.full.per_second
        self.restart = seconds(costs.restart)
        self.global_restart = seconds(costs.detect + costs.restart)

    def start(self, nodes: int) -> Reaction:
        return Stop(self.restart if self.current else 0)

    def cut(self, iteration: float) -> int:
        return max(1, round(iteration))

    def rate(self, nodes: int) -> float:
        pipelines = min(nodes // self.stages, self.planned.job.pipelines)
        return self.planned.redundant(pipelines).per_second if pipelines else 0.0


class FaultFree(GridPolicy):
    name = "fault-free"

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        return KeepTraining() if training or paused else Stop(0)

    def rate(self, workers: int) -> Rate | None:
        return self.planned.full

    def _staff(self) -> None:
        """Does nothing: the policy ignores workers."""


class ReCycle(GridPolicy):
    """Where a failure may have to be moved to the stage at which it costs least, it costs one copy in addition."""

    name = "recycle"

    def rate(self, workers: int) -> Rate | None:
        return self.planned.rerouted(self.workers - workers)

    def loss(self, left: int, replaced: int) -> Stop:
        moved = self.costs.migrate if self.planned.moves(self.workers - left) else 0.0
        return Stop(self.recovery(replaced, moved))


def check_spares(spares: int) -> None:
    """Raises InputError for a number of spares out of range."""
    if isinstance(spares, bool) or not 0 <= spares <= MOST_SPARES:
        raise InputError("--spares", spares, f"a whole number from 0 to {MOST_SPARES}")


class SpareWorkers(GridPolicy):
    """`spares` workers in addition to those of the trace. They don't fail, so the result is slightly better than it
    would be. Once more workers are dead than there are spares, the job has only as many whole pipelines as the rest
    makes, each with its own micro-batches.
    """

    name = "spares"

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts, spares: int) -> None:
        super().__init__(planned, costs)
        check_spares(spares)
        self.extra_workers = spares
        self.name = f"spares-{spares}"

    def rate(self, workers: int) -> Rate | None:
        staffed = min(self.workers, workers + self.extra_workers) if workers else 0
        return self.planned.replicas(staffed // self.planned.job.stages)

    def loss(self, left: int, replaced: int) -> Stop:
        """A spare takes its peers' state; without a spare the pipeline is dropped."""
        taken = left + self.extra_workers >= self.workers
        return Stop(self.recovery(replaced + taken))


class Repartition(GridPolicy):
    """Every loss and every return moves layers, and training waits for them."""

    name = "repartition"

    def rate(self, workers: int) -> Rate | None:
        return self.planned.repartitioned(workers)

    def loss(self, left: int, replaced: int) -> Stop:
        return Stop(self.recovery(replaced, self.costs.repartition))

    def growth(self, workers: int) -> Stop:
        return Stop(seconds(self.costs.repartition))


class Oobleck(Repartition):
    """With Oobleck's templates. Goodput is measured against the same fault-free job as for the other policies."""

    name = "oobleck"

    def rate(self, workers: int) -> Rate | None:
        return self.planned.templates(workers)


# -- OpenReCycle: at each failure and return the option that trains most until the next change --------

WAIT = "wait"


class Best(GridPolicy):
    """Chooses between re-routing, re-partitioning and dropping replicas, or lets a worker that returned wait.

    It knows only the past: it expects the next change after the mean time between the changes so far, with `prior`
    seconds counted as the first.
    """

    name = "ours"

    def __init__(self, planned: PlannedJob, costs: RecoveryCosts, *, prior: float = 600.0) -> None:
        super().__init__(planned, costs)
        if not 0 < prior < float("inf"):
            raise InputError("prior", prior, "seconds above 0")
        self.mode = self.ran = REROUTE  # mode: the option chosen last; ran: the one that trained last
        self.fresh = True
        self.places = Places(planned.job)  # for dropping replicas; in other modes workers may be at other places
        self.running = 0  # whole pipelines when training went on last
        self.away = False  # whether workers left their places then
        self.prior = prior
        self.changes = 0
        self._now = 0

    def rate(self, workers: int) -> Rate | None:
        return self._rate(self._quickest(workers) if self.fresh else self.mode, workers)

    def _rate(self, mode: str, workers: int) -> Rate | None:
        if mode == REPARTITION:
            return self.planned.repartitioned(workers)
        if mode == DROP:
            return self.planned.replicas(self.places.whole)
        return self.planned.rerouted(self.workers - workers)

    def _quickest(self, workers: int) -> str:
        rates = {mode: rate.per_second for mode in (REROUTE, REPARTITION, DROP) if (rate := self._rate(mode, workers))}
        return max(rates, key=lambda mode: rates[mode], default=REROUTE)

    def horizon(self, now: int) -> float:
        """Seconds until the next change, estimated from the past."""
        return (self.prior + now / SECOND) / (1 + self.changes)

    def changed(self, cluster: Cluster, change: MembershipChange, *, training: bool, paused: bool) -> Reaction:
        if self.started:
            self.changes += 1
        if not training and not paused:
            self.fresh = True
        self._now = cluster.now
        self.places.leave(change.lost)
        self.places.take(change.ready)
        reaction = super().changed(cluster, change, training=training, paused=paused)
        if paused and change.ready and not self.fresh and isinstance(reaction, KeepTraining):
            # With more workers, the option that the pause was for may no longer be the best.
            chosen = self.mode
            again = self.loss(self.used(len(self.active) + len(self.standby)), len(change.ready))
            if self.mode != chosen:
                return again
        return reaction

    def loss(self, left: int, replaced: int) -> Stop:
        seen = self.costs.detect + self.costs.recover
        copied = self.costs.rejoin if replaced else 0.0
        moved = self.costs.migrate if self.planned.moves(self.workers - left) else 0.0
        back = self.costs.repartition if self.ran == REPARTITION else 0.0
        pauses = {
            REROUTE: max(copied, moved, back),
            DROP: max(copied, self._home(), back),
            REPARTITION: max(copied, self.costs.repartition),
        }
        return self._go(self._options(left, {mode: seen + pause for mode, pause in pauses.items()}))

    def _home(self) -> float:
        """Seconds until workers that were moved are back at their places."""
        return self.costs.migrate if self.away else 0.0

    def iteration_end(self, cluster: Cluster) -> Reaction:
        grown = self.used(len(self.active) + len(self.standby))
        if grown <= len(self.active):
            return KeepTraining()
        moved = self.costs.repartition if self.mode == REPARTITION else 0.0
        pauses = {
            REROUTE: max(self.costs.rejoin, moved),
            DROP: max(self.costs.rejoin, self._home(), moved),
            REPARTITION: self.costs.repartition,
        }
        options = self._options(grown, pauses)
        now = self.planned.replicas(self.running) if self.mode == DROP else self.rate(len(self.active))
        if now is not None:
            options.append(Option(WAIT, 0.0, now.per_second))
        self._now = cluster.now
        if not options or self._best(options).name == WAIT:
            return KeepTraining()
        return self._go(options)

    def pace(self, cluster: Cluster) -> Pace | None:
        if self.fresh:
            # Nothing trained before, so nothing has to move.
            self.mode = self._quickest(self.used(len(self.active) + len(self.standby)))
            self.fresh = False
        self.ran, self.running = self.mode, self.places.whole
        made = super().pace(cluster)
        self.away = self.ran == REROUTE and self.planned.moves(self.workers - len(self.active))
        return made

    def _options(self, workers: int, pauses: dict[str, float]) -> list[Option]:
        found = [(mode, pause, self._rate(mode, workers)) for mode, pause in pauses.items()]
        return [Option(mode, pause, rate.per_second) for mode, pause, rate in found if rate is not None]

    def _go(self, options: list[Option]) -> Stop:
        if not options:
            return Stop(seconds(self.costs.detect))
        chosen = self._best(options)
        self.mode = chosen.name
        return Stop(seconds(chosen.pause))

    def _best(self, options: list[Option]) -> Option:
        """Chooses by the samples until the next change. Each option is also charged for its pause at that change."""
        again = dict.fromkeys((REROUTE, DROP), max(self.costs.rejoin, self.costs.migrate))
        again[REPARTITION] = self.costs.repartition
        again[WAIT] = again[self.mode]
        charged = {replace(option, pause=option.pause + again[option.name]): option for option in options}
        return charged[best_option(list(charged), self.horizon(self._now), 0.0)[0]]


# -- by the name that `--policy` takes ---------------------------------------------------------------

PLANNED: dict[str, Callable[[PlannedJob, RecoveryCosts], Policy]] = {
    "fault-free": FaultFree,
    "recycle": ReCycle,
    "oobleck": Oobleck,
    "repartition": Repartition,
    "drop-replica": DropReplica,
    "checkpoint-restart": CheckpointRestart,
    "varuna": Varuna,
    "bamboo": Bamboo,
    "ours": Best,
}
# The policies that choose a partition of the layers.
CUT_ANEW = ("oobleck", "repartition", "varuna", "ours")


def planned_policy(name: str, planned: PlannedJob, costs: RecoveryCosts, *, spares: int = 1) -> Policy:
    """Make a new policy for one run. Raises InputError."""
    if name == "spares":
        return SpareWorkers(planned, costs, spares)
    if name not in PLANNED:
        raise InputError("--policy", name, "with a profile one of " + ", ".join((*PLANNED, "spares")))
    if name in CUT_ANEW and name != Best.name:  # Best has other options too
        planned.check_layers(name)
    return PLANNED[name](planned, costs)
