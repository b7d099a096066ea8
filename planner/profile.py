"""What one stage's ops take: durations and bytes, as the user gives them and in ticks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from openrecycle.planner.errors import InputError

MAX_DECIMALS = 6
MAX_BYTES = 1 << 60


@dataclass(frozen=True)
class StageProfile:
    """Op times of one stage, in the job's time unit, and what it keeps in memory, in bytes.

    forward F, input_backward I, weight_backward W, optimizer O (reduction and step).
    reductions: what the gradients' reduction adds to O, by the number of living peers: of 1 peer
    first, of the whole stage last. Empty: nothing.
    activation_bytes: of one micro-batch, from F's start to I's (or B's) end. weight_backward_bytes:
    what W needs of it, from I's end to W's end. weight_bytes, optimizer_bytes: kept throughout.
    """

    forward: float = 1.0
    input_backward: float = 1.0
    weight_backward: float = 1.0
    optimizer: float = 0.0
    reductions: tuple[float, ...] = ()
    activation_bytes: int = 0
    weight_backward_bytes: int = 0
    weight_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def counts_bytes(self) -> bool:
        """Is anything known of what it keeps in memory?"""
        return bool(self.fixed_bytes or self.activation_bytes or self.weight_backward_bytes)

    @property
    def fixed_bytes(self) -> int:
        """What a worker holds throughout: weights and optimizer state."""
        return self.weight_bytes + self.optimizer_bytes

    def micro_batch_bytes(self, *, splits: bool) -> int:
        """The larger part of a micro-batch: what I needs, or, where B is split, what W needs."""
        return max(self.activation_bytes, self.weight_backward_bytes if splits else 0)

    def check(self, where: str) -> None:
        for name in ("forward", "input_backward", "weight_backward", "optimizer"):
            check_duration(f"{where}.{name}", getattr(self, name))
        if self.forward <= 0:
            raise InputError(f"{where}.forward", self.forward, "a duration above 0")
        if self.input_backward + self.weight_backward <= 0:
            raise InputError(f"{where}.input_backward + weight_backward", 0, "a backward above 0")
        for n, reduction in enumerate(self.reductions):
            check_duration(f"{where}.reductions[{n}]", reduction)
        for name in ("activation_bytes", "weight_backward_bytes", "weight_bytes", "optimizer_bytes"):
            check_bytes(f"{where}.{name}", getattr(self, name))


class StageTicks(NamedTuple):
    """A StageProfile in ticks. `backward` is the coupled B = I + W."""

    forward: int
    input_backward: int
    weight_backward: int
    optimizer: int

    @property
    def backward(self) -> int:
        return self.input_backward + self.weight_backward

    @property
    def work(self) -> int:
        """Ticks of compute one micro-batch needs on this stage: F + I + W."""
        return self.forward + self.input_backward + self.weight_backward

    def at_speed(self, speed: float) -> StageTicks:
        """The op times of a worker of that speed (0.5: half as fast), rounded up."""
        exact = Fraction(Decimal(repr(speed)))
        return StageTicks._make(math.ceil(ticks / exact) for ticks in self)


# As JSON and people write it: `float` takes 1_000 and the digits of every script.
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?|[+-]?(inf|nan)", re.IGNORECASE)


def parse_durations(text: str, *, field: str = "--durations") -> dict[str, float]:
    """Reads `F=1,I=1,W=1,O=0,transfer=0` (any subset). Raises InputError."""
    known = ("F", "I", "W", "O", "transfer")
    out: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, raw = part.partition("=")
        if key not in known:
            raise InputError(field, part, "comma-separated NAME=NUMBER with NAME one of " + ", ".join(known))
        if key in out:
            raise InputError(field, part, f"each name once; {key} is there already")
        if not _NUMBER.fullmatch(raw.strip()):
            raise InputError(field, part, f"{key}=NUMBER, such as {key}=1.5")
        out[key] = float(raw)
        check_duration(f"{field} {key}", out[key])
    return out


def check_duration(field: str, value: float) -> None:
    # Of an int, however large, only the range matters: it may not fit into a float.
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not finite:
        raise InputError(field, value, "a finite number")
    if not 0 <= value <= 1e9:
        raise InputError(field, value, "a duration from 0 to 1e9")
    if decimals(value) > MAX_DECIMALS:
        raise InputError(field, value, f"at most {MAX_DECIMALS} decimals")


def check_bytes(field: str, value: int, *, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_BYTES:
        raise InputError(field, value, f"a whole number of bytes from {least} to {MAX_BYTES}")


def decimals(value: float) -> int:
    exponent = Decimal(repr(float(value))).normalize().as_tuple().exponent
    return max(0, -int(exponent))
