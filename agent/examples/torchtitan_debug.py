"""torchtitan's debug model in its own parts: `python -m openrecycle.agent.examples.torchtitan_debug`."""

from functools import partial

import torch
from torch import Tensor, nn
from torchtitan.distributed import pipeline_parallel as titan  # type: ignore[import-not-found]
from torchtitan.models.common import ScaledDotProductAttention  # type: ignore[import-not-found]
from torchtitan.models.llama3 import llama3_configs  # type: ignore[import-not-found]

from openrecycle import Faults, Job, Model, ResilientTrainer


def build(index: int, count: int) -> nn.Module:
    config = llama3_configs["debugmodel"]("flex")
    for layer in config.layers:  # flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope.max_seq_len = 64
    with torch.device("meta"):
        whole = config.build()
    names = titan._generate_llm_fqn_per_model_part(count, len(config.layers))
    part: nn.Module = titan._split_module(whole, names[index])
    part.to_empty(device="cpu").init_states()  # type: ignore[operator]
    return part


def data(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(2000, (2, 1)) + torch.arange(33)
    return tokens[:, :-1], tokens[:, 1:]


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    adamw, job = partial(torch.optim.AdamW, lr=1e-3), Job.uniform(pipelines=2, stages=2, micro_batches=3)
    faults = Faults(kill=["W1_1@3:F2"])
    trainer = ResilientTrainer(
        model=Model(layers=build, layer_count=8, loss=loss), data=data, optimizer=adamw, job=job, faults=faults
    )
    result = trainer.fit(iterations=8)
    print("loss", result.losses[0], "to", result.losses[-1], "without", *(r.worker for r in result.recoveries))
