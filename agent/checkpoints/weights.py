"""The trained weights, one file per layer: what is left when a job is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openrecycle.agent.checkpoints.checkpoint import reason_of


class WeightsError(RuntimeError):
    """The weights could not be written; the sentence says where and why."""


def save_weights(folder: str, layer: int, module: nn.Module) -> None:
    """Writes the module's state dict, wholly or not at all. Raises WeightsError."""
    file = weights_file(folder, layer)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # On the CPU, so that they can be read where there is no such device.
        state = module.state_dict()
        for name, value in state.items():
            state[name] = value.cpu() if isinstance(value, torch.Tensor) else value
        with partial.open("wb") as out:  # torch itself does not tell a full disk from other faults
            torch.save(state, out)
        partial.replace(file)
    # torch makes a full disk a RuntimeError of its own.
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        reason = reason_of(error)
        raise WeightsError(f"the weights of layer {layer} could not be written to {file}: {reason}") from None


def load_weights(folder: str, layer: int) -> dict[str, Any]:
    """The state dict of a layer. Raises OSError where there is none."""
    state: dict[str, Any] = torch.load(weights_file(folder, layer), weights_only=True)
    return state


def weights_file(folder: str, layer: int) -> Path:
    return Path(folder) / f"layer{layer}.pt"
