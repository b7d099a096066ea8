"""What workers compute on and how: devices, the precision by its name, and the seed of every random number.

Randomness belongs to the micro-batch, never to the worker that happens to run it (`seed_for`). torch is imported only
where a function needs it.

The CUDA path has been run on one GPU, by several workers: see agent.transport.group. `python -m tests.gpu` runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from openrecycle.agent.config.settings import OptionGroup, documented, option
from openrecycle.planner.jobs.errors import InputError

if TYPE_CHECKING:
    import torch

# -- how numbers are computed, by name ----------------------------------------------------------

Mode = Literal["deterministic", "fast"]
Autocast = Literal["bf16", "fp16"]


# -- randomness that belongs to the micro-batch, never to the worker ----------------------------


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else.

    Typical parts: purpose, job seed, iteration, pipeline, micro-batch, stage. Equal parts give the
    equal seed in every process, on every machine.
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def mesh_names(dimensions: int) -> tuple[str, ...]:
    """Of the dimensions of the mesh of a worker's ranks. dp: over which micro-batches are divided."""
    return ("ranks",) if dimensions == 1 else ("dp", "tp")


def _rows_of(mesh: str) -> tuple[int, int]:
    """Raises InputError."""
    found = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", mesh)
    if found is None:
        raise InputError("mesh", mesh, "rows x ranks in each, such as 2x4")
    return int(found[1]), int(found[2])


# ruff: noqa: RUF009 (`option` makes a field)


# -- what workers compute on, and what carries their data ---------------------------------------

Kind = Literal["cpu", "cuda"]
Transport = Literal["tagged", "ordered"]

CUDA_ENVIRONMENT = {
    # Failures are found by the launcher and the console; torch's own handling would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # Its monitor ends a process whose watchdog stands still, as it may while a group is aborted.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Nor is anything to be written when an operation is ended, as at every death.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # An error of the device is told by the op that meets it; torch's would end the process before that is said.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # All of a communicator is connected when it is made, and nothing with the first sum that is large: to connect is
    # to wait for the others, in an op that they may wait for.
    "NCCL_RUNTIME_CONNECT": "0",
    # Each stream has a queue of its own, so that a kernel that waits for a peer holds up no other's.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # cuBLAS gives the same bits again only with a workspace of fixed size.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # From NCCL 2.30 on, several ranks may be on one GPU; those before refuse that, and don't know this.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}
OVER_NCCL_ENVIRONMENT = {
    # No launch may wait until all that the GPU was given is done: a receive may be among it whose message depends on
    # what is launched after. So a library's kernels are loaded when it is first used, and not each with its own first
    # use, which takes a start 6 s, and 1 GiB of the GPU's memory (H100);
    "CUDA_MODULE_LOADING": "EAGER",
    # and no launch waits for its own end, as somebody may have it to find a fault.
    "CUDA_LAUNCH_BLOCKING": "0",
}
SHARED_GPU_ENVIRONMENT = {
    # Kernels of all ranks of a GPU wait for each other, so none may take much of it; NVLS can't be shared.
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
}
"""Of all workers where some are not alone on their GPU, since NCCL wants the same of all; what is set already stays."""
SHARING_NCCL = (2, 30)


@documented
@dataclass(frozen=True, kw_only=True)
class Platform(OptionGroup):
    """What workers compute on; the same for all workers of a job. Either transport gives the same bits."""

    PATH: ClassVar[str] = "platform"

    device: Kind = option(
        "cpu", "cpu, or cuda: a GPU for every worker, or for each of its ranks. Where there are fewer, they share them."
    )
    transport: Transport | None = option(
        None,
        "How messages find their receives: tagged (over gloo; from GPUs by way of the host's memory), or ordered (as "
        "NCCL needs; over NCCL between GPUs). By default tagged on CPUs and ordered on GPUs.",
        expected="tagged or ordered",
    )
    ranks_per_worker: int = option(
        1,
        "Processes (ranks) of each worker; the workload's `parallelize` splits every layer over them.",
        flag="--ranks-per-worker",
        least=1,
        most=64,
        told="ranks_per_worker",
    )
    mesh: str | None = option(
        None,
        "A worker's ranks in rows: 2x4 for a DeviceMesh of 2 x 4 ranks, with the dimensions `dp` (for fully_shard) and "
        "`tp` (for parallelize_module). By default in one row.",
        parse=lambda text: _rows_of(text),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.prod(self.shape) != self.ranks_per_worker:
            raise self.refuse("mesh", f"as many ranks as `{self.path('ranks_per_worker')}`, {self.ranks_per_worker}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mesh of a worker's ranks."""
        return (self.ranks_per_worker,) if self.mesh is None else _rows_of(self.mesh)

    @property
    def carrier(self) -> Transport:
        """The transport: `tagged`, by a tag, in any order; `ordered`, by their order alone, which is all NCCL has."""
        return self.transport or ("tagged" if self.device == "cpu" else "ordered")

    def check(self, workers: int) -> str:
        """Returns a sentence where ranks share GPUs. Imports torch for any device but the CPU. Raises InputError
        unless this node can run so many. workers: the ranks on it, so the workers where each has one."""
        if self.device == "cpu":
            return ""
        import torch
        import torch.distributed

        cuda: Any = torch.cuda
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise self.refuse("device", f"cpu, since this torch ({torch.__version__}) is built without CUDA")
        over_nccl = self.carrier == "ordered"
        if over_nccl and not torch.distributed.is_nccl_available():
            raise self.refuse("device", f"cpu, since this torch ({torch.__version__}) is built without NCCL")
        if not cuda.is_available():
            raise self.refuse("device", "cpu, or a GPU and a driver that torch can use on this node")
        gpus = int(cuda.device_count())
        if gpus >= workers:
            return ""
        if over_nccl and nccl_version()[:2] < SHARING_NCCL:
            have, need = (".".join(map(str, v)) for v in (nccl_version(), SHARING_NCCL))
            raise self.refuse(
                "device",
                f"a GPU for each of the {workers} ranks on this node, which has {gpus}: NCCL {have} takes no two "
                f"ranks on one, as {need} does; or `platform.transport` tagged, which takes them over gloo",
            )
        each = -(-workers // gpus)
        return f"the {workers} ranks of this node share {gpus} GPU{'s' * (gpus > 1)}, up to {each} on one: " + (
            "they take turns on it, so this is for trying out"
        )

    def take(self, slot: int, *, deterministic: bool, shared: bool = False) -> torch.device:
        """Prepares this process, before it has touched a GPU; returns where it computes.

        slot: this worker's number among those of its node. deterministic: torch refuses what can't be
        done again to the same bits. shared: do workers of the job share GPUs? Raises InputError.
        """
        import torch

        if self.device == "cpu":
            return torch.device("cpu")
        # First: the driver reads some of it when it is asked anything.
        os.environ.update(CUDA_ENVIRONMENT | (OVER_NCCL_ENVIRONMENT if self.carrier == "ordered" else {}))
        cuda: Any = torch.cuda
        if cuda._is_in_bad_fork():
            raise self.refuse(
                "device",
                "a job whose modules leave CUDA alone while they are imported: workers are forked from a process that "
                "imports them",
            )
        self.check(slot + 1)
        if shared:
            for name, value in SHARED_GPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        slot %= int(cuda.device_count())
        cuda.set_device(slot)
        if deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            # By default it fills each new tensor, a kernel for every receive; what is read was written before.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        return torch.device("cuda", slot)


def kind_number(device: torch.device) -> int:
    """Equal for devices that compute the same bits; 0 for the CPU, of which all nodes' are compared when they join."""
    if device.type == "cpu":
        return 0
    import torch
    import torch.distributed

    cuda: Any = torch.cuda
    cudnn: Any = torch.backends.cudnn
    return seed_for(cuda.get_device_name(device), str(torch.version.cuda), *nccl_version(), cudnn.version())


def nccl_version() -> tuple[int, ...]:
    """Of the one that is loaded: torch says which one it was built with, also where another was installed since.
    Nothing where there is none."""
    import torch
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        return ()
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # it is a part of torch's own library
        cuda: Any = torch.cuda
        return tuple(cuda.nccl.version())
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def on_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; through tuples, lists and dictionaries."""
    import torch

    if isinstance(value, torch.Tensor):
        if device.type == "cuda" and value.device.type == "cpu":
            # From other memory a copy would hold up this thread until everything before it is done.
            value = value.pin_memory()
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(v, device) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(on_device(v, device) for v in value)
    if isinstance(value, Mapping):
        return {k: on_device(v, device) for k, v in value.items()}
    return value


class Upload:
    """Brings what was read to `device`, in a stream of its own: beside what that computes already."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, value: Any) -> Any:
        """As `on_device`; ready for this thread's stream, and nobody waits for it on the host."""
        if self._stream is None:
            return value if self._device.type == "cpu" else on_device(value, self._device)
        import torch

        here: Any = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = on_device(value, self._device)
        here.wait_stream(self._stream)
        for tensor in _tensors_in(moved):
            tensor.record_stream(here)  # its memory is given to nobody else before that stream is done with it
        return moved


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part)


CPU_CHUNK = 1 << 17
"""Elements of a gradient that a CPU adds at a time, all or none of them: they stay in a core's cache."""
_PINNED_AT_A_TIME = 2
"""One is filled while another is copied, for the one before that an op has ended (agent.workers.executor)."""
_SMALL_PINNED, _SMALL_AT_A_TIME = 1 << 12, 8
"""Bytes: weights, shapes and single numbers, of which more are under way."""


def pinned_sizes(value: Any, *, varies: bool = False) -> list[int]:
    """Bytes of the blocks of pinned memory by way of which micro-batches like this one go to a GPU, each a power of two
    as torch has them. varies: are others smaller?"""
    sizes = [1 << k for k in range(3, _SMALL_PINNED.bit_length())] * _SMALL_AT_A_TIME
    for tensor in _tensors_in(value):
        size = 1 << max(0, tensor.nbytes - 1).bit_length()
        while size > _SMALL_PINNED:
            sizes += [size] * _PINNED_AT_A_TIME
            size = size // 2 if varies else 0
    return sizes


def keep_pinned(value: Any, device: torch.device, *, varies: bool = False) -> None:
    """Before training: has torch keep that memory. To take it from the system later may be to wait for all that the GPU
    was given, a receive among it."""
    if device.type == "cuda":
        import torch

        at_once = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in pinned_sizes(value, varies=varies)]
        del at_once


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the processes of this one's group may have: the memory and swap of the machine, or less, where a
    container, Slurm or systemd gives less (cgroup v2, or v1). None where the system does not say. root: its files'."""
    limit = _memory_limit(root)
    return None if limit is None else limit[0]


def memory_group(root: Path = Path("/")) -> int | None:
    """A number of the group of processes that may have that, the same for all in it; 0: all of the machine."""
    limit = _memory_limit(root)
    return None if limit is None else limit[1]


def _memory_limit(root: Path) -> tuple[int, int] | None:
    """The limit, and whose it is."""
    limits = list[tuple[int, int]]()
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        limits.append((sum(1024 * int(lines[name].split()[0]) for name in ("MemTotal", "SwapTotal")), 0))
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, KeyError, ValueError, IndexError):
        groups = []
    for _, controllers, path in (group.split(":", 2) for group in groups if group.count(":") >= 2):
        names = ("memory.max",) if not controllers else ("memory.limit_in_bytes",)
        if controllers and "memory" not in controllers.split(","):
            continue
        home = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = home / path.lstrip("/")
        # In a container the path may be one that is not there; its own group is mounted at the top then.
        for folder in {own, *(parent for parent in own.parents if parent.is_relative_to(home)), home}:
            for name in names:
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    # The number of its folder is the same whatever a container calls it.
                    limits.append((int((folder / name).read_text()), folder.stat().st_ino))
    return min(limits, default=None)
