"""OpenReCycle: pipeline-parallel training that survives failures without spare GPUs.

`ResilientTrainer` trains, `load_weights` gives a model what was trained, `Reporter` tells a console about a job that
keeps its own loop. Names are loaded when they are used, since torch takes seconds to import. In a clone `agent`, `app`,
`db` and `planner` are folders at the top. They are added to this package's path, so that all code has one name there
and in site-packages.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrecycle.agent.checkpoints import load_weights
    from openrecycle.agent.config.devices import Platform
    from openrecycle.agent.config.options import (
        Checkpoints,
        Console,
        Faults,
        HandOver,
        Optimization,
        Planning,
        Timeouts,
    )
    from openrecycle.agent.jobs.callables import Model
    from openrecycle.agent.jobs.callbacks import Callback, MLflow, ProgressBar, TensorBoard, WeightsAndBiases
    from openrecycle.agent.jobs.results import TrainingResult
    from openrecycle.agent.jobs.trainer import ResilientTrainer
    from openrecycle.agent.launcher.launch import JobFailed
    from openrecycle.agent.models.data import Data, Evaluation, MicroBatchSampler, PadCollate
    from openrecycle.agent.models.layers import TensorSpec
    from openrecycle.agent.own_loops.own_group import GroupLost, Membership
    from openrecycle.agent.own_loops.reporter import Reporter
    from openrecycle.agent.stages.gradients import GradientSum
    from openrecycle.agent.stages.optimizer import ExponentialMovingAverage
    from openrecycle.planner.jobs.errors import InputError
    from openrecycle.planner.jobs.job import Job

_source = Path(__file__).resolve().parents[1]
if _source.name == ".src":  # a clone; links would do, but not every copy of a tree keeps them
    __path__.append(str(_source.parent))

_HOMES = {
    "Callback": "openrecycle.agent.jobs.callbacks",
    "Checkpoints": "openrecycle.agent.config.options",
    "Console": "openrecycle.agent.config.options",
    "Data": "openrecycle.agent.models.data",
    "Evaluation": "openrecycle.agent.models.data",
    "ExponentialMovingAverage": "openrecycle.agent.stages.optimizer",
    "Faults": "openrecycle.agent.config.options",
    "GradientSum": "openrecycle.agent.stages.gradients",
    "GroupLost": "openrecycle.agent.own_loops.own_group",
    "HandOver": "openrecycle.agent.config.options",
    "InputError": "openrecycle.planner.jobs.errors",
    "Job": "openrecycle.planner.jobs.job",
    "JobFailed": "openrecycle.agent.launcher.launch",
    "MLflow": "openrecycle.agent.jobs.callbacks",
    "Membership": "openrecycle.agent.own_loops.own_group",
    "MicroBatchSampler": "openrecycle.agent.models.data",
    "Model": "openrecycle.agent.jobs.callables",
    "Optimization": "openrecycle.agent.config.options",
    "PadCollate": "openrecycle.agent.models.data",
    "Planning": "openrecycle.agent.config.options",
    "Platform": "openrecycle.agent.config.devices",
    "ProgressBar": "openrecycle.agent.jobs.callbacks",
    "Reporter": "openrecycle.agent.own_loops.reporter",
    "ResilientTrainer": "openrecycle.agent.jobs.trainer",
    "TensorBoard": "openrecycle.agent.jobs.callbacks",
    "TensorSpec": "openrecycle.agent.models.layers",
    "Timeouts": "openrecycle.agent.config.options",
    "TrainingResult": "openrecycle.agent.jobs.results",
    "WeightsAndBiases": "openrecycle.agent.jobs.callbacks",
    "load_weights": "openrecycle.agent.checkpoints",
}

__all__ = [
    "Callback",
    "Checkpoints",
    "Console",
    "Data",
    "Evaluation",
    "ExponentialMovingAverage",
    "Faults",
    "GradientSum",
    "GroupLost",
    "HandOver",
    "InputError",
    "Job",
    "JobFailed",
    "MLflow",
    "Membership",
    "MicroBatchSampler",
    "Model",
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
    "load_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Lists the lazy names too, for completion at a prompt."""
    return [*{*globals(), *__all__}]
