"""What connects a job of one's own to this console, to copy. No Streamlit here."""

from __future__ import annotations


def token_line() -> str:
    """The token's name; its value is for whoever runs the console to give."""
    return "export OPENRECYCLE_TOKEN=...   # an agent's: openrecycle token create --role agent"


def trainer(address: str) -> str:
    return f"""from functools import partial

import torch
from my_model import build_layer, my_dataset
from openrecycle import Console, Job, ResilientTrainer

if __name__ == "__main__":
    trainer = ResilientTrainer(
        layers=build_layer,  # (layer, layers) -> torch.nn.Module
        layer_count=12,
        loss=torch.nn.functional.cross_entropy,
        data=my_dataset,
        batch_size=16,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        job=Job.uniform(pipelines=2, stages=3, micro_batches=4),
        console=Console(url="{address}"),
    )
    trainer.fit(iterations=1000)"""


def launch_line(address: str) -> str:
    return (
        "openrecycle train --workload my_model:MyWorkload --pipelines 2 --stages 3 --micro-batches 4 "
        f"--iterations 1000 --console {address}"
    )


def reporter(address: str) -> str:
    return f"""from openrecycle import Job, Reporter

reporter = Reporter(
    console="{address}",
    run="run-42",  # the same in all processes of the run, and new for each run
    job=Job.uniform(pipelines=2, stages=3, micro_batches=4),
    worker="W0_1",  # this process
    iterations=1000,
    on_plan=lambda deployment, plan: print(deployment.failed, plan.workers["W0_1"]),
)
for i in range(1000):
    with reporter.op("F"):  # likewise I, W, B and O
        ...
    reporter.iteration(i, loss=0.5)
reporter.close()"""
