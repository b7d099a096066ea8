"""The small GPT of agent.examples.gpt, each of whose layers is fully sharded (FSDP2) over the ranks of a worker.

openrecycle train --ranks-per-worker 2 --workload agent.examples.fully_sharded:Gpt
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from openrecycle.agent.examples import gpt


class Gpt(gpt.Gpt):
    """A Workload; arguments as of agent.examples.gpt.Gpt. batch: a multiple of the ranks."""

    def parallelize(self, layer: nn.Module, mesh: Any) -> nn.Module:
        """Each block is put together by itself, then what is left of the layer."""
        for part in list(layer.modules()):
            if isinstance(part, gpt.Block):
                fully_shard(part, mesh=mesh)
        fully_shard(layer, mesh=mesh)
        return layer
