"""Profiles: the named ones, which are shipped with the planner or saved by people (`NamedProfiles`); a profile as a
table that pages show and edit (`table`, `edited`); and the profile that a running job measures (`measured_profile`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from openrecycle.agent.messages.protocol import OpKind
from openrecycle.app.runtime.errors import ConsoleError, invalid, named, storing
from openrecycle.db import plan_rows as rows
from openrecycle.db.session import Database
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import MAX_DECIMALS, SECONDS, Job, StageProfile
from openrecycle.planner.plans.plan import JobDoc, LayerDoc, StageDoc, first_problem, job_doc, read_model
from openrecycle.planner.profiles import Profile, job_on, load_profile, shape_name, shipped

# The pattern of a profile's name, which may be part of an address.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}$"
# The longest document: a profile of 4,096 stages has some 600 kB.
MAX_DOCUMENT = 1 << 20
MOST = 1_000


class ProfileInfo(BaseModel):
    """source: `shipped` ones come with the planner and never change. kind: `measured` by the agent's profiler, or a
    `job` document. stages: that it is good for; null: any number up to `layers`, those of the model. saved_by,
    created_at, updated_at: who has saved it last, and POSIX seconds; "" and null of one that is shipped."""

    name: str
    source: Literal["shipped", "saved"]
    kind: Literal["measured", "job"]
    about: str
    stages: int | None
    layers: int | None
    time_unit: str
    saved_by: str = ""
    created_at: float | None = None
    updated_at: float | None = None


@dataclass(frozen=True)
class SavedProfile:
    """A saved profile. saved_by: who saved it last. digest: of the document, by which a link tells whether it has
    changed."""

    name: str
    document: Profile | JobDoc
    saved_by: str = ""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.document.model_dump_json().encode()).hexdigest()[:12]

    @property
    def stages(self) -> int | None:
        """The number of stages that it is for; None: any number into which its layers can be cut."""
        return _summary(self.document)["stages"]  # type: ignore[no-any-return]


class NamedProfiles:
    """The shipped and the saved profiles. One per console (`console.plans.profiles`). Thread-safe. Its methods raise
    ConsoleError."""

    def __init__(self, database: Database) -> None:
        self._rows = rows.Profiles(database)

    def list(self) -> list[ProfileInfo]:
        """Returns all profiles, sorted by name."""
        with storing():
            saved = [ProfileInfo(source="saved", **row) for row in self._rows.all()]
        return sorted([*map(_shipped_line, shipped()), *saved], key=lambda line: line.name)

    def get(self, name: str, field: str = "profile") -> tuple[ProfileInfo, Profile | JobDoc]:
        """Returns a shipped or saved profile. field: in which a request names it. Raises ConsoleError (404)."""
        if (known := shape_name(name)) in shipped():
            return _shipped_line(known), _shipped_document(known)
        with storing():
            found = self._rows.get(name)
        if found is None:
            raise unknown_profile(name, field)
        return ProfileInfo(source="saved", **found[0]), _read(found[1])

    def kept(self, name: str) -> SavedProfile:
        """Returns a saved profile. Raises ConsoleError (404)."""
        line, document = self.get(name)
        return SavedProfile(name, document, line.saved_by)

    def put(self, name: str, document: Profile | JobDoc, actor: str) -> bool:
        """Saves a profile, and replaces the one that had the name; returns whether it is new.

        Raises ConsoleError: 409 for the name of a shipped profile, 422 for a document that makes no job.
        """
        text, by = self._checked(name, document), named(actor)
        with storing():
            return self._rows.put(name, text, _summary(document), by)

    def put_over(self, name: str, document: Profile | JobDoc, actor: str, *, updated_at: float | None) -> None:
        """Saves a profile only if the name is as the user saw it: the profile under it was saved at `updated_at`, or
        the name was free (None).

        Raises ConsoleError as `put` does, and 409 if that has changed.
        """
        text, by = self._checked(name, document), named(actor)
        with storing():
            if self._rows.put_over(name, text, _summary(document), by, updated_at=updated_at):
                return
            now = self._rows.get(name)
        if now is None:
            raise ConsoleError(
                409, "gone", f"{name!r} was deleted meanwhile; save it again to keep this one", field="name"
            )
        raise ConsoleError(409, "taken", f"{name!r} is taken: {now[0]['saved_by']} has saved one", field="name")

    def _checked(self, name: str, document: Profile | JobDoc) -> str:
        """Checks name and document; returns the document's text."""
        if not re.fullmatch(NAME, name):
            expected = "1 to 80 letters, digits, _ . + or -, a letter or digit first"
            raise ConsoleError(422, "invalid", f"got {name[:100]!r}, expected {expected}", field="name")
        if name in shipped():
            raise ConsoleError(409, "shipped", f"{name!r} comes with the planner; choose another name", field="profile")
        try:
            job_on(document)
        except PlannerError as error:
            raise invalid(error) from None
        text = document.model_dump_json()
        if len(text) > MAX_DOCUMENT:
            said = f"got a document of {len(text):,} bytes, expected at most {MAX_DOCUMENT:,}"
            raise ConsoleError(422, "invalid", said, field="profile")
        with storing():
            known = [row["name"] for row in self._rows.all()]
        if name not in known and len(known) >= MOST:
            raise ConsoleError(
                409, "too_many", f"{MOST:,} are kept already; delete one that is of no use", field="profile"
            )
        return text

    def delete(self, name: str) -> None:
        """Deletes a saved profile; jobs and plans that were made with it stay as they are. Raises ConsoleError (404,
        409)."""
        if name in shipped():
            raise ConsoleError(409, "shipped", f"{name!r} comes with the planner, and stays", field="profile")
        with storing():
            gone = self._rows.delete(name)
        if not gone:
            raise unknown_profile(name)

    def job(
        self, name: str, pipelines: int | None = None, stages: int | None = None, micro_batches: int | None = None
    ) -> Job:
        """Makes the job of a profile on a grid; sizes that are None are the profile's.

        Raises ConsoleError: 404, and 422 if the profile has no such job.
        """
        document = self.get(name, "profile_name")[1]
        try:
            return job_on(document, pipelines, stages, micro_batches)
        except PlannerError as error:
            wrong = invalid(error)
            raise ConsoleError(422, "invalid", f"{wrong.said}, for profile {name!r}", field=wrong.field) from None


def unknown_profile(name: str, field: str = "profile") -> ConsoleError:
    said = f"got {name!r}, expected the name of one; GET .../profiles"
    return ConsoleError(404, "unknown_profile", said, field=field)


def _read(text: str) -> Profile | JobDoc:
    """Parses a document that `put` has stored."""
    try:
        if text.startswith('{"profile_version"'):
            return read_model(Profile, text)
        return read_model(JobDoc, text)
    except ValidationError as error:
        raise ConsoleError(422, "invalid", f"the stored profile can't be read: {first_problem(error)}") from None


def _summary(document: Profile | JobDoc) -> dict[str, Any]:
    if isinstance(document, Profile):
        layered = document.cut != "stages"
        return {
            "kind": "measured",
            "about": document.about or document.model,
            "stages": None if layered else len(document.parts),
            "layers": document.layers or len(document.parts) if layered else None,
            "time_unit": "ms",
        }
    about = f"job of {document.pipelines} x {document.stages} x {document.micro_batches}"
    layers = len(document.layers) or None
    stages = None if layers else document.stages
    return {"kind": "job", "about": about, "stages": stages, "layers": layers, "time_unit": document.time_unit}


@cache
def _shipped_document(name: str) -> Profile:
    return load_profile(name)


@cache
def _shipped_line(name: str) -> ProfileInfo:
    return ProfileInfo(name=name, source="shipped", **_summary(_shipped_document(name)))


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
    """Returns a job's profile as a table with one row per layer, or per stage, and columns as in HELP. memory: adds
    columns of bytes, in MB, and for stages the capacity of a worker."""
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
    """Returns the transfer times forward and backward after each row but the last."""
    if not document.layers:
        return list(document.transfers), list(document.backward_transfers or document.transfers)
    sent = [layer.transfer for layer in document.layers[:-1]]
    back = [layer.backward_transfer for layer in document.layers[:-1]]
    return sent, [s if b is None else b for s, b in zip(sent, back, strict=True)]


def edited(document: JobDoc, edits: Mapping[int, Mapping[str, Any]]) -> JobDoc:
    """Returns `document` with cells changed. edits: row -> column -> value. Raises InputError that names the cell."""
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


OpTimesOf = Callable[[str], Mapping[OpKind, float]]
KINDS: tuple[OpKind, ...] = ("F", "I", "W", "B")
OPS = ("forward", "input_backward", "weight_backward")


def measured_profile(nominal: Job, op_times: OpTimesOf) -> JobDoc | None:
    """Returns the job as it is planned, with measured times of F, I and W in ms: the medians of each stage's workers.
    op_times: returns a worker's milliseconds by op kind.

    If workers run B as a whole, it is split as in the job's own profile. Bytes, transfers and the step are those of the
    profile: the reported time of a step includes its wait for others, and so does not measure it. If the profile's unit
    is no time, transfers and steps are 0. Returns None if a stage has not reported its ops yet, or they make no job.
    """
    made = _by_layer(nominal, op_times) if nominal.layers else _by_stage(nominal, op_times)
    if made is None:
        return None
    try:
        job = made.job()
    except PlannerError:
        return None
    return job_doc(job) if job.layers else made


def _milliseconds(unit: str) -> Callable[[float], float]:
    """Returns a function that converts a planned time to ms."""
    scale = 1000 * SECONDS.get(unit, 0.0)
    return lambda time: round(scale * time, MAX_DECIMALS)


def _by_stage(nominal: Job, op_times: OpTimesOf) -> JobDoc | None:
    planned = job_doc(nominal)
    ms = _milliseconds(planned.time_unit)
    stages = []
    for stage, profile in enumerate(planned.profiles):
        took = _medians(nominal, op_times, stage)
        backward = _backward(took, profile)
        if "F" not in took or backward is None:
            return None
        changes = {
            "forward": took["F"],
            "input_backward": backward[0],
            "weight_backward": backward[1],
            "optimizer": ms(profile.optimizer),
            "reductions": tuple(map(ms, profile.reductions)),
        }
        stages.append(profile.model_copy(update=changes))
    changed = {
        "profiles": tuple(stages),
        "time_unit": "ms",
        "transfers": tuple(map(ms, planned.transfers)),
        "backward_transfers": tuple(map(ms, planned.backward_transfers)),
        "speeds": {},
    }
    return planned.model_copy(update=changed)


def _by_layer(nominal: Job, op_times: OpTimesOf) -> JobDoc | None:
    """Divides a stage's measured times among its layers in proportion to the planned ones, or evenly if those are
    zero."""
    planned = job_doc(nominal)
    ms = _milliseconds(planned.time_unit)
    layers, at = list[LayerDoc](), 0
    for stage, count in enumerate(nominal.partition):
        whole, members = nominal.profiles[stage], planned.layers[at : at + count]
        at += count
        took = _medians(nominal, op_times, stage)
        backward = _backward(took, whole)
        if "F" not in took or backward is None:
            return None
        for layer in members:
            shares = {
                name: _share(time, getattr(layer, name) / of if (of := getattr(whole, name)) else 1 / count)
                for name, time in zip(OPS, (took["F"], *backward), strict=True)
            }
            back = layer.backward_transfer
            rest = {
                "optimizer": ms(layer.optimizer),
                "reductions": tuple(map(ms, layer.reductions)),
                "transfer": ms(layer.transfer),
                "backward_transfer": None if back is None else ms(back),
            }
            layers.append(layer.model_copy(update=shares | rest))
    derived = {"profiles": (), "transfers": (), "backward_transfers": ()}
    return planned.model_copy(update=derived | {"layers": tuple(layers), "time_unit": "ms", "speeds": {}})


def _share(time: float, part: float) -> float:
    """Returns time * part, rounded to microseconds, but at least one unless it is 0: a forward of length 0 is
    invalid."""
    return max(round(time * part, 3), 0.001) if time * part else 0.0


def _medians(nominal: Job, op_times: OpTimesOf, stage: int) -> dict[OpKind, float]:
    """Returns the median milliseconds by kind over a stage's workers, rounded to microseconds."""
    reports = [op_times(f"W{p}_{stage}") for p in range(nominal.pipelines)]
    known = {kind: [report[kind] for report in reports if kind in report] for kind in KINDS}
    return {kind: round(median(values), 3) for kind, values in known.items() if values}


def _backward(took: Mapping[OpKind, float], planned: StageDoc | StageProfile) -> tuple[float, float] | None:
    """Returns the times of I and W; None: not known."""
    if "I" in took or "W" in took:
        return took.get("I", 0.0), took.get("W", 0.0)
    if "B" not in took:
        return None
    whole = planned.input_backward + planned.weight_backward
    share = planned.input_backward / whole if whole else 0.5
    return round(share * took["B"], 3), round((1 - share) * took["B"], 3)
