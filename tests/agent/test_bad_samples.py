"""Micro-batches that raise whenever they are run: workers live; the job leaves them out, or ends in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openrecycle import Data
from openrecycle.agent.checkpoints import whole_checkpoints
from openrecycle.agent.config.devices import Platform, Transport
from openrecycle.agent.config.options import Checkpoints, Faults
from openrecycle.agent.launcher.launch import JobFailed
from openrecycle.agent.models.layers import build_layer
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.planner.jobs.errors import InputError
from tests.agent import own_jobs, wrong_jobs
from tests.agent.consoles import console
from tests.agent.local_jobs import TINY, LocalJob, Message, fault_free_losses
from tests.agent.poisoned import Poisoned
from tests.agent.runs import forked
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes

GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
ITERATIONS = 9
SKIP = Faults(on_bad_sample="skip")


def poisoned(**faults: Any) -> NamedWorkload:
    return NamedWorkload("tests.agent.poisoned:Poisoned", {**faults, **TINY})


BAD = poisoned(inputs=[(3, 1, 0)], targets=[(3, 0, 1)], exits=[(6, 1, 1)])
LEFT_OUT = {3: [1, 2], 6: [3]}


@pytest.fixture(scope="module")
def undisturbed() -> LocalJob:
    """Bad data, and no deaths."""
    return LocalJob(**GRID, iterations=ITERATIONS, workload=BAD, faults=SKIP).run()


def skipped(job: LocalJob) -> dict[int, list[int]]:
    return {line["iteration"]: line["skipped"] for line in job.iterations if "skipped" in line}


def test_bad_micro_batches_are_left_out_and_everybody_lives(undisturbed: LocalJob) -> None:
    assert skipped(undisturbed) == LEFT_OUT
    assert undisturbed.dead == [] and {line["living"] for line in undisturbed.iterations} == {4}
    assert len(undisturbed.losses) == ITERATIONS
    assert undisturbed.losses[:3] == fault_free_losses(3, **GRID), "until then it is the same job"
    raised = [line["raised"] for line in undisturbed.lines if "raised" in line]
    tried = {(r["iteration"], r["micro_batch"]): set[str]() for r in raised}
    for r in raised:
        tried[r["iteration"], r["micro_batch"]].add(r["worker"])
    assert tried == {(3, 2): {"W0_0", "W1_0"}, (3, 1): {"W0_1", "W1_1"}, (6, 3): {"W0_1", "W1_1"}}
    assert any("a damaged picture at 3, 1, 0, at " in r["error"] for r in raised)
    assert any("poisoned.py" in line for line in raised[0]["traceback"])
    assert any(r["error"].startswith(golden("systemexit-no-such-file-at")) for r in raised)
    assert any("in caf?.txt, at " in r["error"] for r in raised), "no JSON could hold the name as it is"


def test_the_mean_is_over_the_others() -> None:
    """Of the first iteration, whose parameters are known."""
    settings: dict[str, Any] = {**TINY, "dropout": 0.0}
    bad = NamedWorkload("tests.agent.poisoned:Poisoned", {"inputs": [(0, 1, 0)], **settings})
    job = LocalJob(**GRID, iterations=1, workload=bad, faults=SKIP).run()
    model = Poisoned(**settings)
    first, last = (build_layer(model, stage, 2, 0) for stage in range(2))
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 1)]
    losses = [model.loss(last(first(model.inputs(0, *p))), model.targets(0, *p)).item() for p in places]
    assert skipped(job) == {0: [2]}
    assert float.fromhex(job.losses[0]) == pytest.approx(sum(losses) / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("keep", "transport"),
    [at_length(False, "tagged"), (True, "ordered"), at_length(False, "ordered"), at_length(True, "tagged")],
)
def test_deaths_do_not_show_in_the_bits(undisturbed: LocalJob, keep: bool, transport: Transport) -> None:
    """A worker dies in the iteration that is poisoned, another one after it, and one comes back."""

    def act(job: LocalJob, line: Message) -> None:
        if line.get("iteration") == 4:
            job.start("W1_0")

    job = LocalJob(
        **GRID,
        iterations=ITERATIONS,
        workload=BAD,
        kills=("W1_0@3:I1", "W1_1@6:F0"),
        faults=Faults(on_bad_sample="skip", keep_finished=keep),
        platform=Platform(transport=transport),
        on_line=act,
    ).run()
    assert job.dead == ["W1_0", "W1_1"]
    assert skipped(job) == LEFT_OUT and job.losses == undisturbed.losses
    assert [x["final"] for x in job.lines if "final" in x] == [x["final"] for x in undisturbed.lines if "final" in x]


def test_a_job_of_one_pipeline_tries_twice_and_lives() -> None:
    grid: dict[str, Any] = {"pipelines": 1, "stages": 2, "micro_batches": 3}
    job = LocalJob(**grid, iterations=5, workload=poisoned(inputs=[(2, 0, 1)]), faults=SKIP).run()
    assert skipped(job) == {2: [1]} and len(job.losses) == 5
    assert [line["raised"]["worker"] for line in job.lines if "raised" in line] == ["W0_0", "W0_0"]


def test_a_whole_iteration_may_be_left_out() -> None:
    everything = [(2, p, m) for p in range(2) for m in range(2)]
    job = LocalJob(**GRID, iterations=4, workload=poisoned(inputs=everything), faults=SKIP).run()
    assert skipped(job) == {2: [0, 1, 2, 3]} and len(job.losses) == 4 and job.dead == []


def test_a_micro_batch_of_another_shape_is_left_out() -> None:
    """Its first stage notices, on every worker."""
    job = LocalJob(**GRID, iterations=4, workload=poisoned(ragged=[(2, 1, 0)]), faults=SKIP).run()
    assert skipped(job) == {2: [2]} and len(job.losses) == 4 and job.dead == []
    said = [line["raised"] for line in job.lines if "raised" in line]
    assert {r["worker"] for r in said} == {"W0_0", "W1_0"}
    assert all("0: got float32[2, 15, 32]," in r["error"] for r in said)
    assert all(r["traceback"] == [] for r in said), "it would be of this product's own code alone"


def test_a_job_whose_first_micro_batch_is_bad_begins() -> None:
    """What the data is like is seen from the next one; by default it is refused, with the samples' numbers."""
    damaged: dict[str, Any] = {"data": Data(wrong_jobs.Damaged(), batch_size=4, shuffle=False)}
    with pytest.raises(InputError, match=r"sample 1 is damaged.*micro-batch 0 of pipeline 0 \(samples 0, 1, 2, 3\)"):
        own_jobs.trainer(**damaged)
    seen: list[tuple[int, ...]] = []
    trainer = own_jobs.trainer(
        **damaged, faults=SKIP, on_iteration=lambda iteration, loss, details: seen.append(details.skipped)
    )
    assert len(trainer.fit(iterations=2).losses) == 2 and seen == [(0,), ()]


def test_by_default_the_job_halts_before_the_iteration_and_keeps_everything(tmp_path: Path) -> None:
    checkpoints = Checkpoints(directory=tmp_path / "points")
    job = LocalJob(**GRID, iterations=ITERATIONS, workload=BAD, checkpoints=checkpoints)
    with pytest.raises(JobFailed, match=golden("iteration-3-micro-batch-12-is")):
        job.run()
    assert len(job.losses) == 3 and job.dead == []
    assert set(job.said("done")) == {"W0_0", "W0_1", "W1_0", "W1_1"}, "nobody was ended by it"
    assert [c.iteration for c in whole_checkpoints(tmp_path / "points")] == [3]


def test_too_many_end_the_job() -> None:
    faults = Faults(on_bad_sample="skip", bad_sample_limit=2)
    job = LocalJob(**GRID, iterations=ITERATIONS, workload=BAD, faults=faults)
    with pytest.raises(JobFailed, match=golden("iteration-6-micro-batch-3-2")):
        job.run()
    assert len(job.losses) == 6


def test_a_worker_that_fails_at_what_others_can_do_is_taken_out(tmp_path: Path) -> None:
    workload = poisoned(broken=2, mark=str(tmp_path / "mark"))
    job = LocalJob(**GRID, iterations=ITERATIONS, workload=workload, faults=SKIP).run()
    (out,) = job.dead
    assert out in ("W0_0", "W1_0") and skipped(job) == {}
    assert job.losses == fault_free_losses(ITERATIONS, **GRID)
    assert any(f"{out} (OSError" in line.get("warning", "") for line in job.lines)


def test_why_a_worker_ended_is_said_though_nobody_starts_it_again() -> None:
    """What raises outside all ops ends the process: of each it is said, also where the job ends with the last one."""
    workload = NamedWorkload("tests.agent.crashing:Stumbling", {"step": 2, **TINY})
    job = LocalJob(**GRID, iterations=ITERATIONS, workload=workload)
    with pytest.raises(JobFailed):
        job.run()
    warnings = [line["warning"] for line in job.lines if "warning" in line]
    assert any("RuntimeError: no such schedule, at " in text and "crashing.py" in text for text in warnings)


@pytest.mark.chaos
def test_with_a_console_it_is_the_same_and_the_console_shows_it(undisturbed: LocalJob, tmp_path: Path) -> None:
    settings = {**TINY, "inputs": [(3, 1, 0)], "targets": [(3, 0, 1), (6, 1, 1)]}
    grid = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2", "--iterations", str(ITERATIONS))
    workload = ("--workload", "tests.agent.poisoned:Poisoned", "--workload-options", json.dumps(settings))
    with console(tmp_path) as server:
        options = ("--console", server.root, "--on-bad-sample", "skip", "--kill", "W1_0@3:I1")
        run = forked(tmp_path / "run.jsonl", *grid, *workload, *options)
        assert run.status == 0, run.errors
        assert run.losses == undisturbed.losses
        assert run.final == next(x["final"] for x in undisturbed.lines if "final" in x)
        lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
        assert {x["iteration"]: x["skipped"] for x in lines if "skipped" in x} == LEFT_OUT
        events = server.read(f"/jobs/{server.job_id()}/events?after=0&limit=500")["events"]
        texts = [event["text"] for event in events]
        assert any("iteration 6, micro-batch 3" in text and golden("it-is-left-out") in text for text in texts)
        workers = server.read(f"/jobs/{server.job_id()}/workers")["workers"]
        assert [w["name"] for w in workers if w["state"] == "failed"] == ["W1_0"], "the others lived"
