"""The example's model, which ends its process at the start: `--workload tests.agent.crashing:Crashing`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from openrecycle.agent.examples.gpt import Gpt


class Crashing(Gpt):
    """broken: a file. As long as it is there, whoever makes its layers ends instead."""

    def __init__(self, broken: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._broken = Path(broken)

    def build_layer(self, layer: int, layers: int, seed: int) -> Any:
        if self._broken.exists():
            os._exit(7)
        return super().build_layer(layer, layers, seed)
