"""Runs a schedule CSV in torch's own pipeline runtime, one gloo process per stage.

Called as a program by test_export_torch.py: `torch_pipeline_run SCHEDULE.csv STAGES MICRO_BATCHES
FOLDER`. Rank r leaves its losses and gradients in FOLDER/rank<r>.pt, the plain sequential model's
are in FOLDER/plain.pt.
"""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

WIDTH = 8
ROWS = 4  # of a micro-batch


def part(stage: int) -> torch.nn.Module:
    torch.manual_seed(stage)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()


def data(micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1000)
    shape = (ROWS * micro_batches, WIDTH)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in module.parameters()]
    assert all(g is not None for g in grads)
    return [g for g in grads if g is not None]


def plain(stages: int, micro_batches: int, folder: Path) -> None:
    parts = [part(s) for s in range(stages)]
    inputs, targets = data(micro_batches)
    losses = []
    for x, target in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        for module in parts:
            x = module(x)
        loss = mse_loss(x, target)
        (loss / micro_batches).backward()
        losses.append(loss.detach())
    torch.save({"losses": losses, "gradients": [gradients(module) for module in parts]}, folder / "plain.pt")


def rank(number: int, schedule_file: str, stages: int, micro_batches: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=number,
        world_size=stages,
        timeout=timedelta(seconds=60),
    )
    module = part(number)
    stage = PipelineStage(module, number, stages, torch.device("cpu"))
    runtime = _PipelineScheduleRuntime([stage], micro_batches, loss_fn=mse_loss)
    runtime._load_csv(schedule_file, format="compute_only")
    inputs, targets = data(micro_batches)
    losses: list[torch.Tensor] = []
    first, last = number == 0, number == stages - 1
    runtime.step(*((inputs,) if first else ()), target=targets if last else None, losses=losses if last else None)
    torch.save({"losses": [x.detach() for x in losses], "gradients": gradients(module)}, folder / f"rank{number}.pt")
    dist.destroy_process_group()


def main() -> int:
    schedule_file, stages, micro_batches, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    # Forked: torch is imported once, and nothing of it has run yet.
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank, args=(r, schedule_file, stages, micro_batches, folder)) for r in range(stages)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    failed = [r for r, process in enumerate(ranks) if process.exitcode != 0]
    for process in ranks:
        process.kill()
    if failed:
        print(f"ranks {failed} did not end well", file=sys.stderr)
        return 1
    plain(stages, micro_batches, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
