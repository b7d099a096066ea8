"""A moving average of the parameters, beside those that are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.models.state import AVERAGE
from openrecycle.agent.stages.optimizer import NamedParameters, make_optimizer
from openrecycle.planner.jobs.errors import InputError


@dataclass(frozen=True)
class ExponentialMovingAverage:
    """An optimizer's factory that also keeps, of every parameter that is trained, average = decay * average + (1 -
    decay) * parameter, from the first step on. `result.state_dict(layer, averaged=True)` has them in the end.

        optimizer=ExponentialMovingAverage(partial(torch.optim.AdamW, lr=1e-3), decay=0.999)

    The average is part of the optimizer's state, so it goes wherever that goes: into checkpoints, to a worker that
    joins, along with layers that move; and a step that is undone is undone in it. Raises InputError.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer]
    decay: float = 0.999

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            raise InputError("optimizer", self.optimizer, "something that can be called")
        if not isinstance(self.decay, float) or not 0 <= self.decay < 1:
            raise InputError("decay", self.decay, "a number from 0 to below 1")

    def __call__(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        made = make_optimizer(self.optimizer, named_parameters)
        if isinstance(made, torch.optim.Optimizer):
            made.register_step_post_hook(self._average)
        return made

    @torch.no_grad()
    def _average(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # not stepped; many optimizers take a state that is not empty for theirs
                    continue
                state: dict[str, Any] = optimizer.state[parameter]
                average: Tensor | None = state.get(AVERAGE)
                if average is None:
                    state[AVERAGE] = parameter.detach().clone()
                else:
                    average.lerp_(parameter, 1 - self.decay)

    _average.elementwise = True  # type: ignore[attr-defined]
