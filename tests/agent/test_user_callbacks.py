"""What a user's own functions do beside the training: take their time, raise, end it early, and are always heard."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import signal
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from openrecycle import Callback
from openrecycle.agent.config.devices import Mode
from openrecycle.agent.config.options import Checkpoints, Console, Faults, Optimization
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.messages.protocol import Iteration
from tests.agent import own_jobs, wrong_jobs
from tests.agent.consoles import console
from tests.agent.local_jobs import LocalJob, fault_free_losses, uncut
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes
ENDLESS = 100_000
GRID: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}


@cache
def undisturbed(iterations: int) -> TrainingResult:
    return own_jobs.trainer().fit(iterations=iterations)


def same(result: TrainingResult) -> bool:
    """Are its losses those of a job that nothing happens to?"""
    done = len(result.losses)
    return result.losses == undisturbed(-(-done // 20) * 20).losses[:done]


def test_training_goes_on_while_a_callback_takes_its_time(tmp_path: Path) -> None:
    """The first call returns only when iteration 5 is in the record; before `fit` returns all have been made."""
    record, reached, threads = tmp_path / "run.jsonl", threading.Event(), set()
    seen = []

    def on_iteration(iteration: int, loss: float) -> None:
        threads.add(threading.current_thread())
        for _ in range(600 if iteration == 0 else 0):
            if any('"iteration": 5,' in line for line in record.read_text().splitlines()):
                reached.set()
                break
            threading.Event().wait(0.1)
        seen.append((iteration, loss))

    result = own_jobs.trainer(on_iteration=on_iteration, record=record).fit(iterations=8)
    assert reached.is_set()
    assert seen == list(enumerate(result.losses)) and len(seen) == 8
    (thread,) = threads
    assert thread is not threading.main_thread()
    assert [json.loads(line).get("loss") for line in record.read_text().splitlines()] == [
        *(loss.hex() for loss in result.losses),
        None,
    ]


def test_exceptions_are_logged_and_the_rest_of_the_event_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """What a logging service's client raises when it is away; an OSError once vanished without a line."""
    calls: list[str] = []

    def on_iteration(iteration: int, loss: float) -> None:
        calls.append(f"iteration {iteration}")
        raise ConnectionError("the service is away")

    def on_recovery(recovery: Any) -> None:
        calls.append(f"{recovery.worker} died")
        raise OSError("no such page")

    with caplog.at_level(logging.WARNING, "openrecycle"):  # as where nobody has set up any logging
        result = own_jobs.trainer(
            on_iteration=on_iteration, on_recovery=on_recovery, on_error="log", faults=Faults(kill=["W0_1@2:I1"])
        ).fit(iterations=4)
    assert sorted(calls) == sorted(["W0_1 died", *(f"iteration {i}" for i in range(4))])
    assert same(result)
    raised = [r.exc_info[1] for r in caplog.records if r.exc_info]
    assert sorted(map(str, raised)) == ["no such page", *["the service is away"] * 4]
    assert any("W0_1 died: seen after" in r.getMessage() for r in caplog.records)


class Enough(Exception):
    """Raised to stop early."""

    result: TrainingResult


def test_an_exception_ends_the_job_in_order_and_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a common iteration, with weights and a checkpoint of it that a job can go on from."""

    def on_iteration(iteration: int, loss: float) -> None:
        if iteration == 2:
            raise Enough("it is good")

    folders: dict[str, Any] = {
        "weights": tmp_path / "trained",
        "checkpoints": Checkpoints(directory=tmp_path / "saved"),
    }
    with pytest.raises(Enough, match=golden("it-is-good")) as caught:
        own_jobs.trainer(on_iteration=on_iteration, **folders).fit(iterations=ENDLESS)
    result = caught.value.result
    done = len(result.losses)
    assert 3 <= done < ENDLESS and same(result)
    assert any(r.exc_info and "on_iteration raised Enough" in r.getMessage() for r in caplog.records)
    assert sorted(file.name for file in (tmp_path / "trained").iterdir()) == [
        "layer0.safetensors",
        "layer1.safetensors",
    ]
    own_jobs.build_stage(0, 2).load_state_dict(result.state_dict(0))
    assert [p.name for p in (tmp_path / "saved").glob("[!.]*")] == [f"iteration-{done:010d}"]
    more = own_jobs.trainer(checkpoints=Checkpoints(directory=tmp_path / "saved", resume="newest")).fit(
        iterations=done + 2
    )
    assert result.losses + more.losses == undisturbed(done + 2).losses
    assert more.parameters_sha256 == undisturbed(done + 2).parameters_sha256


def test_the_answer_stop_and_the_method_stop_end_the_job_in_order() -> None:
    seen: list[Iteration] = []

    def on_iteration(iteration: int, loss: float, details: Iteration) -> str | None:
        seen.append(details)
        return "stop" if iteration == 1 else None

    answered = own_jobs.trainer(on_iteration=on_iteration).fit(iterations=ENDLESS)
    assert 2 <= len(answered.losses) < ENDLESS and same(answered)
    assert [(i.iteration, i.loss) for i in seen] == list(enumerate(answered.losses))
    assert all(i.living == 4 and not i.skipped for i in seen)

    third = threading.Event()
    trainer = own_jobs.trainer(on_iteration=lambda iteration, loss: iteration == 3 and third.set())
    threading.Thread(target=lambda: third.wait(100) and trainer.stop(), daemon=True).start()
    asked = trainer.fit(iterations=ENDLESS)
    assert 4 <= len(asked.losses) < ENDLESS and same(asked)
    assert len(trainer.fit(iterations=2).losses) == 2, "it was for the `fit` that ran"


def test_a_death_while_the_job_comes_to_its_early_end() -> None:
    """One dies when all have been told to stop, and another when they have been told that this is the end."""
    killed: list[str] = []

    def on_line(job: LocalJob, line: dict[str, Any]) -> None:
        if line.get("iteration") == 2:
            job.launcher.end_soon()

    def on_message(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        if message["kind"] == "held" and not killed:
            killed.append("W1_1")
            job.signal("W1_1", 9)
        if message["kind"] == "done" and killed == ["W1_1"]:
            killed.append("W1_0")
            job.signal("W1_0", 9)

    job = LocalJob(**GRID, on_line=on_line, on_message=on_message).run()
    assert killed[0] == "W1_1" and 3 <= len(job.losses) < ENDLESS
    assert job.losses == fault_free_losses(len(job.losses), **GRID)
    assert job.lines[-1] == uncut(iterations=len(job.losses), **GRID).lines[-1] and "final" in job.lines[-1]


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_script_that_is_ended_keeps_its_record(number: int, raised: type[BaseException], tmp_path: Path) -> None:
    """And its callbacks hear of it, and no worker is left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # test processes beside each other ignore it
    record, told = tmp_path / "run.jsonl", []

    class Told(Callback):
        def on_iteration(self, iteration: Iteration) -> None:
            if iteration.iteration == 2:
                os.kill(os.getpid(), number)

        def on_exception(self, error: BaseException) -> None:
            told.append(type(error))

    try:
        with pytest.raises(raised) as ended:
            own_jobs.trainer(callbacks=[Told()], record=record).fit(iterations=ENDLESS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [raised]
    assert number != signal.SIGTERM or ended.value.args == (128 + number,)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line][:3] == [0, 1, 2]
    assert not any(process.name.startswith("W") for process in multiprocessing.active_children())


@pytest.mark.parametrize("mode", ["deterministic", at_length("fast")])
def test_a_micro_batch_that_is_not_a_number_is_named(mode: Mode, tmp_path: Path) -> None:
    """The loss alone would look as if nothing had happened."""
    seen: list[tuple[int, tuple[int, ...]]] = []
    result = own_jobs.trainer(
        data=wrong_jobs.not_a_number,
        optimization=Optimization(mode=mode),
        record=tmp_path / "run.jsonl",
        on_iteration=lambda iteration, loss, details: seen.append((iteration, details.skipped)),
    ).fit(iterations=3)
    assert seen == [(0, ()), (1, (5,)), (2, ())], "micro-batch 2 of pipeline 1, of 3 each"
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line.get("skipped") for line in lines if "loss" in line] == [None, [5], None]
    assert all(loss > 0 for loss in result.losses)


def _nothing_in_some(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Nothing in iterations 1 and 4, and not all in 2."""
    inputs, targets = own_jobs.data(iteration, pipeline, micro_batch)
    nothing = iteration in (1, 4) or (iteration, pipeline, micro_batch) == (2, 0, 0)
    return inputs, targets * (math.nan if nothing else 1)


def test_an_iteration_without_any_loss_has_none(tmp_path: Path) -> None:
    """It was said to have a loss of 0, the best of all; and one that lacks some losses, one that was too small. Of the
    last one a console was not told, and showed a job that had ended early."""
    seen: list[tuple[int, float]] = []
    record = tmp_path / "run.jsonl"
    given: dict[str, Any] = {"on_iteration": lambda number, loss: seen.append((number, loss)), "record": record}
    with console(tmp_path) as server:
        given["console"] = Console(url=server.root)
        result = own_jobs.trainer(data=_nothing_in_some, **given).fit(iterations=5)
        job_id = server.job_id()
        assert server.read(f"/jobs/{job_id}")["committed"] == 5
        told = server.read(f"/jobs/{job_id}/iterations")["iterations"]
    assert [row["loss"] for row in told] == [None if math.isnan(loss) else loss for loss in result.losses]
    assert [math.isnan(loss) for loss in result.losses] == [False, True, False, False, True]
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4] and math.isnan(seen[1][1])
    lines = [line for line in map(json.loads, record.read_text().splitlines()) if "loss" in line]
    assert math.isnan(float.fromhex(lines[1]["loss"])) and len(lines[1]["skipped"]) == 6
    assert result.losses[2] > 0.9 * min(result.losses[0], result.losses[3])
