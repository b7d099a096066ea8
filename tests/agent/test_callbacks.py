"""What callbacks are told, and what those for a terminal, TensorBoard, Weights & Biases and MLflow keep of it."""

from __future__ import annotations

import importlib
import math
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from openrecycle import Callback, InputError, MLflow, Optimization, ProgressBar, TensorBoard, WeightsAndBiases
from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.jobs import trainer
from openrecycle.agent.jobs.callbacks import TrainingStart
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.jobs.trainer import ResultLines
from openrecycle.agent.launcher.launch import JobFailed
from openrecycle.agent.launcher.record import EvaluationResult
from openrecycle.agent.messages.protocol import Iteration, Recovery
from tests.agent import own_jobs

RESULT = TrainingResult((2.0,), (), "", lambda layer: {})


def tell(callback: Callback, error: BaseException | None = None) -> None:
    """A job of three iterations with an evaluation, a norm and a failure."""
    callback.on_start(TrainingStart("run", 3, 12))
    for i in range(3):
        loss = 2.0 - i / 2
        about = {"seconds": 0.5, "generation": 1, "living": 4, "learning_rate": 0.25}
        callback.on_iteration(Iteration(iteration=i, loss=loss, loss_hex=loss.hex(), **about))  # type: ignore[arg-type]
    callback.on_gradient_norm(1, 3.5)
    callback.on_evaluation(EvaluationResult(2, 1.25, {"accuracy": 0.75}))
    times = {"detected_ms": 1.0, "unblocked_ms": 2.0, "reformed_ms": 3.0, "resumed_ms": 1500.0}
    callback.on_recovery(Recovery(worker="W0_1", generation=7, **times))  # in the iteration told last
    callback.on_end(RESULT) if error is None else callback.on_exception(error)


EXPECTED = {
    ("train/loss", 2): 1.0,
    ("train/learning_rate", 0): 0.25,
    ("train/samples_per_second", 1): 24.0,
    ("train/gradient_norm", 1): 3.5,
    ("evaluation/loss", 2): 1.25,
    ("evaluation/accuracy", 2): 0.75,
    ("workers", 0): 4.0,
    ("recovery_seconds", 2): 1.5,
}


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = TensorBoard(tmp_path)
    tell(callback)
    tell(callback)  # a second `fit` goes on in the same folder
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert {place: found[place] for place in EXPECTED} == EXPECTED


@pytest.mark.chaos
@pytest.mark.processes  # it asks git
def test_mlflow_has_every_number(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    address = f"sqlite:///{tmp_path}/runs.db"
    callback = MLflow(address, run_name="mine")
    tell(callback)
    client = MlflowClient(tracking_uri=address)
    (run,) = client.search_runs(["0"])
    assert run.info.run_name == "mine" and run.info.status == "FINISHED"
    for (name, step), value in EXPECTED.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert value in [metric.value for metric in history if metric.step == step]
    for error, status in ((JobFailed("halted"), "FAILED"), (KeyboardInterrupt(), "KILLED")):
        tell(callback, error)
        assert client.search_runs(["0"], order_by=["start_time DESC"])[0].info.status == status


@pytest.mark.chaos
@pytest.mark.processes
def test_weights_and_biases_has_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    callback = WeightsAndBiases(project="tests", mode="offline")
    tell(callback)
    # It writes in a process of its own, which may be behind when a run has ended.
    importlib.import_module("wandb").teardown()
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    kept = written.read_bytes()
    for name, _ in EXPECTED:
        assert name.encode() in kept, name


def test_a_library_that_is_missing_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="pip install wandb"):
        WeightsAndBiases()


def test_the_progress_bar_ends_where_the_job_does(capsys: pytest.CaptureFixture[str]) -> None:
    tell(ProgressBar())
    shown = capsys.readouterr().err
    for part in ("3/3", "loss 1.0000", "lr 0.25", "24.0 samples/s", "accuracy 0.7500", "W0_1", "1.5 s"):
        assert part in shown, part


@pytest.mark.processes
@pytest.mark.parametrize("synchronous", [True, False])
def test_the_norm_of_the_gradients_is_told_once_per_iteration(synchronous: bool) -> None:
    norms: list[tuple[int, float]] = []

    class Norms(Callback):
        def on_gradient_norm(self, iteration: int, norm: float) -> None:
            norms.append((iteration, norm))

    optimization = Optimization(clip_norm=0.05, synchronous=synchronous)
    own_jobs.trainer(optimization=optimization, callbacks=[Norms()]).fit(iterations=5)
    assert [iteration for iteration, _ in norms] == list(range(5))
    assert norms[0][1] == pytest.approx(first_norm(), rel=0.3)  # with another dropout
    assert all(norm > 0.05 for _, norm in norms)


def first_norm() -> float:
    """Of the same model in one process."""
    stages = []
    for stage in range(2):
        torch.manual_seed(seed_for("parameters", 0, stage))
        stages.append(own_jobs.build_stage(stage, 2))
    model, total = torch.nn.Sequential(*stages), 0.0
    losses = []
    for pipeline in range(2):
        for micro_batch in range(3):
            torch.manual_seed(seed_for("data", 0, 0, pipeline, micro_batch))
            x, y = own_jobs.data(0, pipeline, micro_batch)
            losses.append(functional.mse_loss(model(x), y))
    torch.stack(losses).mean().backward()
    total = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    return math.sqrt(total)


def test_what_a_result_has_of_a_long_job_takes_little_memory() -> None:
    """Also where a checkpoint has led back, and some losses are not known."""
    lines, count = ResultLines(), 50_000
    tracemalloc.start()
    try:
        for number in range(count):
            lines({"iteration": number, "loss": float(number).hex()})
        # Other threads of this process may be at work.
        here = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, trainer.__file__)])
        assert 0 < sum(trace.size for trace in here.traces) < 24 * count
    finally:
        tracemalloc.stop()
    for number in (count + 5, 7):
        lines({"iteration": number, "loss": (-1.0).hex()})
    losses = lines.result(dict, None).losses
    assert losses[:count] == (*range(7), -1.0, *range(8, count)) and losses[-1] == -1.0
    assert len(losses) == count + 6 and all(map(math.isnan, losses[count:-1]))  # each at the place of its iteration
