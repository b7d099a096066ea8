"""The training loop of one worker, through failures: take up a generation, agree with the others, train, and again.

A worker that joins is in the process groups at once, and takes its stage's state beside the training of the others
(agent.workers.state_transfer). Until it has all of that state, all workers run a plan that does without it.

No failure of a peer ends this process. A broken transfer, or the news of another generation, interrupts an iteration.
Then the worker abandons the iteration in flight, waits for a generation that is newer than the one it left, forms its
groups, agrees on an iteration with the others, and goes on. A generation that only adds workers interrupts nothing: all
leave the one before at the end of the same iteration, with nothing in flight.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch

from openrecycle.agent.checkpoints import (
    Checkpointer,
    CheckpointError,
    Origin,
    WeightsError,
    load_layers,
    save_weights,
    until_written,
    whole_tensor,
)
from openrecycle.agent.config.devices import kind_number
from openrecycle.agent.config.faults import FaultInjector, profile_pace, slowness
from openrecycle.agent.config.options import ALIVE_SECONDS
from openrecycle.agent.coordination.launcher import FROM_START
from openrecycle.agent.messages.channel import GenerationSpec, WorkerChannel
from openrecycle.agent.messages.client import LogTail
from openrecycle.agent.messages.protocol import boot_id
from openrecycle.agent.models.data import StreamEndedError
from openrecycle.agent.models.layers import (
    CPU,
    Partition,
    Span,
    StageCuts,
    StageIOError,
    layer_count,
    layer_io_of,
    partition_of,
    state_names,
    tied_of,
)
from openrecycle.agent.models.parallelized import OtherRankError, gathered_tensors, part_of_rank
from openrecycle.agent.models.state import StateError, Writer, layer_of
from openrecycle.agent.models.torch_settings import TorchSettings
from openrecycle.agent.models.workload import Workload
from openrecycle.agent.monitoring.heartbeat import Status
from openrecycle.agent.monitoring.liveness import AT_REST, describe_exception
from openrecycle.agent.stages.backward import STRATEGIES, StrategyName
from openrecycle.agent.stages.optimizer import keeps_averages, stage_optimizer
from openrecycle.agent.stages.post_validation import ValidationResult
from openrecycle.agent.stages.shards import ShardLostError, assign, lost_together
from openrecycle.agent.stages.stage import assemble, reassemble, try_split
from openrecycle.agent.transport.communicator import Communicator, Groups
from openrecycle.agent.transport.group import TransferError
from openrecycle.agent.transport.ranks import Ranks, SiblingError
from openrecycle.agent.transport.transfers import Script
from openrecycle.agent.workers.executor import Executor, Interrupted, OpError
from openrecycle.agent.workers.recovery import (
    Agreement,
    NoAgreementError,
    Redo,
    UnlikeError,
    agree,
    check_alike,
    decode_finished,
    encode_finished,
    environment,
    from_words,
    in_turn,
    newest_partition,
    to_words,
)
from openrecycle.agent.workers.recovery import redo as plan_redo
from openrecycle.agent.workers.reduction import TiedSums
from openrecycle.agent.workers.relayout import Exchange, IncomingLayers, common_strategy, moves, regrouped
from openrecycle.agent.workers.sharding import ShardedStage
from openrecycle.agent.workers.spec import WorkerSpec
from openrecycle.agent.workers.state_transfer import StateReceiver, StateServer, send_no_offer
from openrecycle.agent.workers.validation_exchange import Steps
from openrecycle.planner.jobs.job import Worker, WorkerRank
from openrecycle.planner.plans.schedule import Schedule

_TOLD_BYTES = 1000  # of the reason why weights could not be written
_JOINING = -1
WAIT_SECONDS = 0.5
"""How long a newcomer receives state before all workers exchange news again, while all wait for that state. The others
wait for the newcomer in that exchange, and not until a time-out."""
SIBLING_SECONDS = 5.0
"""How long to wait for the news that made another rank of this worker leave an iteration."""
TRACEBACK_LINES = 12
"""How many of the last lines of an op's traceback are reported."""
SAID_SAMPLES = 1000
"""How many samples of a micro-batch that raises are reported: a worker's message has a largest size."""


class WorkerLoop:
    """Trains one stage of one pipeline until the job is over. Used by the worker's main thread alone.

    channel: brings generations and takes reports. log: is told how each generation was taken up. device: where the
    stage computes. settings: the settings of torch that are to stay as they are; None: the present ones.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        workload: Workload,
        communicator: Communicator,
        channel: WorkerChannel,
        status: Status,
        log: LogTail | None = None,
        device: torch.device = CPU,
        settings: TorchSettings | None = None,
    ) -> None:
        options, me, origin = spec.run.options, spec.worker, spec.run.origin
        self._load_workload, self._node = spec.run.load_workload, spec.node
        self._options, self._origin, self._workload = options, origin, workload
        self._communicator, self._channel = communicator, channel
        self._status, self._log = status, log or LogTail()
        stages, layer_io = options.job.stages, spec.run.layer_io
        partition = partition_of(spec.run.partition, layer_count(workload, stages), stages)
        if layer_io is None:
            layer_io = layer_io_of(workload, sum(partition), options.seed, options.optimization.autocast, device)
        self._cuts = StageCuts(partition, layer_io)
        self._device = device
        self._settings = TorchSettings(device) if settings is None else settings
        self._said_changed = set[str]()
        self._hold_settings()
        self._makeup = environment(
            str(torch.__version__), torch.get_num_threads(), kind_number(device), self._settings.number
        )
        # A worker that comes back is not killed or slowed down a second time by the same option.
        self._kills, self._slowdowns = ((), ()) if spec.joins else (options.kills, options.slowdowns)
        self._pace = options.pace
        self._take_place(me, origin)
        if not spec.joins:
            self._state.holds_everything()
            if origin is not None and origin.resumed is not None:
                try:
                    self._load(origin.resumed)
                except CheckpointError:
                    raise
                except StateError as error:
                    raise StateError(f"the checkpoint {origin.resumed} is of another job: {error}") from None
        self._known = not spec.joins
        """Whether it has been in a generation with all others, or is one of the first workers."""
        self._generation = self._taken_in = 0
        """_taken_in: the generation in which its layers were taken into use; 0: the stage had them when it came."""
        self._evaluated = self._evaluated_by_all = 0
        """The newest iteration before which this worker has evaluated; and before which, as far as is known, all
        have."""
        self._stood_still = 0.0
        """For how many seconds it stood still because layers move, as far as it has not reported that yet."""
        self._leaving: frozenset[Worker] = frozenset()
        """Workers of this generation that are to leave: others take what they hold of a sharded optimizer."""
        self._corrected = False
        """Whether this generation's agreement corrected the last step."""

    def _take_place(self, me: Worker, origin: Origin | None) -> None:
        """Builds what a worker of the place `me` needs, with the stage's initial state."""
        options, channel = self._options, self._channel
        self._me, self._placed = me, False
        self._restored: tuple[str | None, Worker, Partition] | None = None
        """The checkpoint that was loaded, at which place and with which layers; None once anything has changed
        since."""
        upcoming = getattr(self._workload, "upcoming", None)
        if upcoming is not None and me.stage in (0, options.job.stages - 1):
            upcoming([])  # a process that it starts can come up while the stage is built
        stage, split = self._ranks.together(
            lambda: assemble(
                self._workload, options.job, self._cuts, me.stage, options.seed, options.optimization, self._device
            )
        )
        if split.warning and me.pipeline == 0:  # its peers find the same, and need not say it
            channel.say("warning", text=f"stage {me.stage}: {split.text}")
        self._split, self._split_agreed = stage.split, True
        self._wanted_split: StrategyName | None = stage.split.name
        """How the backward of all layers is split; None: they come from stages that are split in different ways."""
        self._optimizer = stage_optimizer(
            *(self._workload, stage.module, stage.gradients, options.optimization, options.job.pipelines, options.seed)
        )
        self._coming: dict[Span, IncomingLayers] = {}
        progress = self._status.progress
        progress.forget()
        self._steps = Steps(
            *(me, options.optimization, self._optimizer, self._cuts.partition, self._say_validation, progress.waiting),
            self._say_norm,
        )
        self._state = StateReceiver(self._optimizer, self._say_hand_over)
        self._server: StateServer | None = None
        self._executor = Executor(
            me,
            options.job,
            options.seed,
            self._workload,
            stage,
            self._steps,
            FaultInjector(
                me, list(self._kills), lambda kill: channel.say("dying", kill=str(kill)), self._communicator.ranks.rank
            ),
            self._pace,
            self._superseded,
            self._say_committed,
            self._cuts.stage_io,
            options.faults.keep_finished,
            self._device,
            progress,
            self._lacks_state,
            self._hold_settings,
        )
        self._checkpointer: Checkpointer | None = None
        if origin is not None:
            self._checkpointer = Checkpointer(
                *(options.checkpoints, origin, me.stage, len(self._cuts.span(me.stage))),
                *(self._say_checkpoint, self._superseded),
            )
        self._status.times = self._executor.times
        self._status.timeline = self._executor.timeline
        self._placed = True

    def _take_another_place(self, me: Worker) -> None:
        """Gives up this worker's state and takes another place, or the same one with other layers."""
        self._split.close()  # a workload that was given its modules gives the same ones again
        # First, since there may not be memory for two stages.
        for optimizer in (self._optimizer, *(coming.optimizer for coming in self._coming.values())):
            optimizer.give_up()
        # With the job's origin, as a worker has that comes later: all must write the same checkpoints.
        self._take_place(me, self._origin)
        gc.collect()  # frees the old modules; with a workload before, this also ends the process that read ahead for it

    def _settle_in(self, orders: GenerationSpec) -> None:
        """Takes the place, the layers and the checkpoint (or the start) that a generation asks for, unless it has them,
        and gives up what it holds. Raises TransferError, also when the checkpoint can't be read."""
        other = bool(orders.held) and not self._state.begun and self._cuts.partition != orders.held
        taken_up = (orders.restore, orders.cell, orders.partition)
        other = other or orders.cell != self._me or not self._placed
        # A worker that needed longer to load a checkpoint than others waited has it already when all go back to it
        # again.
        other = other or (orders.restore is not None and self._restored != taken_up)
        # All ranks of a worker build a stage together, and exchange data meanwhile.
        if not any(row[0] for row in self._ranks.gather_numbers((int(other),))):
            return
        if orders.cell != self._me:
            self._kills = ()  # kills on purpose at a place were meant for the worker that began there
        # Some workers may have changed over to other layers already, and others not. A checkpoint has all layers.
        partition = orders.held if orders.restore is None else orders.partition
        self._cuts, self._taken_in = replace(self._cuts, partition=partition or self._cuts.partition), 0
        if orders.restore == FROM_START and not self._several:  # ranks train copies (agent.models.parallelized)
            # The modules that a workload was given have been trained in place.
            self._workload = self._load_workload()
        self._take_another_place(orders.cell)
        if orders.restore:
            try:
                self._load(orders.restore)
            except (CheckpointError, OSError) as error:  # the next generation tries again, or an older checkpoint
                raise TransferError(str(error)) from None
        if orders.restore is not None:
            self._state.holds_everything()
            self._restored = taken_up
            # The results of an evaluation may be lost with workers that had not reported them yet.
            self._evaluated = 0

    def _load(self, checkpoint: str) -> None:
        """Loads the state of this worker's layers, or a rank's part of it. Raises StateError and OSError."""
        part = part_of_rank(self._optimizer.module) if self._several else whole_tensor
        self._optimizer.load_state(load_layers(Path(checkpoint), self._cuts.span(self._me.stage), part), own=True)

    def _lacks_state(self) -> bool:
        """Says whether this worker still takes, from its peers, state that it is to step."""
        sharded = self._executor.sharded
        if sharded is not None and sharded.filling.missing:
            return True
        # Each of them must be asked: only then does it notice that its last step was corrected.
        return any([not self._state.complete, *[coming.missing for coming in self._coming.values()]])

    @property
    def _ranks(self) -> Ranks:
        return self._communicator.ranks

    @property
    def _several(self) -> bool:
        return self._ranks.size > 1

    def run(self) -> None:
        """Trains until the launcher says that the job is over."""
        while not self._channel.over:
            self._status.phase = "waiting"
            orders = self._channel.wait_for_generation(self._generation)
            if orders is None:
                return
            self._channel.take_up(orders.generation, self._optimizer.committed)
            if str(orders.cell) not in orders.deployment.living:
                # It was asked to leave, and has left. The launcher ends it when no worker needs it any more.
                self._generation, self._status.phase = orders.generation, "draining"
                self._channel.wait_for_generation(self._generation)
                continue
            whole = True
            try:
                self._live_through(orders)
            except (Interrupted, TransferError, OpError) as end:
                if isinstance(end, OpError) and isinstance(end.__cause__, torch.AcceleratorError):
                    self._say_raised(end)  # must come before anything uses the device
                self._end_hand_overs()
                if isinstance(end, TransferError) and not self._superseded_soon(end):
                    self._say_broken(str(end), end.peer)
                self._executor.abandon()
                if isinstance(end, OpError):
                    self._executor.forget_finished()  # a part of a micro-batch may be in the sum
                    self._say_raised(end)
                self._communicator.abandon()
                whole = False
            self._end_hand_overs()
            self._status.progress.at(AT_REST)
            self._channel.say("left", generation=self._generation, whole=whole)

    def _live_through(self, orders: GenerationSpec) -> None:
        """Trains in one generation. Returns when the generation is left at an iteration's end, with its
        groups still up. Raises Interrupted, TransferError or OpError when it is superseded, over or broken."""
        self._generation = self._status.generation = orders.generation
        self._log_step("adopted", self._optimizer.committed)
        self._status.phase = "forming"
        if not self._several:
            self._settle_in(orders)
        living = [Worker.parse(name) for name in orders.deployment.living]
        self._leaving = frozenset(map(Worker.parse, orders.deployment.leaving))
        scripts = [Script.of(orders.schedule, orders.cell, orders.runs)]
        if orders.interim is not None:
            scripts.append(Script.of(orders.interim, orders.cell))
        groups = self._communicator.form(
            *(orders.generation, orders.cell, living, orders.store, self._device),
            at_iteration_end=orders.after is not None,
            neighbours=frozenset[Worker]().union(*(script.neighbours for script in scripts)),
        )
        self._executor.use(groups)
        if self._several:
            self._settle_in(orders)  # the ranks need the connections that were just made
        target = orders.partition or self._cuts.partition
        agreement = self._agree(groups, living, target, orders.held or target)
        joining = self._hand_over(groups, agreement, orders.interim)
        self._share_optimizer(groups)
        moving = self._begin_moves(groups, agreement, living, target)
        self._tie(groups, living)
        self._set_pace(living)
        if self._left_out(orders, agreement.iteration) != self._executor.left_out:
            self._executor.forget_finished()  # what is summed is a share of another mean
        redo = self._compare_finished(groups, agreement)
        whole = [w for w in living if w not in joining]
        self._executor.timeline.generation = orders.generation
        self._status.phase = "training"
        formed: int | None = None
        if self._me not in joining:
            formed = self._say_formed(agreement.iteration)
        else:
            self._state.write_once(functools.partial(self._channel.superseded, orders.generation))
        while True:
            # What workers do together must come before each asks whether this is the end: one worker may already know
            # that the job ends early, and others not.
            self._status.iteration = iteration = self._optimizer.committed
            if joining and self._steps.counts_on_all(iteration):
                if formed is None:
                    self._state.stop()  # its state now counts for a step of all, and can't be taken back
                    formed = self._say_formed(iteration)
                joining, whole = frozenset(), living
            # After the last iteration moving layers would be of no use. (If the job ends early, not all know that yet.)
            if moving and iteration < self._options.iterations and self._steps.counts_on_all(iteration):
                self._executor.settle()
                if not self._steps.incomplete:
                    redo = None  # the finished micro-batches are in the sums of other layers
                    self._executor.end_sharing()
                    self._go_over(target)
                    self._say_rearranged(iteration)
                    self._share_optimizer(groups)
                    self._tie(groups, living)
                    self._set_pace(living)
                    moving = False
            if self._slowdowns:
                factor = slowness(self._me, iteration, self._slowdowns)
                self._executor.set_pace({kind: factor * seconds for kind, seconds in self._pace.items()})
            self._compare(whole)
            self._checkpoint(whole, last=False)
            if iteration >= self._iterations:
                break
            if not self._channel.may_begin(orders.generation, iteration, self._say_paused):
                self._executor.settle()
                return
            self._status.phase = "training"
            if iteration >= self._iterations:
                break  # the job was told to end while it was paused here
            # Without an interim plan, as when a worker is to try a bad sample, the plan of all is run: its routing
            # holds for any layers.
            script = scripts[-1 if joining or moving else 0]
            self._evaluate(iteration, script, groups)
            # If the evaluation has corrected the last step, the copy that was made for a checkpoint is of no use.
            self._checkpoint(whole, last=False)
            self._restored = None
            self._executor.run(iteration, script, groups, redo, self._left_out(orders, iteration))
            redo = None
            if iteration == formed:
                self._channel.say("resumed", generation=self._generation, iteration=iteration)
                self._log_step("resumed", iteration)
            self._communicator.stand_by()
        self._steps.settle()
        self._executor.gather_parameters()
        self._evaluate(self._optimizer.committed, scripts[-1 if joining or moving else 0], groups, last=True)
        self._checkpoint(whole, last=True)
        # Other workers may still run ops; if one of them dies, this worker may be needed again.
        self._status.phase = "draining"
        if self._options.weights is not None:
            self._save_weights(str(self._options.weights), min(w for w in whole if w.stage == self._me.stage))
        # A worker that does not have all of its state yet has no parameters to compare.
        sha256 = "" if self._me in joining else self._optimizer.parameters_sha256()
        self._channel.say("done", generation=orders.generation, sha256=sha256)
        self._channel.wait_for_generation(orders.generation)
        if self._superseded():
            raise Interrupted

    def _save_weights(self, folder: str, writer: Worker) -> None:
        sharded = self._executor.sharded
        averages = self._optimizer.averages() if sharded is None else sharded.averages(writer)
        if self._me != writer:
            return
        for layer, module in self._optimizer.module.layers:
            state = module.state_dict()
            own = {n.partition(".")[2]: a for n, a in averages.items() if layer_of(n) == layer}
            if self._several:
                state = self._ranks.together(functools.partial(gathered_tensors, module, state))
                own = self._ranks.together(functools.partial(gathered_tensors, module, own))
            self._until_written(functools.partial(save_weights, folder, layer, state))
            trained = any(parameter.requires_grad for parameter in module.parameters())
            if own or (keeps_averages(self._optimizer.optimizer) and trained):
                # Where no step was made, the average is the model as it was.
                names = state_names(module)
                averaged = {name: own.get(names.get(name, name), value) for name, value in state.items()}
                self._until_written(functools.partial(save_weights, folder, layer, averaged, averaged=True))

    def _until_written(self, write: Callable[[], None]) -> None:
        """Raises WeightsError; Interrupted, where others need this worker meanwhile."""

        def pause(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                if self._superseded():
                    raise Interrupted
                time.sleep(0.02)

        def say(text: str) -> None:
            if not self._ranks.rank:
                self._channel.say("warning", text=f"{self._me}: {text}")

        until_written(functools.partial(self._written_by_first, write) if self._several else write, pause, say)

    def _written_by_first(self, write: Callable[[], None]) -> None:
        """The first rank writes, and tells the others again and again that it is at it: they would give up a collective
        that takes as long as a slow disk. Raises WeightsError on all ranks."""
        with ThreadPoolExecutor(1, "weights") as beside:
            writing = None if self._ranks.rank else beside.submit(write)
            has_ended = 0
            while not has_ended:
                row, text = (0, 0, 0), ""
                if writing is not None and wait([writing], WAIT_SECONDS).done:
                    failed = writing.exception()
                    if not isinstance(failed, WeightsError | None):
                        raise failed
                    row, text = (1, int(failed is not None), int(failed is not None and failed.passes)), str(failed)
                told = text.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0")
                has_ended, has_failed, passes, *about = self._ranks.gather_numbers((*row, *told))[0]
        if has_failed:
            raise WeightsError(bytes(about).rstrip(b"\0").decode(errors="ignore"), passes=bool(passes))

    def _evaluate(self, iteration: int, script: Script, groups: Groups, *, last: bool = False) -> None:
        """Evaluates, if that is due before `iteration` and not done by all workers. Raises as `Executor.evaluate`."""
        every, data = self._options.evaluate_every, getattr(self._workload, "evaluation", None)
        began = self._origin.resumed_at if self._origin is not None else 0
        due = every and iteration > began and (last or iteration % every == 0)
        if data is None or not due or iteration <= self._evaluated_by_all:
            return
        self._executor.settle()
        say = self._channel.say
        values = self._executor.evaluate(iteration, data, script, groups, lambda text: say("warning", text=text))
        self._evaluated = iteration
        if values:
            hexadecimal = {name: value.hex() for name, value in values.items()}
            say("evaluated", generation=self._generation, iteration=iteration, values=hexadecimal)

    def _set_pace(self, living: list[Worker]) -> None:
        """Sets the pace to what this worker's layers take, where that is known per layer, or from a profile."""
        planning, job = self._options.planning, self._options.job
        if planning.by_profile or (planning.pace and planning.pace_per == "layer"):
            job = job.with_partition(self._cuts.partition) if job.layers else job
            self._pace = profile_pace(job, self._me, living)
            self._executor.set_pace(self._pace)

    def _agree(self, groups: Groups, living: list[Worker], target: Partition, held: Partition) -> Agreement[Worker]:
        """Compares what all workers have, and does what follows from it: rolls back, and settles the last step where it
        is in doubt. If a worker has changed over to other layers already, all do so, since all have what they need for
        it then. These need not be the layers of `target`: another plan may have been chosen since.

        held: the layers that the launcher believes all to have. Raises NoAgreementError. If a newcomer can't be in the
        job, raises UnlikeError in that newcomer, and Interrupted in all others.
        """
        committed = self._optimizer.committed if self._state.begun else _JOINING
        alike = self._makeup
        has = (self._taken_in, *self._cuts.partition)
        rows = groups.gather_rows(
            (
                *(committed, self._state.missing, self._evaluated, self._state.provisional),
                *(int(self._known), *alike, int(self._split_agreed), *has, *self._steps.numbers()),
            )
        )
        front = 5 + len(alike)
        rest = front + 1 + len(has)
        self._exclude_unlike({w: row[5:front] for w, row in rows.items()}, [w for w, row in rows.items() if row[4]])
        has_of = {w: row[front + 1 : rest] for w, row in rows.items()}
        newest = newest_partition([has_of[w] for w, row in rows.items() if row[0] != _JOINING] or [has])
        self._evaluated_by_all = min((row[2] for row in rows.values() if row[0] != _JOINING), default=0)
        if self._cuts.partition != newest and committed == _JOINING:
            self._cuts = replace(self._cuts, partition=newest)
            self._take_another_place(self._me)
        counts = {w: None if row[0] == _JOINING else row[0] for w, row in rows.items()}
        incomplete = {w for w, row in rows.items() if row[0] != _JOINING and row[1]}
        members = agree(counts, incomplete, attempt=self._generation)
        agreement = members.of_rank(groups.ranks.rank)
        if self._me in agreement.anew:
            self._state.forget()
            if (shards := self._optimizer.shards) is not None:
                self._optimizer.release(sorted(shards.held))
                shards.forgotten()
        elif self._me in agreement.roll_back:
            self._optimizer.roll_back()
        self._come_along(agreement.iteration)
        holders = {w: (row[0], *row[rest:]) for w, row in rows.items() if row[0] != _JOINING and w not in members.anew}
        self._corrected = self._steps.begin(groups, living, agreement.iteration, holders)
        self._state.agreed()
        for coming in self._coming.values():
            coming.state.agreed()
        if any(row[3] for w, row in rows.items() if w not in incomplete):
            # A worker's last pieces came after a step that may have been undone or corrected just now.
            missing = groups.gather_rows((self._state.missing,))
            if lost := {w for w, row in missing.items() if row[0] and counts[w] is not None} - incomplete:
                members = agree(counts, incomplete | lost, attempt=self._generation)
                agreement = members.of_rank(groups.ranks.rank)
        # A generation may have ended when only some ranks of this worker had changed over.
        mine = [member for member in rows if member.worker == self._me]
        some_had_not = not all(has_of[member][1:] == newest for member in mine)
        if some_had_not or not all(rows[member][front] for member in mine):
            if self._cuts.partition != newest and any(c.missing for c in self._coming.values()):
                raise NoAgreementError(f"{self._me} lacks layers that others have given up")
            self._executor.forget_finished()
            self._go_over(newest)
        if newest == target and (some_had_not or target != held):
            self._say_rearranged(agreement.iteration)
        return agreement

    def _exclude_unlike(self, rows: dict[WorkerRank, tuple[int, ...]], known: list[WorkerRank]) -> None:
        """Ends a newcomer that would compute in another way than the job; the others form without it."""
        unlike = check_alike(rows, known, self._settings.differing)
        if text := unlike.get(WorkerRank(self._me, self._ranks.rank)):
            raise UnlikeError(text)
        if unlike:
            self._channel.wait_for_generation(self._generation)
            raise Interrupted
        self._known = True

    def _come_along(self, iteration: int) -> None:
        """Has layers that are on their way go on from the iteration agreed on, or begin anew."""
        for span, coming in list(self._coming.items()):
            if coming.optimizer.committed == iteration + 1 and not coming.lost:
                coming.optimizer.roll_back()
            elif coming.optimizer.committed != iteration:
                coming.state.stop()
                del self._coming[span]
            else:
                coming.undone()
        self._steps.take_along([coming.optimizer for coming in self._coming.values()])

    def _share_optimizer(self, groups: Groups) -> None:
        """If the optimizer's state is sharded, decides with the peers which worker keeps what, begins to take what this
        worker lacks, and brings all parameters to the same step.

        Raises TransferError. Raises Interrupted when some shards are lost with all workers that had them: the next
        generation goes back to a checkpoint then.
        """
        shards, peers = self._optimizer.shards, groups.peers
        if shards is None:
            return
        self._executor.end_sharing()
        self._restored = None  # this worker gives up the shards that others own
        machine = hashlib.sha256((boot_id() or socket.gethostname()).encode()).digest()
        lacks = int(shards.stale) + 2 * int(shards.bare)
        mine = (int.from_bytes(machine[:7]), self._node, lacks, *to_words(shards.shards_held, len(shards.sizes)))
        table = torch.zeros((len(peers), len(mine)), dtype=torch.int64)
        table[peers.index(self._me)] = torch.tensor(mine)
        table = table.to(self._device)
        groups.reduce(table)
        rows = dict(zip(peers, table.tolist(), strict=True))
        held, places = {w: from_words(row[3:]) for w, row in rows.items()}, {w: (r[0], r[1]) for w, r in rows.items()}
        try:
            ownership = assign(peers, held, lost_together(places), shards.sizes, self._leaving)
        except ShardLostError as error:
            text = f"stage {self._me.stage}: {error}"
            self._channel.say("state_lost", generation=self._generation, text=text)
            self._channel.wait_for_generation(self._generation)
            raise Interrupted from None
        shared = functools.partial(self._channel.say, "shared", generation=self._generation)
        tied = {name for copies in tied_of(self._workload, self._cuts.layers) for name in copies}
        sharded = ShardedStage(self._me, groups, self._optimizer, ownership, self._say_hand_over, shared, tied)
        self._executor.share(sharded)
        sharded.exchange_offers(lambda: self._serve_state(groups))
        if any(row[2] & 1 for row in rows.values()):
            shards.lag()  # all send and receive together
        sharded.gather()
        sharded.gather_untrained({w for w, row in rows.items() if row[2] & 2})

    def _begin_moves(
        self, groups: Groups, agreement: Agreement[Worker], living: list[Worker], target: Partition
    ) -> bool:
        """Begins to take the layers that this worker will need, and to give away those that others will. Returns
        whether any layers move: none do if a worker can't build what it is to get; then all go on as they are. Raises
        TransferError."""
        if self._cuts.partition == target or agreement.hands_over:
            self._coming = {}
            self._executor.move_layers(None)
            return False
        begun, sharded = time.monotonic(), self._executor.sharded
        planned = moves(self._cuts.partition, target, living, self._generation)
        built = self._build([move.span for move in planned if move.to == self._me], agreement.iteration)
        # This is compared before anything is sent: a worker that can't take layers would leave the giver to wait.
        if not all(row[0] for row in groups.gather_rows((int(built),)).values()):
            self._coming = {}
            self._executor.move_layers(None)
            return False
        for move in planned:
            peers = [w for w in living if w.stage == move.source.stage]
            holders = in_turn(peers, peers.index(move.source))[: None if sharded is None else 1]
            if self._me in holders:
                self._give(
                    groups,
                    move.to,
                    move.span if self._me == move.source else None,
                    first=self._me == move.source,
                    split=self._split.name,
                )
            elif move.to == self._me:
                coming = self._coming[move.span]
                coming.begin(*coming.state.receive_description(groups, holders))
        if sharded is not None:
            coming_to = {span: coming.optimizer for span, coming in self._coming.items()}
            sharded.move_layers([(move.to, move.source, move.span) for move in planned], coming_to)
            self._stood_still = time.monotonic() - begun
        else:
            self._executor.move_layers(Exchange(self._me, groups, planned, self._coming, self._optimizer))
        self._steps.some_lack_state()
        while True:
            lacking = sum(coming.missing for coming in self._coming.values())
            blocking = any(coming.state.blocking for coming in self._coming.values())
            rows = groups.gather_rows((lacking, int(blocking)))
            if not any(row[0] for row in rows.values()):
                self._steps.all_have_state(agreement.iteration)
                return True
            if not any(row[1] for row in rows.values()):
                return True
            if self._superseded():
                raise Interrupted
            for coming in self._coming.values():
                coming.state.wait(WAIT_SECONDS)

    def _build(self, mine: Sequence[Span], iteration: int) -> bool:
        """Builds the layers of these spans beside the stage, unless they are there from the generation before. Returns
        False if they can't be built, which is no reason to end: the stage is whole without them. Raises
        SiblingError."""
        options, kept = self._options, self._coming
        self._coming = {}
        # All ranks of a worker build a layer together, in the same order, and exchange data meanwhile. Layers are kept
        # only if all ranks still have them.
        rows = self._ranks.gather_numbers([int(span in kept) for span in mine]) if mine else []
        for place, span in enumerate(mine):
            if all(row[place] for row in rows):
                self._coming[span] = kept[span]
                continue
            make = functools.partial(
                IncomingLayers,
                *(span, self._cuts.layers, self._workload, options.job, options.seed),
                *(options.optimization, self._device, self._say_hand_over),
            )
            problem = ""
            try:
                self._coming[span] = self._ranks.together(make)
            except (TransferError, torch.AcceleratorError):
                raise  # after an AcceleratorError the device's context is gone for good
            except OtherRankError:
                problem = "on another rank"
            except Exception as error:
                problem = describe_exception(error)
                which = ", ".join(map(str, span))
                text = f"{self._me} can't build what was to come to it, of the model's layers {which}: {problem}"[:1000]
                self._channel.say("unmoved", generation=self._generation, iteration=iteration, text=text)
            # If one rank could not build these, no rank builds the next ones.
            if any(row[0] for row in self._ranks.gather_numbers((int(bool(problem)),))):
                return False
        return True

    def _go_over(self, target: Partition) -> None:
        """Takes the layers of `target` into use, unless that is done. Called between two iterations, with everything
        settled and all layers there, by all ranks of a worker together. Raises SiblingError."""
        begun = time.monotonic()
        if self._cuts.partition != target:
            self._rearrange(target)
        self._agree_on_split()
        self._stood_still += time.monotonic() - begun

    def _rearrange(self, target: Partition) -> None:
        """Puts the stage together from other layers, and gives up those that other workers have then. This copies and
        exchanges nothing, so it is done wholly or not at all."""
        options, coming = self._options, list(self._coming.values())
        self._cuts, self._taken_in = replace(self._cuts, partition=target), self._generation
        for layers in coming:
            layers.state.stop()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._split.close()
        span, parts = self._cuts.span(self._me.stage), [layers.optimizer for layers in coming]
        optimizer = regrouped(self._workload, self._optimizer, parts, span, options.optimization, options.job)
        self._wanted_split = common_strategy([self._wanted_split, *(layers.strategy for layers in coming)])
        self._split_agreed = False
        self._optimizer, self._coming = optimizer, {}
        self._put_in(self._wanted_split or "fused")  # "fused" works for all layers
        self._state = StateReceiver(optimizer, self._say_hand_over)
        self._state.holds_everything()
        self._steps.rearrange(optimizer, target)
        if self._checkpointer is not None:
            self._checkpointer.rearranged(len(span))

    def _put_in(self, strategy: StrategyName) -> None:
        """Has the executor run the present layers, with their backward split by this strategy."""
        stage = reassemble(self._optimizer, strategy, self._options.optimization)
        self._split = stage.split
        self._executor.rearrange(stage, self._cuts.stage_io)

    def _agree_on_split(self) -> None:
        """Decides how to split the backward of a stage whose layers come from several stages: tries it out if they are
        split in different ways. All ranks of a worker split it in the same way, since they wait for each other in the
        ops. Raises SiblingError."""
        if self._alike(self._wanted_split) is None:
            self._split.close()
            self._wanted_split = "fused"  # if the ranks break off here, it is not tried again and again
            self._wanted_split = self._alike(self._ranks.together(self._found_split)) or "fused"
            self._put_in(self._wanted_split)
        self._split_agreed = True

    def _found_split(self) -> StrategyName:
        """Returns how the backward of the stage can be split. It stays whole if that can't be tried, as when the data
        to try it on are gone."""
        options = self._options
        try:
            return try_split(
                *(self._workload, options.job, self._cuts, self._me.stage, options.seed, options.optimization),
                *(self._optimizer.module, self._device),
            )
        except Exception as error:
            if self._ranks.broke(error) or isinstance(error, (TransferError, torch.AcceleratorError)):
                raise
            text = f"stage {self._me.stage}: its backward stays whole; to split it could not be tried"
            self._channel.say("warning", text=f"{text}: {describe_exception(error)}"[:1000])
            return "fused"

    def _alike(self, split: StrategyName | None) -> StrategyName | None:
        """Returns the strategy if all ranks of this worker have the same one; otherwise None."""
        number = -1 if split is None else list(STRATEGIES).index(split)
        return split if len(set(self._ranks.gather_numbers((number,)))) == 1 else None

    def _say_rearranged(self, iteration: int) -> None:
        stall, self._stood_still = round(1000 * self._stood_still, 3), 0.0
        self._channel.say("rearranged", generation=self._generation, iteration=iteration, stall_ms=stall)

    def _tie(self, groups: Groups, living: list[Worker]) -> None:
        """Ties this stage to the other stages that have copies of its parameters, for the sums of gradients."""
        tied = tied_of(self._workload, self._cuts.layers)
        self._executor.tie(TiedSums(self._me, groups, tied, self._cuts.partition, living) if tied else None)

    def _say_hand_over(self, text: str) -> None:
        self._channel.say("hand_over", text=text)

    def _hand_over(self, groups: Groups, agreement: Agreement[Worker], interim: Schedule | None) -> frozenset[Worker]:
        """Has workers that lack state begin to take it from their peers. Returns those that still lack some while
        `interim` is run; none if all have waited until everything was there.

        Raises StateTransferError, after which the next agreement names another peer; StateTransferFailed when that did
        not help.
        """
        if not agreement.hands_over:
            self._steps.all_have_state(agreement.iteration)
            return frozenset()
        for newcomer, holders in sorted(agreement.state_from.items()):
            if self._optimizer.shards is not None:
                holders = holders[:1]  # one is enough for the rest, which is small: see _share_optimizer
            if self._me in holders:
                self._give(groups, newcomer, first=self._me == holders[0])
            elif newcomer == self._me:
                self._state.begin(*self._state.receive_description(groups, holders))
        while True:
            rows = groups.gather_rows((self._state.missing, int(self._state.blocking)))
            lacking = frozenset(m.worker for m, row in rows.items() if row[0])
            if not lacking:
                self._steps.all_have_state(agreement.iteration)
                return frozenset()
            if interim is not None and not any(row[1] for row in rows.values()) and not _runs_ops(interim, lacking):
                return lacking
            if self._superseded():
                raise Interrupted
            if self._me in lacking:
                self._state.wait(WAIT_SECONDS)

    def _give(self, groups: Groups, to: Worker, span: Span | None = None, *, first: bool, **about: str) -> None:
        """Offers this worker's state to another one, and describes it if this is the first of the holders. Raises
        TransferError."""
        try:
            server = self._serve_state(groups)
        except TransferError:
            if first:
                raise
            send_no_offer(groups, to)
            return
        if first:
            server.send_description(groups, to, self._options.faults.hand_over.at_once, span, **about)
        else:
            server.send_offer(groups, to)

    def _serve_state(self, groups: Groups) -> StateServer:
        """Returns the server that gives this worker's state to others in this generation. Raises TransferError."""
        if self._server is None:
            rate = self._options.faults.hand_over.bytes_per_second
            self._server = StateServer(self._optimizer, groups.address, rate)
        return self._server

    def _end_hand_overs(self) -> None:
        """Ends the state transfers of the generation that is being left. What has arrived is kept."""
        self._state.stop()
        for coming in self._coming.values():
            coming.state.stop()
        self._executor.end_exchanges()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _compare_finished(self, groups: Groups, agreement: Agreement[Worker]) -> Redo | None:
        """Finds out what is left of the iteration agreed on, where finished micro-batches are kept; None: all of it."""
        if not self._options.faults.keep_finished:
            return None
        if agreement.rolls_back or self._corrected or self._me in agreement.anew:
            # What was summed here belongs to another iteration, or to parameters that no worker has any more.
            self._executor.forget_finished()
        if agreement.rolls_back:
            return None
        job = self._options.job
        rows = groups.gather_rows(encode_finished(self._executor.finished, job))
        finished = {m.worker: decode_finished(row, job) for m, row in rows.items()}
        # What one rank of a worker runs again, all its ranks must run again.
        unequal = {m.worker for m, row in rows.items() if decode_finished(row, job) != finished[m.worker]}
        if self._me in unequal:
            self._executor.forget_finished()
        left = plan_redo({w: () if w in unequal else f for w, f in finished.items()}, job, self._me.stage)
        run, kept = len(left.run), len(self._executor.finished)
        self._channel.say("redo", generation=self._generation, iteration=agreement.iteration, run=run, kept=kept)
        return left

    def _left_out(self, orders: GenerationSpec, iteration: int) -> frozenset[tuple[int, int]]:
        """Returns the micro-batches of an iteration that nobody runs."""
        of_pipeline = self._options.job.micro_batches
        return frozenset(divmod(number, of_pipeline) for i, number in orders.left_out if i == iteration)

    @property
    def _iterations(self) -> int:
        """How many iterations the job has, as far as is known."""
        last = self._channel.last
        return self._options.iterations if last is None else min(self._options.iterations, last)

    def _hold_settings(self) -> None:
        """Sets back settings of torch that the workload's code has changed, and reports each once."""
        for changed in self._settings.put_back():
            if changed.setting not in self._said_changed:  # each forward may change it
                self._said_changed.add(changed.setting)
                self._channel.say("changed", setting=changed.setting, text=changed.text)

    def _say_paused(self) -> None:
        self._status.phase = "paused"

    def _superseded_soon(self, error: TransferError) -> bool:
        """Says whether a newer generation is known. After a SiblingError it waits for that: when another rank leaves an
        iteration this rank fails too, and may hear of the reason a moment later."""
        until = time.monotonic() + (SIBLING_SECONDS if isinstance(error, SiblingError) else 0.0)
        while not self._superseded() and time.monotonic() < until:
            time.sleep(0.002)
        return self._superseded()

    def _superseded(self) -> bool:
        return self._channel.superseded(self._generation)

    def _say_committed(self, iteration: int, loss: float) -> None:
        per_pipeline = self._options.job.micro_batches
        skipped = [pipeline * per_pipeline + number for pipeline, number in self._optimizer.skipped]
        self._channel.say(
            "committed",
            generation=self._generation,
            iteration=iteration,
            loss=loss.hex(),
            skipped=skipped,
            learning_rate=self._optimizer.learning_rate,
            data_seconds=round(self._executor.data_seconds, 3),
        )

    def _say_formed(self, iteration: int) -> int:
        self._channel.say("formed", generation=self._generation, iteration=iteration)
        self._log_step("formed", iteration)
        return iteration

    def _checkpoint(self, whole: list[Worker], *, last: bool) -> None:
        """Writes this worker's share of a checkpoint, if one is due after this iteration. After the last one it waits
        until all is written. whole: the workers that hold all of their stage's state, as all of them know."""
        if self._checkpointer is not None:
            self._checkpointer.iteration_end(self._optimizer, self._generation, self._writer(whole), last=last)
            if last:
                self._checkpointer.finish()

    def _writer(self, whole: list[Worker]) -> Writer | None:
        """Returns which share of its stage's state this process writes; None: none."""
        ranks, sharded = self._ranks, self._executor.sharded
        if sharded is not None:
            # None of them still joins: all wait for a newcomer's parameters before they train on.
            peers, primaries = list(sharded.peers), sharded.primaries
        else:
            peers, primaries = [w for w in whole if w.stage == self._me.stage], None
        if self._me not in peers:
            return None
        return Writer(peers.index(self._me), len(peers), ranks.rank, ranks.size, primaries)

    def _compare(self, whole: list[Worker]) -> None:
        """Reports the hash of this worker's parameters, which the launcher compares with those of its peers: every
        `compare_every` iterations and with each checkpoint. At the end of the job `done` reports it. Before and after
        the first iteration it shows random numbers that builders and optimizers draw in different ways."""
        committed, every = self._optimizer.committed, self._options.faults.compare_every
        due = bool(every) and (committed % every == 0 or committed == 1)
        if self._checkpointer is not None:
            due = due or self._checkpointer.due(committed)
        peers = [w for w in whole if w.stage == self._me.stage]
        if due and self._me in peers and len(peers) > 1:
            settled, sha256 = self._optimizer.settled, self._optimizer.parameters_sha256()
            self._channel.say(
                "parameters", generation=self._generation, iteration=committed, settled=settled, sha256=sha256
            )

    def _say_checkpoint(self, iteration: int, problem: str | None) -> None:
        self._channel.say("checkpoint", at_iteration=iteration, problem=problem)

    def _say_validation(self, iteration: int, validation: ValidationResult, redone: bool) -> None:
        self._channel.say("validation", iteration=iteration, coefficient=validation.coefficient, redone=redone)

    def _say_norm(self, iteration: int, norm: float) -> None:
        if self._me.stage == self._options.job.stages - 1:  # all workers know it, and one stage is enough to report it
            self._channel.say("gradient_norm", iteration=iteration, norm=norm.hex())

    def _log_step(self, state: str, iteration: int) -> None:
        self._log.add(f"generation {self._generation}: {state}, iteration {iteration}")

    def _say_raised(self, end: OpError) -> None:
        """Reports what an op raised. Raises it again if this process can't go on after it."""
        error = end.__cause__
        assert error is not None
        samples = getattr(self._workload, "samples", None)
        # If this program itself refuses something, such as an output of the wrong shape, its message says the whole
        # reason.
        whole = "" if isinstance(error, StageIOError) else "".join(traceback.format_exception(error))
        traced = whole.splitlines()[-TRACEBACK_LINES:]
        self._channel.say(
            "raised",
            generation=self._generation,
            iteration=end.iteration,
            op=end.kind,
            micro_batch=end.key[0] * self._options.job.micro_batches + end.key[1],
            error=describe_exception(error)[:1000],
            samples=list(samples(end.iteration, *end.key))[:SAID_SAMPLES] if samples is not None else [],
            ends=isinstance(error, StreamEndedError),
            traceback=[line[:1000] for line in traced],
        )
        if isinstance(error, torch.AcceleratorError):
            raise error  # the device's context is gone for good

    def _say_broken(self, detail: str, peer: Worker | None) -> None:
        # If the process was suspended, its waits time out without any fault of the connection.
        stood_still = self._status.progress.stood_still(self._options.faults.timeouts.group)
        if stood_still > ALIVE_SECONDS:
            detail = f"{detail} (this process did not run for {stood_still:.0f} s)"
        name = "" if peer is None else str(peer)
        self._channel.say("broken", generation=self._generation, detail=detail, peer=name, stood_still=stood_still)
        self._log.add(f"generation {self._generation}: {detail}")


def _runs_ops(schedule: Schedule, workers: frozenset[Worker]) -> bool:
    """Says whether the schedule gives any of these workers a micro-batch."""
    return any(op.kind != "O" for w in workers for op in schedule.ops.get(w, ()))
