"""ResilientTrainer as people use it: bad arguments, real processes, deaths, and what is left afterwards."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, SubsetRandomSampler

from openrecycle import (
    Checkpoints,
    Console,
    Data,
    Evaluation,
    Faults,
    JobFailed,
    MicroBatchSampler,
    Model,
    Optimization,
    PadCollate,
    Planning,
    ProgressBar,
    TensorSpec,
)
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.jobs.trainer import ResilientTrainer
from openrecycle.agent.models.workload import load_workload
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc
from tests.agent import own_jobs, streamed_jobs, wrong_jobs
from tests.agent.consoles import console
from tests.agent.launches import Launched
from tests.conftest import at_length, refuses
from tests.golden import golden

PACED = Planning(pace="F=1ms,I=1ms,W=1ms")
SPEC = TensorSpec((4, own_jobs.WIDTH), "float32")
LISTED = partial(Model, layers=[nn.Tanh(), nn.Tanh()], loss=functional.mse_loss)
SQUARES = partial(Data, own_jobs.Squares(64), batch_size=4)
ROOT = Path(__file__).resolve().parents[2]


def pairs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters])


def nested(stage: int, stages: int) -> nn.Module:
    return nn.Linear(1, 1)


class Local:
    def method(self) -> Callable[[int, int], nn.Module]:
        def build(stage: int, stages: int) -> nn.Module:
            return nn.Linear(1, 1)

        return build


def evaluation_data(number: int) -> Any:
    return own_jobs.data(0, 0, number)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"stages": lambda stage, stages: nn.Linear(1, 1)},
            ["model.stages: got '<lambda>'", golden("top-level-of-a-file")],
        ),
        (
            {"stages": Local().method()},
            ["model.stages: got 'Local.method.<locals>.build'", golden("inside-a-function")],
        ),
        ({"loss": lambda output, targets: output}, ["model.loss: got '<lambda>'"]),
        ({"loss": nn.MSELoss}, ["model.loss: got 'the class MSELoss'", "MSELoss()"]),
        ({"callbacks": ProgressBar()}, ["callbacks: got", golden("a-list-of")]),
        ({"optimizer": lambda parameters: None}, ["optimizer: got '<lambda>'"]),
        ({"optimizer": 0.1}, ["optimizer: got 0.1"]),
        ({"data": lambda i, p, m: None}, ["data: got '<lambda>'"]),
        ({"stages": [nested]}, ["model.stages: got 1,"]),
        ({"stages": [nn.Linear(6, 6), wrong_jobs.WithFunction()]}, ["model.stages: got 'WithFunction of number 1'"]),
        ({"data": Data(wrong_jobs.Locked(), batch_size=2)}, ["data: got 'Locked'", "locks"]),
        ({"data": Data(own_jobs.Squares(100), batch_size=2, collate=lambda s: s)}, ["data.collate: got '<lambda>'"]),
        ({"data": Data((s for s in "abc"), batch_size=2)}, ["data: got 'a generator'", "IterableDataset"]),
        ({"data": Data((torch.zeros(99, 6), torch.zeros(99, 6)), batch_size=2)}, ["data: got", "TensorDataset"]),
        ({"data": Data(own_jobs.Endless(), batch_size=2)}, ["data: got 'Endless'"]),
        ({"data": own_jobs.Squares(100)}, ["data: got 'Squares', expected Data(samples, batch_size=...)"]),
        ({"data": Data(own_jobs.Squares(10), batch_size=2)}, ["data: got 10", "at least 12 samples"]),
        ({"job": "2x2"}, ["job: got 'str'", "Job.uniform"]),
        ({"optimization": "fast"}, ["optimization: got 'fast', expected openrecycle.Optimization(...)"]),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, ["optimizer: got", "SGD", "partial(torch.optim"]),
        ({"optimizer": pairs}, ["optimizer: got", "named_parameters"]),
        ({"stages": nn.Sequential(nn.Linear(6, 6), nn.Tanh())}, ["model.stages: got", "list(model)"]),
        (
            {"evaluate": Evaluation(data=evaluation_data, micro_batches=1, metrics={"x": lambda *_: 0})},
            ["evaluate.metrics: got"],
        ),
        ({"seed": -1}, ["seed: got -1"]),
        ({"planning": Planning(memory="bytes")}, ["capacity_bytes: got None"]),
        ({"planning": Planning(pace="profile")}, ["planning.pace: got 'profile'", golden("its-time-unit-is-slot")]),
        ({"profile": "no/such.json"}, ["profile: got 'no/such.json'", golden("cant-be-read")]),
        ({"profile": job_doc(Job(2, 3, 3))}, ["stages: got 2, expected 3"]),
        ({"profile": job_doc(Job(2, 2, 3)), "planning": PACED}, ["planning.pace: got", "beside `profile`"]),
        ({"profile": "gpt-3-medium", "job": Job.uniform(2, 2, 3, durations={"F": 2})}, ["profile: got 'gpt-3-medium'"]),
        ({"faults": Faults(kill=["W7_0@1:F0"])}, ["faults.kill: got 'W7_0'", "W0_0 to W1_1"]),
        ({"weights": __file__}, ["weights: got", "expected a folder"]),
        ({"checkpoints": Checkpoints(directory=__file__)}, ["checkpoints.directory: got", "expected a folder"]),
        ({"checkpoints": Checkpoints(resume="newest")}, ["checkpoints.resume: got 'newest'", "too, the folder"]),
    ],
)
def test_what_is_wrong_is_said_at_once_and_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        own_jobs.trainer(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (partial(Model, loss=functional.mse_loss), "model.layers", "neither"),
        (partial(Model, layers=[nn.Tanh()], stages=[nn.Tanh()], loss=functional.mse_loss), "model.layers", "both"),
        (partial(Model, stages=[nn.Tanh()], layer_count=1, loss=functional.mse_loss), "model.layer_count", 1),
        (partial(Model, layers=[nn.Tanh()], layer_count=2, loss=functional.mse_loss), "model.layer_count", 2),
        (partial(Model, layers=own_jobs.build_stage, loss=functional.mse_loss), "model.layer_count", None),
        (partial(Model, layers=nn.Sequential().children(), loss=functional.mse_loss), "model.layers", "generator"),
        (partial(Model, layers=[nn.Tanh()], loss=0.1), "model.loss", 0.1),
        (partial(Data, own_jobs.Squares(9)), "data.batch_size", None),
        (partial(Data, own_jobs.Squares(9), batch_size=0), "data.batch_size", 0),
        (partial(Data, streamed_jobs.Plain()), "data.batch_size", None),
        (partial(Data, own_jobs.data, batch_size=4), "data.batch_size", 4),
        (partial(Data, own_jobs.data, sampler=max), "data.sampler", max),
        (partial(Data, streamed_jobs.plain(), batch_size=2), "data.batch_size", 2),
        (partial(Data, streamed_jobs.shuffled(), batch_size=2), "data.batch_size", 2),
        (partial(Data, streamed_jobs.plain(), collate=list), "data.collate", list),
        (partial(own_jobs.ResilientTrainer, model=nn.Tanh(), data=None, optimizer=print, job=None), "model", "Tanh"),
        (partial(own_jobs.ResilientTrainer, model=Model, data=None, optimizer=0, job=None), "model", "the class Model"),
        (partial(LISTED, layers="gpt2"), "model.layers", "str"),
        (partial(LISTED, layers=[nn.Tanh(), None]), "model.layers", "NoneType of number 1"),
        (partial(LISTED, tied=None), "model.tied", None),
        (partial(LISTED, tied="0.weight"), "model.tied", "0.weight"),
        (partial(LISTED, tied=["0.weight"]), "model.tied", ["0.weight"]),
        (partial(LISTED, tied=[[["0.weight"], ["1.weight"]]]), "model.tied", [[["0.weight"], ["1.weight"]]]),
        (partial(LISTED, tied=[["0.weight"]]), "model.tied", ["0.weight"]),
        (partial(LISTED, parallelize=2), "model.parallelize", 2),
        (partial(LISTED, stage_io=3), "model.stage_io", 3),
        (partial(LISTED, stage_io=[SPEC]), "model.stage_io", [SPEC]),
        (partial(Data, None), "data", "NoneType"),
        (partial(Data, "train.txt", batch_size=1), "data", "str"),
        (partial(Data, own_jobs.Squares, batch_size=1), "data", "the class Squares"),
        (partial(Data.of, own_jobs.Squares), "data", "the class Squares"),
        (partial(Data, Data(own_jobs.data)), "data", "Data"),
        (partial(SQUARES, collate=None), "data.collate", None),
        (partial(SQUARES, sampler=5), "data.sampler", 5),
        (partial(SQUARES, weight="tokens"), "data.weight", "tokens"),
        (partial(SQUARES, targets=None), "data.targets", None),
        (partial(SQUARES, shared="mask"), "data.shared", "mask"),
        (partial(SQUARES, shared=None), "data.shared", None),
        (partial(SQUARES, shuffle="no"), "data.shuffle", "no"),
        (partial(Data, streamed_jobs.plain(), shuffle=False), "data.shuffle", False),
        (partial(Data, own_jobs.data, shuffle=False), "data.shuffle", False),
        (partial(Data, own_jobs.data, collate=list), "data.collate", list),
        (partial(Evaluation, data=None), "evaluate.data", "NoneType"),
        (partial(Evaluation, data=own_jobs.Squares), "evaluate.data", "the class Squares"),
        (partial(Evaluation, data=SQUARES()), "evaluate.data", "Data"),
    ],
)
def test_what_is_wrong_with_a_model_or_data_alone_is_said_before_they_are_used(
    make: Callable[[], Any], field: str, value: Any
) -> None:
    with refuses(field, value):
        make()


def wrong_sampler(iteration: int, pipeline: int, micro_batch: int) -> list[int]:
    raise ArithmeticError


def batches_of(size: int, **options: Any) -> Evaluation:
    return Evaluation(data=DataLoader(own_jobs.Squares(64), batch_size=size, **options))


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"layers": [nn.Linear(6, 6)], "stages": None}, "model.layers", 1),
        ({"layers": own_jobs.build_stage, "layer_count": 1, "stages": None}, "model.layer_count", 1),
        ({"data": SQUARES(sampler=lambda *_: [0, 1, 2, 3])}, "data.sampler", "<lambda>"),
        ({"data": SQUARES(sampler=wrong_sampler)}, "data.sampler", "ArithmeticError: "),
        ({"data": SQUARES(sampler=own_jobs.first_two)}, "data.batch_size", 4),
        ({"data": SQUARES(sampler=own_jobs.nothing)}, "data.sampler", "no indices"),
        ({"data": SQUARES(sampler=MicroBatchSampler(64, 4, Job.uniform(1, 2, 3)))}, "data.sampler", ANY),
        ({"data": SQUARES(targets="squares")}, "data.targets", "squares"),
        ({"data": Data(own_jobs.data, targets=["squares"])}, "data.targets", ["squares"]),
        ({"planning": Planning(relayout="always")}, "planning.relayout", "always"),
        ({"data": SQUARES(), "evaluate": batches_of(8)}, "evaluate.data", ANY),
        ({"data": DataLoader(own_jobs.Squares(64), batch_size=4), "evaluate": batches_of(8)}, "evaluate.data", ANY),
        ({"evaluate": batches_of(4, sampler=SubsetRandomSampler(range(9)))}, "evaluate.data", ANY),
        ({"evaluate": batches_of(4, collate_fn=lambda samples: samples)}, "evaluate.data", "<lambda>"),
        ({"evaluate": Evaluation(data=own_jobs.data, micro_batches=1)}, "evaluate.data", "data"),
    ],
)
def test_what_is_wrong_between_parts_is_said_by_the_name_that_was_written(
    changes: dict[str, Any], field: str, value: Any
) -> None:
    with refuses(field, value):
        own_jobs.trainer(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"data": Data(own_jobs.Squares(64), sampler=own_jobs.first_two, shuffle=False)},
        {"data": Data(streamed_jobs.Plain(), batch_size=4, shuffle=False)},
        {"parallelize": own_jobs.build_stage},
        {"console": Console(token="secret")},
    ],
)
def test_what_is_true_or_of_use_elsewhere_is_taken(changes: dict[str, Any]) -> None:
    """A sampler and a stream have an order of their own. `openrecycle train` may split the layers of the same script,
    and the environment of several nodes has a token."""
    own_jobs.trainer(**changes)


def test_the_command_line_names_an_argument_in_the_users_file() -> None:
    with refuses("data.batch_size", None):
        load_workload("tests.agent.own_jobs:workload_without_a_batch_size", {})


def test_models_and_data_are_compared_by_identity_and_changed_by_replace() -> None:
    """Their samples may be tensors, for which == has no one answer, and their layers lists, which have no hash."""
    ones = [Data(torch.ones(8, 2), batch_size=2), LISTED(), Evaluation(data=torch.ones(2, 2))]
    others = [Data(torch.ones(8, 2), batch_size=2), LISTED(), Evaluation(data=torch.ones(2, 2))]
    assert len({*ones, *others}) == 6
    assert all(one == one and one != other for one, other in zip(ones, others, strict=True))
    assert replace(LISTED(), layers=[nn.Tanh()]).count == 1
    assert replace(LISTED(), layers=None, stages=[nn.Tanh()]).count is None
    assert len(repr(Data([torch.ones(2)] * 9999, batch_size=2))) < 1000


def test_numbers_of_numpy_are_taken_for_a_model_and_data() -> None:
    two, data = np.int64(2), Data(own_jobs.Squares(9), batch_size=np.int64(2), prefetch=np.int64(2))  # type: ignore[arg-type]
    model = Model(layers=own_jobs.build_stage, layer_count=two, loss=max)  # type: ignore[arg-type]
    evaluation = Evaluation(data=own_jobs.data, every=two, micro_batches=two)  # type: ignore[arg-type]
    pad = PadCollate(two, {0: 0.0})  # type: ignore[arg-type]
    taken = [data.batch_size, data.prefetch, model.layer_count, evaluation.every, evaluation.micro_batches, pad.length]
    assert [(type(n), n) for n in taken] == [(int, 2)] * 6


@pytest.mark.parametrize("capacity", ["80GiB", 80 << 30])
def test_the_memory_of_a_worker_can_be_set(capacity: Any) -> None:
    own_jobs.trainer(profile="gpt-3-medium", planning=Planning(memory="bytes", capacity=capacity))
    with pytest.raises(PlannerError, match="stage 0, which has 1,073,741,824"):
        own_jobs.trainer(profile="gpt-3-medium", planning=Planning(memory="bytes", capacity="1GiB"))


def test_deaths_that_no_plan_survives_are_refused() -> None:
    with refuses("faults.kill"):
        own_jobs.trainer(faults=Faults(kill=["W0_1@1:F0", "W1_1@2:F0"]))


def test_a_mistake_is_shown_in_the_user_s_own_code() -> None:
    """And not on the way through this product."""
    with pytest.raises(InputError) as caught:
        own_jobs.trainer(loss=wrong_jobs.broken)
    assert _modules(caught.value) == [__name__, own_jobs.__name__, ResilientTrainer.__module__]
    cause = caught.value.__cause__
    assert isinstance(cause, ArithmeticError) and _modules(cause) == [wrong_jobs.__name__]
    assert cause.__context__ is None
    with pytest.raises(InputError) as caught:
        own_jobs.trainer(loss=wrong_jobs.detached)
    assert len(_modules(caught.value)) == 3 and caught.value.__cause__ is None


def _modules(error: BaseException) -> list[str]:
    return [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]


@pytest.mark.processes
def test_a_kill_may_come_in_any_iteration_that_fit_has() -> None:
    trainer = own_jobs.trainer(faults=Faults(kill=["W1_1@40:F0"]))
    with pytest.raises(InputError) as caught:
        trainer.fit(iterations=40)
    assert caught.value.field == "faults.kill"


@pytest.mark.parametrize("iterations", [0, True, 1.5])
def test_iterations_are_counted_in_whole_numbers(iterations: Any) -> None:
    with pytest.raises(InputError, match="iterations: got"):
        own_jobs.trainer().fit(iterations=iterations)


def test_each_process_of_torchrun_would_start_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model and data may be asked for: so does each node of `openrecycle train` under torchrun."""
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    trainer = own_jobs.trainer()
    assert trainer.workload().samples_per_micro_batch == 4
    with pytest.raises(InputError, match="torchrun"):
        trainer.fit(iterations=1)


@cache
def undisturbed() -> TrainingResult:
    return own_jobs.trainer(scheduler=own_jobs.halving).fit(iterations=4)


@pytest.mark.processes
def test_the_result_of_a_job_that_lost_a_worker_is_that_of_one_that_did_not(tmp_path: Path) -> None:
    """Losses, hash and the weights themselves, which are written to a folder here."""
    seen: list[tuple[int, float]] = []
    lost: list[str] = []
    disturbed = own_jobs.trainer(
        scheduler=own_jobs.halving,
        faults=Faults(kill=["W0_1@2:I1"]),
        weights=tmp_path / "trained",
        on_iteration=lambda iteration, loss: seen.append((iteration, loss)),
        on_recovery=lambda recovery: lost.append(recovery.worker),
    ).fit(iterations=4)
    assert disturbed.losses == undisturbed().losses and len(disturbed.losses) == 4
    assert seen == list(enumerate(disturbed.losses))
    assert disturbed.parameters_sha256 == undisturbed().parameters_sha256
    assert lost == ["W0_1"] == [recovery.worker for recovery in disturbed.recoveries]
    assert sorted(file.name for file in (tmp_path / "trained").iterdir()) == [
        "layer0.safetensors",
        "layer1.safetensors",
    ]
    for stage in range(2):
        module = own_jobs.build_stage(stage, 2)
        module.load_state_dict(disturbed.state_dict(stage))
        fresh = undisturbed().state_dict(stage)
        assert all(torch.equal(value, fresh[name]) for name, value in module.state_dict().items())


@pytest.mark.processes
def test_a_job_goes_on_from_its_checkpoint_to_the_same_numbers(tmp_path: Path) -> None:
    """With the checkpoint's learning rate, also where the script has another one by now. Whatever the current folder is
    that a user's code goes to."""
    folder, scheduler = tmp_path / "checkpoints", own_jobs.halving
    with contextlib.chdir(tmp_path):
        begun = own_jobs.trainer(
            data=own_jobs.wandering_data, scheduler=scheduler, checkpoints=Checkpoints(directory="checkpoints")
        )
        first = begun.fit(iterations=2)
    again, slower = Checkpoints(directory=folder, resume="newest"), partial(own_jobs.sgd, lr=0.05)
    second = own_jobs.trainer(optimizer=slower, scheduler=scheduler, checkpoints=again).fit(iterations=4)
    assert first.losses + second.losses == undisturbed().losses
    assert second.parameters_sha256 == undisturbed().parameters_sha256
    elsewhere = tmp_path / "mistyped"
    with pytest.raises(InputError):
        own_jobs.trainer(checkpoints=replace(again, directory=elsewhere)).fit(iterations=4)
    assert not elsewhere.exists()
    with pytest.raises(JobFailed, match=golden("iteration-4-is-of-another-job")):
        own_jobs.trainer(optimizer=partial(torch.optim.Adam, lr=0.1), checkpoints=again).fit(iterations=6)


@pytest.mark.chaos
@pytest.mark.processes
def test_with_a_console_the_numbers_are_the_same(tmp_path: Path) -> None:
    """And it is told that the job ended early."""
    with console(tmp_path) as server:
        watched = own_jobs.trainer(
            scheduler=own_jobs.halving,
            console=Console(url=server.root, name="my own"),
            faults=Faults(kill=["W1_1@1:W0"]),
            on_iteration=lambda iteration, loss: "stop" if iteration == 3 else None,
        ).fit(iterations=100_000)
        assert watched.losses[:4] == undisturbed().losses
        job = server.read(f"/jobs/{server.job_id()}")
        assert (job["spec"]["name"], job["state"], job["committed"]) == ("my own", "finished", len(watched.losses))


@pytest.mark.processes
def test_the_loss_is_that_of_the_plain_loop() -> None:
    """The first iteration against a few lines of plain torch, dropout off."""
    parts = [nn.Linear(own_jobs.WIDTH, own_jobs.WIDTH), nn.Linear(own_jobs.WIDTH, own_jobs.WIDTH)]
    whole = nn.Sequential(*parts)
    points = own_jobs.Squares(24)
    result = own_jobs.trainer(stages=parts, data=Data(points, batch_size=4, shuffle=False), optimizer=own_jobs.sgd).fit(
        iterations=2
    )
    optimizer = own_jobs.sgd(whole.parameters())
    x, y = torch.stack([points[i][0] for i in range(24)]), torch.stack([points[i][1] for i in range(24)])
    for loss in result.losses:
        optimizer.zero_grad()
        mine = functional.mse_loss(whole(x), y)
        mine.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert loss == pytest.approx(mine.item(), rel=1e-5)
    for stage, part in enumerate(parts):
        for name, value in result.state_dict(stage).items():
            torch.testing.assert_close(value, part.state_dict()[name])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "optimization"),
    [
        at_length(own_jobs.Embedded, {}),
        (own_jobs.Embedded, {"optimization": Optimization(autocast="bf16", clip_norm=0.5)}),
        at_length(own_jobs.Frozen, {}),
    ],
)
def test_several_tensors_pass_between_stages_and_survive_a_death(
    first: type[nn.Module], optimization: dict[str, Any]
) -> None:
    """A float with a gradient (bf16 under autocast; none from a frozen stage), integers, and a mask."""
    parts: dict[str, Any] = {
        **optimization,
        "stages": [first, own_jobs.Scored],
        "data": own_jobs.ids_data,
        "loss": own_jobs.own_loss,
    }
    calm = own_jobs.trainer(**parts).fit(iterations=3)
    hurt = own_jobs.trainer(**parts, faults=Faults(kill=["W1_0@1:I0"])).fit(iterations=3)
    assert hurt.losses == calm.losses and hurt.losses[-1] < hurt.losses[0]
    assert hurt.parameters_sha256 == calm.parameters_sha256
    assert [recovery.worker for recovery in hurt.recoveries] == ["W1_0"]


@pytest.mark.processes
def test_micro_batches_that_vary_end_the_job_with_a_sentence() -> None:
    with pytest.raises(JobFailed, match=golden("output-of-stage-0-got-float32")):
        own_jobs.trainer(data=own_jobs.ragged_data).fit(iterations=3)


@pytest.mark.processes
def test_a_model_that_fails_is_told_where() -> None:
    with pytest.raises(JobFailed, match=r"ArithmeticError: no more \(layer \d\), at \S+own_jobs.py:\d+ in forward"):
        own_jobs.trainer(stages=[own_jobs.Explosive, own_jobs.Explosive]).fit(iterations=9)


def run_script(path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    path.write_text("\n".join(["from tests.agent import own_jobs", *lines]) + "\n")
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/.src", "PATH": ""},
    )


@pytest.mark.chaos
@pytest.mark.processes
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    done = run_script(tmp_path / "unguarded.py", "own_jobs.trainer().fit(iterations=1)")
    assert done.returncode == 1
    assert golden("a-call-under-if-name") in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1, "the script's own, no worker's"


@pytest.mark.processes
def test_the_example_survives_its_kill(tmp_path: Path) -> None:
    """Forked: how such a script starts by itself is seen where one is run that is installed."""
    errors, prints = tmp_path / "errors", tmp_path / "prints"
    script = Launched(errors=errors, prints=prints, module="openrecycle.agent.examples.own_job")
    try:
        assert script.wait(120) == 0, errors.read_text()
    finally:
        script.end()
    lines = prints.read_text().splitlines()
    assert sum(line.startswith("iteration ") for line in lines) == 60
    assert sum("W1_1 died; resumed after" in line for line in lines) == 1
    assert float(lines[-1].split()[1]) > 0.85


def test_the_reader_of_the_readme_gets_the_example_that_is_tested() -> None:
    example = (ROOT / "agent/examples/own_job.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{example}```" in (ROOT / "README.md").read_text()


def test_the_pages_calls_fit_their_signatures() -> None:
    import openrecycle as agent

    pages = [ROOT / "README.md", *(ROOT / "app/docs").glob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]
    calls = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    ours = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in agent.__all__]
    assert {ast.unparse(call.func) for call in ours} >= {"ResilientTrainer", "Model", "Data", "Reporter"}
    for call in ours:
        values: dict[str, Any] = {keyword.arg or "": None for keyword in call.keywords}
        inspect.signature(getattr(agent, ast.unparse(call.func))).bind(*call.args, **values)


def test_public_names() -> None:
    import openrecycle as agent

    for name in agent.__all__:
        assert getattr(agent, name).__name__ == name
        assert name in dir(agent)  # where names are completed at a prompt
    assert agent.ResilientTrainer is ResilientTrainer
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        agent.Trainer  # noqa: B018
