"""The question of the Planner page, as data (`WhatIf`): a grid, its profile, the failed workers, technique and memory.
The page's controls are in `app.ui.planner_controls`.

`WhatIf.params` and `parse` convert a question to and from the parameters of a link; `WhatIf.asked` makes the request to
the planner.

The idea in five pictures (`pictures`) also consists of such questions: the paper's worked example, planned when it is
first asked for. It has 3 pipelines x 4 stages x 6 micro-batches, one slot for each of F, I and W, no transfers, and no
step. The list scheduler solves each of them in milliseconds, and proves the results optimal.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode

from pydantic import ValidationError

from openrecycle.app.plans.profiles import NAME, SavedProfile
from openrecycle.app.plans.solving import MAX_SECONDS, MAX_SOLVED_OPS, MigrationsAsked, PlanAsked
from openrecycle.app.runtime.errors import BODY, ConsoleError, bounded
from openrecycle.planner.jobs.errors import InfeasibleError, InputError, PlannerError, in_words
from openrecycle.planner.jobs.job import (
    AUTO,
    UNEVEN_SCALES,
    Job,
    MemoryLimit,
    Problem,
    StageProfile,
    Technique,
    Worker,
    count_ops,
    parse_partition,
)
from openrecycle.planner.jobs.words import percent
from openrecycle.planner.layers.migration import COPY_BANDWIDTH, best_migrations
from openrecycle.planner.plans import drawing as model
from openrecycle.planner.plans.bounds import Bound, best_bound
from openrecycle.planner.plans.plan import JobDoc, Plan, PlanError, first_problem, job_doc, read_model
from openrecycle.planner.profiles import Profile, job_on, load_profile, of_layers, on_grid, shape_name, shipped
from openrecycle.planner.solvers.portfolio import SOLVERS, make_plan

# Presets of stage times, in slots. uneven: as in the planner's benchmark; ends: an embedding that passes no gradient
# on, and a head that takes longer than the layers.
EVEN, UNEVEN, ENDS, OWN = "even", "uneven", "ends", "own"

# -- the Planner page's question ----------------------------------------------------------------

PRESETS = (EVEN, UNEVEN, ENDS)
_HEAD = 1.4
MAX_PROFILE = 1 << 20
# A saved profile is `saved:NAME@DIGEST` in a link; the digest tells whether it has changed since.
SAVED = "saved"
_SAVED = re.compile(rf"{SAVED}:({NAME.strip('^$')})(?:@([0-9a-f]+))?")

Keeper = Callable[[str], SavedProfile]


@dataclass(frozen=True)
class NamedProfile:
    """A link's word for a profile, brought up to date. kept: the profile that people keep under that name, if it is
    one. note: a sentence if that profile has changed since the link was made; "": it has not."""

    word: str
    kept: SavedProfile | None = None
    note: str = ""


def saved_word(kept: SavedProfile) -> str:
    return f"{SAVED}:{kept.name}@{kept.digest}"


def saved_name(word: str) -> str | None:
    """Returns the name in a link's word for a saved profile; None for any other word."""
    found = _SAVED.fullmatch(word)
    return found.group(1) if found else None


def follow(word: str, keeper: Keeper, before: Callable[[], str] | None) -> NamedProfile:
    """Looks up the saved profile of a link's word.

    before: makes the user's own profile out of what they had under that word, if their page still has it. They keep
    that if the saved profile has changed. A link alone gets the profile as it is now.

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
        with suppress(PlannerError):  # the old profile made no job of that grid, so there is nothing to keep
            note = f"The profile {name} {what} meanwhile. The op times that you had stay here, as your own."
            return NamedProfile(before(), None, note)
    if kept is None:
        return NamedProfile(word)
    return NamedProfile(
        saved_word(kept), kept, f"The profile {name} {what} since this link was made. It is shown as it is now."
    )


def own_profile(document: JobDoc) -> str:
    """Encodes the stages' times and bytes of a job as one word of a URL; returns a preset's name if they equal it."""
    if not document.speeds and not document.layers:
        job = on_grid(document, 1, 1).job()
        whole = not any(p.reductions for p in document.profiles)
        for name in PRESETS:
            if whole and job == Job(1, job.stages, 1, profiles=preset(name, job.stages)):
                return name
    one = document.model_copy(update={"pipelines": 1, "micro_batches": 1})
    if one.layers:  # the stages' values follow from the layers, so they are left out
        one = one.model_copy(update={"profiles": (), "transfers": (), "backward_transfers": ()})
    text = one.model_dump_json(exclude_defaults=True)
    return f"{OWN}:" + base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


def read_profile(text: str) -> JobDoc:
    """Decodes a profile from a URL into a document of one pipeline and one micro-batch. Raises InputError."""
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
        scales = [UNEVEN_SCALES[s % len(UNEVEN_SCALES)] for s in range(stages)]
        return tuple(StageProfile(x, x, x) for x in scales)
    first, last = StageProfile(1.0, 0.0, 2.0), StageProfile(_HEAD, _HEAD, _HEAD)
    return ((first,) + (StageProfile(),) * (stages - 2) + (last,))[:stages]


def resized(document: JobDoc, stages: int) -> JobDoc:
    """Returns the document with this number of stages: last stages are dropped, or the last one and its transfer are
    repeated. Layers are cut anew."""
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


MAX_SIZE = 100_000


@dataclass(frozen=True)
class WhatIf:
    """A question of the Planner page. failed: sorted. profile: a preset, a shipped profile's name, a saved profile's
    word (`saved_word`), or the user's own (`own_profile`). kept: the saved profile, if it is one. partition: for a
    profile with layers, how many per stage, such as 11,14,7,12; AUTO: the best; "": as evenly as possible.

    seconds: the solver's limit. state_gb: weights and optimizer of a stage in 10^9 bytes (None: as the profile says);
    copy_gbs: 10^9 bytes per second of a copy; heals_in: seconds until the failed workers are back (0: never).
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
    state_gb: float | None = None
    copy_gbs: float = COPY_BANDWIDTH / 1e9
    heals_in: float = 0.0
    partition: str = ""
    kept: SavedProfile | None = field(default=None, compare=False)

    # -- for the planner --------------------------------------------------------------------

    def job(self) -> Job:
        """Makes the job. Raises PlanError, and InputError, for an absurd size before memory is taken."""
        ops = count_ops(self.pipelines, self.stages, self.micro_batches)
        if min(self.pipelines, self.stages, self.micro_batches) > 0 and ops > MAX_SOLVED_OPS:
            raise InputError(
                "grid",
                f"{self.pipelines} x {self.stages} x {self.micro_batches}",
                f"at most {MAX_SOLVED_OPS:,} ops here, and this is {ops:,}; `openrecycle plan` takes more",
            )
        grid = (self.pipelines, self.stages, self.micro_batches)
        if self.profile in PRESETS:
            return Job(*grid, profiles=preset(self.profile, self.stages))
        if self.profile in shipped():
            return load_profile(self.profile).job_for(*grid)
        if self.named is not None:
            return job_on(self.named.document, *grid)
        document = read_profile(self.profile)
        if document.stages != self.stages:
            raise InputError("profile", f"{document.stages} stages", f"one row for each of the {self.stages}")
        return on_grid(document, self.pipelines, self.micro_batches).job()

    def asked(self) -> PlanAsked:
        """Makes the request for a plan. Raises PlannerError for an invalid job."""
        return PlanAsked(
            job=job_doc(self.job()),
            failed=self.failed,
            technique=self.technique,
            memory=self.memory,
            solver=self.solver,
            time_limit=self.seconds,
            **self._layers(),
        )

    def migrations_asked(self) -> MigrationsAsked:
        """Makes the request for migrations. Raises PlannerError for an invalid job."""
        return MigrationsAsked(
            job=job_doc(self.job()),
            failed=self.failed,
            technique=self.technique,
            memory=self.memory,
            state_bytes=None if self.state_gb is None else round(self.state_gb * 1e9),
            bandwidth=self.copy_gbs * 1e9,
            heals_in=self.heals_in or None,
            **self._layers(),
        )

    def _layers(self) -> dict[str, Any]:
        """Returns what both requests say about the layers."""
        if self.partition == AUTO:
            return {"over": "partitions"}
        return {"partition": parse_partition(self.partition)}

    @property
    def named(self) -> SavedProfile | None:
        """The saved profile, if the question has one; else None."""
        return self.kept if self.kept is not None and self.profile == saved_word(self.kept) else None

    # -- changes ----------------------------------------------------------------------------

    def toggled(self, worker: str) -> WhatIf:
        """Returns the question with a worker's state switched between living and failed."""
        return self.with_failed(set(self.failed) ^ {worker})

    def with_failed(self, names: set[str]) -> WhatIf:
        """Returns the question with these workers failed, of which those outside the grid are dropped."""
        inside = [w for w in map(Worker.parse, names) if w.pipeline < self.pipelines and w.stage < self.stages]
        return replace(self, failed=tuple(map(str, sorted(inside))))

    def with_grid(self, pipelines: int, stages: int, micro_batches: int) -> WhatIf:
        """Returns the question for another grid. Failed workers outside the grid are dropped, and a profile that is not
        for this number of stages becomes the user's own, with stages added or dropped at the end."""
        changed = replace(self, pipelines=pipelines, stages=stages, micro_batches=micro_batches)
        if stages != self.stages and self.partition != AUTO:
            changed = replace(changed, partition="")
        if stages != self.stages and not self._good_for(stages):
            changed = replace(changed, profile=own_profile(resized(self._document(), stages)))
        return changed.with_failed(set(self.failed))

    def with_kept(self, kept: SavedProfile) -> WhatIf:
        """Returns the question with a saved profile, on as many stages as that has."""
        stages = kept.stages or self.stages
        made = replace(self, stages=stages, profile=saved_word(kept), kept=kept)
        return made.with_failed(set(self.failed))

    def as_own(self) -> str:
        """Returns the profile as the user's own, which stays if a saved one changes. Raises PlannerError."""
        return own_profile(self._document())

    def with_own(self) -> WhatIf:
        """Returns the question with its profile as the user's own. Raises PlannerError."""
        return replace(self, profile=self.as_own(), kept=None)

    def _good_for(self, stages: int) -> bool:
        if self.named is not None:
            return self.named.stages in (stages, None)
        return self.profile in (*PRESETS, *shipped())

    def _document(self) -> JobDoc:
        """Returns the document of the profile, which is a saved one or the user's own."""
        if self.named is None:
            return read_profile(self.profile)
        document = self.named.document
        if isinstance(document, JobDoc):
            return document
        return job_doc(self.job()) if self.named.stages is None else document.job

    @classmethod
    def of(cls, job: Job, failed: tuple[str, ...], technique: Technique, memory: str) -> WhatIf:
        """Makes the question for a job and its present failures."""
        made = cls(job.pipelines, job.stages, job.micro_batches, technique=technique, memory=memory)
        made = replace(made, partition=AUTO if job.layers else "")
        return replace(made, profile=own_profile(job_doc(job))).with_failed(set(failed))

    @classmethod
    def of_plan(cls, plan: Plan) -> WhatIf:
        """Makes the question that a plan answers."""
        made = cls.of(plan.job.job(), plan.failed, plan.technique, plan.memory)
        return replace(made, partition=",".join(map(str, plan.partition)))

    # -- for links --------------------------------------------------------------------------

    def params(self) -> dict[str, str]:
        """Returns the parameters of a URL, without those that have their default."""
        usual = WhatIf().words()
        return {name: word for name, word in self.words().items() if word != usual[name]}

    def in_a_word(self) -> str:
        """Returns the whole question as one word of a URL, with a saved profile written out. Raises PlannerError."""
        return urlencode((self.with_own() if self.named is not None else self).params())

    def words(self) -> dict[str, str]:
        """Returns all parameters that a URL may have."""
        return {
            "grid": f"{self.pipelines}x{self.stages}x{self.micro_batches}",
            "fail": ".".join(self.failed),
            "profile": self.profile,
            "technique": self.technique.value,
            "memory": self.memory,
            "solver": self.solver,
            "time": f"{self.seconds:g}",
            "state": "" if self.state_gb is None else f"{self.state_gb:g}",
            "copy": f"{self.copy_gbs:g}",
            "heals": f"{self.heals_in:g}",
            "partition": self.partition,
        }


def at_random(question: WhatIf, count: int, noise: random.Random) -> WhatIf:
    """Returns `question` with `count` more workers failed at random; each stage keeps a living one."""
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
# The smallest and the largest values for what migrations cost.
LIMITS = {"state_gb": (0.0, 1e6), "copy_gbs": (1e-6, 1e6), "heals_in": (0.0, 1e9)}


def parse(params: Mapping[str, str], kept: SavedProfile | None = None) -> tuple[WhatIf, list[InputError]]:
    """Returns the question of a URL, and errors for parameters that can't be understood, which get their default.

    kept: the saved profile that the URL names, if it does (see `follow`).
    """
    made, wrong = WhatIf(), list[InputError]()
    readers: dict[str, Callable[[str], dict[str, Any]]] = {
        "grid": _grid,
        "profile": lambda t: _profile(t, kept),
        "technique": lambda t: {"technique": Technique.of(t, field="technique")},
        "memory": lambda t: {"memory": MemoryLimit.parse(t, field="memory").text},
        "solver": lambda t: {"solver": _one_of("solver", t, SOLVERS)},
        "time": lambda t: {"seconds": _number("time", t, 0.1, MAX_SECONDS)},
        "state": lambda t: {"state_gb": _number("state", t, *LIMITS["state_gb"])},
        "copy": lambda t: {"copy_gbs": _number("copy", t, *LIMITS["copy_gbs"])},
        "heals": lambda t: {"heals_in": _number("heals", t, *LIMITS["heals_in"])},
        "partition": lambda t: {"partition": t if t == AUTO else ",".join(map(str, parse_partition(t)))},
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


def parse_word(word: str) -> WhatIf:
    """Parses what `WhatIf.in_a_word` has made. Raises InputError if it can't be understood."""
    made, wrong = parse(dict(parse_qsl(word)))
    if wrong:
        raise wrong[0]
    return made


def _grid(text: str) -> dict[str, Any]:
    found = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})x([0-9]{1,6})", text)
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


def _profile(text: str, kept: SavedProfile | None) -> dict[str, Any]:
    name = saved_name(text)
    if name is not None:
        if kept is None or text != saved_word(kept):
            raise InputError("profile", name, "the name of a profile that is kept here")
        return {"profile": text, "kept": kept}
    if text not in PRESETS and shape_name(text) not in shipped():
        read_profile(text)
        return {"profile": text}
    return {"profile": shape_name(text)}


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


def read_upload(data: bytes) -> Profile | JobDoc:
    """Reads a file with a measured profile, a job document, or a plan, whose job is taken. Heartbeats wait meanwhile,
    so its cost has the same bound as that of a body of the API. Raises PlanError and InputError that name what is
    wrong."""
    try:
        document = bounded(data.decode(json.detect_encoding(data)).encode())
    except UnicodeDecodeError as error:
        raise PlanError(f"the file: got no JSON: {error}") from None
    except ConsoleError as error:
        raise PlanError(f"{'the file' if error.field == BODY else error.field}: {error.said}") from None
    try:
        if isinstance(document, dict) and "profile_version" in document:
            return Profile.model_validate(document)
        job = JobDoc.model_validate(document.get("job", document) if isinstance(document, dict) else document)
    except ValidationError as error:
        raise PlanError(f"the file is neither a profile, nor a job, nor a plan: {first_problem(error)}") from None
    job.job()
    return job


def uploaded(read: Profile | JobDoc, asked: WhatIf) -> WhatIf:
    """Returns `asked` with the profile and grid of a file, and no failed workers."""
    job = read.job if isinstance(read, Profile) else read
    made = WhatIf.of(job.job(), (), asked.technique, asked.memory)
    kept = {f.name: getattr(asked, f.name) for f in fields(WhatIf) if f.name in ("solver", "seconds", "copy_gbs")}
    return replace(made, **kept)


def to_keep(question: WhatIf, measured: Profile | None = None) -> Profile | JobDoc:
    """Returns the question's profile as it is to be saved. measured: the file that the user's own profile was read
    from, which is good for more grids than this one. Raises PlannerError."""
    if question.named is not None:
        return question.named.document
    if question.profile in shipped():
        return load_profile(question.profile)
    return measured or job_doc(question.job())


GRID, PROFILE, TECHNIQUE, MEMORY, SOLVER, PARTITION = "grid", "profile", "technique", "memory", "solver", "partition"
# Up to this many ops the bound is computed at each click; it takes milliseconds.
BOUNDED_OPS = 20_000


@dataclass(frozen=True)
class Checked:
    """A question after its check. errors: sentences by field. infeasible: why no schedule exists, though the question
    is valid. bound: a lower bound of the period; None if it takes too long to compute, or there is none."""

    job: Job | None = None
    asked: PlanAsked | None = None
    errors: dict[str, str] = field(default_factory=dict)
    infeasible: str = ""
    bound: Bound | None = None

    @property
    def plannable(self) -> bool:
        return self.asked is not None and not self.errors and not self.infeasible


def checked(question: WhatIf) -> Checked:
    """Checks a question without solving it. Absurd sizes are refused before memory is taken."""
    try:
        job = question.job()
        asked = question.asked()
    except InputError as error:
        where = GRID if error.field in ("grid", "pipelines", "stages", "micro_batches", "--stages") else PROFILE
        return Checked(errors={where: _words(error, error.field)})
    except PlannerError as error:
        return Checked(errors={PROFILE: str(error)})
    try:
        asked.check()
        # The bound over all partitions is another one, which the search for the best partition computes.
        bound = best_bound(asked.problem()) if asked.job.ops <= BOUNDED_OPS and asked.over == "schedules" else None
    except InfeasibleError as error:
        return Checked(job, asked, infeasible=f"{error.constraint}; {error.remedy}")
    except InputError as error:
        fields = {"--technique": TECHNIQUE, "solver": SOLVER, "failed": GRID, "partition": PARTITION}
        where = fields.get(error.field, MEMORY)
        return Checked(job, asked, {where: _words(error, where)})
    return Checked(job, asked, bound=bound)


def _words(error: InputError, field: str) -> str:
    """Returns the error's sentence with the page's name of the field."""
    return in_words(InputError(field, error.value, error.expected))


# -- the idea in five pictures ------------------------------------------------------------------

JOB = Job.uniform(3, 4, 6)
FAILED = frozenset({Worker(1, 2)})
TWO = frozenset({Worker(0, 2), Worker(1, 2)})


@dataclass(frozen=True)
class IntroductionPicture:
    """One of the five pictures. title, text: for people; `text` may refer to the pictures before. moved: (worker, the
    place that it took)."""

    title: str
    text: str
    plan: Plan
    moved: tuple[tuple[Worker, Worker], ...] = ()

    @cached_property
    def drawing(self) -> model.Drawing:
        """The drawing of the plan. Workers that are out have failed, or have taken another one's place."""
        why = dict.fromkeys(self.plan.failed, model.FAILED)
        return model.Drawing.of(
            self.plan.schedule(), out=why | {str(who): f"moved to {place}" for who, place in self.moved}
        )

    @property
    def words(self) -> str:
        """A description of the picture for people who can't see it."""
        schedule = self.drawing.schedule
        failed = ", ".join(map(str, sorted(schedule.problem.failed))) or "none"
        return (
            f"Schedule of {len(schedule.ops)} living workers over {schedule.period} slots. Failed: {failed}. "
            f"Micro-batches on other workers than their own: {sum(schedule.rerouted_forwards.values())}. "
            f"Idle: {percent(schedule.bubble_fraction, 0)} of the slots."
        )


@lru_cache(maxsize=1)
def pictures() -> tuple[IntroductionPicture, ...]:
    """Makes the pictures: fault-free, then one technique after another, then a migration. Takes some 50 ms at first."""
    whole = _plan(frozenset(), Technique.FAULT_FREE, "1f1b")
    adaptive = _plan(FAILED, Technique.ADAPTIVE, "1f1b")
    decoupled = _plan(FAILED, Technique.DECOUPLED, "none")
    staggered = _plan(FAILED, Technique.STAGGERED, "none")
    bounded = _plan(FAILED, Technique.STAGGERED, "uniform")
    crowded = _plan(TWO, Technique.STAGGERED, "uniform")
    moved = best_migrations(JOB, TWO)
    spread = _plan(moved.failed, Technique.STAGGERED, "uniform")
    migrations = "; ".join(map(str, moved.migrations))
    return (
        IntroductionPicture(
            f"Healthy: {_slots(whole)}",
            "Each row is a worker, each number a micro-batch. 1F1B runs one forward (F), one backward (B), and so on. "
            "At both ends workers wait for each other: these idle slots are bubbles, and they are what a failure will "
            "be paid with.",
            whole,
        ),
        IntroductionPicture(
            f"Adaptive pipelining: {_slots(adaptive)}",
            "W1_2 has died. The other two workers of stage 2 hold the same weights, so they take its micro-batches "
            "(hatched). Nobody restarts, and the same micro-batches enter every update. But a whole backward waits "
            f"for room in the middle of the pipeline: {_more(adaptive, whole)}.",
            adaptive,
        ),
        IntroductionPicture(
            f"Decoupled backward: {_slots(decoupled)}",
            "The backward is split. I, the gradient of the input, is what the stage before waits for; W, the gradient "
            "of the weights, is needed by nobody before the step. So W's are put off into bubbles: "
            f"{_more(decoupled, whole)}.",
            decoupled,
        ),
        IntroductionPicture(
            f"Staggered optimizer: {_slots(staggered)}",
            "Each stage steps as soon as its own gradients are there, and begins the next iteration (faint) at once, "
            "in the bubbles of its warm-up. What needs all stages (clipping, NaN) is checked afterwards and rolled "
            f"back if need be. An iteration now takes {_more(staggered, whole)}. That costs memory for what is put "
            f"off: at the {JOB.stages} activations that the fullest healthy worker holds, it is {_slots(bounded)}.",
            staggered,
        ),
        IntroductionPicture(
            f"A migration: {_slots(spread)} instead of {_slots(crowded)}",
            "Two workers of one stage are dead, and the one left there would run all of its micro-batches. Only how "
            f"many fail on each stage counts, so a living worker of a fuller stage changes places: {migrations}.",
            spread,
            tuple((migration.worker, migration.takes) for migration in moved.migrations),
        ),
    )


def _plan(failed: frozenset[Worker], technique: Technique, memory: str) -> Plan:
    return make_plan(Problem(JOB, failed, technique, MemoryLimit(memory)), solver="list")


def _slots(plan: Plan) -> str:
    return f"{plan.metrics.period:g} slots"


def _more(plan: Plan, whole: Plan) -> str:
    more = plan.metrics.period / whole.metrics.period - 1
    if abs(more) < 0.0005:
        return f"{_slots(plan)}, as many as without the failure"
    return f"{_slots(plan)}, +{percent(more)}"


@dataclass(frozen=True)
class ExampleStep:
    """A step of the worked example. name, about: for people. question: for the planner."""

    name: str
    about: str
    question: WhatIf


_DEAD = ("W1_2",)
STEPS = (
    ExampleStep(
        "Fault-free 1F1B",
        "Nobody has failed.",
        WhatIf(technique=Technique.FAULT_FREE, memory="1f1b"),
    ),
    ExampleStep(
        "Adaptive pipelining",
        "W1_2's micro-batches run on W0_2 and W2_2, which hold no more than 1F1B does.",
        WhatIf(failed=_DEAD, technique=Technique.ADAPTIVE, memory="1f1b"),
    ),
    ExampleStep(
        "+ decoupled backward",
        "The gradients of the weights move into bubbles.",
        WhatIf(failed=_DEAD, technique=Technique.DECOUPLED, memory="none"),
    ),
    ExampleStep(
        "+ staggered optimizer",
        "The next iteration begins on one stage before this one has ended on another.",
        WhatIf(failed=_DEAD, technique=Technique.STAGGERED, memory="none"),
    ),
)


def step_of(question: WhatIf) -> ExampleStep | None:
    """Returns the step with this question; None: there is none."""
    return next((s for s in STEPS if s.question == question), None)
