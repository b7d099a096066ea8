"""What the processes of a job are started with, and how another node is told of it: plain data, and plain JSON, so
nothing has to be unpickled.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from pydantic import TypeAdapter, ValidationError

from openrecycle.agent.checkpoints import Origin
from openrecycle.agent.config.options import LOOPBACK, TrainingOptions
from openrecycle.agent.models.data import own_numbers
from openrecycle.agent.models.layers import Partition, StageIO
from openrecycle.agent.models.workload import NamedWorkload, Workload, WorkloadSource
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Worker

# -- what the processes of a job are started with; plain data -----------------------------------


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

    def load_workload(self) -> Workload:
        """One that nothing has been trained of, the same each time, also where its making draws numbers without a
        seed. Raises InputError when it can't be made."""
        with own_numbers("workload", self.options.seed):
            return self.workload.load()


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

    @property
    def on_gpu(self) -> bool:
        return self.run.options.platform.device == "cuda"


# -- what a node is told of a worker to start ---------------------------------------------------

dist: Any = torch.distributed

# What must be the same on all nodes, since it shows in the bits.
MACHINE = {
    "torch": torch.__version__,
    "python": platform.python_version(),
    "instruction set": torch.backends.cpu.get_cpu_capability(),
}

# What a RunSpec holds, and how it is told.
_FORMS: dict[str, TypeAdapter[Any]] = {
    "options": TypeAdapter(TrainingOptions),
    "partition": TypeAdapter(Partition),
    "layer_io": TypeAdapter(StageIO | None),
    "origin": TypeAdapter(Origin | None),
    "heartbeat_seconds": TypeAdapter(float | None),
    "shared_gpus": TypeAdapter(bool),
    "divided": TypeAdapter(bool),
}


def by_name(workload: WorkloadSource) -> NamedWorkload:
    """`workload`; raises InputError when it has no name by which another host could find it."""
    if not isinstance(workload, NamedWorkload):
        raise InputError("--workload", type(workload).__name__, "module:factory in a job on several nodes")
    return workload


def encode_spec(spec: WorkerSpec) -> dict[str, Any]:
    """Raises InputError as `by_name` does."""
    return {
        "worker": str(spec.worker),
        "incarnation": spec.incarnation,
        "joins": spec.joins,
        "threads": spec.threads,
        "address": spec.address,
        **encode_run(spec.run),
    }


def encode_run(run: RunSpec) -> dict[str, Any]:
    """Raises InputError as `by_name` does."""
    workload = by_name(run.workload)
    return {
        "workload": workload.path,
        "workload_options": dict(workload.options),
        **{name: form.dump_python(getattr(run, name), mode="json") for name, form in _FORMS.items()},
    }


def decode_spec(document: dict[str, Any]) -> WorkerSpec:
    """Raises ValueError when it is no such document."""
    run = decode_run(document)
    try:
        return WorkerSpec(
            worker=Worker.parse(document["worker"]),
            incarnation=str(document["incarnation"]),
            run=run,
            joins=bool(document["joins"]),
            threads=int(document["threads"]),
            address=str(document["address"]),
        )
    except (KeyError, TypeError, InputError) as error:
        raise ValueError(f"no worker can be started from this: {error}") from None


def decode_run(document: Mapping[str, Any]) -> RunSpec:
    """Raises ValueError when it is no such document."""
    try:
        return RunSpec(
            workload=NamedWorkload(str(document["workload"]), document["workload_options"]),
            **{name: form.validate_python(document[name]) for name, form in _FORMS.items()},
        )
    except (KeyError, TypeError, IndexError, ValidationError) as error:
        raise ValueError(f"no worker can be started from this: {error}") from None
