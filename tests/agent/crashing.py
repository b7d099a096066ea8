"""The example's model, whose process ends at the start, or can't be in the job."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openrecycle.agent.examples import tensor_parallel
from openrecycle.agent.examples.gpt import Gpt


class Crashing(Gpt):
    """broken: a file. As long as it is there, whoever makes its layers, or that of number `only`, ends instead;
    interrupted: as after Ctrl-C."""

    def __init__(self, broken: str, only: int = -1, interrupted: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self._broken, self._only, self._interrupted = Path(broken), only, interrupted

    def build_layer(self, layer: int, layers: int, seed: int) -> Any:
        if self._broken.exists() and self._only in (-1, layer):
            if self._interrupted:
                raise KeyboardInterrupt
            os._exit(7)
        return super().build_layer(layer, layers, seed)


class Unlike(Gpt):
    """other: a file. Whoever starts while it is there computes with more threads than those before."""

    def __init__(self, other: str, **settings: Any) -> None:
        super().__init__(**settings)
        if Path(other).exists():
            torch.set_num_threads(torch.get_num_threads() + 1)


class Altered(Gpt):
    """altered: a file. Whoever starts while it is there has layers that can't be trained: a forward changes a
    parameter."""

    def __init__(self, altered: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._altered = Path(altered)

    def build_layer(self, layer: int, layers: int, seed: int) -> Any:
        made = super().build_layer(layer, layers, seed)
        if self._altered.exists():
            parameter = next(made.parameters())

            def change(*_: object) -> None:
                parameter.data.add_(1.0)

            made.register_forward_pre_hook(change)
        return made


class Stumbling(Gpt):
    """Whoever takes a step of this number raises outside all ops."""

    def __init__(self, step: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._step = step

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = super().optimizer(parameters)
        taken = itertools.count()

        def stumble(*_: object) -> None:
            if next(taken) == self._step:
                raise RuntimeError("no such schedule")

        made.register_step_pre_hook(stumble)
        return made


class Forking(tensor_parallel.Gpt):
    """Each process that makes a layer has forked one that does nothing, and outlives it. children: a folder where each
    of these leaves its process number."""

    def __init__(self, children: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._children = Path(children)

    def build_layer(self, layer: int, layers: int, seed: int) -> Any:
        if not (child := os.fork()):
            signal.pause()
        (self._children / str(child)).touch()
        return super().build_layer(layer, layers, seed)


class Meddling(Gpt):
    """Whoever reads the inputs of one micro-batch changes what torch keeps for its process."""

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        if (iteration, pipeline, micro_batch) == (1, 1, 0):
            torch.set_grad_enabled(False)
            torch.set_float32_matmul_precision("medium")
        return super().inputs(seed, iteration, pipeline, micro_batch)
