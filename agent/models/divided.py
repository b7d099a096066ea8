"""Micro-batches that are divided over the ranks of a worker, in which fully_shard has split the layers.

Rank r of R gets the r-th of R equal runs of samples: of every tensor of inputs and targets, that part of dimension 0.
Each rank reads the whole micro-batch and keeps its part. The loss is the mean over all ranks, which all of them know;
gradients are summed over the ranks (agent.models.fully_sharded).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.models.stage_io import nothing
from openrecycle.agent.models.workload import Metric, Workload
from openrecycle.planner.jobs.errors import InputError

Gather = Callable[[Tensor], Tensor]
"""Everybody's numbers, of one shape: (ranks, ...)."""


class DividedBatches:
    """`workload`, whose micro-batches come as the part of `rank`. What it says else is unchanged. gather: among the
    ranks; None: nothing is computed."""

    def __init__(self, workload: Workload, rank: int, ranks: int, gather: Gather | None = None) -> None:
        self._workload, self._rank, self._ranks, self._gather = workload, rank, ranks, gather
        shape, declared = (getattr(workload, name, None) for name in ("stage_output_shape", "stage_io"))
        if shape is not None:
            self.stage_output_shape = (_part_of(shape[0], ranks), *shape[1:])
        if declared is not None:
            self.stage_io = tuple(
                tuple(replace(spec, shape=(_part_of(spec.shape[0], ranks), *spec.shape[1:])) for spec in boundary)
                for boundary in declared
            )
        data = getattr(workload, "evaluation", None)
        if data is not None:
            self.evaluation = _DividedEvaluation(self, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        return self.part(self._workload.inputs(seed, iteration, pipeline, micro_batch))

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        return self.part(self._workload.targets(seed, iteration, pipeline, micro_batch))

    def largest(self, seed: int) -> tuple[Any, Any]:
        inputs, targets = self._workload.largest(seed)  # type: ignore[attr-defined]
        return self.part(inputs), self.part(targets)

    def loss(self, output: Any, targets: Any) -> Tensor:
        """The mean over the whole micro-batch; its gradient is that of this rank's part."""
        return self._mean(self._workload.loss, output, targets)

    def weight(self, targets: Any) -> float:
        """Of the whole micro-batch."""
        return float(self._gathered(self._own_weight(targets)).sum())

    def measured(self, metric: Metric) -> Metric:
        """The same of the whole micro-batch."""
        return lambda output, targets: self._mean(metric, output, targets)

    def part(self, data: Any) -> Any:
        """Of the inputs or targets of a micro-batch. Raises InputError."""
        if isinstance(data, Tensor):
            if not data.dim():
                raise InputError("data", "a tensor of no dimensions", "samples in dimension 0, to divide over ranks")
            each = _part_of(data.shape[0], self._ranks)
            return data[self._rank * each : (self._rank + 1) * each]
        if isinstance(data, Mapping):
            return type(data)((key, self.part(value)) for key, value in data.items())  # type: ignore[call-arg]
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*map(self.part, data))
        if isinstance(data, (tuple, list)):
            return type(data)(map(self.part, data))
        return data

    def _own_weight(self, targets: Any) -> float:
        weighted = getattr(self._workload, "usual_weight", None) is not None
        return float(self._workload.weight(targets)) if weighted else 1.0  # type: ignore[attr-defined]

    def _mean(self, measure: Callable[[Any, Any], Any], output: Any, targets: Any) -> Tensor:
        """Over the ranks, each as it is weighted. What raises here is NaN to the others, which wait for it."""
        error, weight = None, 0.0
        own = torch.full((), math.nan)
        try:
            weight = self._own_weight(targets)
            found = measure(output, targets) if weight else nothing(output)
            own = found if isinstance(found, Tensor) else torch.tensor(float(found))
        except Exception as caught:
            error, weight = caught, 1.0
        # By way of the host, where weights are.
        told = torch.tensor([float(own.detach()), weight], dtype=torch.float64)
        values, weights = self._gathered(told).unbind(1)
        if error is not None:
            raise error
        total = float(weights.sum())
        mean = (values * weights).sum() / total if total else values.sum()
        return _Mean.apply(own, mean, weight / total if total else 0.0)  # type: ignore[no-any-return, no-untyped-call]

    def _gathered(self, numbers: Tensor | float) -> Tensor:
        assert self._gather is not None, "there is nobody to gather from"
        return self._gather(torch.as_tensor(numbers, dtype=torch.float64))


class _DividedEvaluation:
    """EvaluationData likewise."""

    def __init__(self, batches: DividedBatches, data: Any) -> None:
        self._batches, self._data = batches, data
        self.micro_batches: int = data.micro_batches
        self.metrics: Mapping[str, Metric] = {name: batches.measured(m) for name, m in data.metrics.items()}

    def inputs(self, seed: int, index: int) -> Any:
        return self._batches.part(self._data.inputs(seed, index))

    def targets(self, seed: int, index: int) -> Any:
        return self._batches.part(self._data.targets(seed, index))


class _Mean(torch.autograd.Function):
    """A number that all ranks have, of which `share` times this one's own is a part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mean: Tensor, share: float) -> Tensor:
        ctx.share, ctx.dtype, ctx.shape = share, own.dtype, own.shape
        return mean.to(own.device, own.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return (gradient * ctx.share).to(ctx.dtype).expand(ctx.shape), None, None


def _part_of(samples: int, ranks: int) -> int:
    """Raises InputError."""
    if samples % ranks:
        raise InputError(
            "data",
            f"size {samples} in dimension 0",
            f"a multiple of the {ranks} ranks of a worker: layers are fully sharded, so each rank runs an equal part "
            "of the samples",
        )
    return samples // ranks
