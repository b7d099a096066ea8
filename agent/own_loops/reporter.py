"""Reporter: for trainers that keep their own training loop. It sends heartbeats, op times and losses to a console, and
receives plans from it.

    reporter = Reporter(console="http://127.0.0.1:8501", run="run-42", job=job, worker="W0_1", iterations=1000)
    with reporter.op("F"): ...                 # around each forward; likewise I, W, B and O
    reporter.iteration(i, loss=loss)           # when iteration i is done

If a worker stops reporting, the console takes it out of the job after its time-out, and `on_plan` of the other workers
is called with a plan that goes on without it. These calls need no torch, and they can neither delay nor end the
training: a report that can't be delivered is kept, up to a bound, and sent again.

    for op in reporter.schedule(i): ...        # instead: what this worker does next, and with whom

With `schedule` the loop runs the ops of the plan itself (agent.own_loops.own_loop). This needs torch.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pydantic import ValidationError

from openrecycle.agent.config.options import check_url, with_profile
from openrecycle.agent.config.settings import spelled
from openrecycle.agent.coordination.launcher import Failure
from openrecycle.agent.messages.client import (
    Backoff,
    ConsoleClient,
    ConsoleRefused,
    ConsoleUnavailable,
    JobUnknown,
    Outbox,
)
from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    BatchReply,
    Deployment,
    FailureReport,
    Iteration,
    IterationReport,
    JobCreated,
    JobFinished,
    JobSpec,
    JobState,
    JobStatus,
    OpKind,
    Registration,
)
from openrecycle.agent.monitoring.console_link import (
    LONG_POLL_SECONDS,
    QueuedReport,
    ReportSender,
    failure_report,
    next_deployment,
)
from openrecycle.agent.monitoring.heartbeat import Status, WorkerReports
from openrecycle.agent.monitoring.liveness import AT_REST
from openrecycle.agent.own_loops.own_group import Membership
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans.plan import JobDoc, Plan
from openrecycle.planner.profiles import Profile

if TYPE_CHECKING:
    from openrecycle.agent.own_loops.own_loop import OwnLoop, ScheduledOp

log = logging.getLogger("openrecycle")

OnPlan = Callable[[Deployment, Plan], None]

MAX_ITERATIONS = 1000
"""How many iterations are kept for a console that does not answer. Beyond that the oldest are dropped."""


def newest_iterations(older: QueuedReport, newer: QueuedReport) -> QueuedReport:
    """Merges two reports of iterations into one, for the outbox; the oldest iterations beyond the bound are dropped."""
    assert isinstance(older.message, IterationReport) and isinstance(newer.message, IterationReport)
    both = (older.message.iterations + newer.message.iterations)[-MAX_ITERATIONS:]
    return newer._replace(message=IterationReport.model_construct(iterations=both, age=0.0))


_KINDS = frozenset(get_args(OpKind))
_RUN = re.compile(r"[A-Za-z0-9 .:@/()+_-]{1,80}")
CLOSE_SECONDS = 5.0
_ASK_SECONDS, _ASKED_A_SECOND = 0.3, 100
"""Between two questions of one worker whether the job is over; the most that all workers ask in a second. To answer one
takes the console more than a millisecond, and it has to hear the worker whose losses are shown meanwhile."""
_SENT_AWAY_SECONDS = LONG_POLL_SECONDS / 4
"""A request that waits for a generation and ends sooner, without one, ends because the job has, or the console does."""
OVER = JobState.FINISHED, JobState.STOPPED
_REGISTERING_SECONDS = 0.05
_UNANSWERED = 4
"""Failed requests in a row before the log warns that the console does not answer. The last of them comes a second or
two after the first, so a console that is only restarted causes no warning."""


def asking_pause(workers: int) -> float:
    """Returns the mean seconds until each of so many workers asks (again) whether the job is over."""
    return max(_ASK_SECONDS, workers / _ASKED_A_SECOND)


class _Over(NamedTuple):
    """why: says that the job is over, if the console has said so. in_last: has it said that all iterations are done,
    and did this worker belong to the last generation?"""

    why: str = ""
    in_last: bool = False


class Reporter:
    """Reports one worker to the console. The constructor raises InputError. Of the methods only `membership` and
    `schedule` raise anything; they also wait for other workers.

    console: the console's address; a standby's address may follow after a comma.
    token: the token of the console and its standby.
    run: a name that all processes of this run give, and that no earlier run has used.
    job: the grid, with op times where they are known.
    worker: the name of this process's worker, such as W0_1.
    iterations: how many iterations the job runs.
    technique, memory: how plans are made, as in Planning.
    profile: op times, where `job` has none, as for ResilientTrainer.
    samples_per_micro_batch: for the throughput that the console shows.
    on_plan: called with each new generation and its plan, in the thread `generations` of this object. An exception
    that it raises is logged. It should only store the plan; the training loop takes it up between iterations.
    on_fenced: called once, when the console has given this process up. To come back, make a new Reporter.

    The loss shown is that of the first living worker of the last stage.

    Threads: `generations` joins the job and waits for generations; `_reports` sends heartbeats and acknowledgements;
    `_iterations` sends the losses.
    """

    def __init__(
        self,
        *,
        console: str,
        run: str,
        job: Job,
        worker: str,
        iterations: int,
        token: str | None = None,
        technique: str = "staggered",
        memory: str = "uniform",
        samples_per_micro_batch: int = 1,
        profile: str | Path | Profile | JobDoc | None = None,
        on_plan: OnPlan | None = None,
        on_fenced: Callable[[], None] | None = None,
    ) -> None:
        with spelled({"name": "run"}):
            given: tuple[tuple[str, object, type, str], ...] = (
                ("console", console, str, "the address of a console"),
                ("run", run, str, "a name"),
                ("job", job, Job, "a Job"),
                ("worker", worker, str, "the name of a worker, such as W0_1"),
            )
            for name, value, kind, expected in given:
                if not isinstance(value, kind):
                    raise InputError(name, value, expected)
            if not _RUN.fullmatch(run):
                raise InputError("run", run, "1 to 80 letters, digits, spaces or . : @ / ( ) + _ -")
            wanted = Technique.of(technique, field="technique")
            if not wanted.reroutes:
                raise InputError("technique", technique, "adaptive, decoupled or staggered")
            job = with_profile(job, profile)
            self._me = job.check_worker(Worker.parse(worker))
            self._url, self._token = check_url(console), token
            self._spec = JobSpec.of(
                job,
                name=run,
                iterations=iterations,
                samples_per_micro_batch=samples_per_micro_batch,
                technique=wanted.value,
                memory=MemoryLimit.parse(memory, field="memory").text,
                own_loop=True,
            )
        self._without_me = (
            f"the console goes on without {worker}: it was silent for too long, or another took its place"
        )
        self._run, self._last_stage = run, job.stages - 1
        self._on_plan, self._on_fenced = on_plan, on_fenced
        self._incarnation = uuid.uuid4().hex[:16]
        self._status = Status(phase="waiting")
        self._reports: WorkerReports | None = None
        self._newest: tuple[Deployment, Plan] | None = None
        self._news = threading.Condition()
        self._job = job
        self._loop: OwnLoop | None = None
        self._before: int | None = None
        """The newest generation from before this process registered, which it is not in; None: not registered yet."""
        self._met = 0
        self._dead, self._refusal = 0.0, ""
        self._over = _Over()
        self._in_vain = False
        """Did the last request to the console (for the job, a place in it, or a generation) fail?"""
        self._resumed, self._done = 0, (-1, 0.0)
        self._closing = threading.Event()
        self._last_at = time.monotonic()
        self._said: set[str] = set()
        self._job_path, self._pause = "", 1.0
        self.fenced = False
        self._iterations = ReportSender(
            lambda: ConsoleClient(self._url, token=self._token),
            lambda: self._job_path,
            Outbox(1, merge=newest_iterations),
            ready=self._speaks_for_all,
            pause=lambda: self._pause,
            refused=lambda refusal: self._say_once(f"the console refuses iterations: {refusal}"),
        )
        threading.Thread(target=self._follow, name="generations", daemon=True).start()

    # -- what the training loop calls ---------------------------------------------------------

    @contextmanager
    def op(self, kind: str) -> Iterator[None]:
        """Times the op that runs inside: F, I, W, B (I and W in one) or O (reduction and step). An unknown kind is
        logged once and not reported."""
        started = time.perf_counter()
        self._status.progress.at(kind if kind in _KINDS else AT_REST)
        try:
            yield
        finally:
            self._status.progress.at(AT_REST)
            if kind in _KINDS:
                self._status.times.add(kind, time.perf_counter() - started)
            else:
                self._say_once(f"op: got {kind!r}, expected one of {', '.join(sorted(_KINDS))}; it is not reported")

    def iteration(self, number: int, *, loss: float | None = None) -> None:
        """Reports that iteration `number`, counted from 0, is done. loss: its loss, where this worker knows it."""
        if self._done[0] != number:
            self._end_iteration(number)
        seconds = self._done[1]
        if loss is None or self._me.stage != self._last_stage:
            return
        if hasattr(loss, "detach"):  # else torch warns of a tensor with a gradient
            loss = loss.detach()
        loss = float(loss)
        deployment = self._deployment
        generation, living = 0, self._job.pipelines * self._job.stages
        if deployment is not None:
            generation, living = deployment.generation, len(deployment.living)
        try:
            done = Iteration(
                iteration=number,
                loss=loss if math.isfinite(loss) else math.nan,
                loss_hex=loss.hex(),
                seconds=seconds,
                generation=generation,
                living=living,
            )
        except ValidationError as error:
            self._say_once(f"iteration {number!r} is not reported: {error.errors()[0]['msg']}")
            return
        self._iterations.put(QueuedReport("/iterations", IterationReport(iterations=(done,)), time.monotonic()))

    def membership(self, timeout: float = 600.0) -> Membership:
        """Waits for a newer generation than the last call returned or `schedule` last ran, and returns which workers
        form its process group, in which order: this one alone, where the others have finished the job and it lacks only
        the last step. Raises TimeoutError after `timeout` seconds, and RuntimeError where the console goes on without
        this worker or the job is over."""
        lost = max(self._met, self._loop.generation if self._loop is not None else 0)
        began, reported = time.monotonic(), False
        while True:
            if self._goes_on_alone():
                # Somebody has taken the last step, so all have reduced. The number is that of no other process group.
                return Membership(self._newest_generation() + 1, (str(self._me),), 0)
            waited = time.monotonic() - began
            deployment = self._deployment
            if deployment is not None and deployment.generation > lost:
                self._met = deployment.generation
                workers = tuple(str(worker) for worker in sorted(map(Worker.parse, deployment.living)))
                rank = workers.index(str(self._me))
                return Membership(
                    *(self._met, workers, rank, deployment.joining, self._newest_of_mine), self._own_loop_sums
                )
            if waited > timeout:
                refused = f": it refuses: {self._refusal}" if self._refusal else ""
                raise TimeoutError(f"the console has opened no generation after {lost} in {timeout:g} s{refused}")
            if lost and not reported and self._reports is not None and waited > self._dead + 2 * self._pause:
                # The console would have noticed a death by now. So it is told of the broken link, to find out whose.
                why, peer = self._loop.lost if self._loop is not None else ("no process group was formed", "")
                broken = Failure("transfer", self._me, self._incarnation, lost, why, peer)
                self._reports.failed(failure_report(broken))
                reported = True
            self._wait_for_news(lost, 0.5)

    def _goes_on_alone(self) -> bool:
        """Says whether the others have finished the job, and this worker has only its last step to take. Raises
        RuntimeError if it has none to take, and the console goes on without it or the job is over."""
        over = self._over  # once: another thread may set it at any moment
        if self.fenced:
            raise RuntimeError(self._without_me)
        if self._loop is not None:
            if over.in_last and self._loop.may_step_alone(self._spec.iterations - 1):
                self._loop.alone = True
            if self._loop.alone:
                return True
        if over.why:
            raise RuntimeError(over.why)
        return False

    def _ran_plan(self) -> bool:
        """Says whether this worker has run any part of a plan with `schedule`."""
        return self._loop is not None and self._loop.generation > 0 and not self.fenced

    def _has_last_step(self) -> bool:
        """Says whether this worker has taken the job's last step, which shows that all have reduced for theirs."""
        released = self._loop.released if self._loop is not None and not self.fenced else None
        return released is not None and released >= self._spec.iterations - 1

    def _is_finished_by(self, deadline: float) -> bool:
        """Waits until somebody has told the console that the job is over, until `deadline` at most. Returns whether
        there is nothing to tell it any more. Many workers do not ask at the same time, nor all of them."""
        client = ConsoleClient(self._url, token=self._token, timeout=2.0)
        pause = asking_pause(self._job.pipelines * self._job.stages)
        while self._job_path and not self.fenced:
            wait = random.uniform(0.0, 2 * pause)
            if time.monotonic() + wait >= deadline:
                time.sleep(max(0.0, deadline - time.monotonic()))
                return False
            time.sleep(wait)
            with suppress(ConsoleUnavailable, ConsoleRefused):
                status = client.get(self._job_path, JobStatus)
                if status is not None and status.state in OVER:
                    return True
        return True

    def _newest_of_mine(self) -> int:
        """The newest generation; one more where this worker goes on alone. Raises RuntimeError as `membership` does."""
        return self._newest_generation() + self._goes_on_alone()

    def _own_loop_sums(self, given: tuple[int, list[Any]] | None) -> tuple[int, list[Any]] | None:
        """Gives or replaces the sums that go with this worker's state: see Membership.sums."""
        loop = self._own_loop()
        loop.kept = given or loop.kept
        return loop.kept

    def _own_loop(self) -> OwnLoop:
        from openrecycle.agent.own_loops.own_loop import OwnLoop

        if self._loop is None:
            self._loop = OwnLoop(
                self._me,
                self._job,
                self._status,
                newest=lambda: self._newest,
                wait=self._wait_for_news,
                done=self._end_iteration,
            )
        return self._loop

    def schedule(self, iteration: int) -> Iterator[ScheduledOp]:
        """Yields this worker's ops in that iteration, in order, by the plan that all workers of the process group have
        agreed on. The time from one op to the next, less its waits for other workers, counts as the first op's time.

        Raises GroupLost, here or in an op, when the process group can no longer be used. Then form a new group and
        ask for the same iteration again: it yields the ops that are left to do. A wrong call raises InputError or
        RuntimeError.
        """
        return self._own_loop().begin(iteration)

    def close(self, *, done: bool = True) -> None:
        """Ends the reporting, within a few seconds. done: the job has run all its iterations; the console is told so,
        even if it had not answered yet. Without `done` the job goes on without this worker at once, as after a crash.

        The worker whose losses are shown tells the console that the job is done. If a death kept it from its last step,
        it waits to hear that: so one that has run the plan, and has taken that step, tells the console in its place.
        The others tell it that they have finished."""
        if self._closing.is_set():
            return
        self._status.phase = "draining" if done else self._status.phase
        deadline = time.monotonic() + CLOSE_SECONDS
        if done:
            with self._news:
                self._news.wait_for(lambda: self._deployment or self.fenced or self._in_vain, CLOSE_SECONDS)
        self._closing.set()
        self._iterations.stop(tries=False)
        # Both threads get a second at least, even if the console took most of the time to answer.
        self._iterations.join(max(1.0, deadline - time.monotonic()))
        last = self._last_report(done, deadline)
        if self._reports is not None:
            self._reports.stop(last)
            self._reports.join(max(1.0, deadline - time.monotonic()))

    def _last_report(self, done: bool, deadline: float) -> FailureReport | None:
        """Tells the console that the job is done where this worker has to. Returns what is to be said of this worker's
        end. None: nothing. Then the job is over, or the first plan is still to come."""
        cause: Literal["exit", "closed"] = "closed" if done else "exit"
        if done and self._deployment is None:
            return None
        if done and self._speaks_for_all():
            told = self._finish()
        else:
            runs = done and self._ran_plan()
            told = runs and (self._is_finished_by(deadline) or (self._has_last_step() and self._finish()))
        if told:
            return None
        detail = "closed its reporter" + ("" if done else " before its work was done")
        me = str(self._me)
        return FailureReport(worker=me, incarnation=self._incarnation, cause=cause, reporter=me, detail=detail)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(done=kind is None)

    # -- threads ------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Runs in the thread `generations`: joins the job, then waits for one generation after the other."""
        client, backoff = ConsoleClient(self._url, token=self._token), Backoff(0.2, 30.0)
        generation, plans, unanswered = 0, dict[str, Plan](), 0
        while not self._closing.is_set():
            try:
                if self._reports is None:
                    self._join(client)
                if self._before is None:
                    # Until registration is answered it is not known which generations came before this process: its
                    # worker may have been started again.
                    self._closing.wait(_REGISTERING_SECONDS)
                    continue
                generation = max(generation, self._before)
                asked = time.monotonic()
                found = next_deployment(client, self._job_path, generation, plans, LONG_POLL_SECONDS)
                backoff.reset()
                self._in_vain = False
                if unanswered >= _UNANSWERED:
                    log.warning("the console answers again")
                unanswered = 0
                if self._closing.is_set():
                    return
                if found is None:
                    if time.monotonic() - asked < _SENT_AWAY_SECONDS:
                        # All were, so they do not ask at the same time.
                        pause = asking_pause(self._job.pipelines * self._job.stages)
                        self._closing.wait(random.uniform(0.0, 2 * pause))
                    self._look_whether_over(client)
                    continue
                generation = found[0].generation
                self._take_up(*found)
            except (ConsoleUnavailable, ConsoleRefused) as error:
                self._asked_in_vain()
                if isinstance(error, ConsoleRefused) and error.problem.code == "idempotency_conflict":
                    given = f"run: {self._run!r} is another job's here; give each run a name of its own"
                    self._refused(f"{given} ({error})")
                elif isinstance(error, ConsoleRefused | JobUnknown):
                    self._refused(str(error))
                else:
                    unanswered += 1
                    if unanswered == _UNANSWERED:
                        log.warning("%s; your loop goes on, and the console is told once it answers", error)
                self._closing.wait(backoff.seconds())

    def _look_whether_over(self, client: ConsoleClient) -> None:
        """A worker that has come back just before the others ended would wait for them for ten minutes."""
        status = client.get(self._job_path, JobStatus)
        if status is not None and status.state in OVER:
            mine = status.generation == self._newest_generation()
            self._over = _Over(f"{self._me}: the job is {status.state}", mine and status.state is JobState.FINISHED)

    def _asked_in_vain(self) -> None:
        with self._news:
            self._in_vain = True
            self._news.notify_all()

    def _refused(self, why: str) -> None:
        self._refusal = why
        self._say_once(f"the console refuses: {why}")

    def _know_place(self, answer: BatchReply | ConsoleRefused) -> None:
        if isinstance(answer, ConsoleRefused) or answer.refused:
            self._refused(str(answer) if isinstance(answer, ConsoleRefused) else answer.refused[0].detail)
            if isinstance(answer, BatchReply) and answer.refused[0].code == "job_over":
                self._over = _Over(self._refusal)
            self._asked_in_vain()
        else:
            self._before = answer.before.get(str(self._me), 0)

    def _join(self, client: ConsoleClient) -> None:
        """Creates the job, or finds it where another process of this run has created it, and starts the reports."""
        created = client.post("/jobs", self._spec, JobCreated, key=self._run)
        assert created is not None
        self._job_path, self._pause = f"/jobs/{created.job_id}", created.heartbeat_seconds
        self._dead = created.dead_seconds
        reports = WorkerReports(
            ConsoleClient(self._url, token=self._token),
            created.job_id,
            interval=created.heartbeat_seconds,
            fenced=lambda _incarnation: self._give_up(),
            gather=lambda: reports.heard({self._incarnation: (str(self._me), self._status.take())}),
            registered=self._know_place,
        )
        reports.add(
            Registration(
                worker=str(self._me),
                incarnation=self._incarnation,
                host=socket.gethostname(),
                pid=os.getpid(),
                own_loop=True,
            )
        )
        self._reports = reports
        reports.start()

    def _take_up(self, deployment: Deployment, plan: Plan) -> None:
        if str(self._me) not in deployment.living:
            return  # the heartbeats will be told that this process is fenced
        self._acknowledge(deployment.generation, "adopted", self._status.iteration)
        if self._on_plan is not None:
            try:
                self._on_plan(deployment, plan)
            except Exception:
                log.exception("on_plan failed for generation %d", deployment.generation)
        self._status.generation = deployment.generation
        with self._news:
            self._newest = deployment, plan
            self._news.notify_all()
        if self._loop is not None:
            self._loop.lost_without(deployment)
        self._iterations.wake()  # this worker may be the one that reports iterations from now on

    def _finish(self) -> bool:
        """Tells the console that the job is done. Returns whether it knows that now."""
        message = JobFinished(state="finished", reason=f"{self._me} closed its reporter: its training is done")
        try:
            ConsoleClient(self._url, token=self._token, timeout=2.0).post(f"{self._job_path}/finish", message)
        except (ConsoleUnavailable, ConsoleRefused) as error:
            if not isinstance(error, ConsoleRefused) or error.problem.code != "job_over":
                self._say_once(f"the console does not know that the job is done: {error}")
                return False
        return True

    # -- what they share ----------------------------------------------------------------------

    def _end_iteration(self, number: int) -> None:
        now = time.monotonic()
        self._done, self._last_at = (number, now - self._last_at), now
        self._status.iteration, self._status.phase = number + 1, "training"
        deployment = self._deployment
        if deployment is not None and self._resumed < deployment.generation:
            self._resumed = deployment.generation
            # Only a finished iteration shows that this loop has all the state that it needs.
            for state in ("formed", "resumed"):
                self._acknowledge(deployment.generation, state, number)

    def _wait_for_news(self, generation: int, seconds: float) -> None:
        """Waits until there is a newer generation than this, or this process is fenced, or for so many seconds."""
        with self._news:
            self._news.wait_for(lambda: self.fenced or self._newest_generation() > generation, seconds)

    @property
    def _deployment(self) -> Deployment | None:
        return None if self._newest is None else self._newest[0]

    def _newest_generation(self) -> int:
        return 0 if self._deployment is None else self._deployment.generation

    def _acknowledge(self, generation: int, state: str, iteration: int) -> None:
        assert self._reports is not None
        me, incarnation = str(self._me), self._incarnation
        self._reports.wrote(incarnation, [(time.time(), f"generation {generation}: {state}, iteration {iteration}")], 0)
        fields = {"generation": generation, "state": state, "iteration": iteration}
        self._reports.acknowledge([Acknowledgement(worker=me, incarnation=incarnation, **fields)])  # type: ignore[arg-type]

    def _speaks_for_all(self) -> bool:
        """Does this worker report the job's losses and end? The first living worker of the last stage does."""
        deployment = self._deployment
        if deployment is None or self.fenced:
            return False
        living = map(Worker.parse, deployment.living)
        return self._me == min((w for w in living if w.stage == self._last_stage), default=None)

    def _give_up(self) -> None:
        with self._news:
            self.fenced = True
            self._news.notify_all()
        self._closing.set()
        self._iterations.stop(tries=False)
        if self._reports is not None:
            self._reports.stop()
        self._say_once(self._without_me)
        if self._on_fenced is not None:
            try:
                self._on_fenced()
            except Exception:
                log.exception("on_fenced failed")

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("%s", sentence)
