"""The trained weights, one file per layer, in the safetensors format: what is left when a job is done."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from openrecycle.agent.checkpoints.checkpoint import CheckpointError, reason_of, whole_checkpoints
from openrecycle.agent.models.layers import build_layer, first_names
from openrecycle.agent.models.state import AVERAGE, StateError, decode, encode, read_tensors, write_tensors
from openrecycle.agent.models.workload import Workload
from openrecycle.planner.jobs.errors import InputError

_OTHERS = "openrecycle"
"""What a state dict has beside tensors, which files of the format have no place for."""


class WeightsError(RuntimeError):
    """The weights could not be written; the sentence says where and why."""


def save_weights(folder: str, layer: int, state: Mapping[str, Any], *, averaged: bool = False) -> None:
    """Writes a layer's state dict, by its names, wholly or not at all. averaged: with moving averages in place of the
    parameters, to a file of its own. Raises WeightsError."""
    file = weights_file(folder, layer, averaged=averaged)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # On the CPU, so that they can be read where there is no such device.
        tensors = {name: value.cpu() for name, value in state.items() if isinstance(value, Tensor)}
        others = {n: encode(value, n, tensors) for n, value in state.items() if not isinstance(value, Tensor)}
        write_tensors(partial, tensors, {_OTHERS: json.dumps(others)} if others else None)
        partial.replace(file)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        reason = reason_of(error)
        raise WeightsError(f"the weights of layer {layer} could not be written to {file}: {reason}") from None


def read_weights(folder: str, layer: int, *, averaged: bool = False) -> dict[str, Any]:
    """The state dict of a layer. Raises OSError where there is none; StateError where it is damaged."""
    tensors, metadata = read_tensors(weights_file(folder, layer, averaged=averaged))
    try:
        others = {name: decode(value, tensors) for name, value in json.loads(metadata.get(_OTHERS, "{}")).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{weights_file(folder, layer)}: {type(error).__name__}: {error}") from None
    within = tuple(f"{name}." for name in others)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(within)} | others


class KeptWeights:
    """What a folder holds, in memory: `read_weights` of it, also when it is gone."""

    def __init__(self, folder: str, layers: int) -> None:
        """Raises as `read_weights`."""
        self._plain = [read_weights(folder, layer) for layer in range(layers)]
        self._averaged: dict[int, dict[str, Any]] = {}
        for layer in range(layers):
            with contextlib.suppress(FileNotFoundError):
                self._averaged[layer] = read_weights(folder, layer, averaged=True)

    def __call__(self, layer: int, *, averaged: bool = False) -> dict[str, Any]:
        if averaged and not self._averaged:
            raise FileNotFoundError("there are no averages")
        # A layer without parameters that are trained has none.
        return self._averaged.get(layer, self._plain[layer]) if averaged else self._plain[layer]


class CheckpointWeights:
    """What a checkpoint holds of the weights: `read_weights` of it. Read at each call. It is of the job of that
    workload, which is asked for then, and of that seed, with so many layers."""

    def __init__(
        self, directory: Path, iteration: int, workload: Callable[[], Workload], layers: int, seed: int
    ) -> None:
        self._directory, self._iteration = directory, iteration
        self._workload, self._layers, self._seed = workload, layers, seed

    def __call__(self, layer: int, *, averaged: bool = False) -> dict[str, Any]:
        """Raises CheckpointError, also where it has given way to newer ones; FileNotFoundError where there are no
        averages."""
        if not 0 <= layer < self._layers:
            raise InputError("layer", layer, f"0 to {self._layers - 1}")
        checkpoint = next((c for c in whole_checkpoints(self._directory) if c.iteration == self._iteration), None)
        if checkpoint is None:
            raise CheckpointError(f"{self._directory}: the checkpoint of iteration {self._iteration} is gone")
        state = checkpoint.load(range(layer, layer + 1))
        values = {name: decode(value, state.tensors) for name, value in state.document["model"].items()}
        if averaged:
            kept = {name: decode(value, state.tensors) for name, value in state.document["state"].items()}
            averages = {name: of[AVERAGE] for name, of in kept.items() if AVERAGE in of}
            if kept and not averages:
                raise FileNotFoundError("there are no averages")
            values |= averages
        with torch.random.fork_rng(devices=[]):  # the layer says what else is in its state dict, and what is not
            built = build_layer(self._workload(), layer, self._layers, self._seed)
        first = first_names(built)
        return {n: values.get(f"{layer}.{first.get(n, n)}", value) for n, value in built.state_dict().items()}


Loaded = TypeVar("Loaded", bound=nn.Module | Sequence[nn.Module])


def load_weights(model: Loaded, folder: str | Path, *, averaged: bool = False) -> Loaded:
    """The model with the weights of a job, from the folder of `--weights` (or ResilientTrainer's `weights=`).

    model: one of transformers, for a job of `ResilientTrainer.from_transformers`, which can then `save_pretrained`; or
    the job's layers in order, an nn.Sequential or another sequence (of a job given as stages, these). averaged: with
    the moving averages. Raises InputError where they are not this model's.
    """
    folder = str(folder)
    layers = sum(1 for _ in itertools.takewhile(Path.is_file, map(partial(weights_file, folder), itertools.count())))
    if not layers:
        raise InputError("folder", folder, f"the folder of --weights, with {weights_file('', 0)}")
    try:
        kept = KeptWeights(folder, layers)
        states = [kept(layer, averaged=averaged) for layer in range(layers)]
    except StateError as error:
        raise InputError("folder", folder, f"weights that can be read ({error})") from None
    except FileNotFoundError:
        raise InputError(
            "averaged", True, "the weights of a job with optimizer=ExponentialMovingAverage(...)"
        ) from None
    parts: Sequence[nn.Module] | nn.Module = model
    if isinstance(parts, Sequence | nn.Sequential | nn.ModuleList):
        if len(parts) != layers:
            raise InputError("model", f"{len(parts)} layers", f"the {layers} whose weights are in {folder}")
        given = list(zip(parts, states, strict=True))
    else:  # whose layers have its names; what they share is in several, alike
        given = [(parts, dict(item for state in states for item in state.items()))]
    for part, state in given:
        try:
            part.load_state_dict(state)
        except RuntimeError as error:
            raise InputError("model", type(part).__name__, f"that of the weights in {folder} ({error})") from None
    return model


def weights_file(folder: str, layer: int, *, averaged: bool = False) -> Path:
    return Path(folder) / f"layer{layer}{'.averaged' if averaged else ''}.safetensors"
