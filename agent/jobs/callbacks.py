"""Callbacks: how a job tells its owner what happens while it trains. `Callback` is the interface; the other classes
show the job in a terminal, TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrecycle.agent.jobs.results import TrainingResult, WrittenCheckpoint
from openrecycle.agent.launcher.record import LONG_WAIT, EvaluationResult
from openrecycle.agent.messages.protocol import Iteration, Recovery
from openrecycle.planner.jobs.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

RATE_OVER = 0.9
"""How much of the rate shown so far is kept with each iteration; the rest comes from the new one."""


@dataclass(frozen=True)
class TrainingStart:
    """What is about to run. name: the job's. iterations: how many in all. samples: how many per iteration."""

    name: str
    iterations: int
    samples: int


class Callback:
    """Is told what happens in a job. Override the methods that you need.

    `on_start`, `on_end` and `on_exception` are called in the thread that called `fit`. The others are called one after
    the other in one further thread, and the training does not wait for them. If one of these returns "stop", the
    training ends in order.
    """

    def on_start(self, start: TrainingStart) -> object:
        """Called before the first iteration."""

    def on_iteration(self, iteration: Iteration) -> object:
        """Called when all workers have committed an iteration. It has the loss, the learning rate, the seconds it took
        and how many of those a worker waited for data, the generation, the number of living workers, and which
        micro-batches were left out (`skipped`)."""

    def on_gradient_norm(self, iteration: int, norm: float) -> object:
        """Called, where gradients are clipped, with their norm before clipping. The call comes up to an iteration
        later, since stages step before they know the norm."""

    def on_evaluation(self, evaluation: EvaluationResult) -> object:
        """Called with the means of the loss and the metrics. `evaluation.iteration` says after how many iterations."""

    def on_checkpoint(self, checkpoint: WrittenCheckpoint) -> object:
        """Called when a checkpoint is complete. It gives access to the weights: `checkpoint.state_dict(layer)`,
        `checkpoint.save_pretrained(folder)`."""

    def on_recovery(self, recovery: Recovery) -> object:
        """Called when a failure was survived."""

    def on_end(self, result: TrainingResult) -> object:
        """Called after the last iteration, when the weights are written."""

    def on_exception(self, error: BaseException) -> object:
        """Called instead of `on_end` when `fit` is about to raise this error."""


class ProgressBar(Callback):
    """Shows a line in the terminal with loss, learning rate, samples per second and remaining time. Where standard
    error is no terminal, it prints a line for each evaluation and failure instead."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._samples, self._seconds = 0, 0.0

    def on_start(self, start: TrainingStart) -> None:
        # Imported here, so that a job without a bar does not load it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._samples = start.samples
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        more = TextColumn("{task.fields[text]}"), TimeRemainingColumn()
        self._progress = Progress(*columns, *more, console=Console(file=sys.stderr))
        self._task = self._progress.add_task(start.name, total=start.iterations, text="")
        self._progress.start()

    def on_iteration(self, iteration: Iteration) -> None:
        before = self._seconds or iteration.seconds
        self._seconds = RATE_OVER * before + (1 - RATE_OVER) * iteration.seconds
        rate = self._samples / self._seconds if self._seconds else 0.0
        learning = "" if iteration.learning_rate is None else f"  lr {iteration.learning_rate:.3g}"
        text = f"loss {iteration.loss:.4f}{learning}  {rate:.1f} samples/s"
        if iteration.data_seconds > LONG_WAIT * iteration.seconds:
            text += f"  {min(1.0, iteration.data_seconds / iteration.seconds):.0%} waiting for data"
        if self._progress is not None:
            self._progress.update(self._task, completed=iteration.iteration + 1, text=text)

    def on_evaluation(self, evaluation: EvaluationResult) -> None:
        self._say(f"after {evaluation.iteration} iterations: {numbers_of(evaluation)}")

    def on_recovery(self, recovery: Recovery) -> None:
        self._say(f"{recovery.worker} died; training went on after {recovery.resumed_ms / 1000:.1f} s")

    def on_end(self, result: TrainingResult) -> None:
        self._close()

    def on_exception(self, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)


def numbers_of(evaluation: EvaluationResult) -> str:
    """Returns the loss and the metrics in words: `loss 2.3, accuracy 0.8`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in _values(evaluation).items())


def _values(evaluation: EvaluationResult) -> dict[str, float]:
    return {"loss": evaluation.loss, **evaluation.metrics}


class _Numbers(Callback):
    """Base of the callbacks that log numbers by name and step."""

    def __init__(self) -> None:
        self._samples = self._newest = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def close(self, error: BaseException | None = None) -> None:
        """error: what `fit` raises; None: the job has run to its end."""
        raise NotImplementedError

    def on_end(self, result: TrainingResult) -> None:
        self.close()

    def on_exception(self, error: BaseException) -> None:
        self.close(error)

    def on_start(self, start: TrainingStart) -> None:
        self._samples = start.samples

    def on_iteration(self, iteration: Iteration) -> None:
        values = {"train/loss": iteration.loss, "workers": float(iteration.living)}
        if iteration.learning_rate is not None:
            values["train/learning_rate"] = iteration.learning_rate
        if iteration.seconds:
            values["train/samples_per_second"] = self._samples / iteration.seconds
        values |= {"generation": float(iteration.generation), "train/skipped": float(len(iteration.skipped))}
        values["train/data_seconds"] = iteration.data_seconds
        self._newest = iteration.iteration
        self.log(values, iteration.iteration)

    def on_gradient_norm(self, iteration: int, norm: float) -> None:
        self.log({"train/gradient_norm": norm}, iteration)

    def on_evaluation(self, evaluation: EvaluationResult) -> None:
        values = {f"evaluation/{name}": value for name, value in _values(evaluation).items()}
        self.log(values, evaluation.iteration)

    def on_recovery(self, recovery: Recovery) -> None:
        self.log({"recovery_seconds": recovery.resumed_ms / 1000}, self._newest)


class TensorBoard(_Numbers):
    """Writes to a folder that TensorBoard shows. Raises InputError where TensorBoard is not installed."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._make = partial(_library("torch.utils.tensorboard", "tensorboard").SummaryWriter, str(folder))
        self._writer: Any = None

    def on_start(self, start: TrainingStart) -> None:
        super().on_start(start)
        self._writer = self._make()

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self, error: BaseException | None = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases(_Numbers):
    """Logs to a run of wandb. options: arguments of `wandb.init`, such as project. Raises InputError where wandb is not
    installed."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._wandb, self._options = _library("wandb", "wandb"), options
        self._run: Any = None

    def on_start(self, start: TrainingStart) -> None:
        super().on_start(start)
        self._run = self._wandb.init(**({"name": start.name} | self._options))

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._run is not None:
            # wandb's own step must never decrease, which that of an evaluation does.
            self._run.log({**values, "iteration": step})

    def close(self, error: BaseException | None = None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)
            self._run = None


class MLflow(_Numbers):
    """Logs to a run of MLflow. options: arguments of `mlflow.start_run`. address: its tracking server, or a
    database such as `sqlite:///runs.db` (MLflow 3 refuses folders). Raises InputError where MLflow is not installed."""

    def __init__(self, address: str | None = None, **options: Any) -> None:
        super().__init__()
        self._mlflow, self._address, self._options = _library("mlflow", "mlflow"), address, options
        self._run: Any = None

    def on_start(self, start: TrainingStart) -> None:
        super().on_start(start)
        if self._address is not None:
            self._mlflow.set_tracking_uri(self._address)
        self._run = self._mlflow.start_run(**({"run_name": start.name} | self._options))

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._run is not None:
            self._mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def close(self, error: BaseException | None = None) -> None:
        if self._run is not None:
            failed = "FAILED" if isinstance(error, Exception) else "KILLED"  # Ctrl-C and SIGTERM are no Exception
            self._mlflow.end_run("FINISHED" if error is None else failed)
            self._run = None


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError("callbacks", f"no {package} ({error})", f"it to be installed: pip install {package}") from None
