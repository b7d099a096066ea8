"""The memory that a micro-batch takes on a stage, measured by running one; also with tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.models.compat import LiveBytes
from openrecycle.agent.stages.stage import Stage

_KEY = (0, 0)


@dataclass(frozen=True)
class MicroBatchMemory:
    """Bytes of one micro-batch on a stage. forward: held from its F to its I. backward: held from its I to its W.
    beside: needed while an op runs, in addition to the larger of these two. received: the larger of the
    input and the gradient of the output. given: sent to the next stage. back: sent to the stage before."""

    forward: int = 0
    backward: int = 0
    beside: int = 0
    received: int = 0
    given: int = 0
    back: int = 0


def run_micro_batch(
    stage: Stage, inputs: tuple[Tensor, ...], loss: Callable[[Any], Tensor] | None, *, first: bool
) -> tuple[MicroBatchMemory, tuple[Tensor, ...]]:
    """Runs a micro-batch through a stage. Returns the memory that it takes, and the stage's output. loss: on the last
    stage. first: is it the first stage?"""
    live = LiveBytes()
    with live:
        # Copies, which nothing else refers to, just as inputs arrive in a worker.
        x = tuple(t.detach().clone() for t in inputs)
        came = live.now
        y = stage.forward(_KEY, x if len(x) > 1 else x[0], seed=0, loss=loss)
        del x
    outputs = y if isinstance(y, tuple) else (y,)
    # Not counted: what is sent lives longer than the micro-batch.
    given = 0 if loss is not None else sum(t.nbytes for t in outputs)
    after_f = live.now - given
    with live:
        dys = tuple(torch.zeros_like(t) if t.is_floating_point() else None for t in outputs)
        dx = stage.input_backward(_KEY, None if loss is not None else dys if isinstance(y, tuple) else dys[0])
    back = sum(t.nbytes for t in (dx if isinstance(dx, tuple) else (dx,)) if t is not None)
    del dys, dx
    after_i = live.now - given
    with live:
        stage.weight_backward(_KEY)
    beside = max(0, live.most - max(after_f, after_i))
    memory = MicroBatchMemory(after_f, after_i, beside, max(came, given), given, 0 if first else back)
    return memory, tuple(t.detach() for t in outputs)
