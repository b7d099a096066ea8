"""The options of a training job, and all limits of the agents with their defaults and reasons.

Each option is defined here (devices in agent.config.devices) and nowhere else. `openrecycle train` makes its flags from
these fields, `ResilientTrainer` takes the groups as arguments, and every worker process is sent all of them. How a
field becomes an option is in agent.config.settings.

`Timeouts` has how long a worker waits for a peer, how long it may be silent, and how long one op may take. They must be
in this order: heartbeat < suspect < dead < transfer < group. The first three are the console's (FailureTimeouts in
agent.coordination.membership). A worker that waits for a dead peer is freed by the next generation that the console
opens, long before its own time-outs. With a shorter time-out it would break a transfer with a peer that is only slow to
be declared dead, and would be blamed for that.

Time in which the judge, or the one who is judged, did not get to run does not count: see agent.monitoring.liveness.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

from openrecycle.agent.config.devices import Autocast, Mode, Platform
from openrecycle.agent.config.faults import Kill, Rejoin, Slow, profile_pace
from openrecycle.agent.config.settings import OptionGroup, documented, leaves, option, spelled, without_none
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import (
    MAX_BYTES,
    Job,
    MayMove,
    MemoryLimit,
    Problem,
    Technique,
    Worker,
    parse_partition,
)
from openrecycle.planner.plans.plan import JobDoc, PlanError
from openrecycle.planner.profiles import Profile, job_on, load

LOOPBACK = "127.0.0.1"

# -- all limits of the agents, with their defaults and reasons ----------------------------------

LONGEST_SECONDS = 86400.0
ALIVE_SECONDS = 1.0
"""A worker process says so often that it lives."""
TIMES_LONGEST = 20.0
"""An op may take so many times as long as the longest op of its kind so far on this worker."""


def _seconds(default: float, flag: str, help: str, **more: Any) -> Any:
    limits: dict[str, Any] = {"above": 0, "most": LONGEST_SECONDS, "expected": "more than 0 seconds, at most a day"}
    return option(default, f"Seconds {help}", flag=flag, **limits, **more)


@documented
@dataclass(frozen=True, kw_only=True)
class Timeouts(OptionGroup):
    """How long workers, and those that watch them, wait."""

    PATH: ClassVar[str] = "faults.timeouts"

    form: float = _seconds(15.0, "--form-timeout", "in which the workers of a generation must have connected.")
    transfer: float = _seconds(
        120.0,
        "--transfer-timeout",
        "to wait for another worker's data; longer than the silence after which a worker is out.",
        told="transfer_timeout",
    )
    group: float = _seconds(
        150.0,
        "--group-timeout",
        "to wait for a sum over a stage's workers; longer than for a transfer.",
        told="group_timeout",
    )
    # A worker says something every ALIVE_SECONDS. With a console whose time-out is longer, its launcher waits longer.
    silence: float = _seconds(
        20.0, "--silence-timeout", "of silence after which a worker process that does not compute is ended."
    )
    start: float = _seconds(120.0, "--start-timeout", "in which a new worker process must have said something.")
    # The minimum counts where ops are quick: TIMES_LONGEST times 40 ms is less than a busy machine may take away.
    op: float = _seconds(
        10.0,
        "--op-timeout",
        "that an op may take, or 20 times its longest so far, whichever is more; then it hangs.",
    )
    # Also the limit where all living workers of a stage take long at once: without them nobody would be left.
    first_op: float = _seconds(
        600.0, "--first-op-timeout", "for an op that was not measured yet: it may be compiled first."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group <= self.transfer:
            raise self.refuse("group", f"more than `{self.path('transfer')}` ({self.transfer:g} s)")
        if self.silence < 4 * ALIVE_SECONDS:
            raise self.refuse("silence", f"at least {4 * ALIVE_SECONDS:g} s, four words of a worker")
        if self.first_op < self.op:
            raise self.refuse("first_op", f"at least `{self.path('op')}` ({self.op:g} s)")

    @property
    def pause(self) -> float:
        """Seconds after which a silence may be the listener's fault, or everybody's. Well below a silence that counts
        as a death."""
        return max(2.5 * ALIVE_SECONDS, self.silence / 4)

    def check_above(self, dead: float) -> None:
        """Raises InputError unless the transfer time-out is above `dead`, the seconds of silence after which a worker
        is out of the job."""
        if self.transfer <= dead:
            raise self.refuse("transfer", f"more than the {dead:g} s after which a silent worker is out of the job")


# ruff: noqa: RUF009 (`option` makes a field)


# -- the options of a training job --------------------------------------------------------------

NonFinite = Literal["skip", "stop"]
Sharding = Literal["none", "zero1"]
OnBadSample = Literal["halt", "skip"]

BY_PROFILE = "profile"
"""The value of `Planning.pace` with which ops take as long as in the job's profile."""

GRID = {f"job.{name}": f"--{name.replace('_', '-')}" for name in ("pipelines", "stages", "micro_batches")}
"""The flags of the command line for the sizes of the job, by path."""

_BYTES = {"": 1, **{f"{prefix}iB": 1 << 10 * n for n, prefix in enumerate("KMGT", start=1)}}
_BYTES |= {f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", start=1)}


def parse_bytes(text: str) -> int:
    """Returns the bytes of `80GiB`, `24GB` or a plain number. Raises InputError for the field `bytes`."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([KMGT]i?B)?", text.strip())
    size = int(float(match[1]) * _BYTES[match[2] or ""]) if match else 0
    if not 1 <= size <= MAX_BYTES:
        raise InputError("bytes", text, "a size in bytes such as 80GiB, 24GB or 1073741824")
    return size


def check_url(url: str) -> str:
    """Returns `url` without trailing slashes and spaces. Raises InputError unless it is http(s)://host[:port], or
    several of these with commas between."""
    parts = [part.strip() for part in url.split(",")]
    for part in parts:
        if not part.startswith(("http://", "https://")) or len(part.split("/")) < 3 or not part.split("/")[2]:
            expected = "an address such as http://127.0.0.1:8501, or several with commas between"
            raise InputError("console", part, expected)
    return ",".join(part.rstrip("/") for part in parts)


def check_resume(text: str) -> None:
    """Raises InputError for what names no checkpoint."""
    if not re.fullmatch(r"newest|newest-intact|if-any|(iteration-)?[0-9]+", text):
        raise InputError("resume", text, "newest, newest-intact, if-any or an iteration's number")


def parse_pace(text: str) -> dict[str, float]:
    """Returns milliseconds by op kind: {"F": 40.0, ...} for `F=40ms,I=40ms,W=40ms`; {} for `profile`. Raises InputError
    for the field `pace`.

    `transfer` is how long plans assume that a transfer between stages takes; transfers themselves are not slowed.
    """
    if text == BY_PROFILE:
        return {}
    out: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"([FIWO]|transfer)=([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s)", part)
        if not match:
            raise InputError(
                "pace", part, "KIND=TIME, such as F=40ms, with KIND F, I, W, O or transfer; commas between"
            )
        if match[1] in out:
            raise InputError("pace", part, f"each kind once; {match[1]} is there already")
        out[match[1]] = float(match[2]) * (1000 if match[3] == "s" else 1)
    missing = [kind for kind in "FIW" if not out.get(kind)]
    if missing:
        raise InputError("pace", text, f"a time above 0 for {', '.join(missing)} too")
    return out


@documented
@dataclass(frozen=True, kw_only=True)
class Planning(OptionGroup):
    """Which plans may be made, and what they reckon with."""

    PATH: ClassVar[str] = "planning"

    technique: str = option(
        "staggered", "fault-free, adaptive, decoupled or staggered.", parse=Technique.of, told="technique"
    )
    memory: str | int = option(
        "uniform",
        "1f1b, uniform, none, a number of micro-batches, or bytes: what the profile says fits.",
        parse=MemoryLimit.parse,
        told="memory",
    )
    capacity: str | int | None = option(
        None, "Memory of one worker, such as 80GiB, where the profile does not say it.", parse=parse_bytes
    )
    migrate: bool | None = option(
        None,
        "May workers change their stage to shorten the plan? By default where a console decides, if it pays.",
        told="migrate",
    )
    pace: str | None = option(
        None,
        "F=40ms,I=40ms,W=40ms: stretch each op to this; profile: to what the profile says.",
        parse=parse_pace,
        told="paced",
    )

    pace_per: Literal["stage", "layer"] = option("stage", "Is the pace that of a whole `stage`, or of each `layer`?")
    partition: str | None = option(
        None, "Layers per stage: 11,11,11,11. By default as even as op times allow.", parse=parse_partition
    )
    relayout: MayMove = option(
        "auto",
        "May layers change their stage? never, always, or auto: if that saves more than one iteration in an hour.",
        told="relayout",
    )

    @property
    def limits(self) -> tuple[Technique, MemoryLimit]:
        return Technique(self.technique), MemoryLimit.parse(str(self.memory))

    def layered(self, job: Job, layers: int | None) -> Job:
        """Returns `job` with the model's layers, so that its stages can be cut anew. layers: how many the model has;
        None: its stages can't be cut. A `job` with times of whole stages is returned as it is. Raises InputError."""
        per_layer = self.pace_per == "layer"
        if layers is None and (per_layer or self.partition is not None):
            name = "pace_per" if per_layer else "partition"
            raise self.refuse(name, "nothing for a model that comes in stages, which can't be cut")
        if per_layer and not self.milliseconds:
            raise self.refuse("pace_per", "stage, or a `planning.pace` such as F=4ms,I=4ms,W=4ms beside it")
        if layers is None or (layers <= job.stages and not per_layer):
            return job
        partition = parse_partition(self.partition or "")
        if partition and (len(partition) != job.stages or min(partition) < 1 or sum(partition) != layers):
            expected = f"{job.stages} numbers of at least 1 that add up to the model's {layers} layers"
            raise self.refuse("partition", expected)
        if job.layers:
            if len(job.layers) != layers:
                raise InputError("profile", f"{len(job.layers)} layers", f"one of the model's {layers} layers")
            return job.with_partition(partition) if partition else job
        plain = Job(job.pipelines, job.stages, job.micro_batches, capacity_bytes=job.capacity_bytes)
        if per_layer or job == plain:
            durations = self.milliseconds if per_layer else None
            made = Job.uniform(
                *(job.pipelines, job.stages, job.micro_batches),
                durations=durations,
                time_unit="ms" if durations else job.time_unit,
                layers=layers,
                partition=partition,
            )
            return replace(made, capacity_bytes=job.capacity_bytes)
        return job

    @property
    def by_profile(self) -> bool:
        return self.pace == BY_PROFILE

    @property
    def milliseconds(self) -> dict[str, float]:
        """Milliseconds by op kind that ops are stretched to; {} if ops are not paced, or paced by the profile."""
        return {} if self.pace is None else parse_pace(self.pace)

    def job(self, grid: Job, profile: str | Path | Profile | JobDoc | None = None) -> Job:
        """Returns `grid` with the op times that plans reckon with: those of `profile` (a measured profile or a job's
        document; a file with either, or the name of a shipped one), those of `pace`, or its own. Raises InputError."""
        job = with_profile(grid, profile)
        if paced := self.milliseconds:
            if profile is not None:
                raise self.refuse("pace", f"{BY_PROFILE}, or nothing, beside `profile`, which has the op times")
            job = Job.uniform(job.pipelines, job.stages, job.micro_batches, durations=paced, time_unit="ms")
        if self.capacity is not None:
            job = replace(job, capacity_bytes=(parse_bytes(str(self.capacity)),) * job.stages)
        return job


def with_profile(job: Job, profile: str | Path | Profile | JobDoc | None) -> Job:
    """Returns the grid of `job` with the op times of `profile`; `job` itself if that is None. Raises InputError."""
    if profile is None:
        return job
    if job != Job(job.pipelines, job.stages, job.micro_batches):
        raise InputError("profile", str(profile)[:80], "nothing beside a job that has op times of its own")
    try:
        document = load(profile) if isinstance(profile, str | Path) else profile
    except PlanError as error:
        raise InputError("profile", str(profile), f"a profile, or the document of a job ({error})") from None
    if not isinstance(document, Profile | JobDoc):
        raise InputError("profile", document, "a profile, or the document of a job")
    with spelled({flag: path for path, flag in GRID.items()}):
        # If the profile has measured each layer of the model, layers may move from stage to stage.
        each = isinstance(document, Profile) and document.cut == "each"
        return job_on(document, job.pipelines, job.stages, job.micro_batches, by_layers=each)


@documented
@dataclass(frozen=True, kw_only=True)
class Optimization(OptionGroup):
    """Precision, clipping, and when a step is final."""

    PATH: ClassVar[str] = "optimization"

    mode: Mode = option("deterministic", "deterministic (same bits after any failure) or fast.")
    autocast: Autocast | None = option(None, "bf16 or fp16 (with the loss scaled): run forwards under torch.autocast.")
    clip_norm: float | None = option(None, "Largest global L2 norm of the gradients over all stages.", above=0)
    # Besides, the job ends when updates are left out too often in a row.
    non_finite: NonFinite = option("skip", "On a NaN or infinite gradient: skip (the step) or stop.")
    # Otherwise a stage steps as soon as its own gradients are reduced, and the step is validated later. The bits are
    # the same either way.
    synchronous: bool = option(False, "No stage steps before the global checks are known.")
    bucket_cap_mb: float = option(
        25.0, "MiB of gradient sums that are reduced at a time, beside the last backward of an iteration.", above=0
    )
    sharding: Sharding = option(
        "none",
        "none, or zero1 (ZeRO-1): each part of the optimizer's state is kept by two workers of its stage, not by all.",
        flag="--optimizer-sharding",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.autocast == "fp16" and self.non_finite == "stop":
            # fp16 finds the scale of the loss by overflows, so these are no reason to stop.
            raise self.refuse("non_finite", "skip with fp16, where gradients overflow now and then")

    @property
    def bucket_bytes(self) -> int:
        return max(1, int(self.bucket_cap_mb * 2**20))


@documented
@dataclass(frozen=True, kw_only=True)
class Checkpoints(OptionGroup):
    """What is written beside the training, to go on from."""

    PATH: ClassVar[str] = "checkpoints"

    directory: str | Path | None = option(
        None, "Folder for checkpoints, which all workers reach.", flag="--checkpoint", told="checkpoints"
    )
    every: int = option(100, "Iterations from one checkpoint to the next.", flag="--checkpoint-every", least=1)
    keep: int = option(3, "Newest checkpoints that stay.", flag="--checkpoint-keep", least=1)
    resume: str | int | None = option(
        None,
        "Checkpoint to go on from: newest; newest-intact (skips damaged ones); if-any (the newest, or from the start "
        "where there is none); or an iteration's number.",
        flag="--resume",
        parse=check_resume,
    )

    @property
    def folder(self) -> Path | None:
        return None if self.directory is None else Path(self.directory)


@documented
@dataclass(frozen=True, kw_only=True)
class HandOver(OptionGroup):
    """How a worker that joins gets its stage's state (agent.workers.state_transfer)."""

    PATH: ClassVar[str] = "faults.hand_over"

    at_once: int = option(
        1 << 22,
        "Bytes of state that come at once, while all wait; a larger state comes beside the training.",
        flag="--hand-over-at-once",
        least=0,
    )
    rate: str | int | float | None = option(
        None,
        "Bytes a second that a worker gives of its state to one that joins: 50MB.",
        flag="--hand-over-rate",
        least=1e4,
        expected="at least 10 KB per second",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rate, str):
            try:
                slow = parse_bytes(self.rate) < 1e4
            except InputError as error:
                raise self.refuse("rate", error.expected) from None
            if slow:
                raise self.refuse("rate", "at least 10 KB per second")

    @property
    def bytes_per_second(self) -> float | None:
        return float(parse_bytes(self.rate)) if isinstance(self.rate, str) else self.rate


@documented
@dataclass(frozen=True, kw_only=True)
class Faults(OptionGroup):
    """What happens when workers, links or samples fail; and faults to train through on purpose."""

    PATH: ClassVar[str] = "faults"

    kill: Sequence[str] = option((), "W1_2@10:F3: SIGKILL it before that op; W1_2.1@10:F3: its rank 1. Repeatable.")
    rejoin: Sequence[str] = option((), "W1_2@15: start it anew after that iteration.")
    slow: Sequence[str] = option((), "W1_2@10:2: from that iteration its paced ops take twice as long.")
    max_restarts: int = option(
        0,
        "Times in a row that a worker which has died, or was removed, is started again by itself; one that has trained "
        "for an hour begins a new count. 0: only people start it again.",
        least=0,
        told="max_restarts",
    )
    restart_delay: float = option(
        10.0,
        "Seconds from a worker's end to its restart; doubled with each further one in a row, up to 10 minutes.",
        least=0,
        most=600,
    )
    on_bad_sample: OnBadSample = option(
        "halt",
        "On a micro-batch that raises on two workers of a stage (or twice on its only one): halt (the job) or skip "
        "(the micro-batch).",
    )
    bad_sample_limit: int = option(100, "Micro-batches that may be skipped so; one more halts.", least=0)
    # This costs the interrupted iteration one small reduction more, and saves nothing if a stage has taken its step.
    keep_finished: bool = option(False, "After a death, don't run again what survivors have finished.")
    compare_every: int = option(
        100,
        "A stage's workers compare their parameters every so many iterations, also before the first and after it; 0: "
        "only with checkpoints and at the end.",
        least=0,
    )
    timeouts: Timeouts = option(Timeouts, "How long workers wait for each other.")
    hand_over: HandOver = option(HandOver, "How a worker that joins gets its state.")


@documented
@dataclass(frozen=True, kw_only=True)
class Console(OptionGroup):
    """The console that watches the job and decides."""

    PATH: ClassVar[str] = "console"

    url: str | None = option(
        None,
        "Address of a console, such as http://127.0.0.1:8501; its standby's after a comma.",
        flag="--console",
        env="OPENRECYCLE_CONSOLE",
        parse=check_url,
    )
    token: str | None = option(None, "Its token, and its standby's.", flag=None, secret=True)
    name: str = option("job", "What the console calls the job.", told="name")
    demo: bool = option(
        False, "Let people kill workers from the console. (They can restart them in any job.)", told="demo"
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(OptionGroup):
    """All options of a job, the same for all its processes. job: the grid, with the op times that plans reckon with
    (see Planning.job)."""

    job: Job
    iterations: int = option(30, "Iterations to commit.", least=1, told="iterations")
    evaluate_every: int = option(
        0, "Iterations between evaluations, where there is data for them; also at the end. 0: none.", least=0
    )
    seed: int = option(
        0,
        "Of parameters, data and dropout.",
        least=0,
        most=2**53 - 1,
        expected="a whole number from 0 to 2^53",
        told="seed",
    )
    weights: str | Path | None = option(None, "Folder for the trained weights, one file per layer.")
    record: str | Path | None = option(None, "JSON-lines file: losses, failures, final hash.")
    planning: Planning = option(Planning, "Which plans may be made.")
    optimization: Optimization = option(Optimization, "How steps are taken.")
    platform: Platform = option(Platform, "What workers compute on.")
    checkpoints: Checkpoints = option(Checkpoints, "What is written to go on from.")
    faults: Faults = option(Faults, "What happens when something fails.")
    console: Console = option(Console, "Who watches and decides.")

    @cached_property
    def kills(self) -> tuple[Kill, ...]:
        return tuple(Kill.parse(text, self.job, ranks=self.platform.ranks_per_worker) for text in self.faults.kill)

    @cached_property
    def rejoins(self) -> tuple[Rejoin, ...]:
        return tuple(Rejoin.parse(text, self.job) for text in self.faults.rejoin)

    @cached_property
    def slowdowns(self) -> tuple[Slow, ...]:
        return tuple(Slow.parse(text, self.job) for text in self.faults.slow)

    @cached_property
    def pace(self) -> Mapping[str, float]:
        """Seconds by op kind that ops are stretched to; {} if ops are not paced, or paced by the profile."""
        return {kind: ms / 1000 for kind, ms in self.planning.milliseconds.items()}

    @property
    def paced(self) -> bool:
        return self.planning.pace is not None

    def may_migrate(self, *, by_default: bool) -> bool:
        """May workers move to another stage for a shorter plan? Not with a sharded optimizer: a worker that moves gives
        up at once its part of the state, and it may be the last to have it. by_default: the answer where the option is
        not given."""
        asked = self.planning.migrate
        return self.optimization.sharding == "none" and (by_default if asked is None else asked)

    def anchored(self) -> TrainingOptions:
        """Returns the options with absolute paths, since a user's code may change the working directory."""
        weights, record, saved = (
            None if path is None else str(Path(path).absolute())
            for path in (self.weights, self.record, self.checkpoints.directory)
        )
        return replace(self, weights=weights, record=record, checkpoints=replace(self.checkpoints, directory=saved))

    def unlike(self, given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns those of the values `given`, by path, that differ from these options, with the value here.

        These are the options of a job that has begun: with a console, it has set how long a worker may be silent.
        """
        out = {}
        for path, value in given.items():
            here = attrgetter(path)(self)
            same = tuple(value) if isinstance(here, tuple) else str(Path(value).absolute()) if path in _PATHS else value
            if here != same and not (path == "faults.timeouts.silence" and self.console.url is not None):
                out[path] = value, here
        return out

    def told(self) -> dict[str, Any]:
        """Returns what a console is told of the options, by field of agent.messages.protocol.JobSpec: as given, or for
        some, what follows from them."""
        comes_to = {
            "memory": self.planning.limits[1].text,
            "paced": self.paced,
            "checkpoints": self.checkpoints.directory is not None,
            "migrate": self.may_migrate(by_default=True),
            "relayout": self.planning.relayout if self.job.layers else "never",
        }
        return {field: attrgetter(path)(self) for field, path in TOLD.items()} | comes_to

    def check(self, *, to_the_end: bool = True) -> None:
        """Checks all that can be known on this host before anything starts. to_the_end: is the number of iterations
        known by now? Raises InputError, or InfeasibleError when no plan can survive the faults that are asked for."""
        technique, memory = self.planning.limits
        Problem(self.job, technique=technique, memory=memory)
        for group, name in ((self, "weights"), (self.checkpoints, "directory")):
            folder: str | None = getattr(group, name)
            if folder is None:
                continue
            path = Path(folder)
            try:
                fits = path.absolute().parent.is_dir() and (path.is_dir() or not path.exists())
            except OSError:  # the name is too long, or in a folder without access
                fits = False
            if not fits:
                raise group.refuse(name, "a folder, or a name for one in a folder that exists")
        self._check_unused()
        self._check_faults(technique, memory, to_the_end)
        if self.planning.migrate and not self.may_migrate(by_default=False):
            raise self.planning.refuse(
                "migrate", "nothing with a sharded optimizer, of which each worker keeps parts of its own stage"
            )
        if self.planning.by_profile:
            profile_pace(self.job, Worker(0, 0), self.job.workers())
        if self.console.url is None:
            self.faults.timeouts.check_above(self.faults.timeouts.silence)
        elif not technique.reroutes:
            raise self.planning.refuse("technique", "adaptive, decoupled or staggered with `console.url`")

    def _check_unused(self) -> None:
        """Raises InputError for an option that would do nothing, since another one that it needs is not given."""
        saves, restarts = self.checkpoints.directory is not None, self.faults.max_restarts > 0
        watched = self.console.url is not None
        needs: Sequence[tuple[OptionGroup, str, bool, str]] = (
            (self.checkpoints, "resume", saves, "`checkpoints.directory` too, the folder to resume from"),
            (self.checkpoints, "every", saves, "`checkpoints.directory` too, the folder to write them into"),
            (self.checkpoints, "keep", saves, "`checkpoints.directory` too, the folder to write them into"),
            (self.faults, "restart_delay", restarts, "`faults.max_restarts` too, without which nothing is restarted"),
            (self.faults, "bad_sample_limit", self.faults.on_bad_sample == "skip", "`faults.on_bad_sample` skip too"),
            (self.console, "demo", watched, "`console.url` too, from which people kill workers"),
        )
        for group, name, there, expected in needs:
            if not there and getattr(group, name) != getattr(type(group), name):
                raise group.refuse(name, expected)

    def _check_faults(self, technique: Technique, memory: MemoryLimit, to_the_end: bool) -> None:
        """Raises InputError or InfeasibleError for faults on purpose that no plan can survive."""
        kills, rejoins = self.kills, self.rejoins
        wishes: dict[str, Sequence[Kill | Rejoin | Slow]] = {"kill": kills, "rejoin": rejoins, "slow": self.slowdowns}
        for name, these in wishes.items():
            for text, wish in zip(getattr(self.faults, name), these, strict=True):
                if to_the_end and wish.iteration >= self.iterations:
                    expected = f"an iteration from 0 to {self.iterations - 1}, of the job's {self.iterations}"
                    raise InputError(f"faults.{name}", text, expected)
        if kills and not technique.reroutes:
            raise self.planning.refuse("technique", "adaptive, decoupled or staggered when a worker is to be killed")
        if not (rejoins or self.faults.max_restarts) and self.checkpoints.directory is None:
            killed = {kill.worker for kill in kills}
            for stage in range(self.job.stages):
                if all(Worker(pipeline, stage) in killed for pipeline in range(self.job.pipelines)):
                    expected = f"a worker of stage {stage} that stays, or `checkpoints.directory`, to go back to one"
                    raise self.faults.refuse("kill", expected)
            Problem(self.job, frozenset(k.worker for k in kills), technique, memory)
        for rejoin in rejoins:
            if all(k.worker != rejoin.worker for k in kills):
                raise InputError("faults.rejoin", str(rejoin.worker), "a worker that `faults.kill` names")
        if self.slowdowns and not self.paced:
            worker = str(self.slowdowns[0].worker)
            raise InputError("faults.slow", worker, "`planning.pace` too: only paced ops can be slowed down")


_PATHS = {leaf.path for leaf in leaves(TrainingOptions) if Path in without_none(leaf.annotation)}
"""The options that name files and folders (see TrainingOptions.anchored)."""

FLAGS: Mapping[str, str] = {leaf.path: leaf.flag for leaf in leaves(TrainingOptions) if leaf.flag is not None}
"""The flag of each option on the command line, by its path."""

_DEFAULTS: Mapping[str, Any] = {leaf.path: leaf.default for leaf in leaves(TrainingOptions)}


def differing(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the options, by path, that are given and differ from their defaults."""
    return {path: value for path, value in given.items() if value is not None and value != _DEFAULTS[path]}


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Returns the words by which a command line gives these options, and sizes of the job, by path."""
    words, flags = list[str](), {**GRID, **FLAGS}
    for path, value in given.items():
        if isinstance(value, bool):
            words.append(flags[path] if value else f"--no-{flags[path][2:]}")
        else:
            words += [flags[path], str(value)]
    return words


TOLD: Mapping[str, str] = {
    field: leaf.path for leaf in leaves(TrainingOptions) if (field := leaf.field.metadata["told"]) is not None
}
"""For each field of JobSpec that tells a console of an option, the path of that option."""
