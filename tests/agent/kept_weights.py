"""Examples whose layers need a file, as weights would be: `--workload tests.agent.kept_weights:FromFile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed
from torch import nn

from openrecycle.agent.examples import fully_sharded
from openrecycle.agent.examples.gpt import Gpt


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
