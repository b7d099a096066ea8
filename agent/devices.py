"""What workers compute on, and what carries their data. torch is imported only where a function needs it.

The CUDA path has been run on no GPU yet: see agent.transport.nccl.
"""

# ruff: noqa: RUF009 (`option` makes a field)

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from openrecycle.agent.randomness import seed_for
from openrecycle.agent.settings import OptionGroup, documented, option

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda"]
Transport = Literal["tagged", "ordered"]

CUDA_ENVIRONMENT = {
    # Failures are found by the launcher and the console; torch's own handling would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # Its monitor ends a process whose watchdog stands still, as it may while a group is aborted.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Each stream has a queue of its own, so that a kernel that waits for a peer holds up no other's.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # cuBLAS gives the same bits again only with a workspace of fixed size.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@documented
@dataclass(frozen=True, kw_only=True)
class Platform(OptionGroup):
    """What workers compute on; the same for all workers of a job. Either transport gives the same bits."""

    PATH: ClassVar[str] = "platform"

    device: Kind = option("cpu", "cpu, or cuda: a GPU of its own for every worker, over NCCL.")
    transport: Transport | None = option(
        None,
        "How messages find their receives: tagged (on CPUs), or ordered (as NCCL needs). By default as the device has "
        "it.",
        expected="tagged or ordered",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device == "cuda" and self.transport == "tagged":
            raise self.refuse("transport", "ordered where `platform.device` is cuda: NCCL knows no tags")

    @property
    def carrier(self) -> Transport:
        """The transport: `tagged`, by a tag, in any order; `ordered`, by their order alone, which is all NCCL has."""
        return self.transport or ("tagged" if self.device == "cpu" else "ordered")

    def check(self, workers: int) -> None:
        """Raises InputError unless this node can run so many workers. Imports torch for any device but the CPU."""
        if self.device == "cpu":
            return
        import torch
        import torch.distributed

        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise self.refuse("device", f"cpu, since this torch ({torch.__version__}) is built without CUDA")
        if not torch.distributed.is_nccl_available():
            raise self.refuse("device", f"cpu, since this torch ({torch.__version__}) is built without NCCL")
        if not torch.cuda.is_available():
            raise self.refuse("device", "cpu, or a GPU and a driver that torch can use on this node")
        if (gpus := torch.cuda.device_count()) < workers:
            raise self.refuse(
                "device",
                f"a GPU of its own for each of the {workers} workers on this node, which has {gpus}: NCCL takes no "
                "two workers on one",
            )

    def take(self, slot: int, *, deterministic: bool) -> torch.device:
        """Prepares this process, before it has touched a GPU; returns where it computes.

        slot: this worker's number among those of its node. deterministic: torch refuses what can't be
        done again to the same bits. Raises InputError.
        """
        import torch

        if self.device == "cpu":
            return torch.device("cpu")
        # First: the driver reads some of it when it is asked anything.
        os.environ.update(CUDA_ENVIRONMENT)
        self.check(slot + 1)
        torch.cuda.set_device(slot)
        if deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        return torch.device("cuda", slot)


def kind_number(device: torch.device) -> int:
    """Equal for devices that compute the same bits; 0 for the CPU, of which all nodes' are compared when they join."""
    if device.type == "cpu":
        return 0
    import torch

    cuda: Any = torch.cuda
    cudnn: Any = torch.backends.cudnn
    return seed_for(cuda.get_device_name(device), str(torch.version.cuda), *cuda.nccl.version(), cudnn.version())


def completion(device: torch.device) -> Callable[[], None] | None:
    """Waits until `device` has done all that this thread gave it to do; None where it has when a call returns.

    An op ends when it has ended on the device: only then are its time, and what a report says of it, true.
    """
    if device.type != "cuda":
        return None
    import torch

    # Blocking: a thread that spins would take the processor from those that report and cancel.
    end: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def wait() -> None:
        end.record(torch.cuda.current_stream(device))
        end.synchronize()

    return wait


def on_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; through tuples, lists and dictionaries."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(v, device) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(on_device(v, device) for v in value)
    if isinstance(value, Mapping):
        return {k: on_device(v, device) for k, v in value.items()}
    return value
