"""The example's loop of its own in a process of the test's: it says what it did, and may be killed at any op.

Run as `python -m tests.agent.scheduled_loop CONSOLE RUN WORKER SHARED FAULT`. FAULT, as JSON: `at`: [iteration, number
or kind of the op, "before" or "after"] at which it gets `signal` (SIGKILL); `unsure`: an iteration, in whose reduction
this worker alone does not hear that all others have reduced; with `stands` it is stopped before they hear that it has;
`hold`: [iteration, worker], before which it waits for the latter to be in the job; `measures`: its reductions have a
measure; `stays`: a generation for which another worker has to wait before this one, which has done all iterations,
closes its reporter.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrecycle import Reporter
from openrecycle.agent.examples.own_loop import ITERATIONS, JOB, build, train
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.agent.own_loops import own_loop
from openrecycle.agent.own_loops.own_loop import ScheduledOp
from openrecycle.agent.transport.group import GivenGlooGroup, TransferError
from openrecycle.planner.plans.plan import Plan


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Measuring(ScheduledOp):
    """Asks for the sum of a measure over the stages."""

    def reduce(self, *tensors: torch.Tensor, measure: Callable[[], float] = float) -> float:
        return super().reduce(*tensors, measure=lambda: 1.0)


class FaultyReporter(Reporter):
    """Says which ops there are and what is reported, and dies as it is told."""

    fault: dict[str, Any]
    living: tuple[str, ...] = ()

    def schedule(self, iteration: int) -> Iterator[ScheduledOp]:
        held, worker = self.fault.get("hold", [-1, ""])
        while iteration == held and worker not in self.living:
            time.sleep(0.05)
        ops = super().schedule(iteration)
        done = []
        for number, op in enumerate(ops):
            self._maybe_die(iteration, number, op.kind, "before")
            done.append(f"{op.kind}{op.pipeline}.{op.micro_batch}")
            yield op
            self._maybe_die(iteration, number, op.kind, "after")
            if op.kind == "O":
                say(iteration=iteration, ops=done, peers=dict(op.peers))

    def _maybe_die(self, *at: Any) -> None:
        iteration, number, kind, when = at
        if self.fault.get("at") in ([iteration, number, when], [iteration, kind, when]):
            os.kill(os.getpid(), getattr(signal, self.fault.get("signal", "SIGKILL")))

    def iteration(self, number: int, *, loss: float | None = None) -> None:
        say(done=number, loss=None if loss is None else loss.hex())
        super().iteration(number, loss=loss)


class UnsureLoop(own_loop.OwnLoop):
    """The last message of one reduction does not come."""

    iteration: int
    number: int

    def begin(self, iteration: int) -> Iterator[ScheduledOp]:
        self.number = iteration
        return super().begin(iteration)

    def reduce(self, tensors: tuple[Tensor, ...], measure: Callable[[], float]) -> float:
        UnsureGroup.unsure = self.number == self.iteration
        try:
            return super().reduce(tensors, measure)
        finally:
            UnsureGroup.unsure = False


class UnsureGroup(GivenGlooGroup):
    """unsure: what all agree on behind a reduction does not come. stands: its worker is stopped before."""

    unsure, stands = False, False

    def sum(self, tensor: Tensor) -> None:
        if self.unsure and self.stands:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().sum(tensor)
        if self.unsure:
            raise TransferError("the answer was lost")


def main(console: str, run: str, worker: str, shared: str, fault: str) -> None:
    torch.set_num_threads(1)
    FaultyReporter.fault = json.loads(fault)
    if "unsure" in FaultyReporter.fault:
        UnsureLoop.iteration, UnsureGroup.stands = FaultyReporter.fault["unsure"], "stands" in FaultyReporter.fault
        own_loop.OwnLoop, own_loop.GivenGlooGroup = UnsureLoop, UnsureGroup  # type: ignore[misc]
    if "measures" in FaultyReporter.fault:
        own_loop.ScheduledOp = Measuring  # type: ignore[misc]

    def take_up(deployment: Deployment, plan: Plan) -> None:
        FaultyReporter.living = deployment.living

    model, optimizer = build(int(worker.partition("_")[2]))
    with FaultyReporter(
        console=console, run=run, job=JOB, worker=worker, iterations=ITERATIONS, on_plan=take_up
    ) as reporter:
        train(reporter, model, optimizer, shared)
        while "stays" in reporter.fault and not Path(f"{shared}.{reporter.fault['stays']}").exists():
            time.sleep(0.05)
    say(parameters=digest(model))


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
