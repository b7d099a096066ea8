"""Validates an iteration's gradients over all stages, and decides whether to wait for that before a step. Pure.

Norm clipping and the check for NaN need every stage's gradients. A stage that steps as soon as its own are reduced does
not have the others'. So it steps as if the validation were clean (nothing clipped, nothing skipped), and corrects the
step if the validation says otherwise. A wrong guess costs the iteration in flight. A job whose gradients are clipped
often would guess wrong often. So after each surprise the stages wait for the validation before they step, until
`clean_needed` validations in a row were clean; and clean_needed doubles with every surprise, so that no pattern of
clipping costs more than a few percent. All workers see the same validations, so they all change from one way to the
other at the same step without exchanging anything.

All know the scale of the loss of fp16 numbers in the same way: see `LossScale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

MAX_SKIPPED = 10
"""How many iterations in a row may skip their update; one more ends the job."""
CLEAN_NEEDED = 8
MAX_CLEAN_NEEDED = 256
GROWTH_INTERVAL = 2000
"""Updates in a row after which the scale of the loss doubles; as torch.amp.GradScaler has it."""
LEAST_LOSS_SCALE, LARGEST_LOSS_SCALE = 2.0**-24, 2.0**40
_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True)
class Slot:
    """One stage's share of the validation. squared_norms: those of the reduced gradient per layer; () without clipping.
    rejected: how many of its terms were NaN, infinite or out of range."""

    squared_norms: tuple[float, ...] = ()
    rejected: int = 0


@dataclass(frozen=True)
class ValidationResult:
    """coefficient: the factor for every gradient; None: the update is skipped. norm: of the gradients of all stages
    before that; None: it is not known."""

    coefficient: float | None = 1.0
    norm: float | None = None

    @property
    def clean(self) -> bool:
        return self.coefficient == 1.0


CLEAN = ValidationResult()
SKIP = ValidationResult(None)


def judge(slots: Sequence[Slot], clip_norm: float | None) -> ValidationResult:
    """Returns the validation. slots: one per stage. The sum of the layers' norms is rounded once, so it does not matter
    which layers are in one stage."""
    if any(slot.rejected for slot in slots):
        return SKIP
    if clip_norm is None:
        return CLEAN
    try:
        norm = math.sqrt(math.fsum(squared for slot in slots for squared in slot.squared_norms))
    except (OverflowError, ValueError):  # a sum that overflows, or infinities of both signs
        return SKIP
    if not math.isfinite(norm):
        return SKIP
    return ValidationResult(min(1.0, clip_norm / (norm + _EPSILON)), norm)


@dataclass(frozen=True)
class LossScale:
    """The factor for the loss before the backward, so that small gradients are not 0 in fp16, as in
    torch.amp.GradScaler. value: a power of two. streak: updates in a row since it was changed, none of them skipped."""

    value: float = 2.0**16
    streak: int = 0

    def after(self, validation: ValidationResult) -> LossScale:
        if validation.coefficient is None:
            return LossScale(max(self.value / 2, LEAST_LOSS_SCALE))
        if self.streak + 1 < GROWTH_INTERVAL:
            return LossScale(self.value, self.streak + 1)
        return LossScale(min(2 * self.value, LARGEST_LOSS_SCALE))


@dataclass(frozen=True)
class PostValidation:
    """What follows from the validations so far.

    optimistic: steps are taken before their validation. calm: clean validations in a row since the last change of
    `optimistic` or `clean_needed`. clean_needed: how many of them the next such change takes. skipped: updates skipped
    in a row. loss_scale: None: nothing is fp16.
    """

    optimistic: bool = True
    calm: int = 0
    clean_needed: int = CLEAN_NEEDED
    skipped: int = 0
    loss_scale: LossScale | None = None

    def after(self, validation: ValidationResult) -> PostValidation:
        """Returns what follows once one more validation is known."""
        skipped = self.skipped + 1 if validation.coefficient is None else 0
        scale = self.loss_scale and self.loss_scale.after(validation)
        if not validation.clean:
            clean_needed = min(2 * self.clean_needed, MAX_CLEAN_NEEDED) if self.optimistic else self.clean_needed
            return PostValidation(False, 0, clean_needed, skipped, scale)
        calm = self.calm + 1
        if calm < self.clean_needed:
            return replace(self, calm=calm, skipped=skipped, loss_scale=scale)
        # If steps were optimistic for so long, clean_needed is halved; if they waited, the waiting ends.
        clean_needed = max(CLEAN_NEEDED, self.clean_needed // 2) if self.optimistic else self.clean_needed
        return PostValidation(True, 0, clean_needed, skipped, scale)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PostValidation:
        """Raises KeyError, TypeError or ValueError."""
        calm, clean_needed, skipped = (int(document[k]) for k in ("calm", "clean_needed", "skipped"))
        scale = document.get("loss_scale")
        scale = None if scale is None else _loss_scale(scale)
        return cls(bool(document["optimistic"]), calm, clean_needed, skipped, scale)


def _loss_scale(document: Mapping[str, Any]) -> LossScale:
    value, streak = float(document["value"]), int(document["streak"])
    if math.frexp(value)[0] != 0.5 or not LEAST_LOSS_SCALE <= value <= LARGEST_LOSS_SCALE or streak < 0:
        raise ValueError(f"loss scale: got {value:g}, expected a power of two")
    return LossScale(value, streak)
