"""A job's times and bytes, of its layers or, where it has none, its stages, as a table that people edit, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.plans.plan import JobDoc, LayerDoc, StageDoc

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
    OPTIMIZER: "Its reduction and optimizer step.",
    SEND: "Transfer of an activation to the next stage, if the stage ends here; the last one sends none.",
    RETURN: "Transfer of a gradient from the next stage back, if the stage ends here.",
    "activation": "MB that one micro-batch holds from F to I.",
    "for W": "MB that W needs of a micro-batch, from I to W.",
    "weights": "MB, kept throughout.",
    "optimizer state": "MB, kept throughout.",
    CAPACITY: "MB that one worker has.",
}


def table(document: JobDoc, *, memory: bool) -> dict[str, list[Any]]:
    """One row per layer, or per stage; columns as in HELP. memory: also those of bytes, in MB, and of a worker's
    memory, which is known by stage."""
    rows: Sequence[StageDoc] = document.layers or document.profiles
    made: dict[str, list[Any]] = {row_name(document): list(range(len(rows)))}
    for column, name in TIMES.items():
        made[column] = [float(getattr(p, name)) for p in rows]
    sent, back = _transfers(document)
    made[SEND] = [*map(float, sent), None]
    made[RETURN] = [*map(float, back), None]
    if memory:
        for column, name in BYTES.items():
            made[column] = [getattr(p, name) / MEGA for p in rows]
    if memory and not document.layers:
        made[CAPACITY] = [c / MEGA for c in _capacities(document)]
    return made


def row_name(document: JobDoc) -> str:
    return "layer" if document.layers else "stage"


def _transfers(document: JobDoc) -> tuple[list[float], list[float]]:
    """Behind each row but the last: forward, backward."""
    if not document.layers:
        return list(document.transfers), list(document.backward_transfers or document.transfers)
    sent = [layer.transfer for layer in document.layers[:-1]]
    back = [layer.backward_transfer for layer in document.layers[:-1]]
    return sent, [s if b is None else b for s, b in zip(sent, back, strict=True)]


def edited(document: JobDoc, edits: Mapping[int, Mapping[str, Any]]) -> JobDoc:
    """`document` with cells changed: row -> column -> value. Raises InputError naming the cell."""
    rows: Sequence[StageDoc] = document.layers or document.profiles
    profiles = [p.model_dump() for p in rows]
    forward, backward = _transfers(document)
    capacity, what = list(_capacities(document)), row_name(document)
    for stage, cells in edits.items():
        for column, value in cells.items():
            if value is None and column in (SEND, RETURN) and stage == len(rows) - 1:
                continue
            number = _number(f"{what} {stage}", column, value)
            if column in TIMES:
                profiles[stage][TIMES[column]] = number
            elif column in BYTES:
                profiles[stage][BYTES[column]] = round(number * MEGA)
            elif column == CAPACITY:
                capacity[stage] = round(number * MEGA)
            elif stage < len(rows) - 1:
                (forward if column == SEND else backward)[stage] = number
            elif number:
                raise InputError(f"{what} {stage}, {column}", value, f"nothing: the last {what} has no next one")
    if document.layers:
        for layer, sent, back in zip(profiles, forward, backward, strict=False):
            layer |= {"transfer": sent, "backward_transfer": None if back == sent else back}
        derived = {"profiles": (), "transfers": (), "backward_transfers": ()}
        return document.model_copy(update=derived | {"layers": tuple(LayerDoc(**layer) for layer in profiles)})
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


def _number(row: str, column: str, value: Any) -> float:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not 0 <= value <= 1e9:
        raise InputError(f"{row}, {column}", value, "a number from 0 to 1e9")
    return float(value)
