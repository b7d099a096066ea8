"""Jobs given as stages of torch.distributed.pipelining: with deaths, returns and moves the bits of plain modules."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline

from openrecycle import Data, Faults, Job, Model, Planning
from openrecycle.agent.jobs.callables import CallableWorkload
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.models.torch_pipelining import layers_of
from openrecycle.planner.jobs.errors import InputError
from tests.agent import pipe_jobs as jobs
from tests.conftest import refuses
from tests.golden import golden


def run(layers: list[nn.Module], *x: Any) -> Any:
    torch.manual_seed(3)
    for layer in layers:
        x = layer(*x)
        x = x if isinstance(x, tuple) else (x,)
    return x[0] if len(x) == 1 else x


# -- what is taken from a Pipe -----------------------------------------------------------------


def test_a_pipes_layers_compute_what_the_model_does_here_and_elsewhere() -> None:
    model = jobs.net()
    layers = layers_of(jobs.pipe(model=model))
    ids, keep = jobs.inputs()
    expected = run([model], ids, keep)
    assert torch.equal(run(layers, ids, keep), expected)
    assert torch.equal(run(pickle.loads(pickle.dumps(layers)), ids, keep), expected)
    assert layers.shared == (("0.emb.weight", "4.head.weight"),)


def test_what_a_pipes_layers_share_stays_when_the_model_is_changed() -> None:
    shared, more = ("0.emb.weight", "4.head.weight"), ("1.blocks.1.a.weight", "2.blocks.2.a.weight")

    def tied(model: Model) -> list[tuple[str, ...]]:
        data = Data(jobs.data)
        return sorted(CallableWorkload(model, data, torch.optim.SGD, None, 0).tied(5))

    model = Model(layers=jobs.pipe(), loss=jobs.loss)
    assert tied(model) == tied(replace(model, loss=max)) == [shared]
    assert tied(replace(model, tied=[more])) == [shared, more]
    assert tied(replace(model, layers=[nn.Tanh()] * 5)) == [], "other layers share nothing"


def test_names_and_order_are_those_of_the_model() -> None:
    layers = layers_of(jobs.pipe())
    for traced, plain in zip(layers, jobs.plain(), strict=True):
        assert [name for name, _ in traced.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert traced.state_dict().keys() == plain.state_dict().keys()
    jobs.net().load_state_dict({k: v for layer in layers for k, v in layer.state_dict().items()})


class Awkward(nn.Module):
    """What else a traced stage may have: a module used twice, a constant, random numbers of no input, a buffer that
    moves, several outputs, one of them an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(self.first(x)) + torch.rand(4) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        y = self.norm(y)
        return self.last(y), number, y


def test_what_else_a_pipe_may_have() -> None:
    model = Awkward()
    x, number = torch.randn(3, 4), torch.arange(3)
    traced = pipeline(model, (x, number), split_spec={"norm": SplitPoint.BEGINNING, "last": SplitPoint.BEGINNING})
    layers = pickle.loads(pickle.dumps(layers_of(traced)))
    assert len(layers) == 3
    found, expected = run(layers, x, number), run([model], x, number)
    assert len(found) == 3 and all(map(torch.equal, found, expected))
    assert torch.equal(layers[1].get_buffer("norm.running_mean"), model.norm.running_mean)
    names = {name for layer in layers for name in layer.state_dict()}
    assert names == model.state_dict().keys()


# -- real jobs ------------------------------------------------------------------------------------


@cache
def plain() -> TrainingResult:
    return jobs.trainer(layers=jobs.plain(), planning=Planning(relayout="never")).fit(iterations=6)


def same(result: TrainingResult, reference: TrainingResult, layers: int) -> None:
    assert result.losses == reference.losses
    assert result.parameters_sha256 == reference.parameters_sha256
    for layer in range(layers):
        mine, theirs = result.state_dict(layer), reference.state_dict(layer)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


@pytest.mark.processes
def test_a_pipe_that_lost_a_worker_ends_with_the_bits_of_plain_modules(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    faults = Faults(kill=["W0_1@2:I1"], rejoin=["W0_1@3"])
    hurt = jobs.trainer(layers=jobs.pipe(), faults=faults, record=record).fit(iterations=6)
    living = [line["living"] for line in lines(record) if "loss" in line]
    assert living[0] == 4 and living[2] == 3
    same(hurt, plain(), 5)
    assert hurt.losses[-1] < hurt.losses[0]


@pytest.mark.chaos
@pytest.mark.processes
def test_layers_of_a_pipe_move(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    moved = jobs.trainer(
        layers=jobs.pipe(),
        planning=Planning(relayout="always"),
        faults=Faults(kill=["W1_1@0:F1"]),
        record=record,
    ).fit(iterations=6)
    changes = [line["relayout"] for line in lines(record) if "relayout" in line]
    assert changes and sum(change["moved_layers"] for change in changes) > 0
    same(moved, plain(), 5)


@pytest.mark.chaos
@pytest.mark.processes
def test_a_pipe_with_a_stage_each() -> None:
    calm = jobs.trainer(stages=jobs.pipe("blocks.2")).fit(iterations=3)
    hurt = jobs.trainer(stages=jobs.pipe("blocks.2"), faults=Faults(kill=["W1_0@1:F2"])).fit(iterations=3)
    same(hurt, calm, 2)
    assert jobs.net().load_state_dict({**calm.state_dict(0), **calm.state_dict(1)})


@pytest.mark.chaos
@pytest.mark.processes
def test_builders_of_pipeline_stages_are_as_builders_of_modules() -> None:
    given: dict[str, Any] = {"data": jobs.words_data, "loss": nn.functional.mse_loss}
    modules = jobs.trainer(stages=jobs.part, **given).fit(iterations=3)
    stages = jobs.trainer(stages=jobs.part_as_stage, **given, faults=Faults(kill=["W1_1@1:F0"])).fit(iterations=3)
    same(stages, modules, 2)


@pytest.mark.chaos
@pytest.mark.processes
def test_parts_of_a_whole_model_may_be_cut_in_the_worker() -> None:
    """Made without data, cut by the names of modules, initialized where they train: torchtitan's way."""
    given: dict[str, Any] = {"layer_count": 4, "data": jobs.decoder_data}
    calm = jobs.trainer(layers=jobs.decoder_part, **given).fit(iterations=3)
    hurt = jobs.trainer(layers=jobs.decoder_stage, **given, faults=Faults(kill=["W0_0@1:I1"])).fit(iterations=3)
    same(hurt, calm, 4)
    jobs.Decoder().load_state_dict({k: v for layer in range(4) for k, v in hurt.state_dict(layer).items()})


# -- what is refused --------------------------------------------------------------------------------


@pytest.fixture
def lone_group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def _stage(index: int, count: int) -> PipelineStage:
    return jobs.part_as_stage(index, count)


@pytest.mark.usefixtures("lone_group")
def test_pipeline_stages_stand_for_their_modules() -> None:
    # Their index says where they belong.
    jobs.trainer(stages=[_stage(1, 2), _stage(0, 2)], data=jobs.words_data, loss=nn.functional.mse_loss)
    refused: list[tuple[list[Any], str]] = [
        ([_stage(0, 2), _stage(0, 2)], "model.stages: got 'stage_index 0, 0',"),
        ([_stage(0, 3), _stage(1, 3)], "model.stages: got 'num_stages=3 in stage 0',"),
        ([_stage(0, 2), jobs.part(1, 2)], golden("sequential-beside-a-pipelinestage")),
    ]
    for stages, words in refused:
        with pytest.raises(InputError, match=words):
            jobs.trainer(stages=stages)


@pytest.mark.usefixtures("lone_group")
def test_a_schedule_and_the_stage_of_a_pipe_are_refused() -> None:
    schedule = Schedule1F1B(_stage(0, 1), 2)
    for given in (schedule, [schedule]):
        with refuses("model.stages", "Schedule1F1B"):
            jobs.trainer(stages=given)
    with pytest.raises(InputError, match=golden("a-stage-of-a-pipe")):
        jobs.trainer(stages=[jobs.pipe("blocks.2").build_stage(0, jobs.CPU), jobs.part(1, 2)])


def test_a_pipe_with_another_number_of_stages_is_refused() -> None:
    with refuses("model.stages", 5):
        jobs.trainer(stages=jobs.pipe())
    with refuses("model.layers", 2):
        jobs.trainer(layers=jobs.pipe("blocks.2"), job=Job.uniform(2, 3, 3))


def test_one_module_is_not_several() -> None:
    with refuses("model.layers", "one Net"):
        jobs.trainer(layers=jobs.net(), layer_count=4)


def test_a_builder_that_makes_another_stage_than_asked_is_refused() -> None:
    with pytest.raises(InputError, match="stage_index=0, num_stages=2"):
        jobs.trainer(stages=jobs.always_the_first, data=jobs.words_data)


def test_parameters_without_data_are_refused() -> None:
    with pytest.raises(InputError, match=r"tok_embeddings\.weight"):
        jobs.trainer(layers=[jobs.part_without_data(0, 2), jobs.part_without_data(1, 2)])


def test_a_torch_without_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    monkeypatch.setattr(torch, "__version__", "9.9")
    with refuses("torch", "9.9, without _foreach_copy_"):
        jobs.trainer(stages=jobs.part, data=jobs.words_data)
