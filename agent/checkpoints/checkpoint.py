"""Checkpoints: a directory per checkpoint, a directory per stage in it, written by
`torch.distributed.checkpoint` and read back bit by bit.

    DIRECTORY/iteration-0000000010/manifest.json
                                   stage-0/part.json .metadata __0_0.distcp
                                   stage-1/...

A checkpoint exists wholly or not at all. One living worker per stage writes its part into a hidden
directory, with its checksums last; whoever sees that all parts are there writes the manifest and
renames the directory. Everything is on the disk before the rename.

State is per stage and knows no pipelines, so it can be taken up with other workers failed and with
another number of pipelines. The number of stages, the model, the optimizer's and scheduler's class
and the seed must be the same; a job whose iterations hold other micro-batches goes on training, but
not to the same bits.

To read one stage's state, on any machine and without a running job:
`load_stage(directory, stage) -> StageState`, where directory is a checkpoint or a folder of them.
Nothing in a checkpoint is unpickled but torch's own description of tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agent.state import StageState, StateError

FORMAT, VERSION = "openrecycle-checkpoint", 1
_NAME = re.compile(r"iteration-(\d{10,})")
_DOCUMENT = "document"
"""The tensor that holds the state's JSON document, as bytes."""

# Said by every save and load: here each stage is saved by one process on its own, on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(StateError):
    """A checkpoint is missing, damaged or of another job; the sentence says which and how."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint says about the job that wrote it. recipe: the Recipe's fields."""

    workload: str
    stages: int
    pipelines: int
    micro_batches: int
    seed: int
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. iteration: how many iterations are in it, so also the next one.

    files: per stage the sha256 of each of its files.
    """

    path: Path
    iteration: int
    identity: Identity
    files: tuple[Mapping[str, str], ...]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads the manifest. Raises CheckpointError."""
        try:
            doc = json.loads((path / "manifest.json").read_text())
            if (doc["format"], doc["version"]) != (FORMAT, VERSION):
                raise CheckpointError(f"{path}: got {doc['format']} {doc['version']}, expected {FORMAT} {VERSION}")
            return cls(path, int(doc["iteration"]), Identity(**doc["job"]), tuple(dict(s) for s in doc["stages"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: no whole checkpoint: {type(error).__name__}: {error}") from None

    def verify(self) -> None:
        """Reads every file. Raises CheckpointError naming the first that is not what was written."""
        for stage in range(len(self.files)):
            self._verify(stage)

    def load(self, stage: int) -> StageState:
        """One stage's state, verified. Raises CheckpointError."""
        self._verify(stage)
        return _read_part(_part(self.path, stage))

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
    """Newest first. One whose manifest can't be read counts as missing; parts are not read."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if _NAME.fullmatch(path.name):
            try:
                found.append(Checkpoint.open(path))
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
                raise CheckpointError(f"{error}; --resume newest-intact takes the newest that is not damaged") from None
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


def load_stage(directory: Path, stage: int) -> StageState:
    """A stage's state from a checkpoint, or from the newest one in a folder of checkpoints.

    `StageOptimizer.load_state` takes it up; its `document["committed"]` is the next iteration.
    Raises CheckpointError.
    """
    if (directory / "manifest.json").exists():
        return Checkpoint.open(directory).load(stage)
    candidates = whole_checkpoints(directory)
    if not candidates:
        raise CheckpointError(f"{directory}: no whole checkpoint in it")
    return candidates[0].load(stage)


# -- writing ----------------------------------------------------------------------------------


def write_part(directory: Path, state: StageState, stage: int, identity: Identity, attempt: int, keep: int) -> bool:
    """Writes one stage's part, and makes the checkpoint whole when all parts are there; returns whether.

    attempt: tells apart writers of one iteration that did not know of each other (an epoch's number).
    keep: how many whole checkpoints stay. Raises CheckpointError, or OSError.
    """
    iteration = int(state.document["committed"])
    partial = directory / f".partial-{iteration:010d}-{attempt}"
    part = _part(partial, stage)
    shutil.rmtree(part, ignore_errors=True)
    text = json.dumps(state.document).encode()
    tensors = {**state.tensors, _DOCUMENT: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    try:
        part.mkdir(parents=True)
        save(tensors, storage_writer=FileSystemWriter(part, sync_files=True), no_dist=True)
        files = {file.name: _sha256(file) for file in sorted(part.iterdir())}
        _sync(partial)
        # From here on another writer may make the checkpoint whole, and this directory be renamed.
        _write(part / "part.json", {"files": files})
    except (Exception, CheckpointException) as error:
        # A full disk gets its space back.
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointError(f"{part}: can't be written: {reason_of(error)}") from None
    return _make_whole(directory, partial, iteration, identity, keep)


def _make_whole(directory: Path, partial: Path, iteration: int, identity: Identity, keep: int) -> bool:
    try:
        parts = [json.loads((_part(partial, s) / "part.json").read_text())["files"] for s in range(identity.stages)]
    except FileNotFoundError:
        return False  # whoever writes the last part sees them all
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": iteration,
        "job": {**vars(identity), "recipe": dict(identity.recipe)},
        "torch": torch.__version__,
        "stages": parts,
    }
    target = directory / f"iteration-{iteration:010d}"
    try:
        (partial / ".claimed").touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return False  # another writer saw all parts at the same moment, and was quicker
    _write(partial / "manifest.json", manifest)
    if target.exists():
        # Written before a death that undid the step after it: the same bits again.
        target.rename(directory / f".replaced-{iteration:010d}-{os.getpid()}")
    partial.rename(target)
    _sync(directory)
    _tidy(directory, iteration, keep)
    return True


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
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


# -- reading ----------------------------------------------------------------------------------


def _read_part(part: Path) -> StageState:
    try:
        reader = _PlainReader(part)
        metadata = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {
            name: torch.empty(what.size, dtype=what.properties.dtype)
            for name, what in metadata.items()
            if isinstance(what, TensorStorageMetadata)
        }
        load(tensors, storage_reader=_PlainReader(part), no_dist=True)
        document = json.loads(bytes(tensors.pop(_DOCUMENT).tolist()))
    except (OSError, ValueError, KeyError, pickle.UnpicklingError, CheckpointException) as error:
        raise CheckpointError(f"{part}: can't be read: {reason_of(error)}") from None
    return StageState(document, tensors)


def reason_of(error: BaseException) -> str:
    """In a line. torch wraps what went wrong into an exception that is no Exception."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    # What failed first: a full disk shows again when the half-written file is closed.
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


class _PlainReader(FileSystemReader):
    """Reads the description of the tensors, which torch pickles, with nothing but its own classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(io.BytesIO(file.read())).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    _ALLOWED = re.compile(
        r"torch\.distributed\.checkpoint\.(metadata\.\w+|filesystem\._StorageInfo)"
        r"|torch\.(Size|float\w+|bfloat16|complex\w+|int\w+|uint\w+|bool|serialization\._get_layout)"
        r"|pathlib\.(Pure)?(Posix|Windows)?Path"
    )

    def find_class(self, module: str, name: str) -> Any:
        if not self._ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
        return super().find_class(module, name)
