"""From options to a launcher that is ready to run. `openrecycle train` and `ResilientTrainer.fit` share this.

torch is imported only inside the functions that need it, so that bad options are refused before that takes seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrecycle.agent.config.devices import memory_limit
from openrecycle.agent.config.options import ALIVE_SECONDS, TOLD, TrainingOptions
from openrecycle.agent.config.settings import spelled
from openrecycle.agent.coordination.launcher import FROM_START
from openrecycle.agent.coordination.membership import back_to
from openrecycle.agent.launcher.processes import preload, start_worker_server
from openrecycle.agent.messages.client import ConsoleClient, Say, prints_anyway
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.agent.nodes.role import NodeRole
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.layers.room import LayerRoom

if TYPE_CHECKING:
    from openrecycle.agent.checkpoints import Checkpoint, Origin
    from openrecycle.agent.coordination.launcher import Coordination
    from openrecycle.agent.coordination.local import LocalCoordination
    from openrecycle.agent.jobs.preflight import JobMemory
    from openrecycle.agent.launcher.launch import Launcher
    from openrecycle.agent.models.layers import Partition
    from openrecycle.agent.models.workload import Workload, WorkloadSource
    from openrecycle.agent.nodes.pool import Fits, SpreadPool
    from openrecycle.agent.nodes.server import Succession

PLANNED_FAILURES = 2
"""Without a console, plans are made ahead for up to so many failures."""


def _with_step(options: TrainingOptions, workload: WorkloadSource, say: Say) -> TrainingOptions:
    """Measures how long a step takes on this machine, and puts that into the job that plans are made from. Used where
    ops are paced and the pace says nothing of steps, which then take as long as they take."""
    from openrecycle.agent.profiling import measure_step

    step = measure_step(workload, options.job, options.optimization)
    say(f"a step takes {step:g} ms here, which plans reckon with")
    job = options.job
    if job.layers:
        each = round(step * job.stages / len(job.layers), 3)
        layers = tuple(replace(layer, optimizer=each) for layer in job.layers)
        return replace(options, job=replace(job, layers=layers, profiles=(), transfers=(), backward_transfers=()))
    profiles = tuple(replace(profile, optimizer=step) for profile in job.profiles)
    return replace(options, job=replace(job, profiles=profiles))


def look_at(options: TrainingOptions, source: WorkloadSource, say: Say, role: NodeRole | None = None) -> None:
    """Checks everything that `make_launcher` checks before it makes, starts or asks anything, and says the same to the
    user. Raises InputError, or InfeasibleError."""
    options.check()
    here = _workers_on(options.job, role)
    if shared := options.platform.check(len(here) * options.platform.ranks_per_worker):
        say(shared)
    _looked_at(options, source, here, say)


def _looked_at(
    options: TrainingOptions,
    source: WorkloadSource,
    here: Collection[Worker],
    say: Say,
    needed: JobMemory | None = None,
) -> tuple[TrainingOptions, Workload, Partition, JobMemory]:
    """Checks the workload against the options. Returns the options with the workload's layers in the job, the workload,
    the number of layers of each stage at the start, and the memory that workers need."""
    from openrecycle.agent.jobs.preflight import check_schedule, check_workload, partition_at_start
    from openrecycle.agent.models.layers import kind_of, layer_count

    workload = source.load()
    if needed is None:
        needed = check_workload(workload, options, here)
        say(needed.text)
    if options.checkpoints.resume is None:  # otherwise a checkpoint may have the schedule that counts
        check_schedule(workload, options, needed)
    layers = layer_count(workload, options.job.stages)
    job = options.planning.layered(options.job, None if kind_of(workload) == "stage" else layers)
    options = replace(options, job=job)
    return options, workload, partition_at_start(options, layers), needed


@prints_anyway()
def make_launcher(
    options: TrainingOptions,
    source: WorkloadSource,
    listener: Callable[[dict[str, Any]], None],
    say: Say,
    *,
    role: NodeRole | None = None,
    needed: JobMemory | None = None,
) -> Launcher:
    """Returns a launcher whose `run` trains.

    source: of the workload. listener: gets every line of the record. say: gets sentences for the person who started the
    job; it is also called in other threads. role: given where this launcher leads a job of several nodes. needed: what
    agent.jobs.preflight has found out about the workload's memory, if it has done so.

    Raises InputError, InfeasibleError, ConsoleUnavailable or ConsoleRefused; with `role`, also LedElsewhere.
    """
    options.check()
    # The worker server imports torch, too, which takes as long as here: so both do it at the same time.
    start_worker_server(preload(source))
    here = _workers_on(options.job, role)
    if shared := options.platform.check(len(here) * options.platform.ranks_per_worker):
        say(shared)
    from openrecycle.agent.checkpoints import IF_ANY, claim
    from openrecycle.agent.jobs.preflight import Machine, check_schedule
    from openrecycle.agent.launcher import launch
    from openrecycle.agent.launcher.record import WARNING
    from openrecycle.agent.models.layers import layer_io_of
    from openrecycle.agent.models.parallelized import DividedBatches, parts_of_a_rank
    from openrecycle.agent.models.workload import probe_inputs, probe_targets
    from openrecycle.agent.monitoring.console_link import ConsoleCoordination, create_job
    from openrecycle.agent.nodes.pool import open_pool
    from openrecycle.agent.workers.spec import RunSpec

    saved = options.checkpoints.folder
    # To resume, the folder must be there already; otherwise its name is wrong.
    if saved is not None and (options.checkpoints.resume in (None, IF_ANY) or saved.is_dir()):
        _make_folder("checkpoints.directory", saved, full=True)
    weights = None if options.weights is None else Path(options.weights)
    _make_folder("weights", weights, full=saved is not None)
    options = options.anchored()
    options, workload, partition, needed = _looked_at(options, source, here, say, needed)
    layers = sum(partition)
    fits: Fits | None = needed.check if options.platform.device == "cpu" else None
    divided, seen = False, workload
    if options.platform.ranks_per_worker > 1:
        divided, _ = parts_of_a_rank(workload, layers, options.platform.shape, options.seed)
        if divided:
            seen = DividedBatches(workload, 0, options.platform.shape[0])
            probe_inputs(seen, options.seed), probe_targets(seen, options.seed)
    layer_io, autocast, on_cpu = None, options.optimization.autocast, options.platform.device == "cpu"
    # With autocast the types of a stage's output depend on the device; this process leaves the GPU to the workers.
    if on_cpu or autocast is None:
        layer_io = layer_io_of(seen, layers, options.seed, autocast, warn=lambda text: say(WARNING + text))
    if options.console.url is not None and options.pace and "O" not in options.pace and on_cpu:
        options = _with_step(options, source, say)
    # Before the checkpoints are looked at: while another node leads the job, they belong to that leader.
    pool = open_pool(role, options.job, source, options.console.token, say, fits) if role else None
    with contextlib.ExitStack() as failing:
        if pool is not None:  # after an error here, the other nodes would wait for this one to come back
            failing.callback(pool.call_off)
        if claimed := claim(options.checkpoints):
            failing.callback(claimed.close)
        origin = _origin(options, source, layers, say, partial(check_schedule, workload, options, needed))
        # Again, now that nothing is there any more that an earlier run of this job has left half written.
        _make_folder("checkpoints.directory", saved)
        _make_folder("weights", weights)
        room: LayerRoom | None = None
        if options.job.layers and options.planning.relayout != "never":
            own = [Machine(here, memory_limit(), socket.gethostname())]
            machines = [Machine(*node) for node in pool.machines] if pool else own
            room = needed.room(workload, options, machines if on_cpu else [])
        heartbeat_seconds: float | None = None
        technique, memory = options.planning.limits
        coordination: Coordination
        catalog = Catalog(options.job, technique, memory)
        if options.console.url is None:
            _plan_ahead(catalog)
            coordination = _local(options, origin, catalog, say, room)
        else:
            url, token, timeouts = options.console.url, options.console.token, options.faults.timeouts
            client = ConsoleClient(url, token=token)
            with spelled({**TOLD, "durations": "planning.pace"}):
                spec = JobSpec.of(
                    options.job,
                    samples_per_micro_batch=workload.samples_per_micro_batch,
                    stage_bytes=needed.told,
                    room=room,
                    **options.told(),
                )
            created = create_job(client, spec, say)
            # Checked here, too, since a console that does not know these time-outs can't have checked them.
            timeouts.check_above(created.dead_seconds)
            # Not before the console declares a worker dead. But soon enough after that to report in time a worker that
            # can't speak for itself (see Timeouts.pause).
            dead = created.dead_seconds
            borne = min(max(timeouts.silence, dead), max(2 * dead, 4 * ALIVE_SECONDS))
            timeouts = replace(timeouts, silence=borne)
            options = replace(options, faults=replace(options.faults, timeouts=timeouts))
            # From here on the launcher uses a token of this job only, which opens nothing else.
            token = client.issued or token
            heartbeat_seconds = created.heartbeat_seconds
            coordination = ConsoleCoordination(
                _connect(url, token, pool),
                created.job_id,
                say,
                checkpoint=_restore_point(options, origin, say),
                interval=created.heartbeat_seconds,
                decide=pool.decide if pool else lambda send: send(),
            )
            say(f"job {created.job_id} at {url}")
        options = replace(options, console=replace(options.console, token=None))
        run = RunSpec(options, source, partition, layer_io, origin, heartbeat_seconds, bool(shared), divided, room)
        launcher = launch.Launcher(run, coordination, listener, catalog, pool, claim=claimed)
        failing.pop_all()
        return launcher


def take_over(succession: Succession, listener: Callable[[dict[str, Any]], None], say: Say) -> Launcher:
    """Returns a launcher that goes on with a job whose leading node is gone. listener, say: as for `make_launcher`."""
    from openrecycle.agent.checkpoints import claim
    from openrecycle.agent.launcher import launch
    from openrecycle.agent.launcher.record import iteration_of
    from openrecycle.agent.monitoring.console_link import ConsoleCoordination

    run = succession.run
    options = run.options
    # Plans are made only when they are needed: there is no time now to make all of them ahead.
    catalog = Catalog(options.job, *options.planning.limits)
    pool, takeover = succession.take_over()
    saved, url = takeover.document["decides"], options.console.url
    coordination: Coordination
    if url is None:
        coordination = local = _local(options, run.origin, catalog, say, run.room)
        local.restore(saved)
    else:
        coordination = ConsoleCoordination(
            _connect(url, saved["token"], pool),
            saved["job"],
            say,
            checkpoint=_restore_point(options, run.origin, say),
            interval=run.heartbeat_seconds or 1.0,
            decide=pool.decide,
            saved=saved,
            recorded=lambda first, last: map(iteration_of, succession.record.iterations(first, last)),
        )
    claimed = None
    with contextlib.suppress(InputError):  # the claim tells later jobs that this folder is in use
        claimed = claim(options.checkpoints)
    return launch.Launcher(run, coordination, listener, catalog, pool, takeover, claimed)


def _connect(url: str, token: str | None, pool: SpreadPool | None) -> Callable[[], ConsoleClient]:
    """Returns what makes a console client. pool: given if this launcher leads several nodes; by it the console can tell
    this leader from an earlier one."""
    if pool is None:
        return lambda: ConsoleClient(url, token=token, known=True)
    return lambda: ConsoleClient(url, token=token, known=True, lead=pool.lead, deposed=pool.depose)


def _local(
    options: TrainingOptions, origin: Origin | None, catalog: Catalog, say: Say, room: LayerRoom | None
) -> LocalCoordination:
    """Makes the coordination of a job without a console."""
    from openrecycle.agent.coordination.local import LocalCoordination

    return LocalCoordination(
        catalog,
        migrate=options.may_migrate(by_default=False),
        checkpoint=_restore_point(options, origin, say),
        back_to=back_to(options.checkpoints.folder is not None, options.faults.max_restarts),
        relayout=options.planning.relayout,
        room=room,
        iterations=options.iterations,
    )


def _make_folder(field: str, path: Path | None, *, full: bool = False) -> None:
    """Makes a folder if need be, and tries to write a file into it, so that a full disk is found now and not at the
    end of the job. full: the disk may be full. Raises InputError."""
    if path is None:
        return
    probe = path / f".writable-{os.getpid()}"
    try:
        path.mkdir(exist_ok=True)
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if not (full and path.is_dir() and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            raise InputError(field, str(path), f"a folder that can be written ({error.strerror})") from None


def _workers_on(job: Job, role: NodeRole | None) -> list[Worker]:
    """Returns the workers that run on this node."""
    if role is None:
        return list(job.workers())
    from openrecycle.agent.nodes.pool import place

    return [worker for worker, node in place(job, role.nodes).items() if node == role.rank]


def _origin(
    options: TrainingOptions,
    source: WorkloadSource,
    layers: int,
    say: Say,
    check: Callable[[Checkpoint | None], object],
) -> Origin | None:
    if options.checkpoints.directory is None:
        return None
    from openrecycle.agent.checkpoints import Identity, prepare

    job, name = options.job, getattr(source, "path", type(source).__name__)
    identity = Identity(name, layers, job.stages, job.pipelines, job.micro_batches, options.seed)
    return prepare(options.checkpoints, identity, options.iterations, say, check)


def _restore_point(
    options: TrainingOptions, origin: Origin | None, say: Callable[[str], None]
) -> Callable[[], str | None]:
    """Returns a function to be called when a stage's state is lost. It returns what the job goes back to, of which
    `back_to` has the word: the path of the newest checkpoint that is not damaged, or FROM_START before the first one;
    None if there is nothing. It raises OSError while the folder can't be read."""
    folder, said = options.checkpoints.folder, ""
    if folder is None:
        return lambda: FROM_START
    resumed = origin is not None and origin.resumed is not None
    without = "" if resumed else back_to(False, options.faults.max_restarts)

    def newest() -> str | None:
        from openrecycle.agent.checkpoints import CheckpointError, go_back, put_back_replaced, whole_checkpoints

        nonlocal said
        try:
            put_back_replaced(folder)
            if without and not whole_checkpoints(folder):
                return FROM_START
            found = go_back(folder)
        except CheckpointError as error:
            say(f"warning: {error}")
            return None
        except OSError as error:
            if str(error) != said:
                said = str(error)
                say(f"warning: {folder}: can't be read, and is tried again: {said}")
            raise
        return str(found.path)

    return newest


def _plan_ahead(catalog: Catalog) -> None:
    """Makes the plans for the failures that a job without a console should expect."""
    job = catalog.job
    for patterns in catalog.patterns(PLANNED_FAILURES if job.pipelines * job.stages <= 64 else 1):
        for failed in patterns:
            catalog.add(checked(catalog.plan_for(failed)[0]))


def check_writable(path: Path) -> None:
    """Raises InputError unless the record can be written to `path`."""
    if not path.parent.is_dir():
        raise InputError("record", str(path), "a file in a folder that exists")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError("record", str(path), "a file that can be written")
