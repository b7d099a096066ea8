"""Workers of several ranks, tensor parallel: the same bits through the death of any rank, and no rank idles."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from openrecycle.agent.checkpoints import whole_checkpoints
from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.faults import Kill
from openrecycle.agent.config.options import Checkpoints, Faults, Optimization, Timeouts, TrainingOptions
from openrecycle.agent.config.settings import OptionGroup
from openrecycle.agent.examples import tensor_parallel
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.jobs.callables import CallableWorkload, Model
from openrecycle.agent.jobs.preflight import check_workload
from openrecycle.agent.launcher import processes
from openrecycle.agent.launcher.processes import (
    ProcessPool,
    SpareRank,
    SpareRanks,
    Spares,
    WorkerProcess,
    spare_of,
)
from openrecycle.agent.launcher.record import DivergedError, RunRecord
from openrecycle.agent.messages.channel import FENCED, GAVE_UP, ORPHANED
from openrecycle.agent.models.data import Data
from openrecycle.agent.models.parallelized import parts_of_a_rank
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.workers.worker import MergedMessages
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from tests.agent import own_jobs
from tests.agent.consoles import console, until
from tests.agent.launches import Launched
from tests.agent.local_jobs import TINY, LocalJob, uncut
from tests.agent.runs import Run, forked
from tests.agent.saved import checkpoint_bits
from tests.conftest import at_length, refuses
from tests.golden import golden

ITERATIONS = 6
JOB = Job.uniform(3, 2, 3)
GRID = ("--pipelines", "3", "--stages", "2", "--micro-batches", "3")
TWO_RANKS = (
    *("--workload", "agent.examples.tensor_parallel:Gpt", "--ranks-per-worker", "2", "--clip-norm", "0.5"),
    *("--workload-options", '{"width": 32, "heads": 2, "sequence": 16, "batch": 2}'),
)


def two_ranks(record: Path, *arguments: str, iterations: int = ITERATIONS, grid: str = "2x2") -> Run:
    """A small tensor-parallel model on workers of two ranks each; the first steps are clipped, after the fact."""
    pipelines, stages = grid.split("x")
    size = ("--pipelines", pipelines, "--stages", stages, "--micro-batches", "3")
    return forked(record, *size, *TWO_RANKS, "--iterations", str(iterations), *arguments)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = two_ranks(tmp_path_factory.mktemp("ranks") / "reference.jsonl")
    assert run.status == 0, run.errors
    return run


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    "kills",
    [
        "W1_1.1@2:F1",
        at_length("W0_0.1@3:R"),
        at_length("W0_1@0:F0"),
        at_length("W0_0@3:O"),
        at_length("W1_0.1@4:I2"),
        at_length("W0_1@2:V"),
        at_length("W1_1.1@2:F1 W1_1@2:F1"),
    ],
)
def test_the_death_of_a_rank(kills: str, reference: Run, tmp_path: Path) -> None:
    run = two_ranks(tmp_path / "run.jsonl", *(part for kill in kills.split() for part in ("--kill", kill)))
    assert run.status == 0, run.errors
    assert run.losses == reference.losses and run.final == reference.final
    assert {failure["worker"] for failure in run.failures} == {kills[:4]}
    assert run.iterations[-1]["living"] == 3 and run.iterations[-1]["generation"] == 2


@pytest.mark.chaos
@pytest.mark.processes
def test_two_hurt_workers_make_a_whole_one() -> None:
    """Of any stage: the ranks that are left are worth one worker, which takes its state from a peer."""
    job: dict[str, Any] = {
        "pipelines": 2,
        "stages": 2,
        "micro_batches": 1,
        "platform": Platform(ranks_per_worker=2),
        "workload": NamedWorkload("openrecycle.agent.examples.tensor_parallel:Gpt", TINY),
        "optimization": Optimization(clip_norm=0.5),
    }

    def stop_once_whole(job: LocalJob, line: dict[str, Any]) -> None:
        living = [line["living"] for line in job.iterations]
        if 2 in living and living[-1] == 3:
            job.stop()

    # Slowly, since iterations of so many processes take CPU time, and some go by until a worker is made of two.
    kills = ("W1_1.1@0:F0", "W0_0@1:I0")
    hurt = LocalJob(**job, kills=kills, pace=0.05, on_line=stop_once_whole).run()
    assert hurt.iterations[1]["living"] == 2 and hurt.iterations[-1]["living"] == 3
    assert hurt.losses == uncut(**job, iterations=len(hurt.losses)).losses


@pytest.mark.chaos
@pytest.mark.processes
def test_what_is_left_of_the_last_two_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Nobody lives any more, and nobody is to be started again."""
    job: dict[str, Any] = {
        "pipelines": 2,
        "stages": 1,
        "micro_batches": 1,
        "platform": Platform(ranks_per_worker=2),
        "workload": NamedWorkload("openrecycle.agent.examples.tensor_parallel:Gpt", TINY),
    }

    def strike(job: LocalJob, line: dict[str, Any]) -> None:
        if "checkpoint" in line and len(job.pool.running) == 2 and not job.dead:
            for entry in list(job.pool.running.values()):
                os.kill(entry.siblings[0].pid or 0, signal.SIGKILL)
        elif len([i for i in job.iterations if i["generation"] > 1]) == 2:
            job.launcher.end_soon()

    hurt = LocalJob(
        **job,
        pace=0.02,
        checkpoints=Checkpoints(directory=tmp_path, every=2, keep=50),
        checkpoint=lambda: next((str(c.path) for c in whole_checkpoints(tmp_path)), None),
        on_line=strike,
    ).run()
    assert "final" in hurt.lines[-1] and hurt.iterations[-1]["living"] == 1
    assert hurt.losses == uncut(**job, iterations=len(hurt.losses)).losses


@pytest.mark.chaos
@pytest.mark.processes
def test_the_death_of_a_rank_whose_child_lives(tmp_path: Path) -> None:
    """It has all that the rank had open but the pipe to its sibling, who is to know of the end."""

    def strike(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 2:
            (sibling,) = next(e for w, e in job.pool.running.items() if str(w) == "W1_1").siblings
            os.kill(sibling.pid or 0, signal.SIGKILL)
        if line.get("living") == 3:
            job.stop()

    model = NamedWorkload("tests.agent.crashing:Forking", TINY | {"children": str(tmp_path)})
    grid: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 1, "platform": Platform(ranks_per_worker=2)}
    try:
        job = LocalJob(**grid, workload=model, pace=0.02, on_line=strike).run()
    finally:
        for child in tmp_path.iterdir():
            os.kill(int(child.name), signal.SIGKILL)
    assert job.dead == ["W1_1"] and {line["generation"] for line in job.iterations} == {1, 2}


@pytest.mark.chaos
@pytest.mark.processes
def test_a_rank_that_hangs_leaves_its_sibling_to_another_worker() -> None:
    """It is stopped, so its worker is silent, and fenced; a rank of another stage dies."""
    grid: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 3, "iterations": 400}
    hangs = list[int]()

    def strike(job: LocalJob, line: dict[str, Any]) -> None:
        running = {str(cell): entry for cell, entry in job.pool.running.items()}
        if line.get("iteration") == 1:
            hangs.append(running["W1_1"].siblings[0].pid or 0)
            os.kill(hangs[0], signal.SIGSTOP)
        elif line.get("living") == 3 and len(hangs) == 1:
            hangs.append(running["W0_0"].process.pid or 0)
            os.kill(hangs[1], signal.SIGKILL)
        elif line.get("living") == 3 and len(hangs) == 2 and any(x.get("living") == 2 for x in job.lines):
            job.stop()

    model = NamedWorkload("openrecycle.agent.examples.tensor_parallel:Gpt", TINY)
    two = Platform(ranks_per_worker=2)
    job = LocalJob(**grid, platform=two, workload=model, pace=0.05, hang_seconds=4.0, on_line=strike).run()
    assert job.dead == ["W0_0", "W1_1"]
    living = [line["living"] for line in job.iterations]
    assert 2 in living and living[-1] == 3, "of what is left of both a worker has come"


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize("where", ["layer", at_length("workload")])
def test_a_rank_that_is_waited_for_in_vain_is_to_blame(where: str, tmp_path: Path) -> None:
    """It hangs at its start, and its threads run: they end it once its sibling has given up, which is spare."""
    (once := tmp_path / "once").touch()
    model = NamedWorkload("tests.agent.hanging:RankHanging", TINY | {"once": str(once), "where": where})
    came = dict[str, WorkerProcess]()

    def follow(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        (entry,) = job.pool.running.values()
        came[entry.incarnation] = entry

    grid: dict[str, Any] = {"pipelines": 1, "stages": 1, "micro_batches": 1, "platform": Platform(ranks_per_worker=2)}
    times, faults = Timeouts(transfer=4.0, group=5.0), Faults(max_restarts=1, restart_delay=0.1)
    job = LocalJob(**grid, iterations=1, workload=model, timeouts=times, faults=faults, on_message=follow).run()
    assert "final" in job.lines[-1]
    first, second = came.values()
    hung = [process.pid for process in (first.process, *first.siblings)].index(int(Path(f"{once}.pid").read_text()))
    assert second.made_of == ((first.incarnation, 1 - hung),), "where its sibling was the next one begins"
    (restart,) = [line["restart"] for line in job.lines if "restart" in line]
    assert golden("ended-a-rank-has-waited", 1 - hung) in restart["reason"]


@pytest.mark.chaos
@pytest.mark.processes
def test_a_console_is_told_which_ranks_are_spare(tmp_path: Path) -> None:
    """Of two hurt workers, one after the other, until they have become one."""
    with console(tmp_path) as server:
        command = (*TWO_RANKS, *GRID, "--iterations", "100000", "--console", server.root, "--kill", "W1_1.1@3:F1")
        job = Launched("train", "--record", str(tmp_path / "run.jsonl"), *command, errors=tmp_path / "errors")
        try:
            job_id = server.job_id()

            def workers() -> dict[str, Any]:
                return {w["name"]: w for w in server.read(f"/jobs/{job_id}/workers")["workers"]}

            until(lambda: workers()["W1_1"]["spare"] == 1, "a spare rank", 120)
            os.kill(workers()["W0_0"]["pid"], signal.SIGKILL)
            until(lambda: sum(w["state"] == "failed" for w in workers().values()) == 2, "a second hurt worker")
            until(
                lambda: [(w["state"] == "failed", w["spare"]) for w in workers().values()].count((False, 0)) == 5,
                "five whole workers",
                120,
            )
            assert all(w["spare"] == 0 for w in workers().values())
        finally:
            job.end()


@pytest.mark.chaos
@pytest.mark.processes
def test_a_checkpoint_knows_no_ranks(reference: Run, tmp_path: Path) -> None:
    """What two ranks have written one can go on from, and two go on to the same bits. Each writes its own part, of an
    optimizer that is shared, too."""
    folder, weights, other = (tmp_path / name for name in ("checkpoints", "weights", "other"))
    options = ("--checkpoint", str(folder), "--checkpoint-every", "3")
    run = two_ranks(tmp_path / "first.jsonl", *options, "--weights", str(weights), "--kill", "W0_1.1@1:F1")
    assert run.status == 0 and run.final == reference.final, run.errors
    shared = two_ranks(tmp_path / "shared.jsonl", *options, "--checkpoint", str(other), "--optimizer-sharding", "zero1")
    assert shared.status == 0, shared.errors
    assert checkpoint_bits(folder) == checkpoint_bits(other)
    shutil.rmtree(folder / "iteration-0000000006")
    again = two_ranks(tmp_path / "again.jsonl", *options, "--resume", "newest", "--weights", str(tmp_path / "again"))
    assert again.status == 0 and again.final == reference.final, again.errors
    for file in weights.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    shutil.rmtree(folder / "iteration-0000000006")
    alone = two_ranks(tmp_path / "alone.jsonl", *options, "--resume", "newest", "--ranks-per-worker", "1")
    assert alone.status == 0, alone.errors
    ours, theirs = (float.fromhex(r.losses[-1]) for r in (alone, reference))
    assert ours == pytest.approx(theirs, rel=1e-5)  # the sums of a product are cut elsewhere


# -- without processes ------------------------------------------------------------------------


def _options(**platform: Any) -> TrainingOptions:
    group: type[OptionGroup] = TrainingOptions.__dataclass_fields__["platform"].default_factory  # type: ignore[assignment]
    return TrainingOptions(job=JOB, platform=group(**platform))


def test_a_model_that_can_not_be_split_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        check_workload(Gpt(width=32, heads=2, sequence=16), _options(ranks_per_worker=2))
    assert refused.value.field == "platform.ranks_per_worker"


def test_heads_that_ranks_can_not_share_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        parts_of_a_rank(tensor_parallel.Gpt(width=32, heads=2, sequence=16), 2, (3,), 0)
    assert refused.value.field == "parallelize"


def test_a_function_that_can_not_split_is_named_as_it_was_given() -> None:
    """Also by a launcher, which asks again."""
    model = Model(layers=[nn.Linear(2, 2)], loss=max, parallelize=max)
    with refuses("model.parallelize"):
        parts_of_a_rank(CallableWorkload(model, Data(own_jobs.data), torch.optim.SGD, None, 0), 1, (2,), 0)


class _Pruned(tensor_parallel.Gpt):
    """gradients: False: without them, as code that makes a model for inference does."""

    def __init__(self, gradients: bool) -> None:
        super().__init__(width=32, heads=2, sequence=16)
        self._gradients = gradients

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        module = super().build_layer(layer, layers, seed)
        linear = next(part for part in module.modules() if isinstance(part, nn.Linear))
        with torch.set_grad_enabled(self._gradients):
            prune.random_unstructured(linear, "weight", 0.5)  # type: ignore[no-untyped-call]
        return module


@pytest.mark.parametrize("gradients", [True, False])
def test_a_layer_that_computes_its_weights_from_others_is_refused(gradients: bool) -> None:
    """A pruned one gave an error of torch's about copies."""
    with pytest.raises(InputError) as refused:
        parts_of_a_rank(_Pruned(gradients), 2, (2,), 0)
    assert refused.value.field == "layers"


def test_a_kill_names_a_rank() -> None:
    kill = Kill.parse("W1_1.1@2:F1", JOB, ranks=2)
    assert (kill.worker, kill.rank, kill.iteration, kill.kind) == (Worker(1, 1), 1, 2, "F")
    assert Kill.parse("W1_1@2:F1", JOB).rank == 0
    for text, ranks in (("W1_1.2@2:F1", 2), ("W1_1.0@2:F1", 1), ("W1_1.@2:F1", 2), ("W1_1.-1@2:F1", 2)):
        with pytest.raises(InputError) as refused:
            Kill.parse(text, JOB, ranks=ranks)
        assert refused.value.field == "faults.kill"


def test_a_worker_says_what_all_its_ranks_have_said() -> None:
    merged = MergedMessages(3)
    said = [{"kind": "committed", "generation": 1, "iteration": 4, "at": at, "skipped": [at]} for at in (5, 9, 7)]
    assert merged.take(1, said[1]) is None
    assert merged.take(0, said[0]) is None
    assert merged.take(2, said[2]) == {**said[0], "at": 9, "skipped": [5, 7, 9]}


def test_the_rank_that_hangs_is_what_its_worker_is_at() -> None:
    """Though rank 0 has left the iteration by then, and waits."""

    def alive(kind: str, seconds: float, limit: float | None, op_limit: float) -> dict[str, Any]:
        current = {"kind": kind, "index": None, "seconds": seconds, "limit": limit}
        return {"kind": "alive", "current": current, "op_limit": op_limit, "at": 1}

    for said in (
        [alive("", 40.0, None, 10.0), alive("F", 30.0, 60.0, 60.0), alive("O", 25.0, 20.0, 20.0)],
        [alive("waiting", 40.0, None, 60.0), alive("F", 15.0, 60.0, 20.0), alive("O", 10.0, 20.0, 10.0)],
        [alive("O", 19.0, 20.0, 20.0), alive("", 0.0, None, 20.0), alive("I", 50.0, 60.0, 60.0)],
    ):
        merged, told = MergedMessages(3), None
        for rank, message in enumerate(said):
            told = merged.take(rank, message)
        assert told is not None and told["current"]["kind"] == "O" and told["op_limit"] == 60.0
    merged = MergedMessages(2)
    merged.take(0, at_rest := alive("", 40.0, None, 10.0))
    assert merged.take(1, alive("waiting", 50.0, None, 10.0)) == at_rest


def test_what_one_rank_can_not_finish_the_worker_has_not_done() -> None:
    """It is done again in the next generation, and said then."""
    merged = MergedMessages(2)
    assert merged.take(0, {"kind": "committed", "generation": 1, "iteration": 4, "at": 1}) is None
    for rank in range(2):
        adopted = merged.take(rank, {"kind": "adopted", "generation": 2, "iteration": 4 + rank, "at": 2})
    assert adopted is not None
    assert merged.take(1, {"kind": "committed", "generation": 1, "iteration": 4, "at": 3}) is None
    for rank in range(2):
        again = merged.take(rank, {"kind": "committed", "generation": 2, "iteration": 4, "at": 4})
    assert again is not None


def test_a_rank_s_answer_to_one_pause_is_no_answer_to_the_next() -> None:
    """Within moments a job is paused, resumed and paused, and one rank hears all of it before another. The worker stops
    after the iteration that its furthest rank is in: else this rank would wait in the next one for the others."""
    merged = MergedMessages(2)
    held = [{"kind": "held", "pause": pause, "iteration": 4, "at": 1} for pause in (1, 2)]
    assert merged.take(0, held[0]) is None and merged.take(0, held[1]) is None
    assert merged.take(1, held[0]) == held[0]
    assert merged.take(1, {**held[1], "iteration": 5}) == {**held[1], "iteration": 5}


def test_ranks_of_which_only_some_have_put_their_step_right_are_not_compared() -> None:
    """Else a worker's parameters before a step is overturned, and after it in one rank, would be said to differ from
    its peer's: a job would end for it."""
    record = RunRecord(1, 0)
    for worker, settled in ((Worker(0, 0), (False, False)), (Worker(1, 0), (False, True))):
        merged, told = MergedMessages(2), None
        for rank, known in enumerate(settled):
            place = {"kind": "parameters", "generation": 1, "iteration": 1, "at": 0}
            told = merged.take(rank, place | {"settled": known, "sha256": ("b" if known else "a") * 64})
        assert told is not None
        record.compared(worker, 1, 1, told["settled"], told["sha256"])
    with pytest.raises(DivergedError):
        record.compared(Worker(1, 0), 1, 1, False, "c" * 64)


def test_a_worker_names_the_processes_of_all_its_ranks() -> None:
    merged = MergedMessages(3)
    told = [{"kind": "ready", "host": "a", "pids": [pid], "at": pid} for pid in (7, 9, 8)]
    assert merged.take(2, told[2]) is None and merged.take(0, told[0]) is None
    ready = merged.take(1, told[1])
    assert ready is not None and ready["pids"] == [7, 9, 8]


def test_bad_news_of_a_rank_is_the_worker_s_at_once_and_only_once() -> None:
    merged = MergedMessages(2)
    broken = {"kind": "broken", "generation": 3, "peer": "W0_1", "at": 1}
    assert merged.take(1, broken) == broken
    assert merged.take(0, broken) is None
    assert merged.take(0, {**broken, "generation": 4}) is not None


def test_a_setting_that_any_rank_has_changed_is_named_once() -> None:
    merged = MergedMessages(2)
    changed = {"kind": "changed", "setting": "torch.set_grad_enabled", "text": "...", "at": 1}
    assert merged.take(1, changed) == changed
    for rank in range(2):
        adopted = merged.take(rank, {"kind": "adopted", "generation": 2, "iteration": 4, "at": 2})
    assert adopted is not None
    assert merged.take(0, changed) is None
    assert merged.take(0, {**changed, "setting": "torch.set_num_threads"}) is not None


def test_hashes_of_all_ranks_make_the_worker_s() -> None:
    def told(*hashes: str) -> Any:
        merged, out = MergedMessages(len(hashes)), None
        for rank, sha256 in enumerate(hashes):
            out = merged.take(rank, {"kind": "done", "generation": 1, "sha256": sha256, "at": rank})
        assert out is not None
        return out["sha256"]

    assert told("a", "b") == told("a", "b") != told("b", "a")
    one, two, three, four = (letter * 64 for letter in "abcd")  # of two layers, of two ranks each
    assert told(one + two, three + four) == told(one, three) + told(two, four)
    assert told("a", "") == ""  # one that has not all of its state has nothing to compare


@given(st.lists(st.sampled_from([FENCED, ORPHANED, GAVE_UP, 0, 1, -9, None]), min_size=1, max_size=8), st.booleans())
def test_ranks_that_ended_for_another_s_sake_are_spare(codes: list[int | None], silent: bool) -> None:
    spare = spare_of(codes, silent=silent)
    died = {rank for rank, code in enumerate(codes) if code not in (FENCED, ORPHANED, GAVE_UP, None)}
    late = {rank for rank, code in enumerate(codes) if code is None}
    at_fault = died | late if silent or not died else died
    if GAVE_UP in codes and not (at_fault if silent else died):
        at_fault = {rank for rank, code in enumerate(codes) if code != GAVE_UP}  # one of them was waited for in vain
    expected = set(range(len(codes))) - at_fault if at_fault else set()
    assert set(spare) == expected, "where nobody was at fault, nobody is known to be fit"


@given(
    st.lists(st.one_of(st.integers(0, 2), st.sampled_from(["take", "take and put back", "lose node 1"])), max_size=40)
)
def test_a_spare_rank_is_in_one_worker_at_most(history: list[int | str]) -> None:
    """Numbers: of which node one more is spare."""
    books, came, used, lost = SpareRanks(), list[tuple[int, SpareRank]](), list[Spares](), 0
    for hours, step in enumerate(history):
        before, now = books.all(), 3600.0 * hours
        if isinstance(step, int):
            came.append((step, SpareRank((f"i{len(came)}", 0), len(came))))
            books.add(step, [came[-1][1]])
        elif step == "lose node 1":
            lost += len(books.on(1))
            books.keep({0, 2})
        elif (spares := books.take(2, now)) is None:
            assert all(len(books.on(node)) < 2 for node in range(3)), "no rank idles that could work"
        elif step == "take":
            assert [(spares.node, one) for one in spares.left] == [x for x in before if x[0] == spares.node][:2]
            used.append(spares)
        else:
            books.put_back(spares, now)
            assert sorted(books.all()) == sorted(before) and books.on(spares.node) == tuple(
                one for node, one in before if node == spares.node
            )
    busy = [(spares.node, one) for spares in used for one in spares.left]
    assert len({*busy, *books.all()}) == len(busy) + len(books.all()) == len(came) - lost


@dataclass(frozen=True)
class Told:
    """What a rank is told here."""

    ranks: int = 2
    slot: int = -1
    rank: int = 0
    meeting: str = ""


def say_slots(told: Told, pipe: Connection, siblings: Sequence[Connection] = ()) -> None:
    """A rank, which ends for another's sake when it gets SIGTERM. Rank 0 says the slots of all."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pipe.send_bytes(json.dumps([told.slot, *(json.loads(other.recv_bytes())[0] for other in siblings)]).encode())
    signal.sigwait({signal.SIGTERM})
    os._exit(ORPHANED)


@pytest.mark.processes
def test_spare_ranks_make_a_worker_where_they_ran_however_often_something_died_there() -> None:
    """Elsewhere there may be no GPU."""
    pool = ProcessPool(say_slots, [])

    def start(number: int, spares: Spares | None = None) -> WorkerProcess:
        entry = pool.start(Worker(number, 0), lambda _: Told(), 0.0, spares)
        assert json.loads(entry.pipe.recv_bytes()) == list(entry.slots)
        return entry

    def lose(entry: WorkerProcess, rank: int) -> None:
        ranks = [entry.process, *entry.siblings]
        ranks.pop(rank).kill()
        os.kill(ranks[0].pid or 0, signal.SIGTERM)
        while not entry.has_ended(wait(entry.sentinels, 0.02)):
            pass
        pool.forget(entry)
        pool.spare(entry)

    try:
        one, other = start(0), start(1)
        lose(one, 1)
        one = start(0)
        assert one.slots == (0, 1) and not pool.spares.all(), "it is whole again"
        lose(one, 0)
        assert pool.take_spares(2) is None
        lose(other, 0)
        spares = pool.take_spares(2)
        assert spares is not None and start(0, spares).slots == (1, 3)
        other = start(1)
        assert other.slots == (0, 2)
        lose(pool.running[Worker(0, 0)], 0)
        pool.spares.keep(())  # as if it had left none
        lose(other, 0)
        one = start(0)
        assert one.slots == (0, 2) and not pool.spares.all(), "as a lead on another node books it, which knows no slots"
        lose(one, 0)
        other = start(1, pool.spares.take_named(0, [("unknown", 0)]))
        assert other.slots == (0, 1), "where a rank is spare the lead begins another one, once it knows"
    finally:
        pool.kill_all()


def live_with_rank_0(told: Told, pipe: Connection, siblings: Sequence[Connection] = ()) -> None:
    """A rank. Rank 0 hangs, and what it has open stays so while its child lives, whose number it says: as in a large
    process, whose memory is given back first. The other one ends once it hears that rank 0 is gone."""
    if siblings:
        if child := os.fork():
            pipe.send_bytes(str(child).encode())
    else:
        with contextlib.suppress(EOFError):
            pipe.recv_bytes()
        os._exit(ORPHANED)
    time.sleep(600)


@pytest.mark.processes
def test_a_rank_that_hears_late_of_the_end_of_rank_0_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_SECONDS", 0.0)
    monkeypatch.setattr(processes, "JOIN_SECONDS", 0.0)
    pool = ProcessPool(live_with_rank_0, [])
    entry = pool.start(Worker(0, 0), lambda _: Told(), 0.0)
    child, ends, well = int(entry.pipe.recv_bytes()), entry.process.ends, entry.siblings[0].sentinel
    assert ends is not None

    def over() -> bool:  # its sentinel is not asked, which would say here that rank 0 is gone
        for _ in entry.messages():
            pass
        return entry.has_ended(wait([ends, well], 0.02))

    try:
        pool.fence(entry, "was silent", silent=True)
        while entry.ended_at is None:
            assert not over()
        assert not any(over() for _ in range(20))
        monkeypatch.setattr(processes, "JOIN_SECONDS", 60.0)
        os.kill(child, signal.SIGKILL)
        until(over, "both ranks to be gone", 60)
        assert entry.spare_ranks == (1,)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        pool.kill_all()
