"""What a job leaves behind, its TrainingResult, and the checkpoints that are there while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrecycle.agent.checkpoints import CheckpointError, whole_checkpoints
from openrecycle.agent.launcher.record import EvaluationResult
from openrecycle.agent.messages.protocol import Recovery
from openrecycle.agent.models.layers import LayerStack, build_layer, state_names
from openrecycle.agent.models.state import AVERAGE, decode
from openrecycle.agent.models.workload import Workload
from openrecycle.agent.stages.optimizer import keeps_averages, make_optimizer
from openrecycle.planner.jobs.errors import InputError

if TYPE_CHECKING:
    from openrecycle.agent.models.hugging_face import Pretrained


class Trained:
    """Base of whatever gives access to the trained weights of a job."""

    _weights: Callable[..., dict[str, Any]]
    _pretrained: Pretrained | None

    def state_dict(self, layer: int, *, averaged: bool = False) -> dict[str, Any]:
        """Returns the weights of a layer, for `load_state_dict` of the module that its builder makes. In a job given as
        stages, `layer` is the number of a stage. averaged: return their ExponentialMovingAverage; raises InputError
        where the job has none."""
        try:
            return self._weights(layer, averaged=averaged)
        except FileNotFoundError:
            if not averaged:
                raise
            raise InputError("averaged", True, "a job with optimizer=ExponentialMovingAverage(...)") from None

    def save_pretrained(self, folder: str | Path, *, averaged: bool = False) -> None:
        """Writes a folder that transformers' `from_pretrained` reads, and `from_transformers` too. Only for a job of
        `ResilientTrainer.from_transformers`. averaged: as for `state_dict`. Raises InputError."""
        if self._pretrained is None:
            raise InputError("save_pretrained", "another model", "one of ResilientTrainer.from_transformers")
        self._pretrained.save(partial(self.state_dict, averaged=averaged), folder)


@dataclass(frozen=True)
class TrainingResult(Trained):
    """What a job left behind.

    losses: one exact number per iteration of this run, the mean over its micro-batches; NaN, if it was not
    told, as when all who computed it died first; iterations before the checkpoint that the run began with are not
    among them. evaluations: in order. recoveries: the failures that were
    survived. parameters_sha256: hash of the parameters of all stages; equal runs have equal hashes.
    """

    losses: tuple[float, ...]
    recoveries: tuple[Recovery, ...]
    parameters_sha256: str
    _weights: Callable[..., dict[str, Any]] = field(repr=False)
    evaluations: tuple[EvaluationResult, ...] = ()
    _pretrained: Pretrained | None = field(default=None, repr=False)


@dataclass(frozen=True)
class WrittenCheckpoint(Trained):
    """A complete checkpoint in the job's folder. It is kept until `Checkpoints.keep` newer ones are there.
    iteration: how many iterations it comes after."""

    iteration: int
    _weights: Callable[..., dict[str, Any]] = field(repr=False)
    _pretrained: Pretrained | None = field(default=None, repr=False)


class CheckpointWeights:
    """Returns the weights of a checkpoint, as `read_weights` does. They are read at each call.

    workload: returns the job's workload. layers: how many the job has. seed: the job's.
    """

    def __init__(
        self, directory: Path, iteration: int, workload: Callable[[], Workload], layers: int, seed: int
    ) -> None:
        self._directory, self._iteration = directory, iteration
        self._workload, self._layers, self._seed = workload, layers, seed

    def __call__(self, layer: int, *, averaged: bool = False) -> dict[str, Any]:
        """Returns a layer's weights. Raises CheckpointError, also if the checkpoint was removed in favour of newer
        ones; FileNotFoundError where there are no averages."""
        if not 0 <= layer < self._layers:
            raise InputError("layer", layer, f"0 to {self._layers - 1}")
        checkpoint = next((c for c in whole_checkpoints(self._directory) if c.iteration == self._iteration), None)
        if checkpoint is None:
            raise CheckpointError(f"{self._directory}: the checkpoint of iteration {self._iteration} is gone")
        state = checkpoint.load(range(layer, layer + 1))
        values = {name: decode(value, state.tensors) for name, value in state.document["model"].items()}
        workload = self._workload()
        built = build_layer(workload, layer, self._layers, self._seed)  # shows what its state dict has
        if averaged:
            kept = {name: decode(value, state.tensors) for name, value in state.document["state"].items()}
            averages = {name: of[AVERAGE] for name, of in kept.items() if AVERAGE in of}
            # A layer of a job with averages has none before the first step, nor if nothing in it is trained.
            named = list(LayerStack({layer: built}).named_parameters())
            if not averages and not keeps_averages(make_optimizer(workload.optimizer, named)):
                raise FileNotFoundError("there are no averages")
            values |= averages
        names = state_names(built)
        return {n: values.get(f"{layer}.{names.get(n, n)}", value) for n, value in built.state_dict().items()}
