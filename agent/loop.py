"""The training loop of one worker, through failures: take up an epoch, agree, train, and again.

No failure of a peer ends this process. What interrupts an iteration is a broken transfer or the
news of another epoch; both lead to the same place: abandon the iteration in flight, wait for an
epoch that is newer than the one left, form its groups, agree on an iteration, go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from agent.channel import WorkerChannel
from agent.communicator import Communicator, Groups, TransferError
from agent.executor import Executor, Interrupted, Script
from agent.faults import FaultInjector, Kill
from agent.gradients import GradientSum
from agent.heartbeat import HeartbeatThread, Status
from agent.optimizer import StageOptimizer
from agent.protocol import Deployment
from agent.recipe import Recipe
from agent.recovery import Agreement, agree
from agent.stage import Stage
from agent.workload import Workload
from planner.job import Job, Worker
from planner.plan import Plan

_STATE_TAG = 2**30
_JOINING = -1


@dataclass(frozen=True)
class LoopOptions:
    """iterations: how many to commit in all. pace: seconds per op kind, {} for as fast as it goes.

    joins: this process replaces a dead one and takes its state from a peer of its stage.
    """

    job: Job
    iterations: int
    seed: int
    pace: Mapping[str, float]
    kills: tuple[Kill, ...] = ()
    joins: bool = False
    recipe: Recipe = field(default_factory=Recipe)


class WorkerLoop:
    """Trains one stage of one pipeline until the job is over.

    channel brings epochs and takes reports; heartbeat, where there is a console, tells it how each
    epoch was taken up.
    """

    def __init__(
        self,
        me: Worker,
        options: LoopOptions,
        workload: Workload,
        communicator: Communicator,
        channel: WorkerChannel,
        status: Status,
        heartbeat: HeartbeatThread | None = None,
    ) -> None:
        self._me, self._options = me, options
        self._communicator, self._channel = communicator, channel
        self._status, self._heartbeat = status, heartbeat
        job = options.job
        module = workload.build_stage(me.stage, job.stages, options.seed)
        gradients = GradientSum(module.parameters(), terms=job.pipelines * job.micro_batches)
        self._optimizer = StageOptimizer(module, workload.optimizer(module.parameters()), gradients)
        self._executor = Executor(
            me,
            job,
            options.seed,
            workload,
            Stage(module, gradients),
            self._optimizer,
            FaultInjector(me, list(options.kills), lambda: channel.say("dying")),
            options.pace,
            self._superseded,
            self._say_committed,
        )
        self._has_state = not options.joins
        status.take_op_milliseconds = self._executor.times.take
        self._epoch = 0

    def run(self) -> None:
        """Returns when the launcher says that the job is over."""
        while not self._channel.over:
            self._status.phase = "waiting"
            news = self._channel.wait_for_epoch(self._epoch)
            if news is None:
                return
            with contextlib.suppress(Interrupted):
                try:
                    self._live_through(*news)
                except TransferError as error:
                    if not self._superseded():
                        self._say_broken(str(error))
                finally:
                    self._executor.abandon()
                    self._communicator.abandon()
            self._channel.say("left", epoch=self._epoch)

    def _live_through(self, deployment: Deployment, plan: Plan) -> None:
        """One epoch, until it is superseded, broken or over."""
        self._epoch = self._status.epoch = deployment.epoch
        self._acknowledge("adopted", self._optimizer.committed)
        self._status.phase = "forming"
        living = [Worker.parse(name) for name in deployment.living]
        groups = self._communicator.form(deployment.epoch, living)
        counts = groups.gather(self._optimizer.committed if self._has_state else _JOINING)
        agreement = agree({w: None if c == _JOINING else c for w, c in counts.items()})
        self._take_up(agreement, groups)
        self._channel.say("formed", epoch=deployment.epoch, iteration=agreement.iteration)
        self._acknowledge("formed", agreement.iteration)
        script = Script.of(plan.schedule(), self._me)
        self._status.phase = "training"
        while (iteration := self._optimizer.committed) < self._options.iterations:
            self._status.iteration = iteration
            self._executor.run(iteration, script, groups)
            if iteration == agreement.iteration:
                self._acknowledge("resumed", iteration)
        # Others may still be at work, and a death among them may need this worker once more.
        self._status.phase = "draining"
        self._channel.say("done", epoch=deployment.epoch, sha256=self._optimizer.parameters_sha256())
        self._channel.wait_for_epoch(deployment.epoch)
        raise Interrupted

    def _take_up(self, agreement: Agreement, groups: Groups) -> None:
        """Rolls back, sends or receives state, as agreed."""
        if self._me in agreement.roll_back:
            self._optimizer.roll_back()
        for newcomer, source in sorted(agreement.state_from.items()):
            if source == self._me:
                self._send_state(groups, newcomer)
            elif newcomer == self._me:
                self._receive_state(groups, source)

    def _send_state(self, groups: Groups, to: Worker) -> None:
        header, body = self._optimizer.dump()
        sizes = torch.tensor([len(header), body.numel()], dtype=torch.int64)
        text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for tensor in (sizes, text, body):
            groups.send(to, tensor, _STATE_TAG).wait()

    def _receive_state(self, groups: Groups, source: Worker) -> None:
        sizes = groups.receive(source, torch.zeros(2, dtype=torch.int64), _STATE_TAG).wait()
        header_size, body_size = (int(n) for n in sizes)
        text = groups.receive(source, torch.empty(header_size, dtype=torch.uint8), _STATE_TAG).wait()
        body = groups.receive(source, torch.empty(body_size, dtype=torch.uint8), _STATE_TAG).wait()
        self._optimizer.load(bytes(text.tolist()), body)
        self._has_state = True

    def _superseded(self) -> bool:
        return self._channel.newest_epoch > self._epoch

    def _say_committed(self, iteration: int, loss: float) -> None:
        self._channel.say("committed", epoch=self._epoch, iteration=iteration, loss=loss.hex())

    def _acknowledge(self, state: str, iteration: int) -> None:
        if self._heartbeat is not None:
            self._heartbeat.acknowledge(self._epoch, state, iteration)

    def _say_broken(self, detail: str) -> None:
        self._channel.say("broken", epoch=self._epoch, detail=detail)
        if self._heartbeat is not None:
            self._heartbeat.report_broken(self._epoch, detail)
