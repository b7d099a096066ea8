"""What workers compute on, and what carries their data. No torch here but where a function needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from planner.errors import InputError

Kind = Literal["cpu", "cuda"]
Transport = Literal["tagged", "ordered"]


@dataclass(frozen=True)
class Platform:
    """The same on every worker of a job. Plain data.

    transport: how messages find their receives: `tagged`, by a tag, in any order; `ordered`, by their
    order alone, which is all that NCCL has. Either gives the same bits.
    """

    device: Kind = "cpu"
    transport: Transport = "tagged"

    @classmethod
    def of(cls, device: str, transport: str | None) -> Platform:
        """transport: None for what suits the device. Raises InputError naming the option."""
        if device not in get_args(Kind):
            raise InputError("--device", device, "cpu or cuda")
        if transport is None:
            transport = "tagged" if device == "cpu" else "ordered"
        if transport not in get_args(Transport):
            raise InputError("--transport", transport, "tagged or ordered")
        if device == "cuda" and transport == "tagged":
            raise InputError("--transport", transport, "ordered with --device cuda: NCCL knows no tags")
        return cls(device, transport)  # type: ignore[arg-type]
