"""Training that survives failures: `ResilientTrainer` trains, `Reporter` tells a console about a job that
keeps its own loop. Names are loaded when they are used: torch takes seconds to import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.boundaries import TensorSpec
    from agent.data import MicroBatchSampler
    from agent.launch import JobFailed
    from agent.recipe import HandOver
    from agent.reporter import Reporter
    from agent.timeouts import Timeouts
    from agent.trainer import ResilientTrainer, TrainingResult
    from planner.errors import InputError
    from planner.job import Job

_HOMES = {
    "HandOver": "agent.recipe",
    "InputError": "planner.errors",
    "Job": "planner.job",
    "JobFailed": "agent.launch",
    "MicroBatchSampler": "agent.data",
    "Reporter": "agent.reporter",
    "ResilientTrainer": "agent.trainer",
    "TensorSpec": "agent.boundaries",
    "Timeouts": "agent.timeouts",
    "TrainingResult": "agent.trainer",
}

__all__ = [
    "HandOver",
    "InputError",
    "Job",
    "JobFailed",
    "MicroBatchSampler",
    "Reporter",
    "ResilientTrainer",
    "TensorSpec",
    "Timeouts",
    "TrainingResult",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
