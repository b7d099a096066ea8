"""A checkpoint exists wholly or not at all, and what is read is what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from openrecycle.agent import checkpoints as checkpoint_files
from openrecycle.agent.checkpoints import (
    Checkpointer,
    CheckpointError,
    Identity,
    Origin,
    claim,
    find,
    go_back,
    load_layers,
    prepare,
    set_aside_later,
    whole_checkpoints,
    write_share,
)
from openrecycle.agent.config.options import Checkpoints, TrainingOptions
from openrecycle.agent.models.layers import LayerStack
from openrecycle.agent.models.state import Share, Writer, pack
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import SKIP
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job
from tests.conftest import refuses
from tests.golden import golden

JOB = Identity("tests:job", layers=2, stages=2, pipelines=2, micro_batches=3, seed=7)


def _stage(seed: int, steps: int = 0, layer: int = 0) -> StageOptimizer:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1).to(torch.bfloat16))
    module = LayerStack({layer: inner})
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.01), foreach=False)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    stage = StageOptimizer(module, optimizer, GradientSum(module.parameters(), terms=1), scheduler)
    for _ in range(steps):
        for parameter in module.parameters():
            stage.gradients.add(parameter, torch.randn(parameter.shape))
        stage.step()
    return stage


def _whole(stage: StageOptimizer) -> Share:
    """Of a stage that has one worker."""
    return stage.share(Writer())


def _write(folder: Path, iteration: int, *, keep: int = 9, attempt: int = 1) -> list[StageOptimizer]:
    stages = [_stage(10 * iteration + s, iteration, s) for s in range(2)]
    whole = [write_share(folder, _whole(s), i, 1, JOB, attempt, keep) for i, s in enumerate(stages)]
    assert whole == [False, True]
    return stages


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    written = _write(tmp_path, 3)
    checkpoint = find(tmp_path)
    assert (checkpoint.iteration, checkpoint.identity) == (3, JOB)
    for directory in (tmp_path, checkpoint.path):
        for i, stage in enumerate(written):
            taken = _stage(99, layer=i)
            taken.load_state(load_layers(directory, range(i, i + 1)))
            # A header has a checksum of everything.
            assert pack(taken.state())[0] == pack(stage.state())[0]
            assert taken.committed == 3


def test_a_checkpoint_is_not_there_before_its_last_part(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    write_share(tmp_path, _whole(_stage(1, 2)), 0, 1, JOB, 1, 9)
    assert [c.iteration for c in whole_checkpoints(tmp_path)] == [1]
    # Parts of different attempts don't add up.
    write_share(tmp_path, _whole(_stage(2, 2, 1)), 1, 1, JOB, 2, 9)
    assert find(tmp_path).iteration == 1
    _write(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iteration-0000000001", "iteration-0000000003"]


@pytest.mark.parametrize("keep", [1, 9])
def test_one_that_is_finished_while_an_older_one_is_read_is_the_newest(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a worker that still wrote when others of the job died. With keep=1 the older one goes with it."""
    _write(tmp_path, 1)
    write_share(tmp_path, _whole(_stage(1, 3)), 0, 1, JOB, 1, keep)
    verify, read = checkpoint_files.Checkpoint.verify, list[int]()

    def slow(checkpoint: checkpoint_files.Checkpoint) -> None:
        read.append(checkpoint.iteration)
        if len(read) == 1:
            assert write_share(tmp_path, _whole(_stage(2, 3, 1)), 1, 1, JOB, 1, keep)
        verify(checkpoint)

    monkeypatch.setattr(checkpoint_files.Checkpoint, "verify", slow)
    assert find(tmp_path, "newest-intact").iteration == 3 and read == [1, 3]


@pytest.mark.parametrize("keep", [1, 9])
def test_a_job_that_goes_back_leaves_one_that_took_the_place_of_the_one_it_found(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living worker finishes a newer one after the older one was read. With keep=1 the older one goes with it."""
    _write(tmp_path, 1)
    write_share(tmp_path, _whole(_stage(1, 3)), 0, 1, JOB, 1, keep)
    looked = list[int]()

    def overtaken(folder: Path, which: str = "newest") -> checkpoint_files.Checkpoint:
        found = find(folder, which)
        looked.append(found.iteration)
        if len(looked) == 1:
            assert write_share(tmp_path, _whole(_stage(2, 3, 1)), 1, 1, JOB, 1, keep)
        return found

    monkeypatch.setattr(checkpoint_files, "find", overtaken)
    found = go_back(tmp_path)
    assert found.path.is_dir() and whole_checkpoints(tmp_path) == [found]
    assert looked == ([1, 3] if keep == 1 else [1])


def test_a_worker_that_makes_room_leaves_the_one_that_a_job_goes_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one, for which it makes room, is set aside at this moment."""
    _write(tmp_path, 1)
    listed = list[int]()

    def overtaken(folder: Path) -> list[checkpoint_files.Checkpoint]:
        found = whole_checkpoints(folder)
        listed.append(len(found))
        if len(listed) == 1:
            assert len(set_aside_later(folder, 1)) == 1
        return found

    write_share(tmp_path, _whole(_stage(1, 3)), 0, 1, JOB, 1, 1)
    monkeypatch.setattr(checkpoint_files, "whole_checkpoints", overtaken)
    assert write_share(tmp_path, _whole(_stage(2, 3, 1)), 1, 1, JOB, 1, 1)
    assert listed[0] == 2 and [c.iteration for c in whole_checkpoints(tmp_path)] == [1]
    assert not list(tmp_path.glob(".removed-*"))


def test_a_job_that_goes_back_leaves_none_that_is_later_where_a_worker_puts_the_older_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker makes room, sees that the newer one is gone and puts the older one back, while the launcher sees that
    the older one is gone and puts the newer one back: then both are there."""
    _write(tmp_path, 1)
    looked, gone, is_there = list[int](), [False], checkpoint_files.is_there

    def overtaken(folder: Path, which: str = "newest") -> checkpoint_files.Checkpoint:
        found = find(folder, which)
        looked.append(found.iteration)
        if len(looked) == 1:
            _write(tmp_path, 3)
        return found

    monkeypatch.setattr(checkpoint_files, "find", overtaken)
    monkeypatch.setattr(checkpoint_files, "is_there", lambda *asked: gone.pop() if gone else is_there(*asked))
    found = go_back(tmp_path)
    assert looked == [1, 3] and not gone
    assert found == whole_checkpoints(tmp_path)[0]


def test_later_ones_of_which_a_worker_removes_one_are_not_all_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making room for the newest, the worker also removes the one that the job goes back to."""
    for iteration in (1, 2, 3):
        _write(tmp_path, iteration)

    def listed(folder: Path) -> list[checkpoint_files.Checkpoint]:
        found = whole_checkpoints(folder)
        for checkpoint in found[1:]:
            shutil.rmtree(checkpoint.path)
        return found

    monkeypatch.setattr(checkpoint_files, "whole_checkpoints", listed)
    assert not set_aside_later(tmp_path, 1)
    assert [c.iteration for c in whole_checkpoints(tmp_path)] == [3]


def test_one_that_makes_room_while_it_is_looked_for_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, 1)
    opened = checkpoint_files.Checkpoint.open

    def slow(path: Path) -> checkpoint_files.Checkpoint:
        if path.name.endswith("1") and path.exists():
            _write(tmp_path, 3, keep=1)
        return opened(path)

    monkeypatch.setattr(checkpoint_files.Checkpoint, "open", slow)
    assert [c.iteration for c in whole_checkpoints(tmp_path)] == [3]


def test_parts_of_checkpoints_that_never_became_whole_make_room(tmp_path: Path) -> None:
    """The other stage's disk is full. The newest of those before may be made whole yet, by a stage that is slower."""

    def parts() -> list[tuple[str, str]]:
        return sorted((p.parent.name, p.name) for p in tmp_path.glob(".partial-*/stage-*"))

    for iteration in (1, 2, 3):
        write_share(tmp_path, _whole(_stage(1, iteration)), 0, 1, JOB, 1, 9)
    write_share(tmp_path, _whole(_stage(1, 3)), 0, 1, JOB, 2, 9)  # after a death
    assert parts() == [(f".partial-{i:010d}-{attempt}", "stage-0") for i, attempt in ((2, 1), (3, 1), (3, 2))]
    write_share(tmp_path, _whole(_stage(2, 2, 1)), 1, 1, JOB, 1, 9)
    assert [c.iteration for c in whole_checkpoints(tmp_path)] == [2], "the slower stage came"
    for iteration in (4, 5):
        write_share(tmp_path, _whole(_stage(1, iteration)), 0, 1, JOB, 2, 9)
    assert parts() == [(f".partial-{i:010d}-2", "stage-0") for i in (4, 5)]


def test_parts_that_another_writer_removes_meanwhile_leave_no_checkpoint_out(tmp_path: Path) -> None:
    for iteration in (2, 3):
        write_share(tmp_path, _whole(_stage(1, iteration)), 0, 1, JOB, 1, 9)
    there = [tmp_path / f".partial-{2:010d}-1"]

    def other_writer(event: str, arguments: tuple[object, ...]) -> None:
        if there and event == "os.scandir" and str(arguments[0]).startswith(f"{there[0]}/"):
            shutil.rmtree(there.pop())

    sys.addaudithook(other_writer)  # which stays, and has nothing more to do
    _write(tmp_path, 4)
    assert not there and [c.iteration for c in whole_checkpoints(tmp_path)] == [4]


def test_all_writers_at_once_make_one_checkpoint(tmp_path: Path) -> None:
    identity = Identity("tests:job", 8, 8, 1, 1, 0)
    states = [_whole(_stage(s, 2, s)) for s in range(8)]
    whole: list[bool] = []
    threads = [
        threading.Thread(target=lambda i=i: whole.append(write_share(tmp_path, states[i], i, 1, identity, 1, 3)))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(whole) == [False] * 7 + [True]
    assert len(find(tmp_path).shares) == 8


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        _write(tmp_path, iteration, keep=2)
    assert [c.iteration for c in whole_checkpoints(tmp_path)] == [4, 3]
    # Written again, as after a death that undid the step after it.
    _write(tmp_path, 4, keep=2, attempt=2)
    assert [c.iteration for c in whole_checkpoints(tmp_path)] == [4, 3]
    assert len(list(tmp_path.iterdir())) == 2


def _files(folder: Path) -> Iterator[Path]:
    return (f for f in sorted((folder / "iteration-0000000002").rglob("*")) if f.is_file() and f.name != "share.json")


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_a_damaged_file_is_refused_by_name(which: int, damage: str, tmp_path: Path) -> None:
    _write(tmp_path, 1)
    _write(tmp_path, 2)
    files = [f for f in _files(tmp_path) if f.parent.name == "share-0"]
    assert len(files) == 6
    file = files[which]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data if damage == "bit" else data[:-1])
    if damage == "gone":
        file.unlink()
    with pytest.raises(CheckpointError, match=file.name + ".*newest-intact"):
        find(tmp_path)
    assert find(tmp_path, "newest-intact").iteration == 1
    assert find(tmp_path, "1").iteration == 1
    with pytest.raises(CheckpointError, match=file.name):
        find(tmp_path, "iteration-0000000002")
    with pytest.raises(CheckpointError, match=file.name):
        load_layers(tmp_path, range(stage := int(file.parents[1].name[-1]), stage + 1))


@pytest.mark.parametrize("file", ["manifest.json", "stage-0/share-0/model.safetensors"])
def test_a_file_that_can_not_be_read_now_is_not_taken_for_damaged(file: str, tmp_path: Path) -> None:
    """Or for absent: the job would go on from an older one, or begin anew, when a disk answers late."""
    _write(tmp_path, 2)
    _write(tmp_path, 3)
    unreadable = find(tmp_path).path / file
    kept = unreadable.with_suffix(".kept")
    unreadable.rename(kept)
    unreadable.symlink_to("n" * 256)  # opening it is an error of the system, as an I/O error is: no name is as long
    with pytest.raises(OSError, match=unreadable.name):
        find(tmp_path, "newest-intact")
    for resume in ("if-any", "newest-intact", "newest"):
        with pytest.raises(InputError, match=r"checkpoints\.directory"):
            prepare(Checkpoints(directory=tmp_path, resume=resume), JOB, 9, print)
    unreadable.unlink()
    kept.rename(unreadable)
    assert find(tmp_path, "newest-intact").iteration == 3


def test_what_is_no_checkpoint_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: "):
        find(tmp_path / "nowhere")
    _write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r" 5; there are 1$"):
        find(tmp_path, "5")
    with pytest.raises(CheckpointError, match="has layers 0 to 1"):
        load_layers(tmp_path, range(2, 3))
    manifest = tmp_path / "iteration-0000000001" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 6}))
    with pytest.raises(CheckpointError, match=" 6, expected "):
        find(tmp_path)


@pytest.mark.parametrize("manifest", ["junk", '{"format": "openrecycle-checkpoint", "version": 6}'])
def test_one_that_is_damaged_or_of_another_release_is_not_passed_over_in_silence(manifest: str, tmp_path: Path) -> None:
    """Nor does a job begin anew beside it, and write its own over it."""
    _write(tmp_path, 2)
    (tmp_path / "iteration-0000000002" / "manifest.json").write_text(manifest)
    for resume in (None, "if-any", "newest", "newest-intact"):
        with pytest.raises(InputError, match="iteration-0000000002"):
            prepare(Checkpoints(directory=tmp_path, resume=resume), JOB, 9, print)
    _write(tmp_path, 1)
    said: list[str] = []
    assert prepare(Checkpoints(directory=tmp_path, resume="if-any"), JOB, 9, said.append).resumed_at == 1
    assert any(text.startswith("warning: ") and "iteration-0000000002" in text for text in said)


@pytest.mark.parametrize("resume", ["foo", "-1", "newest_intact", "1.5"])
def test_what_names_no_checkpoint_is_told_what_does(resume: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="newest-intact, if-any"):
        prepare(Checkpoints(directory=tmp_path, resume=resume), JOB, 9, print)


class _Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


def _crafted(folder: Path) -> Path:
    """A checkpoint of the pickled form with checksums that fit, as its reader took it: `dataclass` of a class
    with crafted annotations runs what they say, by names of torch's metadata module alone."""
    module, harm = "torch.distributed.checkpoint.metadata", "__import__('os').mkdir('harm')"
    # Names of fields: `dataclass` writes them into the text of an __init__, which Python then runs.
    fields = (f'x={harm},*y,v=\\"\\"\\"', 'z=1,w=\\"\\"\\"')
    annotations = "".join(f"S\"{field}\"\nS'InitVar'\ns" for field in fields)
    by_annotation = (
        f"c{module}\nStorageMeta\n(N(dS'__module__'\nS'dataclasses'\nsS'__annotations__'\n(d{annotations}stbp0\n0"
        f"c{module}\ndataclass\n(g0\ntR."
    ).encode()
    path = folder / "iteration-0000000005"
    digests = []
    for stage in range(2):
        part = path / f"stage-{stage}"
        part.mkdir(parents=True)
        (part / ".metadata").write_bytes(by_annotation if stage else pickle.dumps(_Harm()))
        (part / "__0_0.distcp").write_bytes(pickle.dumps(_Harm()))
        digests.append({f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in part.iterdir()})
    job = {"workload": "tests:job", "stages": 2, "pipelines": 2, "micro_batches": 3, "seed": 7}
    manifest = {"format": "openrecycle-checkpoint", "version": 1, "iteration": 5, "job": job, "stages": digests}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_a_pickled_checkpoint_is_refused_and_nothing_in_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = _crafted(tmp_path / "checkpoints")
    tries: list[Callable[[], object]] = [
        lambda: find(tmp_path / "checkpoints"),
        lambda: find(tmp_path / "checkpoints", "newest-intact"),
        lambda: load_layers(path, range(1)),
        lambda: load_layers(path, range(1, 2)),
    ]
    for attempt in tries:
        with pytest.raises(CheckpointError, match=path.name):
            attempt()
    # Nor is it written over by a job that begins anew in its folder.
    for resume in (None, "newest"):
        with pytest.raises(InputError, match=path.name):
            prepare(Checkpoints(directory=str(tmp_path / "checkpoints"), resume=resume), JOB, 10, print)
    # Called the new form, it has no files of that form.
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 5}))
    with pytest.raises(CheckpointError, match=path.name):
        find(tmp_path / "checkpoints")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "optimizer.safetensors"])
def test_pickles_in_the_place_of_a_checkpoint_s_files_do_not_run(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write the folder can make the checksums fit: the files themselves must do no harm."""
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "checkpoints", 1)
    path = find(tmp_path / "checkpoints").path
    harm = pickle.dumps(_Harm())
    (path / "stage-0" / "share-0" / file).write_bytes(harm)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["stages"][0][0]["files"][file] = hashlib.sha256(harm).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="share-0: "):
        find(tmp_path / "checkpoints").load(range(1))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_header_that_lies_about_sizes_takes_no_memory(file: str, tmp_path: Path) -> None:
    _write(tmp_path, 1)
    path = find(tmp_path).path
    tensors = path / "stage-0" / "share-0" / file
    data = tensors.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    for lie in ({"shape": [2**40]}, {"shape": [2**40, 2**40]}, {"shape": [-4]}, {"shape": "44"}, {"dtype": "pickle"}):
        text = json.dumps(header | {name: header[name] | lie}).encode()
        tensors.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["stages"][0][0]["files"][file] = hashlib.sha256(tensors.read_bytes()).hexdigest()
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="share-0: "):
            find(tmp_path).load(range(1))


def test_any_reader_of_the_format_finds_parameters_by_their_owners_names(tmp_path: Path) -> None:
    stages = _write(tmp_path, 1)
    for number, stage in enumerate(stages):
        found = load_file(find(tmp_path).path / f"stage-{number}" / "share-0" / "model.safetensors")
        expected = dict(stage.module.state_dict())
        assert sorted(found) == sorted(expected) and f"{number}.0.weight" in found
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_files_that_are_too_long_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, 1)
    checkpoint = find(tmp_path)
    monkeypatch.setattr("openrecycle.agent.checkpoints.MAX_STATE_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"state\.json .* 100 "):
        checkpoint.load(range(1))
    manifest = tmp_path / "iteration-0000000001" / "manifest.json"
    manifest.write_text(manifest.read_text() + " " * 2**26)
    with pytest.raises(CheckpointError, match="iteration-0000000001: "):
        find(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"stages": "two"},
        {"seed": "7"},
        {"seed": True},
        {"stages": 3},
        {"workload": {}},
        {"pipelines": -1},
    ],
)
def test_a_manifest_of_wrong_types_is_no_checkpoint(change: dict[str, object], tmp_path: Path) -> None:
    _write(tmp_path, 1)
    file = tmp_path / "iteration-0000000001" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"job": manifest["job"] | change}))
    with pytest.raises(CheckpointError, match="iteration-0000000001: "):
        find(tmp_path)


# -- beside the training ---------------------------------------------------------------------------


def test_a_copy_is_written_only_when_its_last_step_is_final(tmp_path: Path) -> None:
    said: list[tuple[int, str | None]] = []
    identity = Identity("tests:job", 1, 1, 1, 1, 0)
    wish = Checkpoints(directory=str(tmp_path), every=2)
    keeper = Checkpointer(wish, Origin(identity), 0, 1, lambda *what: said.append(what), lambda: False)
    stage = _stage(0, 1)
    before = stage.parameters_sha256()
    for parameter in stage.module.parameters():
        stage.gradients.add(parameter, torch.ones_like(parameter))
    stage.step(None)
    keeper.iteration_end(stage, 1, Writer())
    # The step before the copy is overturned: the same iteration's end comes again, with other parameters.
    assert stage.parameters_sha256() != before and stage.settle(SKIP)
    keeper.iteration_end(stage, 1, Writer())
    right = stage.parameters_sha256()
    assert right == before
    assert whole_checkpoints(tmp_path) == []
    stage.step()
    keeper.iteration_end(stage, 1, Writer())
    keeper.finish()
    assert said == [(2, None)]
    taken = _stage(9)
    taken.load_state(load_layers(tmp_path, range(1)))
    assert taken.parameters_sha256() == right
    # Not due, not this worker's, and the last one, which is always written.
    stage.step()
    keeper.iteration_end(stage, 1, None)
    stage.step()
    keeper.iteration_end(stage, 1, Writer(), last=True)
    keeper.finish()
    assert said == [(2, None), (5, None)]


def test_a_checkpoint_that_was_about_to_be_replaced_is_found(tmp_path: Path) -> None:
    """By a run that was killed between taking its name away and giving it to the new one."""
    _write(tmp_path, 2)
    (tmp_path / "iteration-0000000002").rename(tmp_path / ".replaced-0000000002-99")
    options = Checkpoints(directory=str(tmp_path), resume="if-any")
    assert prepare(options, JOB, 10, lambda text: None).resumed_at == 2


def test_a_checkpoint_that_could_not_be_put_back_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the newest one that is whole."""
    _write(tmp_path, 1)
    _write(tmp_path, 2)
    replaced = (tmp_path / "iteration-0000000002").rename(tmp_path / ".replaced-0000000002-99")
    (left := tmp_path / ".replaced-0000000001-99").mkdir()
    options = Checkpoints(directory=str(tmp_path), resume="if-any")
    rename = Path.rename

    def out_of_order(path: Path, target: Path) -> Path:
        if path.name.startswith(".replaced"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", out_of_order)
        assert prepare(options, JOB, 10, lambda text: None).resumed_at == 1
    assert replaced.exists() and not left.exists()
    assert prepare(options, JOB, 10, lambda text: None).resumed_at == 2


def test_what_a_job_may_begin_with(tmp_path: Path) -> None:
    said: list[str] = []
    _write(tmp_path, 1)
    _write(tmp_path, 2)
    with refuses("checkpoints.directory"):
        prepare(Checkpoints(directory=str(tmp_path)), JOB, 10, said.append)
    newest = Checkpoints(directory=str(tmp_path), resume="newest")
    with refuses("iterations", 2):
        prepare(newest, JOB, 2, said.append)
    for other, complaint in (
        (Identity("tests:job", 3, 3, 2, 3, 7), "job.stages: got 3, expected '2"),
        (Identity("tests:job", 2, 2, 2, 3, 8), "seed: got 8, expected '7"),
    ):
        with pytest.raises(InputError, match=complaint.replace("'", "")):
            prepare(newest, other, 10, said.append)
    assert said == []
    options = prepare(newest, Identity("tests:job", 2, 2, 3, 2, 7), 10, said.append)
    assert options.resumed_at == 2 and options.resumed is not None
    assert golden("resumes-after-2-iterations", tmp_path) in said[0]
    assert golden("2-x-3-micro-batches-an") in said[1]
    assert prepare(Checkpoints(directory=str(tmp_path), resume="1"), JOB, 10, said.append).resumed_at == 1
    assert [c.iteration for c in whole_checkpoints(tmp_path)] == [1] and set_aside_later(tmp_path, 1) == []


def test_the_last_checkpoint_waits_for_the_one_before_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, patience = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> bool:
        disk.wait()
        return write_share(*arguments)

    monkeypatch.setattr(checkpoint_files, "write_share", slow)
    monkeypatch.setattr(checkpoint_files, "TIMEOUT_SECONDS", 0.0)

    def interrupted() -> bool:
        patience.set()  # it waits
        return False

    said: list[tuple[int, str | None]] = []
    wish = Checkpoints(directory=str(tmp_path), every=2)
    keeper = Checkpointer(
        wish, Origin(Identity("tests:job", 1, 1, 1, 1, 0)), 0, 1, lambda *what: said.append(what), interrupted
    )
    stage = _stage(0, 2)
    keeper.iteration_end(stage, 1, Writer())
    stage.step()
    keeper.iteration_end(stage, 1, Writer(), last=True)
    threading.Thread(target=lambda: patience.wait() and disk.set()).start()
    keeper.finish()
    assert said == [(2, None), (3, None)]


@pytest.mark.parametrize("resume", [None, "if-any"])
def test_what_another_run_left_unfinished_gets_into_no_checkpoint(resume: str | None, tmp_path: Path) -> None:
    write_share(tmp_path, _whole(_stage(1, 2)), 0, 1, JOB, 1, 9)
    (tmp_path / ".partial-0000000002-1" / ".claimed").touch()
    prepare(Checkpoints(directory=str(tmp_path), resume=resume), JOB, 10, print)
    assert not write_share(tmp_path, _whole(_stage(5, 2, 1)), 1, 1, JOB, 1, 9)
    assert not whole_checkpoints(tmp_path)
    assert write_share(tmp_path, _whole(_stage(5, 2)), 0, 1, JOB, 1, 9)


def test_a_manifest_that_finds_no_room_is_left_to_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_share(tmp_path, _whole(_stage(1, 2)), 0, 1, JOB, 1, 9)
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="space"):
        write_share(tmp_path, _whole(_stage(2, 2, 1)), 1, 1, JOB, 1, 9)
    monkeypatch.setattr(Path, "rename", rename)
    assert write_share(tmp_path, _whole(_stage(2, 2, 1)), 1, 1, JOB, 1, 9)


def test_two_jobs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """Shares of both would be put together, and each would go back to what the other has written."""
    options = Checkpoints(directory=tmp_path)
    first = claim(options)
    assert first is not None
    with pytest.raises(InputError) as error:
        claim(options)
    assert golden("a-folder-that-no-other-job", os.getpid(), socket.gethostname()) in str(error.value)
    first.close()
    after = claim(options)
    assert after is not None, "as where the command is repeated"
    after.close()
    assert claim(Checkpoints()) is None


def test_one_command_begins_a_job_and_goes_on_with_it(tmp_path: Path) -> None:
    options, said = Checkpoints(directory=str(tmp_path), resume="if-any"), list[str]()
    assert prepare(options, JOB, 10, said.append).resumed is None and not said
    (tmp_path / "iteration-0000000001").mkdir()  # begun, and never finished
    assert prepare(options, JOB, 10, said.append).resumed is None
    _write(tmp_path, 2)
    assert prepare(options, JOB, 10, said.append).resumed_at == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"every": 0}, "checkpoints.every"),
        ({"keep": True}, "checkpoints.keep"),
        ({"directory": "/no/where"}, "checkpoints.directory"),
        ({"directory": None, "resume": "newest"}, "checkpoints.resume"),
    ],
)
def test_wishes_that_make_no_sense(arguments: dict[str, object], field: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        checkpoints = Checkpoints(**({"directory": str(tmp_path)} | arguments))  # type: ignore[arg-type]
        TrainingOptions(job=Job(2, 2, 2), checkpoints=checkpoints).check()
    assert caught.value.field == field
