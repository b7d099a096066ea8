"""A job's stage times and bytes as a table that people edit, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrecycle.planner.errors import InputError
from openrecycle.planner.plan import JobDoc, StageDoc

MEGA = 10**6
FORWARD, INPUT, WEIGHT, OPTIMIZER, SEND, RETURN = "F", "I", "W", "O", "send on", "send back"
TIMES = {FORWARD: "forward", INPUT: "input_backward", WEIGHT: "weight_backward", OPTIMIZER: "optimizer"}
BYTES = {
    "activation": "activation_bytes",
    "for W": "weight_backward_bytes",
    "weights": "weight_bytes",
    "optimizer state": "optimizer_bytes",
}
CAPACITY = "capacity"
HELP = {
    FORWARD: "Forward of one micro-batch.",
    INPUT: "Gradient of the input, which the stage before waits for.",
    WEIGHT: "Gradient of the weights, which nobody waits for.",
    OPTIMIZER: "The stage's reduction and optimizer step.",
    SEND: "Transfer of an activation to the next stage; the last stage sends none.",
    RETURN: "Transfer of a gradient from the next stage back.",
    "activation": "MB that one micro-batch holds from F to I.",
    "for W": "MB that W needs of a micro-batch, from I to W.",
    "weights": "MB, kept throughout.",
    "optimizer state": "MB, kept throughout.",
    CAPACITY: "MB that one worker has.",
}


def table(document: JobDoc, *, memory: bool) -> dict[str, list[Any]]:
    """One row per stage; columns as in HELP. memory: also the columns of bytes, in MB."""
    back = document.backward_transfers or document.transfers
    made: dict[str, list[Any]] = {"stage": list(range(document.stages))}
    for column, name in TIMES.items():
        made[column] = [float(getattr(p, name)) for p in document.profiles]
    made[SEND] = [*map(float, document.transfers), None]
    made[RETURN] = [*map(float, back), None]
    if memory:
        for column, name in BYTES.items():
            made[column] = [getattr(p, name) / MEGA for p in document.profiles]
        made[CAPACITY] = [c / MEGA for c in _capacities(document)]
    return made


def edited(document: JobDoc, edits: Mapping[int, Mapping[str, Any]]) -> JobDoc:
    """`document` with cells changed: row -> column -> value. Raises InputError naming the cell."""
    profiles = [p.model_dump() for p in document.profiles]
    forward = list(document.transfers)
    backward = list(document.backward_transfers or document.transfers)
    capacity = list(_capacities(document))
    for stage, cells in edits.items():
        for column, value in cells.items():
            if value is None and column in (SEND, RETURN) and stage == document.stages - 1:
                continue
            number = _number(stage, column, value)
            if column in TIMES:
                profiles[stage][TIMES[column]] = number
            elif column in BYTES:
                profiles[stage][BYTES[column]] = round(number * MEGA)
            elif column == CAPACITY:
                capacity[stage] = round(number * MEGA)
            elif stage < document.stages - 1:
                (forward if column == SEND else backward)[stage] = number
            elif number:
                raise InputError(f"stage {stage}, {column}", value, "nothing: the last stage has no next one")
    changes = {
        "profiles": tuple(StageDoc(**p) for p in profiles),
        "transfers": tuple(forward),
        "backward_transfers": () if backward == forward else tuple(backward),
        "capacity_bytes": tuple(capacity) if any(capacity) else (),
    }
    return document.model_copy(update=changes)


def _capacities(document: JobDoc) -> tuple[int, ...]:
    known = document.capacity_bytes
    return (known,) * document.stages if isinstance(known, int) else known or (0,) * document.stages


def _number(stage: int, column: str, value: Any) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not 0 <= value <= 1e9:
        raise InputError(f"stage {stage}, {column}", value, "a number from 0 to 1e9")
    return float(value)
