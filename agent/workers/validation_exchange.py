"""How stages exchange what the validation of an iteration's gradients needs, and what a worker does with the result.

Every worker needs the few numbers (a Slot) of every stage. All living peers of a stage hold the same reduced gradients,
so any of them can send them. In each pipeline the stages send theirs to each other directly; a pipeline without a
worker of some stage gets them from a peer of that stage. This takes one hop and no collective: (stages - 1) messages
per worker of 24 bytes, and of 8 more for each layer if gradients are clipped. They travel during the next iteration's
warm-up.

With its share of the validation, a stage says how many of its workers still take their state from a peer. So all
workers learn at the same iteration that none does any more, and change to the plan that counts on all of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from openrecycle.agent.config.options import Optimization
from openrecycle.agent.stages.gradients import MOST_CHANGE, MOST_GRADIENT
from openrecycle.agent.stages.optimizer import NonFiniteError, StageOptimizer
from openrecycle.agent.stages.post_validation import MAX_SKIPPED, Slot, ValidationResult, judge
from openrecycle.agent.transport.communicator import Groups
from openrecycle.agent.transport.group import PendingTransfer, TransferError, from_bits, to_bits
from openrecycle.agent.workers import tags
from openrecycle.planner.jobs.job import Worker, WorkerRank

_NONE = math.nan
"""Stands for None in messages: as the coefficient of a skipped update, and as a norm that is not known."""


def tellers(living: Iterable[Worker], pipeline: int) -> dict[int, Worker]:
    """Returns, for each stage, the living worker of it that sends its slot to the workers of `pipeline`."""
    by_stage: dict[int, list[Worker]] = {}
    for worker in sorted(living):
        by_stage.setdefault(worker.stage, []).append(worker)
    return {
        stage: next((w for w in peers if w.pipeline == pipeline), peers[pipeline % len(peers)])
        for stage, peers in by_stage.items()
    }


@dataclass(frozen=True)
class _Paths:
    """One worker's part in a generation. tellers: for each other stage, the worker that sends that stage's slot.
    listeners: the workers to which it sends the slot of its own stage."""

    stage: int
    tellers: Mapping[int, Worker]
    listeners: tuple[Worker, ...]

    @classmethod
    def of(cls, me: Worker, living: Sequence[Worker]) -> _Paths:
        told_by_me = {p for p in {w.pipeline for w in living} if tellers(living, p)[me.stage] == me}
        mine = {stage: teller for stage, teller in tellers(living, me.pipeline).items() if stage != me.stage}
        return cls(me.stage, mine, tuple(w for w in living if w.stage != me.stage and w.pipeline in told_by_me))


def lost_validation() -> TransferError:
    return TransferError("the validation of the last step can't arrive any more")


class _IterationExchange:
    """The slots of one iteration, which are being exchanged."""

    def __init__(
        self, groups: Groups, paths: _Paths, norms: Sequence[int], iteration: int, slot: Slot, incomplete: int
    ) -> None:
        """norms: how many norms each stage sends."""
        self.iteration = iteration
        self.incomplete = incomplete
        """How many workers take their state from a peer: of this stage, and of all stages once `wait` has returned."""
        self._slots: dict[int, Slot] = {paths.stage: slot}
        self._mark = float(iteration)
        tag = tags.in_iteration(tags.VALIDATION, iteration)
        self._coming = {
            stage: groups.receive(teller, torch.full((norms[stage] + 3,), -1.0, dtype=torch.float64), tag)
            for stage, teller in paths.tellers.items()
        }
        numbers = [*slot.squared_norms, float(slot.rejected), float(incomplete), self._mark]
        mine = torch.tensor(numbers, dtype=torch.float64)
        self.sent = [groups.send(worker, mine, tag) for worker in paths.listeners]

    def arrived(self) -> bool:
        """Says whether `wait` would return at once. It looks at the buffers, and never waits with a time-out: a wait
        that times out would close the connection."""
        return all(float(pending.tensor[-1]) == self._mark for pending in self._coming.values())

    def wait(self) -> list[Slot]:
        """Waits for all stages' slots, and returns them in order. Raises TransferError."""
        for stage, pending in self._coming.items():
            *norms, rejected, incomplete, _ = pending.wait().tolist()
            self._slots[stage] = Slot(tuple(norms), int(rejected))
            self.incomplete += int(incomplete)
        return [self._slots[stage] for stage in sorted(self._slots)]


class Steps:
    """Takes the steps of one worker's stage, each as the validations so far advise, and corrects a step that a later
    validation overturns.

    partition: layers per stage. notable: called with (iteration, validation, redone) for a validation that skipped an
    update or came too late (redone: the step had been taken in another way); it is the same on all workers. waiting:
    a context that is entered while it waits for peers. normed: called with (iteration, norm) if gradients are clipped,
    once their norm is known.
    """

    def __init__(
        self,
        me: Worker,
        optimization: Optimization,
        optimizer: StageOptimizer,
        partition: Sequence[int],
        notable: Callable[[int, ValidationResult, bool], None],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        normed: Callable[[int, float], None] = lambda _iteration, _norm: None,
    ) -> None:
        self._waiting, self._normed = waiting, normed
        self._me, self._optimization, self._optimizer, self._notable = me, optimization, optimizer, notable
        self._beside: Sequence[StageOptimizer] = ()
        """The optimizers of layers that come to this worker: they take every step that it takes."""
        self._norms = tuple(partition) if optimization.clip_norm is not None else (0,) * len(partition)
        """How many norms each stage sends."""
        self._groups: Groups | None = None
        self._paths = _Paths(me.stage, {}, ())
        self._exchange: _IterationExchange | None = None
        self._sent: deque[tuple[int, list[PendingTransfer]]] = deque()
        self.incomplete = 0
        """How many workers took their state from a peer, in the newest iteration whose validation is known."""
        self._complete_since: int | None = None
        """The first iteration of the generation in which no worker took its state from a peer any more, as far as this
        worker knows. All workers know it when they begin the iteration after the next."""

    def take(self, incomplete: int = 0, *, by_all: bool = True) -> float:
        """Takes the step of the iteration whose gradients have just been reduced, and returns its loss.

        incomplete: how many workers of the stage take their state from a peer. by_all: all workers of the stage have
        reduced. Otherwise nothing is sent to the other stages, since they take a message to mean that.

        A worker that has the reduced gradients takes its step whatever has broken (see agent.workers.recovery). If the
        other stages' shares do not come, it steps as if they were clean. Raises NonFiniteError, with the stage as it
        was before, when the job must end.
        """
        assert self._groups is not None
        optimizer, iteration = self._optimizer, self._optimizer.committed
        slot = optimizer.measure()
        ranks = self._groups.ranks
        ahead_of_validation = not self._optimization.synchronous and optimizer.post_validation.optimistic
        if not by_all:
            return self._step(None, slot)
        try:
            told = slot
            if ranks.size > 1:
                # All peers of each rank have reduced by now, so what is sent is true of all ranks.
                numbers = [float(incomplete), float(slot.rejected), *slot.squared_norms]
                rows = ranks.gather(torch.tensor(numbers, dtype=torch.float64)).tolist()
                incomplete = int(max(row[0] for row in rows))
                told = _whole([Slot(tuple(norms), int(rejected)) for _, rejected, *norms in rows])
            exchange = _IterationExchange(self._groups, self._paths, self._norms, iteration, told, incomplete)
            self._sent.append((iteration, exchange.sent))
            if ahead_of_validation:
                self._exchange = exchange
                return self._step(None, slot)
            validation = judge(self._slots_of(exchange), self._optimization.clip_norm)
        except TransferError:
            return self._step(None, slot)  # the step stays in doubt until the next generation's agreement
        loss = self._step(validation, slot)
        self._heed(validation, redone=False)
        return loss

    def _step(self, validation: ValidationResult | None, slot: Slot) -> float:
        for coming in self._beside:
            coming.step(validation)
        return self._optimizer.step(validation, slot)

    def overturned(self) -> bool:
        """Says whether the validation of the last step has arrived and has changed that step. Never waits.

        If so, the iteration in flight is of parameters that no worker has any more. Raises as `take`.
        """
        if self._groups is not None and self._groups.ranks.size > 1:
            return False  # all ranks of a worker must leave an iteration at the same op: they do in `settle`
        return self._exchange is not None and self._exchange.arrived() and self.settle()

    @property
    def in_doubt(self) -> bool:
        """Whether a step was taken whose validation can't arrive any more in this generation."""
        return not self._optimizer.settled and self._exchange is None

    def settle(self) -> bool:
        """Waits for the validation of the last step, and says whether it has changed that step. Raises as `take`, or
        TransferError."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            if not self._optimizer.settled:
                raise lost_validation()
            return False
        return self._settle_by(judge(self._slots_of(exchange), self._optimization.clip_norm))

    def counts_on_all(self, iteration: int) -> bool:
        """Says whether `iteration`, which is about to begin, is run by a plan that counts on every worker. All get the
        same answer: what was sent at the step of an iteration is known to all before their next step."""
        return self._complete_since is not None and iteration >= self._complete_since + 2

    def all_have_state(self, iteration: int) -> None:
        """Notes that all have their state, as all workers have told each other before `iteration`."""
        self._complete_since, self.incomplete = iteration - 2, 0

    def some_lack_state(self) -> None:
        """Notes that layers have begun to move, so that some workers lack state."""
        self._complete_since = None

    def take_along(self, beside: Sequence[StageOptimizer]) -> None:
        """Sets which other optimizers take each step of the stage from here on."""
        self._beside = beside

    @property
    def optimizer(self) -> StageOptimizer:
        return self._optimizer

    def rearrange(self, optimizer: StageOptimizer, partition: Sequence[int]) -> None:
        """Changes to an optimizer with other layers. Called between two iterations, with everything settled."""
        self._optimizer, self._beside = optimizer, ()
        self._norms = tuple(partition) if any(self._norms) else self._norms

    def drain(self) -> None:
        """Settles the last step, and waits until peers have all that was sent. Called only between two iterations."""
        self.settle()
        self._let_go(self._optimizer.committed)

    def abandon(self) -> None:
        """Drops every message. A step that is not settled stays so until the next generation's agreement."""
        self._exchange = None
        self._sent.clear()
        self._groups = None

    # -- a generation begins ----------------------------------------------------------------------

    def numbers(self) -> tuple[int, ...]:
        """Returns what the others must know in an agreement: whether the last step is in doubt; and for the last step
        and the one before, the validation (coefficient and norm) and the slot (rejected, squared norms). There are
        equally many numbers on all workers."""
        optimizer, width = self._optimizer, self._width
        out = [int(not optimizer.settled)]
        for validation, slot in (
            (optimizer.validation, optimizer.slot),
            (optimizer.validation_before, optimizer.slot_before),
        ):
            said = (_NONE if number is None else number for number in (validation.coefficient, validation.norm))
            row = [*map(to_bits, said), slot.rejected]
            row += map(to_bits, slot.squared_norms)
            out += row + [0] * (width - len(row))
        return tuple(out)

    @property
    def _width(self) -> int:
        """How many numbers a validation and a slot have, for the most layers that a stage can have."""
        return 3 + (sum(self._norms) - len(self._norms) + 1 if any(self._norms) else 0)

    def begin(
        self, groups: Groups, living: Sequence[Worker], committed: int, holders: Mapping[WorkerRank, tuple[int, ...]]
    ) -> bool:
        """Takes up a generation's groups, and settles every step of an iteration before `committed`. Returns whether
        that has changed the last step. Raises as `take`.

        All workers that had to roll back to `committed` have done so. holders: for every rank of a worker that goes on
        with its own state, how many iterations it had committed before that, and its `numbers`. A step that is in doubt
        on some of them has been taken by all of them, and all have kept its slot.
        """
        self._groups, self._paths = groups, _Paths.of(self._me, living)
        self._exchange = None
        self._sent.clear()
        self._complete_since = None
        if self._optimizer.settled or WorkerRank(self._me, groups.ranks.rank) not in holders:
            return False
        slots = {}
        for worker, (count, in_doubt, *numbers) in sorted(holders.items()):
            ahead = count > committed
            coefficient, norm, rejected, *bits = numbers[self._width :] if ahead else numbers[: self._width]
            if ahead or not in_doubt:  # it knows the validation; it may have cut the model elsewhere since then
                return self._settle_by(ValidationResult(_known(coefficient), _known(norm)))
            slots[worker.stage] = Slot(tuple(map(from_bits, bits[: self._norms[worker.worker.stage]])), rejected)
        stages = range(1 + max(stage for stage, _ in slots))
        in_order = [_whole([slots[stage, rank] for rank in range(groups.ranks.size)]) for stage in stages]
        return self._settle_by(judge(in_order, self._optimization.clip_norm))

    def _slots_of(self, exchange: _IterationExchange) -> list[Slot]:
        with self._waiting():
            slots = exchange.wait()
        self.incomplete = exchange.incomplete
        if self._complete_since is None and not exchange.incomplete:
            self._complete_since = exchange.iteration
        # What was sent two steps ago has been received, since its receivers have stepped since.
        self._let_go(exchange.iteration - 1)
        return slots

    def _let_go(self, before: int) -> None:
        """Waits until what was sent in iterations before this one has arrived, and forgets it."""
        with self._waiting():
            while self._sent and self._sent[0][0] < before:
                for pending in self._sent.popleft()[1]:
                    pending.wait()

    # -- the validation --------------------------------------------------------------------------

    def _settle_by(self, validation: ValidationResult) -> bool:
        changed = self._optimizer.settle(validation)
        for coming in self._beside:
            coming.settle(validation)
        self._heed(validation, redone=changed)
        return changed

    @property
    def _remedy(self) -> str:
        remedy = "lower the learning rate or check the data"
        if self._optimization.mode == "fast":
            return remedy
        return (
            f"{remedy}; in deterministic mode an element of a gradient must stay below {MOST_GRADIENT:,.0f}, and what "
            f"an iteration adds to one of a buffer, such as a count of tokens, below {MOST_CHANGE:,.0f}"
        )

    def _heed(self, validation: ValidationResult, *, redone: bool) -> None:
        """Does what follows from a validation: reports a skipped or changed update, and ends the job if it must."""
        iteration = self._optimizer.committed - 1
        if validation.coefficient is None:
            what = f"iteration {iteration}: a gradient was NaN, infinite or out of range"
            if self._optimization.non_finite == "stop":
                self._optimizer.roll_back()
                raise NonFiniteError(f"{what}; {self._remedy} (with non_finite=skip it goes on)")
            if (times := self._optimizer.post_validation.skipped) > MAX_SKIPPED:
                self._optimizer.roll_back()
                raise NonFiniteError(f"{what}, for the {times}th time in a row; {self._remedy}")
        if validation.norm is not None:
            self._normed(iteration, validation.norm)
        if redone or validation.coefficient is None:
            self._notable(iteration, validation, redone)


def _known(bits: int) -> float | None:
    """Reads a number from `Steps.numbers`; NaN stands for None."""
    number = from_bits(bits)
    return None if math.isnan(number) else number


def _whole(slots: Sequence[Slot]) -> Slot:
    """Returns a stage's slot from the slots of its ranks, in order."""
    if len(slots) == 1:
        return slots[0]
    norms = (sum(parts) for parts in zip(*(slot.squared_norms for slot in slots), strict=True))
    return Slot(tuple(norms), sum(slot.rejected for slot in slots))
