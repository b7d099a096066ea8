"""Checkpoints: a directory per checkpoint, a directory per stage in it, read back bit by bit.

    DIRECTORY/iteration-0000000010/manifest.json
                                   stage-0/part.json state.json model.safetensors optimizer.safetensors
                                   stage-1/...

model.safetensors has parameters and buffers, each as LAYER.NAME; optimizer.safetensors what optimizer and scheduler
keep of tensors, and state.json the rest. Nothing in a checkpoint is pickled, so reading one runs nothing, whoever wrote
it. Older versions (pickled descriptions, no layers, tensors in a form of our own) are refused.

A checkpoint exists wholly or not at all. One living worker per stage writes its part into a hidden
directory, with its checksums last; whoever sees that all parts are there writes the manifest and
renames the directory. Everything is on the disk before the rename.

State is per layer, a file for those of a stage, and knows no pipelines: it can be taken up with other workers
failed, with another number of pipelines, and by stages that are cut elsewhere. The number of layers, the model, the
optimizer's and scheduler's class and the seed must be the same; a job whose iterations hold other micro-batches goes
on training, but not to the same bits.

To read the state of some layers, on any machine and without a running job:
`load_layers(directory, range(first, after)) -> StageState`, where directory is a checkpoint or a folder of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from openrecycle.agent.models.layers import Partition, Span, partition_of, spans
from openrecycle.agent.models.state import (
    StageState,
    StateError,
    joined,
    of_layers,
    opened,
    read_tensors,
    whole_number,
    write_tensors,
)
from openrecycle.planner.jobs.errors import in_a_line
from openrecycle.planner.plans.plan import read_json

FORMAT, VERSION = "openrecycle-checkpoint", 4
# Asked for before a file is read. A state of 100,000 tensors has a description of 20 MB, a job of 16,384
# stages a manifest of 4 MB; nothing that is larger is one.
MAX_MANIFEST_BYTES, MAX_STATE_BYTES = 2**24, 2**28
_STATE, _MODEL, _OPTIMIZER = FILES = "state.json", "model.safetensors", "optimizer.safetensors"
_OF_MODEL = "model."
_NAME = re.compile(r"iteration-([0-9]{10,18})")


class CheckpointError(StateError):
    """A checkpoint is missing, damaged or of another job; the sentence says which and how."""


class OldCheckpointError(CheckpointError):
    """A checkpoint of an older form. It is whole, and must not be taken for missing or written over."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint says about the job that wrote it. layers: of the whole model. recipe: how it trains, by the
    options' names."""

    workload: str
    layers: int
    stages: int
    pipelines: int
    micro_batches: int
    seed: int
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. iteration: how many iterations are in it, so also the next one.

    files: per stage the sha256 of each of its files. partition: layers per stage.
    """

    path: Path
    iteration: int
    identity: Identity
    files: tuple[Mapping[str, str], ...]
    partition: Partition

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads the manifest. Raises CheckpointError."""
        try:
            doc = _read(path / "manifest.json", MAX_MANIFEST_BYTES)
            if doc["format"] == FORMAT and doc["version"] in range(1, VERSION):
                raise OldCheckpointError(
                    f"{path}: a checkpoint of version {doc['version']}, which is not read any more; resume it with the "
                    f"release that wrote it, or take another --checkpoint folder"
                )
            if (doc["format"], doc["version"]) != (FORMAT, VERSION):
                raise CheckpointError(f"{path}: got {doc['format']} {doc['version']}, expected {FORMAT} {VERSION}")
            stages = tuple({name: str(files[name]) for name in FILES} for files in doc["stages"])
            identity = _identity(doc["job"], len(stages))
            partition = partition_of(tuple(map(whole_number, doc["partition"])), identity.layers, len(stages))
            return cls(path, whole_number(doc["iteration"]), identity, stages, partition)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: no whole checkpoint: {type(error).__name__}: {error}") from None

    def verify(self) -> None:
        """Reads every file. Raises CheckpointError naming the first that is not what was written."""
        for stage in range(len(self.files)):
            self._verify(stage)

    def load(self, span: Span) -> StageState:
        """The state of some layers, verified. Raises CheckpointError."""
        if not span or not 0 <= span[0] <= span[-1] < sum(self.partition):
            raise CheckpointError(f"{self.path}: has layers 0 to {sum(self.partition) - 1}, not {span}")
        parts = []
        for stage, own in enumerate(spans(self.partition)):
            if own[0] <= span[-1] and span[0] <= own[-1]:
                self._verify(stage)
                part = _read_part(_part(self.path, stage))
                if part.document.get("committed") != self.iteration:
                    raise CheckpointError(f"{self.path}: stage {stage} is not of iteration {self.iteration}")
                parts.append(part)
        if span in spans(self.partition):
            return parts[0]
        try:
            return of_layers(joined(parts), span)
        except (StateError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: can't be read: {reason_of(error)}") from None

    def _verify(self, stage: int) -> None:
        if not 0 <= stage < len(self.files):
            raise CheckpointError(f"{self.path}: has stages 0 to {len(self.files) - 1}, not {stage}")
        for name, expected in self.files[stage].items():
            file = _part(self.path, stage) / name
            try:
                found = _sha256(file)
            except OSError as error:
                raise CheckpointError(f"{file}: can't be read: {error.strerror}") from None
            if found != expected:
                raise CheckpointError(f"{file}: damaged: its sha256 is {found[:12]}…, expected {expected[:12]}…")


def whole_checkpoints(directory: Path) -> list[Checkpoint]:
    """Newest first. One whose manifest can't be read counts as missing; parts are not read.

    Raises OldCheckpointError.
    """
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if named := _NAME.fullmatch(path.name):
            try:
                checkpoint = Checkpoint.open(path)
                if checkpoint.iteration == int(named[1]):
                    found.append(checkpoint)
            except OldCheckpointError:
                raise
            except CheckpointError:
                continue
    return sorted(found, key=lambda c: c.iteration, reverse=True)


def find(directory: Path, which: str = "newest") -> Checkpoint:
    """which: `newest`; `newest-intact`, which passes over damaged ones; or a checkpoint's name or
    iteration. The one found has been read and verified.

    Raises CheckpointError.
    """
    candidates = whole_checkpoints(directory)
    if not candidates:
        raise CheckpointError(f"{directory}: no whole checkpoint in it")
    if which not in ("newest", "newest-intact"):
        named = [c for c in candidates if which in (c.path.name, str(c.iteration))]
        if not named:
            names = ", ".join(str(c.iteration) for c in candidates)
            raise CheckpointError(f"{directory}: no checkpoint of iteration {which}; there are {names}")
        named[0].verify()
        return named[0]
    for candidate in candidates:
        try:
            candidate.verify()
            return candidate
        except CheckpointError as error:
            if which == "newest":
                raise CheckpointError(f"{error}; resume=newest-intact takes the newest that is not damaged") from None
            last = error
    raise CheckpointError(f"{directory}: every checkpoint is damaged; the oldest: {last}")


def set_aside_later(directory: Path, iteration: int) -> list[str]:
    """Renames checkpoints of a future that a resumed run will not have; returns their new names."""
    names = []
    for later in whole_checkpoints(directory):
        if later.iteration > iteration:
            name = f"superseded-{later.path.name}-{later.path.stat().st_mtime_ns}"
            later.path.rename(directory / name)
            names.append(name)
    return names


def load_layers(directory: Path, span: Span) -> StageState:
    """The state of some layers from a checkpoint, or from the newest one in a folder of checkpoints.

    `StageOptimizer.load_state` takes it up; its `document["committed"]` is the next iteration.
    Raises CheckpointError.
    """
    if (directory / "manifest.json").exists():
        return Checkpoint.open(directory).load(span)
    candidates = whole_checkpoints(directory)
    if not candidates:
        raise CheckpointError(f"{directory}: no whole checkpoint in it")
    return candidates[0].load(span)


# -- writing ----------------------------------------------------------------------------------


def write_part(
    directory: Path, state: StageState, stage: int, layers: int, identity: Identity, attempt: int, keep: int
) -> bool:
    """Writes one stage's part, the state of so many layers, and makes the checkpoint whole when all parts are there;
    returns whether.

    attempt: tells apart writers of one iteration that did not know of each other (a generation's number).
    keep: how many whole checkpoints stay. Raises CheckpointError, or OSError.
    """
    iteration = int(state.document["committed"])
    partial = directory / f".partial-{iteration:010d}-{attempt}"
    part = _part(partial, stage)
    shutil.rmtree(part, ignore_errors=True)
    _give_up_older(directory, iteration)
    try:
        part.mkdir(parents=True)
        _write(part / _STATE, state.document)
        model = {name.removeprefix(_OF_MODEL): t for name, t in state.tensors.items() if name.startswith(_OF_MODEL)}
        others = {name: t for name, t in state.tensors.items() if not name.startswith(_OF_MODEL)}
        write_tensors(part / _MODEL, model)
        write_tensors(part / _OPTIMIZER, others)
        files = {name: _sha256(part / name) for name in FILES}
        _sync(partial)
        # From here on another writer may make the checkpoint whole, and this directory be renamed.
        _write(part / "part.json", {"files": files, "layers": layers})
    except (OSError, ValueError, RuntimeError) as error:
        # A full disk gets its space back.
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(f"{part}: can't be written: {reason_of(error)}") from None
    return _make_whole(directory, partial, iteration, identity, keep)


def _make_whole(directory: Path, partial: Path, iteration: int, identity: Identity, keep: int) -> bool:
    try:
        parts = [json.loads((_part(partial, s) / "part.json").read_text()) for s in range(identity.stages)]
    except FileNotFoundError:
        return False  # whoever writes the last part sees them all
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": iteration,
        "job": {**vars(identity), "recipe": dict(identity.recipe)},
        "torch": torch.__version__,
        "stages": [part["files"] for part in parts],
        "partition": [part["layers"] for part in parts],
    }
    target = directory / f"iteration-{iteration:010d}"
    try:
        (partial / ".claimed").touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return False  # another writer saw all parts at the same moment, and was quicker
    try:
        _write(partial / "manifest.json", manifest)
        if target.exists():
            # Written before a death that undid the step after it: the same bits again.
            target.rename(directory / f".replaced-{iteration:010d}-{os.getpid()}")
        partial.rename(target)
    except OSError:
        (partial / ".claimed").unlink(missing_ok=True)  # another writer of this part may be luckier
        raise
    _sync(directory)
    _tidy(directory, iteration, keep)
    return True


def put_back_replaced(directory: Path) -> None:
    """A run that was killed between the two renames of `_make_whole` has left a whole checkpoint without its name."""
    for path in directory.glob(".replaced-*"):
        match = re.match(r"\.replaced-(\d{10,})-", path.name)
        target = directory / f"iteration-{match[1]}" if match else None
        if target is not None and not target.exists():
            with contextlib.suppress(OSError):
                path.rename(target)


def remove_unfinished(directory: Path) -> None:
    """What a run that has ended began, and nobody will finish: the parts are of its seed and data, and a new run's
    must not be put together with them."""
    for path in directory.glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def _give_up_older(directory: Path, iteration: int) -> None:
    """Removes checkpoints that some stage has left out, as when its disk was full: they take the room of the next. Not
    those that somebody still writes, and not the newest: a stage may be a checkpoint behind."""
    unfinished: dict[int, list[Path]] = {}
    for path in directory.glob(".partial-*"):
        match = re.match(r"\.partial-(\d{10,})-", path.name)
        if match and int(match[1]) < iteration:
            unfinished.setdefault(int(match[1]), []).append(path)
    for number in sorted(unfinished)[:-1]:
        for path in unfinished[number]:
            if all((part / "part.json").exists() for part in path.glob("stage-*")):
                with contextlib.suppress(OSError):
                    (path / ".claimed").touch(exist_ok=False)  # else somebody makes it whole at this moment
                    shutil.rmtree(path, ignore_errors=True)


def _tidy(directory: Path, iteration: int, keep: int) -> None:
    """Removes what is older than the `keep` newest, and what others began and never finished."""
    old = [c.path for c in whole_checkpoints(directory) if c.iteration <= iteration][keep:]
    for path in old:
        # First out of sight: one that is being removed must not be taken for whole.
        hidden = directory / f".removed-{path.name}"
        try:
            path.rename(hidden)
        except OSError:
            continue
    for path in directory.glob(".*-*"):
        kind, _, rest = path.name.partition("-")
        number = int(m[0]) if (m := re.search(r"\d{10,}", rest)) else iteration + 1
        if kind in (".removed", ".replaced") or (kind == ".partial" and number < iteration):
            shutil.rmtree(path, ignore_errors=True)


def _part(path: Path, stage: int) -> Path:
    return path / f"stage-{stage}"


def _write(file: Path, document: Any) -> None:
    """Wholly or not at all, and on the disk."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("w") as out:
        json.dump(document, out)
        out.flush()
        os.fsync(out.fileno())
    with _open(file.parent) as directory:
        temporary.replace(file)
        os.fsync(directory)


def _sync(directory: Path) -> None:
    with _open(directory) as handle:
        os.fsync(handle)


@contextmanager
def _open(directory: Path) -> Iterator[int]:
    """A handle, which stays good when the directory gets another name."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    with opened(file) as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


# -- reading ----------------------------------------------------------------------------------


def _read_part(part: Path) -> StageState:
    try:
        document = _read(part / _STATE, MAX_STATE_BYTES)
        if not isinstance(document, dict):
            raise StateError(f"{_STATE} is no object")
        model, _ = read_tensors(part / _MODEL)
        others, _ = read_tensors(part / _OPTIMIZER)
        return StageState(document, others | {_OF_MODEL + name: tensor for name, tensor in model.items()})
    except (OSError, ValueError, StateError, RecursionError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{part}: can't be read: {reason_of(error)}") from None


def _read(file: Path, most: int) -> Any:
    """A JSON document of at most so many bytes, whatever the file has grown to meanwhile."""
    with opened(file) as data:
        text = data.read(most + 1)
    if len(text) > most:
        raise ValueError(f"{file.name} has more than {most:,} bytes")
    return read_json(text)


def reason_of(error: BaseException) -> str:
    """In a line."""
    # What failed first: a full disk shows again when the half-written file is closed.
    while error.__context__ is not None:
        error = error.__context__
    return in_a_line(error)


def _identity(document: Any, stages: int) -> Identity:
    """Raises ValueError, KeyError or TypeError where it is none, or of another number of stages."""
    values = {field.name: document[field.name] for field in fields(Identity)}
    for name in ("layers", "stages", "pipelines", "micro_batches"):
        whole_number(values[name])
    if values["stages"] != stages or isinstance(values["seed"], bool) or not isinstance(values["seed"], int):
        raise ValueError(f"a job of {values['stages']!r} stages and the seed {values['seed']!r} with {stages} parts")
    if not isinstance(values["workload"], str) or not isinstance(values["recipe"], dict):
        raise ValueError("the job's workload is no text, or its recipe no object")
    return Identity(**values)
