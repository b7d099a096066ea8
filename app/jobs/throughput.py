"""Which part of a job's time is productive, and what its throughput is compared with: the definitions for all that show
them. Pure.

ETTR is productive time / wall time. Goodput is the same weighted with throughput / fault-free throughput, that is
samples that count / (fault-free rate x wall time). Wall time runs from the opening of the first generation until now,
or to the last commit of a job that is over, without the time in which the job waited for a person (for a choice, or for
the end of a pause). That time is no cost of any recovery, and is shown apart. The first iteration of a generation
counts from the last commit of the generation before, so it includes the failure, the redone work and the recovery: what
it took beyond a usual iteration of its generation is not productive.

The fault-free rate is pinned, and says where it is from (Baseline). It is the rate of the first stable window of whole
iterations with all workers living. Until there is one, it is the rate of the fault-free plan, if that plan's op times
are real ones. They are not if the job exceeds the plan's rate: then it has no fault-free rate, and no goodput, until
one is measured. A measured rate stays, because a machine that becomes slower does not make the job any healthier. It
changes only when an operator has it measured anew, or when there is a fault-free plan that is quicker than the one that
it was measured with. Each change is a line of the event feed.
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
    """The commands of operators to the launchers and workers of one job. Written under the job's lock.

    sent: all commands, oldest first. held: each `pause` and `resume`, and when (POSIX seconds). paused_at: since when
    the job is to pause, by this process' monotonic clock, which nobody puts back; -inf: since before this process
    began; None: the job is not to pause.
    """

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.held: list[tuple[str, float]] = []
        self.paused_at: float | None = None

    def add(self, command: Command, at: float, now: float = -math.inf) -> None:
        """Adds a command that is stored. at: POSIX seconds. now: monotonic seconds; -inf: before this process began."""
        self.sent.append(command)
        if command.kind in ("pause", "resume"):
            self.held.append((command.kind, at))
            self.paused_at = now if command.kind == "pause" else None

    def read(self, rows: Iterable[Record]) -> None:
        """Takes all commands from the rows of the database."""
        read = CommandQueue()
        for row in rows:
            read.add(Command(seq=row["seq"], kind=row["kind"], worker=row["worker"] or None), row["at"])
        self.sent, self.held, self.paused_at = read.sent, read.held, read.paused_at

    def after(self, seq: int) -> list[Command]:
        return [command for command in self.sent if command.seq > seq]


class Wait(NamedTuple):
    """A time in which the job waited for a person, in POSIX seconds. end: None while it lasts. generation: the one that
    was to open next when a choice was first asked for; 0: a pause."""

    begin: float
    end: float | None
    generation: int = 0


def read_waits(stored: str) -> tuple[Wait, ...]:
    """Reads the stored waits for a choice."""
    try:
        return _WAITS.validate_json(stored)
    except ValueError:
        return ()  # of a file from elsewhere


_WAITS: TypeAdapter[tuple[Wait, ...]] = TypeAdapter(tuple[Wait, ...])


def after_change(waits: tuple[Wait, ...], choosing: bool, generation: int, now: float) -> tuple[Wait, ...]:
    """Returns the waits for a choice after a change of the job. choosing: whether the job waits for one now.
    generation: the one that is to open next."""
    last = waits[-1] if waits else None
    lasts = last is not None and last.end is None
    if choosing and not lasts:
        return (*waits, Wait(now, None, generation))
    if last is not None and lasts and not choosing:
        return (*waits[:-1], Wait(last.begin, max(now, last.begin), generation))
    return waits


def pauses(held: Iterable[tuple[str, float]]) -> tuple[Wait, ...]:
    """Returns the times in which the job was paused. held: (`pause` or `resume`, POSIX seconds) of operators."""
    found: list[Wait] = []
    for kind, at in held:
        if kind == "pause" and (not found or found[-1].end is not None):
            found.append(Wait(at, None))
        elif kind == "resume" and found and found[-1].end is None:
            found[-1] = Wait(found[-1].begin, max(at, found[-1].begin))
    return tuple(found)


@dataclass(frozen=True)
class Waited:
    """How long a job waited for a person, in seconds.

    by_iteration: how much of an iteration's time was waiting. by_generation: how long the choice that led to a
    generation took. pauses: each begins with the last commit in it, since workers finish their iteration first; time
    that is also in a choice is left out. waits: all waits, in order; no two overlap."""

    by_iteration: Mapping[int, float] = field(default_factory=dict)
    by_generation: Mapping[int, float] = field(default_factory=dict)
    pauses: tuple[Wait, ...] = ()
    waits: tuple[Wait, ...] = ()

    def within(self, begin: float, end: float) -> float:
        """Returns the seconds of waiting between two times (POSIX seconds)."""
        return _within(self.waits, begin, end)

    def in_recovery(self, row: Record) -> tuple[float, float]:
        """Returns how many seconds of a recovery were (choosing, pause). A choice is over before anybody takes up the
        plan, and a pause before training resumes. row: the recovery's, of the database."""
        begin, end = row["at"] - row["resumed_ms"] / 1000, row["at"]
        return self.by_generation.get(row["generation"], 0.0), _within(self.pauses, begin, end)


def _within(waits: Iterable[Wait], begin: float, end: float) -> float:
    return sum(max(0.0, (end if w.end is None else min(w.end, end)) - max(w.begin, begin)) for w in waits)


NOTHING = Waited()


def trained(row: Record, waited: Waited) -> float:
    """Returns the seconds of an iteration without those of waiting for a person. row: of the database."""
    return float(max(0.0, row["seconds"] - waited.by_iteration.get(row["iteration"], 0.0)))


def joined(waits: Iterable[Wait]) -> list[Wait]:
    """Returns the waits in order, with those that overlap made into one."""
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
    """Returns the parts of `waits` that are in none of `others`, in order."""
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
    """Returns the steps of a recovery as (words, milliseconds), which add up to the whole. The time in which it waited
    for a person is a step of its own. row: the recovery's, of the database."""
    marks = [0.0]
    for name in ("detected_ms", "unblocked_ms", "reformed_ms", "resumed_ms"):
        marks.append(max(marks[-1], row[name]))
    steps = [after - before for before, after in pairwise(marks)]
    chose, paused = (1000 * seconds for seconds in waited.in_recovery(row))
    left = chose
    for i in (1, 2):  # survivors leave the iteration and form groups by the chosen plan: both may include the choice
        steps[i], left = max(0.0, steps[i] - left), max(0.0, left - steps[i])
    took = min(steps[3], paused)
    steps[3] -= took
    words = ("until it was seen", "until the last survivor was free", "groups formed anew", "iteration done again")
    return [*zip(words, steps, strict=True), ("waited for a person", chose - left + took)]


# WINDOW iterations make a window. It is stable if their middle four fifths differ by no more than STABLE of the median.
# If no window is stable after PATIENCE iterations, the newest one is taken, and said to be unsteady.
WINDOW, STABLE, PATIENCE = 20, 0.15, 200


# -- what of a job's time counts, and what its throughput is measured by ------------------------


@dataclass(frozen=True)
class Baseline:
    """The fault-free rate of a job, and where it is from.

    If the source is `measured`, first and last: the iterations of the window, and plan: the fingerprint of the
    fault-free plan that they ran. renew: look for a new window from this iteration on; None: the rate stays. refuted:
    it is a prediction that the job has exceeded once; it does not count any more, however slow the job becomes."""

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
        """Says whether the rate counts: it is measured, or the job has not exceeded it. samples: how many the job has
        trained in `productive` seconds."""
        exceeded = self.source == "planned" and samples > self.samples_per_second * productive
        return not (self.refuted or exceeded)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_baseline(stored: str) -> Baseline | None:
    """Reads a stored baseline. Returns None if there is none, or if it can't be read (from somebody else's file)."""
    try:
        made = _BASELINE.validate_json(stored) if stored else None
        return made if made is None or 0 < made.samples_per_second < math.inf else None
    except ValueError:
        return None


_BASELINE = TypeAdapter(Baseline)


@dataclass
class Window:
    """The newest consecutive iterations of one generation, with all workers living and no micro-batch skipped.

    through: the last iteration that was added. seen: how many have counted in all. newest: (iteration, seconds), at
    most WINDOW of them."""

    through: int
    generation: int = 0
    seen: int = 0
    newest: list[tuple[int, float]] = field(default_factory=list)

    def add(self, iteration: int, seconds: float, generation: int, *, whole: bool) -> None:
        """Adds the next iteration. whole: all workers lived, all micro-batches were trained, and nothing else, such as
        a wait, took time."""
        first = generation != self.generation
        self.through, self.generation = iteration, generation
        if first or not whole or seconds <= 0:
            # The time of a generation's first iteration includes what came before it, such as the recovery.
            self.newest = []
            return
        self.seen += 1
        self.newest = [*self.newest[1 - WINDOW :], (iteration, seconds)]

    @property
    def spread(self) -> float | None:
        """The spread of the middle four fifths of the window, as a share of the median; None: the window is not
        full."""
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
        """Returns the window's rate, and a clause that says if it is unsteady. samples: of one iteration."""
        first, last, spread = self.newest[0][0], self.newest[-1][0], self.spread or 0.0
        unsteady = f", which vary by {percent(spread, 0)}" if spread > STABLE else ""
        return Baseline(samples / self.seconds, "measured", first, last, plan), unsteady


@dataclass(frozen=True)
class Figures:
    """The figures of one job so far. baseline: its fault-free rate, None while that is not known. ettr and goodput are
    fractions; both are None before the first commit, and goodput also without a fault-free rate. wall, productive,
    waited: seconds; the time of waiting for a person is not part of the wall time."""

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
    """The iterations of one generation: the first one took `first` seconds, and the `others` took `rest` together."""

    first: float
    rest: float = 0.0
    others: int = 0

    def productive(self, usual: float | None) -> float:
        """Returns the productive seconds. usual: seconds of an iteration in an earlier generation, which stand in while
        this generation has only its first one; None: not known."""
        if self.others:
            usual = self.rest / self.others
        return self.rest + (self.first if usual is None else min(self.first, usual))


class Account:
    """The running sums over one job's iterations, each of which is added once, in order."""

    def __init__(self) -> None:
        self.through = -1
        self.count = 0
        self.skipped = 0
        """Micro-batches that were left out of their iterations' sums."""
        self.last_at = 0.0
        self.took = 0.0
        """Seconds of all iterations, productive or not."""
        self._closed = 0.0
        """Productive seconds of the generations before the newest."""
        self._generation = 0
        self._sum: GenerationSum | None = None
        self._usual: float | None = None

    def add(self, iteration: int, seconds: float, generation: int, skipped: int = 0) -> None:
        """Adds the next iteration. seconds: without those of waiting for a person. skipped: how many micro-batches."""
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
        """Adds a generation's iterations up to some one at once. row: of db.store.iteration_sums."""
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
    """Returns a row of db.store.iteration_sums without the seconds of waiting for a person."""
    last = row["first"] + row["count"] - 1
    out = sum(seconds for n, seconds in waited.by_iteration.items() if row["first"] <= n <= last)
    first = max(0.0, row["first_seconds"] - waited.by_iteration.get(row["first"], 0.0))
    return {**row, "seconds": max(first, row["seconds"] - out), "first_seconds": first}


RECENT = 5


@dataclass(frozen=True)
class IterationView:
    """One iteration. loss: None where no micro-batch has one. seconds: its wall time without `waited`, the seconds in
    it for which the job waited for a person. skipped: micro-batches, numbered over the pipelines, that were left out of
    its sums; they don't count in samples_per_second."""

    iteration: int
    loss: float | None
    seconds: float
    samples_per_second: float
    generation: int
    living: int
    committed_at: float
    waited: float = 0.0
    skipped: tuple[int, ...] = ()


def iteration_view(row: Record, spec: JobSpec, waited: Waited = NOTHING) -> IterationView:
    """Makes the view of one iteration. row: of the database."""
    seconds = trained(row, waited)
    samples = spec.samples - len(row["skipped"]) * spec.samples_per_micro_batch
    rate = samples / seconds if seconds > 0 else 0.0
    columns = ("iteration", "loss", "generation", "living", "committed_at")
    known = {name: row[name] for name in columns}
    waited_for, skipped = row["seconds"] - seconds, tuple(row["skipped"])
    return IterationView(seconds=seconds, samples_per_second=rate, waited=waited_for, skipped=skipped, **known)


def recent_rate(iterations: Sequence[IterationView]) -> float | None:
    """Returns the samples per second over the newest iterations of the newest generation; None: there are none."""
    if not iterations:
        return None
    newest = [i for i in iterations[-RECENT:] if i.generation == iterations[-1].generation]
    # The first iteration of a generation includes the recovery; later ones show the pace.
    settled = newest[1:] if len(newest) > 1 else newest
    seconds = sum(i.seconds for i in settled)
    return sum(i.samples_per_second * i.seconds for i in settled) / seconds if seconds else None


def has_settled(iterations: Sequence[IterationView]) -> bool:
    """Says whether `recent_rate` shows the job's pace. It does not while the newest generation has only had its first
    iteration, which includes the recovery."""
    return len(iterations) < 2 or iterations[-1].generation == iterations[-2].generation


def pace(iterations: Sequence[IterationView]) -> float | None:
    """Returns `recent_rate`; None while it does not show the job's pace."""
    return recent_rate(iterations) if has_settled(iterations) else None


def unit_seconds(iterations: Sequence[Record], periods: Mapping[int, float]) -> float | None:
    """Returns the real seconds of one time unit of a job's plans, by the median of its iterations; None if none of them
    ran by a plan that is at hand. periods: of these plans, by generation. The first iteration of a generation does not
    count: it includes what came before it, such as the start of the workers, or the silence of one that is lost."""
    first: dict[int, int] = {}
    for row in iterations:
        first[row["generation"]] = min(row["iteration"], first.get(row["generation"], row["iteration"]))
    later = [row for row in iterations if row["generation"] in periods and row["iteration"] > first[row["generation"]]]
    took = [row["seconds"] / periods[row["generation"]] for row in later if row["seconds"] > 0]
    return median(took) if took else None


def share_of(rate: float | None, figures: Figures | None) -> float | None:
    """Returns rate / fault-free rate; None if one of them is not known."""
    if rate is None or figures is None or not figures.fault_free:
        return None
    return rate / figures.fault_free
