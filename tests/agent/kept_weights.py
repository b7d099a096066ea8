"""Jobs that need a file for a while, as weights would be: `--workload tests.agent.kept_weights:FromFile`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed
from torch import Tensor, nn

from openrecycle.agent.examples import fully_sharded
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.models.workload import PROBED
from tests.agent.layered import Mixture


class FromFile(Gpt):
    """file: read for each layer that is built."""

    def __init__(self, file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._file = Path(file)

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        self._file.read_bytes()
        return super().build_layer(layer, layers, seed)


class FromFileOfOneRank(fully_sharded.Gpt):
    """file: read for each layer that the second rank of a worker builds."""

    def __init__(self, file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._file = Path(file)

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        if torch.distributed.get_rank():
            self._file.read_bytes()
        return super().build_layer(layer, layers, seed)


class PassingData(Mixture):
    """file: while it is there, the data of the first iterations can be read, too."""

    def __init__(self, file: str, layers: int = 6) -> None:
        self._file = Path(file)

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        if iteration < PROBED:
            self._file.read_bytes()
        return super().inputs(seed, iteration, pipeline, micro_batch)


class SlowToReturn(Gpt):
    """To build the first layer takes until others have given up on it once more. given_up: a file that says how often
    they have, from the moment on that this holds."""

    def __init__(self, given_up: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._given_up = Path(given_up)

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        if layer == 0 and self._given_up.exists():
            before = self._given_up.read_text()
            while self._given_up.read_text() == before:
                time.sleep(0.01)
        return super().build_layer(layer, layers, seed)
