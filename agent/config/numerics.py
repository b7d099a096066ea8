"""How numbers are computed, by name."""

from __future__ import annotations

from typing import Literal

Mode = Literal["deterministic", "fast"]
Autocast = Literal["bf16", "fp16"]
