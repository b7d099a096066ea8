"""How a job trains, apart from what it trains: precision, clipping, checks and when a step is final."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from openrecycle.planner.errors import InputError

Mode = Literal["deterministic", "fast"]
Autocast = Literal["bf16"]
NonFinite = Literal["skip", "stop"]
OnBadSample = Literal["halt", "skip"]


@dataclass(frozen=True)
class Recipe:
    """Plain data, the same on every worker of a job.

    mode: `deterministic` sums gradients so that their order does not show (bitwise equal to the
    fault-free run whatever was re-routed); `fast` sums in the parameters' own type.
    autocast: run forwards (and so backwards) under torch.autocast of this type; None for full precision.
    clip_norm: largest global L2 norm of the gradients over all stages; None for no clipping.
    non_finite: what an iteration with a NaN or infinite gradient does: `skip` leaves every parameter
    as it was (the job ends when it happens too often in a row), `stop` ends the job.
    staggered: a stage steps as soon as its own gradients are reduced and is validated later; False
    waits for the global checks before any stage steps. The bits are the same.
    keep_finished: after a death, micro-batches that survivors have finished are not run again, only
    those of which some stage's share died. It costs the interrupted iteration one small reduction
    more, and saves nothing once some stage has taken its step. Measured on 3 x 2 workers, 8
    micro-batches, ops of 20 ms, a death at the last but one op of stage 1: 10 of 24 micro-batches ran
    again, 0.55 instead of 0.95 s; in the middle of the iteration 15, 0.65 instead of 0.88 s.
    on_bad_sample: what becomes of a micro-batch that raises on every worker that tries it (see agent.poison): `halt`
    ends the job before its iteration, with weights and a checkpoint; `skip` leaves it out, and the mean is over the
    others. bad_sample_limit: how many may be left out; one more ends the job.
    """

    mode: Mode = "deterministic"
    autocast: Autocast | None = None
    clip_norm: float | None = None
    non_finite: NonFinite = "skip"
    staggered: bool = True
    keep_finished: bool = False
    on_bad_sample: OnBadSample = "halt"
    bad_sample_limit: int = 100

    def __post_init__(self) -> None:
        """Raises InputError naming the field."""
        if self.mode not in get_args(Mode):
            raise InputError("--mode", self.mode, "deterministic or fast")
        if self.autocast is not None and self.autocast not in get_args(Autocast):
            raise InputError("--autocast", self.autocast, "bf16, or nothing for full precision")
        if self.non_finite not in get_args(NonFinite):
            raise InputError("--non-finite", self.non_finite, "skip or stop")
        if self.on_bad_sample not in get_args(OnBadSample):
            raise InputError("--on-bad-sample", self.on_bad_sample, "halt or skip")
        limit = self.bad_sample_limit
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise InputError("--bad-sample-limit", limit, "a whole number of at least 0")
        # Written so that NaN fails it too.
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise InputError("--clip-norm", self.clip_norm, "a finite number above 0")


@dataclass(frozen=True)
class CheckpointWish:
    """directory: of all checkpoints, on a disk that all workers share. every: iterations from one to
    the next; the last iteration always gets one. keep: how many stay. resume: `newest`,
    `newest-intact` (passes over damaged ones), or an iteration; None begins at iteration 0.
    """

    directory: str
    every: int = 100
    keep: int = 3
    resume: str | None = None

    def __post_init__(self) -> None:
        """Raises InputError naming the field."""
        path = Path(self.directory)
        if not path.parent.is_dir() or (path.exists() and not path.is_dir()):
            raise InputError("--checkpoint", self.directory, "a folder, or a name for one in a folder that exists")
        for field, value in (("--checkpoint-every", self.every), ("--checkpoint-keep", self.keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(field, value, "a whole number of at least 1")


@dataclass(frozen=True)
class HandOver:
    """How a worker that joins gets its stage's state (agent.state_transfer). at_once: bytes of state that come at
    once, while all wait; a larger state comes beside the training. rate: bytes per second that a worker gives to
    another at most; None: what the link carries. Raises InputError."""

    at_once: int = 1 << 22
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.at_once < 0:
            raise InputError("hand_over.at_once", self.at_once, "0 bytes or more")
        if self.rate is not None and not self.rate >= 1e4:
            raise InputError("--hand-over-rate", self.rate, "at least 10 KB per second")
