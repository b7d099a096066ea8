"""A loop of plain torch, with a kill in it: `python -m openrecycle.agent.examples.plain_torch`."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from openrecycle import Faults, Job, Model, ResilientTrainer


def points() -> TensorDataset:
    x = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    loader = DataLoader(points(), batch_size=16, shuffle=True)
    # for x, y in loader:                       this was the loop
    #     optimizer.zero_grad()
    #     cross_entropy(model(x), y).backward()
    #     optimizer.step()
    trainer = ResilientTrainer(
        model=Model(layers=list(model), loss=functional.cross_entropy),
        data=loader,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        job=Job.uniform(pipelines=2, stages=2, micro_batches=4),
        faults=Faults(kill=["W1_1@20:F2"]),  # a real SIGKILL, to see what happens
    )
    result = trainer.fit(iterations=60)
    for layer, part in enumerate(model):
        part.load_state_dict(result.state_dict(layer))
    x, y = points().tensors
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print("accuracy", accuracy, "without", *(recovery.worker for recovery in result.recoveries))
