"""A model, data or an optimizer that can't be trained is refused before any worker starts."""

from __future__ import annotations

import logging
import random
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from openrecycle import Checkpoints, Data, Evaluation, Faults, JobFailed, TensorSpec, Timeouts
from openrecycle.agent.config.devices import Mode, Platform, memory_group, memory_limit
from openrecycle.agent.config.options import Optimization, Planning, TrainingOptions
from openrecycle.agent.jobs.callables import CallableWorkload, Model
from openrecycle.agent.jobs.preflight import check_schedule, check_workload
from openrecycle.agent.models.compat import tensors_without_data
from openrecycle.agent.models.layers import build_layers
from openrecycle.agent.models.state import dtype_name
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job
from tests.agent import own_jobs, streamed_jobs, wrong_jobs
from tests.agent.runs import nan_model
from tests.conftest import at_length, refuses
from tests.golden import golden

W = own_jobs.WIDTH
SHORT = Timeouts(transfer=10.0)


LAYERS: dict[str, Any] = {"stages": None, "layers": own_jobs.build_stage, "layer_count": 4}
"""Of which some may move to another stage."""


class Slow(torch.optim.lr_scheduler.LRScheduler):
    """Its factor depends on what its state_dict leaves out."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.factor += 1
        return [0.1 / self.factor for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().state_dict().items() if k != "factor"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"stages": wrong_jobs.tied_by_builder},
            ["model.stages: got '0.weight of stage 0, which is table.weight of"],
        ),
        ({"tied": [["0.0.weight", "1.wait"]]}, ["model.tied: got '1.wait'"]),
        ({"stages": wrong_jobs.numbers_needed_and_tied}, ["table.weight of stage 0, which is table.weight of stage 1"]),
        ({"stages": [wrong_jobs.WithStatistics] * 2}, ["statistics of stage 0, which is", golden("no-buffer-in-two")]),
        (
            {"stages": [nn.Linear(W, W), nn.utils.parametrizations.weight_norm(nn.Linear(W, W))]},
            ["model.stages: got 'list with"],
        ),
        ({"stages": wrong_jobs.lazy}, ["model.stages: got 'weight of stage 1, whose shape", golden("no-lazy-ones")]),
        (
            {"stages": [nn.Linear(W, W), nn.LazyBatchNorm1d(affine=False)]},
            ["running_mean of stage 1", golden("no-lazy-ones")],
        ),
        ({"stages": wrong_jobs.complex_weights}, ["weight of stage 1, which is complex64"]),
        ({"stages": [wrong_jobs.Halves, wrong_jobs.Halves]}, ["turns of stage 0, which is complex32"]),
        (
            {"stages": [partial(wrong_jobs.Halves, torch.float4_e2m1fn_x2)] * 2},
            ["turns of stage 0, which is float4_e2m1fn_x2", "keep uint8"],
        ),
        ({"stages": wrong_jobs.frozen}, ["model.stages: got '4 parameters,"]),
        ({"stages": [wrong_jobs.Table(), nn.Linear(W, W)]}, ["model.stages: got", "rows of stage 0"]),
        (
            {"stages": wrong_jobs.sparse},
            ["model.stages: got 'Embedding(sparse=True), 0 of stage 0', expected sparse=False"],
        ),
        (
            {"stages": wrong_jobs.limited},
            ["model.stages: got 'EmbeddingBag(max_norm=...), 0 of stage 0', expected no max_norm"],
        ),
        ({"optimizer": torch.optim.SparseAdam}, ["optimizer: got 'SparseAdam'", "dense"]),
        ({"optimizer": wrong_jobs.Ticking}, ["optimizer: got 'Ticking'", golden("a-worker-that-re-joins")]),
        ({"optimizer": wrong_jobs.Remembering}, ["optimizer: got 'Remembering (", "object"]),
        (
            {"stages": [nn.Linear(W, W).requires_grad_(False), nn.Linear(W, W)], "optimizer": wrong_jobs.thawing},
            ["optimizer: got", golden("one-whose-step-makes-parameters")],
        ),
        ({"optimizer": wrong_jobs.for_another_model}, ["optimizer: got", "without"]),
        ({"optimizer": wrong_jobs.lbfgs}, ["optimizer: got 'LBFGS'", "no closure"]),
        ({"optimizer": wrong_jobs.no_optimizer}, ["optimizer: got 'NoneType'", "torch.optim.Optimizer"]),
        ({"optimizer": partial(torch.optim.SGD, rate=1)}, ["optimizer: got", "TypeError: ", "rate"]),
        (
            {**LAYERS, "optimizer": wrong_jobs.group_by_layer_here},
            ["optimizer: got", golden("2-for-stage-1-and-4")],
        ),
        (
            {**LAYERS, "optimizer": wrong_jobs.rate_by_stage},
            ["optimizer: got", golden("lr-of-parameter-group-0"), "relayout=never"],
        ),
        (
            {**LAYERS, "optimizer": wrong_jobs.rate_of_the_last_two},
            ["optimizer: got", golden("in-parameter-group-1-for")],
        ),
        ({"scheduler": wrong_jobs.plateau}, ["scheduler: got 'ReduceLROnPlateau'", "no metric"]),
        ({"scheduler": wrong_jobs.scheduled()}, ["scheduler: got 'a LambdaLR already made', expected a function"]),
        ({"scheduler": wrong_jobs.NoScheduler}, ["scheduler: got 'ArithmeticError: no'"]),
        ({"scheduler": wrong_jobs.no_optimizer}, ["scheduler: got 'NoneType'", "LRScheduler"]),
        ({"scheduler": Slow}, ["optimizer: got 'SGD with Slow'", "state_dict"]),
        ({"data": wrong_jobs.with_text}, ["data: got", golden("source-of-the-type-list")]),
        ({"data": wrong_jobs.singles}, ["data: got 'Tensor', expected a pair (inputs, targets)"]),
        ({"data": wrong_jobs.uneven}, [golden("data-got-float32-4-6"), "float32[6, 6] in another", "pad"]),
        ({"data": wrong_jobs.doubles}, ["data: got 'inputs of float64[4, 6] (RuntimeError:", "of float32"]),
        (
            {"stages": wrong_jobs.embedding, "data": wrong_jobs.small_tokens},
            [
                "inputs of uint8[4, 6] (RuntimeError:",
                golden("of-float32-go-with-indices"),
            ],
        ),
        *(
            (
                {"stages": [nn.Sequential(first, nn.Linear(W, W)), nn.Linear(W, W)], "data": data},
                [f"inputs of {dtype_name(dtype)}[4, 6] (", "of float32 go with (.float() makes"],
            )
            for dtype, first in (
                (torch.int64, nn.Identity()),
                (torch.bool, nn.Identity()),
                (torch.uint8, nn.Identity()),
                (torch.uint8, nn.LayerNorm(W)),
                (torch.int32, nn.Sequential(nn.Unflatten(1, (1, W)), nn.Conv1d(1, 1, 1), nn.Flatten())),
            )
            if (data := partial(wrong_jobs.of_type, dtype))
        ),
        (
            {"stages": [wrong_jobs.ToDoubles(W, W), nn.Linear(W, W)]},
            ["model.stages: got 'RuntimeError: ", golden("layer-1-which-got", f"float64[4, {W}]")],
        ),
        (
            {"data": wrong_jobs.classes, "loss": nn.functional.cross_entropy},
            ["model.loss: got 'IndexError: ", "float32[4, 6]; targets int64[4]"],
        ),
        (
            {"data": partial(wrong_jobs.classes, dtype=torch.float32), "loss": nn.functional.cross_entropy},
            ["model.loss: got 'RuntimeError: ", "targets float32[4])'"],
        ),
        ({"loss": nn.MSELoss(reduction="none")}, ["model.loss: got [4, 6],"]),
        ({"loss": wrong_jobs.detached}, ["model.loss: got", "no detach"]),
        ({"loss": wrong_jobs.Weighing()}, ["model.loss: got", "Weighing", "weights", "requires_grad_(False)"]),
        ({"data": wrong_jobs.elsewhere}, ["data: got 'tensors on meta'", "the CPU"]),
        ({"data": wrong_jobs.absent}, ["data: got 'FileNotFoundError: points.csv'", "micro-batch 0 of pipeline 0"]),
        (
            {"data": Data(wrong_jobs.Ragged(), batch_size=4)},
            ["data: got 'RuntimeError: stack expects each", "PadCollate"],
        ),
        ({"data": wrong_jobs.as_lists}, ["data: got \"'x',", "with_format"]),
        ({"data": wrong_jobs.the_next}, ["data: got 'another micro-batch 0 of pipeline 0 when"]),
        (
            {"data": Data(wrong_jobs.Augmented(), batch_size=4)},
            ["data: got 'another micro-batch 0 of pipeline 0 (samples ", golden("by-the-samples-index")],
        ),
        ({"data": wrong_jobs.generated}, ["data: got 'generated',"]),
        ({"data": len}, ["data: got 'len',"]),
        ({"data": Data(wrong_jobs.Unreadable(), batch_size=4)}, ["data: got 'NotImplementedError"]),
        ({"data": Data(own_jobs.Squares(0), batch_size=4)}, ["data: got 0,"]),
        ({"data": 7}, ["data: got 'int', expected"]),
        ({"on_error": "ignore"}, ["on_error: got 'ignore',"]),
        ({"on_iteration": lambda: None}, ["on_iteration: got '()'", "(iteration, loss)"]),
        ({"faults": Faults(timeouts=SHORT)}, ["faults.timeouts.transfer: got 10.0,"]),
        ({"record": "/no/such/folder/run.jsonl"}, ["record: got", golden("a-folder-that-exists")]),
    ],
)
def test_what_can_be_known_is_refused_by_the_constructor(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        own_jobs.trainer(**changes)
    assert type(caught.value) is InputError
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_what_was_typed_or_read_from_standard_input_can_not_be_imported(
    file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(stage: int, stages: int) -> nn.Module:
        return own_jobs.build_stage(stage, stages)

    typed = ModuleType("__main__")
    vars(typed).update(build=build, **({} if file is None else {"__file__": file}))
    build.__module__, build.__qualname__ = "__main__", "build"
    monkeypatch.setitem(sys.modules, "__main__", typed)
    with refuses("model.stages"):
        own_jobs.trainer(stages=build)
    squares = type("Squares", (own_jobs.Squares,), {"__module__": "__main__"})
    vars(typed).update(Squares=squares)
    with refuses("data", "Squares"):
        own_jobs.trainer(data=Data(squares(64), batch_size=4))
    with refuses("evaluate.data", "Squares"):
        own_jobs.trainer(data=Data(own_jobs.Squares(64), batch_size=4), evaluate=Evaluation(data=squares(64)))


@pytest.mark.processes
def test_what_is_declared_to_pass_between_layers_is_refused_by_its_name() -> None:
    with refuses("model.stage_io[0]", "float33"):
        own_jobs.trainer(stage_io=[[TensorSpec((1,), "float33")]]).fit(iterations=1)


def test_torch_says_nothing_of_what_is_only_tried(caplog: pytest.LogCaptureFixture) -> None:
    """In dozens of lines, before the sentence that the user is to read."""
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    torch_log.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError), tensors_without_data() as take:
            take(torch.zeros(2, 3)) @ take(torch.zeros(2, 3))
    finally:
        torch_log.removeHandler(caplog.handler)
    assert not caplog.records


def large(stage: int, stages: int) -> nn.Module:
    return nn.Sequential(nn.Linear(W, 1 << 36), nn.Linear(1 << 36, W))


class Together(torch.optim.SGD):
    """Not one of torch's own, so that nobody knows whether it steps each element by itself."""


@pytest.mark.parametrize(
    ("optimizer", "mode", "each"),
    [
        (torch.optim.AdamW, "deterministic", 24),
        (torch.optim.AdamW, "fast", 24),
        (partial(torch.optim.SGD, lr=0.1), "deterministic", 12),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "deterministic", 16),
        (Together, "deterministic", 12),
    ],
)
def test_memory_that_will_not_do_is_said(optimizer: Any, mode: Mode, each: int) -> None:
    """Bytes of a parameter's element: itself, its sum, what the optimizer keeps; and that once more, to go back to,
    where it does not fit into the sum. And the gradient of the largest parameter, or of all."""
    with pytest.raises(InputError) as caught:
        own_jobs.trainer(stages=large, optimizer=optimizer, optimization=Optimization(mode=mode))
    assert caught.value.field == "job"
    largest = W * (1 << 36)
    elements = 2 * largest + (1 << 36) + W
    size = each * elements + 4 * (elements if optimizer is Together else largest)
    assert f"{4 * size / 1e9:.1f} GB" in str(caught.value.value)


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {}, 3 << 20),
        ("0::/a/b\n", {"a/memory.max": "2097152\n", "a/b/memory.max": "max\n"}, 2 << 20),
        ("0::/gone\n", {"memory.max": "1048576\n"}, 1 << 20),
        ("4:cpu,memory:/job\n2:cpuset:/\n", {"memory/job/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 3 << 20),
    ],
)
def test_a_container_s_limit_is_the_memory_that_there_is(
    groups: str, files: dict[str, str], limit: int, tmp_path: Path
) -> None:
    written = {"proc/meminfo": "MemTotal: 2048 kB\nMemFree: 1 kB\nSwapTotal: 1024 kB\n", "proc/self/cgroup": groups}
    for name, text in (written | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit
    where = next((name for name, text in files.items() if text.strip() == str(limit)), None)
    group = (tmp_path / "sys/fs/cgroup" / where).parent.stat().st_ino if where else 0
    assert memory_group(tmp_path) == group
    assert memory_limit(tmp_path / "nothing") is memory_group(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": wrong_jobs.numbers_needed},
        {"stages": [nn.Linear(W, W), nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W))]},
        {"stages": [nn.Linear(W, W).requires_grad_(False), nn.Linear(W, W)]},
        {"stages": [nn.Linear(W, W).requires_grad_(False), nn.Linear(W, W)], "optimizer": wrong_jobs.trained_ones},
        {"stages": [nn.Flatten(), nn.Linear(W, W)], "optimizer": wrong_jobs.by_width},
        {"loss": wrong_jobs.by_way_of_sparse},
        {"loss": wrong_jobs.Weighing().requires_grad_(False)},
        *(
            {"stages": [nn.Flatten(), nn.Linear(W, W, bias=False)], "optimizer": kind}
            for kind in (torch.optim.Adagrad, torch.optim.Muon)
        ),
        {"stages": wrong_jobs.in_doubles, "data": wrong_jobs.doubles},
        {"stages": [wrong_jobs.OneHot, nn.Linear(W, W)], "data": partial(wrong_jobs.of_type, torch.int64)},
        {"stages": [nn.Sequential(nn.Linear(W, W), act), nn.Sequential(nn.Linear(W, W), act)]}
        if (act := nn.GELU())
        else {},
        *({"optimizer": partial(kind, lr=0.1)} for kind in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Rprop)),
        *({"optimizer": kind} for kind in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adafactor)),
        {"optimizer": wrong_jobs.threaded},
        {"scheduler": own_jobs.halving, "optimization": Optimization(clip_norm=1.0, mode="fast")},
        {"scheduler": own_jobs.halving, "optimizer": partial(torch.optim.AdamW, lr=torch.tensor(0.1), fused=True)},
        {**LAYERS, "optimizer": wrong_jobs.rate_by_layer},
        {**LAYERS, "optimizer": wrong_jobs.with_names},
        {**LAYERS, "optimizer": wrong_jobs.with_own_names},
        {**LAYERS, "optimizer": wrong_jobs.rate_by_stage, "planning": Planning(relayout="never")},
        {"optimizer": wrong_jobs.rate_by_stage},
        *(
            {"scheduler": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=steps)}
            for steps in (1, 8, 100)
        ),
        {"scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=5)},
    ],
)
def test_what_can_be_trained_is_not(changes: dict[str, Any]) -> None:
    """And the caller's random numbers, and its settings of torch, are left as they were."""
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    own_jobs.trainer(**changes)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_the_command_line_refuses_the_same() -> None:
    """Its workloads are checked by the launcher, before it starts workers."""
    options = TrainingOptions(job=Job(2, 2, 2))
    check_workload(NamedWorkload("tests.agent.nan_model:NanModel").load(), options)
    with pytest.raises(InputError, match="ReduceLROnPlateau"):
        check_workload(NamedWorkload("tests.agent.test_preflight:Plateau").load(), options)


@pytest.mark.parametrize("made", [own_jobs.workload, lambda: streamed_jobs.trainer().workload()], ids=["set", "stream"])
def test_data_are_cut_for_the_grid_of_their_job(made: Any) -> None:
    """On another one some samples would come twice, and others never."""
    job, workload = own_jobs.JOB, made()
    check_workload(workload, TrainingOptions(job=job))
    for wrong in (Job.uniform(3, job.stages, job.micro_batches), Job.uniform(job.pipelines, job.stages, 4)):
        with pytest.raises(InputError, match=r"^job\.(pipelines: got 3, expected 2|micro_batches: got 4, expected 3)"):
            check_workload(workload, TrainingOptions(job=wrong))


def test_a_function_gives_data_to_any_grid() -> None:
    check_workload(own_jobs.trainer().workload(), TrainingOptions(job=Job.uniform(4, own_jobs.JOB.stages, 5)))


class Wide(nn.Module):
    """Of more than runs for real before the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(W, W), nn.Parameter(torch.zeros(3 << 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + self.table[:W]
        return y


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_label_that_is_none_of_the_classes_is_found_in_a_large_model(device: Any) -> None:
    """On a GPU it would end all that a process has there."""

    def checked(data: Any) -> None:
        model = Model(stages=[Wide(), Wide()], loss=nn.functional.cross_entropy)
        given = CallableWorkload(model, Data(data), own_jobs.sgd, None, 0)
        check_workload(given, TrainingOptions(job=Job(1, 2, 1), platform=Platform(device=device)))  # type: ignore[arg-type]

    with pytest.raises(InputError) as refused:
        checked(wrong_jobs.classes)
    assert refused.value.field == "model.loss" and "Target 6" in str(refused.value)
    checked(wrong_jobs.numbered_from_0)


def test_what_a_loss_makes_of_numbers_that_are_no_output_is_not_looked_at() -> None:
    model = Model(stages=[Wide(), Wide()], loss=wrong_jobs.positive_alone)
    given = CallableWorkload(model, Data(own_jobs.data), own_jobs.sgd, None, 0)
    check_workload(given, TrainingOptions(job=Job(1, 2, 1)))  # type: ignore[arg-type]


def test_whatever_builders_draw_with_is_seeded() -> None:
    """And nothing is left of it in the caller's own random numbers."""
    model = Model(layers=wrong_jobs.drawn, layer_count=2, loss=nn.functional.mse_loss)
    given = CallableWorkload(model, *[None] * 3, 0)  # type: ignore[arg-type]
    numpy.random.seed(7)
    expected, draws = numpy.random.rand(), []
    for seed in (0, 0, 1):
        numpy.random.seed(7)
        built = build_layers(given, range(2), 2, seed)
        assert numpy.random.rand() == expected
        random.seed(seed)
        draws.append(torch.cat([p.detach().flatten() for p in built.parameters()]))
    assert torch.equal(draws[0], draws[1]) and not draws[0].eq(draws[2]).any()


def test_an_error_in_a_layer_names_it() -> None:
    mixed = [nn.Linear(W, W), nn.Linear(W, W, dtype=torch.float64)]
    model = Model(layers=mixed, loss=nn.functional.mse_loss)
    given = CallableWorkload(model, *[None] * 3, 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as caught:
        build_layers(given, range(2), 2, 0)(torch.randn(4, W), seed=0)
    assert caught.value.__notes__ == [golden("layer-1-which-got", f"float32[4, {W}]")]


def test_what_is_tried_leaves_the_caller_s_random_numbers_alone() -> None:
    def drawn() -> list[float]:
        return [random.random(), numpy.random.rand(), float(torch.rand(()))]

    found = []
    for tries in (False, True):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        if tries:
            own_jobs.trainer()
        found.append(drawn())
    assert found[0] == found[1]


def _table(step: int) -> float:
    return (1.0, 0.5, 0.25, 0.125, 0.0625)[step]


def _joined(optimizer: Any, kind: str, total_steps: int = 4, lr: float = 1.0) -> Any:
    """A OneCycleLR inside other schedulers."""
    schedulers = torch.optim.lr_scheduler
    one = schedulers.OneCycleLR(optimizer, max_lr=lr, total_steps=total_steps)
    constant = schedulers.ConstantLR(optimizer)
    if kind == "chained":
        return schedulers.ChainedScheduler([constant, one])
    order, milestone = ([one, constant], 6) if kind == "first" else ([constant, one], 2)
    joined = schedulers.SequentialLR(optimizer, order, milestones=[milestone])
    return schedulers.ChainedScheduler([joined]) if kind == "nested" else joined


@pytest.mark.processes
@pytest.mark.parametrize(
    "scheduler",
    [
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=4),
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_table),
        partial(_joined, kind="first"),
        at_length(partial(_joined, kind="chained")),
        partial(_joined, kind="last", total_steps=2),
        at_length(partial(_joined, kind="nested", total_steps=2)),
    ],
)
def test_a_schedule_that_ends_before_the_job_is_refused(scheduler: Any) -> None:
    """By `fit`, which first knows the number of iterations. In training it would end all workers, with the weights."""
    trainer = own_jobs.trainer(scheduler=scheduler)
    with pytest.raises(InputError) as caught:
        trainer.fit(iterations=5)
    assert caught.value.field == "scheduler"
    assert len(trainer.fit(iterations=4).losses) == 4


def _behind(optimizer: Any, milestone: int, chained: bool) -> Any:
    """A scheduler that is made of others, behind one that is not, and in a third."""
    schedulers = torch.optim.lr_scheduler
    inner = schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer)])
    joined = schedulers.SequentialLR(optimizer, [schedulers.ConstantLR(optimizer), inner], milestones=[milestone])
    return schedulers.ChainedScheduler([joined]) if chained else joined


@pytest.mark.processes
@pytest.mark.parametrize("chained", [False, True])
def test_a_part_that_torch_can_not_begin_is_refused_where_its_turn_comes(chained: bool) -> None:
    trainer = own_jobs.trainer(scheduler=partial(_behind, milestone=3, chained=chained))
    with pytest.raises(InputError) as caught:
        trainer.fit(iterations=3)
    assert caught.value.field == "scheduler"
    assert len(trainer.fit(iterations=2).losses) == 2


@pytest.mark.processes
def test_the_schedule_of_a_checkpoint_is_the_one_that_counts(tmp_path: Path) -> None:
    """Its state says how many steps there are, whatever the script says. A schedule of a function's takes the
    script's."""

    def of(scheduler: Any, **changes: Any) -> Any:
        folder = str(tmp_path / changes.pop("folder", "ck"))
        return own_jobs.trainer(scheduler=scheduler, checkpoints=Checkpoints(directory=folder, every=2, **changes))

    four, six = (partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=n) for n in (4, 6))
    of(four).fit(iterations=4)
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as caught:
        of(six, resume="newest").fit(iterations=6)
    assert caught.value.field == "scheduler" and str(tmp_path) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == there, "it is tried before anything is put aside"
    of(six, folder="longer").fit(iterations=4)
    assert len(of(four, folder="longer", resume="newest").fit(iterations=6).losses) == 2
    decay = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_halved)
    of(decay, folder="function").fit(iterations=2)
    assert len(of(decay, folder="function", resume="newest").fit(iterations=4).losses) == 2


def _halved(step: int) -> float:
    return 0.5**step


@pytest.mark.processes
def test_without_a_checkpoint_the_script_s_schedule_is_the_one_that_counts(tmp_path: Path) -> None:
    four = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=4)
    kept = Checkpoints(directory=str(tmp_path), every=2, resume="if-any")
    with pytest.raises(InputError) as caught:
        own_jobs.trainer(scheduler=four, checkpoints=kept).fit(iterations=5)
    assert caught.value.field == "scheduler"


def _first_of_two(optimizer: Any, steps: int) -> Any:
    schedulers = torch.optim.lr_scheduler
    table = schedulers.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.25][:steps][step])
    return schedulers.SequentialLR(optimizer, [table, schedulers.ConstantLR(optimizer)], milestones=[3])


def _in_a_checkpoint(of: Any, steps: int, iteration: int) -> Any:
    """A checkpoint of so many iterations, whose scheduler has taken so many steps."""
    made = of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    for _ in range(steps):
        made.optimizer.step()
        made.step()
    state = type(made).__name__, made.state_dict()
    return SimpleNamespace(iteration=iteration, path="kept", scheduler=lambda: state)


def _check(of: Any, iterations: int, kept: Any) -> None:
    workload = SimpleNamespace(optimizer=partial(torch.optim.SGD, lr=0.1), scheduler=of)
    needed = SimpleNamespace(first_stage=[("0.weight", torch.nn.Parameter(torch.zeros(1)))])
    options = TrainingOptions(job=own_jobs.JOB, iterations=iterations)
    check_schedule(workload, options, needed, kept)  # type: ignore[arg-type]


def test_steps_of_skipped_updates_are_left_to_take() -> None:
    """One of three iterations had no gradients that could be used, so its schedule has a step more."""
    four = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=4)
    _check(four, 5, _in_a_checkpoint(four, 2, 3))
    with pytest.raises(InputError):
        _check(four, 6, _in_a_checkpoint(four, 2, 3))


def test_a_part_of_a_schedule_whose_turn_is_over_is_not_tried() -> None:
    kept = _in_a_checkpoint(partial(_first_of_two, steps=3), 4, 4)
    _check(partial(_first_of_two, steps=2), 6, kept)
    with pytest.raises(InputError):
        _check(partial(_first_of_two, steps=2), 6, None)


class _ByEpochs(torch.optim.lr_scheduler.LambdaLR):
    """Counts epochs, which are two iterations."""

    def step(self, epoch: Any = None) -> None:
        self.calls = getattr(self, "calls", -1) + 1
        if self.calls % 2 == 0:
            super().step()


def test_a_schedule_that_counts_epochs_is_not_refused() -> None:
    of = partial(_ByEpochs, lr_lambda=lambda epoch: [1.0, 0.5, 0.25, 0.125][epoch])
    for iteration in range(6):
        _check(of, 6, _in_a_checkpoint(of, iteration, iteration) if iteration else None)


class _WithHistory(torch.optim.lr_scheduler.LRScheduler):
    """Keeps what it had in each step, and needs it in the next one."""

    def __init__(self, optimizer: Any) -> None:
        self.had: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.had.append(0.9 * self.had[self.last_epoch - 1] if self.last_epoch else 1.0)
        return [rate * self.had[-1] for rate in self.base_lrs]


def test_a_schedule_that_needs_its_history_is_not_refused_at_a_resume() -> None:
    for iteration in range(1, 7):
        _check(_WithHistory, 7, _in_a_checkpoint(_WithHistory, iteration, iteration))


def _short(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.25][step])


def _short_at_last(optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    return schedulers.SequentialLR(optimizer, [schedulers.ConstantLR(optimizer), _short(optimizer)], milestones=[1])


@pytest.mark.parametrize(("of", "steps"), [(_short, 2), (_short_at_last, 3)])
def test_a_schedule_that_a_checkpoint_has_at_its_end_takes_no_step_more(of: Any, steps: int) -> None:
    _check(of, steps, _in_a_checkpoint(of, steps - 1, steps - 1))
    with pytest.raises(InputError):
        _check(of, steps + 1, _in_a_checkpoint(of, steps, steps))


class _Watching(torch.optim.lr_scheduler.LRScheduler):
    """Looks at what the optimizer keeps."""

    def get_lr(self) -> list[Any]:
        if self.last_epoch:
            next(iter(self.optimizer.state.values()))
        return list(self.base_lrs)


class _Wrapping:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._of = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        self.state_dict, self.load_state_dict = self._of.state_dict, self._of.load_state_dict

    def step(self) -> None:
        self._of.step()

    @property
    def last_epoch(self) -> int:
        return self._of.last_epoch


@pytest.mark.processes
@pytest.mark.parametrize("scheduler", [_WithHistory, at_length(_Watching), at_length(_Wrapping)])
def test_a_schedule_of_the_user_s_own_whose_last_step_can_t_be_tried_alone_is_taken(scheduler: Any) -> None:
    trainer = own_jobs.trainer(scheduler=scheduler)
    assert len(trainer.fit(iterations=5).losses) == 5


def Plateau() -> Any:
    from tests.agent.nan_model import NanModel

    task = NanModel()
    task.scheduler = wrong_jobs.plateau  # type: ignore[method-assign,assignment]
    return task


@pytest.mark.processes
def test_peers_that_drift_apart_end_the_job_within_the_interval() -> None:
    """Not only at the end, 400 iterations later; and the checkpoints compare, too, where nothing else does."""
    with pytest.raises(JobFailed, match=golden("after-2-iterations-the-peers")):
        drifting = partial(wrong_jobs.Drifting, after=1)
        own_jobs.trainer(optimizer=drifting, faults=Faults(compare_every=2)).fit(iterations=400)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": wrong_jobs.different}, golden("before-the-first-iteration-the-peers")),
        at_length({"optimizer": wrong_jobs.Drifting}, golden("after-1-iteration-the-peers")),
    ],
)
def test_peers_that_differ_from_the_start_do_not_train_on(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobFailed, match=words):
        own_jobs.trainer(**changes).fit(iterations=400)


@pytest.mark.processes
def test_peers_that_drift_apart_are_found_by_the_checkpoint(tmp_path: Any) -> None:
    wrong: dict[str, Any] = {"optimizer": wrong_jobs.Drifting, "faults": Faults(compare_every=0)}
    with pytest.raises(JobFailed, match=golden("after-3-iterations-the-peers")):
        own_jobs.trainer(**wrong, checkpoints=Checkpoints(directory=tmp_path / "saved", every=3)).fit(iterations=400)


@pytest.mark.processes
@pytest.mark.parametrize("synchronous", [(), at_length(("--synchronous",))])
def test_peers_that_do_not_drift_are_left_alone(synchronous: tuple[str, ...], tmp_path: Path) -> None:
    """Compared after every iteration, through updates that are clipped, left out and taken back, a death, and a return:
    a step that is not settled yet is compared with its like only."""
    run = nan_model(
        tmp_path / "run.jsonl",
        *("--compare-every", "1", "--clip-norm", "0.5", *synchronous),
        *("--kill", "W1_0@6:I0", "--rejoin", "W1_0@9"),
        *("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3"),
        iterations=16,
        options={"loud": [1, 12], "poisoned": [3, 7], "poisoned_all": [5]},
    )
    assert run.status == 0, run.errors
    assert len(run.losses) == 16 and [f["worker"] for f in run.failures] == ["W1_0"]
    assert any(line.get("validation", {}).get("redone") for line in run.lines) or synchronous
    assert {line["iteration"]: line["skipped"] for line in run.iterations if "skipped" in line} == {
        3: [2],
        5: [3],
        7: [2],
    }
