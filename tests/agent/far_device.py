"""A second device on a machine that has none: its tensors are the CPU's, in a wrapper that says `far:0`.

An operation between a tensor here and one there fails, as with a GPU; numbers are the CPU's to the bit.
So what trains there to the same bits has nowhere taken the CPU for granted. It changes torch for the
whole process, so it runs in one of its own: `python -m tests.agent.far_device` prints what came out, as JSON.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from openrecycle.agent.checkpoints import read_weights, save_weights
from openrecycle.agent.config.devices import on_device, seed_for
from openrecycle.agent.config.faults import FaultInjector
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.models.layers import StageCuts
from openrecycle.agent.models.state import pack, unpack
from openrecycle.agent.stages.optimizer import StageOptimizer, stage_optimizer
from openrecycle.agent.stages.stage import assemble
from openrecycle.agent.transport.group import HostGroup, PendingTransfer
from openrecycle.agent.transport.ranks import Ranks
from openrecycle.agent.transport.transfers import GenerationGroups, OrderedTransfers, Script, TransferLayout, connect
from openrecycle.agent.workers import executor as executor_module
from openrecycle.agent.workers.executor import DeviceOpQueue, Executor, OpQueue
from openrecycle.agent.workers.validation_exchange import Steps
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from tests.agent.virtual_wires import Baton, Group, Wires

# Moving data between devices is what these are for.
_CROSSING = ("aten::copy_", "aten::_to_copy")


class Far(Tensor):
    """A tensor of the device `far`; inner: the same on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("far", 0),
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        """torch's own knows no wrappers."""
        _look()
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class FarFactories(TorchDispatchMode):
    """Within, `device="far"` makes such tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_looks = threading.local()


def _look() -> None:
    """This thread, which is one worker, wants to know what is there: with a GPU it would wait for it."""
    _looks.number = getattr(_looks, "number", 0) + 1


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    far = [t for t in tensors if isinstance(t, Far)]
    # Numbers may mix, as they may with a GPU.
    near = [t for t in tensors if not isinstance(t, Far) and t.dim()]
    if near and far and name not in _CROSSING:
        raise RuntimeError(f"{name}: tensors on two devices")
    wanted = kwargs.get("device")
    goes_far = bool(far) if wanted is None else torch.device(wanted).type == "far"
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    arrives = name == "aten::copy_" and not isinstance(args[0], Far)
    if far and (name == "aten::_local_scalar_dense" or arrives or (name == "aten::_to_copy" and not goes_far)):
        _look()
    known = {id(t.inner): t for t in far}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if name == "aten::copy_":
        return args[0]
    if name == "aten::_to_copy":
        out = out.clone()

    def outer(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (same := known.get(id(value))) is not None:
            return same
        return Far(value) if goes_far else value

    return tree_map(outer, out)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Far) else value


# -- a job on either device -----------------------------------------------------------------------

JOB = Job(2, 3, 2)
ITERATIONS, WIDTH = 3, 6
POISONED = (1, 1, 0)


class Mixed:
    """Integers, a norm with moving statistics, dropout, a stage that is not trained, and a convolution.

    In one iteration one micro-batch's gradient is NaN.
    """

    samples_per_micro_batch = 4

    def build_stage(self, stage: int, stages: int, seed: int) -> nn.Module:
        torch.manual_seed(seed_for("parameters", seed, stage))
        if stage == 0:
            return nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.BatchNorm1d(5))
        if stage == 1:
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
        return nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9))

    def inputs(self, *place: int) -> Tensor:
        return torch.randint(9, (4, 5), generator=torch.Generator().manual_seed(seed_for("x", *place)))

    def targets(self, *place: int) -> tuple[Tensor, dict[str, Tensor]]:
        scale = torch.tensor([float("nan") if place[1:] == POISONED else 1.0])
        return self.inputs(*place).flip(1), {"scale": scale}

    def loss(self, output: Tensor, targets: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        tokens, extra = targets
        return (functional.cross_entropy(output.flatten(0, 1), tokens.flatten()) * extra["scale"]).sum()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)


class _Sum:
    def __init__(self, theirs: PendingTransfer, tensor: Tensor) -> None:
        self._theirs, self.tensor = theirs, tensor

    def wait(self) -> Tensor:
        return self.tensor.add_(self._theirs.wait())


class _Peers(Group):
    """The reduction of a stage of two."""

    def __init__(self, wires: Wires, stage: int, rank: int) -> None:
        super().__init__(wires, f"stage{stage}", rank)

    def begin_sum(self, tensor: Tensor) -> _Sum:
        theirs = torch.empty_like(tensor)
        self.send(1 - self.rank, tensor, 0)
        return _Sum(self.receive(1 - self.rank, theirs, 0), tensor)

    def sum(self, tensor: Tensor) -> None:
        self.begin_sum(tensor).wait()


class _LateEvent:
    """Of work that ends when somebody waits for it, or has asked a few times."""

    def __init__(self) -> None:
        self._asked, self._at = 0, time.monotonic()

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 3

    def synchronize(self) -> None:
        self._asked = 3

    def elapsed_time(self, later: _LateEvent) -> float:
        assert later.query(), "nobody has seen its end"
        return 1000 * (later._at - self._at)


def train(device: torch.device, optimization: Optimization, by_host: bool, ahead: bool = False) -> dict[str, Any]:
    """Losses and hashes of the parameters, by worker; with what is done to a trained stage's state.

    by_host: what is sent and summed goes by way of the CPU. ahead: ops end later than their calls, as a GPU's."""

    def queue(_device: Any, pace: Any, ended: Any, progress: Any) -> OpQueue:
        return DeviceOpQueue(pace, ended, progress, _LateEvent) if ahead else OpQueue(pace, ended)

    executor_module.op_queue = queue  # type: ignore[attr-defined]
    workload: Any = Mixed()
    cuts = StageCuts.of(workload, JOB.stages, autocast=optimization.autocast)
    with FarFactories():
        assert StageCuts.of(workload, JOB.stages, (), optimization.autocast, device) == cuts
    schedule = Catalog(JOB, Technique.STAGGERED, MemoryLimit("uniform")).plan_for(set())[0].schedule()
    living = list(JOB.workers())
    # One at a time: a real worker has torch's random numbers to itself.
    baton = Baton(0)
    wires, rank = Wires(baton), {w: i for i, w in enumerate(living)}
    trained: dict[Worker, StageOptimizer] = {}
    skipped: list[int] = []
    looks: list[int] = []
    losses: dict[Worker, list[str]] = {w: [] for w in living}

    def work(me: Worker) -> None:
        stage, _ = assemble(workload, JOB, cuts, me.stage, 0, optimization, device)
        optimizer = trained[me] = stage_optimizer(workload, stage.module, stage.gradients, optimization)
        steps = Steps(me, optimization, optimizer, cuts.partition, lambda iteration, *_: skipped.append(iteration))
        executor = Executor(
            me,
            JOB,
            0,
            workload,
            stage,
            steps,
            FaultInjector(me, [], lambda kill: None),
            {},
            lambda: False,
            lambda iteration, loss: losses[me].append(loss.hex()),
            cuts.stage_io,
            device=device,
        )
        own: list[Any] = [Group(wires, name, rank[me]) for name in ("forward", "backward")]
        own.append(_Peers(wires, me.stage, me.pipeline))
        lines: Any = GenerationGroups(me, *(map(HostGroup, own) if by_host else own), rank)

        def transfers(layout: TransferLayout) -> OrderedTransfers:
            assert layout.device == device
            return OrderedTransfers(lines, layout)

        def send(to: Worker, tensor: Tensor, tag: int) -> Any:
            return wires.put(wires.sent, (tag, rank[me], rank[to]), tensor.clone(), None)

        def receive(source: Worker, buffer: Tensor, tag: int) -> Any:
            return wires.put(wires.posted, (tag, rank[source], rank[me]), buffer, None)

        groups: Any = SimpleNamespace(transfers=transfers, send=send, receive=receive, ranks=Ranks())
        steps.begin(groups, living, 0, {})
        connect(lines, Script.of(schedule, me).neighbours, device)
        before = getattr(_looks, "number", 0)
        while optimizer.committed < ITERATIONS:
            executor.run(optimizer.committed, Script.of(schedule, me), groups)
        executor.settle()
        looks.append(getattr(_looks, "number", 0) - before)

    def task(me: Worker) -> Callable[[], None]:
        def run() -> None:
            with FarFactories():
                work(me)

        return run

    baton.run([task(me) for me in living])
    with FarFactories():
        assert len({trained[w].parameters_sha256() for w in living}) == JOB.stages, "replicas differ"
        after = {
            str(w): _handed_on(trained[w], workload, optimization, cuts, device, w) for w in living if not w.pipeline
        }
    trained_there = {"losses": {str(w): v for w, v in losses.items()}, "skipped": sorted(skipped), "state": after}
    return {"result": trained_there, "looks": looks}


def _handed_on(
    trained: StageOptimizer,
    workload: Any,
    optimization: Optimization,
    cuts: StageCuts,
    device: torch.device,
    me: Worker,
) -> list[str]:
    """Hashes: of a stage, of one that took its state over, of it after its last step was undone, of its weights."""
    assert all(p.device == device for p in trained.module.parameters())
    assert trained.gradients.device == device
    stage, _ = assemble(workload, JOB, cuts, me.stage, 1, optimization, device)
    other = stage_optimizer(workload, stage.module, stage.gradients, optimization)
    header, messages = pack(trained.state())
    assert all(message.device.type == "cpu" for message in messages)
    other.load_state(unpack(header, messages))
    hashes = [trained.parameters_sha256(), other.parameters_sha256()]
    trained.roll_back()
    hashes.append(trained.parameters_sha256())
    with tempfile.TemporaryDirectory() as folder:
        save_weights(folder, me.stage, dict(other.module.layers)[me.stage].state_dict())
        module = workload.build_stage(me.stage, JOB.stages, 1)
        module.load_state_dict(read_weights(folder, me.stage))
        assert all(t.device.type == "cpu" for t in read_weights(folder, me.stage).values())
        x = workload.inputs(0, 0, 0, 0) if me.stage == 0 else torch.ones(4, 5, WIDTH)
        here, there = module.eval()(x), other.module.eval()(on_device(x, device), seed=0)
        assert torch.equal(here, there.cpu())
    return hashes


RECIPES = {
    "deterministic": (Optimization(), False),
    "by the host": (Optimization(), True),
    "ahead of it": (Optimization(), False, True),
    "clipped": (Optimization(clip_norm=0.5), False),
    "fast": (Optimization(mode="fast"), False),
}


def main() -> None:
    torch.set_num_threads(1)
    _setup_privateuseone_for_python_backend("far")  # type: ignore[no-untyped-call]
    # On the CPU every way to the same numbers is one: those of the first.
    here = functools.cache(lambda optimization: train(torch.device("cpu"), optimization, by_host=False))
    far = torch.device("far", 0)
    asked = {name: RECIPES[name] for name in sys.argv[1:] if name != "--compare"}
    found = {name: {"far": train(far, *recipe)} for name, recipe in asked.items()}
    if len(asked) < len(sys.argv) - 1:
        found = {name: {"cpu": here(RECIPES[name][0]), **there} for name, there in found.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
