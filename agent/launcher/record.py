"""The run's record: which iterations are committed, with which loss, and how each failure went.

RunRecord only keeps books: the launcher gives it the messages of all workers, and writes what it returns. An iteration
is committed when every living worker has taken its step. From then on no agreement between workers can go back before
it (see agent.workers.recovery), so it is recorded exactly once. The lines of the record as sentences are at the end.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from openrecycle.agent.messages.protocol import LONGEST_MS, Iteration, NamedWorker, Recovery, Restart
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import count, counts

UNUSUAL, LOOKED_AT = 3, 20
"""DataWait passes over the first UNUSUAL iterations of a run, and looks at the next LOOKED_AT."""
LONG_WAIT = 0.1
"""The share of an iteration from which on waiting for data is long."""
_MS = 1e6
REMEMBERED = 4096
"""Losses kept, to compare with when iterations are run again from a checkpoint."""
LEFT_OUT = "a worker ended, or the members of the job changed, before all of its shares were written"
"""What is said of a checkpoint that was due and that no worker has reported."""


class DivergedError(RuntimeError):
    """Peers differ that must be equal, so the run's numbers can't be trusted."""


@dataclass
class _RecordedFailure:
    worker: Worker
    died_at: int
    detected_at: int
    known: bool
    """Whether the moment of death is known; otherwise only the moment when it was seen is."""
    generation: int = 0
    """The first generation without the worker; 0 until that opens."""


@dataclass
class _Progress:
    committed: int = 0
    left_at: int = 0
    formed_generation: int = 0
    formed_at: int = 0
    committed_at: dict[int, int] = field(default_factory=dict)
    sha256: str | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation after `iteration` iterations. loss, metrics: means over all micro-batches that are evaluated."""

    iteration: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, iteration: int, values: Mapping[str, str]) -> EvaluationResult:
        """values: the loss and the metrics by name, as hexadecimal floats."""
        numbers = {name: float.fromhex(value) for name, value in values.items()}
        return cls(iteration, numbers.pop("loss"), numbers)

    @property
    def line(self) -> dict[str, Any]:
        """The record's line. `of` reads its values."""
        values = {"loss": self.loss, **self.metrics}
        return {"iteration": self.iteration, "values": {name: value.hex() for name, value in values.items()}}


@dataclass(frozen=True)
class RecordedProgress:
    """What became certain with a message: iterations, evaluations, norms of gradients, and survived failures. unknown:
    committed iterations whose loss no living worker knows; they are in no record."""

    iterations: tuple[Iteration, ...] = ()
    unknown: tuple[Iteration, ...] = ()
    evaluations: tuple[EvaluationResult, ...] = ()
    gradient_norms: tuple[tuple[int, str], ...] = ()
    recoveries: tuple[Recovery, ...] = ()


class RunRecord:
    """Collects what workers report of a run. Times are monotonic nanoseconds of this machine's clock.

    stages: of the job. committed: the iterations in the checkpoint with which the run begins. exact: an iteration that
    is done again has the same loss to the last bit. That is not so in fast mode, where sums are then made in another
    order.
    """

    def __init__(self, stages: int, started_at: int, *, committed: int = 0, exact: bool = True) -> None:
        self._stages, self._exact = stages, exact
        self._joining: set[Worker] = set()
        """Members that take their state from a peer. The others do not wait for them."""
        self._workers: dict[Worker, _Progress] = {}
        self._living: frozenset[Worker] = frozenset()
        self._generation = 0
        self._losses: dict[int, tuple[int, str]] = {}
        """By iteration: the generation in which it was done, and the loss as a hexadecimal float."""
        self._changed: dict[int, int] = {}
        """Iterations of which a micro-batch was left out, each with the newest generation that did not know of that."""
        self._learning_rates: dict[int, float | None] = {}
        self._data_seconds: dict[int, float] = {}
        self._recorded: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._failures: list[_RecordedFailure] = []
        self._deaths: dict[Worker, int] = {}
        self._evicted: dict[Worker, int] = {}
        self._hashes: dict[tuple[int, tuple[int, int, bool]], dict[Worker, str]] = {}
        """Hashes of parameters, by (stage, point of the run) and worker; see `compared`."""
        self._last_at = started_at
        self._before: tuple[int, int, int] | None = None
        """(after, generation, living): the generation before the newest still trains through iteration `after`."""
        self.committed = committed
        self._evaluations: dict[int, EvaluationResult] = {}
        """By iteration, evaluations that wait until the iterations before them are recorded."""
        self._norms: dict[int, str] = {}
        self._normed = committed - 1
        """The newest iteration whose gradient's norm is recorded."""
        self._evaluated = 0
        """The newest iteration whose evaluation is recorded."""
        self._newest_checkpoint = committed
        """The newest checkpoint that is known to be whole, or the one with which the run begins."""
        self._unwritten: set[int] = set()
        """Later checkpoints that can't be written, as has been reported."""
        self.skipped: dict[int, tuple[int, ...]] = {}
        """By iteration, the micro-batches that are left out of it."""

    # -- what happens -------------------------------------------------------------------------

    def generation_opened(
        self,
        generation: int,
        living: Iterable[Worker],
        at: int,
        after: int | None = None,
        joining: Collection[Worker] = (),
    ) -> RecordedProgress:
        """Records that a new generation is in force. after: the iteration through which the previous generation goes on
        first, while the newcomers wait; None: it stops at once. joining: those of `living` whose process is not the one
        that an earlier generation had at that place."""
        if self._generation == 0:
            self._last_at = at
        self._before = None if after is None else (after, self._generation, len(self._living))
        previous, self._living = self._living, frozenset(living)
        self._generation = generation
        self._joining = {w for w in joining if w in self._living}
        if after is not None:
            for worker in (self._living - previous) | set(joining):
                # A newcomer takes over what the others will have committed, and until then must hold up nothing.
                self._workers[worker] = _Progress(committed=after + 1)
        # Workers that are out while their process still runs: the launcher ends it, and calls `died` then.
        ended = {f.worker for f in self._failures if not f.generation}
        self._evicted |= dict.fromkeys(previous - self._living - ended, generation)
        for failure in self._failures:
            if not failure.generation and (failure.worker not in self._living or failure.worker in joining):
                failure.generation = generation
        for worker in self._living:
            # A worker that was done is not any more: the one that was to write the stage's weights may be dead.
            self._workers.setdefault(worker, _Progress()).sha256 = None
        return self._settle()

    @property
    def newest(self) -> int:
        """The iteration that the foremost worker is in, as far as is known."""
        return max((self._of(w).committed for w in self._living), default=0)

    @property
    def common(self) -> int | None:
        """How many iterations every living worker has committed, as far as is known; None while they differ."""
        counts = {self._of(w).committed for w in self._living}
        return counts.pop() if len(counts) == 1 else None

    @property
    def generation(self) -> int:
        """The number of the newest generation."""
        return self._generation

    @property
    def formed_by_all(self) -> bool:
        """Whether all members have formed in the newest generation, except those that still take their state."""
        return all(self._of(w).formed_generation == self._generation for w in self._living - self._joining)

    def dying(self, worker: Worker, at: int) -> None:
        """Notes the moment of a death on purpose, which the launcher is about to see."""
        self._deaths[worker] = at

    def died(self, worker: Worker, detected_at: int) -> bool:
        """Records the end of a process, if it was a member. Returns whether it died on purpose, as `dying` has said."""
        died_at = self._deaths.pop(worker, None)
        generation = self._evicted.pop(worker, 0)
        self._workers.pop(worker, None)
        if generation or worker in self._living:
            since = detected_at if died_at is None else died_at
            self._failures.append(_RecordedFailure(worker, since, detected_at, died_at is not None, generation))
        return died_at is not None

    @property
    def unsaid(self) -> list[Worker]:
        """Workers that died on purpose and are in no recovery: after the last iteration none follows."""
        return sorted({*self._deaths, *(failure.worker for failure in self._failures if failure.known)})

    def moved(self, moves: Mapping[Worker, Worker]) -> None:
        """Workers give up their places and their state. moves: by the place that its process has from now on, where
        each was."""
        for place in (*moves.keys(), *moves.values()):
            self._workers.pop(place, None)
        self._living = self._living - {*moves.values()} | {*moves}

    def released(self, worker: Worker) -> None:
        """The worker is out of the newest generation because it was asked to leave, which is no failure."""
        self._workers.pop(worker, None)
        self._evicted.pop(worker, None)

    def left(self, worker: Worker, at: int) -> None:
        """The worker has abandoned the iteration in flight."""
        self._of(worker).left_at = at

    def formed(self, worker: Worker, generation: int, iteration: int, at: int) -> RecordedProgress:
        """The worker is in the groups of `generation` and goes on with `iteration`."""
        progress = self._of(worker)
        progress.formed_generation, progress.formed_at, progress.committed = generation, at, iteration
        self._joining.discard(worker)
        if iteration < self._newest_checkpoint:  # all went back to an older one, the newest being damaged
            self._newest_checkpoint, self._unwritten = iteration, set()
        progress.committed_at = {i: t for i, t in progress.committed_at.items() if i < iteration}
        return self._settle()

    def committed_by(
        self,
        worker: Worker,
        iteration: int,
        loss: str,
        at: int,
        skipped: Collection[int] = (),
        learning_rate: float | None = None,
        data_seconds: float = 0.0,
    ) -> RecordedProgress:
        """The worker has taken the step of `iteration`. Raises DivergedError when peers disagree about the loss.

        loss, learning_rate: they count on the last stage only; the loss is a hexadecimal float. skipped: micro-batches
        that the worker left out of its sum (see agent.messages.protocol.Iteration). data_seconds: how long it waited
        for data.
        """
        progress = self._of(worker)
        progress.committed = iteration + 1
        if iteration >= self.committed:  # an earlier one is done again, and was recorded the first time
            progress.committed_at[iteration] = at
            self._data_seconds[iteration] = max(data_seconds, self._data_seconds.get(iteration, 0.0))
        if skipped:
            self.skipped[iteration] = tuple(sorted({*self.skipped.get(iteration, ()), *skipped}))
        if worker.stage == self._stages - 1:
            expected = self._loss_of(iteration, loss, progress.formed_generation)
            if iteration >= self.committed:
                self._learning_rates[iteration] = learning_rate
            if expected != loss:
                raise DivergedError(f"iteration {iteration}: {worker} has loss {loss}, another worker had {expected}")
        return self._settle()

    def evaluated(self, iteration: int, values: Mapping[str, str]) -> RecordedProgress:
        """A worker of the last stage reports the evaluation after so many iterations. Only the first report counts: its
        peers say the same, and after a failure all may say it again. values: see EvaluationResult.of."""
        if iteration > self._evaluated:
            self._evaluations.setdefault(iteration, EvaluationResult.of(iteration, values))
        return self._settle()

    def normed(self, iteration: int, norm: str) -> RecordedProgress:
        """A worker of the last stage reports the norm of an iteration's gradients, as a hexadecimal float. All report
        the same."""
        if iteration > self._normed:
            self._norms.setdefault(iteration, norm)
        return self._settle()

    def checkpoint(
        self, iteration: int, problem: str | None, every: int, there: Callable[[int], bool]
    ) -> tuple[tuple[int, str | None], ...]:
        """A worker reports that the checkpoint of so many iterations is whole, or why it is not.

        Returns (iteration, problem) of each checkpoint that there is something to say of, once for each. A checkpoint
        that nobody reports, since a worker died before its share was written, is found when the next one is whole. The
        last checkpoint may be written twice, when a worker comes after the last iteration.

        problem: None: it is whole. every: iterations from one checkpoint to the next. there: says whether a checkpoint
        is in the folder.
        """
        if iteration <= self._newest_checkpoint or (problem is not None and iteration in self._unwritten):
            return ()
        if problem is not None:
            # Said once: where one worker finds no room for its share, others mostly find none either.
            self._unwritten.add(iteration)
            return ((iteration, problem),)
        first = self._newest_checkpoint - self._newest_checkpoint % every + every
        untold = [i for i in range(first, iteration, every) if i not in self._unwritten]
        self._newest_checkpoint, self._unwritten = iteration, set()
        # The worker that made a checkpoint whole may have died before it could report that.
        return (*((i, None if there(i) else LEFT_OUT) for i in untold), (iteration, None))

    def left_out(self, iteration: int, micro_batch: int) -> None:
        """The iteration is done again without this micro-batch, and so has another loss."""
        self.skipped[iteration] = tuple(sorted({*self.skipped.get(iteration, ()), micro_batch}))
        self._changed[iteration] = self._generation

    def _loss_of(self, iteration: int, loss: str, generation: int) -> str:
        """Returns the loss that a worker of that generation must have: the first one that was reported, even if a
        checkpoint has led back behind what is recorded. If the loss may change when the iteration is done again, that
        of the newest generation counts."""
        if iteration < self.committed:
            again = self._exact and iteration not in self._changed
            return dict(self._recorded).get(iteration, loss) if again else loss
        known = self._losses.get(iteration)
        if known is None:
            self._losses[iteration] = generation, loss
            return loss
        older, newer = sorted((known[0], generation))
        if older == newer or (self._exact and older > self._changed.get(iteration, -1)):
            return known[1]
        if generation == newer:
            self._losses[iteration] = generation, loss
        return loss

    def done(self, worker: Worker, sha256: str, generation: int) -> None:
        """The worker has no iteration left in this generation. sha256: the hash of its stage's parameters; "": it did
        not have all of them yet."""
        if generation == self._generation:
            self._of(worker).sha256 = sha256

    # -- another launcher goes on ---------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Returns the state as JSON, without the losses of recorded iterations, which the record's lines have."""
        return {name: form.dump_python(getattr(self, name), mode="json") for name, form in _FORMS.items()}

    @classmethod
    def restored(
        cls, stages: int, document: Mapping[str, Any], recorded: Iterable[tuple[int, str]], ahead: int
    ) -> RunRecord:
        """Returns a record from what another one has `saved`. Raises ValueError for a document of another form.

        recorded: iterations and their losses. ahead: nanoseconds by which the clock of its times is ahead of this
        machine's.
        """
        record = cls(stages, 0)
        for name, form in _FORMS.items():
            setattr(record, name, form.validate_python(document[name]))
        record._recorded.extend(recorded)
        record._last_at -= ahead
        record._deaths = {w: at - ahead for w, at in record._deaths.items()}
        for failure in record._failures:
            failure.died_at -= ahead
            failure.detected_at -= ahead
        for progress in record._workers.values():
            progress.left_at -= ahead if progress.left_at else 0
            progress.formed_at -= ahead if progress.formed_at else 0
            progress.committed_at = {i: at - ahead for i, at in progress.committed_at.items()}
        return record

    # -- what is certain ----------------------------------------------------------------------

    def finished(self, iterations: int) -> bool:
        """Says whether all iterations are committed and every living worker has handed in its hash. A job that begins
        with all iterations in a checkpoint has committed them before it has any worker."""
        handed_in = [self._of(w).sha256 is not None for w in self._living]
        return self.committed >= iterations and bool(handed_in) and all(handed_in)

    def compared(self, worker: Worker, generation: int, iteration: int, settled: bool | None, sha256: str) -> None:
        """Compares the hash of a worker's parameters, before `iteration`, with those of its peers. Raises DivergedError
        when they differ.

        settled: whether the validation of the last step was known. Peers at the same point of the same generation have
        the same answer. None: only some of the worker's ranks knew it, so its parameters are compared with nobody's.
        """
        if settled is None:
            return
        point = (generation, iteration, settled)
        hashes = self._hashes.setdefault((worker.stage, point), {})
        hashes[worker] = sha256
        _check_alike(worker.stage, iteration, hashes)
        while len(self._hashes) > REMEMBERED:
            del self._hashes[next(iter(self._hashes))]

    def final(self) -> dict[str, Any]:
        """Returns the record's last line. Raises DivergedError when peers of a stage differ.

        parameters_sha256: the hash of the stages' own hashes, in order.
        """
        digest = hashlib.sha256()
        for stage in range(self._stages):
            known = {w: self._of(w).sha256 or "" for w in sorted(self._living) if w.stage == stage}
            hashes = {w: sha256 for w, sha256 in known.items() if sha256}
            _check_alike(stage, self.committed, hashes)
            digest.update(bytes.fromhex(next(iter(hashes.values())) or ""))
        return {"parameters_sha256": digest.hexdigest(), "iterations": self.committed}

    def _of(self, worker: Worker) -> _Progress:
        return self._workers.setdefault(worker, _Progress())

    def _settle(self) -> RecordedProgress:
        """Returns what has become certain since the last call."""
        if not self._living:
            return RecordedProgress()
        certain = min(self._of(w).committed for w in self._living)
        iterations, unknown = list[Iteration](), list[Iteration]()
        while self.committed < certain:
            i = self.committed
            at = max(self._of(w).committed_at.get(i, self._last_at) for w in self._living)
            _, loss = self._losses.pop(i, (0, ""))
            rate, waited = self._learning_rates.pop(i, None), self._data_seconds.pop(i, 0.0)
            generation, living = self._generation, len(self._living)
            if self._before is not None and i <= self._before[0]:
                _, generation, living = self._before
            done = Iteration(
                iteration=i,
                loss=_loss(loss or "nan"),
                loss_hex=loss or "nan",
                seconds=max(0.0, (at - self._last_at) / 1e9),
                generation=generation,
                living=living,
                skipped=self.skipped.get(i, ()),
                learning_rate=rate,
                data_seconds=waited,
            )
            if loss:
                iterations.append(done)
                self._recorded.append((i, loss))
            else:
                # All have it from a checkpoint, or from a peer; and its last stage, which is gone, could not say it any
                # more, as when the launcher of its node stood still.
                unknown.append(done)
            self._last_at = at
            self.committed += 1
            for progress in self._workers.values():
                progress.committed_at.pop(i, None)
        norms = [(i, self._norms.pop(i)) for i in sorted(self._norms) if i < self.committed]
        self._normed = max([self._normed, *(i for i, _ in norms)])
        due = [self._evaluations.pop(i) for i in sorted(self._evaluations) if i <= self.committed]
        self._evaluated = max([self._evaluated, *(evaluation.iteration for evaluation in due)])
        survived = self._survived() if iterations else ()
        return RecordedProgress(tuple(iterations), tuple(unknown), tuple(due), tuple(norms), survived)

    def _survived(self) -> tuple[Recovery, ...]:
        """Returns the failures after which all have committed an iteration in a later generation. That is not always
        the newest one: it may begin some iterations later, or never if the job ends before."""
        members = [self._of(w) for w in self._living - self._joining]
        formed_by_all = min((p.formed_generation for p in members), default=0)
        done = [f for f in self._failures if 0 < f.generation <= formed_by_all]
        if not done:
            return ()
        self._failures = [f for f in self._failures if f not in done]
        # Workers may have left and formed again for a later generation, after a second death. The times that are asked
        # for are not later than the last iteration.
        left = min(self._last_at, max(p.left_at for p in members))
        formed = min(self._last_at, max(p.formed_at for p in members))
        return tuple(
            Recovery(
                worker=str(f.worker),
                generation=f.generation,
                detected_ms=_milliseconds(f.detected_at - f.died_at),
                unblocked_ms=_milliseconds(left - f.died_at),
                reformed_ms=_milliseconds(formed - f.died_at),
                resumed_ms=_milliseconds(self._last_at - f.died_at),
                death_known=f.known,
            )
            for f in done
        )


def _milliseconds(nanoseconds: int) -> float:
    """Returns milliseconds within the bounds of a message: at most twelve days, as when all workers were suspended."""
    return min(max(0.0, nanoseconds / _MS), LONGEST_MS)


@dataclass
class DataWait:
    """Warns once when workers wait long for their data. Looks at the first iterations, without the very first ones, in
    which everything is slow.

    passed: iterations so far. seconds, waited: how long those that were looked at took, and waited for data.
    """

    passed: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def after(self, iteration: Iteration) -> str | None:
        self.passed += 1
        if not UNUSUAL < self.passed <= UNUSUAL + LOOKED_AT:
            return None
        self.seconds += iteration.seconds
        self.waited += min(iteration.data_seconds, iteration.seconds)
        if self.passed < UNUSUAL + LOOKED_AT or self.waited <= LONG_WAIT * self.seconds:
            return None
        return (
            f"workers wait {self.waited / self.seconds:.0%} of the time for their data; Data(prefetch=4) reads it "
            "beside the training, which helps where a processor is free"
        )


_FORMS: dict[str, TypeAdapter[Any]] = {
    "_joining": TypeAdapter(set[NamedWorker]),
    "_workers": TypeAdapter(dict[NamedWorker, _Progress]),
    "_living": TypeAdapter(frozenset[NamedWorker]),
    "_generation": TypeAdapter(int),
    "_exact": TypeAdapter(bool),
    "_losses": TypeAdapter(dict[int, tuple[int, str]]),
    "_changed": TypeAdapter(dict[int, int]),
    "_learning_rates": TypeAdapter(dict[int, float | None]),
    "_data_seconds": TypeAdapter(dict[int, float]),
    "_failures": TypeAdapter(list[_RecordedFailure]),
    "_deaths": TypeAdapter(dict[NamedWorker, int]),
    "_evicted": TypeAdapter(dict[NamedWorker, int]),
    "_last_at": TypeAdapter(int),
    "_before": TypeAdapter(tuple[int, int, int] | None),
    "committed": TypeAdapter(int),
    "_evaluations": TypeAdapter(dict[int, EvaluationResult]),
    "_norms": TypeAdapter(dict[int, str]),
    "_normed": TypeAdapter(int),
    "_evaluated": TypeAdapter(int),
    "_newest_checkpoint": TypeAdapter(int),
    "_unwritten": TypeAdapter(set[int]),
    "skipped": TypeAdapter(dict[int, tuple[int, ...]]),
}
"""The attributes of a RunRecord that `saved` has, and how each is written. Hashes of parameters are not among them:
each launcher compares those that it hears itself."""


def _check_alike(stage: int, iterations: int, hashes: Mapping[Worker, str]) -> None:
    """Raises DivergedError when the hashes of the parameters of a stage's workers differ after so many iterations."""
    if len(set(hashes.values())) > 1:
        groups: dict[str, list[str]] = {}
        for worker in sorted(hashes):
            groups.setdefault(hashes[worker], []).append(str(worker))
        when = f"after {count(iterations, 'iteration')}" if iterations else "before the first iteration"
        why = (
            "does a step depend on something besides seeds, parameters and optimizer state (a clock, a file, a "
            "generator of its own)?"
        )
        if not iterations:
            why = "do initial parameters come out of a generator of their own, or of something that differs by process?"
        raise DivergedError(
            f"{when} the peers of stage {stage} have different parameters: "
            f"{' and '.join(', '.join(group) for group in groups.values())} differ; {why}"
        )


# -- its lines as sentences for people ---------------------------------------------------------------

WARNING = "warning: "
"""The beginning of a sentence, for a terminal, on something that is wrong and is no line of the record."""


def sentence_of(line: dict[str, Any]) -> str:
    """Returns what a terminal or a log shows for a line of the record."""
    if "validation" in line:
        return _validation(**line["validation"])
    for kind in ("warning", "said"):
        if kind in line:
            return str(line[kind])
    if "raised" in line:
        return "\n".join([line["raised"]["text"], *line["raised"]["traceback"]])
    if "checkpoint" in line:
        return _checkpoint(**line["checkpoint"])
    if "failure" in line:
        return _recovery(Recovery(**line["failure"]))
    if "gradient_norm" in line:
        norm = line["gradient_norm"]
        return f"iteration {norm['iteration']}: gradient norm {float.fromhex(norm['norm']):.4g}"
    if "evaluation" in line:
        return _evaluation(**line["evaluation"])
    if "hand_over" in line:
        return f"{line['hand_over']['worker']} {line['hand_over']['text']}"
    if "move" in line:
        move = line["move"]
        return f"generation {move['generation']}: {move['worker']} takes the place of {move['to']} ({move['reason']})"
    if "left" in line:
        left = line["left"]
        return f"generation {left['generation']}: {left['worker']} leaves ({left['reason']})"
    if "restart" in line:
        return _restart(**line["restart"])
    if "relayout" in line:
        return _relayout(**line["relayout"])
    if "final" in line:
        return f"parameters {line['final']['parameters_sha256']}"
    loss = float.fromhex(line["loss"])
    skipped = ", ".join(map(str, line.get("skipped") or ()))
    return (
        f"iteration {line['iteration']:>5}  loss {loss:.4f}  {1000 * line['seconds']:7.1f} ms  "
        f"generation {line['generation']}  {line['living']} workers"
    ) + (f"  without micro-batches {skipped} (counted over all pipelines)" if skipped else "")


def is_remark(line: dict[str, Any]) -> bool:
    """Says whether a line is about something out of the ordinary."""
    if "validation" in line:  # clipped gradients are ordinary, even if they were found after the step
        return is_warning(line)
    return not any(key in line for key in ("iteration", "gradient_norm", "final"))


def is_warning(line: dict[str, Any]) -> bool:
    """Says whether a line is about something that is or was wrong. For a sentence that is `said` beside the record, its
    beginning tells."""
    if "validation" in line:
        return line["validation"]["coefficient"] is None
    if "said" in line or "checkpoint" in line:
        return sentence_of(line).startswith(WARNING)
    return any(key in line for key in ("warning", "raised", "failure", "restart"))


def iteration_line(iteration: Iteration) -> dict[str, Any]:
    """Returns a committed iteration as a line of the record, with the loss as a hexadecimal float."""
    rest = iteration.model_dump(mode="json", exclude={"loss_hex"})
    return rest | {"loss": iteration.loss_hex, "seconds": round(iteration.seconds, 6)}


def iteration_of(line: dict[str, Any]) -> Iteration:
    """Returns the iteration from which `iteration_line` has made the line."""
    return Iteration(loss_hex=line["loss"], **(line | {"loss": _loss(line["loss"])}))


def _loss(hexadecimal: str) -> float:
    """Returns a loss that is a number or NaN: a mean that does not fit into a float is none."""
    loss = float.fromhex(hexadecimal)
    return math.nan if math.isinf(loss) else loss


def _evaluation(iteration: int, values: dict[str, str]) -> str:
    means = (f"{name} {float.fromhex(value):.4f}" for name, value in values.items())
    return f"evaluation after {iteration} iterations: {', '.join(means)}"


def _validation(iteration: int, coefficient: float | None, redone: bool) -> str:
    if coefficient is None:
        what = "a gradient was NaN, infinite or out of range; its update is skipped"
        return f"iteration {iteration}: {what}" + ("; it had been made already and was rolled back" if redone else "")
    what = f"clipped to {coefficient:.3g} of their length" if coefficient < 1 else "not clipped"
    again = "; the step is taken again, to the same result" if redone else ""
    return f"iteration {iteration}: the gradients are {what}{again}"


def _relayout(
    generation: int, iteration: int, partition: list[int], moved_layers: int, stall_ms: float, reason: str
) -> str:
    # If a job ends early, the layers may reach their stages after the last iteration.
    return (
        f"generation {generation}: layers per stage are {counts(partition)} after {count(iteration, 'iteration')}; "
        f"{moved_layers} moved in {stall_ms:.0f} ms ({reason})"
    )


def _checkpoint(iteration: int, problem: str | None) -> str:
    if problem is None:
        return f"checkpoint of iteration {iteration} is written"
    return f"{WARNING}no checkpoint of iteration {iteration}: {problem}; training goes on"


def _restart(worker: str, reason: str, **about: Any) -> str:
    return f"{worker} {reason}; it is {Restart(**about).words}"


def _recovery(recovery: Recovery) -> str:
    free, rest = f"{recovery.unblocked_ms:.0f} ms", f"re-formed after {recovery.reformed_ms:.0f} ms"
    if recovery.death_known:
        steps = f"seen after {recovery.detected_ms:.0f} ms, survivors free after {free}, {rest}"
    else:
        steps = f"survivors free {free} after that was seen, {rest}"
    return f"{recovery.worker} died: {steps}, the redone iteration committed after {recovery.resumed_ms:.0f} ms"
