"""Dict batches with a mask that all layers get, groups of the optimizer by name, and evaluation while a job trains."""

from __future__ import annotations

import logging
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle import Callback, Checkpoints, Data, Evaluation, Faults, InputError, Job, Optimization, Planning
from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.jobs.callables import CallableWorkload, EvaluationBatches, Model
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.launcher.record import EvaluationResult
from openrecycle.agent.messages.protocol import Iteration, Recovery
from openrecycle.agent.models.data import MicroBatchSampler
from tests.agent import masked_jobs, own_jobs
from tests.conftest import at_length, refuses

ITERATIONS = 10


class Heard(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_start(self, start: object) -> None:
        self.told.append(start)

    def on_iteration(self, iteration: Iteration) -> None:
        self.told.append(iteration)

    def on_evaluation(self, evaluation: EvaluationResult) -> None:
        self.told.append(evaluation)

    def on_recovery(self, recovery: Recovery) -> None:
        self.told.append(recovery)

    def on_end(self, result: TrainingResult) -> None:
        self.told.append(result)

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.told if isinstance(one, kind)]


@cache
def undisturbed() -> tuple[TrainingResult, Heard]:
    heard = Heard()
    return masked_jobs.trainer(callbacks=[heard]).fit(iterations=ITERATIONS), heard


def model(result: TrainingResult) -> list[nn.Module]:
    layers = [masked_jobs.build_layer(k, masked_jobs.LAYERS) for k in range(masked_jobs.LAYERS)]
    for number, layer in enumerate(layers):
        layer.load_state_dict(result.state_dict(number))
        layer.eval()
    return layers


def outputs(layers: list[nn.Module], batch: dict[str, Tensor]) -> Tensor:
    x: Tensor = layers[0](batch["input_ids"])
    for layer in layers[1:]:
        x = layer(x, batch["attention_mask"])
    return x


def whole(samples: masked_jobs.Sentences, indices: range) -> dict[str, Tensor]:
    rows = [samples[i] for i in indices]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.processes
def test_the_last_evaluation_is_that_of_the_trained_weights() -> None:
    result, heard = undisturbed()
    assert [e.iteration for e in result.evaluations] == [2, 4, 6, 8, 10]
    layers, samples = model(result), masked_jobs.Sentences(20, 2)
    losses, right = [], []
    for first in range(0, 20, masked_jobs.BATCH):
        batch = whole(samples, range(first, first + masked_jobs.BATCH))
        with torch.no_grad():
            y = outputs(layers, batch)
        losses.append(functional.cross_entropy(y, batch["labels"]).item())
        right.append(masked_jobs.accuracy(y, batch["labels"]).item())
    last = result.evaluations[-1]
    assert last.loss == pytest.approx(math.fsum(losses) / 10, rel=1e-6)
    assert last.metrics == {"accuracy": pytest.approx(math.fsum(right) / 10)}
    assert heard.of(EvaluationResult) == list(result.evaluations)
    assert [i.loss for i in heard.of(Iteration)] == list(result.losses)
    assert {i.learning_rate for i in heard.of(Iteration)} == {0.01}
    assert heard.told[-1] == result and heard.told[0].samples == 2 * 3 * masked_jobs.BATCH
    # Told in the order in which it happened.
    assert [isinstance(one, Iteration) for one in heard.told[1:-1]] == [True, True, False] * 5


@pytest.mark.processes
def test_training_is_that_of_one_process_with_the_same_groups_and_masks() -> None:
    """Without dropout; sums of floats differ in the last bits."""
    result = masked_jobs.trainer(layers=plain_layer, evaluate=None).fit(iterations=3)
    layers = []
    for k in range(masked_jobs.LAYERS):
        torch.manual_seed(seed_for("parameters", 0, k))
        layers.append(plain_layer(k, masked_jobs.LAYERS))
    named = [(f"{k}.{name}", p) for k, layer in enumerate(layers) for name, p in layer.named_parameters()]
    optimizer, losses = masked_jobs.decayed(named), []
    samples, job = masked_jobs.Sentences(96, 1), masked_jobs.JOB
    sampler = MicroBatchSampler(96, masked_jobs.BATCH, job)
    for iteration in range(3):
        total = torch.zeros(())
        for pipeline in range(2):
            for micro_batch in range(3):
                rows = [samples[i] for i in sampler(iteration, pipeline, micro_batch)]
                batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
                total = total + functional.cross_entropy(outputs(layers, batch), batch["labels"]) / 6
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    assert result.losses == pytest.approx(losses, rel=1e-5)
    for k, layer in enumerate(layers):
        for name, value in result.state_dict(k).items():
            # Adam makes much of gradients that are nothing but rounding, as those of the keys' biases are.
            assert torch.allclose(value, layer.state_dict()[name], atol=2e-3), (k, name)


def plain_layer(layer: int, layers: int) -> nn.Module:
    module = masked_jobs.build_layer(layer, layers)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    ("faults", "planning"),
    [
        # In an iteration that an evaluation precedes, by itself, and on both stages.
        at_length(Faults(kill=["W1_1@2:F1"]), Planning()),
        at_length(Faults(kill=["W0_0@4:W2"]), Planning(relayout="always")),
        (Faults(kill=["W1_0@3:R"], rejoin=["W1_0@3"]), Planning(relayout="never")),
        at_length(Faults(kill=["W0_1@5:V"]), Planning(technique="adaptive")),
    ],
)
def test_evaluations_are_the_same_to_the_bit_through_a_kill(faults: Faults, planning: Planning) -> None:
    heard = Heard()
    result = masked_jobs.trainer(faults=faults, planning=planning, callbacks=[heard]).fit(iterations=ITERATIONS)
    plain, _ = undisturbed()
    assert result.evaluations == plain.evaluations
    assert (result.losses, result.parameters_sha256) == (plain.losses, plain.parameters_sha256)
    assert len(heard.of(Recovery)) == 1


@pytest.mark.chaos
@pytest.mark.processes
def test_a_checkpoint_that_is_due_with_an_evaluation_has_the_step_as_it_was_put_right(tmp_path: Path) -> None:
    """The first step is taken before it is known that it must be clipped; the evaluation after it waits for that."""
    folder = str(tmp_path / "checkpoints")

    def fit(checkpoints: Checkpoints, iterations: int) -> TrainingResult:
        evaluate, clipped = Evaluation(data=masked_jobs.Sentences(4, 2), every=1), Optimization(clip_norm=1e-3)
        job = masked_jobs.trainer(evaluate=evaluate, optimization=clipped, checkpoints=checkpoints)
        return job.fit(iterations=iterations)

    unbroken = fit(Checkpoints(directory=folder, every=1, keep=9), 3)
    resumed = fit(Checkpoints(directory=folder, every=1, keep=9, resume="1"), 3)
    assert resumed.losses == unbroken.losses[1:]
    assert resumed.parameters_sha256 == unbroken.parameters_sha256


def each(output: Tensor, targets: Tensor) -> Tensor:
    return output.argmax(1) == targets


def always(output: Tensor, targets: Tensor) -> float:
    raise ArithmeticError("none at all")


def no_third(output: Tensor, targets: Tensor) -> float:
    if int(targets[0]) == 1:
        raise ArithmeticError("none of these")
    return 0.0


@pytest.mark.processes
def test_what_a_metric_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "openrecycle")
    metrics = {"odd": no_third, "never": always}
    evaluate = Evaluation(data=masked_jobs.Sentences(20, 2), every=4, metrics=metrics)
    result = masked_jobs.trainer(evaluate=evaluate).fit(iterations=4)
    (found,) = result.evaluations
    plain, _ = undisturbed()
    assert math.isnan(found.metrics["odd"]) and found.loss == plain.evaluations[1].loss
    assert "odd: ArithmeticError" in caplog.text
    assert caplog.text.count("never: ArithmeticError") == 2, "once from each worker of the last stage"
    assert result.losses == plain.losses[:4]


@pytest.mark.processes
def test_a_function_gives_the_evaluation_data_and_stopping_evaluates_once_more() -> None:
    class StopsAfter(Heard):
        def on_evaluation(self, evaluation: EvaluationResult) -> object:
            super().on_evaluation(evaluation)
            return "stop"

    heard = StopsAfter()
    evaluate = Evaluation(data=third, every=2, micro_batches=3)
    result = masked_jobs.trainer(evaluate=evaluate, callbacks=[heard]).fit(iterations=100_000)
    assert 2 <= len(result.losses) < 100_000
    assert result.evaluations[0].iteration == 2 and result.evaluations[-1].iteration == len(result.losses)
    assert heard.told[-1] == result


def third(index: int) -> dict[str, Tensor]:
    return whole(masked_jobs.Sentences(6, 3), range(2 * index, 2 * index + 2))


def uneven(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups = [{"params": [p]} for name, p in named_parameters if "table" in name or "layer" in name]
    return torch.optim.SGD(groups, lr=0.1)


class Unmasked(masked_jobs.Sentences):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: part for name, part in super().__getitem__(index).items() if name != "attention_mask"}


def plain(*place: int) -> tuple[Tensor, Tensor]:
    return torch.ones(2, own_jobs.WIDTH), torch.ones(2, own_jobs.WIDTH)


def with_a_mask(index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.ones(2, own_jobs.WIDTH), torch.ones(2)), torch.ones(2, own_jobs.WIDTH)


def unreadable(index: int) -> Any:
    raise OSError("the disk of the evaluation data is away")


def test_data_to_evaluate_on_of_another_form_are_refused_before_anything_starts() -> None:
    """By the first micro-batch: every one would be refused when it is evaluated, with a warning each."""
    evaluate = Evaluation(data=masked_jobs.Sentences(4, 2))
    with refuses("evaluate.data", "input_ids, attention_mask") as error:
        masked_jobs.trainer(data=Data(Unmasked(96, 1), batch_size=masked_jobs.BATCH), evaluate=evaluate)
    assert error.value.field == "evaluate.data"
    with refuses("evaluate.data", "inputs of 2 tensors"):
        own_jobs.trainer(data=plain, evaluate=Evaluation(data=with_a_mask, micro_batches=3))
    own_jobs.trainer(data=plain, evaluate=Evaluation(data=unreadable, micro_batches=3))  # which ends no job


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data": Data(masked_jobs.loaded(), shared=("mask",))}, "data.shared"),
        ({"data": Data(masked_jobs.loaded(), shared=("attention_mask", "input_ids"))}, "data.shared"),
        ({"data": Data(masked_jobs.loaded(), targets="label")}, "data"),
        ({"data": torch.utils.data.DataLoader(masked_jobs.Sentences(96, 1), batch_size=None)}, "data"),
        ({"optimizer": uneven}, "optimizer"),
        ({"evaluate": Evaluation(data=masked_jobs.Sentences(1, 2))}, "evaluate.data"),
        ({"evaluate": Evaluation(data=third)}, "evaluate.micro_batches"),
        ({"evaluate": Evaluation(data=masked_jobs.Sentences(4, 2), metrics={"each": each})}, "evaluate.metrics"),
        ({"evaluate": 3}, "evaluate"),
        ({"callbacks": [print]}, "callbacks"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        masked_jobs.trainer(**changes)
    assert error.value.field == field


def test_the_same_data_may_go_to_a_model_in_one_part() -> None:
    """No other part is there that could share them."""
    masked_jobs.trainer(layers=[masked_jobs.Whole()], layer_count=None, job=Job.uniform(2, 1, 3))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"every": 0}, "evaluate.every"), ({"metrics": {"loss": print}}, "evaluate.metrics")],
)
def test_an_evaluation_that_can_not_be(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        Evaluation(data=third, **options)
    assert error.value.field == field


def test_what_layers_and_metrics_change_in_place_is_a_copy() -> None:
    """The only micro-batch that a worker evaluates is kept from one evaluation to the next."""
    given = torch.ones(2, 3), torch.ones(2)
    batches = EvaluationBatches(lambda index: given, 1, {}, Data(plain))
    for _ in range(2):
        inputs, targets = batches.inputs(0, 0), batches.targets(0, 0)
        assert isinstance(inputs, Tensor) and bool(inputs.all()) and bool(targets.all())
        inputs.zero_()
        targets.zero_()


def test_a_weight_that_changes_targets_in_place_changes_those_of_nobody() -> None:
    def weight(targets: Tensor) -> Tensor:
        return targets.mul_(2).sum()

    nothing: Any = None
    workload = CallableWorkload(Model(stages=[], loss=print), Data(plain, weight=weight), nothing, None, 0)
    targets = torch.ones(3)
    for _ in range(2):
        assert float(workload.weight(targets)) == 6.0
