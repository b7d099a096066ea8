"""One definition per option: its default, its bounds, its flag, its name in an error, and its way to the worker."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import openrecycle
from openrecycle.agent.cli import with_flags
from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.options import (
    FLAGS,
    TOLD,
    Checkpoints,
    Console,
    Faults,
    HandOver,
    Optimization,
    Planning,
    Timeouts,
    TrainingOptions,
)
from openrecycle.agent.config.settings import OptionGroup, build, leaves, spelled
from openrecycle.agent.jobs.trainer import ResilientTrainer
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.workers.spec import RunSpec, WorkerSpec, decode_spec, encode_spec
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from tests.agent.changed_options import all_changed, everything_changed
from tests.conftest import refuses

JOB = Job(3, 4, 6)
LEAVES = list(leaves(TrainingOptions))


def value(options: TrainingOptions, path: str) -> Any:
    found: Any = options
    for name in path.split("."):
        found = getattr(found, name)
    return found


def groups(group: Any) -> list[Any]:
    inner = [getattr(group, name) for name in vars(group)]
    return [group, *(g for i in inner if isinstance(i, OptionGroup) for g in groups(i))]


def test_every_option_reaches_the_worker_on_another_node() -> None:
    options = everything_changed(job=JOB)
    spec = WorkerSpec(Worker(0, 0), "abc", RunSpec(options, NamedWorkload("a:b")))
    told = decode_spec(json.loads(json.dumps(encode_spec(spec)))).run.options
    assert told == options
    for leaf in LEAVES:
        assert value(told, leaf.path) == all_changed()[leaf.path] != leaf.default, leaf.path


def test_a_job_knows_which_options_of_another_command_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {path: value for path, value in all_changed().items() if path in FLAGS}
    spec = WorkerSpec(Worker(0, 0), "abc", RunSpec(everything_changed(job=JOB).anchored(), NamedWorkload("a:b")))
    told = decode_spec(json.loads(json.dumps(encode_spec(spec)))).run.options
    same = {"job.stages": 4}
    assert told.unlike(given | same) == {}
    assert told.unlike({"faults.timeouts.silence": 99.0}) == {}, "a console may have changed it"
    differ = TrainingOptions(job=JOB).unlike(given | same | {"job.micro_batches": 5})
    assert differ.keys() == {*given, "job.micro_batches"}
    assert differ["job.micro_batches"] == (5, 6) and differ["seed"] == (1, 0)


def test_every_option_reaches_the_job_from_the_command_line() -> None:
    got: list[TrainingOptions] = []

    @with_flags(LEAVES)
    def command(given: dict[str, Any]) -> None:
        got.append(build(TrainingOptions, given, job=JOB))

    program = typer.Typer()
    program.command()(command)
    words: list[str] = []
    for leaf in LEAVES:
        said = all_changed()[leaf.path]
        if leaf.flag is None:
            continue
        if isinstance(said, bool):
            words.append(leaf.flag if said else f"--no-{leaf.flag[2:]}")
        else:
            for item in said if isinstance(said, tuple) else (said,):
                words += [leaf.flag, str(item)]
    for given in (words, []):
        done = CliRunner().invoke(program, given, env={"OPENRECYCLE_CONSOLE": ""})
        assert done.exit_code == 0, done.output
    assert {leaf.path for leaf in LEAVES if leaf.flag is None} == {"console.token"}, "a secret is no word of a command"
    for leaf in LEAVES:
        if leaf.flag is not None:
            assert value(got[0], leaf.path) == all_changed()[leaf.path], leaf.path
            assert value(got[1], leaf.path) == leaf.default, leaf.path


def of_numpy(number: Any) -> Any:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return number
    return np.int64(number) if isinstance(number, int) else np.float64(number)


def test_numbers_of_numpy_are_taken_as_plain_ones() -> None:
    given = {path: of_numpy(number) for path, number in all_changed().items()}
    assert any(isinstance(number, np.integer) for number in given.values())
    taken, plain = build(TrainingOptions, given, job=JOB), everything_changed(job=JOB)
    for leaf in LEAVES:
        assert type(value(taken, leaf.path)) is type(value(plain, leaf.path)), leaf.path
    assert taken == plain
    assert type(Timeouts(form=np.float32(1.5)).form) is float  # type: ignore[arg-type]
    for wrong in (np.float64(2.0), np.True_, np.array([2]), True, "2"):
        with refuses("faults.compare_every"):
            Faults(compare_every=wrong)  # type: ignore[arg-type]


def test_every_group_is_an_argument_and_a_public_name() -> None:
    made = TrainingOptions(job=JOB)
    arguments = inspect.signature(ResilientTrainer.__init__).parameters
    for name in vars(made):
        assert name in arguments or name in ("iterations", "evaluate_every"), name
    for group in groups(made)[1:]:
        kind = type(group)
        assert getattr(openrecycle, kind.__name__) is kind
        assert value(made, kind.PATH) == group, "where its errors say it stands"
    assert len(arguments) <= 21, "self and 20"


def test_a_console_is_told_all_that_its_jobs_have_a_field_for() -> None:
    options = everything_changed(job=JOB)
    spec = JobSpec.of(options.job, samples_per_micro_batch=4, **options.told())
    of_the_job = {"pipelines", "stages", "micro_batches", "durations", "profile", "samples_per_micro_batch"}
    of_the_job |= {"stage_bytes", "own_loop", "room"}
    assert set(JobSpec.model_fields) - of_the_job == options.told().keys() == TOLD.keys()
    assert (spec.transfer_timeout, spec.ranks_per_worker) == (options.faults.timeouts.transfer, 2)
    assert (spec.technique, spec.memory, spec.seed, spec.demo) == ("decoupled", "none", 1, True)
    assert spec.paced and spec.checkpoints and not spec.migrate, "a worker of a sharded optimizer stays"
    assert spec.relayout == "never", "no layers"
    with pytest.raises(InputError) as error, spelled(TOLD):
        JobSpec.of(JOB, **options.told() | {"name": ""})
    assert error.value.field == "console.name"


def test_every_option_is_explained_once_and_has_one_flag() -> None:
    assert len(set(FLAGS.values())) == len(FLAGS)
    for leaf in LEAVES:
        assert leaf.field.metadata["help"], leaf.path
    assert "compare_every: " in (Faults.__doc__ or "") and "secret" not in repr(Console(token="secret"))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Optimization(mode="quick"), "optimization.mode"),  # type: ignore[arg-type]
        (lambda: Optimization(autocast="fp8"), "optimization.autocast"),  # type: ignore[arg-type]
        (lambda: Optimization(clip_norm=math.nan), "optimization.clip_norm"),
        (lambda: Optimization(clip_norm=0), "optimization.clip_norm"),
        (lambda: Optimization(synchronous="yes"), "optimization.synchronous"),  # type: ignore[arg-type]
        (lambda: Faults(bad_sample_limit=True), "faults.bad_sample_limit"),
        (lambda: Faults(compare_every=1.5), "faults.compare_every"),  # type: ignore[arg-type]
        (lambda: Faults(kill="W1_2@3:F0"), "faults.kill"),
        (lambda: Faults(timeouts=5.0), "faults.timeouts"),  # type: ignore[arg-type]
        (lambda: Timeouts(form=0), "faults.timeouts.form"),
        (lambda: Timeouts(group=120.0), "faults.timeouts.group"),
        (lambda: HandOver(rate=9_999), "faults.hand_over.rate"),
        (lambda: HandOver(rate="5KB"), "faults.hand_over.rate"),
        (lambda: HandOver(rate="much"), "faults.hand_over.rate"),
        (lambda: HandOver(at_once=-1), "faults.hand_over.at_once"),
        (lambda: Checkpoints(every=0), "checkpoints.every"),
        (lambda: Platform(ranks_per_worker=4, mesh="4"), "platform.mesh"),
        (lambda: Platform(ranks_per_worker=4, mesh="0x4"), "platform.mesh"),
        (lambda: Platform(ranks_per_worker=4, mesh="2x3"), "platform.mesh"),
        (lambda: Planning(technique="magic"), "planning.technique"),
        (lambda: Planning(memory=0), "planning.memory"),
        (lambda: Planning(capacity="lots"), "planning.capacity"),
        (lambda: Planning(pace="F=1ms"), "planning.pace"),
        (lambda: Console(demo=1), "console.demo"),  # type: ignore[arg-type]
        (lambda: TrainingOptions(job=JOB, seed=-1), "seed"),
        (lambda: TrainingOptions(job=JOB, iterations=0), "iterations"),
        (lambda: TrainingOptions(job=JOB, iterations=2**53 + 1), "iterations"),
        (lambda: TrainingOptions(job=JOB, iterations=10**5000), "iterations"),
        (lambda: Timeouts(op=10**400), "faults.timeouts.op"),
        (lambda: HandOver(rate=10**400), "faults.hand_over.rate"),
        (lambda: Planning(memory=10**5000), "planning.memory"),
        (lambda: Planning(capacity=10**400), "planning.capacity"),
        (lambda: Planning(pace="F=1ms,F=2ms,I=1ms,W=1ms"), "planning.pace"),
        (lambda: Planning(pace=f"F={'9' * 400}ms,I=1ms,W=1ms"), "planning.pace"),
        (lambda: Faults(kill=5), "faults.kill"),  # type: ignore[arg-type]
        (lambda: Faults(kill=None), "faults.kill"),  # type: ignore[arg-type]
        (lambda: Faults(kill={"W0_0@1:F0": 1}), "faults.kill"),  # type: ignore[arg-type]
        (lambda: Checkpoints(directory="a\0b"), "checkpoints.directory"),
        (
            lambda: TrainingOptions(job=JOB, checkpoints=Checkpoints(directory="a" * 5000)).check(),
            "checkpoints.directory",
        ),
        (lambda: TrainingOptions(job=JOB, faults=Faults(kill=[f"W0_0@{'9' * 5000}:F0"])).check(), "faults.kill"),
        (lambda: TrainingOptions(job=JOB, faults=Faults(rejoin=[f"W0_0@{'9' * 5000}"])).check(), "faults.rejoin"),
        (lambda: TrainingOptions(job=JOB, faults=Faults(slow=[f"W0_0@{'9' * 5000}:2"])).check(), "faults.slow"),
        (lambda: TrainingOptions(job=JOB, weights=3), "weights"),  # type: ignore[arg-type]
        (lambda: TrainingOptions(job=JOB, console="http://h:1"), "console"),  # type: ignore[arg-type]
        (lambda: TrainingOptions(job=JOB, console=Console(url="nowhere")).check(), "console.url"),
        (lambda: TrainingOptions(job=JOB, checkpoints=Checkpoints(resume=1)).check(), "checkpoints.resume"),
        (lambda: TrainingOptions(job=JOB, checkpoints=Checkpoints(every=5)).check(), "checkpoints.every"),
        (lambda: TrainingOptions(job=JOB, checkpoints=Checkpoints(keep=1)).check(), "checkpoints.keep"),
        (lambda: TrainingOptions(job=JOB, faults=Faults(restart_delay=1.0)).check(), "faults.restart_delay"),
        (lambda: TrainingOptions(job=JOB, faults=Faults(bad_sample_limit=1)).check(), "faults.bad_sample_limit"),
        (lambda: TrainingOptions(job=JOB, console=Console(demo=True)).check(), "console.demo"),
        (lambda: TrainingOptions(job=JOB, faults=Faults(kill=["W7_0@1:F0"])).check(), "faults.kill"),
        (lambda: TrainingOptions(job=JOB, faults=Faults(slow=["W1_2@4:2"])).check(), "faults.slow"),
        (lambda: TrainingOptions(job=JOB, iterations=9, faults=Faults(kill=["W1_2@9:F0"])).check(), "faults.kill"),
        (
            lambda: TrainingOptions(
                job=JOB, iterations=9, faults=Faults(kill=["W1_2@8:F0"], rejoin=["W1_2@9"])
            ).check(),
            "faults.rejoin",
        ),
        (
            lambda: TrainingOptions(
                job=JOB,
                iterations=9,
                planning=Planning(pace="F=1ms,I=1ms,W=1ms"),
                faults=Faults(slow=["W1_2@9:2"]),
            ).check(),
            "faults.slow",
        ),
    ],
)
def test_what_is_wrong_is_named_as_each_side_writes_it(make: Any, path: str) -> None:
    with pytest.raises(InputError) as python:
        make()
    assert python.value.field == path
    with pytest.raises(InputError) as command_line, spelled(FLAGS):
        make()
    assert command_line.value.field == FLAGS.get(path, path)
    assert not any(f"`{known}`" in str(command_line.value) for known in FLAGS)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Planning(partition=[2, 2]), "11,11,11,11"),  # type: ignore[arg-type]
        (lambda: Checkpoints(directory="a", resume=True), "newest-intact"),
        (lambda: Checkpoints(directory="a", resume="latest"), "newest-intact"),
    ],
)
def test_what_is_no_text_is_told_which_text_is_taken(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_paths_and_lists_become_plain_data(tmp_path: Path) -> None:
    options = TrainingOptions(job=JOB, weights=tmp_path, faults=Faults(kill=["W1_2@3:F0"]))
    assert options.weights == str(tmp_path) and options.faults.kill == ("W1_2@3:F0",)
    assert [(kill.worker, kill.iteration) for kill in options.kills] == [(Worker(1, 2), 3)]


def test_sizes_are_said_in_units_or_in_bytes() -> None:
    assert HandOver(rate="50MB").bytes_per_second == HandOver(rate=5e7).bytes_per_second == 5e7
    sizes = {Planning(capacity=size).job(JOB).capacity_bytes for size in ("80GiB", 80 << 30)}
    assert sizes == {(80 << 30,) * 4}


def test_a_model_s_layers_make_a_job_whose_stages_can_be_cut() -> None:
    grid = Job(2, 2, 4)
    assert Planning().layered(grid, None) == Planning().layered(grid, 2) == grid
    assert Planning().layered(grid, 5).partition in ((3, 2), (2, 3))
    assert Planning(partition="1,4").layered(grid, 5).partition == (1, 4)
    paced = Planning(pace="F=4ms,I=4ms,W=4ms", pace_per="layer")
    job = paced.layered(paced.job(grid), 6)
    assert [profile.forward for profile in job.profiles] == [12.0, 12.0] and job.time_unit == "ms"
    # Times of whole stages say nothing of layers.
    by_stage = Planning(pace="F=4ms,I=4ms,W=4ms")
    assert not by_stage.layered(by_stage.job(grid), 6).layers


@pytest.mark.parametrize(
    ("planning", "layers", "field"),
    [
        (Planning(partition="2,3"), None, "planning.partition"),
        (Planning(partition="2,3"), 6, "planning.partition"),
        (Planning(partition="5"), 5, "planning.partition"),
        (Planning(partition="5,0"), 5, "planning.partition"),
        (Planning(pace_per="layer"), 5, "planning.pace_per"),
        (Planning(pace="F=1ms,I=1ms,W=1ms", pace_per="layer"), None, "planning.pace_per"),
    ],
)
def test_layers_that_do_not_fit_are_refused(planning: Planning, layers: int | None, field: str) -> None:
    with pytest.raises(InputError) as caught:
        planning.layered(Job(2, 2, 4), layers)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["a", "1,", ",1", "1;2", "-1,2", "1.5,2"])
def test_what_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        Planning(partition=text)
