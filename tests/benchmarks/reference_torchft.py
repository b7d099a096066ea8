"""The same job on torchft: every pipeline is a replica group, inside it torch's Schedule1F1B.

Run as a program, with torchft on its path: takes what to do as JSON, prints what happened as JSON. A
Lighthouse of its own decides on the quorum. When a worker dies, its whole pipeline ends, as there is
no spare to restart it with; the others go on without its micro-batches. Ops are paced by the same
device clock as the agent's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from openrecycle.agent.config.faults import PacedDevice
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.models.layers import build_layer

dist: Any = torch.distributed

Cell = tuple[int, int]
"""(pipeline, stage)."""

TIMEOUT = timedelta(seconds=20)
# Said in place of an iteration.
_DYING = -1


class PacedStage(PipelineStage):
    """A PipelineStage whose F and B take as long as the device's."""

    def __init__(self, device: PacedDevice, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._paced = device

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._stretched("F", self.is_first, super().forward_one_chunk, args, kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._stretched("B", self.is_last, super().backward_one_chunk, args, kwargs)

    def _stretched(self, kind: str, alone: bool, run: Any, args: Any, kwargs: Any) -> Any:
        if not alone:
            self._paced.waited()
        started = time.monotonic()
        out = run(*args, **kwargs)
        self._paced.finish(kind, started)
        return out


def main() -> None:
    """argv[1]: pipelines, stages, micro_batches, iterations, pace (seconds by op kind), model (options of
    the workload), kill ([pipeline, stage, iteration]). Prints a list of [iteration, replicas that took
    part, seconds since the iteration before was committed by all of them]."""
    from torchft import coordination  # type: ignore[import-not-found]

    job = json.loads(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = "1"
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.benchmarks.reference_torchft", "torchft"])
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(job["pipelines"])]
    port = lighthouse.address().rpartition(":")[2].strip("/")
    processes: dict[Cell, Any] = {}
    pipes: dict[Any, Cell] = {}
    for pipeline in range(job["pipelines"]):
        for stage in range(job["stages"]):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(pipeline, stage, job, [store.port for store in stores], f"http://127.0.0.1:{port}", theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes[pipeline, stage], pipes[ours] = process, (pipeline, stage)
    commits: dict[Cell, dict[int, tuple[int, float]]] = {cell: {} for cell in processes}
    dead: set[int] = set()
    while pipes:
        ready: list[Any] = wait(list(pipes))
        for pipe in ready:
            pipeline, stage = pipes[pipe]
            try:
                iteration, replicas, at = pipe.recv()
                if iteration == _DYING:
                    raise EOFError
                commits[pipeline, stage][iteration] = (replicas, at)
            except EOFError:
                del pipes[pipe]
                if len(commits[pipeline, stage]) < job["iterations"]:
                    dead.add(pipeline)
                    for other in range(job["stages"]):
                        processes[pipeline, other].kill()
    living = [times for (pipeline, _), times in commits.items() if pipeline not in dead]
    iterations = sorted(set.intersection(*map(set, living)))
    ends = {i: max(times[i][1] for times in living) for i in iterations}
    print(json.dumps([[i, living[0][i][0], ends[i] - ends[i - 1]] for i in iterations if i - 1 in ends]))
    sys.stdout.flush()
    for process in processes.values():
        process.kill()
    os._exit(0)


def _rank_main(
    pipeline: int, stage: int, job: Mapping[str, Any], ports: list[int], lighthouse: str, report: Connection
) -> None:
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", ports[pipeline], is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("pipeline", store), rank=stage, world_size=job["stages"])
    workload = Gpt(**job["model"])
    module = build_layer(workload, stage, job["stages"], 0)
    inner = workload.optimizer(module.parameters())

    def load(state: Any) -> None:
        module.load_state_dict(state["module"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"module": module.state_dict(), "optimizer": inner.state_dict()},
        timeout=TIMEOUT,
        rank=stage,
        world_size=job["stages"],
        store_addr="127.0.0.1",
        store_port=ports[pipeline],
        lighthouse_addr=lighthouse,
        replica_id=f"pipeline{pipeline}",
        hostname="127.0.0.1",
        # All start from the same parameters.
        init_sync=False,
    )
    optimizer = Optimizer(manager, inner)
    device = PacedDevice(job["pace"])
    schedule = Schedule1F1B(
        PacedStage(device, module, stage, job["stages"], torch.device("cpu")),
        job["micro_batches"],
        loss_fn=workload.loss,
    )
    # All pipelines are in the first quorum, so that nobody starts by healing.
    gate = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    if gate.add("ready", 1) == job["pipelines"] * job["stages"]:
        gate.set("go", "")
    gate.wait(["go"])
    reduction = float("inf")
    while (iteration := manager.current_step()) < job["iterations"]:
        if job["kill"] == [pipeline, stage, iteration]:
            report.send((_DYING, 0, 0.0))
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        keys = [(0, iteration, pipeline, m) for m in range(job["micro_batches"])]
        inputs = (torch.cat([workload.inputs(*key) for key in keys]),) if stage == 0 else ()
        last = stage == job["stages"] - 1
        targets = torch.cat([workload.targets(*key) for key in keys]) if last else None
        schedule.step(*inputs, target=targets, return_outputs=False)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        arrived = time.monotonic()
        manager.allreduce(flat).wait()
        reduced = time.monotonic()
        reduction = min(reduction, reduced - arrived)
        offset = 0
        for gradient in gradients:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()
        optimizer.step()
        device.waited()
        device.finish("O", reduced - reduction)
        if manager.current_step() > iteration:
            report.send((iteration, manager.num_participants(), time.monotonic()))
    # Peers of the pipeline may still need this process; the parent ends it.
    report.close()
    time.sleep(60)


if __name__ == "__main__":
    main()
