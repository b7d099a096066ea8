"""Options of which each has another value than by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from openrecycle.agent.config.options import TrainingOptions
from openrecycle.agent.config.settings import Leaf, build, leaves, without_none

TEXTS: dict[str, Any] = {
    "optimization.autocast": "bf16",
    "planning.technique": "decoupled",
    "planning.memory": "none",
    "planning.capacity": "80GiB",
    "planning.pace": "F=1ms,I=1ms,W=1ms",
    "planning.partition": "2,3",
    "platform.ranks_per_worker": 2,
    "platform.mesh": "1x2",
    "checkpoints.resume": "newest",
    "faults.kill": ("W1_2@3:F0",),
    "faults.rejoin": ("W1_2@5",),
    "faults.slow": ("W1_2@4:2",),
    "faults.hand_over.rate": "50MB",
    "console.url": "http://127.0.0.1:1",
}
"""Of options whose text has a form, or that do not go with any other."""


def changed(leaf: Leaf) -> Any:
    """A value for it that is not its default."""
    if leaf.path in TEXTS:
        return TEXTS[leaf.path]
    kind, default = without_none(leaf.annotation)[0], leaf.default
    if get_origin(kind) is Literal:
        return next(choice for choice in reversed(get_args(kind)) if choice != default)
    if get_origin(kind) is Sequence:
        return ("a text",)
    if kind is bool:
        return not default
    if kind in (int, float):
        return kind(1.5 * default) if default else kind(1)
    return "another text"


def all_changed() -> dict[str, Any]:
    """By the options' paths."""
    return {leaf.path: changed(leaf) for leaf in leaves(TrainingOptions)}


def everything_changed(**others: Any) -> TrainingOptions:
    options: TrainingOptions = build(TrainingOptions, all_changed(), **others)
    return options
