"""An optimizer whose state is sharded over a stage's workers: the bits of one that is not, through every kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn, optim

from openrecycle.agent.checkpoints import whole_checkpoints
from openrecycle.agent.config.options import Optimization, Planning, TrainingOptions
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.jobs.preflight import check_workload, state_memory
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import BUCKET_BYTES, StageOptimizer
from openrecycle.agent.transport.group import TransferError
from openrecycle.agent.workers.executor import Executor
from openrecycle.agent.workers.validation_exchange import Steps
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from tests.agent.runs import Run, forked
from tests.agent.saved import checkpoint_bits
from tests.conftest import at_length

ITERATIONS = 8
GRID = ("--pipelines", "3", "--stages", "2", "--micro-batches", "3", "--iterations", str(ITERATIONS))
TINY = ("--workload-options", '{"width": 64, "heads": 2, "sequence": 16, "batch": 2}')
LATE = ("--clip-norm", "0.5")
"""The first steps are clipped, after the fact."""
ZERO1 = ("--optimizer-sharding", "zero1")
SLOWLY = ("--hand-over-rate", "300KB")
"""What an owner lacks comes over several iterations."""


def sharded(record: Path, *arguments: str) -> Run:
    return forked(record, *GRID, *TINY, *LATE, *ZERO1, *arguments)


def checkpoints_in(folder: Path) -> tuple[str, ...]:
    return "--checkpoint", str(folder), "--checkpoint-every", "4"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Without shards, and its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    run = forked(folder / "run.jsonl", *GRID, *TINY, *LATE, *checkpoints_in(folder / "saved"))
    assert run.status == 0, run.errors
    return run, folder / "saved"


@pytest.fixture(scope="module")
def reference(whole: tuple[Run, Path]) -> Run:
    return whole[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    "faults",
    [
        at_length(""),
        at_length("--kill W1_1@2:O"),
        at_length("--kill W0_0@3:R"),
        at_length("--kill W2_0@0:F0"),
        # When it dies, some buckets' sums have come to some who need them.
        at_length("--kill W2_0@3:R --bucket-cap-mb 0.01"),
        at_length("--kill W0_1@2:O --bucket-cap-mb 0.01"),
        at_length("--kill W2_1@2:V --transport ordered"),
        at_length("--kill W1_0@4:I1 --mode deterministic --synchronous"),
        # Its neighbour steps without knowing that the others clip.
        at_length("--kill W1_1@0:O --synchronous --keep-finished"),
        # One that returns lacks its share for some iterations, in which another dies.
        "--kill W1_0@1:F1 --rejoin W1_0@2 --kill W0_1@4:O",
        # What the first has had comes to others before the second dies.
        at_length("--kill W1_0@1:F1 --kill W2_0@5:V --rejoin W1_0@5 --rejoin W2_0@6 --pace F=30ms,I=30ms,W=30ms"),
    ],
)
def test_the_same_bits_as_without_shards(faults: str, reference: Run, tmp_path: Path) -> None:
    run = sharded(tmp_path / "run.jsonl", *faults.split(), *SLOWLY)
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert [f["worker"] for f in run.failures] == [w[:4] for w in faults.split() if ":" in w]


@pytest.mark.chaos
@pytest.mark.processes
def test_two_ranks_each(tmp_path: Path) -> None:
    """Each rank's part of the stage is sharded over the workers' ranks of the same number."""
    ranks = ("--workload", "agent.examples.tensor_parallel:Gpt", "--ranks-per-worker", "2")
    whole = forked(tmp_path / "whole.jsonl", *GRID, *TINY, *LATE, *ranks)
    run = sharded(tmp_path / "run.jsonl", *ranks, "--kill", "W1_1.1@2:F1")
    assert run.status == 0, run.errors
    assert run.losses == whole.losses and run.final == whole.final


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    "options", ["--transport tagged", at_length("--transport ordered"), at_length("--autocast fp16")]
)
def test_parameters_that_layers_share(options: str, tmp_path: Path) -> None:
    """Their sums are needed by all peers, to be added to those of the other stage."""
    tied = ("--workload-options", TINY[1].replace("{", '{"tied": true, '))
    command = (*GRID, "--iterations", "4", *tied, *LATE, *options.split())
    whole = forked(tmp_path / "whole.jsonl", *command)
    run = forked(tmp_path / "run.jsonl", *command, *ZERO1, "--kill", "W1_1@2:O")
    assert run.status == 0, run.errors
    assert run.losses == whole.losses and run.final == whole.final


@pytest.mark.processes
def test_checkpoints_know_no_shards(whole: tuple[Run, Path], tmp_path: Path) -> None:
    """They hold what those of a job without do; and who goes on from them, with shards or without, has the same
    bits."""
    reference, folders = whole[0], (whole[1], tmp_path / "sharded")
    run = sharded(tmp_path / "run.jsonl", *checkpoints_in(folders[1]), "--kill", "W0_1@1:F1")
    assert run.status == 0 and run.final == reference.final, run.errors
    theirs, ours = map(checkpoint_bits, folders)
    assert ours == theirs and sorted(ours) == [4, ITERATIONS]
    # Each wrote a share: of the stage that has lost one, two workers.
    found = whole_checkpoints(folders[1])[-1]
    assert [len(shares) for shares in found.shares] == [3, 2]
    shutil.rmtree(folders[1] / f"iteration-{ITERATIONS:010d}")
    again = sharded(tmp_path / "again.jsonl", "--checkpoint", str(folders[1]), "--resume", "newest")
    assert again.status == 0 and again.final == reference.final, again.errors


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize("options", [ZERO1, at_length(())])
def test_writers_that_die_with_their_share(options: tuple[str, ...], whole: tuple[Run, Path], tmp_path: Path) -> None:
    """One between its copy and its last step, so that those who live take another; one while it writes: that
    checkpoint is whole or not there, and the next is whole."""
    reference, folder = whole[0], tmp_path / "saved"
    kills = ("--kill", "W0_1@4:F1", "--kill", "W1_0@5:F1")
    run = forked(tmp_path / "run.jsonl", *GRID, *TINY, *LATE, *options, *checkpoints_in(folder), *kills)
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert sorted(failure["worker"] for failure in run.failures) == ["W0_1", "W1_0"]
    ours = checkpoint_bits(folder)
    assert ITERATIONS in ours and ours.items() <= checkpoint_bits(whole[1]).items()
    assert [len(shares) for shares in whole_checkpoints(folder)[0].shares] == [2, 2]
    assert [path.name for path in folder.glob(".*")] == [".lock"], "what was begun and never finished is gone"


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize("options", [(), ZERO1, ("--mode", "fast"), ("--mode", "fast", *ZERO1)], ids=" ".join)
@pytest.mark.parametrize("kills", ["W0_0@2:O W1_1@4:F0 W2_0@6:I1", "W2_1@1:F1 W0_0@3:W1 W1_1@5:O"])
def test_whoever_dies_every_checkpoint_has_the_bits_of_its_iteration(
    kills: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """One is written after each iteration, by those who live then. In fast mode deaths change the sums: there those
    that are whole are read, and what is resumed from the newest ends as the job did."""
    folders = [tmp_path / "calm", tmp_path / "killed"]
    every = ("--checkpoint-every", "1", "--checkpoint-keep", "50")
    killed = [part for kill in kills.split() for part in ("--kill", kill)]
    for folder, deaths in zip(folders, ([], killed), strict=True):
        run = forked(
            *(tmp_path / f"{folder.name}.jsonl", *GRID, *TINY, *LATE, *options),
            *("--checkpoint", str(folder), *every, *deaths),
        )
        assert run.status == 0, run.errors
    calm, ours = map(checkpoint_bits, folders)
    assert sorted(calm) == list(range(1, ITERATIONS + 1))
    assert ITERATIONS in ours and len(ours) > ITERATIONS // 2
    if "fast" not in options:
        assert ours.items() <= calm.items()
    if ITERATIONS - 1 in ours:
        shutil.rmtree(folders[1] / f"iteration-{ITERATIONS:010d}")
        again = forked(
            *(tmp_path / "again.jsonl", *GRID, *TINY, *LATE, *options),
            *("--checkpoint", str(folders[1]), *every, "--resume", "newest"),
        )
        assert again.status == 0 and (again.final == run.final or "fast" in options), again.errors


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize("back_to", ["checkpoint", at_length("start"), at_length("")])
def test_shards_that_went_with_both_their_owners(back_to: str, reference: Run, tmp_path: Path) -> None:
    """All go back to the newest checkpoint, and nobody who lives is restarted; or where others come back, to the start;
    without either the job ends."""
    kills = ("--kill", "W0_0@5:F0", "--kill", "W1_0@5:F0")
    options = {
        "checkpoint": ("--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "2"),
        "start": ("--max-restarts", "1", "--restart-delay", "600"),
        "": (),
    }
    run = sharded(tmp_path / "run.jsonl", *kills, *options[back_to])
    assert {f["worker"] for f in run.failures} <= {"W0_0", "W1_0"}
    if back_to:
        assert run.status == 0, run.errors
        assert run.losses == reference.losses and run.final == reference.final
        assert run.iterations[-1]["living"] == 4
    else:
        assert run.status == 1 and len(run.iterations) == 5


def test_who_has_stepped_in_doubt_exchanges_no_parameters() -> None:
    """Peers may know what the others make of the step, and have taken it otherwise, or not at all."""
    module = nn.Linear(2, 2)
    sums = GradientSum(module.parameters(), terms=1)
    optimizer = StageOptimizer(module, optim.AdamW(module.parameters()), sums, pipelines=2)
    broken, groups = MagicMock(), MagicMock()
    broken.wait.side_effect = TransferError("its teller is dead")
    groups.receive.return_value, groups.ranks.size = broken, 1
    worker, living = Worker(0, 0), [Worker(p, s) for p in range(2) for s in range(2)]
    steps = Steps(worker, Optimization(synchronous=True), optimizer, (1, 1), MagicMock())
    steps.begin(groups, living, 0, {})
    sums.add_loss(torch.tensor(1.0))
    for parameter in module.parameters():
        sums.add(parameter, torch.ones_like(parameter))
    executor = MagicMock(_steps=steps, _exchange=None, _tied=None, _reduction_seconds=0.0, _iteration=0)
    executor._incomplete.return_value = executor._transfers.reduced_by_all.return_value = 0
    with pytest.raises(TransferError):
        Executor._step(executor)
    assert optimizer.committed == 1 and not executor._sharded.gather.called


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.Adafactor])
def test_an_optimizer_that_can_not_be_cut_is_refused(kind: type[optim.Optimizer]) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(InputError) as refused:
        StageOptimizer(module, kind(module.parameters()), GradientSum(module.parameters(), terms=1), pipelines=2)
    assert refused.value.field == "optimizer"


class Whole(Gpt):
    """Whose optimizer looks at a parameter as a whole."""

    def __init__(self) -> None:
        super().__init__(width=32, heads=2, sequence=16, batch=2)

    def optimizer(self, parameters: Any) -> optim.Optimizer:
        return optim.Adafactor(parameters)


def test_it_is_refused_before_the_start() -> None:
    options = TrainingOptions(job=Job.uniform(3, 1, 2), optimization=Optimization(sharding="zero1"))
    with pytest.raises(InputError) as refused:
        check_workload(Whole(), options)
    assert refused.value.field == "optimization.sharding"


def test_workers_keep_their_stage() -> None:
    """One that took another would give up what only it may have."""
    job, zero1 = Job.uniform(3, 2, 2), Optimization(sharding="zero1")
    assert not TrainingOptions(job=job, optimization=zero1).may_migrate(by_default=True)
    assert TrainingOptions(job=job).may_migrate(by_default=True)
    asked = TrainingOptions(job=job, optimization=zero1, planning=Planning(migrate=True))
    assert not asked.may_migrate(by_default=False)
    with pytest.raises(InputError) as refused:
        asked.check()
    assert refused.value.field == "planning.migrate"


@pytest.mark.parametrize(("peers", "most"), [(1, 24), (2, 24), (3, 18), (8, 14.1)])
def test_memory_is_reckoned_by_peers(peers: int, most: float) -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(100)))
    wanted = Optimization(sharding="zero1")
    found = state_memory(list(layers.named_parameters()), 8.0, True, wanted, peers).total / (100 * 1024**2)
    assert most - 1 <= found <= most + BUCKET_BYTES / (100 * 1024**2) + 0.1
