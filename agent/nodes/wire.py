"""What a node is told of a worker to start: plain JSON, so nothing has to be unpickled."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from pydantic import TypeAdapter, ValidationError

from openrecycle.agent.checkpoints.checkpointing import Origin
from openrecycle.agent.config.options import TrainingOptions
from openrecycle.agent.models.layers import Partition
from openrecycle.agent.models.stage_io import StageIO
from openrecycle.agent.models.workload import NamedWorkload, WorkloadSource
from openrecycle.agent.workers.spec import RunSpec, WorkerSpec
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Worker

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
