"""A model that is cut by names of modules: `python -m openrecycle.agent.examples.torch_stages`."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss

from openrecycle import Faults, Job, Model, ResilientTrainer

PARTS = [["embedding", "block0"], ["block1"], ["block2"], ["block3", "head"]]


def build(index: int, count: int) -> PipelineStage:
    with torch.device("meta"):  # what other workers hold takes no memory here
        blocks = {f"block{n}": nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for n in range(4)}
        whole = {"embedding": nn.Linear(8, 64), **blocks, "head": nn.Linear(64, 8)}
    part = nn.Sequential()
    for name in PARTS[index]:
        part.add_module(name, whole[name])
    for module in part.to_empty(device="cpu").modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()
    return PipelineStage(part, index, count, torch.device("cpu"))


def data(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8)
    return x, x.sin()


if __name__ == "__main__":
    adamw, job = partial(torch.optim.AdamW, lr=1e-2), Job.uniform(pipelines=2, stages=2, micro_batches=4)
    faults = Faults(kill=["W1_1@5:F2"])
    trainer = ResilientTrainer(
        model=Model(layers=build, layer_count=4, loss=mse_loss), data=data, optimizer=adamw, job=job, faults=faults
    )
    result = trainer.fit(iterations=20)
    print("loss", result.losses[0], "to", result.losses[-1], "without", *(r.worker for r in result.recoveries))
