"""Data that can only be read in order: the same bits through kills and resumes, and nobody reads more than it must."""

from __future__ import annotations

import itertools
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from openrecycle import Checkpoints, Data, Evaluation, Faults, InputError, Planning
from openrecycle.agent.config.options import OnBadSample
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.launcher.launch import JobFailed
from openrecycle.agent.models.data import MicroBatchSampler, StreamBatches, StreamEndedError, stream_of
from openrecycle.agent.monitoring.liveness import describe_exception
from openrecycle.planner.jobs.job import Job
from tests.agent import own_jobs, streamed_jobs
from tests.conftest import at_length, refuses
from tests.golden import golden

ITERATIONS, RESUMED_AT = 14, 9
WIDE, RESHAPED_AT = Job.uniform(3, 2, 3), 3
STAYS = Planning(relayout="never")
Make = Callable[..., Any]


def batches(data: Any, size: int | None = None, seed: int = 3, **options: Any) -> StreamBatches:
    stream = stream_of(Data(data, batch_size=size, **options), streamed_jobs.JOB, seed)
    assert stream is not None
    return stream


def places(iterations: range) -> list[tuple[int, int, int]]:
    job = streamed_jobs.JOB
    return list(itertools.product(iterations, range(job.pipelines), range(job.micro_batches)))


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one, other))


MAKERS = [streamed_jobs.plain, streamed_jobs.stateful, streamed_jobs.shuffled]
MOST = [
    (streamed_jobs.stateful, 0),
    (streamed_jobs.shuffled, 3),
    (streamed_jobs.plain, 0),
    (streamed_jobs.plain, 3),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_micro_batch_is_a_function_of_its_place(make: Make) -> None:
    """Through several epochs, in another order, with other random numbers around it, and read again."""
    one, other = batches(make()), batches(make())
    expected = {place: one(*place) for place in places(range(12))}
    assert len({tuple(x.flatten().tolist()) for x, _ in expected.values()}) == len(expected)
    for iteration in range(12):
        torch.manual_seed(iteration)
        random.seed(iteration)
        mine = places(range(iteration, iteration + 1))
        for place in random.sample(mine, 4):
            assert same(other(*place), expected[place])
    assert same(other(11, 0, 0), expected[11, 0, 0]) and same(other(10, 1, 2), expected[10, 1, 2])
    assert same(other(2, 1, 0), expected[2, 1, 0])  # no longer kept
    assert same(other(0, 0, 0), expected[0, 0, 0]) and same(other(5, 0, 1), expected[5, 0, 1])


def test_reading_does_not_disturb_other_random_numbers() -> None:
    def numbers() -> tuple[float, float]:
        return random.random(), float(torch.rand(()))

    stream = batches(streamed_jobs.plain())
    random.seed(1)
    torch.manual_seed(1)
    stream(0, 1, 2)
    after = numbers()
    random.seed(1)
    torch.manual_seed(1)
    assert numbers() == after


@pytest.mark.parametrize("make", [streamed_jobs.stateful, streamed_jobs.shuffled])
@pytest.mark.parametrize("iteration", [3, 8, 9])
def test_from_a_position_on_nothing_before_it_is_read(make: Make, iteration: int, tmp_path: Path) -> None:
    """In the first epoch, at the next one's beginning and later; a position is plain data."""
    one, other = batches(make()), batches(make(tmp_path))
    expected = {place: one(*place) for place in places(range(iteration + 6))}
    early = batches(make())
    early(iteration - 1, 1, 2)
    position = early.position(iteration)
    assert position is not None and position.document["item"] == 6 * iteration
    other.go_on(position.document, {"model.x": torch.zeros(1), **position.tensors})
    before = len(reads(tmp_path)[0])  # to check that it is seeded
    for place in places(range(iteration, iteration + 6)):
        assert same(other(*place), expected[place])
    assert len(reads(tmp_path)[0]) - before <= 36 * streamed_jobs.BATCH + 2


@pytest.mark.parametrize(
    "data", [StatefulDataLoader(streamed_jobs.Stateful(24), batch_size=2), streamed_jobs.shuffled(samples=24)]
)
def test_a_position_between_two_epochs(data: Any) -> None:
    one, other = batches(data), batches(data)
    expected = {place: one(*place) for place in places(range(4))}
    position = one.position(2)
    assert position is not None and position.document["item"] == 12
    other.go_on(position.document, position.tensors)
    assert all(same(other(*place), expected[place]) for place in places(range(2, 4)))


def test_the_position_is_that_of_the_iteration_asked_for() -> None:
    stream = batches(streamed_jobs.stateful())
    assert stream.position(5) is None
    for place in places(range(6)):
        stream(*place)
    for iteration in (4, 5, 6):
        found = stream.position(iteration)
        assert found is not None and found.document["item"] == 6 * iteration


def test_an_epoch_ends_with_its_last_whole_micro_batch_and_is_told_to_the_data() -> None:
    samples = streamed_jobs.Plain(samples=15)
    stream = batches(samples, 2)
    seen = torch.cat([stream(*place)[0][:, -1] for place in places(range(4))])
    for epoch, values in enumerate(seen[: 14 * 3].split(14)):
        own = torch.arange(14) / 50 + epoch
        assert bool(((values >= own) & (values <= own + 2)).all())


def reads(folder: Path) -> list[list[int]]:
    """What each process has read."""
    return [[int(line) for line in file.read_text().split()] for file in sorted(folder.iterdir())]


@cache
def undisturbed(make: Make) -> TrainingResult:
    return streamed_jobs.trainer(data=make(), planning=STAYS).fit(iterations=ITERATIONS)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "prefetch"),
    [
        (streamed_jobs.stateful, 3),
        at_length(streamed_jobs.shuffled, 0),
        *(at_length(make, prefetch) for make, prefetch in MOST),
    ],
)
def test_a_kill_and_a_return_do_not_show(make: Make, prefetch: int) -> None:
    """On the first stage and the last, which come back while others train on."""
    faults = Faults(kill=["W1_0@3:R", "W0_1@6:F1"], rejoin=["W1_0@3", "W0_1@7"])
    data = Data(make(), prefetch=prefetch)
    result = streamed_jobs.trainer(data=data, planning=STAYS, faults=faults).fit(iterations=ITERATIONS)
    plain = undisturbed(make)
    assert (result.losses, result.parameters_sha256) == (plain.losses, plain.parameters_sha256)
    assert [recovery.worker for recovery in result.recoveries] == ["W1_0", "W0_1"]


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "prefetch"),
    [
        (streamed_jobs.stateful, 3),
        at_length(streamed_jobs.shuffled, 3),
        at_length(streamed_jobs.stateful, 0),
        *(at_length(make, 3 - prefetch) for make, prefetch in MOST[1:]),
    ],
)
def test_a_job_resumes_to_the_same_bits_and_reads_on_from_where_it_was(
    make: Make, prefetch: int, tmp_path: Path
) -> None:
    saved, seen = tmp_path / "saved", tmp_path / "seen"
    seen.mkdir()
    first = streamed_jobs.trainer(
        data=Data(make(), prefetch=prefetch), planning=STAYS, checkpoints=Checkpoints(directory=saved)
    ).fit(iterations=RESUMED_AT)
    again, data = Checkpoints(directory=saved, resume="newest"), Data(make(seen), prefetch=prefetch)
    second = streamed_jobs.trainer(data=data, planning=STAYS, checkpoints=again).fit(iterations=ITERATIONS)
    plain = undisturbed(make)
    assert first.losses + second.losses == plain.losses
    assert second.parameters_sha256 == plain.parameters_sha256
    # Those that train: one iteration more than what is left, what is read ahead, and a micro-batch to try stages out.
    per_iteration = 6 * streamed_jobs.BATCH
    most = (ITERATIONS - RESUMED_AT + 1) * per_iteration + 2 * streamed_jobs.BATCH * (1 + prefetch)
    longest = max(map(len, reads(seen)))
    if make is streamed_jobs.plain:
        assert longest > most, "without a state all has to be read again"
    else:
        assert longest <= most


class Listed:
    """A data function that goes through a list, an iteration of JOB after the other up to RESHAPED_AT, and then of
    WIDE."""

    def __init__(self, there: list[Any]) -> None:
        self.there = there

    def __call__(self, iteration: int, pipeline: int, micro_batch: int) -> Any:
        return self.there[iteration * 6 + max(0, iteration - RESHAPED_AT) * 3 + pipeline * 3 + micro_batch]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "prefetch"), [("map-style", 3), at_length("map-style", 0), at_length("stream", 0), at_length("stream", 3)]
)
def test_resumed_with_another_batch_no_sample_is_left_out_or_comes_twice(
    kind: str, prefetch: int, tmp_path: Path
) -> None:
    """Also through the death and return of a worker that reads: it learns from its peer what was read before."""
    data = Data(streamed_jobs.stateful(), prefetch=prefetch)
    if kind == "stream":
        stream = batches(streamed_jobs.stateful(), seed=0)  # the trainer's
        there = [stream(*place) for place in places(range(12))]
    else:
        dataset = TensorDataset(*map(torch.stack, zip(*map(streamed_jobs.sample, range(50)), strict=True)))
        data = Data(dataset, batch_size=streamed_jobs.BATCH, prefetch=prefetch)
        orders = [MicroBatchSampler(50, 50, Job.uniform(1, 1, 1))(epoch, 0, 0) for epoch in range(3)]
        # After 36 samples of an epoch of 50 comes the next, where an iteration has 18.
        seen = torch.tensor([order[:36] for order in orders]).reshape(-1, streamed_jobs.BATCH)
        there = [dataset[indices] for indices in seen]
    saved = tmp_path / "saved"
    first: dict[str, Any] = {"data": data, "planning": STAYS}
    streamed_jobs.trainer(**first, checkpoints=Checkpoints(directory=saved)).fit(iterations=RESHAPED_AT)
    shutil.copytree(saved, tmp_path / "copy")
    second = first | {"job": WIDE, "checkpoints": Checkpoints(directory=saved, resume="newest")}
    faults = Faults(kill=["W1_0@4:F1", "W2_1@4:R"], rejoin=["W1_0@5", "W2_1@5"])
    result = streamed_jobs.trainer(**second, faults=faults).fit(iterations=7)
    listed = {"data": Listed(there), "job": WIDE, "planning": STAYS}
    again = Checkpoints(directory=tmp_path / "copy", resume="newest")
    expected = streamed_jobs.trainer(**listed, checkpoints=again).fit(iterations=7)
    assert (result.losses, result.parameters_sha256) == (expected.losses, expected.parameters_sha256)
    assert len(result.recoveries) == 2


@pytest.mark.chaos
@pytest.mark.processes
def test_layers_that_move_do_not_show() -> None:
    result = streamed_jobs.trainer(
        data=streamed_jobs.stateful(),
        planning=Planning(relayout="always", pace="F=2ms,I=2ms,W=2ms", pace_per="layer"),
        faults=Faults(kill=["W0_1@4:W1"]),
    ).fit(iterations=ITERATIONS)
    plain = undisturbed(streamed_jobs.stateful)
    assert (result.losses, result.parameters_sha256) == (plain.losses, plain.parameters_sha256)


# -- what is wrong ---------------------------------------------------------------------------


class Unseeded(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        source = random.SystemRandom()
        while True:
            yield streamed_jobs.sample(source.random())


class Singles(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(3)] * 9)


class Strange(streamed_jobs.Stateful):
    """Keeps what is no plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "more": object()}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data": streamed_jobs.Plain()}, "data"),
        ({"data": Data(streamed_jobs.Plain(), batch_size=2, sampler=max)}, "data.sampler"),
        ({"data": Data(Singles(), batch_size=3)}, "data"),
        ({"data": Data(Unseeded(), batch_size=2)}, "data"),
        ({"data": Data(own_jobs.Endless(), batch_size=2)}, "data"),
        ({"data": Data(streamed_jobs.Plain(samples=1), batch_size=2)}, "data"),
        ({"data": Data(streamed_jobs.Stateful(skips=2), batch_size=2)}, "data"),
        ({"data": Data((n for n in range(9)), batch_size=2)}, "data"),
        ({"evaluate": Evaluation(data=streamed_jobs.plain())}, "evaluate.data"),
        ({"evaluate": Evaluation(data=streamed_jobs.Plain())}, "evaluate.data"),
    ],
)
def test_what_is_wrong_with_a_stream_is_said_before_anything_starts(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        streamed_jobs.trainer(**changes)
    assert error.value.field == field


@pytest.mark.parametrize("prefetch", [-1, True, 1.5])
def test_a_number_to_read_ahead_is_a_whole_one(prefetch: Any) -> None:
    with refuses("data.prefetch", prefetch):
        Data(streamed_jobs.plain(), prefetch=prefetch)


def test_what_is_not_used_of_a_loader_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "openrecycle")
    batches(DataLoader(streamed_jobs.Plain(), batch_size=2, num_workers=1))
    batches(StatefulDataLoader(streamed_jobs.Drawn(), batch_size=2, num_workers=1))
    assert [record.args for record in caplog.records if "num_workers" in record.message] == [(1,), (1,)]


@pytest.mark.parametrize("data", [Strange(), streamed_jobs.Plain()])
def test_without_a_state_of_plain_data_it_is_said_and_there_is_no_position(
    data: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "openrecycle")
    stream = batches(data, 2)
    assert len(caplog.records) == 1
    stream(3, 0, 0)
    assert stream.position(3) is None


@pytest.mark.parametrize("position", [{}, {"item": 6, "epoch": 0, "read": -1, "state": None}, {"item": "6"}])
def test_a_position_that_is_none_is_refused(position: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        batches(streamed_jobs.stateful()).go_on(position, {})


def test_one_item_that_can_not_be_read_is_that_items_alone() -> None:
    """Who asks for others does not hear of it; who asks for it hears of it, by its number, each time."""

    class Holed(streamed_jobs.Drawn):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                raise OSError("no sample 9")
            return super().__getitem__(index)

    stream = batches(StatefulDataLoader(Holed(), batch_size=2))
    stream(1, 0, 0)
    for _ in range(2):
        with pytest.raises(OSError, match="no sample 9") as error:
            stream(0, 1, 1)
        assert "item 4 " in "".join(error.value.__notes__)
    whole = batches(StatefulDataLoader(streamed_jobs.Drawn(), batch_size=2))
    assert same(stream(1, 1, 1), whole(1, 1, 1))
    # Of the epoch's last micro-batch it is the end of nothing but that.
    short = batches(StatefulDataLoader(Holed(10), batch_size=2))
    with pytest.raises(OSError, match="no sample 9"):
        short(0, 1, 1)
    whole = batches(StatefulDataLoader(streamed_jobs.Drawn(10), batch_size=2))
    assert same(short(1, 0, 0), whole(1, 0, 0))
    # A generator ends with what it raises: nothing may be taken for the next epoch.
    ended = batches(streamed_jobs.Plain(broken=9), 2)
    with pytest.raises(OSError, match="no sample 9"):
        ended(0, 1, 1)
    with pytest.raises(StreamEndedError, match=golden("data-got-a-stream-that-ended")) as over:
        ended(1, 0, 0)
    assert "streamed_jobs.py" in describe_exception(over.value), "where it raised, and not where that was noticed"


@pytest.mark.processes
@pytest.mark.parametrize("on_bad_sample", ["skip", at_length("halt")])
def test_a_stream_that_ends_with_an_error_ends_the_job(on_bad_sample: OnBadSample) -> None:
    """Else all later micro-batches were left out, and it would train on nothing."""
    faults = Faults(on_bad_sample=on_bad_sample)
    with pytest.raises(JobFailed, match="OSError: no sample 18") as error:
        streamed_jobs.trainer(data=Data(streamed_jobs.Plain(broken=18), batch_size=2), faults=faults).fit(iterations=4)
    assert "item 9" in str(error.value)
    if on_bad_sample == "skip":
        assert "on_bad_sample" not in str(error.value), "it has been skipped, and the stream goes on no more"


def test_whole_micro_batches_may_come_out_of_the_data_set() -> None:
    loader = DataLoader(streamed_jobs.Plain(), batch_size=None)
    stream = stream_of(Data(loader), Job.uniform(1, 1, 2), 0)
    assert stream is not None
    assert stream(0, 0, 1)[0].shape == (streamed_jobs.WIDTH,)


@pytest.mark.chaos
@pytest.mark.parametrize("make", MAKERS)
def test_a_job_that_begins_anew_reads_from_the_beginning(make: Make) -> None:
    faults = Faults(kill=["W0_0@5:F0", "W1_0@5:F1"], max_restarts=1, restart_delay=0.1)
    result = streamed_jobs.trainer(data=make(), planning=STAYS, faults=faults).fit(iterations=ITERATIONS)
    plain = undisturbed(make)
    assert (result.losses, result.parameters_sha256) == (plain.losses, plain.parameters_sha256)
    assert sorted(recovery.worker for recovery in result.recoveries) == ["W0_0", "W1_0"]
