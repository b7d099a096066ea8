"""What a worker finds of CUDA that its server has done: `python -m tests.agent.untouched_cuda` prints it, as JSON.

A process that is forked from one which has asked the driver anything can't use a GPU. The server has its imports from
the list in agent.launcher.processes; this module comes first there, and writes down what the others ask of torch.cuda.
It runs in a process of its own, as there is one server for each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

asked: list[str] = []
"""Of torch.cuda, since this module was imported by the server."""


def _noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return function(*args, **kwargs)

    return noted


for _name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_properties"):
    setattr(torch.cuda, _name, _noting(_name, getattr(torch.cuda, _name)))


@dataclass(frozen=True)
class Told:
    """What the worker is told: nothing."""


def report(told: Told, pipe: Connection) -> None:
    """The worker."""
    cuda: Any = torch.cuda
    found = {
        "asked": list(asked),
        "initialized": cuda.is_initialized(),
        "bad_fork": bool(cuda._is_in_bad_fork()),
        "loaded": sorted(name for name in ("openrecycle.agent.workers.worker", "torch._dynamo") if name in sys.modules),
        "nvml": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
    }
    asked.clear()
    if cuda.is_available():
        try:
            found["sum"] = float(torch.ones(3, device="cuda").sum())
        except RuntimeError as error:
            found["error"] = str(error)
    pipe.send_bytes(json.dumps(found | {"would_note": asked[:1]}).encode())


def main() -> None:
    from openrecycle.agent.launcher.processes import ProcessPool, preload
    from openrecycle.agent.models.workload import NamedWorkload
    from openrecycle.planner.jobs.job import Worker

    # By its name, as the server has it, and not as __main__.
    from tests.agent import untouched_cuda as own

    modules = preload(NamedWorkload("openrecycle.agent.examples.gpt:Gpt"))
    pool = ProcessPool(own.report, [own.__name__, *modules])
    try:
        entry = pool.start(Worker(0, 0), lambda _: own.Told(), 0.0)
        print(entry.pipe.recv_bytes().decode())
    finally:
        pool.kill_all()


if __name__ == "__main__":
    main()
