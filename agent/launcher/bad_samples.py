"""Decides whether the data or a worker is at fault when an op of a micro-batch raises. Pure: no processes, no torch.

The launcher of a job keeps this state, with a console and without: it alone hears every worker. It sends what follows
with each generation, so that all members of a generation leave out the same micro-batches.

- A micro-batch that raised once is tried again, by another worker of the stage if one lives. The two workers swap what
  the plan has them do, or one does both parts, which never shows in the bits. Once it is decided whose fault it was,
  all do what is planned again.
- A micro-batch that raises on two workers, or twice if the stage has only one, is the data's fault. So is one that has
  raised `ATTEMPTS` times, whichever worker ran it. Then the job halts; or the micro-batch is left out on all stages, in
  this and every later run of that iteration, and the mean is over the others.
- If it succeeds on another worker, the first worker was at fault. A worker that is at fault `STRIKES` times is taken
  out, unless it is the last one of its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

ATTEMPTS = 4
STRIKES = 3

Run = tuple[str, tuple[str, ...]]
"""A worker, and the workers of its stage whose part of the plan it does; (): it takes part only in sums and steps."""


def named(samples: Sequence[int], how: str = "") -> str:
    """Returns, in brackets, which samples a micro-batch has; "" where that is not known. how: words before them."""
    few = ", ".join(map(str, samples[:8])) + (", …" if len(samples) > 8 else "")
    said = "; ".join(part for part in (how, f"samples {few}" if few else "") if part)
    return f" ({said})" if said else ""


@dataclass(frozen=True)
class FailedOp:
    """An op of micro-batch `micro_batch` (numbered over all pipelines) raised in a process of `worker`, of `stage`.

    error: the exception, in one line. samples: the data set's samples in the micro-batch, where they are known. ends:
    no later micro-batch can be read either.
    """

    worker: str
    incarnation: str
    stage: int
    iteration: int
    op: str
    micro_batch: int
    error: str
    samples: tuple[int, ...] = ()
    ends: bool = False

    @property
    def what(self) -> str:
        which = named(self.samples, "counted over all pipelines")
        return f"iteration {self.iteration}, micro-batch {self.micro_batch}{which}"


@dataclass(frozen=True)
class Suspect:
    """A micro-batch that has raised, and is to be tried again. tried: the incarnations on which it raised, each with
    its worker's name at that time. raises: how often it raised. given: the incarnation that runs it in the newest
    generation."""

    first: FailedOp
    tried: Mapping[str, str]
    raises: int = 1
    given: str = ""

    @property
    def key(self) -> tuple[int, int, int]:
        return self.first.iteration, self.first.micro_batch, self.first.stage


@dataclass(frozen=True)
class BadSamples:
    """left_out: (iteration, micro-batch), in the order in which they were found. strikes: how often each incarnation
    was at fault."""

    suspects: tuple[Suspect, ...] = ()
    left_out: tuple[tuple[int, int], ...] = ()
    strikes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What follows from an exception. bad: the new state. text: for people. left_out: (iteration, micro-batch) that is
    left out from now on. halt: why the job must end before that iteration; "": it goes on."""

    bad: BadSamples
    text: str
    left_out: tuple[int, int] | None = None
    halt: str = ""


@dataclass(frozen=True)
class Blamed:
    """A worker's process that failed at a micro-batch which another one could run. out: it is taken out."""

    worker: str
    incarnation: str
    text: str
    out: bool


def raised(bad: BadSamples, report: FailedOp, peers: Mapping[str, str], *, skip: bool, limit: int) -> Finding:
    """Decides what follows from an exception. peers: the living processes of the stage, incarnation by worker. skip:
    leave out micro-batches that are the data's fault. limit: how many may be left out."""
    found = f"{report.what}: {report.worker} raised {report.error}"
    if (report.iteration, report.micro_batch) in bad.left_out:
        return Finding(bad, found)  # the worker did not know yet that it is left out
    old = next((s for s in bad.suspects if s.key == (report.iteration, report.micro_batch, report.stage)), None)
    suspect = Suspect(report, {report.incarnation: report.worker})
    if old is not None:
        suspect = replace(old, tried={**old.tried, report.incarnation: report.worker}, raises=old.raises + 1)
    others = tuple(s for s in bad.suspects if s is not old)
    alone = len(peers) < 2
    if len(suspect.tried) < 2 and not (alone and suspect.raises >= 2) and suspect.raises < ATTEMPTS:
        text = f"{found}; it is tried again" + ("" if alone else " on another worker")
        return Finding(replace(bad, suspects=(*others, suspect)), text)

    bad = replace(bad, suspects=tuple(s for s in others if s.key[:2] != suspect.key[:2]))
    whose = " and ".join(sorted(set(suspect.tried.values())))
    fault = f"{report.what}: what raises wherever it is tried ({whose}) is the data's fault: {report.error}"
    if report.ends:
        return Finding(bad, found, halt=fault)
    if not skip:
        return Finding(bad, found, halt=f"{fault}. on_bad_sample='skip' (--on-bad-sample skip) leaves it out")
    count = len(bad.left_out) + 1
    if count > limit:
        return Finding(bad, found, halt=f"{fault}; {limit} micro-batches were left out before, the most that may be")
    key = report.iteration, report.micro_batch
    text = f"{fault}; it is left out (number {count} of at most {limit})"
    return Finding(replace(bad, left_out=(*bad.left_out, key)), text, left_out=key)


def assign(
    bad: BadSamples, owner: Callable[[int, int], str], living: Mapping[str, str]
) -> tuple[BadSamples, tuple[Run, ...]]:
    """Decides which worker does whose part of the plan in a new generation, so that other workers try the suspects.
    Returns the new state, which says which worker tries each, and the runs that differ from the plan.

    Two workers swap their parts. If that would give one of them a micro-batch at which it has failed too, one does both
    parts and the other none. owner: the worker that runs (micro-batch, stage) by the plan. living: incarnation by
    worker.
    """
    runs: dict[str, tuple[str, ...]] = {}
    given: dict[tuple[int, int, int], str] = {}
    for stage in dict.fromkeys(s.first.stage for s in bad.suspects):
        here = [s for s in bad.suspects if s.first.stage == stage]
        planned = {s.key: owner(s.first.micro_batch, stage) for s in here}
        best: Mapping[str, tuple[str, ...]] = {}
        most = -1
        for parts in _ways(dict.fromkeys(planned.values()), living):
            by = {part: worker for worker, mine in parts.items() for part in mine}
            fits = [living.get(by.get(planned[s.key], planned[s.key]), "") not in s.tried for s in here]
            # The best way has all suspects tried by others; or else the oldest one, and as many more as possible.
            score = sum(fits) + len(fits) * fits[0]
            if score > most:
                best, most = parts, score
        runs |= best
        by = {part: worker for worker, mine in best.items() for part in mine}
        given |= {key: living.get(by.get(worker, worker), "") for key, worker in planned.items()}
    suspects = tuple(replace(s, given=given[s.key]) for s in bad.suspects)
    return replace(bad, suspects=suspects), tuple(sorted(runs.items()))


def _ways(owners: Iterable[str], living: Mapping[str, str]) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """Yields ways to share out parts of the plan, the cheapest first: for each worker that does not do just its own
    part, the workers whose parts it does."""
    yield {}
    pairs = [(one, other) for one in owners for other in _of_stage(one, living) if other != one]
    yield from ({one: (other,), other: (one,)} for one, other in pairs)
    for one, other in pairs:
        yield {one: (), other: (other, one)}
        yield {other: (), one: (one, other)}


def committed(bad: BadSamples, iterations: int, living: Mapping[str, str]) -> tuple[BadSamples, tuple[Blamed, ...]]:
    """Takes note that so many iterations are committed. Suspect micro-batches in them have succeeded, so the workers
    that failed at them are at fault. Returns the new state and these workers. living: incarnation by worker."""
    done = [s for s in bad.suspects if s.first.iteration < iterations]
    if not done:
        return bad, ()
    names = {incarnation: worker for worker, incarnation in living.items()}
    # The strikes of processes that are gone no longer matter.
    strikes, blamed, left = {i: count for i, count in bad.strikes.items() if i in names}, [], set(living)
    for suspect in done:
        for incarnation in suspect.tried:
            worker = names.get(incarnation)
            if worker is None or worker not in left or incarnation == suspect.given:
                continue  # gone, taken out just now, or the one that succeeded
            strikes[incarnation] = count = strikes.get(incarnation, 0) + 1
            out = count >= STRIKES and len(_of_stage(worker, left)) > 1
            if out:
                left.discard(worker)
            text = (
                f"{suspect.first.what}: succeeded elsewhere, so it was the fault of {worker} ({suspect.first.error}), "
                f"{count} of {STRIKES} times" + ("; it is taken out" if out else "")
            )
            blamed.append(Blamed(worker, incarnation, text, out))
    return replace(bad, suspects=tuple(s for s in bad.suspects if s not in done), strikes=strikes), tuple(blamed)


def _of_stage(worker: str, living: Collection[str]) -> list[str]:
    stage = worker.rpartition("_")[2]
    return sorted(w for w in living if w.rpartition("_")[2] == stage)
