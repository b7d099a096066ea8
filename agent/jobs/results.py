"""What a job leaves behind, and what of it is there meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrecycle.agent.launcher.record import EvaluationResult
from openrecycle.agent.messages.protocol import Recovery
from openrecycle.planner.jobs.errors import InputError

if TYPE_CHECKING:
    from openrecycle.agent.models.hugging_face import Pretrained


class Trained:
    """What has the weights of a job's layers."""

    _weights: Callable[..., dict[str, Any]]
    _pretrained: Pretrained | None

    def state_dict(self, layer: int, *, averaged: bool = False) -> dict[str, Any]:
        """The weights of a layer, for `load_state_dict` of the module that its builder makes; of a job given
        as stages, those of a stage. averaged: their ExponentialMovingAverage. Raises InputError where there is none."""
        try:
            return self._weights(layer, averaged=averaged)
        except FileNotFoundError:
            if not averaged:
                raise
            raise InputError("averaged", True, "a job with optimizer=ExponentialMovingAverage(...)") from None

    def save_pretrained(self, folder: str | Path, *, averaged: bool = False) -> None:
        """Of a job of `ResilientTrainer.from_transformers`: writes what transformers' `from_pretrained` reads, and
        `from_transformers` too. averaged: as of `state_dict`. Raises InputError."""
        if self._pretrained is None:
            raise InputError("save_pretrained", "another model", "one of ResilientTrainer.from_transformers")
        self._pretrained.save(partial(self.state_dict, averaged=averaged), folder)


@dataclass(frozen=True)
class TrainingResult(Trained):
    """What a job left behind.

    losses: mean over the micro-batches, one per iteration of this run (not of those before a
    checkpoint it began with), exact. evaluations: in order. recoveries: the
    failures that were survived. parameters_sha256: of all stages' parameters; equal for equal runs.
    """

    losses: tuple[float, ...]
    recoveries: tuple[Recovery, ...]
    parameters_sha256: str
    _weights: Callable[..., dict[str, Any]] = field(repr=False)
    evaluations: tuple[EvaluationResult, ...] = ()
    _pretrained: Pretrained | None = field(default=None, repr=False)


@dataclass(frozen=True)
class WrittenCheckpoint(Trained):
    """A checkpoint that is whole, in the job's folder of them; it stays until as many newer ones are there as are kept.
    iteration: how many iterations are in it."""

    iteration: int
    _weights: Callable[..., dict[str, Any]] = field(repr=False)
    _pretrained: Pretrained | None = field(default=None, repr=False)
