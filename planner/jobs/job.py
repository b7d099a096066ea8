"""The planning question: the grid, the micro-batches, the op times, the failures and the limits.

A profile says how long the ops of a stage or a layer take, and how many bytes it needs. Callers give durations as
floats of their own unit. The planner computes with integers of a *tick*: the largest decimal fraction of that unit in
which every duration is a whole number (`Job.ticks_per_unit`). So all schedule arithmetic is exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from openrecycle.planner.jobs.errors import InfeasibleError, InputError, as_number, as_whole, check_whole
from openrecycle.planner.jobs.words import names, number_of

# -- what the ops of a stage or a layer take ----------------------------------------------------

MAX_DECIMALS = 6
# Seconds of each unit of time that a profile may be in. Any other unit, such as a slot, is no unit of time.
SECONDS = {"min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
# Stands for the best partition of the layers, where a caller could give layers per stage instead.
AUTO = "auto"
MAX_BYTES = 1 << 60
# Factors on the op times, stage by stage, for an example job whose stages are slightly unequal.
UNEVEN_SCALES = (0.9, 1.0, 1.1, 1.2)
# The fields of a StageProfile that are times (but for `reductions`), and those that are bytes.
TIMES = ("forward", "input_backward", "weight_backward", "optimizer")
# The fields of a Job that are its size.
SHAPE = ("pipelines", "stages", "micro_batches")
SIZES = ("activation_bytes", "weight_backward_bytes", "weight_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class StageProfile:
    """Op times of one stage, in the job's time unit, and the memory that it needs, in bytes.

    forward is F, input_backward I, weight_backward W, optimizer O (the all-reduce of the gradients and the step).
    reductions: what the all-reduce adds to O, by the number of living peers: the first entry is for 1 peer, the last
    for all peers of the stage. Empty: the all-reduce adds nothing.
    activation_bytes: memory of one micro-batch from F's start to I's (or B's) end. weight_backward_bytes: what W needs
    of it, from I's end to W's end. weight_bytes, optimizer_bytes: held all the time.
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
        """Does the profile say anything about memory?"""
        return bool(self.fixed_bytes or self.activation_bytes or self.weight_backward_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that a worker holds all the time: weights and optimizer state."""
        return self.weight_bytes + self.optimizer_bytes

    def micro_batch_bytes(self, *, splits: bool) -> int:
        """Most bytes that a micro-batch holds at any time: what I or, where B is split, W needs."""
        return max(self.activation_bytes, self.weight_backward_bytes if splits else 0)

    def least_bytes(self, *, splits: bool) -> int:
        """Bytes that a micro-batch holds at the very least, at any time from its F's start to its W's (or B's) end."""
        return min(self.activation_bytes, self.weight_backward_bytes) if splits else self.activation_bytes

    def check(self, where: str) -> None:
        """Raises InputError. What is a number of NumPy's becomes a plain one."""
        for name in TIMES:
            object.__setattr__(self, name, check_duration(f"{where}.{name}", getattr(self, name)))
        if self.forward <= 0:
            raise InputError(f"{where}.forward", self.forward, "a duration above 0")
        if self.input_backward + self.weight_backward <= 0:
            raise InputError(f"{where}.input_backward + weight_backward", 0, "a backward above 0")
        reductions = tuple(check_duration(f"{where}.reductions[{n}]", time) for n, time in enumerate(self.reductions))
        object.__setattr__(self, "reductions", reductions)
        for name in SIZES:
            object.__setattr__(self, name, check_bytes(f"{where}.{name}", getattr(self, name)))


@dataclass(frozen=True)
class LayerProfile(StageProfile):
    """Op times and memory of one layer; a stage's profile is the sum over its layers (`joined`).

    transfer: time to send the activations forward if a stage ends behind this layer. backward_transfer: time to send
    the gradients back across the same boundary; the same unless given.
    """

    transfer: float = 0.0
    backward_transfer: float | None = None

    def __post_init__(self) -> None:
        if self.backward_transfer == self.transfer:  # one spelling, so that equal layers are equal
            object.__setattr__(self, "backward_transfer", None)

    @property
    def back(self) -> float:
        """Transfer time of the gradients."""
        return self.transfer if self.backward_transfer is None else self.backward_transfer

    def check(self, where: str) -> None:
        super().check(where)
        object.__setattr__(self, "transfer", check_duration(f"{where}.transfer", self.transfer))
        back = check_duration(f"{where}.backward_transfer", self.back)
        if self.backward_transfer is not None:
            object.__setattr__(self, "backward_transfer", back)


def joined(layers: Sequence[StageProfile]) -> StageProfile:
    """Add up the profiles of the layers of one stage, rounded to the decimals that the planner takes."""
    most = max(len(layer.reductions) for layer in layers)
    # Counted from the end, the entry for all peers alive: profiles may have lists of different length.
    reductions = tuple(
        _sum(layer.reductions[-n] for layer in layers if n <= len(layer.reductions)) for n in range(most, 0, -1)
    )
    times: dict[str, Any] = {name: _sum(getattr(layer, name) for layer in layers) for name in TIMES}
    sizes: dict[str, Any] = {name: sum(getattr(layer, name) for layer in layers) for name in SIZES}
    return StageProfile(**times, reductions=reductions, **sizes)


def _sum(values: Iterable[float]) -> float:
    return round(math.fsum(values), MAX_DECIMALS)


def balanced(work: Sequence[float], stages: int) -> tuple[int, ...] | None:
    """Cut the layers into contiguous stages so that the largest sum of `work` of a stage is as small as possible.

    Returns layers per stage, or None where there are fewer layers than stages. The smallest sum is found by bisection
    over all sums that occur: a greedy fill decides at once whether a given limit suffices.
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
    """Fill the stages one after the other up to `limit`, each leaving at least a layer for every stage behind it."""
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
        """Ticks by kind of op."""
        forward, backward, weight, optimizer = self
        return {"F": forward, "I": backward, "W": weight, "B": backward + weight, "O": optimizer}

    def at_speed(self, speed: float) -> StageTicks:
        """The op times of a worker of that speed (0.5: half as fast), rounded up."""
        exact = Fraction(Decimal(repr(speed)))
        return StageTicks._make(math.ceil(ticks / exact) for ticks in self)


def parse_partition(text: str, *, field: str = "partition") -> tuple[int, ...]:
    """Parse layers per stage, such as `11,11,12`; () for an empty text. Raises InputError."""
    if not re.fullmatch(r"([0-9]{1,5}(,[0-9]{1,5})*)?", text.replace(" ", "")):
        raise InputError(field, text, "numbers of layers, one per stage, with commas between: 11,11,11,11")
    return tuple(map(int, filter(None, text.replace(" ", "").split(","))))


def parse_durations(text: str) -> dict[str, float]:
    """Reads `F=1,I=1,W=1,O=0,transfer=0` (any subset). Raises InputError."""
    field = "--durations"
    out = named_numbers(text, ("F", "I", "W", "O", "transfer"), field=field)
    for key, value in out.items():
        check_duration(f"{field} {key}", value)
    return out


def named_numbers(text: str, known: Sequence[str], *, field: str) -> dict[str, float]:
    """Reads `NAME=NUMBER,NAME=NUMBER`, any subset of `known`, each once. Raises InputError."""
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
        out[key] = value
    return out


def check_duration(field: str, value: float) -> float:
    """Returns the plain number that `value` stands for. Raises InputError."""
    found = as_number(value)
    # An int may be too large for a float, so only its range is checked.
    if found is None or not (isinstance(found, int) or math.isfinite(found)):
        raise InputError(field, value, "a finite number")
    if not 0 <= found <= 1e9:
        raise InputError(field, value, "a duration from 0 to 1e9")
    if decimals(found) > MAX_DECIMALS:
        raise InputError(field, value, f"at most {MAX_DECIMALS} decimals")
    return found


def check_bytes(field: str, value: int, *, least: int = 0) -> int:
    """Returns the int that `value` stands for. Raises InputError."""
    found = as_whole(value)
    if found is None or not least <= found <= MAX_BYTES:
        raise InputError(field, value, f"a whole number of bytes from {least} to {MAX_BYTES}")
    return found


def decimals(value: float) -> int:
    exponent = Decimal(repr(float(value))).normalize().as_tuple().exponent
    return max(0, -int(exponent))


# -- what is to be planned ----------------------------------------------------------------------

# Jobs with more ops than MAX_OPS are refused before memory is taken. A job has 3 ops per micro-batch and stage. An op
# takes up to BYTES_PER_OP while it is planned, made a document and printed, measured as the growth of the process's
# peak; so no plan takes more than 8 GB.
BYTES_PER_OP = 2_000
MAX_OPS = 4_000_000
SLOWEST, FASTEST = 0.01, 100.0
# The most ticks of an iteration in which all ops run one after the other: below this, a document's floats tell
# neighbouring ticks apart, and sums stay within 64 bits.
MAX_TICKS = 1 << 51
MAX_LAYERS = 512

# The set that a plan was chosen from, and that its lower bound covers: all schedules of its problem; those of every
# partition of the layers; or those of every partition and of every number of workers per stage that the living can
# staff.
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
    @lru_cache(maxsize=1 << 14)  # every worker reads the names of all others after each death
    def parse(cls, text: str, *, field: str = "worker") -> Worker:
        """Raises InputError unless `text` reads W<pipeline>_<stage>."""
        match = _WORKER.fullmatch(text.strip())
        if not match:
            raise InputError(field, text, "a worker such as W1_2 (pipeline 1, stage 2)")
        return cls(int(match[1]), int(match[2]))


class WorkerRank(NamedTuple):
    """One process of a job: a rank of a worker. `stage` is equal for ranks that hold the same state."""

    worker: Worker
    rank: int = 0

    @property
    def stage(self) -> tuple[int, int]:
        return self.worker.stage, self.rank

    def __str__(self) -> str:
        return f"{self.worker}.{self.rank}" if self.rank else str(self.worker)


class Technique(StrEnum):
    """The means that a plan may use; each technique includes those of the ones before it."""

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

    profiles: one StageProfile per stage. transfers: one time per stage boundary (stages - 1 of them), for activations
    forward; backward_transfers: for gradients backward, the same unless given. Transfers overlap with compute.
    time_unit: the name of the unit of the durations ("slot", "ms"); it is a label only.
    capacity_bytes: memory of one worker, by stage; empty when not known.
    speeds: of the workers whose speed is not 1. A worker of speed 0.5 takes twice as long for F, I, W and the step, but
    not for the all-reduce, which all peers end together. Workers outside the grid are left out, so that
    `replace(job, pipelines=...)` makes a job of fewer pipelines.
    layers: given where the stages can be cut anew. Profiles and transfers are then derived from the layers and the
    partition, and can't be set on their own. partition: layers per stage, in order. home: the partition without
    failures, which plans are compared with. Unless given, it is `partition`, and where that is not given either, the
    one that spreads F, I and W most evenly.
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
        for name, size in zip(SHAPE, check_sizes(self.pipelines, self.stages, self.micro_batches), strict=True):
            object.__setattr__(self, name, size)
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
            times = tuple(check_duration(f"{name}[{s}]", time) for s, time in enumerate(getattr(self, name)))
            object.__setattr__(self, name, times)
        if len(self.capacity_bytes) not in (0, self.stages):
            raise InputError("capacity_bytes", len(self.capacity_bytes), f"one per stage, {self.stages} in all")
        capacity = tuple(check_bytes(f"capacity_bytes[{s}]", n, least=1) for s, n in enumerate(self.capacity_bytes))
        object.__setattr__(self, "capacity_bytes", capacity)
        self._check_speeds()
        self._check_length()

    def _lay_out(self) -> None:
        """Sets partition, home, profiles and transfers of a job that has layers."""
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
        """Derives profiles and transfers from layers and partition."""
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
        """Returns `partition` as a tuple; raises InputError where this job can't be cut so."""
        given = tuple(partition)
        counts = tuple(as_whole(n) or 0 for n in given)
        if not self.layers:
            raise InputError(field, given, "nothing for a job without layers")
        if min(counts, default=0) < 1 or len(counts) != self.stages or sum(counts) != len(self.layers):
            what = f"{self.stages} numbers of at least 1 that add up to {len(self.layers)} layers"
            raise InputError(field, ",".join(map(str, given)), what)
        return counts

    def with_partition(self, partition: Iterable[int]) -> Job:
        """Returns this job with another partition and the same home. Raises InputError."""
        given = self.check_partition(partition)
        if given == self.partition:
            return self
        made = object.__new__(Job)  # not checked again: the search for a partition makes many
        for f in fields(self):
            object.__setattr__(made, f.name, getattr(self, f.name))
        object.__setattr__(made, "partition", given)
        made._cut()
        return made

    def begun_with(self, partition: tuple[int, ...]) -> Job:
        """Returns this job with `partition` as both its partition and its home. Raises InputError."""
        return replace(self, partition=partition, home=partition, profiles=(), transfers=(), backward_transfers=())

    @property
    def at_home(self) -> Job:
        """The job with its home partition."""
        return self.with_partition(self.home) if self.layers else self

    def as_stages(self) -> Job:
        """Returns the job without its layers, so that its stages can't be cut anew."""
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
        """The time of all ops of an iteration one after the other at the slowest speed, in the job's time unit."""
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
        """Checks the speeds and brings them into one form (sorted, without those that are 1), so that equal jobs
        compare equal."""
        speeds = list[tuple[Worker, float]]()
        for worker, speed in self.speeds:
            found = as_number(speed)
            if found is None or not SLOWEST <= found <= FASTEST:
                raise InputError(f"speeds.{worker}", speed, f"a number from {SLOWEST:g} to {FASTEST:g} (1 is nominal)")
            speeds.append((worker, found))
        inside = {w: s for w, s in speeds if w.pipeline < self.pipelines and w.stage < self.stages and s != 1}
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
        """Makes a job whose stages are all alike or, if `layers` is given, one of so many equal layers. `durations` are
        those of a stage or of a layer; it has any of the keys F, I, W, O, transfer."""
        times = {"F": 1.0, "I": 1.0, "W": 1.0, "O": 0.0, "transfer": 0.0, **(durations or {})}
        # Before a tuple per stage is made.
        pipelines, stages, micro_batches = check_sizes(pipelines, stages, micro_batches)
        if layers:
            layer = LayerProfile(times["F"], times["I"], times["W"], times["O"], transfer=times["transfer"])
            count = as_whole(layers)
            if count is None or not stages <= count <= MAX_LAYERS:
                raise InputError("layers", layers, f"a whole number from {stages}, one for each stage, to {MAX_LAYERS}")
            many = (layer,) * count
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
        """Ops of an iteration; see `count_ops`."""
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
        """The profiles in ticks, one per stage, at nominal speed and without the all-reduce.

        `Problem.ticks` adds the all-reduce, `Problem.worker_ticks` the speed as well.
        """
        scale = self.ticks_per_unit
        return tuple(
            StageTicks(*(round(getattr(profile, name) * scale) for name in TIMES)) for profile in self.profiles
        )

    @cached_property
    def turn_ticks(self) -> tuple[int, ...]:
        """By stage, the sum of F and I from it to the last stage: a micro-batch comes back in this time."""
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
        """Converts ticks to the user's unit; whole numbers come back as int."""
        value = ticks / self.ticks_per_unit
        return int(value) if value == int(value) else value

    def workers(self) -> Iterable[Worker]:
        """Yields every cell of the grid, pipeline by pipeline."""
        return (Worker(p, s) for p in range(self.pipelines) for s in range(self.stages))

    def check_worker(self, worker: Worker, *, field: str = "worker") -> Worker:
        """Returns `worker`; raises InputError when the grid has no such cell."""
        if not (0 <= worker.pipeline < self.pipelines and 0 <= worker.stage < self.stages):
            raise InputError(
                field, str(worker), f"a worker of the grid, W0_0 to W{self.pipelines - 1}_{self.stages - 1}"
            )
        return worker


# The largest number that a limit may give, and the form in which it is written.
MOST_ACTIVATIONS = 10**9 - 1
_NUMBER_HELD = re.compile(f"[0-9]{{1,{len(str(MOST_ACTIVATIONS))}}}")


@dataclass(frozen=True)
class MemoryLimit:
    """How many activations one worker may hold at once (each from F's start to W's end), by stage.

    `1f1b`: stages - s on stage s; `uniform`: stages on every stage; `none`: no limit; a number: that many on every
    stage; `bytes`: as many as fit into the job's capacity_bytes beside weights and optimizer state.
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
        """Returns one limit per stage; None where there is none.

        `bytes` counts the micro-batches that fit if each takes its larger part (what I needs, or what W needs) all the
        time; where B is not split, what I needs. Raises InfeasibleError where not even one micro-batch fits, and
        InputError where the job does not say how much memory a worker has.
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
        """Returns by stage two upper bounds: micro-batches whose I has not ended, and micro-batches in all.

        They equal `limits`, except for `bytes` where B is split: a micro-batch takes what W needs only from I's end
        on, and what I needs only until then, so more may fit than `limits` allows.
        """
        if self.text == "bytes":
            return tuple(_bytes_limits(job, s, technique)[1:] for s in range(job.stages))
        return tuple((limit, limit) for limit in self.limits(job, technique))


class StageRoom(NamedTuple):
    """The memory of a worker of one stage: of `capacity` a micro-batch takes `need` from F's start to I's (or B's) end,
    and `keep` from there to W's end. All three are 0 where there is no limit."""

    capacity: int
    need: int
    keep: int

    def beside(self, ahead: int, count: int) -> int:
        """Returns how many micro-batches (at most `count`) fit that wait for their W only, beside `ahead` whose I has
        not ended; -1 if not even those `ahead` fit."""
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
        """What the user could do to give `stage` a living worker, in words."""
        peers = [f"W{pipeline}_{stage}" for pipeline in range(self.job.pipelines)]
        back = f"bring back {'one of ' if len(peers) > 1 else ''}{names(peers)}"
        donor = max(range(self.job.stages), key=lambda s: len(self.living_peers(s)))
        if len(self.living_peers(donor)) < 2:
            return back
        return f"{back}, or migrate a worker: 1 migration from stage {donor} would fix it"

    def living_peers(self, stage: int) -> tuple[int, ...]:
        """Returns the pipelines whose worker of `stage` lives, ascending."""
        return self._living[stage]

    @cached_property
    def _living(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(p for p in range(self.job.pipelines) if Worker(p, s) not in self.failed)
            for s in range(self.job.stages)
        )

    @cached_property
    def limits(self) -> tuple[int | None, ...]:
        """Most micro-batches per stage: a schedule that keeps to these limits fits in memory."""
        return self.memory.limits(self.job, self.technique)

    @cached_property
    def most_held(self) -> tuple[tuple[int | None, int | None], ...]:
        """What lower bounds compute with: a schedule that exceeds these numbers does not fit. See MemoryLimit.most."""
        return self.memory.most(self.job, self.technique)

    @property
    def limits_are_exact(self) -> bool:
        """Does every schedule that fits in memory keep to `limits`?"""
        return all(limit == held for limit, (_, held) in zip(self.limits, self.most_held, strict=True))

    @cached_property
    def room(self) -> tuple[StageRoom, ...]:
        """The room of each stage, counted in micro-batches; where `limits` are not exact, in bytes beside weights and
        optimizer state."""
        if self.limits_are_exact:
            return tuple(StageRoom(0, 0, 0) if limit is None else StageRoom(limit, 1, 1) for limit in self.limits)
        stages = zip(self.job.profiles, self.job.capacity_bytes, strict=True)
        return tuple(
            StageRoom(capacity - p.fixed_bytes, p.activation_bytes, p.weight_backward_bytes) for p, capacity in stages
        )

    @cached_property
    def ticks(self) -> tuple[StageTicks, ...]:
        """Op times per stage at nominal speed, in ticks; O includes the all-reduce among the living peers."""
        return tuple(
            t._replace(optimizer=t.optimizer + self._reduction(s)) if self.job.profiles[s].reductions else t
            for s, t in enumerate(self.job.ticks)
        )

    def _reduction(self, stage: int) -> int:
        """Ticks that the all-reduce adds. It is counted from the last entry, which is for all peers, since a job of one
        pipeline may stand for all of them."""
        reductions = self.job.profiles[stage].reductions
        dead = self.job.pipelines - len(self.living_peers(stage))
        return round(reductions[len(reductions) - 1 - dead] * self.job.ticks_per_unit) if reductions else 0

    def worker_ticks(self, worker: Worker) -> StageTicks:
        """Returns the op times of one worker at its own speed, in ticks; O is its step and the all-reduce."""
        return self._own_ticks.get(worker) or self.ticks[worker.stage]

    @cached_property
    def _own_ticks(self) -> dict[Worker, StageTicks]:
        """Op times of the workers whose speed is not 1."""
        out = {}
        for worker, speed in self.job.speeds:
            own = self.job.ticks[worker.stage].at_speed(speed)
            out[worker] = own._replace(optimizer=own.optimizer + self._reduction(worker.stage))
        return out

    @cached_property
    def fastest(self) -> tuple[StageTicks, ...]:
        """By stage, the shortest F, I and W of any living peer; and the longest O, since the stage ends with it."""
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
        """By stage, the earliest start of its first F: F's and transfers of all stages before it."""
        way = (t.forward + wire for t, wire in zip(self.fastest, self.job.transfer_ticks, strict=False))
        return tuple(accumulate(way, initial=0))

    @cached_property
    def longest_optimizer(self) -> int:
        """Ticks of the longest O of any living worker."""
        return max(t.optimizer for t in self.fastest)

    def living_workers(self) -> list[Worker]:
        return [w for w in self.job.workers() if w not in self.failed]


def count_ops(pipelines: int, stages: int, micro_batches: int) -> int:
    """Counts F, I and W of every micro-batch on every stage; the optimizer steps are left out."""
    return 3 * pipelines * stages * micro_batches


def check_sizes(pipelines: int, stages: int, micro_batches: int) -> tuple[int, int, int]:
    """Returns the three as plain ints. Raises InputError for numbers that are no size, and for jobs too large for
    memory, before any memory is taken."""
    given = pipelines, stages, micro_batches
    pipelines, stages, micro_batches = (check_whole(name, size, 1) for name, size in zip(SHAPE, given, strict=True))
    ops = count_ops(pipelines, stages, micro_batches)
    if ops > MAX_OPS:
        most = f"at most {MAX_OPS:,} ops, which take up to {MAX_OPS * BYTES_PER_OP / 1e9:.0f} GB"
        raise InputError("pipelines x stages x micro_batches x 3 ops", ops, most)
    return pipelines, stages, micro_batches


def _bytes_limits(job: Job, stage: int, technique: Technique) -> tuple[int | None, int | None, int | None]:
    """Returns what `MemoryLimit.limits` gives for `stage`, then the two numbers of `MemoryLimit.most`."""
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
