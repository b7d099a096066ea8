"""A model on a disk that takes longer to write a layer's weights than one collective may take."""

from __future__ import annotations

import functools
import time
from typing import Any

from openrecycle.agent import checkpoints
from openrecycle.agent.examples.tensor_parallel import Gpt

__all__ = ["Gpt"]

_write = checkpoints.write_tensors


@functools.wraps(_write)
def _slowly(file: Any, *rest: Any) -> Any:
    if "layer" in file.name:
        time.sleep(8)
    return _write(file, *rest)


checkpoints.write_tensors = _slowly
