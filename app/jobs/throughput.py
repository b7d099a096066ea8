"""What of a job's time counts, and what its throughput is measured by: one definition for all who show it. Pure.

ETTR is productive time / wall time, goodput the same weighted with throughput / fault-free
throughput, that is samples that count / (fault-free rate x wall time). Wall time runs from the first
generation's opening until now, or to the last commit of a job that is over, without the time in which the job waited
for a person: for a choice, or for the end of a pause. That is no cost of any recovery, and is shown apart. The first
iteration of a generation takes from the last commit of the generation before, so it has the failure, the redone work
and the recovery in it: what it took beyond a usual iteration of its generation is not productive.

The fault-free rate is pinned and named (Baseline). It is the rate of the first stable window of whole iterations with
all workers living; until there is one, that of the fault-free plan where its times are real ones. Those are not real
whose rate the job exceeds: from then on it has no fault-free rate, and no goodput, until one is measured. Once measured
it stays: a machine that becomes slower does not make the job any healthier. It changes when an operator has it measured
anew, and when a fault-free plan that is quicker than the one it was measured with turns out to be; each change is a
line of the event feed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from openrecycle.agent.messages.protocol import Command, JobSpec
from openrecycle.db.store import Record
from openrecycle.planner.jobs.words import percent

# -- what operators have asked of a job, and when it waited for a person ------------------------


class CommandQueue:
    """What operators have asked the launchers and workers of one job for. Written under the job's lock.

    sent: oldest first. held: `pause` or `resume`, and when (POSIX seconds). paused_at: since when all workers are to
    stop, by this process' monotonic clock, which nobody puts back; -inf: since before it began; None: nobody has asked
    for that, or somebody to go on since.
    """

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.held: list[tuple[str, float]] = []
        self.paused_at: float | None = None

    def add(self, command: Command, at: float, now: float = -math.inf) -> None:
        """One that is stored. now: by the monotonic clock; -inf: before this process."""
        self.sent.append(command)
        if command.kind in ("pause", "resume"):
            self.held.append((command.kind, at))
            self.paused_at = now if command.kind == "pause" else None

    def read(self, rows: Iterable[Record]) -> None:
        """As the database has them."""
        read = CommandQueue()
        for row in rows:
            read.add(Command(seq=row["seq"], kind=row["kind"], worker=row["worker"] or None), row["at"])
        self.sent, self.held, self.paused_at = read.sent, read.held, read.paused_at

    def after(self, seq: int) -> list[Command]:
        return [command for command in self.sent if command.seq > seq]


class Wait(NamedTuple):
    """POSIX seconds. end: None while it lasts. generation: that a choice led to, the first time it was asked for; 0: a
    pause."""

    begin: float
    end: float | None
    generation: int = 0


def read_waits(stored: str) -> tuple[Wait, ...]:
    """Those for a choice."""
    try:
        return _WAITS.validate_json(stored)
    except ValueError:
        return ()  # of a file from elsewhere


_WAITS: TypeAdapter[tuple[Wait, ...]] = TypeAdapter(tuple[Wait, ...])


def after_change(waits: tuple[Wait, ...], choosing: bool, generation: int, now: float) -> tuple[Wait, ...]:
    """choosing: does the job wait for a choice by now? generation: that is to open next."""
    last = waits[-1] if waits else None
    lasts = last is not None and last.end is None
    if choosing and not lasts:
        return (*waits, Wait(now, None, generation))
    if last is not None and lasts and not choosing:
        return (*waits[:-1], Wait(last.begin, max(now, last.begin), generation))
    return waits


def pauses(held: Iterable[tuple[str, float]]) -> tuple[Wait, ...]:
    """held: (`pause` or `resume`, POSIX seconds) of what operators asked for."""
    found: list[Wait] = []
    for kind, at in held:
        if kind == "pause" and (not found or found[-1].end is not None):
            found.append(Wait(at, None))
        elif kind == "resume" and found and found[-1].end is None:
            found[-1] = Wait(found[-1].begin, max(at, found[-1].begin))
    return tuple(found)


@dataclass(frozen=True)
class Waited:
    """Seconds. by_iteration: of those that were committed after a wait; by_generation: that a choice which led to the
    generation took; pauses: each from the last commit in it, since workers end first what they are at, and but for what
    of them is in a choice. waits: all of them, in order, of which no two overlap."""

    by_iteration: Mapping[int, float] = field(default_factory=dict)
    by_generation: Mapping[int, float] = field(default_factory=dict)
    pauses: tuple[Wait, ...] = ()
    waits: tuple[Wait, ...] = ()

    def within(self, begin: float, end: float) -> float:
        """Seconds of waiting between two times (POSIX seconds)."""
        return _within(self.waits, begin, end)

    def in_recovery(self, row: Record) -> tuple[float, float]:
        """Of a recovery (a row of the database): seconds of choosing, which are before anybody took up the plan that
        came of it, and of a pause, which is before training resumed."""
        begin, end = row["at"] - row["resumed_ms"] / 1000, row["at"]
        return self.by_generation.get(row["generation"], 0.0), _within(self.pauses, begin, end)


def _within(waits: Iterable[Wait], begin: float, end: float) -> float:
    return sum(max(0.0, (end if w.end is None else min(w.end, end)) - max(w.begin, begin)) for w in waits)


NOTHING = Waited()


def trained(row: Record, waited: Waited) -> float:
    """Seconds of an iteration (a row of the database) without those of waiting for a person."""
    return float(max(0.0, row["seconds"] - waited.by_iteration.get(row["iteration"], 0.0)))


def joined(waits: Iterable[Wait]) -> list[Wait]:
    """Where two overlap, one."""
    out: list[Wait] = []
    for wait in sorted(waits, key=lambda w: w.begin):
        last = out[-1] if out else None
        if last is not None and (last.end is None or wait.begin <= last.end):
            end = None if last.end is None or wait.end is None else max(last.end, wait.end)
            out[-1] = Wait(last.begin, end)
        else:
            out.append(Wait(wait.begin, wait.end))
    return out


def apart(waits: Iterable[Wait], others: Iterable[Wait]) -> tuple[Wait, ...]:
    """What of `waits` is in none of `others`, in order."""
    left = list(waits)
    for other in others:
        ends = math.inf if other.end is None else other.end
        parts: list[Wait] = []
        for wait in left:
            end = math.inf if wait.end is None else wait.end
            if wait.begin < min(end, other.begin):
                parts.append(wait if end <= other.begin else wait._replace(end=other.begin))
            if max(wait.begin, ends) < end:
                parts.append(wait._replace(begin=max(wait.begin, ends)))
        left = parts
    return tuple(left)


def segments(row: Record, waited: Waited) -> list[tuple[str, float]]:
    """The steps of a recovery, in milliseconds that add up to the whole, each with its words; a person's time apart."""
    marks = [0.0]
    for name in ("detected_ms", "unblocked_ms", "reformed_ms", "resumed_ms"):
        marks.append(max(marks[-1], row[name]))
    steps = [after - before for before, after in pairwise(marks)]
    chose, paused = (1000 * seconds for seconds in waited.in_recovery(row))
    left = chose
    for i in (1, 2):  # survivors let go, and form anew, by the plan that was chosen
        steps[i], left = max(0.0, steps[i] - left), max(0.0, left - steps[i])
    took = min(steps[3], paused)
    steps[3] -= took
    words = ("until it was seen", "until the last survivor was free", "groups formed anew", "iteration done again")
    return [*zip(words, steps, strict=True), ("waited for a person", chose - left + took)]


# So many iterations make a window; it is stable where their middle four fifths differ by no more than this share of
# the median. Where none is after so many iterations, the newest window is taken, and said to be unsteady.
WINDOW, STABLE, PATIENCE = 20, 0.15, 200


# -- what of a job's time counts, and what its throughput is measured by ------------------------


@dataclass(frozen=True)
class Baseline:
    """first, last: the iterations that it was measured at, and plan: the fingerprint of the fault-free plan that they
    ran by, where the source is `measured`. renew: look for a window from this iteration on; None: it stays. refuted: it
    is a prediction that the job has exceeded, and counts for nothing, however slow the job becomes."""

    samples_per_second: float
    source: Literal["measured", "planned"]
    first: int = 0
    last: int = 0
    plan: str = ""
    renew: int | None = None
    refuted: bool = False

    @property
    def words(self) -> str:
        """Where the number comes from."""
        if self.source == "planned":
            return "predicted by the fault-free plan"
        return f"measured at iterations {self.first:,} to {self.last:,}"

    def holds(self, samples: float, productive: float) -> bool:
        """Not a prediction that the job has exceeded. samples: that it has trained in so many productive seconds."""
        exceeded = self.source == "planned" and samples > self.samples_per_second * productive
        return not (self.refuted or exceeded)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_baseline(stored: str) -> Baseline | None:
    """None: there is none, or what is stored is none (of a file from elsewhere)."""
    try:
        made = _BASELINE.validate_json(stored) if stored else None
        return made if made is None or 0 < made.samples_per_second < math.inf else None
    except ValueError:
        return None


_BASELINE = TypeAdapter(Baseline)


@dataclass
class Window:
    """The newest iterations with all workers living and no micro-batch left out, one after the other, in one
    generation: (number, seconds)."""

    through: int
    generation: int = 0
    seen: int = 0
    newest: list[tuple[int, float]] = field(default_factory=list)

    def add(self, iteration: int, seconds: float, generation: int, *, whole: bool) -> None:
        """The next iteration. whole: all workers lived, and all of it was trained, and nothing else was in it."""
        first = generation != self.generation
        self.through, self.generation = iteration, generation
        if first or not whole or seconds <= 0:
            # The first iteration of a generation has what came before it in it.
            self.newest = []
            return
        self.seen += 1
        self.newest = [*self.newest[1 - WINDOW :], (iteration, seconds)]

    @property
    def spread(self) -> float | None:
        """Of its middle four fifths, as a share of the median; None: it is not full."""
        if len(self.newest) < WINDOW:
            return None
        tenths = quantiles([seconds for _, seconds in self.newest], n=10)
        return (tenths[-1] - tenths[0]) / self.seconds

    @property
    def seconds(self) -> float:
        return median(seconds for _, seconds in self.newest)

    @property
    def found(self) -> bool:
        spread = self.spread
        return spread is not None and (spread <= STABLE or self.seen >= PATIENCE)

    def baseline(self, samples: float, plan: str) -> tuple[Baseline, str]:
        """The rate, and what is to be said of how steady it is. samples: of one iteration."""
        first, last, spread = self.newest[0][0], self.newest[-1][0], self.spread or 0.0
        unsteady = f", which vary by {percent(spread, 0)}" if spread > STABLE else ""
        return Baseline(samples / self.seconds, "measured", first, last, plan), unsteady


@dataclass(frozen=True)
class Figures:
    """Of one job so far. baseline: its fault-free rate, None while that is not known. Fractions are None before the
    first commit, goodput also without a fault-free rate. Seconds of wall time, of productive time in it, and, apart
    from it, of waiting for a person."""

    baseline: Baseline | None
    ettr: float | None
    goodput: float | None
    wall: float
    productive: float
    waited: float = 0.0

    @property
    def fault_free(self) -> float | None:
        """Samples per second with all workers."""
        return self.baseline.samples_per_second if self.baseline else None


@dataclass
class GenerationSum:
    """The iterations of one generation, whose first one took `first` seconds and the others `rest`."""

    first: float
    rest: float = 0.0
    others: int = 0

    def productive(self, usual: float | None) -> float:
        """Seconds. usual: what an iteration takes elsewhere, where this generation has had no other yet."""
        if self.others:
            usual = self.rest / self.others
        return self.rest + (self.first if usual is None else min(self.first, usual))


class Account:
    """What is known of one job's iterations, added up once each."""

    def __init__(self) -> None:
        self.through = -1
        self.count = 0
        self.skipped = 0
        """Micro-batches that are in no sum of them."""
        self.last_at = 0.0
        self.took = 0.0
        """Seconds of all of them, whatever they were for."""
        self._closed = 0.0
        """Productive seconds of generations that are done."""
        self._generation = 0
        self._sum: GenerationSum | None = None
        self._usual: float | None = None

    def add(self, iteration: int, seconds: float, generation: int, skipped: int = 0) -> None:
        """The next iteration. seconds: without those of waiting for a person. skipped: micro-batches."""
        if self._sum is None or generation != self._generation:
            self._close()
            self._generation, self._sum = generation, GenerationSum(seconds)
        else:
            self._sum.rest += seconds
            self._sum.others += 1
        self.through = iteration
        self.took += seconds
        self.count += 1
        self.skipped += skipped

    def add_sum(self, row: Record) -> None:
        """A whole generation up to some iteration; see db.store.iteration_sums."""
        self._close()
        first, others = row["first_seconds"], row["count"] - 1
        self._generation, self._sum = row["generation"], GenerationSum(first, max(0.0, row["seconds"] - first), others)
        self.through = row["first"] + others
        self.took += row["seconds"]
        self.count += row["count"]
        self.skipped += row["skipped"]

    @property
    def productive(self) -> float:
        return self._closed + (self._sum.productive(self._usual) if self._sum else 0.0)

    def _close(self) -> None:
        if self._sum is not None:
            self._closed += self._sum.productive(self._usual)
            if self._sum.others:
                self._usual = self._sum.rest / self._sum.others


def without_waits(row: Record, waited: Waited) -> Record:
    """A row of db.store.iteration_sums without the seconds of waiting for a person."""
    last = row["first"] + row["count"] - 1
    out = sum(seconds for n, seconds in waited.by_iteration.items() if row["first"] <= n <= last)
    first = max(0.0, row["first_seconds"] - waited.by_iteration.get(row["first"], 0.0))
    return {**row, "seconds": max(first, row["seconds"] - out), "first_seconds": first}


RECENT = 5


@dataclass(frozen=True)
class IterationView:
    """seconds: wall time of the iteration, without waited, for which the job waited for a person in it. skipped:
    micro-batches, numbered over the pipelines, that are in no sum of it. samples_per_second: of the others."""

    iteration: int
    loss: float
    seconds: float
    samples_per_second: float
    generation: int
    living: int
    committed_at: float
    waited: float = 0.0
    skipped: tuple[int, ...] = ()


def iteration_view(row: Record, spec: JobSpec, waited: Waited = NOTHING) -> IterationView:
    """row: of the database."""
    seconds = trained(row, waited)
    samples = spec.samples - len(row["skipped"]) * spec.samples_per_micro_batch
    rate = samples / seconds if seconds > 0 else 0.0
    columns = ("iteration", "loss", "generation", "living", "committed_at")
    known = {name: row[name] for name in columns}
    waited_for, skipped = row["seconds"] - seconds, tuple(row["skipped"])
    return IterationView(seconds=seconds, samples_per_second=rate, waited=waited_for, skipped=skipped, **known)


def recent_rate(iterations: Sequence[IterationView]) -> float | None:
    """Samples per second over the newest iterations of the newest generation."""
    if not iterations:
        return None
    newest = [i for i in iterations[-RECENT:] if i.generation == iterations[-1].generation]
    # The first iteration of a generation holds the recovery itself; later ones tell the pace.
    settled = newest[1:] if len(newest) > 1 else newest
    seconds = sum(i.seconds for i in settled)
    return sum(i.samples_per_second * i.seconds for i in settled) / seconds if seconds else None


def has_settled(iterations: Sequence[IterationView]) -> bool:
    """Is the rate of late that of its pace? Not while the newest generation has had its first iteration alone, which
    holds the recovery itself."""
    return len(iterations) < 2 or iterations[-1].generation == iterations[-2].generation


def share_of(rate: float | None, figures: Figures | None) -> float | None:
    """rate / the fault-free rate; None: one of them is not known."""
    if rate is None or figures is None or not figures.fault_free:
        return None
    return rate / figures.fault_free
