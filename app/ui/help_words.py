"""The Help page's sections, and its list of what the words mean that the console uses."""

from __future__ import annotations

# By what stands in the address.
SECTIONS = {
    "idea": "The idea",
    "steps": "First steps",
    "own": "Your own job",
    "colours": "Colours",
    "words": "Words",
    "keys": "Keyboard",
}

WORDS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "The job",
        (
            ("Pipeline", "One copy of the whole model, cut into stages. Pipelines train on different data."),
            ("Stage", "A run of consecutive layers. All workers of one stage hold the same weights."),
            ("Worker W1_2", "The process (and its accelerator) that runs stage 2 of pipeline 1."),
            ("Peer", "A worker of the same stage, in another pipeline: it can do the other's work."),
            ("Micro-batch", "The part of a batch that goes through a pipeline at once; 1·3 is number 3 of pipeline 1."),
            ("Iteration", "All micro-batches forwards and backwards, and one update of the weights."),
        ),
    ),
    (
        "The plan",
        (
            ("F, I, W", "Forward; gradient of the input, which the stage before waits for; gradient of the weights."),
            ("B", "I and W in one piece, where the backward is not split."),
            ("O", "A stage's reduction of its gradients and its optimizer step."),
            ("1F1B", "The usual order: some forwards, then one forward and one backward in turn."),
            ("Profile", "How long each stage's ops take, and what they keep in memory; may be kept by name."),
            (
                "Slot",
                "The unit of op times that are given without one: in the worked example F, I and W take one slot each.",
            ),
            ("Bubble", "Time in which a worker waits."),
            ("Period", "The time from one iteration to the next, when they follow each other at once."),
            ("Makespan", "From an iteration's first op to its last. With staggering the period can be shorter."),
            ("Lower bound", "What no plan whatever can be below: proven, not estimated."),
            ("Gap", "How far a plan may be from the best possible: period / bound − 1. At 0 it is proven optimal."),
            ("Critical path", "The ops, one waiting for the other, that make the iteration as long as it is."),
            ("Slowdown", "The period against fault-free 1F1B, and against our own best plan without failures."),
            ("Memory limit", "How many micro-batches a worker may hold at once, from F to W."),
            ("Catalog", "Plans made ahead, one for each way to fail, so that recovery is a look-up."),
            (
                "Migration",
                "A living worker takes the place of a dead one of another stage, with the weights of a peer there.",
            ),
            (
                "Option",
                "What the job can do when workers are lost: re-route, re-partition (move layers to other stages), "
                "migrate and re-route (a worker changes its stage), or stand by (the rest of a pipeline waits, too).",
            ),
        ),
    ),
    (
        "The run",
        (
            ("Heartbeat", "A worker's sign of life, once a second. Its age is shown on hover."),
            (
                "Suspect",
                "A worker that has been silent for longer than 5 s (serve --suspect). After 20 s (--dead) it is out.",
            ),
            (
                "Generation",
                "Who takes part, and with which plan. Each failure, return, drain, move of layers or change of the "
                "plan opens the next one.",
            ),
            ("Plan in force", "The plan that the workers run now."),
            ("Interim plan", "What they run until a worker that joins has its state, or layers have moved."),
            ("Groups", "The connections over which workers exchange data; each generation has its own."),
            ("Fenced", "A worker of an old generation: nothing that it says counts until it re-joins."),
            ("Re-join", "A worker comes back: it takes its state from a peer, and joins between two iterations."),
            ("Drain", "A worker leaves after the iteration in hand: nothing is redone, and it counts as no failure."),
            (
                "Frozen plan",
                "A plan that stays in force until somebody unfreezes it. Only a failure or a drain changes it.",
            ),
            ("Standby", "A second console on the same database, which takes over when the one that leads is gone."),
            ("Throughput", "Samples per second, and as a share of what the job did with all workers."),
            ("Goodput", "Training that counts, over what the same time would have given without any failure."),
            ("ETTR", "Effective training time ratio: time in iterations that count, over all time."),
            ("MTBF", "Mean time between failures."),
        ),
    ),
)


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


def demo_line(address: str) -> str:
    return (
        f"openrecycle train --console {address} --demo --pipelines 3 --stages 4 --micro-batches 6 --iterations 1000 "
        "--pace F=40ms,I=40ms,W=40ms"
    )


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
