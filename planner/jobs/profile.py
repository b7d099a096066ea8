"""What the ops of a stage or a layer take: durations and bytes, as the user gives them and in ticks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from openrecycle.planner.jobs.errors import InputError

MAX_DECIMALS = 6
# For the best partition of the layers, where numbers could be given.
AUTO = "auto"
MAX_BYTES = 1 << 60
# Of stages that are a little unlike: their times are a plain one's times one of these.
UNEVEN_SCALES = (0.9, 1.0, 1.1, 1.2)
# Of the fields of a StageProfile those that are times, beside its reductions, and those that are bytes.
TIMES = ("forward", "input_backward", "weight_backward", "optimizer")
SIZES = ("activation_bytes", "weight_backward_bytes", "weight_bytes", "optimizer_bytes")


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

    def least_bytes(self, *, splits: bool) -> int:
        """What a micro-batch takes at any time, from its F's start to its W's (or B's) end."""
        return min(self.activation_bytes, self.weight_backward_bytes) if splits else self.activation_bytes

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


@dataclass(frozen=True)
class LayerProfile(StageProfile):
    """The same of one layer; a stage takes what its layers take together.

    transfer: of what is sent if a stage ends behind this layer, activations forward; backward_transfer: of the
    gradients back, as long unless given.
    """

    transfer: float = 0.0
    backward_transfer: float | None = None

    def __post_init__(self) -> None:
        if self.backward_transfer == self.transfer:  # one spelling, so that equal layers are equal
            object.__setattr__(self, "backward_transfer", None)

    @property
    def back(self) -> float:
        """The transfer of gradients."""
        return self.transfer if self.backward_transfer is None else self.backward_transfer

    def check(self, where: str) -> None:
        super().check(where)
        check_duration(f"{where}.transfer", self.transfer)
        check_duration(f"{where}.backward_transfer", self.back)


def joined(layers: Sequence[StageProfile]) -> StageProfile:
    """The stage that these layers make, to the planner's decimals."""
    most = max(len(layer.reductions) for layer in layers)
    # Counted from the end, where all peers live.
    reductions = tuple(
        _sum(layer.reductions[-n] for layer in layers if n <= len(layer.reductions)) for n in range(most, 0, -1)
    )
    times: dict[str, Any] = {name: _sum(getattr(layer, name) for layer in layers) for name in TIMES}
    sizes: dict[str, Any] = {name: sum(getattr(layer, name) for layer in layers) for name in SIZES}
    return StageProfile(**times, reductions=reductions, **sizes)


def _sum(values: Iterable[float]) -> float:
    return round(math.fsum(values), MAX_DECIMALS)


def balanced(work: Sequence[float], stages: int) -> tuple[int, ...] | None:
    """Layers per stage, contiguous, so that the largest sum of a stage's `work` is the least.

    None where there are fewer layers than stages. That sum is found by bisection over those that occur, as a
    greedy fill says at once whether one suffices.
    """
    if not 1 <= stages <= len(work):
        return None
    sums = [0.0]
    for layer in work:
        sums.append(sums[-1] + layer)
    least = max(work)
    candidates = sorted({least, *(b - a for i, a in enumerate(sums) for b in sums[i + 1 :] if b - a > least)})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _fill(work, candidates[middle], stages) is None:
            low = middle + 1
        else:
            high = middle
    return _fill(work, candidates[low], stages)


def _fill(work: Sequence[float], limit: float, stages: int) -> tuple[int, ...] | None:
    """Stages filled one after the other up to `limit`, each leaving a layer for those that follow."""
    counts: list[int] = []
    at = 0
    for stage in range(stages):
        left = stages - 1 - stage
        taken, total = 0, 0.0
        while at < len(work) - left and total + work[at] <= limit * (1 + 1e-12):
            total += work[at]
            at += 1
            taken += 1
        if not taken:
            return None
        counts.append(taken)
    return tuple(counts) if at == len(work) else None


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


def parse_partition(text: str, *, field: str = "partition") -> tuple[int, ...]:
    """Layers per stage, `11,11,12`, to numbers; () for an empty text. Raises InputError."""
    if not re.fullmatch(r"([0-9]{1,5}(,[0-9]{1,5})*)?", text.replace(" ", "")):
        raise InputError(field, text, "numbers of layers, one per stage, with commas between: 11,11,11,11")
    return tuple(map(int, filter(None, text.replace(" ", "").split(","))))


def parse_durations(text: str) -> dict[str, float]:
    """Reads `F=1,I=1,W=1,O=0,transfer=0` (any subset). Raises InputError."""
    field, known = "--durations", ("F", "I", "W", "O", "transfer")
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
