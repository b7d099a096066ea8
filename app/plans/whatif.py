"""The Planner page's question: a grid, who is dead, what may be used. It is what a link to the page says.

`WhatIf.params` and `parse` go from and to the words of a URL; `asked` makes the planner's request of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import ValidationError

from app.plans.profiles import on_grid
from app.plans.solving_child import MAX_SECONDS, MAX_SOLVED_OPS, MigrationsAsked, PlanAsked
from planner.errors import InputError
from planner.job import Job, MemoryLimit, StageProfile, Technique, Worker
from planner.plan import JobDoc, Plan, PlanError, first_problem, job_doc
from planner.profiles import Profile, load_profile, shipped
from planner.solvers.portfolio import SOLVERS

# Presets of stage times, in slots. uneven: as the planner's benchmark; ends: an embedding that hands no
# gradient on, and a head that takes longer than the layers do.
EVEN, UNEVEN, ENDS, OWN = "even", "uneven", "ends", "own"
PRESETS = (EVEN, UNEVEN, ENDS)
_SCALES = (0.9, 1.0, 1.1, 1.2)
_HEAD = 1.4
MAX_PROFILE = 1 << 20
MAX_SIZE = 100_000


@dataclass(frozen=True)
class WhatIf:
    """failed: sorted. profile: a preset, a shipped profile's name, or one of the user's own (`own_profile`).

    seconds: of the solver. state_gb: weights and optimizer of a stage in 10^9 bytes (0: as the profile
    says); copy_gbs: 10^9 bytes per second of a copy; heals_in: seconds until the failed are back (0: never).
    """

    pipelines: int = 3
    stages: int = 4
    micro_batches: int = 6
    failed: tuple[str, ...] = ()
    profile: str = EVEN
    technique: Technique = Technique.STAGGERED
    memory: str = "uniform"
    solver: str = "auto"
    seconds: float = 20.0
    state_gb: float = 0.0
    copy_gbs: float = 10.0
    heals_in: float = 0.0

    # -- for the planner --------------------------------------------------------------------

    def job(self) -> Job:
        """Raises InputError, before memory is taken for an absurd size, and PlanError."""
        ops = 3 * self.pipelines * self.stages * self.micro_batches
        if min(self.pipelines, self.stages, self.micro_batches) > 0 and ops > MAX_SOLVED_OPS:
            raise InputError(
                "grid",
                f"{self.pipelines} x {self.stages} x {self.micro_batches}",
                f"at most {MAX_SOLVED_OPS:,} ops here, and this is {ops:,}; `python -m planner plan` takes more",
            )
        grid = (self.pipelines, self.stages, self.micro_batches)
        if self.profile in PRESETS:
            return Job(*grid, profiles=_preset(self.profile, self.stages))
        if self.profile in shipped():
            return load_profile(self.profile).job_for(*grid)
        document = read_profile(self.profile)
        if len(document.profiles) != self.stages:
            raise InputError("profile", f"{len(document.profiles)} stages", f"one row for each of the {self.stages}")
        return on_grid(document, self.pipelines, self.micro_batches).job()

    def asked(self) -> PlanAsked:
        """Raises PlannerError for a job that is none."""
        return PlanAsked(
            job=job_doc(self.job()),
            failed=self.failed,
            technique=self.technique,
            memory=self.memory,
            solver=self.solver,
            time_limit=self.seconds,
        )

    def migrations_asked(self) -> MigrationsAsked:
        """Raises PlannerError for a job that is none."""
        return MigrationsAsked(
            job=job_doc(self.job()),
            failed=self.failed,
            technique=self.technique,
            memory=self.memory,
            state_bytes=round(self.state_gb * 1e9),
            bandwidth=self.copy_gbs * 1e9,
            heals_in=self.heals_in or None,
        )

    # -- changes ----------------------------------------------------------------------------

    def toggled(self, worker: str) -> WhatIf:
        """With a living worker dead, or a dead one living."""
        return self.with_failed(set(self.failed) ^ {worker})

    def with_failed(self, names: set[str]) -> WhatIf:
        """Those of `names` that the grid has."""
        inside = [w for w in map(Worker.parse, names) if w.pipeline < self.pipelines and w.stage < self.stages]
        return replace(self, failed=tuple(map(str, sorted(inside))))

    def with_grid(self, pipelines: int, stages: int, micro_batches: int) -> WhatIf:
        """Failed workers outside the grid are let go; a profile of the user's own gets or loses last stages."""
        changed = replace(self, pipelines=pipelines, stages=stages, micro_batches=micro_batches)
        if stages != self.stages and self.profile not in (*PRESETS, *shipped()):
            changed = replace(changed, profile=own_profile(_resized(read_profile(self.profile), stages)))
        return changed.with_failed(set(self.failed))

    @classmethod
    def of(cls, job: Job, failed: tuple[str, ...], technique: Technique, memory: str) -> WhatIf:
        """The question that a job and its present failures ask."""
        made = cls(job.pipelines, job.stages, job.micro_batches, technique=technique, memory=memory)
        return replace(made, profile=own_profile(job_doc(job))).with_failed(set(failed))

    @classmethod
    def of_plan(cls, plan: Plan) -> WhatIf:
        """The question that a plan answers."""
        return cls.of(plan.job.job(), plan.failed, plan.technique, plan.memory)

    # -- for links --------------------------------------------------------------------------

    def params(self) -> dict[str, str]:
        """The words of a URL; what is as usual is left out."""
        usual = WhatIf().words()
        return {name: word for name, word in self.words().items() if word != usual[name]}

    def words(self) -> dict[str, str]:
        """Every word that a URL may have."""
        return {
            "grid": f"{self.pipelines}x{self.stages}x{self.micro_batches}",
            "fail": ".".join(self.failed),
            "profile": self.profile,
            "technique": self.technique.value,
            "memory": self.memory,
            "solver": self.solver,
            "time": f"{self.seconds:g}",
            "state": f"{self.state_gb:g}",
            "copy": f"{self.copy_gbs:g}",
            "heals": f"{self.heals_in:g}",
        }


def at_random(question: WhatIf, count: int, noise: random.Random) -> WhatIf:
    """`question` with so many workers dead, those that are and others, each stage keeping a living one."""
    dead = set(question.failed)
    left = [question.pipelines] * question.stages
    for name in dead:
        left[Worker.parse(name).stage] -= 1
    workers = [Worker(p, s) for p in range(question.pipelines) for s in range(question.stages)]
    noise.shuffle(workers)
    for worker in workers:
        if count and str(worker) not in dead and left[worker.stage] > 1:
            dead.add(str(worker))
            left[worker.stage] -= 1
            count -= 1
    return question.with_failed(dead)


PARAMS = tuple(WhatIf().words())


def parse(params: Mapping[str, str]) -> tuple[WhatIf, list[InputError]]:
    """The question of a URL, and what in it can't be understood, for which the usual stands."""
    made, wrong = WhatIf(), list[InputError]()
    readers: dict[str, Callable[[str], dict[str, Any]]] = {
        "grid": _grid,
        "profile": lambda t: {"profile": _known_profile(t)},
        "technique": lambda t: {"technique": Technique.of(t, field="technique")},
        "memory": lambda t: {"memory": MemoryLimit.parse(t, field="memory").text},
        "solver": lambda t: {"solver": _one_of("solver", t, SOLVERS)},
        "time": lambda t: {"seconds": _number("time", t, 0.1, MAX_SECONDS)},
        "state": lambda t: {"state_gb": _number("state", t, 0, 1e6)},
        "copy": lambda t: {"copy_gbs": _number("copy", t, 1e-6, 1e6)},
        "heals": lambda t: {"heals_in": _number("heals", t, 0, 1e9)},
    }
    for name, read in readers.items():
        if name in params:
            try:
                made = replace(made, **read(params[name]))
            except InputError as error:
                wrong.append(error)
    try:
        made = replace(made, failed=_failed(params.get("fail", ""), made))
    except InputError as error:
        wrong.append(error)
    return made, wrong


def _grid(text: str) -> dict[str, Any]:
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,6})", text)
    if not found or not all(1 <= int(n) <= MAX_SIZE for n in found.groups()):
        raise InputError("grid", text, "pipelines x stages x micro-batches, such as 3x4x6")
    return dict(zip(("pipelines", "stages", "micro_batches"), map(int, found.groups()), strict=True))


def _failed(text: str, made: WhatIf) -> tuple[str, ...]:
    workers = {Worker.parse(name, field="fail") for name in re.split(r"[.,+\s]+", text) if name}
    for worker in workers:
        if worker.pipeline >= made.pipelines or worker.stage >= made.stages:
            last = Worker(made.pipelines - 1, made.stages - 1)
            raise InputError("fail", str(worker), f"a worker of the grid, W0_0 to {last}")
    return tuple(map(str, sorted(workers)))


def _known_profile(text: str) -> str:
    if text in PRESETS or text in shipped():
        return text
    read_profile(text)
    return text


def _one_of(field: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise InputError(field, text, "one of " + ", ".join(known))
    return text


def _number(field: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise InputError(field, text, f"a number from {low:g} to {high:g}")
    return value


# -- profiles -----------------------------------------------------------------------------------


def own_profile(document: JobDoc) -> str:
    """The stages' times and bytes of a job as one word of a URL; a preset's name where they are that."""
    if not document.speeds:
        job = on_grid(document, 1, 1).job()
        whole = not any(p.reductions for p in document.profiles)
        for name in PRESETS:
            if whole and job == Job(1, job.stages, 1, profiles=_preset(name, job.stages)):
                return name
    text = document.model_copy(update={"pipelines": 1, "micro_batches": 1}).model_dump_json(exclude_defaults=True)
    return f"{OWN}:" + base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def read_profile(text: str) -> JobDoc:
    """A profile out of a URL, as a document of one pipeline and one micro-batch. Raises InputError."""
    wrong = InputError("profile", text[:40], "a preset, a shipped profile's name, or one from a link of this page")
    head, _, word = text.partition(":")
    if head != OWN:
        raise wrong
    try:
        unpacked = zlib.decompressobj().decompress(base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)), MAX_PROFILE)
        return JobDoc.model_validate_json(unpacked)
    except (binascii.Error, zlib.error, ValueError):
        raise wrong from None


def uploaded(data: bytes, asked: WhatIf) -> WhatIf:
    """`asked` with the profile of a file: a measured profile, a job document, or a plan. The file's own grid
    is taken over, and nobody is dead. Raises InputError and PlanError naming what is wrong with it."""
    try:
        document = json.loads(data)
    except ValueError as error:
        raise PlanError(f"the file is not JSON: {error}") from None
    try:
        if isinstance(document, dict) and "profile_version" in document:
            job = Profile.model_validate(document).job
        elif isinstance(document, dict) and "job" in document:
            job = JobDoc.model_validate(document["job"])
        else:
            job = JobDoc.model_validate(document)
    except ValidationError as error:
        raise PlanError(f"the file is neither a profile, nor a job, nor a plan: {first_problem(error)}") from None
    made = WhatIf.of(job.job(), (), asked.technique, asked.memory)
    kept = {f.name: getattr(asked, f.name) for f in fields(WhatIf) if f.name in ("solver", "seconds", "copy_gbs")}
    return replace(made, **kept)


def _preset(name: str, stages: int) -> tuple[StageProfile, ...]:
    if name == EVEN:
        return (StageProfile(),) * stages
    if name == UNEVEN:
        scales = [_SCALES[s % len(_SCALES)] for s in range(stages)]
        return tuple(StageProfile(x, x, x) for x in scales)
    first, last = StageProfile(1.0, 0.0, 2.0), StageProfile(_HEAD, _HEAD, _HEAD)
    return ((first,) + (StageProfile(),) * (stages - 2) + (last,))[:stages]


def _resized(document: JobDoc, stages: int) -> JobDoc:
    """Without its last stages, or with the last one and its boundary repeated."""

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
