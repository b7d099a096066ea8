"""Data that a process beside each worker reads ahead: the same bits, the same exceptions, and nothing left behind."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from openrecycle import Data, Faults, JobFailed, Planning
from openrecycle.agent.models.data import Read, ReadAhead, stream_of
from tests.agent import masked_jobs, own_jobs, streamed_jobs, wrong_jobs
from tests.conftest import at_length
from tests.golden import golden

pytestmark = pytest.mark.processes


class Noted:
    """A data function that writes down who reads what; one place can't be read."""

    def __init__(self, folder: Path, broken: tuple[int, int, int] | None = None) -> None:
        self.folder, self.broken = folder, broken

    def __call__(self, *place: int) -> tuple[torch.Tensor, torch.Tensor]:
        with (self.folder / str(os.getpid())).open("a") as out:
            out.write(f"{place}\n")
        if place == self.broken:
            raise LookupError(f"nothing at {place}")
        return own_jobs.data(*place)


def reads(folder: Path) -> dict[int, list[str]]:
    return {int(file.name): file.read_text().splitlines() for file in folder.iterdir()}


def wait_until(there: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not there():
        assert time.monotonic() < until
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("data", "prefetch"),
    [
        (Data(streamed_jobs.Drawn(), batch_size=4), 4),
        at_length(Data(own_jobs.data), 1),
        at_length(Data(own_jobs.data), 4),
        at_length(Data(streamed_jobs.Drawn(), batch_size=4), 1),
        at_length(Data(own_jobs.Squares(60), batch_size=4), 4),
    ],
)
def test_the_bits_are_the_same_through_a_kill(data: Data, prefetch: int) -> None:
    """Of functions, and of data sets that draw at random."""
    plain = own_jobs.trainer(data=data).fit(iterations=6)
    faults = Faults(kill=["W1_0@2:W1", "W0_1@3:F1"], rejoin=["W1_0@3"])
    ahead = own_jobs.trainer(data=replace(data, prefetch=prefetch), faults=faults).fit(iterations=6)
    assert (ahead.losses, ahead.parameters_sha256) == (plain.losses, plain.parameters_sha256)


class Slow(torch.utils.data.Dataset[Any]):
    """Takes a while to read, without a processor, as what lies elsewhere does."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        x = torch.full((own_jobs.WIDTH,), index / 64)
        return x, x


def test_what_workers_wait_for_data_is_measured() -> None:
    seen: list[float] = []
    own_jobs.trainer(
        data=Data(Slow(), batch_size=4), on_iteration=lambda i, loss, iteration: seen.append(iteration.data_seconds)
    ).fit(iterations=3)
    # Each pipeline reads three micro-batches of four samples, on the first stage and on the last.
    assert len(seen) == 3 and min(seen) >= 3 * 4 * 0.004


@pytest.mark.chaos
def test_dicts_come_over_as_well() -> None:
    plain = masked_jobs.trainer().fit(iterations=4)
    data = Data(masked_jobs.loaded(), shared=masked_jobs.SHARED, prefetch=2)
    ahead = masked_jobs.trainer(data=data, faults=Faults(kill=["W1_1@1:I0"])).fit(iterations=4)
    assert (ahead.losses, ahead.evaluations) == (plain.losses, plain.evaluations)


def test_another_process_reads_what_is_trained_on_in_order(tmp_path: Path) -> None:
    """For W0_0 the inputs of pipeline 0, for W1_1 the targets of pipeline 1, and so on; before that the first
    micro-batch, on which the stage is tried out."""
    data = Data(Noted(tmp_path), prefetch=2)
    own_jobs.trainer(data=data, planning=Planning(technique="adaptive")).fit(iterations=3)
    read = reads(tmp_path)
    readers = {pid: lines for pid, lines in read.items() if any(line.startswith("(2,") for line in lines)}
    assert len(readers) == 4 and os.getpid() not in readers
    wait_until(lambda: not any(map(runs, read.keys() - {os.getpid()})))
    for lines in readers.values():
        tried, *places = [tuple(map(int, line.strip("()").split(","))) for line in lines]
        assert tried == (0, 0, 0)
        pipeline = places[0][1]
        assert places[:9] == [(i, pipeline, m) for i in range(3) for m in range(3)]
        assert len(places) <= 9 + 2, "two ahead at the end"


def test_an_exception_is_the_one_of_the_data(tmp_path: Path) -> None:
    data = Data(Noted(tmp_path, broken=(2, 1, 1)), prefetch=4)
    with pytest.raises(JobFailed, match=r"LookupError: nothing at \(2, 1, 1\)"):
        own_jobs.trainer(data=data).fit(iterations=4)


@pytest.mark.chaos
def test_a_sample_is_named_and_may_be_skipped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "openrecycle")
    options: dict[str, Any] = {"data": Data(wrong_jobs.Damaged(), batch_size=4, prefetch=3)}
    faults = Faults(on_bad_sample="skip")
    result = own_jobs.trainer(**options, faults=faults).fit(iterations=2)
    plain = own_jobs.trainer(data=Data(wrong_jobs.Damaged(), batch_size=4), faults=faults).fit(iterations=2)
    assert result.losses == plain.losses
    assert "(sample 1)" in caplog.text


def read_ahead(pipe: Any, folder: Path) -> None:
    """In a process of its own, as a worker is: a daemon."""
    ahead = ReadAhead(Read(Noted(folder), 0), 2)
    ahead.expect([(0, 0, 0), (0, 0, 1)])
    ahead.take((0, 0, 0))
    pipe.send(ahead.pid)
    time.sleep(600)


def test_it_ends_with_its_worker_however_that_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    worker = context.Process(target=read_ahead, args=(theirs, tmp_path), daemon=True)
    worker.start()
    pid = ours.recv()
    assert worker.pid is not None and runs(pid) and pid != worker.pid
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not runs(pid))


@dataclass
class Unreachable:
    """A part of a micro-batch that lies where the process of this number can't get it."""

    pid: int

    def __reduce__(self) -> Any:
        return _reached, (self.pid,)


def _reached(pid: int) -> Unreachable:
    if os.getpid() == pid:
        raise RuntimeError("unable to open shared memory object </torch_1_2_3> in read-write mode")
    return Unreachable(pid)


def unreachable(pid: int, *place: int) -> Any:
    return own_jobs.data(*place), Unreachable(pid)


class Unsendable(Unreachable):
    """Nobody can give it away."""

    def __reduce__(self) -> Any:
        raise RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)")


def unsendable(*place: int) -> Any:
    return own_jobs.data(*place), Unsendable(0)


@pytest.mark.parametrize("asked", ["between the iterations", golden("in-an-op"), golden("in-an-op-by-its")])
def test_without_shared_memory_the_worker_reads_by_itself(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    ahead = ReadAhead(Read(partial(unreachable, os.getpid()) if "reader" not in asked else unsendable, 0), 2)
    places = [(0, 0, m) for m in range(3)]
    ahead.expect(places)
    if asked == "between the iterations":
        wait_until(lambda: ahead.expect(places) or ahead.pid is None)
    for place in places:
        assert all(map(torch.equal, ahead.take(place)[0], Read(own_jobs.data, 0)(place)))
    assert ahead.pid is None and len(caplog.records) == 1


def test_an_order_that_changes_and_what_nobody_expected() -> None:
    read = Read(own_jobs.data, 5)
    ahead = ReadAhead(read, 3)
    ahead.expect([(0, 0, m) for m in range(6)])
    ahead.take((0, 0, 0))
    ahead.expect([(0, 1, 2), (0, 0, 5), (1, 0, 0)])
    for place in [(0, 1, 2), (7, 1, 1), (0, 0, 5), (0, 0, 1), (1, 0, 0), (1, 0, 0)]:
        assert all(map(torch.equal, ahead.take(place), read(place)))


def test_many_small_ones_do_not_fill_the_pipe_both_ways() -> None:
    ahead, places = ReadAhead(Read(own_jobs.data, 5), 1000), [(0, 0, m) for m in range(600)]
    ahead.expect(places)
    for place in places:
        ahead.take(place)
    assert ahead.pid is not None


def test_where_it_is_gone_the_worker_reads_on_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And from where the other was."""
    stream = stream_of(Data(streamed_jobs.stateful(tmp_path), prefetch=3), streamed_jobs.JOB, 0)
    plain = stream_of(Data(streamed_jobs.stateful()), streamed_jobs.JOB, 0)
    assert stream is not None and plain is not None
    ahead = ReadAhead(Read(stream, 0), 3)
    places = [(i, 0, m) for i in range(4, 8) for m in range(3)]
    ahead.expect(places)
    for place in places[:5]:
        assert all(map(torch.equal, ahead.take(place), plain(*place)))
    pid = ahead.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    before = len(reads(tmp_path)[os.getpid()])
    for place in places[5:]:
        assert all(map(torch.equal, ahead.take(place), plain(*place)))
    assert ahead.pid is None and len(caplog.records) == 1
    assert len(reads(tmp_path)[os.getpid()]) - before <= 3 * 6 * streamed_jobs.BATCH
