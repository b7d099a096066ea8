"""An LSTM on any processor: in bfloat16 one needs instructions that not each of them has."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _runs_in_bf16() -> bool:
    with torch.random.fork_rng(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError:
            return False
    return True


# Found out once, before anything is trained.
RUNS_IN_BF16 = _runs_in_bf16()


def run_lstm(lstm: nn.LSTM, x: Tensor) -> Tensor:
    """Its outputs. Under autocast to bfloat16 in that, where the processor can, else in float32."""
    with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and RUNS_IN_BF16):
        y: Tensor = lstm(x if RUNS_IN_BF16 else x.float())[0]
    return y
