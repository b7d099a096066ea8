"""Settings that torch keeps for a whole process and that affect bits: the number of threads it computes with, whether
it records gradients, the precision of its products.

A micro-batch must give the same result on every worker. So these settings must be the same on all workers, and stay as
they were after the job's files had been imported. A layer, a data set or an optimizer may change one of them later, and
so in one worker alone. Then `TorchSettings.put_back` sets it back after the op. To find out takes a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from openrecycle.agent.models import compat

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_PRECISIONS = ("ieee", "tf32", "bf16")
_FLAG = (False, True)
_TWO_FLAGS = ((False, False), (False, True), (True, False), (True, True))
_SUBNORMAL = 1e-310


@dataclass(frozen=True)
class _Setting:
    """One setting. name: of the function or property that sets it. values: those that it may have; (): any number."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    values: tuple[Any, ...] = _FLAG

    def in_bits(self, value: Any) -> Any:
        """Maps values that give the same bits to one: a precision that nobody has set, "none", is ieee."""
        return "ieee" if self.values is _PRECISIONS and value == "none" else value


def _settings(device: torch.device) -> list[_Setting]:
    """Returns all settings. A setting that others fall back to comes before those."""
    found = [
        _Setting("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads, ()),
        _Setting("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
        _Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype, _DTYPES),
        _Setting("torch.set_flush_denormal", lambda: not _SUBNORMAL / 2, torch.set_flush_denormal),
        _Setting(
            "torch.use_deterministic_algorithms",
            torch.are_deterministic_algorithms_enabled,
            # Whether it only warns does not affect bits, so that stays as it is.
            lambda on: torch.use_deterministic_algorithms(
                on, warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
            ),
        ),
    ]
    backend = "cuda" if device.type == "cuda" else "mkldnn"
    matmul = "torch.set_float32_matmul_precision"
    nested = "cudnn" if backend == "cuda" else backend
    read, write = compat.fp32_precision()
    for scope, what, name in (
        ("generic", "all", "torch.backends.fp32_precision"),
        (backend, "all", f"torch.backends.{backend}.fp32_precision"),
        (backend, "matmul", matmul),
        (backend, "conv", f"torch.backends.{nested}.conv.fp32_precision"),
        (backend, "rnn", f"torch.backends.{nested}.rnn.fp32_precision"),
    ):
        found.append(_Setting(name, partial(read, scope, what), partial(write, scope, what), _PRECISIONS))
    for name, (get, put) in compat.backend_flags(device.type).items():
        found.append(_Setting(name, get, put, _TWO_FLAGS if isinstance(get(), tuple) else _FLAG))
    return found


class Changed(NamedTuple):
    """A setting that was changed. setting: the name of what sets it."""

    setting: str
    was: str
    now: str

    @property
    def text(self) -> str:
        return (
            f"{self.setting}: the model's, the data's or the optimizer's code has changed it from {self.was} to "
            f"{self.now}, which shows in the bits, and other workers may not have it. It is set back whenever that is "
            "seen; take that call away, or make it at the top level of the job's file"
        )


class TorchSettings:
    """Remembers the settings as they are when it is made. Use it in the thread that made it."""

    def __init__(self, device: torch.device) -> None:
        self._settings = _settings(device)
        self._reads = [setting.read for setting in self._settings]
        self._values = self._now()
        read, _ = compat.fp32_precision()
        self._precisions = [(at, op, read(at, op)) for at in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]
        self._legacy = [(get, put, _or_none(get)) for get, put in compat.legacy_precisions()]

    def _now(self) -> list[Any]:
        return [read() for read in self._reads]

    def put_back(self) -> list[Changed]:
        """Sets everything back to the remembered values. Returns what was changed and affects bits."""
        if self._now() == self._values and all(was is None or _or_none(get) == was for get, _, was in self._legacy):
            return []
        changed = []
        for setting, was in zip(self._settings, self._values, strict=True):
            if (now := setting.read()) != was:
                setting.write(was)
                if setting.in_bits(now) != setting.in_bits(was):
                    changed.append(Changed(setting.name, _text(was), _text(now)))
        self._put_back_legacy()
        return changed

    def _put_back_legacy(self) -> None:
        """Sets back what older functions of torch keep beside the precisions. They raise if the two do not fit
        together, and setting one changes the precisions of both backends, so those are set again."""
        read, write = compat.fp32_precision()
        for get, put, was in self._legacy:
            if was is not None and _or_none(get) != was:
                put(was)
        for backend, op, value in self._precisions:
            if read(backend, op) != value:
                write(backend, op, value)

    @property
    def number(self) -> int:
        """A number that is equal in two processes if all settings but the threads are. Compare only processes whose
        devices are of one kind."""
        number = 0
        for setting, found in zip(self._settings, self._values, strict=True):
            value = setting.in_bits(found)
            number = number << _BITS | (setting.values.index(value) if value in setting.values else 0)
        return number

    def differing(self, one: int, other: int) -> Collection[str]:
        """Returns the names of the settings that differ between two processes, from their `number`s."""
        both = one ^ other
        places = range(len(self._settings) - 1, -1, -1)
        return [s.name for s, place in zip(self._settings, places, strict=True) if both >> place * _BITS & 2**_BITS - 1]


_BITS = 2


@contextmanager
def kept_settings() -> Iterator[None]:
    """Sets back, after the block, the settings that were changed in it."""
    kept = [TorchSettings(torch.device(kind)) for kind in ("cpu", "cuda")]
    try:
        yield
    finally:
        for settings in kept:
            settings.put_back()


def _or_none(read: Callable[[], Any]) -> Any:
    """Returns None where older and newer functions have been mixed, so that the older ones raise."""
    try:
        return read()
    except RuntimeError:
        return None


def _text(value: Any) -> str:
    return str(value).removeprefix("torch.")
