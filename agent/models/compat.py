"""The private names of torch that the agent uses, and why; known to work in the versions KNOWN.

A group of our own is made for each generation, which torch's public functions can't do without a default group; so its
options are set here. The rest is speed: what public names do the same takes longer, as is said with each.

Named elsewhere: two modules that agent.launcher.processes, which has no torch itself, has imported early;
`torch.cuda._is_in_bad_fork` in agent.config.devices, which stands below this file; and `_allgather_base` and
`_reduce_scatter_base` in agent.transport.ranks, methods that a subclass of ProcessGroup must have.
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
"""Versions of torch in which all of these names do what is expected of them; another one may have them, too."""


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
    """torch's own halves of a backward, which only its pipeline schedules call: for the inputs, for the weights. Takes
    a second to load."""
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input, _backward.stage_backward_weight


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The arithmetic of a layer of torch.nn, any number of dimensions, with these parameters."""
    y: Tensor = layer._conv_forward(x, weight, bias)
    return y


def gloo_device(address: str) -> Any:
    """What listens at `address` for the peers of gloo groups, with the thread that reads what they send."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname=address)


def gloo_group(store: Any, rank: int, size: int, *, timeout: timedelta, device: Any) -> Any:
    """A ProcessGroupGloo that is heard at a device. Blocks until all ranks are there. Raises RuntimeError."""
    # All addresses in one request to the store, instead of one request after the other for each rank: 12 processes on
    # two busy cores connect in 45 ms instead of 63, and 64 in 325 instead of 652.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [device]
    return gloo(store, rank, size, options)


def process_group(backend: Any, store: Any, rank: int, size: int) -> Any:
    """A ProcessGroup over a gloo backend: it has the collectives that modules call, which a backend lacks in part."""
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def add_nccl(group: Any, backend: Any) -> None:
    """What is on a GPU goes over `backend` in a group of `process_group`."""
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)


def all_gather(into: Tensor, mine: Tensor, group: Any) -> None:
    """Everybody's `mine`, one after the other. Raises RuntimeError."""
    dist.all_gather_single(into, mine, group)


def reduce_scatter(into: Tensor, parts: Tensor, group: Any) -> None:
    """The sum of what everybody has for this rank; parts: of all ranks, one after the other. Raises RuntimeError."""
    dist.reduce_scatter_single(into, parts, group=group)


def all_reduce(tensor: Tensor, group: Any) -> None:
    """In place. Raises RuntimeError."""
    dist.all_reduce(tensor, group=group)


@contextmanager
def imagined_ranks(*shape: int) -> Iterator[Any]:
    """A DeviceMesh of that shape, as the first of ranks of which there are no others: collectives do nothing. Raises
    InputError in a process that has a default group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed import fake_pg  # a backend, which registers itself

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
    """Has each rank go on with its own random numbers. Else torch sends those of the first of all ranks to all with the
    first random op on a DTensor, also to those that have other samples."""
    if mesh.device_type == "cuda":  # on a CPU torch does nothing about it
        from torch.distributed.tensor import _random

        _random._rng_tracker = tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
        # Torch takes the rank's number in its worker for that of its GPU, where others may train.
        tracker._device = torch.device("cuda", torch.cuda.current_device())


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Those of `module` without its children, by name. The dict itself: what is put in it takes a parameter's place, of
    any type, and no `__setattr__` looks at it."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """As `own_parameters`; a buffer that is put in another's place stays persistent, or not, as that was."""
    return module._buffers


def running_statistics(module: torch.nn.Module) -> list[Tensor]:
    """Buffers that norms in `module`, of any kind that keeps some, change in a forward; no version shows it."""
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase) and m.training]
    return [t for m in norms if m.track_running_stats for t in m.buffers(recurse=False)]


def version(tensor: Tensor) -> int:
    """Another one after each write in place. A tensor that was made in inference mode has none."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """As autograd has it: such a one can't be detached in place."""
    return tensor._is_view()


def has_forward(module: torch.nn.Module) -> bool:
    """Can it be called?"""
    return getattr(module.forward, "__func__", None) is not torch.nn.Module.forward


def compiled_parts(module: torch.nn.Module) -> set[int]:
    """The identities of modules that are compiled, with all that is in them."""
    tops = [m for m in module.modules() if m._compiled_call_impl is not None or "_orig_mod" in m._modules]
    return {id(part) for top in tops for part in top.modules()}


def has_gradient_hook(parameter: Tensor) -> bool:
    """Of `register_hook`, which torch's split calls."""
    return bool(parameter._backward_hooks)


def has_hook_after_gradient(parameter: Tensor) -> bool:
    """Of `register_post_accumulate_grad_hook`, which torch's split does not call."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def without_children(module: Any) -> Any:
    """A copy that shares the parameters and buffers of `module` itself."""
    copied = shallow_copy(module)
    copied._modules = {}
    return copied


def fully_sharded_units(module: torch.nn.Module) -> list[torch.nn.Module]:
    """What fully_shard was called with, in `module`; one that holds others comes before them."""
    loaded = sys.modules.get("torch.distributed.fsdp")  # takes a second to load; whoever has called it has done that
    kind = getattr(loaded, "FSDPModule", ())
    return [part for part in module.modules() if isinstance(part, kind)]


def other_policies(unit: Any) -> str:
    """Which arguments of fully_shard's change how it computes, by name."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    state = unit._get_fsdp_state()
    parameters = [p for group in state._fsdp_param_groups for p in group.fsdp_params]
    found = ["mp_policy"] if state._mp_policy != MixedPrecisionPolicy() else []
    return ", ".join([*found, *(["offload_policy"] if any(p.offload_to_cpu for p in parameters) else [])])


def take_off_hooks(unit: Any) -> None:
    """Leaves of fully_shard's work the parameters alone."""
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
    """A ProcessGroupNCCL. It is given no device: it would make one communicator for all pairs of ranks, in which
    messages of different pairs wait for each other. most_ctas: blocks of its kernels (NCCL_MAX_CTAS goes before it)."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if most_ctas is not None:
        options.config.max_ctas = most_ctas
    # Streams come from two pools of 32, in turn. In that of usual ones a communicator would soon get the stream on
    # which data are brought to the GPU: they would wait for a message that waits for them.
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, rank, size, options)


def failure_of(work: Any) -> BaseException | None:
    """Why an operation of a group that has completed has brought nothing; None where it has done what it should. A
    failed one of NCCL's counts as completed, and no wait says it."""
    try:
        found: BaseException | None = work.exception()
    except torch.AcceleratorError:
        raise  # the device has failed, and no peer
    except RuntimeError as error:
        return error
    if isinstance(found, torch.AcceleratorError):
        raise found
    return found


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """What is in tuples, lists, dicts and what else torch can take apart; and the form for `tree_unflatten`."""
    return pytree.tree_flatten(value)


def tree_unflatten(leaves: Sequence[Any], form: Any) -> Any:
    return pytree.tree_unflatten(leaves, form)


def copied(value: Any, copy: Callable[[Tensor], Any] = Tensor.clone) -> Any:
    """With tensors of its own: what `copy` makes of each."""
    return pytree.tree_map_only(Tensor, copy, value)


def multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """In place, all in a few kernels. tensors: at least one."""
    torch._foreach_mul_(list(tensors), factor)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What is called before and after each step."""
    hooks: Any = optimizer
    return [*hooks._optimizer_step_pre_hooks.values(), *hooks._optimizer_step_post_hooks.values()]


def copy(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Into `mine`, all in a few kernels where they are of one type and device."""
    torch._foreach_copy_(list(mine), list(theirs))


@contextmanager
def tensors_without_data() -> Iterator[Callable[[Tensor], Tensor]]:
    """Of what is made inside, shapes, types and devices alone. Takes a second to load."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # What does not go is said by whoever asks, and not in dozens of lines by torch as well.
    said = logging.getLogger(FakeTensorMode.__module__)
    level = said.level
    said.setLevel(logging.CRITICAL + 1)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode.from_tensor
    finally:
        said.setLevel(level)


def fp32_precision() -> tuple[Callable[[str, str], str], Callable[[str, str, str], object]]:
    """What gives and sets the precision of an op (`all`, `matmul`, `conv`, `rnn`) of a backend (`generic`, `mkldnn`,
    `cuda`). The public properties take ten times as long, and raise where older names have been used beside them."""
    private: Any = torch._C
    return private._get_fp32_precision_getter, private._set_fp32_precision_setter


def legacy_precisions() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """What gives and sets what older functions keep beside those of `fp32_precision`: set_float32_matmul_precision and
    backends.cudnn.allow_tf32. The former raise a RuntimeError where the two don't fit."""
    of: Any = torch._C
    return [
        (of._get_float32_matmul_precision, of._set_float32_matmul_precision),
        (of._get_cudnn_allow_tf32, of._set_cudnn_allow_tf32),
    ]


def backend_flags(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """What gives and sets each of the flags that show in bits, by its public name, which takes 40 times as long. One
    may be a pair of flags."""
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
            # Beside each: may it split the sum?
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
    """Of a mixture of experts: rows go to one expert each, where not all of both have a matrix per expert."""
    shared = left.shape[0] if left.dim() > right.dim() else 1
    return 2 * left.numel() // shared * right.shape[-1]


# torch's own counter passes over these.
_FLOPS = {**flop_registry, torch.ops.aten._grouped_mm: _grouped}


class _EachOp(TorchDispatchMode):
    """Is asked for each of torch's ops that runs inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap __torch_dispatch__ in a function of torch._dynamo.
        return False


class FlopCount(_EachOp):  # type: ignore[no-untyped-call]
    """total: floating-point operations of what runs inside it: of matrix products, convolutions and attention, as torch
    counts them.

    What torch.utils.flop_counter.FlopCounterMode counts, and grouped products, without its import of torch._dynamo,
    which would add a second to every worker's start.
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
    """now: bytes of the tensors that were made inside it and are still there. most: of those, at most at a time. Of
    tensors without data, what they would take."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, int] = {}
        """By the identity of a tensor's memory; 0 where it was there before."""

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
                continue  # sparse ones, and those of MKLDNN, are no one piece of memory
            if (key := (memory := tensor.untyped_storage())._cdata) not in self._known:
                self._known[key] = size = memory.nbytes() if made else 0
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(memory, self._let_go, key)

    def _let_go(self, key: int) -> None:
        self.now -= self._known.pop(key)
