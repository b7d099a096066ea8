"""ResilientTrainer: pipeline-parallel training of your own model, through failures, on this machine.

trainer = ResilientTrainer(
    model=Model(layers=build_layer, layer_count=12, loss=functional.cross_entropy),
    data=Data(dataset, batch_size=8),
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    job=Job.uniform(2, 3, 4),
)
result = trainer.fit(iterations=1000)      # under `if __name__ == "__main__":`
result.state_dict(0)                       # the trained weights of layer 0
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset

from openrecycle.agent.checkpoints import KeptWeights, read_weights
from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.options import (
    Checkpoints,
    Console,
    Faults,
    Optimization,
    Planning,
    TrainingOptions,
)
from openrecycle.agent.jobs.callables import (
    CallableWorkload,
    EvaluationBatches,
    Model,
    OptimizerFactory,
    SchedulerFactory,
    SentWorkload,
    check_sendable,
)
from openrecycle.agent.jobs.callbacks import Callback, TrainingStart
from openrecycle.agent.jobs.preflight import check_workload
from openrecycle.agent.jobs.results import CheckpointWeights, TrainingResult, WrittenCheckpoint
from openrecycle.agent.jobs.start import check_writable, make_launcher
from openrecycle.agent.launcher.processes import preload, start_worker_server
from openrecycle.agent.launcher.record import (
    WARNING,
    EvaluationResult,
    is_remark,
    is_warning,
    iteration_of,
    sentence_of,
)
from openrecycle.agent.messages.client import ConsoleRefused, ConsoleUnavailable, Delivery, Record
from openrecycle.agent.messages.protocol import Iteration, Recovery
from openrecycle.agent.models.data import (
    Data,
    DataFunction,
    Evaluation,
    InOrder,
    check_data_function,
    is_function,
    kind_name,
    own_numbers,
)
from openrecycle.agent.models.workload import Workload, first_readable
from openrecycle.agent.nodes.role import check_alone
from openrecycle.forking import fork_context
from openrecycle.planner.jobs.errors import InputError, PlannerError, in_short
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import JobDoc
from openrecycle.planner.profiles import Profile
from openrecycle.scratch import scratch

if TYPE_CHECKING:
    from openrecycle.agent.launcher.launch import Launcher
    from openrecycle.agent.models.hugging_face import Pretrained

log = logging.getLogger("openrecycle")

_UNGUARDED = 77
_IMPORT_SECONDS = 300.0

OnError = Literal["stop", "log"]

P = ParamSpec("P")
T = TypeVar("T")


def _in_short(method: Callable[P, T]) -> Callable[P, T]:
    """Makes what ends a job one sentence, raised at the user's own line. The whole traceback is logged at DEBUG."""

    @functools.wraps(method)
    def short(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if not _has_said_all(error):
                raise
            log.debug("refused", exc_info=error)
            raise in_short(error)  # noqa: B904 -- in_short has set the cause that is to be shown

    return short


def _has_said_all(error: Exception) -> bool:
    if isinstance(error, (PlannerError, ConsoleUnavailable, ConsoleRefused)):
        return True
    from openrecycle.agent.launcher.launch import JobFailed

    return isinstance(error, JobFailed)


class ResilientTrainer:
    """One job: a grid of worker processes on this machine. The job goes on training while some of them die.

    Worker processes import the arguments. So layers, loss, data, optimizer, scheduler and collate must be functions or
    classes at the top level of a file, and the script must start training under `if __name__ == "__main__":`.

    model: a Model(...): the layers, and the loss.

    The data:
    data: a Data(...): samples, and how they become micro-batches. Or a DataLoader, or a function of (iteration,
        pipeline, micro_batch) that returns a micro-batch.
    evaluate: an Evaluation(...): what the job is evaluated on while it trains.

    Optimization:
    optimizer: a function of a stage's parameters that returns a torch.optim.Optimizer. If its argument is called
        `named_parameters`, it gets (name, parameter) pairs, with names such as LAYER.NAME.
    scheduler: a function of that optimizer that returns an LRScheduler, which is stepped once per iteration.
    optimization: an Optimization(...): precision, clipping, and when a step is final.
    seed: the seed of parameters, data order and dropout.

    The job:
    job: the grid, and the op times that plans are made from.
    profile: these op times, where `job` has none: a file that `openrecycle profile` wrote, a shipped profile's name,
        or the object read from either.
    planning: a Planning(...): which plans may be made. platform: a Platform(...): the devices.
    weights: the folder that the trained weights are written to, a file per layer. If not given, they stay in memory.
    checkpoints: a Checkpoints(...): what is written so that a job can be resumed.
    record: a JSON-lines file for losses, failures and the final hash, as with `openrecycle train --record`.
    faults: a Faults(...): what happens when workers, links or samples fail.
    console: a Console(...): the console that watches the job and decides.

    on_iteration: called with (iteration, loss) of each iteration that is committed. If it takes a third argument, that
        is the agent.messages.protocol.Iteration. The `skipped` of this lists the micro-batches that were left out of
        all sums because they gave NaN or infinity, numbered pipeline by pipeline.
    on_recovery: called with each failure that was survived. All calls of both are made one after the other in one
        thread of the process that called `fit`. They may take their time: training does not wait for them, but `fit`
        returns only after all calls. If they fall more than 10,000 lines behind, the oldest iterations are left out,
        with a warning. If a call returns "stop", the training ends in order, as with `stop`.
    callbacks: Callbacks (agent.jobs.callbacks), such as ProgressBar() or TensorBoard(folder), which are told of more
        events. They are called in the same way.
    on_error: what happens when one of these calls raises, after the traceback was logged. "stop": the training ends
        in order, and `fit` raises the exception, with the TrainingResult so far as its `result`. "log": nothing more.

    `help()` of each of these classes lists its fields; those of the option groups, such as Planning, are also options
    of `openrecycle train`.
    Raises InputError that names the argument, with its group: `faults.compare_every`.
    """

    @_in_short
    def __init__(
        self,
        *,
        model: Model,
        data: Data | DataLoader[Any] | DataFunction,
        evaluate: Evaluation | None = None,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        optimization: Optimization | None = None,
        seed: int = 0,
        job: Job,
        profile: str | Path | Profile | JobDoc | None = None,
        planning: Planning | None = None,
        platform: Platform | None = None,
        weights: str | Path | None = None,
        checkpoints: Checkpoints | None = None,
        record: str | Path | None = None,
        faults: Faults | None = None,
        console: Console | None = None,
        on_iteration: Callable[[int, float], object] | Callable[[int, float, Iteration], object] | None = None,
        on_recovery: Callable[[Recovery], object] | None = None,
        callbacks: Sequence[Callback] = (),
        on_error: OnError = "stop",
    ) -> None:
        if not isinstance(model, Model):
            expected = "openrecycle.Model(layers=..., loss=...); from_transformers takes a model of transformers"
            raise InputError("model", kind_name(model), expected)
        data = Data.of(data)
        if not isinstance(job, Job):
            raise InputError("job", type(job).__name__, "a Job such as Job.uniform(pipelines, stages, micro_batches)")
        model.check(job.stages)
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            expected = (
                "a function of the optimizer that makes one, such as "
                "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
            )
            raise InputError("scheduler", f"a {type(scheduler).__name__} already made", expected)
        if isinstance(optimizer, torch.optim.Optimizer):
            expected = "a function that makes one of a stage's parameters, such as partial(torch.optim.AdamW, lr=1e-3)"
            raise InputError("optimizer", f"an {type(optimizer).__name__} already made", expected)
        if not callable(optimizer):
            raise InputError("optimizer", optimizer, "something that can be called")
        if on_error not in get_args(OnError):
            raise InputError("on_error", on_error, "stop or log")
        given: dict[str, Any] = {"planning": planning, "optimization": optimization, "platform": platform}
        given |= {"checkpoints": checkpoints, "faults": faults, "console": console}
        groups = {name: group for name, group in given.items() if group is not None}
        if evaluate is not None and not isinstance(evaluate, Evaluation):
            raise InputError("evaluate", kind_name(evaluate), "openrecycle.Evaluation(...)")
        if isinstance(callbacks, Callback) or not all(isinstance(callback, Callback) for callback in callbacks):
            raise InputError("callbacks", callbacks, "a list of objects of classes of openrecycle.Callback")
        every = 0 if evaluate is None else evaluate.every
        options = TrainingOptions(job=job, seed=seed, weights=weights, record=record, evaluate_every=every, **groups)
        options = replace(options.anchored(), job=options.planning.job(job, profile))
        options.check(to_the_end=False)  # wrong options are refused now, not when training begins
        if options.record is not None:
            check_writable(Path(options.record))
        cut = data.cut(job, seed)
        workload = CallableWorkload(model, cut, optimizer, scheduler, seed, _evaluation(evaluate, cut))
        self._pretrained: Pretrained | None = None
        self._written_folder = False
        check_sendable(workload)
        with own_numbers("first look", seed):
            try:
                workload = workload.as_found()
            except InputError:
                raise
            except Exception as error:  # check_workload explains what is wrong with the data
                log.debug("no micro-batch could be read: %s", error)
        self._told = (_Functions(_full(on_iteration), on_recovery), *callbacks)
        self._callbacks = partial(CalledBack, self._told, on_error)
        self._launcher: Launcher | None = None
        self._stop_asked = False
        self._workload = SentWorkload.of(workload)
        self._options, self._layers = options, model.count
        self._needed = check_workload(workload, options)
        (_warn if self._needed.warning else _say)(self._needed.text)

    @classmethod
    @_in_short
    def from_transformers(
        cls,
        model: Any,
        *,
        data: Data | DataLoader[Any] | DataFunction,
        evaluate: Evaluation | None = None,
        optimizer: OptimizerFactory,
        seed: int = 0,
        job: Job,
        **others: Any,
    ) -> ResilientTrainer:
        """Returns a trainer for a causal language model of transformers, cut into layers: the embedding, one per
        block, and the head.

        model: a config, whose model is initialised from `seed`; a folder or a name on the hub, with safetensors; or a
            model with its weights. Each worker reads only the tensors of its own layers. Parameters that need no
            gradient stay as they are.
        data: a Data(...) of a map-style data set, or a DataLoader of one. Its samples are dicts with input_ids and, if
            need be, attention_mask, position_ids and labels. `collate` may be a collator of transformers. Or a function
            of (iteration, pipeline, micro_batch) that returns such a batch. Without labels the tokens, except padding,
            are the labels. A label of -100 is ignored.

        The loss is the model's own: the mean over all tokens of an iteration, as with transformers' Trainer. All other
        arguments are those of ResilientTrainer. `fit`'s result has `save_pretrained`. Raises InputError.
        """
        if unknown := others.keys() - inspect.signature(cls).parameters.keys():
            raise TypeError(f"from_transformers() got an unexpected keyword argument {min(unknown)!r}")
        if not isinstance(job, Job):
            raise InputError("job", type(job).__name__, "a Job such as Job.uniform(pipelines, stages, micro_batches)")
        from openrecycle.agent.models.hugging_face import pretrained_job

        ending = contextlib.ExitStack()
        with contextlib.ExitStack() as failed, own_numbers("first look", seed):
            failed.callback(ending.close)
            skips = getattr(others.get("faults"), "on_bad_sample", None) == "skip"
            source, loss, data, evaluate = pretrained_job(
                model, Data.of(data).without_loader(), ending, evaluate, skips=skips
            )
            if job.stages > source.layer_count:
                raise InputError("job.stages", job.stages, f"at most {source.layer_count}, the layers of the model")
            cut = data.cut(job, seed)
            made, pads = first_readable(cut.samples), cast(Any, cut.collate)
            widest = pads.widest(made) if getattr(pads, "varies", False) else made
            between = source.stage_io(cut.split(widest)[0][0].shape)
            given = Model(layers=source, layer_count=source.layer_count, loss=loss, tied=source.tied, stage_io=between)
            trainer = cls(model=given, data=data, evaluate=evaluate, optimizer=optimizer, seed=seed, job=job, **others)
            failed.pop_all()
        weakref.finalize(trainer, ending.close)
        trainer._pretrained = source
        trainer._written_folder = source.folder is not None and not isinstance(model, (str, Path))
        sent = trainer._workload
        trainer._workload = replace(sent, modules=(*sent.modules, source.kind.__module__))
        return trainer

    @_in_short
    def fit(self, iterations: int) -> TrainingResult:
        """Trains from the initial parameters, or from a checkpoint, until `iterations` iterations are committed or
        `stop` is called.

        Remarks and warnings go to the logger `openrecycle`. Unless the script handles SIGTERM itself, that signal ends
        the job in order, and `fit` raises SystemExit.

        Raises InputError (also where torchrun or srun started several of this process), JobFailed where the job can't
        go on (no process is left behind), ConsoleUnavailable or ConsoleRefused where the console does not take the
        job, and an exception of a callback (see on_error) after the weights are written.
        """
        check_alone(os.environ)
        self._stop_asked = False
        with _when_terminated(self._terminated):
            return self._fit(iterations)

    def _terminated(self, number: int) -> None:
        """Ends the job after a signal, which is SIGTERM. Called in the main thread."""
        if self._launcher is None:
            raise SystemExit(128 + number)
        self._launcher.stop(number)

    def _fit(self, iterations: int) -> TrainingResult:
        from openrecycle.agent.launcher.launch import JobFailed, Stopped

        options = replace(self._options, iterations=iterations)
        samples = self._workload.load().samples_per_micro_batch * options.job.pipelines * options.job.micro_batches
        start = TrainingStart(options.console.name, iterations, samples)
        _check_script(self._workload)
        folder = str(options.weights or tempfile.mkdtemp(prefix="weights-", dir=scratch()))
        try:
            lines = ResultLines()
            callbacks = self._callbacks(self.stop, self._written)
            with contextlib.ExitStack() as ending:
                targets: list[Callable[[dict[str, Any]], None]] = [lines]
                delivery = Delivery(callbacks, "on_iteration", _warn)
                ending.callback(delivery.close, lambda: callbacks.over)
                targets.append(delivery)

                def listener(line: dict[str, Any]) -> None:
                    for take in targets:
                        take(line)

                with own_numbers("start", options.seed):
                    launcher = make_launcher(
                        replace(options, weights=folder), self._workload, listener, _say, needed=self._needed
                    )
                # The record is opened only now: a start that is refused leaves an earlier record in its place.
                if options.record is not None:
                    targets.insert(0, record := Record(Path(options.record), _warn))
                    ending.callback(record.close)
                self._launcher = launcher
                if self._stop_asked:
                    launcher.end_soon()
                try:
                    callbacks.each("on_start", start)
                    try:
                        try:
                            launcher.run()
                        finally:
                            self._launcher = None
                    except JobFailed:
                        delivery.close()
                        raise
                    except Stopped as stop:
                        raise SystemExit(128 + stop.signal) from None
                    delivery.close()
                except BaseException as error:
                    callbacks.over = True  # no further calls, also after Ctrl-C
                    callbacks.each("on_exception", error)
                    raise
            if options.weights is not None:
                weights: Callable[..., dict[str, Any]] = partial(read_weights, folder)
            else:
                weights = KeptWeights(folder, self._layers or options.job.stages)
            result = lines.result(weights, self._pretrained)
            callbacks.each("on_end", result)
            if callbacks.error is not None:
                with contextlib.suppress(AttributeError):  # a class with slots
                    callbacks.error.result = result  # type: ignore[attr-defined]
                raise callbacks.error
            return result
        finally:
            self._launcher = None
            if options.weights is None:
                _remove(Path(folder))

    def _written(self, iteration: int) -> WrittenCheckpoint:
        folder = self._options.checkpoints.folder
        assert folder is not None
        layers = self._layers or self._options.job.stages
        weights = CheckpointWeights(folder, iteration, self._load, layers, self._options.seed)
        return WrittenCheckpoint(iteration, weights, self._pretrained)

    def workload(self) -> Workload:
        """Returns layers, data and loss as a worker process makes them from this trainer's arguments. For `openrecycle
        train --workload`, return this from a function at the top level of a file.

        Raises InputError where a model of transformers was given with its weights: each worker calls that function, and
        would write the whole model into a folder that nobody removes."""
        if self._written_folder:
            expected = "a config, a folder (`model.save_pretrained`) or a name on the hub where `workload()` is used"
            raise InputError("model", "a model with its weights", expected)
        return self._load()

    def _load(self) -> Workload:
        """Loads the workload. A reference to this bound method keeps the trainer alive, and with it the files of a
        pretrained model."""
        return self._workload.load()

    def stop(self) -> None:
        """Makes `fit` end in order after one of the iterations under way. The weights, and the last checkpoint if the
        job writes any, are written, and `fit` returns the same as a run of that many iterations.

        May be called in any thread, and returns at once. Without a running `fit` nothing happens.
        """
        self._stop_asked = True
        launcher = self._launcher
        if launcher is not None:
            launcher.end_soon()


@contextlib.contextmanager
def _when_terminated(handle: Callable[[int], None]) -> Iterator[None]:
    """In the main thread, calls `handle` on SIGTERM inside the block, unless the script has its own handler."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    process = os.getpid()

    def heed(number: int, frame: object) -> None:
        if os.getpid() == process:
            handle(number)
        else:  # a callback has forked this process, and the signal is meant for it alone
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if mine:
        signal.signal(signal.SIGTERM, heed)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class ResultLines:
    """Takes the lines of the record, and collects from them what TrainingResult holds."""

    def __init__(self) -> None:
        self._iterations, self._losses = array("Q"), array("d")
        self._recoveries: list[Recovery] = []
        self._evaluations: list[EvaluationResult] = []
        self._sha256 = ""

    def __call__(self, line: dict[str, Any]) -> None:
        if "loss" in line:
            self._iterations.append(line["iteration"])
            self._losses.append(float.fromhex(line["loss"]))
        elif "failure" in line:
            self._recoveries.append(Recovery(**line["failure"]))
        elif "evaluation" in line:
            self._evaluations.append(EvaluationResult.of(**line["evaluation"]))
        elif "final" in line:
            self._sha256 = line["final"]["parameters_sha256"]

    def result(self, weights: Callable[..., dict[str, Any]], pretrained: Pretrained | None) -> TrainingResult:
        # In order, the newest of each: a job that fell back to a checkpoint runs some iterations again.
        newest = dict(zip(self._iterations, self._losses, strict=True))
        losses = tuple(newest.get(i, math.nan) for i in range(min(newest), max(newest) + 1)) if newest else ()
        return TrainingResult(
            losses, tuple(self._recoveries), self._sha256, weights, tuple(self._evaluations), pretrained
        )


class _Functions(Callback):
    """Makes a Callback of the two functions `on_iteration` and `on_recovery`."""

    def __init__(
        self,
        iteration: Callable[[Iteration], object] | None,
        recovery: Callable[[Recovery], object] | None,
    ) -> None:
        if iteration is not None:
            self.on_iteration = iteration  # type: ignore[method-assign, assignment]
        if recovery is not None:
            self.on_recovery = recovery  # type: ignore[method-assign, assignment]


def _log(line: dict[str, Any]) -> None:
    """Logs a remark of the job. Where no logging is set up, Python prints warnings only."""
    log.log(logging.WARNING if is_warning(line) else logging.INFO, "%s", sentence_of(line).removeprefix(WARNING))


def _say(text: str) -> None:
    _log({"said": text})


def _warn(text: str) -> None:
    _log({"warning": text})


class CalledBack:
    """Passes the lines of the record to the user's callbacks, and remarks to the log.

    stop: ends the training in order. written: gives the checkpoint after so many iterations.
    error: the first exception of a callback, where `fit` is to raise it. over: no further lines are passed on.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        on_error: OnError,
        stop: Callable[[], None],
        written: Callable[[int], WrittenCheckpoint],
    ) -> None:
        self._told, self._on_error, self._stop, self._written = callbacks, on_error, stop, written
        self.error: BaseException | None = None
        self.over = False

    def __call__(self, line: dict[str, Any]) -> None:
        if self.over:
            return
        if is_remark(line):
            _log(line)
        if "loss" in line:
            self.each("on_iteration", iteration_of(line))
        elif "failure" in line:
            self.each("on_recovery", Recovery(**line["failure"]))
        elif "evaluation" in line:
            self.each("on_evaluation", EvaluationResult.of(**line["evaluation"]))
        elif "gradient_norm" in line:
            about = line["gradient_norm"]
            self.each("on_gradient_norm", about["iteration"], float.fromhex(about["norm"]))
        elif "checkpoint" in line and line["checkpoint"]["problem"] is None:
            self.each("on_checkpoint", self._written(line["checkpoint"]["iteration"]))

    def each(self, name: str, *arguments: Any) -> None:
        """Calls this method of every callback."""
        for callback in self._told:
            self._call(name, getattr(callback, name), arguments)

    def _call(self, name: str, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        try:
            answer = callback(*arguments)
        except BaseException as error:  # also sys.exit() in a callback, which must not end this thread
            log.exception("%s raised %s", name, type(error).__name__)
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C while the caller's thread was in a callback
            if self._on_error == "stop":
                self.error = self.error or error
                self._stop()
        else:
            if isinstance(answer, str) and answer == "stop":
                self._stop()


def _full(on_iteration: Callable[..., object] | None) -> Callable[[Iteration], object] | None:
    """Wraps the user's function of (iteration, loss), or of (iteration, loss, details), as one of the details alone.
    Raises InputError."""
    if on_iteration is None:
        return None
    try:
        signature = inspect.signature(on_iteration)
    except TypeError:
        raise InputError("on_iteration", on_iteration, "a function of (iteration, loss)") from None
    except ValueError:  # a builtin has no signature
        return lambda i: on_iteration(i.iteration, i.loss)
    if _binds(signature, 2):
        return lambda i: on_iteration(i.iteration, i.loss)
    if _binds(signature, 3):
        return lambda i: on_iteration(i.iteration, i.loss, i)
    raise InputError("on_iteration", str(signature), "a function of (iteration, loss)")


def _binds(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*range(arguments))
    except TypeError:
        return False
    return True


def _evaluation(evaluate: Evaluation | None, trained_on: Data) -> EvaluationBatches | None:
    """Returns what the job is evaluated on. A data set is cut into micro-batches of the size that is trained on.
    trained_on: cut. Raises InputError."""
    if evaluate is None:
        return None
    data, count = evaluate.data, evaluate.micro_batches
    batch_size, collate = trained_on.batch_size, trained_on.collate
    if isinstance(data, DataLoader):
        own = evaluate.without_loader(batch_size)
        data, batch_size, collate = own.samples, own.batch_size, own.collate
    if is_function(data):
        if count is None:
            raise InputError(
                "evaluate.micro_batches", None, "how many micro-batches there are, where data is a function"
            )
        check_data_function(data, "evaluate.data", ["number"])
        return EvaluationBatches(data, count, evaluate.metrics, trained_on)
    if batch_size is None or isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        expected = "a map-style data set, a DataLoader of one, or a function of the micro-batch's number"
        raise InputError("evaluate.data", type(data).__name__, expected)
    whole = len(data) // batch_size
    if not whole:
        raise InputError("evaluate.data", len(data), f"at least one micro-batch of {batch_size} samples")
    taken = whole if count is None else min(count, whole)
    return EvaluationBatches(InOrder(data, batch_size, collate), taken, evaluate.metrics, trained_on)


def _check_script(workload: SentWorkload) -> None:
    """Tries in one process what every worker will do: import the script that is running.

    Raises InputError if this import starts training again, or fails.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(_UNGUARDED)  # this is the process that tries the import
    start_worker_server(preload(workload))
    probe = fork_context().Process(target=_nothing, daemon=True)
    probe.start()
    probe.join(_IMPORT_SECONDS)
    if probe.exitcode == _UNGUARDED:
        raise InputError(
            "fit",
            "a call at the top level of the script",
            'a call under `if __name__ == "__main__":`, because every worker process imports the script',
        )
    if probe.exitcode != 0:
        probe.kill()
        raise InputError(
            "fit",
            "a script that ends with an error, or hangs, when a worker process imports it",
            'one that only defines things outside `if __name__ == "__main__":`',
        )


def _nothing() -> None:
    pass


def _remove(folder: Path) -> None:
    for file in folder.glob("*"):
        file.unlink(missing_ok=True)
    folder.rmdir()
