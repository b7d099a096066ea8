"""OpenReCycle: pipeline-parallel training that survives failures without spare GPUs.

`ResilientTrainer` trains, `Reporter` tells a console about a job that keeps its own loop. Names are loaded when they
are used: torch takes seconds to import. In a clone `agent`, `app`, `db` and `planner` lie at the top; they are added to
this package's path, so that all code has one name there and in site-packages.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrecycle.agent.averaging import ExponentialMovingAverage
    from openrecycle.agent.callbacks import Callback, MLflow, ProgressBar, TensorBoard, WeightsAndBiases
    from openrecycle.agent.data import Evaluation, Loading, MicroBatchSampler, PadCollate
    from openrecycle.agent.devices import Platform
    from openrecycle.agent.gradients import GradientSum
    from openrecycle.agent.launch import JobFailed
    from openrecycle.agent.options import Checkpoints, Console, Faults, HandOver, Optimization, Planning
    from openrecycle.agent.own_group import GroupLost
    from openrecycle.agent.reporter import Reporter
    from openrecycle.agent.stage_io import TensorSpec
    from openrecycle.agent.timeouts import Timeouts
    from openrecycle.agent.trainer import ResilientTrainer, TrainingResult
    from openrecycle.planner.errors import InputError
    from openrecycle.planner.job import Job

_source = Path(__file__).resolve().parents[1]
if _source.name == ".src":  # a clone; links would do, but not every copy of a tree keeps them
    __path__.append(str(_source.parent))

_HOMES = {
    "Callback": "openrecycle.agent.callbacks",
    "Checkpoints": "openrecycle.agent.options",
    "Console": "openrecycle.agent.options",
    "Evaluation": "openrecycle.agent.data",
    "ExponentialMovingAverage": "openrecycle.agent.averaging",
    "Faults": "openrecycle.agent.options",
    "GradientSum": "openrecycle.agent.gradients",
    "GroupLost": "openrecycle.agent.own_group",
    "HandOver": "openrecycle.agent.options",
    "InputError": "openrecycle.planner.errors",
    "Job": "openrecycle.planner.job",
    "JobFailed": "openrecycle.agent.launch",
    "Loading": "openrecycle.agent.data",
    "MLflow": "openrecycle.agent.callbacks",
    "MicroBatchSampler": "openrecycle.agent.data",
    "Optimization": "openrecycle.agent.options",
    "PadCollate": "openrecycle.agent.data",
    "Planning": "openrecycle.agent.options",
    "Platform": "openrecycle.agent.devices",
    "ProgressBar": "openrecycle.agent.callbacks",
    "Reporter": "openrecycle.agent.reporter",
    "ResilientTrainer": "openrecycle.agent.trainer",
    "TensorBoard": "openrecycle.agent.callbacks",
    "TensorSpec": "openrecycle.agent.stage_io",
    "Timeouts": "openrecycle.agent.timeouts",
    "TrainingResult": "openrecycle.agent.trainer",
    "WeightsAndBiases": "openrecycle.agent.callbacks",
}

__all__ = [
    "Callback",
    "Checkpoints",
    "Console",
    "Evaluation",
    "ExponentialMovingAverage",
    "Faults",
    "GradientSum",
    "GroupLost",
    "HandOver",
    "InputError",
    "Job",
    "JobFailed",
    "Loading",
    "MLflow",
    "MicroBatchSampler",
    "Optimization",
    "PadCollate",
    "Planning",
    "Platform",
    "ProgressBar",
    "Reporter",
    "ResilientTrainer",
    "TensorBoard",
    "TensorSpec",
    "Timeouts",
    "TrainingResult",
    "WeightsAndBiases",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
