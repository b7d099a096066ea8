"""What is to be planned: the grid, the micro-batches, the op times, the failures, the limits.

A profile is what the ops of a stage or a layer take: durations and bytes. Durations are floats of the user's unit
outside; inside they are integers of a *tick*, the largest decimal fraction of that unit in which every duration is
whole (`Job.ticks_per_unit`). All schedule arithmetic is therefore exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from openrecycle.planner.jobs.errors import InfeasibleError, InputError, check_whole
from openrecycle.planner.jobs.words import names, number_of

# -- what the ops of a stage or a layer take ----------------------------------------------------

MAX_DECIMALS = 6
# For the best partition of the layers, where numbers could be given.
AUTO = "auto"
MAX_BYTES = 1 << 60
# Of stages that are a little unlike: their times are a plain one's times one of these.
UNEVEN_SCALES = (0.9, 1.0, 1.1, 1.2)
# Of the fields of a StageProfile those that are times, beside its reductions, and those that are bytes.
TIMES = ("forward", "input_backward", "weight_backward", "optimizer")
SIZES = ("activation_bytes", "weight_backward_bytes", "weight_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class StageProfile:
    """Op times of one stage, in the job's time unit, and what it keeps in memory, in bytes.

    forward F, input_backward I, weight_backward W, optimizer O (reduction and step).
    reductions: what the gradients' reduction adds to O, by the number of living peers: of 1 peer
    first, of the whole stage last. Empty: nothing.
    activation_bytes: of one micro-batch, from F's start to I's (or B's) end. weight_backward_bytes:
    what W needs of it, from I's end to W's end. weight_bytes, optimizer_bytes: kept throughout.
    """

    forward: float = 1.0
    input_backward: float = 1.0
    weight_backward: float = 1.0
    optimizer: float = 0.0
    reductions: tuple[float, ...] = ()
    activation_bytes: int = 0
    weight_backward_bytes: int = 0
    weight_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def counts_bytes(self) -> bool:
        """Is anything known of what it keeps in memory?"""
        return bool(self.fixed_bytes or self.activation_bytes or self.weight_backward_bytes)

    @property
    def fixed_bytes(self) -> int:
        """What a worker holds throughout: weights and optimizer state."""
        return self.weight_bytes + self.optimizer_bytes

    def micro_batch_bytes(self, *, splits: bool) -> int:
        """The larger part of a micro-batch: what I needs, or, where B is split, what W needs."""
        return max(self.activation_bytes, self.weight_backward_bytes if splits else 0)

    def least_bytes(self, *, splits: bool) -> int:
        """What a micro-batch takes at any time, from its F's start to its W's (or B's) end."""
        return min(self.activation_bytes, self.weight_backward_bytes) if splits else self.activation_bytes

    def check(self, where: str) -> None:
        for name in TIMES:
            check_duration(f"{where}.{name}", getattr(self, name))
        if self.forward <= 0:
            raise InputError(f"{where}.forward", self.forward, "a duration above 0")
        if self.input_backward + self.weight_backward <= 0:
            raise InputError(f"{where}.input_backward + weight_backward", 0, "a backward above 0")
        for n, reduction in enumerate(self.reductions):
            check_duration(f"{where}.reductions[{n}]", reduction)
        for name in SIZES:
            check_bytes(f"{where}.{name}", getattr(self, name))


@dataclass(frozen=True)
class LayerProfile(StageProfile):
    """The same of one layer; a stage takes what its layers take together.

    transfer: of what is sent if a stage ends behind this layer, activations forward; backward_transfer: of the
    gradients back, as long unless given.
    """

    transfer: float = 0.0
    backward_transfer: float | None = None

    def __post_init__(self) -> None:
        if self.backward_transfer == self.transfer:  # one spelling, so that equal layers are equal
            object.__setattr__(self, "backward_transfer", None)

    @property
    def back(self) -> float:
        """The transfer of gradients."""
        return self.transfer if self.backward_transfer is None else self.backward_transfer

    def check(self, where: str) -> None:
        super().check(where)
        check_duration(f"{where}.transfer", self.transfer)
        check_duration(f"{where}.backward_transfer", self.back)


def joined(layers: Sequence[StageProfile]) -> StageProfile:
    """The stage that these layers make, to the planner's decimals."""
    most = max(len(layer.reductions) for layer in layers)
    # Counted from the end, where all peers live.
    reductions = tuple(
        _sum(layer.reductions[-n] for layer in layers if n <= len(layer.reductions)) for n in range(most, 0, -1)
    )
    times: dict[str, Any] = {name: _sum(getattr(layer, name) for layer in layers) for name in TIMES}
    sizes: dict[str, Any] = {name: sum(getattr(layer, name) for layer in layers) for name in SIZES}
    return StageProfile(**times, reductions=reductions, **sizes)


def _sum(values: Iterable[float]) -> float:
    return round(math.fsum(values), MAX_DECIMALS)


def balanced(work: Sequence[float], stages: int) -> tuple[int, ...] | None:
    """Layers per stage, contiguous, so that the largest sum of a stage's `work` is the least.

    None where there are fewer layers than stages. That sum is found by bisection over those that occur, as a
    greedy fill says at once whether one suffices.
    """
    if not 1 <= stages <= len(work):
        return None
    sums = [0.0]
    for layer in work:
        sums.append(sums[-1] + layer)
    least = max(work)
    candidates = sorted({least, *(b - a for i, a in enumerate(sums) for b in sums[i + 1 :] if b - a > least)})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _fill(work, candidates[middle], stages) is None:
            low = middle + 1
        else:
            high = middle
    return _fill(work, candidates[low], stages)


def _fill(work: Sequence[float], limit: float, stages: int) -> tuple[int, ...] | None:
    """Stages filled one after the other up to `limit`, each leaving a layer for those that follow."""
    counts: list[int] = []
    at = 0
    for stage in range(stages):
        left = stages - 1 - stage
        taken, total = 0, 0.0
        while at < len(work) - left and total + work[at] <= limit * (1 + 1e-12):
            total += work[at]
            at += 1
            taken += 1
        if not taken:
            return None
        counts.append(taken)
    return tuple(counts) if at == len(work) else None


class StageTicks(NamedTuple):
    """A StageProfile in ticks. `backward` is the coupled B = I + W."""

    forward: int
    input_backward: int
    weight_backward: int
    optimizer: int

    @property
    def backward(self) -> int:
        return self.input_backward + self.weight_backward

    @property
    def work(self) -> int:
        """Ticks of compute one micro-batch needs on this stage: F + I + W."""
        return self.forward + self.input_backward + self.weight_backward

    @property
    def by_kind(self) -> dict[str, int]:
        """Of each kind of op."""
        forward, backward, weight, optimizer = self
        return {"F": forward, "I": backward, "W": weight, "B": backward + weight, "O": optimizer}

    def at_speed(self, speed: float) -> StageTicks:
        """The op times of a worker of that speed (0.5: half as fast), rounded up."""
        exact = Fraction(Decimal(repr(speed)))
        return StageTicks._make(math.ceil(ticks / exact) for ticks in self)


def parse_partition(text: str, *, field: str = "partition") -> tuple[int, ...]:
    """Layers per stage, `11,11,12`, to numbers; () for an empty text. Raises InputError."""
    if not re.fullmatch(r"([0-9]{1,5}(,[0-9]{1,5})*)?", text.replace(" ", "")):
        raise InputError(field, text, "numbers of layers, one per stage, with commas between: 11,11,11,11")
    return tuple(map(int, filter(None, text.replace(" ", "").split(","))))


def parse_durations(text: str) -> dict[str, float]:
    """Reads `F=1,I=1,W=1,O=0,transfer=0` (any subset). Raises InputError."""
    field, known = "--durations", ("F", "I", "W", "O", "transfer")
    out: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, raw = part.partition("=")
        if key not in known:
            raise InputError(field, part, "comma-separated NAME=NUMBER with NAME one of " + ", ".join(known))
        if key in out:
            raise InputError(field, part, f"each name once; {key} is there already")
        value = number_of(raw.strip())
        if value is None:
            raise InputError(field, part, f"{key}=NUMBER, such as {key}=1.5")
        check_duration(f"{field} {key}", value)
        out[key] = value
    return out


def check_duration(field: str, value: float) -> None:
    # Of an int, however large, only the range matters: it may not fit into a float.
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not finite:
        raise InputError(field, value, "a finite number")
    if not 0 <= value <= 1e9:
        raise InputError(field, value, "a duration from 0 to 1e9")
    if decimals(value) > MAX_DECIMALS:
        raise InputError(field, value, f"at most {MAX_DECIMALS} decimals")


def check_bytes(field: str, value: int, *, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_BYTES:
        raise InputError(field, value, f"a whole number of bytes from {least} to {MAX_BYTES}")


def decimals(value: float) -> int:
    exponent = Decimal(repr(float(value))).normalize().as_tuple().exponent
    return max(0, -int(exponent))


# -- what is to be planned ----------------------------------------------------------------------

# Refused before memory is taken: 3 ops per micro-batch and stage. An op takes up to BYTES_PER_OP while it is
# planned, made a document and printed, measured as the growth of the process's peak; so no plan takes more than 8 GB.
BYTES_PER_OP = 2_000
MAX_OPS = 4_000_000
SLOWEST, FASTEST = 0.01, 100.0
# Of an iteration, were one op to wait for the other: a document's floats say exactly which tick is meant, and what is
# added up stays within 64 bits.
MAX_TICKS = 1 << 51
MAX_LAYERS = 512

# What a plan was chosen from, and its lower bound is over: all schedules of its problem; those of every partition of
# the layers; those of every partition and of every number of workers per stage that the living can staff.
Over = Literal["schedules", "partitions", "layouts"]
# May layers change their stage while the job runs: when it pays, never, or whenever another partition is better?
MayMove = Literal["auto", "never", "always"]

_WORKER = re.compile(r"W([0-9]{1,6})_([0-9]{1,6})")


class Worker(NamedTuple):
    """One cell of the grid. `str(Worker(1, 2)) == "W1_2"`: pipeline 1, stage 2."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"W{self.pipeline}_{self.stage}"

    @classmethod
    def parse(cls, text: str, *, field: str = "worker") -> Worker:
        """Raises InputError unless `text` reads W<pipeline>_<stage>."""
        match = _WORKER.fullmatch(text.strip())
        if not match:
            raise InputError(field, text, "a worker such as W1_2 (pipeline 1, stage 2)")
        return cls(int(match[1]), int(match[2]))


class WorkerRank(NamedTuple):
    """One process of a job: a rank of a worker. stage: alike of those that hold the same."""

    worker: Worker
    rank: int = 0

    @property
    def stage(self) -> tuple[int, int]:
        return self.worker.stage, self.rank

    def __str__(self) -> str:
        return f"{self.worker}.{self.rank}" if self.rank else str(self.worker)


class Technique(StrEnum):
    """The most that a plan may use; each includes the ones before it."""

    FAULT_FREE = "fault-free"
    ADAPTIVE = "adaptive"
    DECOUPLED = "decoupled"
    STAGGERED = "staggered"

    @property
    def reroutes(self) -> bool:
        return self is not Technique.FAULT_FREE

    @property
    def splits(self) -> bool:
        """May B be split into I and W?"""
        return self in (Technique.DECOUPLED, Technique.STAGGERED)

    @property
    def staggers(self) -> bool:
        """Does each stage step on its own, without a global barrier?"""
        return self is Technique.STAGGERED

    @classmethod
    def of(cls, text: str, *, field: str = "--technique") -> Technique:
        try:
            return cls(text)
        except ValueError:
            raise InputError(field, text, "one of " + ", ".join(t.value for t in cls)) from None


@dataclass(frozen=True)
class Job:
    """A grid of `pipelines` x `stages` workers; `micro_batches` enter each pipeline per iteration.

    profiles: one StageProfile per stage. transfers: one time per stage boundary (stages - 1 of
    them), for activations forward; backward_transfers: for gradients backward, the same unless
    given. Transfers overlap with compute.
    time_unit: what one unit of the durations is called ("slot", "ms"); it is a label only.
    capacity_bytes: memory of one worker, by stage; empty when not known.
    speeds: of the workers that aren't nominal: 0.5 takes twice as long for F, I, W and the step
    (not the reduction, which all peers end together). Workers outside the grid are left out, so
    that a job of fewer pipelines is made by `replace(job, pipelines=...)`.
    layers: where stages can be cut anew; profiles and transfers then follow from them and the partition, and
    are never set apart. partition: layers per stage, in order. home: the partition without failures, which plans
    are compared with; unless given, what `partition` says, and where that says nothing, the one that spreads F, I
    and W most evenly.
    Raises InputError for sizes or durations that make no job.
    """

    pipelines: int
    stages: int
    micro_batches: int
    profiles: tuple[StageProfile, ...] = field(default=())
    transfers: tuple[float, ...] = field(default=())
    time_unit: str = "slot"
    backward_transfers: tuple[float, ...] = ()
    capacity_bytes: tuple[int, ...] = ()
    speeds: tuple[tuple[Worker, float], ...] = ()
    layers: tuple[LayerProfile, ...] = ()
    partition: tuple[int, ...] = ()
    home: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self.pipelines, self.stages, self.micro_batches)
        self._lay_out()
        if len(self.time_unit) > 20 or not self.time_unit.isprintable():
            raise InputError("time_unit", self.time_unit, "at most 20 printable characters")
        if not self.profiles:
            object.__setattr__(self, "profiles", (StageProfile(),) * self.stages)
        if not self.transfers:
            object.__setattr__(self, "transfers", (0.0,) * (self.stages - 1))
        if len(self.profiles) != self.stages:
            raise InputError("profiles", len(self.profiles), f"one per stage, {self.stages} in all")
        if len(self.transfers) != self.stages - 1:
            raise InputError("transfers", len(self.transfers), f"one per stage boundary, {self.stages - 1} in all")
        if not self.backward_transfers:
            object.__setattr__(self, "backward_transfers", self.transfers)
        if len(self.backward_transfers) != self.stages - 1:
            raise InputError(
                "backward_transfers", len(self.backward_transfers), f"one per stage boundary, {self.stages - 1} in all"
            )
        checked: set[int] = set()  # thousands of stages often have one and the same
        for s, profile in enumerate(self.profiles):
            if id(profile) in checked:
                continue
            checked.add(id(profile))
            profile.check(f"profiles[{s}]")
            self._check_reductions(f"profiles[{s}]", profile)
        for name in ("transfers", "backward_transfers"):
            for s, transfer in enumerate(getattr(self, name)):
                check_duration(f"{name}[{s}]", transfer)
        if len(self.capacity_bytes) not in (0, self.stages):
            raise InputError("capacity_bytes", len(self.capacity_bytes), f"one per stage, {self.stages} in all")
        for s, capacity in enumerate(self.capacity_bytes):
            check_bytes(f"capacity_bytes[{s}]", capacity, least=1)
        self._check_speeds()
        self._check_length()

    def _lay_out(self) -> None:
        """Partition, home, profiles and transfers of a job that has layers."""
        if not self.layers:
            for name in ("partition", "home"):
                if getattr(self, name):
                    raise InputError(name, getattr(self, name), "nothing for a job without layers")
            return
        if len(self.layers) > MAX_LAYERS:
            raise InputError("layers", len(self.layers), f"at most {MAX_LAYERS} layers")
        checked: set[int] = set()
        for k, layer in enumerate(self.layers):
            if id(layer) not in checked:
                checked.add(id(layer))
                layer.check(f"layers[{k}]")
                self._check_reductions(f"layers[{k}]", layer)
        whole = joined(self.layers)
        for name in TIMES:
            if getattr(whole, name) > 1e9:
                raise InputError(f"layers, {name} in all", getattr(whole, name), "a duration from 0 to 1e9")
        if not self.partition:
            even = balanced([p.forward + p.input_backward + p.weight_backward for p in self.layers], self.stages)
            if even is None:
                raise InputError("layers", len(self.layers), f"at least one for each of the {self.stages} stages")
            object.__setattr__(self, "partition", even)
        object.__setattr__(self, "partition", self.check_partition(self.partition))
        home = self.check_partition(self.home, field="home") if self.home else self.partition
        object.__setattr__(self, "home", home)
        given = self.profiles, self.transfers, self.backward_transfers or self.transfers
        self._cut()
        for name, value in zip(("profiles", "transfers", "backward_transfers"), given, strict=True):
            if value and value != getattr(self, name):
                raise InputError(name, len(value), "those that the layers and the partition give, or none")

    def _cut(self) -> None:
        """Derives what follows from layers and partition."""
        profiles: list[StageProfile] = []
        ends: list[LayerProfile] = []
        known: dict[tuple[int, ...], StageProfile] = {}  # stages of equal layers are one object: see job_doc
        at = 0
        for count in self.partition:
            members = self.layers[at : at + count]
            key = tuple(map(id, members))
            if key not in known:
                known[key] = joined(members)
            profiles.append(known[key])
            ends.append(members[-1])
            at += count
        object.__setattr__(self, "profiles", tuple(profiles))
        object.__setattr__(self, "transfers", tuple(layer.transfer for layer in ends[:-1]))
        object.__setattr__(self, "backward_transfers", tuple(layer.back for layer in ends[:-1]))

    def check_partition(self, partition: Iterable[int], *, field: str = "partition") -> tuple[int, ...]:
        """Returns it; raises InputError where it is none of this job."""
        given = tuple(partition)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in given)
        if not self.layers:
            raise InputError(field, given, "nothing for a job without layers")
        if not whole or len(given) != self.stages or sum(given) != len(self.layers):
            what = f"{self.stages} numbers of at least 1 that add up to {len(self.layers)} layers"
            raise InputError(field, ",".join(map(str, given)), what)
        return given

    def with_partition(self, partition: Iterable[int]) -> Job:
        """The same job cut so; its home stays what it is. Raises InputError."""
        given = self.check_partition(partition)
        if given == self.partition:
            return self
        made = object.__new__(Job)  # (what has been checked once is not checked again: many are compared)
        for f in fields(self):
            object.__setattr__(made, f.name, getattr(self, f.name))
        object.__setattr__(made, "partition", given)
        made._cut()
        return made

    def begun_with(self, partition: tuple[int, ...]) -> Job:
        """Cut so from its start: that is its home. Raises InputError."""
        return replace(self, partition=partition, home=partition, profiles=(), transfers=(), backward_transfers=())

    @property
    def at_home(self) -> Job:
        """As it is cut without failures."""
        return self.with_partition(self.home) if self.layers else self

    def as_stages(self) -> Job:
        """The same with stages that can't be cut."""
        return replace(self, layers=(), partition=(), home=()) if self.layers else self

    def _check_reductions(self, where: str, profile: StageProfile) -> None:
        if 0 < len(profile.reductions) < self.pipelines:
            raise InputError(
                f"{where}.reductions",
                len(profile.reductions),
                f"one for each number of living peers, {self.pipelines} in all",
            )

    @property
    def longest(self) -> float:
        """All ops of an iteration one after the other, at the slowest speed, in its time unit."""
        each = sum(p.forward + p.input_backward + p.weight_backward for p in self.profiles)
        each += sum(self.transfers) + sum(self.backward_transfers)
        steps = sum(p.optimizer + max(p.reductions, default=0.0) for p in self.profiles)
        slowest = min((speed for _, speed in self.speeds), default=1.0)
        return self.pipelines * (self.micro_batches * each + steps) / min(1.0, slowest)

    def _check_length(self) -> None:
        longest = self.longest
        if longest * 10**MAX_DECIMALS > MAX_TICKS and longest * self.ticks_per_unit > MAX_TICKS:
            why = ", since the shortest has so many decimals" if self.ticks_per_unit > 1 else ""
            most = f"at most {MAX_TICKS / self.ticks_per_unit:.3g}{why}"
            raise InputError("all ops of an iteration together", longest, most)

    def _check_speeds(self) -> None:
        """Puts them in one spelling, so that equal jobs are equal."""
        for worker, speed in self.speeds:
            known = not isinstance(speed, bool) and isinstance(speed, (int, float)) and math.isfinite(speed)
            if not known or not SLOWEST <= speed <= FASTEST:
                raise InputError(f"speeds.{worker}", speed, f"a number from {SLOWEST:g} to {FASTEST:g} (1 is nominal)")
        inside = {w: s for w, s in self.speeds if w.pipeline < self.pipelines and w.stage < self.stages and s != 1}
        object.__setattr__(self, "speeds", tuple(sorted(inside.items())))

    @classmethod
    def uniform(
        cls,
        pipelines: int,
        stages: int,
        micro_batches: int,
        *,
        durations: Mapping[str, float] | None = None,
        time_unit: str = "slot",
        layers: int = 0,
        partition: tuple[int, ...] = (),
    ) -> Job:
        """A job whose stages are alike, or, with so many layers, those. `durations`, of each, has any of the keys F, I,
        W, O, transfer."""
        times = {"F": 1.0, "I": 1.0, "W": 1.0, "O": 0.0, "transfer": 0.0, **(durations or {})}
        check_sizes(pipelines, stages, micro_batches)  # before a tuple per stage is made
        if layers:
            layer = LayerProfile(times["F"], times["I"], times["W"], times["O"], transfer=times["transfer"])
            if isinstance(layers, bool) or not isinstance(layers, int) or not stages <= layers <= MAX_LAYERS:
                raise InputError("layers", layers, f"a whole number from {stages}, one for each stage, to {MAX_LAYERS}")
            many = (layer,) * layers
            return cls(pipelines, stages, micro_batches, time_unit=time_unit, layers=many, partition=partition)
        profile = StageProfile(times["F"], times["I"], times["W"], times["O"])
        return cls(
            pipelines,
            stages,
            micro_batches,
            profiles=(profile,) * stages,
            transfers=(times["transfer"],) * (stages - 1),
            time_unit=time_unit,
        )

    @property
    def ops(self) -> int:
        """Of an iteration; see `count_ops`."""
        return count_ops(self.pipelines, self.stages, self.micro_batches)

    @cached_property
    def ticks_per_unit(self) -> int:
        """Smallest power of ten that makes every duration a whole number of ticks, whatever the partition."""
        values: list[float] = [*self.transfers, *self.backward_transfers]
        for layer in set(self.layers):
            values += [layer.transfer, layer.back]
        for p in set(self.layers or self.profiles):
            values += [*(getattr(p, name) for name in TIMES), *p.reductions]
        places: int = max((decimals(v) for v in set(values)), default=0)
        return int(10**places)

    @cached_property
    def ticks(self) -> tuple[StageTicks, ...]:
        """The profiles in ticks, one per stage, at nominal speed and without the reductions.

        `Problem.ticks` and `Problem.worker_ticks` have both.
        """
        scale = self.ticks_per_unit
        return tuple(
            StageTicks(*(round(getattr(profile, name) * scale) for name in TIMES)) for profile in self.profiles
        )

    @cached_property
    def turn_ticks(self) -> tuple[int, ...]:
        """By stage, F's and I's from there to the last: the time in which a micro-batch turns round."""
        back = accumulate((t.forward + t.input_backward for t in reversed(self.ticks)), initial=0)
        return tuple(back)[:0:-1]

    @cached_property
    def transfer_ticks(self) -> tuple[int, ...]:
        """Transfer time of activations in ticks; index s is from stage s to s + 1."""
        return tuple(round(t * self.ticks_per_unit) for t in self.transfers)

    @cached_property
    def backward_transfer_ticks(self) -> tuple[int, ...]:
        """Transfer time of gradients in ticks; index s is from stage s + 1 to s."""
        return tuple(round(t * self.ticks_per_unit) for t in self.backward_transfers)

    def units(self, ticks: int | float) -> float | int:
        """Ticks in the user's unit; whole numbers come back as int."""
        value = ticks / self.ticks_per_unit
        return int(value) if value == int(value) else value

    def workers(self) -> Iterable[Worker]:
        """Every cell of the grid, pipeline by pipeline."""
        return (Worker(p, s) for p in range(self.pipelines) for s in range(self.stages))

    def check_worker(self, worker: Worker, *, field: str = "worker") -> Worker:
        """Returns `worker`; raises InputError when the grid has no such cell."""
        if not (0 <= worker.pipeline < self.pipelines and 0 <= worker.stage < self.stages):
            raise InputError(
                field, str(worker), f"a worker of the grid, W0_0 to W{self.pipelines - 1}_{self.stages - 1}"
            )
        return worker


# That a limit may name, and how it is written.
MOST_ACTIVATIONS = 10**9 - 1
_NUMBER_HELD = re.compile(f"[0-9]{{1,{len(str(MOST_ACTIVATIONS))}}}")


@dataclass(frozen=True)
class MemoryLimit:
    """How many activations one worker may hold at once (F's start to W's end), by stage.

    `1f1b`: stages - s on stage s; `uniform`: stages on every stage; `none`; a number; or `bytes`:
    as many as the job's capacity_bytes hold beside weights and optimizer state.
    """

    text: str

    @classmethod
    def parse(cls, text: str, *, field: str = "--memory") -> MemoryLimit:
        text = text.strip().lower()
        named = text in ("1f1b", "uniform", "none", "bytes")
        if not named and (not _NUMBER_HELD.fullmatch(text) or int(text) < 1):
            whole = f"a whole number from 1 to {MOST_ACTIVATIONS}"
            raise InputError(field, text, f"1f1b, uniform, none, bytes, or {whole}")
        return cls(text)

    def limits(self, job: Job, technique: Technique = Technique.STAGGERED) -> tuple[int | None, ...]:
        """One limit per stage; None where there is none.

        `bytes`: so many micro-batches as fit if each took its larger part, that for I or that for
        W, all along; where B is not split, that for I. Raises InfeasibleError when not even one
        does, InputError when the job does not say what a worker holds.
        """
        if self.text == "none":
            return (None,) * job.stages
        if self.text == "bytes":
            return tuple(_bytes_limits(job, s, technique)[0] for s in range(job.stages))
        if self.text == "1f1b":
            return tuple(job.stages - s for s in range(job.stages))
        count = job.stages if self.text == "uniform" else int(self.text)
        return (count,) * job.stages

    def most(self, job: Job, technique: Technique) -> tuple[tuple[int | None, int | None], ...]:
        """By stage (micro-batches whose I has not ended, micro-batches in all): more can be held in no way.

        These are the limits, but for `bytes` where B is split: a micro-batch takes what W needs of it only from I's
        end on, and what I needs only until then.
        """
        if self.text == "bytes":
            return tuple(_bytes_limits(job, s, technique)[1:] for s in range(job.stages))
        return tuple((limit, limit) for limit in self.limits(job, technique))


class StageRoom(NamedTuple):
    """What a worker of a stage may hold: `capacity`, of which a micro-batch takes `need` from F's start to I's (or B's)
    end, and `keep` from there to W's end. All 0 where there is no limit."""

    capacity: int
    need: int
    keep: int

    def beside(self, ahead: int, count: int) -> int:
        """How many micro-batches, at most `count`, there is room for behind the end of their I, beside so many before
        it; -1: not even for those."""
        left = self.capacity - ahead * self.need
        if left < 0:
            return -1
        return count if self.keep == 0 else min(count, left // self.keep)


@dataclass(frozen=True)
class Problem:
    """One planning question: this job, with these workers dead, this technique and memory limit.

    Raises InputError or InfeasibleError when no plan can exist.
    """

    job: Job
    failed: frozenset[Worker] = frozenset()
    technique: Technique = Technique.STAGGERED
    memory: MemoryLimit = MemoryLimit("uniform")

    def __post_init__(self) -> None:
        for worker in self.failed:
            self.job.check_worker(worker, field="failed")
        if self.failed and not self.technique.reroutes:
            raise InputError(
                "--technique", self.technique.value, "adaptive, decoupled or staggered when a worker has failed"
            )
        for stage in range(self.job.stages):
            if not self.living_peers(stage):
                raise InfeasibleError(f"stage {stage} has no living worker", self._remedy(stage))
        if self.memory.text == "bytes":
            _ = self.limits  # raises

    def _remedy(self, stage: int) -> str:
        """What would give `stage` a living worker."""
        peers = [f"W{pipeline}_{stage}" for pipeline in range(self.job.pipelines)]
        back = f"bring back {'one of ' if len(peers) > 1 else ''}{names(peers)}"
        donor = max(range(self.job.stages), key=lambda s: len(self.living_peers(s)))
        if len(self.living_peers(donor)) < 2:
            return back
        return f"{back}, or migrate a worker: 1 migration from stage {donor} would fix it"

    def living_peers(self, stage: int) -> tuple[int, ...]:
        """Pipelines whose worker of `stage` lives, ascending."""
        return self._living[stage]

    @cached_property
    def _living(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(p for p in range(self.job.pipelines) if Worker(p, s) not in self.failed)
            for s in range(self.job.stages)
        )

    @cached_property
    def limits(self) -> tuple[int | None, ...]:
        """In micro-batches: whatever keeps to them, fits."""
        return self.memory.limits(self.job, self.technique)

    @cached_property
    def most_held(self) -> tuple[tuple[int | None, int | None], ...]:
        """What bounds reckon with: nothing that exceeds it fits. See MemoryLimit.most."""
        return self.memory.most(self.job, self.technique)

    @property
    def limits_are_exact(self) -> bool:
        """Does nothing fit but what keeps to the limits?"""
        return all(limit == held for limit, (_, held) in zip(self.limits, self.most_held, strict=True))

    @cached_property
    def room(self) -> tuple[StageRoom, ...]:
        """By stage, in micro-batches; in bytes, beside weights and optimizer state, where those alone are exact."""
        if self.limits_are_exact:
            return tuple(StageRoom(0, 0, 0) if limit is None else StageRoom(limit, 1, 1) for limit in self.limits)
        stages = zip(self.job.profiles, self.job.capacity_bytes, strict=True)
        return tuple(
            StageRoom(capacity - p.fixed_bytes, p.activation_bytes, p.weight_backward_bytes) for p, capacity in stages
        )

    @cached_property
    def ticks(self) -> tuple[StageTicks, ...]:
        """Op times per stage at nominal speed, in ticks; O with the reduction among the living peers."""
        return tuple(
            t._replace(optimizer=t.optimizer + self._reduction(s)) if self.job.profiles[s].reductions else t
            for s, t in enumerate(self.job.ticks)
        )

    def _reduction(self, stage: int) -> int:
        """Ticks. The last number is that of the whole stage, also where one pipeline stands for all."""
        reductions = self.job.profiles[stage].reductions
        dead = self.job.pipelines - len(self.living_peers(stage))
        return round(reductions[len(reductions) - 1 - dead] * self.job.ticks_per_unit) if reductions else 0

    def worker_ticks(self, worker: Worker) -> StageTicks:
        """Op times of one worker at its own speed, in ticks; O is its step and the reduction."""
        return self._own_ticks.get(worker) or self.ticks[worker.stage]

    @cached_property
    def _own_ticks(self) -> dict[Worker, StageTicks]:
        """Of the workers that aren't nominal."""
        out = {}
        for worker, speed in self.job.speeds:
            own = self.job.ticks[worker.stage].at_speed(speed)
            out[worker] = own._replace(optimizer=own.optimizer + self._reduction(worker.stage))
        return out

    @cached_property
    def fastest(self) -> tuple[StageTicks, ...]:
        """By stage the least F, I and W of any living peer, and the longest O, with which the stage ends."""
        if not self.job.speeds:
            return self.ticks
        out = []
        for stage in range(self.job.stages):
            peers = [self.worker_ticks(Worker(p, stage)) for p in self.living_peers(stage)]
            least = StageTicks._make(map(min, zip(*peers, strict=True)))
            out.append(least._replace(optimizer=max(t.optimizer for t in peers)))
        return tuple(out)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """By stage, when its first F can start at the earliest: F's and transfers of all stages above it."""
        way = (t.forward + wire for t, wire in zip(self.fastest, self.job.transfer_ticks, strict=False))
        return tuple(accumulate(way, initial=0))

    @cached_property
    def longest_optimizer(self) -> int:
        """Ticks of the longest O of any living worker."""
        return max(t.optimizer for t in self.fastest)

    def living_workers(self) -> list[Worker]:
        return [w for w in self.job.workers() if w not in self.failed]


def count_ops(pipelines: int, stages: int, micro_batches: int) -> int:
    """F, I and W of every micro-batch on every stage; steps are left out."""
    return 3 * pipelines * stages * micro_batches


def check_sizes(pipelines: int, stages: int, micro_batches: int) -> None:
    """Refuses what is no size, and what would not fit in memory, before any is taken."""
    for name, value in (("pipelines", pipelines), ("stages", stages), ("micro_batches", micro_batches)):
        check_whole(name, value, 1)
    ops = count_ops(pipelines, stages, micro_batches)
    if ops > MAX_OPS:
        most = f"at most {MAX_OPS:,} ops, which take up to {MAX_OPS * BYTES_PER_OP / 1e9:.0f} GB"
        raise InputError("pipelines x stages x micro_batches x 3 ops", ops, most)


def _bytes_limits(job: Job, stage: int, technique: Technique) -> tuple[int | None, int | None, int | None]:
    """Micro-batches that a worker of `stage` may hold; see MemoryLimit.limits and MemoryLimit.most."""
    if not job.capacity_bytes:
        raise InputError("capacity_bytes", None, "bytes per worker in the job's profile, for memory limit bytes")
    profile, capacity = job.profiles[stage], job.capacity_bytes[stage]
    fixed, each = profile.fixed_bytes, profile.micro_batch_bytes(splits=technique.splits)
    remedy = f"give its workers at least {fixed + each:,} bytes each, or cut the model into smaller stages"
    if fixed > capacity:
        raise InfeasibleError(
            f"weights and optimizer state take {fixed:,} bytes on stage {stage}, which has {capacity:,}", remedy
        )
    if fixed + each > capacity:
        share = math.floor(100 * (capacity - fixed) / each) / 100
        raise InfeasibleError(f"memory holds {share:g} of one micro-batch on stage {stage}", remedy)
    parts = each, profile.activation_bytes, profile.least_bytes(splits=technique.splits)
    limit, ahead, most = ((capacity - fixed) // part if part else None for part in parts)
    return limit, ahead, most
