"""What to do about micro-batches whose ops raise: is it the data's fault, or a worker's? Pure: no processes, no torch.

The launcher of a job keeps this, with a console and without: it alone hears every worker, and hands out what follows
with each generation, so that all members of a generation leave out the same micro-batches.

- What raised once is tried again, by another worker of the stage where one lives: the two swap what the plan has them
  do, or one does both, which never shows in the bits. All do what is planned again once it is decided.
- What raises on two workers, or twice where the stage has but one, is the data's fault. So it is when it has raised
  `ATTEMPTS` times, whoever ran it. Then the job halts; or the micro-batch is left out on all stages, in this and every
  later run of that iteration, and the mean is over the others.
- What then succeeds elsewhere was its worker's fault; who is at fault `STRIKES` times is taken out, unless it is the
  last of its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

ATTEMPTS = 4
STRIKES = 3

Run = tuple[str, tuple[str, ...]]
"""A worker, and the workers of its stage whose part of the plan it does; (): it takes part in sums and steps only."""


def named(samples: Sequence[int], how: str = "") -> str:
    """Which they are, behind the micro-batch that they are in; nothing where that is not known. how: said before."""
    few = ", ".join(map(str, samples[:8])) + (", …" if len(samples) > 8 else "")
    said = "; ".join(part for part in (how, f"samples {few}" if few else "") if part)
    return f" ({said})" if said else ""


@dataclass(frozen=True)
class FailedOp:
    """An op of micro-batch `micro_batch` (numbered over the pipelines) raised in a process of `worker`, of `stage`.

    error: the exception, in a line. samples: which of the data set are in the micro-batch, where that is known. ends:
    no micro-batch after it can be read either.
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
    """A micro-batch that has raised, and is to be tried again. tried: the processes that it raised on, by incarnation,
    with the worker's name then. given: the incarnation that has it in the newest generation."""

    first: FailedOp
    tried: Mapping[str, str]
    raises: int = 1
    given: str = ""

    @property
    def key(self) -> tuple[int, int, int]:
        return self.first.iteration, self.first.micro_batch, self.first.stage


@dataclass(frozen=True)
class BadSamples:
    """left_out: (iteration, micro-batch), as they were found. strikes: by incarnation."""

    suspects: tuple[Suspect, ...] = ()
    left_out: tuple[tuple[int, int], ...] = ()
    strikes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """bad: from here on. text: for people. left_out: (iteration, micro-batch), if it is from now on. halt: why the
    job must end before that iteration."""

    bad: BadSamples
    text: str
    left_out: tuple[int, int] | None = None
    halt: str = ""


@dataclass(frozen=True)
class Blamed:
    """A worker's process that failed at what another one could do. out: it is taken out."""

    worker: str
    incarnation: str
    text: str
    out: bool


def raised(bad: BadSamples, report: FailedOp, peers: Mapping[str, str], *, skip: bool, limit: int) -> Finding:
    """What follows from an exception. peers: the living processes of the stage, incarnation by worker. skip: leave out
    what is the data's fault; limit: so often."""
    found = f"{report.what}: {report.worker} raised {report.error}"
    if (report.iteration, report.micro_batch) in bad.left_out:
        return Finding(bad, found)  # said before everybody knew
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
    """Who does whose part of the plan in a new generation, so that other workers try what is suspect; and who that is.

    Two swap their parts; where that gives one what it has failed at, too, one does both, and the other none.

    owner: (micro-batch, stage) to the worker that the plan has run it. living: incarnation by worker.
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
            # All, or the oldest with as many of the others as can be.
            score = sum(fits) + len(fits) * fits[0]
            if score > most:
                best, most = parts, score
        runs |= best
        by = {part: worker for worker, mine in best.items() for part in mine}
        given |= {key: living.get(by.get(worker, worker), "") for key, worker in planned.items()}
    suspects = tuple(replace(s, given=given[s.key]) for s in bad.suspects)
    return replace(bad, suspects=suspects), tuple(sorted(runs.items()))


def _ways(owners: Iterable[str], living: Mapping[str, str]) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """Worker to the parts of the plan that it does, where that is not just its own; the ones that cost least first."""
    yield {}
    pairs = [(one, other) for one in owners for other in _of_stage(one, living) if other != one]
    yield from ({one: (other,), other: (one,)} for one, other in pairs)
    for one, other in pairs:
        yield {one: (), other: (other, one)}
        yield {other: (), one: (one, other)}


def committed(bad: BadSamples, iterations: int, living: Mapping[str, str]) -> tuple[BadSamples, tuple[Blamed, ...]]:
    """So many iterations are committed: what was suspect in them has succeeded, and who failed at it is at fault.

    living: incarnation by worker.
    """
    done = [s for s in bad.suspects if s.first.iteration < iterations]
    if not done:
        return bad, ()
    names = {incarnation: worker for worker, incarnation in living.items()}
    # Of those that are gone nobody counts any more.
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
