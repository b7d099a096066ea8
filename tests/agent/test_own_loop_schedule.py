"""Loops of one's own that run the plan in force: real processes, a real console, a real SIGKILL."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from openrecycle.agent.examples.own_loop import ITERATIONS, JOB, MICRO_BATCHES, build, load
from openrecycle.agent.own_loops.own_group import GroupLost, Membership
from openrecycle.agent.stages.gradients import GradientSum
from tests.agent.consoles import JobConsole, console, until
from tests.agent.launches import Launched
from tests.agent.scheduled_loop import digest
from tests.conftest import at_length
from tests.golden import golden

WORKERS = [str(worker) for worker in JOB.workers()]
QUICK = ("--heartbeat", "0.2", "--suspect", "1", "--dead", "4")


@functools.cache
def undisturbed() -> tuple[list[str], list[str]]:
    """Losses, and parameters by stage, of the same training in one process, without a plan."""
    models, optimizers = zip(*map(build, range(JOB.stages)), strict=True)
    parameters = [p for model in models for p in model.parameters()]
    losses = []
    for iteration in range(ITERATIONS):
        sums = GradientSum(parameters, terms=MICRO_BATCHES)
        for pipeline in range(JOB.pipelines):
            for micro_batch in range(JOB.micro_batches):
                x, target = load(iteration, pipeline, micro_batch)
                for model in models:
                    x = model(x)
                loss = functional.cross_entropy(x, target) / MICRO_BATCHES
                sums.add_loss(loss)
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    sums.add(p, g)
        sums.write_gradients()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(sums.loss.hex())
    return losses, [digest(model) for model in models]


class Loop:
    """A process of one worker."""

    def __init__(self, server: JobConsole, folder: Path, worker: str, fault: dict[str, Any]) -> None:
        self.stage = int(worker[-1])
        self._out = folder / f"{worker}-{len(list(folder.iterdir()))}.jsonl"
        self._errors = self._out.with_suffix(".txt")
        given = (server.root, "run-1", worker, str(folder / "group"), json.dumps(fault))
        self.process = Launched(*given, module="tests.agent.scheduled_loop", prints=self._out, errors=self._errors)
        self.error = ""

    def end(self) -> int:
        status = self.process.wait(120)
        self.error = self._errors.read_text()
        return status

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._out.read_text().splitlines()]

    def ops(self, iteration: int) -> list[str]:
        (ops,) = (line["ops"] for line in self.said() if line.get("iteration") == iteration)
        return list(ops)

    def check(self, first: int = 0) -> None:
        """It has done each iteration once, and its losses and parameters are those of a training without failures."""
        assert self.end() == 0, self.error
        losses, parameters = undisturbed()
        done = [line for line in self.said() if "done" in line]
        assert [line["done"] for line in done] == list(range(first, ITERATIONS))
        if self.stage == JOB.stages - 1:
            assert [line["loss"] for line in done] == losses[first:]
        assert self.said()[-1]["parameters"] == parameters[self.stage]


@contextmanager
def loops(server: JobConsole, folder: Path, faults: dict[str, dict[str, Any]]) -> Iterator[dict[str, Loop]]:
    running = {worker: Loop(server, folder, worker, faults.get(worker, {})) for worker in WORKERS}
    try:
        yield running
    finally:
        for worker, loop in running.items():
            if loop.process.poll() is None:
                loop.process.kill()
            if not loop.error:
                loop.end()
            print(worker, loop.error)


def test_workers_meet_before_they_form_a_group(tmp_path: Path) -> None:
    store = partial(torch.distributed.FileStore, str(tmp_path / "group.5"), 3)  # type: ignore[attr-defined]
    generation = [5]
    trio = [Membership(5, ("W0_0", "W0_1", "W1_1"), rank, newest=lambda: generation[0]) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(trio[rank].meet, store()) for rank in range(2)]
        assert not wait(waiting, 0.3).done
        trio[2].meet(store())
        assert [met.result(60) for met in waiting] == [None, None]


def test_whoever_waits_for_others_hears_that_the_job_goes_on_without_them(tmp_path: Path) -> None:
    """Not only when a time-out is over."""
    store = torch.distributed.FileStore(str(tmp_path / "group.5"), 2)  # type: ignore[attr-defined]
    generation = [5]
    now = Membership(5, ("W0_0", "W0_1"), 0, newest=lambda: generation[0])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(now.meet, store)
        assert not wait([waiting], 0.2).done
        generation[0] = 6
        with pytest.raises(GroupLost, match="6"):
            waiting.result(60)
    with pytest.raises(GroupLost):
        Membership(7, ("W0_0", "W0_1", "W1_0", "W1_1"), 0, newest=lambda: 7).meet(store, timeout=0)


KILLED = [[7, 3, "after"], *([7, *at] for at in ((0, "before"), ("F", "after"), ("O", "before"), ("O", "after")))]


@pytest.mark.processes
@pytest.mark.parametrize("at", [KILLED[0], *map(at_length, KILLED[1:])], ids=str)
def test_survivors_run_the_adapted_plan_to_the_same_bits(tmp_path: Path, at: list[Any]) -> None:
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, {"W1_0": {"at": at}}) as running:
        assert running.pop("W1_0").end() == -signal.SIGKILL
        for loop in running.values():
            loop.check()
            assert len(forwards(loop.ops(6))) == 3
        adapted = {name: len(forwards(loop.ops(8))) for name, loop in running.items()}
        assert adapted["W0_0"] == 6 and adapted["W0_1"] + adapted["W1_1"] == 6
        assert server.get(f"/jobs/{server.job_id()}").json()["state"] == "finished"


def forwards(ops: list[str]) -> list[str]:
    return [op for op in ops if op.startswith("F")]


@pytest.mark.chaos
@pytest.mark.processes
def test_a_step_that_others_took_is_taken_late(tmp_path: Path) -> None:
    """W1_0 dies in the reduction that ends an iteration, of which W0_1 hears no end: the others step; so must it."""
    faults = {"W1_0": {"at": [7, "O", "after"]}, "W0_1": {"unsure": 7}}
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, faults) as running:
        assert running.pop("W1_0").end() == -signal.SIGKILL
        for loop in running.values():
            loop.check()
        assert running["W0_1"].ops(7) == ["O0.-1"]
        assert len(running["W0_0"].ops(7)) > 1


@pytest.mark.processes
@pytest.mark.parametrize("stays", [{}, {"stays": 2}], ids=["at once", "later"])
def test_the_last_step_that_all_others_took_is_taken_alone(tmp_path: Path, stays: dict[str, Any]) -> None:
    """The job was finished, and the last step of stage 0 lost with the only worker that had reduced it and lived.
    Later: that waits in another generation already for those that are done, and end only now."""
    last = ITERATIONS - 1
    faults = {"W1_0": {"at": [last, "O", "after"]}, "W0_0": {"unsure": last}, "W0_1": stays, "W1_1": stays}
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, faults) as running:
        assert running.pop("W1_0").end() == -signal.SIGKILL
        for loop in running.values():
            loop.check()
        assert running["W0_0"].ops(last) == ["O0.-1"]


@pytest.mark.processes
def test_the_last_step_is_taken_alone_by_the_one_whose_losses_are_shown_too(tmp_path: Path) -> None:
    """Only that worker told the console that the job was done. It waited for ten minutes to hear it."""
    last = ITERATIONS - 1
    faults = {"W1_1": {"at": [last, "O", "after"]}, "W0_1": {"unsure": last}}
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, faults) as running:
        assert running.pop("W1_1").end() == -signal.SIGKILL
        for loop in running.values():
            loop.check()
        assert running["W0_1"].ops(last) == ["O0.-1"]
        assert server.read(f"/jobs/{server.job_id()}")["state"] == "finished"


@pytest.mark.chaos
@pytest.mark.processes
def test_the_last_step_is_not_taken_by_one_that_the_others_went_on_without(tmp_path: Path) -> None:
    """They have done the iteration again."""
    last = ITERATIONS - 1
    faults = {"W0_0": {"unsure": last, "stands": True}}
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, faults) as running:
        out = running.pop("W0_0")
        for loop in running.values():
            loop.check()
        os.kill(out.process.pid, signal.SIGCONT)
        assert out.end() == 1
        assert [line["done"] for line in out.said() if "done" in line] == list(range(last))


@pytest.mark.processes
def test_a_last_step_that_needs_what_the_others_measured_is_not_taken_alone(tmp_path: Path) -> None:
    """It was taken with the measure of the iteration before: gradients were clipped by a norm that was not theirs."""
    last = ITERATIONS - 1
    faults: dict[str, dict[str, Any]] = {worker: {"measures": True} for worker in WORKERS}
    faults["W1_0"]["at"], faults["W0_0"]["unsure"] = [last, "O", "after"], last
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, faults) as running:
        assert running.pop("W1_0").end() == -signal.SIGKILL
        kept = running.pop("W0_0")
        for loop in running.values():
            loop.check()
        assert kept.end() == 1
        assert "finished" in kept.error.splitlines()[-1]
        assert [line["done"] for line in kept.said() if "done" in line] == list(range(last))


@pytest.mark.chaos
@pytest.mark.processes
def test_who_comes_back_at_once_takes_a_late_step_too(tmp_path: Path) -> None:
    """The only peer that could hand over its state was kept from the step that the other stage has taken."""
    faults = {"W1_0": {"at": [7, "O", "after"]}, "W0_0": {"unsure": 7}}
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, faults) as running:
        assert running["W1_0"].end() == -signal.SIGKILL
        running["W1_0"] = Loop(server, tmp_path, "W1_0", {})
        for worker, loop in running.items():
            loop.check(7 if worker == "W1_0" else 0)
        assert running["W0_0"].ops(7) == running["W1_0"].ops(7) == ["O0.-1"] or running["W1_0"].ops(7) == ["O1.-1"]


@pytest.mark.chaos
@pytest.mark.processes
def test_whoever_waits_for_a_worker_that_hangs_is_woken(tmp_path: Path) -> None:
    """Its connections stay open: it is the console that misses it. When it wakes up, it is told that it is out."""
    hangs = {"W1_1": {"at": [7, 3, "before"], "signal": "SIGSTOP"}}
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, hangs) as running:
        silent = running.pop("W1_1")
        for loop in running.values():
            loop.check()
        os.kill(silent.process.pid, signal.SIGCONT)
        assert silent.end() == 1
        assert golden("the-console-goes-on-without") in silent.error.splitlines()[-1]


@pytest.mark.chaos
@pytest.mark.processes
def test_a_worker_that_is_started_again_takes_its_state_from_a_peer(tmp_path: Path) -> None:
    holding = {worker: {"hold": [12, "W1_0"]} for worker in WORKERS} | {"W1_0": {"at": [7, 3, "after"]}}
    with console(tmp_path, *QUICK) as server, loops(server, tmp_path, holding) as running:
        assert running["W1_0"].end() == -signal.SIGKILL
        until(lambda: any(line.get("done") == 7 for line in running["W0_0"].said()), "the others")
        running["W1_0"] = Loop(server, tmp_path, "W1_0", {})
        assert running["W1_0"].end() == 0, running["W1_0"].error
        # The others wait for it before iteration 12 at the latest; it is in the next one that all of them begin after
        # they have heard of it.
        first = next(line["done"] for line in running["W1_0"].said() if "done" in line)
        assert 8 <= first <= 13
        for worker, loop in running.items():
            loop.check(first if worker == "W1_0" else 0)
            assert len(forwards(loop.ops(13))) == 3


@pytest.mark.processes
def test_all_change_plans_before_the_same_iteration_and_wrong_calls_are_named(tmp_path: Path) -> None:
    paths = [(tmp_path / f"{rank}.jsonl", tmp_path / f"{rank}.txt") for rank in range(2)]
    pair = [
        Launched(str(rank), str(tmp_path / "group"), module="tests.agent.agreeing_loop", prints=out, errors=errors)
        for rank, (out, errors) in enumerate(paths)
    ]
    for process, (_, errors) in zip(pair, paths, strict=True):
        assert process.wait(120) == 0, errors.read_text()
    said = [[json.loads(line) for line in out.read_text().splitlines()] for out, _ in paths]
    first, second = ({line["iteration"]: line for line in lines if "iteration" in line} for lines in said)
    generations = {i: first[i]["generation"] for i in first}
    assert generations == {i: line["generation"] for i, line in second.items()}
    # Worker 0 hears of it in iteration 1, and worker 1 in iteration 3, at whose end all know.
    assert generations == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    assert all("".join(sorted(first[i]["kinds"])) == ("BBBFFFO" if i < 4 else "FFFIIIOWWW") for i in first)
    assert all({"timed": ["B", "F", "I", "O", "W"]} in lines for lines in said)
    errors = [{line["wrong"]: (line["error"], line["sentence"]) for line in lines if "wrong" in line} for lines in said]
    assert {name: error for name, (error, _) in errors[0].items()} == {
        "no group": "RuntimeError",
        "iteration": "InputError",
        "twice": "RuntimeError",
        "left": "RuntimeError",
        "other workers": "GroupLost",
        "lost": "RuntimeError",
        "another grid": "InputError",
        "left out": "RuntimeError",
    }
    assert golden("schedule-was-left-at") in errors[0]["left"][1]
    assert golden("schedule-lacks-send") in errors[0]["left out"][1]
    assert errors[1]["left out"][0] == "GroupLost"
