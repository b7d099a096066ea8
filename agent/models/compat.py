"""The private names of torch that the agent uses, and why. They are known to work in the versions of KNOWN.

Each generation gets a process group of its own. torch's public functions can't make one without a default group, so
its options are set here. The other names are used for speed: the public way takes longer, as each function here says.

Private names elsewhere: two modules that agent.launcher.processes, which has no torch itself, has the fork server
import early; `torch.cuda._is_in_bad_fork` in agent.config.devices, which can't import this file; and
`_allgather_base` and `_reduce_scatter_base` in agent.transport.ranks, which a subclass of ProcessGroup must define.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from openrecycle.agent.config.devices import mesh_names
from openrecycle.planner.jobs.errors import InputError

KNOWN = ("2.13", "2.14")
"""Versions of torch in which all of these names are known to work. Other versions may work, too."""


def check_version() -> None:
    """Raises InputError for a torch that lacks one of these names."""
    holders = {
        torch: ("_foreach_mul_", "_foreach_copy_"),
        Tensor: ("_version", "_is_view"),
        torch.nn.modules.conv.Conv2d: ("_conv_forward",),
    }
    missing = [name for holder, names in holders.items() for name in names if not hasattr(holder, name)]
    gloo = getattr(dist, "ProcessGroupGloo", None)
    if gloo is not None and not hasattr(gloo, "_Options"):
        missing.append("ProcessGroupGloo._Options")
    for settings in (fp32_precision, legacy_precisions, partial(backend_flags, "cpu"), partial(backend_flags, "cuda")):
        try:
            settings()
        except AttributeError as error:
            missing.append(f"_C.{error.name}")
    if missing:
        known = f"torch {', '.join(KNOWN)}, which is known to work"
        raise InputError("torch", f"{torch.__version__}, without {', '.join(missing)}", known)


def split_backward() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns torch's own two halves of a backward: for the inputs, and for the weights. Otherwise only torch's
    pipeline schedules call them. Takes a second to import."""
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input, _backward.stage_backward_weight


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes a convolution layer of torch.nn, of any dimension, with these parameters in place of its own."""
    y: Tensor = layer._conv_forward(x, weight, bias)
    return y


def gloo_device(address: str) -> Any:
    """Returns the device that listens at `address` for the peers of gloo groups, with a thread that reads from them."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname=address)


def gloo_group(store: Any, rank: int, size: int, *, timeout: timedelta, device: Any) -> Any:
    """Returns a ProcessGroupGloo on a device. Blocks until all ranks have connected. Raises RuntimeError."""
    # With this, all addresses come in one request to the store, instead of one request for each rank: 12 processes on
    # two busy cores connect in 45 ms instead of 63, and 64 in 325 instead of 652.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [device]
    return gloo(store, rank, size, options)


def process_group(backend: Any, store: Any, rank: int, size: int) -> Any:
    """Returns a ProcessGroup over a gloo backend. It has the collectives that modules call; a backend has only some."""
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def add_nccl(group: Any, backend: Any) -> None:
    """Makes tensors on a GPU go over `backend` in a group of `process_group`."""
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)


def all_gather(into: Tensor, mine: Tensor, group: Any) -> None:
    """Gathers `mine` of all ranks, one after the other, into `into`. Raises RuntimeError."""
    dist.all_gather_single(into, mine, group)


def reduce_scatter(into: Tensor, parts: Tensor, group: Any) -> None:
    """Sums over all ranks what they have for this rank. parts: for each rank, one after the other. Raises
    RuntimeError."""
    dist.reduce_scatter_single(into, parts, group=group)


def all_reduce(tensor: Tensor, group: Any) -> None:
    """Sums over all ranks, in place. Raises RuntimeError."""
    dist.all_reduce(tensor, group=group)


@contextmanager
def imagined_ranks(*shape: int) -> Iterator[Any]:
    """Yields a DeviceMesh of that shape, in which this process is the first rank and the others do not exist;
    collectives do nothing. Raises InputError in a process that has a default group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed import fake_pg  # the import registers the backend "fake"

    if dist.is_initialized():
        expected = "1, or a process without a default group of torch.distributed (destroy_process_group ends it)"
        raise InputError("platform.ranks_per_worker", prod(shape), expected)
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=prod(shape))
    try:
        numbers = torch.arange(prod(shape), device="cpu").view(shape)
        yield DeviceMesh("cpu", numbers, mesh_dim_names=mesh_names(len(shape)))
    finally:
        dist.destroy_process_group()


def keep_random_states(mesh: Any) -> None:
    """Lets each rank go on with its own random numbers. Otherwise, with the first random op on a DTensor, torch sends
    the state of the first rank to all ranks, also to those that have other samples."""
    if mesh.device_type == "cuda":  # on a CPU torch does nothing about it
        from torch.distributed.tensor import _random

        _random._rng_tracker = tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
        # torch takes the rank's number within its worker for that of its GPU, which may be another worker's.
        tracker._device = torch.device("cuda", torch.cuda.current_device())


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Returns the parameters of `module` without its children, by name. This is the module's own dict: what is put into
    it, of any type, replaces the parameter, without a call of `__setattr__`."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """As `own_parameters`, for buffers. A buffer that replaces another is persistent if the other was."""
    return module._buffers


def running_statistics(module: torch.nn.Module) -> list[Tensor]:
    """Returns the buffers that norm layers in `module` change in a forward, which does not raise their version."""
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase) and m.training]
    return [t for m in norms if m.track_running_stats for t in m.buffers(recurse=False)]


def version(tensor: Tensor) -> int:
    """Returns a number that changes with each write in place. A tensor made in inference mode has none."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Does autograd see a view in it? A view can't be detached in place."""
    return tensor._is_view()


def has_forward(module: torch.nn.Module) -> bool:
    """Can it be called?"""
    return getattr(module.forward, "__func__", None) is not torch.nn.Module.forward


def compiled_parts(module: torch.nn.Module) -> set[int]:
    """Returns the ids of modules that are compiled, and of all modules in them."""
    tops = [m for m in module.modules() if m._compiled_call_impl is not None or "_orig_mod" in m._modules]
    return {id(part) for top in tops for part in top.modules()}


def has_gradient_hook(parameter: Tensor) -> bool:
    """Has the parameter a hook of `register_hook`? torch's split backward calls these."""
    return bool(parameter._backward_hooks)


def has_hook_after_gradient(parameter: Tensor) -> bool:
    """Has the parameter a hook of `register_post_accumulate_grad_hook`? torch's split backward does not call these."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def without_children(module: Any) -> Any:
    """Returns a copy of `module` without its children. The copy shares the module's own parameters and buffers."""
    copied = shallow_copy(module)
    copied._modules = {}
    return copied


def fully_sharded_units(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules in `module` that fully_shard was called with; outer ones come before inner ones."""
    loaded = sys.modules.get("torch.distributed.fsdp")  # not imported: that takes a second, and its users have done it
    kind = getattr(loaded, "FSDPModule", ())
    return [part for part in module.modules() if isinstance(part, kind)]


def other_policies(unit: Any) -> str:
    """Returns the names of the arguments of fully_shard that change how the unit computes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    state = unit._get_fsdp_state()
    parameters = [p for group in state._fsdp_param_groups for p in group.fsdp_params]
    found = ["mp_policy"] if state._mp_policy != MixedPrecisionPolicy() else []
    return ", ".join([*found, *(["offload_policy"] if any(p.offload_to_cpu for p in parameters) else [])])


def take_off_hooks(unit: Any) -> None:
    """Removes what fully_shard has added to a unit, except the sharded parameters."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    state = unit._get_fsdp_state()
    for module in state._modules:
        module.__dict__.pop(STATE_KEY, None)
        module.__dict__.pop(REGISTRY_KEY, None)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    kind = type(unit)
    unit.__class__ = kind.__mro__[kind._orig_cls_mro_index]


def nccl_group(store: Any, rank: int, size: int, *, timeout: timedelta, most_ctas: int | None = None) -> Any:
    """Returns a ProcessGroupNCCL. It is given no device: with one, it would make one communicator for all pairs of
    ranks, in which messages of different pairs wait for each other. most_ctas: the most blocks for its kernels; the
    environment variable NCCL_MAX_CTAS takes precedence."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if most_ctas is not None:
        options.config.max_ctas = most_ctas
    # torch takes streams in turn from two pools of 32. From the pool of normal priority, a communicator would soon get
    # the stream that brings data to the GPU, and the data would wait for a message that waits for the data.
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, size, options)


def failure_of(work: Any) -> BaseException | None:
    """Returns why an operation of a group has failed; None if it has succeeded. A failed operation of NCCL counts as
    completed, and no wait raises its error. An error of the device itself is raised."""
    try:
        found: BaseException | None = work.exception()
    except torch.AcceleratorError:
        raise  # the device has failed, not a peer
    except RuntimeError as error:
        return error
    if isinstance(found, torch.AcceleratorError):
        raise found
    return found


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """Takes apart tuples, lists, dicts and what else torch knows. Returns the parts, and the form for
    `tree_unflatten`."""
    return pytree.tree_flatten(value)


def tree_unflatten(leaves: Sequence[Any], form: Any) -> Any:
    return pytree.tree_unflatten(leaves, form)


def copied(value: Any, copy: Callable[[Tensor], Any] = Tensor.clone) -> Any:
    """Returns the value with each tensor in it replaced by what `copy` makes of it."""
    return pytree.tree_map_only(Tensor, copy, value)


def multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies in place, in a few kernels for all. tensors: at least one."""
    torch._foreach_mul_(list(tensors), factor)


def parts_of_scheduler(scheduler: Any, steps: int) -> list[tuple[Any, int]]:
    """Returns the schedulers that a SequentialLR or a ChainedScheduler is made of, down to those without parts, and
    which of its own steps each has reached after so many of the whole; a scheduler without parts is its own."""
    parts = _parts_of_scheduler(scheduler, steps)
    if parts is None:
        return [(scheduler, steps)]
    return [found for part, share in parts if share > 0 for found in parts_of_scheduler(part, share)]


def steps_taken(scheduler: Any, otherwise: int) -> int:
    """Returns how many steps a scheduler has taken. otherwise: of one of the user's own that counts in another way."""
    while isinstance(scheduler, torch.optim.lr_scheduler.ChainedScheduler):  # counts nothing itself
        scheduler = scheduler._schedulers[0]
    taken = getattr(scheduler, "last_epoch", None)
    return taken if isinstance(taken, int) else otherwise


def part_without_beginning(scheduler: Any, steps: int) -> str | None:
    """Returns the class of a scheduler that is made of others and whose turn in a SequentialLR comes within so many
    steps, if there is one: torch can't begin it then."""
    late = isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR)
    for number, (part, share) in enumerate(_parts_of_scheduler(scheduler, steps) or ()):
        if share < 0:  # at 0 it has begun, which is no step of its own
            continue
        if late and number and _parts_of_scheduler(part, share) is not None:
            try:
                part._update_lr(0)
            except (NotImplementedError, AttributeError):  # torch before 2.13 has no such method, and can't either
                return type(part).__name__
        if found := part_without_beginning(part, share):
            return found
    return None


def _parts_of_scheduler(scheduler: Any, steps: int) -> list[tuple[Any, int]] | None:
    """Returns the direct parts, as `parts_of_scheduler`; None: it has none."""
    schedulers = torch.optim.lr_scheduler
    if isinstance(scheduler, schedulers.ChainedScheduler):
        return [(part, steps) for part in scheduler._schedulers]
    if not isinstance(scheduler, schedulers.SequentialLR):
        return None
    begins, ends = [0, *scheduler._milestones], [*(end - 1 for end in scheduler._milestones), steps]
    spans = zip(scheduler._schedulers, begins, ends, strict=True)
    return [(part, min(steps, end) - begin) for part, begin, end in spans]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the hooks that are called before and after each step."""
    hooks: Any = optimizer
    return [*hooks._optimizer_step_pre_hooks.values(), *hooks._optimizer_step_post_hooks.values()]


def copy(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Copies `theirs` into `mine`, in a few kernels where they are of one type and device."""
    torch._foreach_copy_(list(mine), list(theirs))


@contextmanager
def tensors_without_data() -> Iterator[Callable[[Tensor], Tensor]]:
    """Tensors made inside the block have only a shape, a type and a device. Yields what converts a tensor into such a
    one. Takes a second to import."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # The caller reports what fails; torch's own dozens of lines about it are switched off.
    said = logging.getLogger(FakeTensorMode.__module__)
    level = said.level
    said.setLevel(logging.CRITICAL + 1)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode.from_tensor
    finally:
        said.setLevel(level)


def fp32_precision() -> tuple[Callable[[str, str], str], Callable[[str, str, str], object]]:
    """Returns the functions that get and set the precision of an op (`all`, `matmul`, `conv`, `rnn`) of a backend
    (`generic`, `mkldnn`, `cuda`). The public properties take ten times as long, and raise where older names have been
    used beside them."""
    private: Any = torch._C
    return private._get_fp32_precision_getter, private._set_fp32_precision_setter


def legacy_precisions() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Returns pairs of get and set for what older functions (set_float32_matmul_precision, backends.cudnn.allow_tf32)
    keep beside `fp32_precision`. To get them raises RuntimeError where the two do not fit together."""
    of: Any = torch._C
    return [
        (of._get_float32_matmul_precision, of._set_float32_matmul_precision),
        (of._get_cudnn_allow_tf32, of._set_cudnn_allow_tf32),
    ]


def backend_flags(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Returns get and set for each flag that affects bits, by its public name; the public way takes 40 times as long. A
    value may be a pair of flags."""
    of: Any = torch._C
    attention, matmul = "torch.backends.cuda.enable_", "torch.backends.cuda.matmul.allow_"
    cudnn, mkldnn = "torch.backends.cudnn.", "torch.backends.mkldnn."
    named = {
        f"{attention}flash_sdp": (of._get_flash_sdp_enabled, of._set_sdp_use_flash),
        f"{attention}math_sdp": (of._get_math_sdp_enabled, of._set_sdp_use_math),
    }
    if device == "cuda":
        set_fp16, set_bf16 = (
            of._set_cublas_allow_fp16_reduced_precision_reduction,
            of._set_cublas_allow_bf16_reduced_precision_reduction,
        )
        return named | {
            f"{attention}mem_efficient_sdp": (
                of._get_mem_efficient_sdp_enabled,
                of._set_sdp_use_mem_efficient,
            ),
            f"{attention}cudnn_sdp": (of._get_cudnn_sdp_enabled, of._set_sdp_use_cudnn),
            f"{cudnn}enabled": (of._get_cudnn_enabled, of._set_cudnn_enabled),
            f"{cudnn}benchmark": (of._get_cudnn_benchmark, of._set_cudnn_benchmark),
            f"{cudnn}deterministic": (of._get_cudnn_deterministic, of._set_cudnn_deterministic),
            f"{matmul}fp16_accumulation": (
                of._get_cublas_allow_fp16_accumulation,
                of._set_cublas_allow_fp16_accumulation,
            ),
            # The second flag of each pair: may it split the sum?
            f"{matmul}fp16_reduced_precision_reduction": (
                of._get_cublas_allow_fp16_reduced_precision_reduction,
                lambda both: set_fp16(*both),
            ),
            f"{matmul}bf16_reduced_precision_reduction": (
                of._get_cublas_allow_bf16_reduced_precision_reduction,
                lambda both: set_bf16(*both),
            ),
        }
    return named | {
        f"{mkldnn}enabled": (of._get_mkldnn_enabled, of._set_mkldnn_enabled),
        f"{mkldnn}deterministic": (of._get_mkldnn_deterministic, of._set_mkldnn_deterministic),
    }


def _grouped(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """Counts the operations of a grouped product, as in a mixture of experts. Each row goes to one expert, unless both
    operands have a matrix per expert."""
    shared = left.shape[0] if left.dim() > right.dim() else 1
    return 2 * left.numel() // shared * right.shape[-1]


# torch's own counter lacks grouped products.
_FLOPS = {**flop_registry, torch.ops.aten._grouped_mm: _grouped}


class _EachOp(TorchDispatchMode):
    """Base of modes that see each of torch's ops that runs inside them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap __torch_dispatch__ in a function of torch._dynamo.
        return False


class FlopCount(_EachOp):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of what runs inside it: matrix products, convolutions and attention, as
    torch counts them. total: the sum so far.

    It counts what torch.utils.flop_counter.FlopCounterMode counts, and grouped products, but does not import
    torch._dynamo, which would add a second to the start of every worker.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _FLOPS.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


_storage_of: Any = torch._C._has_storage  # type: ignore[attr-defined]


class LiveBytes(_EachOp):  # type: ignore[no-untyped-call]
    """Measures the memory of the tensors that are made inside it. now: bytes of those that still exist. most: the
    largest value of `now`. Tensors without data count with what they would take."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, int] = {}
        """Bytes by the identity of a tensor's memory; 0 for memory that existed before."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._see((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, made=True)
        return out

    def _see(self, value: Any, *, made: bool) -> None:
        for tensor in pytree.tree_leaves(value):
            if not isinstance(tensor, Tensor) or not _storage_of(tensor):
                continue  # sparse tensors, and those of MKLDNN, are not one piece of memory
            if (key := (memory := tensor.untyped_storage())._cdata) not in self._known:
                self._known[key] = size = memory.nbytes() if made else 0
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(memory, self._let_go, key)

    def _let_go(self, key: int) -> None:
        self.now -= self._known.pop(key)
