"""What workers compute on: devices, precision by name, the seed of every random number, and the memory there is.

Random numbers belong to the micro-batch, never to the worker that happens to run it (`seed_for`). torch is imported
only in the functions that need it.

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
    """Returns a 63-bit seed that depends on every part and on nothing else.

    Typical parts: purpose, job seed, iteration, pipeline, micro-batch, stage. Equal parts give equal seeds in every
    process, on every machine.
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def mesh_names(dimensions: int) -> tuple[str, ...]:
    """Returns the names of the dimensions of a mesh of a worker's ranks. Micro-batches are divided over `dp`."""
    return ("ranks",) if dimensions == 1 else ("dp", "tp")


def _rows_of(mesh: str) -> tuple[int, int]:
    """Returns the sizes in a text such as 2x4. Raises InputError."""
    found = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", mesh)
    if found is None:
        raise InputError("mesh", mesh, "rows x ranks in each, such as 2x4")
    return int(found[1]), int(found[2])


# ruff: noqa: RUF009 (`option` makes a field)


# -- what workers compute on, and what carries their data ---------------------------------------

Kind = Literal["cpu", "cuda"]
Transport = Literal["tagged", "ordered"]

CUDA_ENVIRONMENT = {
    # The launcher and the console find failures. torch's own handling would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # torch's monitor ends a process whose watchdog stands still, which can happen while a group is aborted.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # No dump when an operation is aborted, which happens at every death.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The op that meets an error of the device reports it. torch would end the process before that.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Connect everything when a communicator is made, and not with the first large sum: to connect is to wait for the
    # other ranks, in an op that they may be waiting for.
    "NCCL_RUNTIME_CONNECT": "0",
    # Each stream has its own queue, so that a kernel which waits for a peer holds up no other stream.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # cuBLAS gives the same bits again only if its workspace has a fixed size.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # From NCCL 2.30 on, several ranks may share a GPU. Earlier versions refuse that, and ignore this variable.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}
OVER_NCCL_ENVIRONMENT = {
    # No launch of a kernel may wait for all earlier work of the GPU: that may include a receive whose message depends
    # on what is launched next. So all kernels of a library are loaded when it is first used, not each at its own first
    # use. This makes a start 6 s longer, and takes 1 GiB of the GPU's memory (H100).
    "CUDA_MODULE_LOADING": "EAGER",
    # For the same reason no launch may wait for its own end. Somebody may have set this to find a fault.
    "CUDA_LAUNCH_BLOCKING": "0",
}
SHARED_GPU_ENVIRONMENT = {
    # Kernels of all ranks of a GPU wait for each other, so none may use much of the GPU. NVLS can't be shared.
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
}
"""Set in all workers if some share a GPU, since NCCL needs the same in all. A variable that is set already stays."""
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
        """The shape of the mesh of a worker's ranks."""
        return (self.ranks_per_worker,) if self.mesh is None else _rows_of(self.mesh)

    @property
    def carrier(self) -> Transport:
        """The transport: `tagged` finds messages by tags, in any order; `ordered` by order alone, as NCCL must."""
        return self.transport or ("tagged" if self.device == "cpu" else "ordered")

    def check(self, workers: int) -> str:
        """Raises InputError unless this node can run so many ranks. Returns a sentence if they share GPUs, else "".
        workers: the number of ranks on this node, which is that of workers where each has one rank. Imports torch for
        any device but the CPU."""
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
        """Prepares this process, before it has touched a GPU. Returns the device that it computes on.

        slot: this rank's number on its node. deterministic: make torch refuse what does not give the same bits again.
        shared: do workers of the job share GPUs? Raises InputError.
        """
        import torch

        if self.device == "cpu":
            return torch.device("cpu")
        # First of all, since the driver reads some of these variables the first time that it is used.
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
            # By default torch fills each new tensor, with a kernel for every receive. Here all memory is written before
            # it is read.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        return torch.device("cuda", slot)


def kind_number(device: torch.device) -> int:
    """Returns a number that is equal for devices that compute the same bits. It is 0 for CPUs, which nodes compare when
    they join."""
    if device.type == "cpu":
        return 0
    import torch
    import torch.distributed

    cuda: Any = torch.cuda
    cudnn: Any = torch.backends.cudnn
    return seed_for(cuda.get_device_name(device), str(torch.version.cuda), *nccl_version(), cudnn.version())


def nccl_version() -> tuple[int, ...]:
    """Returns the version of the NCCL that is loaded; () if there is none. torch itself reports the one that it was
    built with, even if another one was installed later."""
    import torch
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        return ()
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # NCCL is linked into torch's own library
        cuda: Any = torch.cuda
        return tuple(cuda.nccl.version())
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def on_device(value: Any, device: torch.device) -> Any:
    """Returns `value` with every tensor in it moved to `device`, also in tuples, lists and dictionaries."""
    import torch

    if isinstance(value, torch.Tensor):
        if device.type == "cuda" and value.device.type == "cpu":
            # From memory that is not pinned, a copy would make this thread wait for all earlier work of the GPU.
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
    """Moves data to a GPU in a stream of its own, beside what the GPU computes. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, value: Any) -> Any:
        """As `on_device`. The result can be used in this thread's stream; the host does not wait for the copy."""
        if self._stream is None:
            return value if self._device.type == "cpu" else on_device(value, self._device)
        import torch

        here: Any = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = on_device(value, self._device)
        here.wait_stream(self._stream)
        for tensor in _tensors_in(moved):
            tensor.record_stream(here)  # so that its memory is not reused before that stream is done with it
        return moved


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part)


CPU_CHUNK = 1 << 17
"""A CPU adds a gradient in blocks of so many elements, which stay in a core's cache; all of a block, or nothing."""
_PINNED_AT_A_TIME = 2
"""Blocks per size: one is filled while another is copied for the op before, which has not ended
(agent.workers.executor)."""
_SMALL_PINNED, _SMALL_AT_A_TIME = 1 << 12, 8
"""Up to so many bytes, which weights, shapes and single numbers have, more blocks per size are kept."""


def pinned_sizes(value: Any, *, varies: bool = False) -> list[int]:
    """Returns the sizes in bytes of the pinned memory that micro-batches like this one need on their way to a GPU. Each
    is a power of two, as torch allocates them. varies: are other micro-batches smaller?"""
    sizes = [1 << k for k in range(3, _SMALL_PINNED.bit_length())] * _SMALL_AT_A_TIME
    for tensor in _tensors_in(value):
        size = 1 << max(0, tensor.nbytes - 1).bit_length()
        while size > _SMALL_PINNED:
            sizes += [size] * _PINNED_AT_A_TIME
            size = size // 2 if varies else 0
    return sizes


def keep_pinned(value: Any, device: torch.device, *, varies: bool = False) -> None:
    """Makes torch allocate that pinned memory before training, and keep it. To take memory from the system later may
    mean to wait for all earlier work of the GPU, which may include a receive."""
    if device.type == "cuda":
        import torch

        at_once = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in pinned_sizes(value, varies=varies)]
        del at_once


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the bytes that the processes of this process's group may use: the machine's memory and swap, or less
    where a container, Slurm or systemd sets a limit (cgroup v2 or v1). None if the system does not say. root: the
    folder that holds the system's files."""
    limit = _memory_limit(root)
    return None if limit is None else limit[0]


def memory_group(root: Path = Path("/")) -> int | None:
    """Returns a number for the group of processes that share this limit, equal for all in it; 0: the whole machine."""
    limit = _memory_limit(root)
    return None if limit is None else limit[1]


def _memory_limit(root: Path) -> tuple[int, int] | None:
    """Returns the smallest limit in bytes, and the number of the group that it is for."""
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
        # In a container the path may not exist; then its own group is mounted at the top.
        for folder in {own, *(parent for parent in own.parents if parent.is_relative_to(home)), home}:
            for name in names:
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    # The inode number of the folder is the same, whatever name a container has for it.
                    limits.append((int((folder / name).read_text()), folder.stat().st_ino))
    return min(limits, default=None)
