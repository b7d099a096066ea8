"""From options to a launcher that is ready to run: what `openrecycle train` and
`ResilientTrainer.fit` share.

torch is imported only by `make_launcher`: bad input should not have to wait for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from openrecycle.agent.client import ConsoleClient, check_url
from openrecycle.agent.devices import Platform
from openrecycle.agent.faults import Kill, Rejoin, Slow
from openrecycle.agent.nodes.role import NodeRole
from openrecycle.agent.pacing import profile_pace
from openrecycle.agent.processes import preload, start_server
from openrecycle.agent.protocol import JobSpec
from openrecycle.agent.recipe import CheckpointWish, HandOver, Recipe
from openrecycle.agent.timeouts import Timeouts
from openrecycle.planner.catalog import Catalog
from openrecycle.planner.errors import InputError
from openrecycle.planner.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plan import JobDoc, PlanError, job_doc
from openrecycle.planner.profile import MAX_BYTES
from openrecycle.planner.profiles import Profile, job_on, load

if TYPE_CHECKING:
    from openrecycle.agent.checkpoints.checkpointing import CheckpointOptions
    from openrecycle.agent.launch import Launcher
    from openrecycle.agent.workload import WorkloadSource

UNIFORM = MemoryLimit("uniform")
PLANNED_FAILURES = 2
"""Without a console, plans are made ahead for up to this many failures."""


@dataclass(frozen=True)
class StartOptions:
    """A job as its owner describes it. Errors name the options of the command line.

    pace: milliseconds by op kind, {} for as fast as it goes. paced_by_profile: ops take as long as the
    job says of their stage and worker, and pace is {}. console: address, or None for a job
    that decides alone. demo: the console may kill and restart these processes. weights: folder for
    the trained weights. role: where this launcher leads a job of several nodes. migrate: workers may
    change their stage: where that shortens the plan (without a console), or trains clearly more until the
    expected repair (with one). None: only with a console. compare_every: iterations after which the workers
    of a stage compare their parameters; 0: only in checkpoints and at the end. checked: agent.preflight has
    seen the workload.
    """

    job: Job
    iterations: int
    workload: WorkloadSource
    seed: int = 0
    technique: Technique = Technique.STAGGERED
    memory: MemoryLimit = UNIFORM
    pace: Mapping[str, float] = field(default_factory=dict)
    kills: tuple[Kill, ...] = ()
    rejoins: tuple[Rejoin, ...] = ()
    recipe: Recipe = field(default_factory=Recipe)
    console: str | None = None
    token: str | None = None
    name: str = "job"
    weights: str | None = None
    checkpoints: CheckpointWish | None = None
    demo: bool = False
    role: NodeRole | None = None
    migrate: bool | None = None
    platform: Platform = field(default_factory=Platform)
    paced_by_profile: bool = False
    slow: tuple[Slow, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)
    hand_over: HandOver = field(default_factory=HandOver)
    compare_every: int = 100
    checked: bool = False

    def __post_init__(self) -> None:
        """Raises InputError, or InfeasibleError when no plan can survive what is asked for."""
        Problem(self.job, technique=self.technique, memory=self.memory)
        if isinstance(self.iterations, bool) or not isinstance(self.iterations, int) or self.iterations < 1:
            raise InputError("--iterations", self.iterations, "a whole number of at least 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**53:
            raise InputError("--seed", self.seed, "a whole number from 0 to 2^53")
        if isinstance(self.compare_every, bool) or not isinstance(self.compare_every, int) or self.compare_every < 0:
            raise InputError("--compare-every", self.compare_every, "a whole number of at least 0")
        if self.weights is not None:
            folder = Path(self.weights)
            if not folder.absolute().parent.is_dir() or (folder.exists() and not folder.is_dir()):
                raise InputError("--weights", self.weights, "a folder, or a name for one in a folder that exists")
        self._check_kills()
        if self.console is None:
            self.timeouts.check_above(self.timeouts.silence)
        if self.paced_by_profile:
            profile_pace(self.job, Worker(0, 0), self.job.workers())
        if self.slow and not (self.pace or self.paced_by_profile):
            raise InputError("--slow", str(self.slow[0].worker), "--pace too: only paced ops can be slowed down")
        if self.console is not None:
            check_url(self.console)
            if not self.technique.reroutes:
                raise InputError("--technique", self.technique.value, "adaptive, decoupled or staggered with --console")

    def _check_kills(self) -> None:
        """Refuses wishes that no plan can survive."""
        if self.kills and not self.technique.reroutes:
            raise InputError(
                "--technique", self.technique.value, "adaptive, decoupled or staggered when a worker is to be killed"
            )
        if not self.rejoins and self.checkpoints is None:
            Problem(self.job, frozenset(k.worker for k in self.kills), self.technique, self.memory)
        for rejoin in self.rejoins:
            if all(k.worker != rejoin.worker for k in self.kills):
                raise InputError("--rejoin", str(rejoin.worker), "a worker that --kill names")


def _with_step(options: StartOptions, say: Callable[[str], None]) -> StartOptions:
    """Its plans reckon with the step as this machine takes it; what is paced leaves it as it is."""
    from openrecycle.agent.profiling.stages import measure_step

    step = measure_step(options.workload, options.job, options.recipe)
    say(f"a step takes {step:g} ms here, which plans reckon with")
    profiles = tuple(replace(profile, optimizer=step) for profile in options.job.profiles)
    return replace(options, job=replace(options.job, profiles=profiles))


def make_launcher(
    options: StartOptions, listener: Callable[[dict[str, Any]], None], say: Callable[[str], None]
) -> Launcher:
    """A launcher whose `run` trains. listener: gets every line of the record. say: gets sentences
    for the person who started it, also from threads.

    Raises InputError, ConsoleUnavailable or ConsoleRefused.
    """
    # It takes as long to import torch as this process does, so both do it at the same time.
    start_server(preload(options.workload))
    options.platform.check(_workers_here(options))
    from openrecycle.agent import launch
    from openrecycle.agent.console_link import ConsoleCoordination, create_job
    from openrecycle.agent.coordination import Coordination, LocalCoordination
    from openrecycle.agent.nodes.pool import open_pool
    from openrecycle.agent.preflight import check_workload
    from openrecycle.agent.stage_io import stage_io_of
    from openrecycle.agent.worker import ConsoleLink

    _check_folder("--checkpoint", None if options.checkpoints is None else options.checkpoints.directory)
    _check_folder("--weights", options.weights)
    workload = options.workload.load()
    if not options.checked:
        check_workload(workload, options.job, options.seed, options.recipe)
    stage_io = None
    # What autocast makes of a stage's output depends on the device, which this process leaves to the workers.
    if options.platform.device == "cpu" or options.recipe.autocast is None:
        stage_io = stage_io_of(workload, options.job.stages, options.seed, options.recipe.autocast)
    if options.console is not None and options.pace and "O" not in options.pace and options.platform.device == "cpu":
        options = _with_step(options, say)
    checkpoints = _checkpoints(options, say)
    pool = open_pool(options.role, options.job, options.workload, options.token, say) if options.role else None
    link: ConsoleLink | None = None
    timeouts = options.timeouts
    coordination: Coordination
    catalog = Catalog(options.job, options.technique, options.memory)
    if options.console is None:
        _plan_ahead(catalog)
        coordination = LocalCoordination(
            catalog, migrate=bool(options.migrate), checkpoint=_restore_point(options.checkpoints, say)
        )
    else:
        url, token = options.console, options.token
        client = ConsoleClient(url, token=token)
        created = create_job(
            client,
            job_spec(
                options.job,
                name=options.name,
                iterations=options.iterations,
                samples_per_micro_batch=workload.samples_per_micro_batch,
                technique=options.technique,
                memory=options.memory,
                paced=bool(options.pace) or options.paced_by_profile,
                demo=options.demo,
                checkpoints=options.checkpoints is not None,
                migrate=options.migrate is not False,
                seed=options.seed,
                timeouts=options.timeouts,
            ),
        )
        # A console that does not know of them has not checked them.
        options.timeouts.check_above(created.dead_seconds)
        timeouts = replace(timeouts, silence=max(timeouts.silence, created.dead_seconds))
        # From here on with the job's own token: what workers hold must open nothing else.
        token = client.issued or token
        link = ConsoleLink(url, created.job_id, token, created.heartbeat_seconds)
        coordination = ConsoleCoordination(
            lambda: ConsoleClient(url, token=token),
            created.job_id,
            say,
            checkpoint=_restore_point(options.checkpoints, say),
        )
        say(f"job {created.job_id} at {url}")
    return launch.Launcher(
        launch.LaunchOptions(
            job=options.job,
            iterations=options.iterations,
            seed=options.seed,
            workload=options.workload,
            pace={kind: ms / 1000 for kind, ms in options.pace.items()},
            kills=options.kills,
            rejoins=options.rejoins,
            console=link,
            recipe=options.recipe,
            stage_io=stage_io,
            weights=options.weights,
            checkpoints=checkpoints,
            platform=options.platform,
            paced_by_profile=options.paced_by_profile,
            slow=options.slow,
            timeouts=timeouts,
            hand_over=options.hand_over,
            compare_every=options.compare_every,
        ),
        coordination,
        listener,
        catalog,
        pool,
    )


BY_PROFILE = "profile"
"""What --pace says for ops that take as long as the profile has it."""


def with_profile(job: Job, profile: str | Path | Profile | JobDoc | None) -> Job:
    """The op times of `profile` on the grid of `job`; with None, `job` itself. Raises InputError.

    profile: a measured one or the document of a job; or a file with either, or a shipped one's name.
    """
    if profile is None:
        return job
    if job != Job(job.pipelines, job.stages, job.micro_batches):
        raise InputError("--profile", str(profile)[:80], "nothing beside a job that has op times of its own")
    try:
        document = load(profile) if isinstance(profile, str | Path) else profile
    except PlanError as error:
        raise InputError("--profile", str(profile), f"a profile, or the document of a job ({error})") from None
    return job_on(document, job.pipelines, job.stages, job.micro_batches)


_BYTES = {"": 1, **{f"{prefix}iB": 1 << 10 * n for n, prefix in enumerate("KMGT", start=1)}}
_BYTES |= {f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", start=1)}


def parse_bytes(text: str, *, field: str) -> int:
    """`80GiB`, `24GB` or a plain number of bytes. Raises InputError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([KMGT]i?B)?", text.strip())
    size = int(float(match[1]) * _BYTES[match[2] or ""]) if match else 0
    if not 1 <= size <= MAX_BYTES:
        raise InputError(field, text, "a size in bytes such as 80GiB, 24GB or 1073741824")
    return size


def with_capacity(job: Job, capacity: str | int | None) -> Job:
    """Its workers have so much memory each, whatever its profile says; with None, `job` itself. Raises InputError."""
    if capacity is None:
        return job
    return replace(job, capacity_bytes=(parse_bytes(str(capacity), field="--capacity"),) * job.stages)


def parse_pace(text: str | None) -> dict[str, float]:
    """`F=40ms,I=40ms` to milliseconds by op kind. Raises InputError.

    `transfer` is what the plan takes a transfer between stages for; transfers themselves take as long
    as they take.
    """
    out: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in (text or "").split(","))):
        match = re.fullmatch(r"([FIWO]|transfer)=([0-9]+(?:\.[0-9]{1,3})?)(ms|s)", part)
        if not match:
            raise InputError(
                "--pace", part, "comma-separated KIND=TIME such as F=40ms, with KIND F, I, W, O or transfer"
            )
        out[match[1]] = float(match[2]) * (1000 if match[3] == "s" else 1)
    if text is not None:
        missing = [kind for kind in "FIW" if not out.get(kind)]
        if missing:
            raise InputError("--pace", text, f"a time above 0 for {', '.join(missing)} too")
    return out


def _check_folder(field: str, path: str | None) -> None:
    """Makes the folder, and a file in it, so that a disk that is full is no surprise at the end. Raises InputError."""
    if path is None:
        return
    probe = Path(path) / f".writable-{os.getpid()}"
    try:
        Path(path).mkdir(exist_ok=True)
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(field, path, f"a folder that can be written ({error.strerror})") from None


def _workers_here(options: StartOptions) -> int:
    """On this node."""
    if options.role is None:
        return options.job.pipelines * options.job.stages
    from openrecycle.agent.nodes.placement import place

    return sum(node == options.role.rank for node in place(options.job, options.role.nodes).values())


def _checkpoints(options: StartOptions, say: Callable[[str], None]) -> CheckpointOptions | None:
    if options.checkpoints is None:
        return None
    from openrecycle.agent.checkpoints.checkpoint import Identity
    from openrecycle.agent.checkpoints.checkpointing import prepare

    job = options.job
    name = getattr(options.workload, "path", type(options.workload).__name__)
    identity = Identity(name, job.stages, job.pipelines, job.micro_batches, options.seed, vars(options.recipe))
    return prepare(options.checkpoints, identity, options.iterations, say)


def _restore_point(wish: CheckpointWish | None, say: Callable[[str], None]) -> Callable[[], str | None]:
    """Asked for the newest checkpoint that is not damaged, when a stage's state is lost."""

    def newest() -> str | None:
        if wish is None:
            return None
        from openrecycle.agent.checkpoints.checkpoint import CheckpointError, find, set_aside_later

        try:
            found = find(Path(wish.directory), "newest-intact")
        except CheckpointError as error:
            say(str(error))
            return None
        set_aside_later(Path(wish.directory), found.iteration)
        return str(found.path)

    return newest


def _plan_ahead(catalog: Catalog) -> None:
    """Plans for what a job without a console should expect."""
    job = catalog.job
    for patterns in catalog.patterns(PLANNED_FAILURES if job.pipelines * job.stages <= 64 else 1):
        for failed in patterns:
            catalog.add(catalog.plan_for(failed)[0])


def job_spec(
    job: Job,
    *,
    name: str,
    iterations: int,
    samples_per_micro_batch: int,
    technique: Technique,
    memory: MemoryLimit,
    paced: bool = False,
    demo: bool = False,
    checkpoints: bool = False,
    migrate: bool = False,
    seed: int = 0,
    timeouts: Timeouts | None = None,
) -> JobSpec:
    """What a console is told of a job. Raises InputError naming the option that it would not take."""
    durations = _durations(job)
    try:
        return JobSpec(
            name=name,
            pipelines=job.pipelines,
            stages=job.stages,
            micro_batches=job.micro_batches,
            iterations=iterations,
            samples_per_micro_batch=samples_per_micro_batch,
            technique=technique.value,  # type: ignore[arg-type]
            memory=memory.text,
            durations=durations or {},  # type: ignore[arg-type]
            profile=job_doc(job) if durations is None else None,
            paced=paced,
            demo=demo,
            checkpoints=checkpoints,
            migrate=migrate,
            seed=seed,
            transfer_timeout=None if timeouts is None else timeouts.transfer,
            group_timeout=None if timeouts is None else timeouts.group,
        )
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise InputError(option, first["input"], f"what a console accepts: {first['msg']}") from None


def check_writable(path: Path, *, field: str) -> None:
    """Raises InputError unless a file can be written there."""
    if not path.parent.is_dir():
        raise InputError(field, str(path), "a file in a folder that exists")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(field, str(path), "a file that can be written")


@contextmanager
def argument_names() -> Iterator[None]:
    """Errors that name an option of the command line name the argument of a function instead."""
    try:
        yield
    except InputError as error:
        raise InputError(error.field.removeprefix("--").replace("-", "_"), error.value, error.expected) from None


def _durations(job: Job) -> dict[str, float] | None:
    """Milliseconds by op kind, where they say all that there is to say of the job; {} for one slot per op.

    None: the console has to be given the job's whole profile.
    """
    if job.time_unit not in ("slot", "ms"):
        return None
    first, times = job.profiles[0], dict[str, float]()
    if job.time_unit == "ms":
        times = {
            "F": first.forward,
            "I": first.input_backward,
            "W": first.weight_backward,
            "O": first.optimizer,
            "transfer": max(job.transfers, default=0.0),
        }
        if any(ms != round(ms, 3) for ms in times.values()):
            return None  # finer than a console takes them
    alike = Job.uniform(job.pipelines, job.stages, job.micro_batches, durations=times, time_unit=job.time_unit)
    return times if job == alike else None
