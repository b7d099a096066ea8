"""Your own model, trained through a failure: `python -m openrecycle.agent.examples.own_job`."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from openrecycle import Data, Faults, Job, Model, ResilientTrainer


def build_layer(layer: int, layers: int) -> nn.Module:
    first, last = layer == 0, layer == layers - 1
    return nn.Sequential(nn.Linear(8 if first else 64, 64), nn.GELU(), nn.Linear(64, 2 if last else 64))


def points() -> TensorDataset:
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


if __name__ == "__main__":
    trainer = ResilientTrainer(
        model=Model(layers=build_layer, layer_count=6, loss=functional.cross_entropy),
        data=Data(points(), batch_size=16),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        job=Job.uniform(pipelines=2, stages=3, micro_batches=4),
        # W1_1 is SIGKILLed in iteration 20; leave it out, and nothing printed last changes
        faults=Faults(kill=["W1_1@20:F2"]),
        on_iteration=lambda iteration, loss: print(f"iteration {iteration}  loss {loss:.4f}"),
        on_recovery=lambda recovery: print(f"{recovery.worker} died; resumed after {recovery.resumed_ms:.0f} ms"),
    )
    result = trainer.fit(iterations=60)
    model = nn.Sequential(*(build_layer(k, 6) for k in range(6)))
    for k, part in enumerate(model):
        part.load_state_dict(result.state_dict(k))
    x, y = points().tensors
    print(f"accuracy {(model(x).argmax(1) == y).float().mean():.3f}  parameters {result.parameters_sha256}")
