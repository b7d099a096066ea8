"""The profiles of a Planner question, and the words that links say them with."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openrecycle.app.plans.profiles import NAME, SavedProfile, of_layers, on_grid
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job, StageProfile, Worker
from openrecycle.planner.plans.plan import JobDoc, read_model

# Presets of stage times, in slots. uneven: as the planner's benchmark; ends: an embedding that hands no
# gradient on, and a head that takes longer than the layers do.
EVEN, UNEVEN, ENDS, OWN = "even", "uneven", "ends", "own"
PRESETS = (EVEN, UNEVEN, ENDS)
_SCALES = (0.9, 1.0, 1.1, 1.2)
_HEAD = 1.4
MAX_PROFILE = 1 << 20
# Before the name of one that people keep, and between it and the digest of what it was.
SAVED = "saved"
_SAVED = re.compile(rf"{SAVED}:({NAME.strip('^$')})(?:@([0-9a-f]+))?")

Keeper = Callable[[str], SavedProfile]


@dataclass(frozen=True)
class NamedProfile:
    """A link's word for a profile, as it is now. kept: what stands behind the name of one that people keep. note: a
    sentence where that is no longer what it was; "" where it is."""

    word: str
    kept: SavedProfile | None = None
    note: str = ""


def saved_word(kept: SavedProfile) -> str:
    return f"{SAVED}:{kept.name}@{kept.digest}"


def saved_name(word: str) -> str | None:
    """The name in the word of a profile that people keep; None for any other word."""
    found = _SAVED.fullmatch(word)
    return found.group(1) if found else None


def follow(word: str, keeper: Keeper, before: Callable[[], str] | None) -> NamedProfile:
    """Looks a name up. before: makes the user's own profile of what they had under that word, if they have it still:
    they keep it when the name stands for something else by now. A link alone gets what the name stands for.

    Raises ConsoleError when the database can't be asked.
    """
    found = _SAVED.fullmatch(word)
    if found is None:
        return NamedProfile(word)
    name, digest = found.groups()
    try:
        kept = keeper(name)
    except ConsoleError as error:
        if error.status != 404:
            raise
        kept = None
    if kept is not None and digest in (kept.digest, None):
        return NamedProfile(saved_word(kept), kept)
    what = "was deleted" if kept is None else f"was saved anew by {kept.saved_by}"
    if before is not None:
        with suppress(PlannerError):  # it made no job of that grid: there is nothing to go on with
            note = f"The profile {name} {what} meanwhile. What you had of it is shown on as your own."
            return NamedProfile(before(), None, note)
    if kept is None:
        return NamedProfile(word)
    return NamedProfile(
        saved_word(kept), kept, f"The profile {name} {what} since this link was made. It is shown as it is now."
    )


def own_profile(document: JobDoc) -> str:
    """The stages' times and bytes of a job as one word of a URL; a preset's name where they are that."""
    if not document.speeds and not document.layers:
        job = on_grid(document, 1, 1).job()
        whole = not any(p.reductions for p in document.profiles)
        for name in PRESETS:
            if whole and job == Job(1, job.stages, 1, profiles=preset(name, job.stages)):
                return name
    one = document.model_copy(update={"pipelines": 1, "micro_batches": 1})
    if one.layers:  # what follows from them is left out
        one = one.model_copy(update={"profiles": (), "transfers": (), "backward_transfers": ()})
    text = one.model_dump_json(exclude_defaults=True)
    return f"{OWN}:" + base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def read_profile(text: str) -> JobDoc:
    """A profile out of a URL, as a document of one pipeline and one micro-batch. Raises InputError."""
    wrong = InputError("profile", text[:40], "a preset, a shipped profile's name, or one from a link of this page")
    head, _, word = text.partition(":")
    if head != OWN:
        raise wrong
    try:
        unpacked = zlib.decompressobj().decompress(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)), MAX_PROFILE)
        return read_model(JobDoc, unpacked)
    except (binascii.Error, zlib.error, ValueError):
        raise wrong from None


def preset(name: str, stages: int) -> tuple[StageProfile, ...]:
    if name == EVEN:
        return (StageProfile(),) * stages
    if name == UNEVEN:
        scales = [_SCALES[s % len(_SCALES)] for s in range(stages)]
        return tuple(StageProfile(x, x, x) for x in scales)
    first, last = StageProfile(1.0, 0.0, 2.0), StageProfile(_HEAD, _HEAD, _HEAD)
    return ((first,) + (StageProfile(),) * (stages - 2) + (last,))[:stages]


def resized(document: JobDoc, stages: int) -> JobDoc:
    """Without its last stages, or with the last one and its boundary repeated; layers are cut anew."""
    if document.layers:
        return of_layers(document, stages)

    def fit(values: tuple[Any, ...], length: int, fill: Any) -> tuple[Any, ...]:
        return (*values, *(values[-1:] or (fill,)) * length)[:length]

    changes: dict[str, Any] = {
        "stages": stages,
        "profiles": fit(document.profiles, stages, None),
        "transfers": fit(document.transfers, stages - 1, 0),
    }
    if document.backward_transfers:
        changes["backward_transfers"] = fit(document.backward_transfers, stages - 1, 0)
    if isinstance(document.capacity_bytes, tuple) and document.capacity_bytes:
        changes["capacity_bytes"] = fit(document.capacity_bytes, stages, 0)
    if document.speeds:
        changes["speeds"] = {w: x for w, x in document.speeds.items() if Worker.parse(w).stage < stages}
    return document.model_copy(update=changes)
