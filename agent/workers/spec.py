"""What the processes of a job are started with; plain data."""

from __future__ import annotations

from dataclasses import dataclass

from openrecycle.agent.checkpoints.checkpointing import Origin
from openrecycle.agent.config.options import TrainingOptions
from openrecycle.agent.models.layers import Partition
from openrecycle.agent.models.stage_io import StageIO
from openrecycle.agent.models.workload import WorkloadSource
from openrecycle.agent.transport.communicator import LOOPBACK
from openrecycle.planner.jobs.job import Worker


@dataclass(frozen=True)
class RunSpec:
    """What is the same for all workers: the options, and what was found out from them before the start.

    partition: layers per stage; (): even. layer_io: what passes between layers; None: each worker finds out.
    origin: of the job's checkpoints, where it writes any. heartbeat_seconds: how often a console is told of each;
    None: there is none. shared_gpus: do workers share GPUs? divided: are micro-batches divided over the ranks of a
    worker (agent.models.parallelized.parts_of_a_rank)?
    """

    options: TrainingOptions
    workload: WorkloadSource
    partition: Partition = ()
    layer_io: StageIO | None = None
    origin: Origin | None = None
    heartbeat_seconds: float | None = None
    shared_gpus: bool = False
    divided: bool = False


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker process needs to know. joins: it replaces a dead one and takes its state from a peer of
    its stage. address: of its host, as its peers reach it. slot: see agent.launcher.processes. rank: of the worker's
    `ranks`; meeting: a file where these find each other. The last three are set when the process is started."""

    worker: Worker
    incarnation: str
    run: RunSpec
    joins: bool = False
    threads: int = 1
    address: str = LOOPBACK
    slot: int = 0
    rank: int = 0
    meeting: str = ""

    @property
    def ranks(self) -> int:
        return self.run.options.platform.ranks_per_worker
