"""The example's model, whose process ends at the start, or can't be in the job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from openrecycle.agent.examples.gpt import Gpt


class Crashing(Gpt):
    """broken: a file. As long as it is there, whoever makes its layers, or that of number `only`, ends instead."""

    def __init__(self, broken: str, only: int = -1, **settings: Any) -> None:
        super().__init__(**settings)
        self._broken, self._only = Path(broken), only

    def build_layer(self, layer: int, layers: int, seed: int) -> Any:
        if self._broken.exists() and self._only in (-1, layer):
            os._exit(7)
        return super().build_layer(layer, layers, seed)


class Unlike(Gpt):
    """other: a file. Whoever starts while it is there computes with more threads than those before."""

    def __init__(self, other: str, **settings: Any) -> None:
        super().__init__(**settings)
        if Path(other).exists():
            torch.set_num_threads(torch.get_num_threads() + 1)
