"""Checkpoints of a job, and the weights that it ends with: their form on disk, writing beside the training, reading.

A checkpoint is a directory. It has a directory for each stage, and in that one for each share:

    DIRECTORY/iteration-0000000010/manifest.json
                                   stage-0/share-0/share.json state.json model.safetensors optimizer.safetensors
                                           share-1/...
                                   stage-1/...

Each living worker of a stage (with several ranks, each rank) writes a share of the stage's state; agent.models.state
says which. model.safetensors has parameters and buffers, each as LAYER.NAME; optimizer.safetensors has the tensors of
the optimizer and scheduler. A tensor that is in several shares is in pieces, named NAME@FIRST-ELEMENT, and state.json
says how to put them together. The state.json of share 0 also has what is no tensor. Nothing in a checkpoint is pickled,
so reading one runs no code, whoever wrote it.

A checkpoint is either complete or does not exist. Each writer puts its share into a hidden directory, with the
checksums last (share.json). A writer that then sees all shares of all stages writes the manifest, which has the
checksum of every file and the layers of every share, and renames the directory. Everything is on the disk before the
rename. If a worker dies before its share is written, that checkpoint is given up.

State is kept per layer, and does not depend on pipelines. So it can be loaded with other workers failed, with another
number of pipelines, and with other cuts into stages, whichever worker wrote which share. Shares without any of the
requested layers are not read. The number of layers, the model, the classes of optimizer and scheduler, and the seed
must be the same. A job whose iterations hold other micro-batches goes on training, but not to the same bits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from openrecycle.agent.config.options import Checkpoints
from openrecycle.agent.models.layers import Partition, Span, partition_of, spans
from openrecycle.agent.models.state import (
    Piece,
    Share,
    StageState,
    StateError,
    Writer,
    decode,
    encode,
    joined,
    layer_in,
    mapped_tensors,
    of_layers,
    opened,
    put_together,
    read_tensors,
    whole_number,
    write_tensors,
)
from openrecycle.planner.jobs.errors import InputError, in_a_line
from openrecycle.planner.jobs.words import count, printable
from openrecycle.planner.plans.plan import read_json

if TYPE_CHECKING:
    from openrecycle.agent.stages.optimizer import StageOptimizer

FORMAT, VERSION = "openrecycle-checkpoint", 5
# The size is checked before a file is read. The state of 100,000 tensors has a description of 20 MB; a job of 16,384
# stages with 8 shares each has a manifest of 50 MB. A larger file is not one of these.
MAX_MANIFEST_BYTES, MAX_STATE_BYTES = 2**26, 2**28

# -- checkpoints --------------------------------------------------------------------------------

_STATE, _MODEL, _OPTIMIZER = FILES = "state.json", "model.safetensors", "optimizer.safetensors"
_WRITTEN = "share.json"
_OF_MODEL = "model."
_HIDDEN = _PARTIAL, _REMOVED, _REPLACED = ".partial", ".removed", ".replaced"
_NAME = re.compile(r"iteration-([0-9]{10,18})")


Part = Callable[[str, Tensor], Tensor]
"""A function of a tensor's name in a state and the tensor, which returns the part that the caller needs: a view."""


def whole_tensor(name: str, tensor: Tensor) -> Tensor:
    """A Part that needs all of each tensor."""
    return tensor


class CheckpointError(StateError):
    """A checkpoint is missing, damaged or of another job. The text says which one, and what is wrong."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint says about the job that wrote it. layers: of the whole model."""

    workload: str
    layers: int
    stages: int
    pipelines: int
    micro_batches: int
    seed: int


@dataclass(frozen=True)
class WrittenShare:
    """A share on disk. files: the sha256 of each. layers: those that have tensors in these files."""

    files: Mapping[str, str]
    layers: frozenset[int]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. iteration: how many iterations are in it, and so also the number of the next one.

    shares: those of each stage. partition: layers per stage.
    """

    path: Path
    iteration: int
    identity: Identity
    shares: tuple[tuple[WrittenShare, ...], ...]
    partition: Partition

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads the manifest. Raises CheckpointError; and OSError if it can't be read now, which says nothing of it."""
        try:
            doc = _read(path / "manifest.json", MAX_MANIFEST_BYTES)
            if (doc["format"], doc["version"]) != (FORMAT, VERSION):
                raise CheckpointError(f"{path}: got {doc['format']} {doc['version']}, expected {FORMAT} {VERSION}")
            stages = tuple(tuple(map(_written_share, stage)) for stage in doc["stages"])
            if not all(stages):
                raise ValueError("a stage without shares")
            identity = _identity(doc["job"], len(stages))
            partition = partition_of(tuple(map(whole_number, doc["partition"])), identity.layers, len(stages))
            return cls(path, whole_number(doc["iteration"]), identity, stages, partition)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if _says_nothing(error):
                raise
            raise CheckpointError(f"{path}: no whole checkpoint: {type(error).__name__}: {error}") from None

    def verify(self) -> None:
        """Reads every file. Raises CheckpointError that names the first damaged file; and OSError."""
        for stage, shares in enumerate(self.shares):
            for number in range(len(shares)):
                self._verify(stage, number)

    def load(self, span: Span, part: Part = whole_tensor) -> StageState:
        """Returns the verified state of the layers in `span`. part: the part of each tensor that is needed. Raises
        CheckpointError; and OSError."""
        if not span or not 0 <= span[0] <= span[-1] < sum(self.partition):
            raise CheckpointError(f"{self.path}: has layers 0 to {sum(self.partition) - 1}, not {span}")
        of_stages = [
            self._load(stage, span, part)
            for stage, own in enumerate(spans(self.partition))
            if own[0] <= span[-1] and span[0] <= own[-1]
        ]
        if span in spans(self.partition):
            return of_stages[0]
        with _readable(self.path):
            return joined([of_layers(state, span) for state in of_stages])

    def scheduler(self) -> tuple[str, Any] | None:
        """Returns the class and the state of the scheduler, which all stages have alike; None: there is none. Not
        verified. Raises CheckpointError; and OSError."""
        folder = _share(self.path, 0, 0)
        with _readable(folder):
            kept = _read(folder / _STATE, MAX_STATE_BYTES)["document"]["scheduler"]
            if kept is None:
                return None
            there = _OPTIMIZER in self.shares[0][0].files
            return str(kept[0]), decode(kept[1], mapped_tensors(folder / _OPTIMIZER)[0] if there else {})

    def _load(self, stage: int, span: Span, part: Part) -> StageState:
        """Returns what a stage has of these layers, and what belongs to no layer."""
        found: dict[str, Tensor] = {}
        pieces: dict[str, list[tuple[Piece, Tensor]]] = {}
        document: dict[str, Any] = {}
        for number, share in enumerate(self.shares[stage]):
            if number and share.layers.isdisjoint(span):
                continue
            self._verify(stage, number)
            folder = _share(self.path, stage, number)
            with _readable(folder):
                told = _read(folder / _STATE, MAX_STATE_BYTES)
                cut = {name: Piece.from_json(piece) for name, piece in told["pieces"].items()}
                if not number:
                    document = dict(told["document"])
                elif told["document"]:
                    document["state"] = document["state"] | told["document"]["state"]
                for file, front in ((_MODEL, _OF_MODEL), (_OPTIMIZER, "")):
                    for name, tensor in mapped_tensors(folder / file)[0].items() if file in share.files else ():
                        piece = cut.get(front + name)
                        layer = layer_in(whole := piece.of if piece else front + name)
                        if layer is not None and layer not in span:
                            continue
                        if piece:
                            pieces.setdefault(whole, []).append((piece, tensor))
                        elif whole in found:
                            raise StateError(f"{whole}: there twice")
                        else:
                            found[whole] = part(whole, tensor).clone()
        with _readable(self.path / f"stage-{stage}"):
            if document.get("committed") != self.iteration:
                raise StateError(f"it is not of iteration {self.iteration}")
            for whole, of_it in pieces.items():
                if whole in found:
                    raise StateError(f"{whole}: there twice")
                tensor = put_together(whole, of_it)
                mine = part(whole, tensor)
                found[whole] = tensor if mine is tensor else mine.clone()  # a view would keep the whole tensor
            if len(self.shares[stage]) > 1:
                # In the order of a single optimizer.
                names = [name for group in document["groups"] for name in group["parameters"]]
                document["state"] = {n: document["state"][n] for n in names if n in document["state"]}
        return StageState(document, found)

    def _verify(self, stage: int, number: int) -> None:
        for name, expected in self.shares[stage][number].files.items():
            file = _share(self.path, stage, number) / name
            try:
                found = _sha256(file)
            except OSError as error:
                if _says_nothing(error):
                    raise
                raise CheckpointError(f"{file}: can't be read: {error.strerror}") from None
            if found != expected:
                raise CheckpointError(f"{file}: damaged: its sha256 is {found[:12]}…, expected {expected[:12]}…")


def whole_checkpoints(directory: Path) -> list[Checkpoint]:
    """Returns the complete checkpoints in a folder, newest first. One whose manifest is gone or damaged counts as
    missing. Shares are not read.

    Raises OSError if a manifest can't be read now, since an older checkpoint must not be taken for the newest.
    """
    return _by_state(directory)[0]


def _by_state(directory: Path, tries: int = 5) -> tuple[list[Checkpoint], dict[int, str]]:
    """Returns the complete checkpoints, and by iteration why other finished ones are damaged, or of another version;
    both newest first. tries: how often the folder is read while checkpoints are removed from it. A shared file system
    may list what has long been removed."""
    whole, others, gone = list[Checkpoint](), dict[int, str](), False
    for path in directory.iterdir() if directory.is_dir() else ():
        if named := _NAME.fullmatch(path.name):
            iteration = int(named[1])
            try:
                checkpoint = Checkpoint.open(path)
                if checkpoint.iteration == iteration:
                    whole.append(checkpoint)
                else:
                    others[iteration] = f"{path}: its manifest says iteration {checkpoint.iteration}"
            except CheckpointError as error:
                if (path / "manifest.json").exists():  # otherwise it was never finished
                    others[iteration] = str(error)
                gone = gone or not os.path.lexists(path)
    if gone and tries > 1:  # one was removed for a newer one, which this listing may not have
        return _by_state(directory, tries - 1)
    return sorted(whole, key=lambda c: c.iteration, reverse=True), dict(sorted(others.items(), reverse=True))


def is_there(directory: Path | None, iteration: int) -> bool:
    """Is there a checkpoint of so many iterations? It is not opened."""
    with contextlib.suppress(OSError):  # it is not known now
        return directory is not None and _path(directory, iteration).is_dir()
    return False


_WHICH = ("newest", "newest-intact")


def find(directory: Path, which: str = "newest") -> Checkpoint:
    """Finds a checkpoint, reads all of it and verifies it. which: `newest`; `newest-intact`, which skips damaged ones;
    or a checkpoint's name or iteration.

    Raises CheckpointError; and OSError.
    """
    candidates, others = _by_state(directory)
    if not candidates:
        why = next(iter(others.values()), "")
        raise CheckpointError(f"{directory}: no whole checkpoint in it" + (f" ({why})" if why else ""))
    if which not in _WHICH:
        named = [c for c in candidates if which in (c.path.name, str(c.iteration))]
        if not named:
            names = ", ".join(str(c.iteration) for c in candidates)
            raise CheckpointError(f"{directory}: no checkpoint of iteration {which}; there are {names}")
        named[0].verify()
        return named[0]
    found: Checkpoint | None = None
    for candidate in candidates:
        try:
            candidate.verify()
            found = candidate
            break
        except CheckpointError as error:
            if which == "newest":
                raise CheckpointError(f"{error}; resume=newest-intact takes the newest that is not damaged") from None
            last = error
    # Reading takes long. When a job goes back, living workers may have finished a newer one meanwhile, for which older
    # ones are removed.
    if which == "newest-intact" and any(c.iteration > candidates[0].iteration for c in whole_checkpoints(directory)):
        return find(directory, which)
    if found is None:
        raise CheckpointError(f"{directory}: every checkpoint is damaged; the oldest: {last}")
    return found


def set_aside_later(directory: Path, iteration: int) -> list[str]:
    """Renames checkpoints that are later than `iteration`, where a run resumes. Returns their new names. If a living
    worker removes the one of `iteration` meanwhile, in favour of a later one, that one keeps its name."""
    aside = dict[str, Path]()
    for later in whole_checkpoints(directory):
        if later.iteration > iteration:
            with contextlib.suppress(FileNotFoundError):  # a living worker has just removed it
                name = f"superseded-{later.path.name}-{later.path.stat().st_mtime_ns}"
                later.path.rename(directory / name)
                aside[name] = later.path
    if not is_there(directory, iteration):
        while aside:
            name, path = aside.popitem()
            (directory / name).rename(path)
    return list(aside)


def go_back(directory: Path) -> Checkpoint:
    """Finds the newest checkpoint that is not damaged, and sets later ones aside. Living workers may still finish one.
    Raises CheckpointError; and OSError."""
    while True:
        found = find(directory, "newest-intact")
        set_aside_later(directory, found.iteration)
        # The worker may have put the older one back, as later ones were gone, at the moment in which these were put
        # back here, as the older one was: then all of them are there.
        if [c.iteration for c in whole_checkpoints(directory)[:1]] == [found.iteration]:
            return found


def load_layers(directory: Path, span: Span, part: Part = whole_tensor) -> StageState:
    """Reads the state of some layers from a checkpoint, or from the newest one in a folder of checkpoints, on any
    machine and without a running job. part: the part of each tensor that is needed.

    `StageOptimizer.load_state` takes the result; its `document["committed"]` is the next iteration.
    Raises CheckpointError; and OSError.
    """
    if (directory / "manifest.json").exists():
        return Checkpoint.open(directory).load(span, part)
    candidates = whole_checkpoints(directory)
    if not candidates:
        raise CheckpointError(f"{directory}: no whole checkpoint in it")
    return candidates[0].load(span, part)


# -- writing ----------------------------------------------------------------------------------


def write_share(
    directory: Path, share: Share, stage: int, layers: int, identity: Identity, attempt: int, keep: int
) -> bool:
    """Writes a share of a stage. When all shares of all stages are there, it also completes the checkpoint. Returns
    whether it did.

    layers: how many the stage has. attempt: tells apart writers of one iteration that do not know of each other (the
    number of a generation). keep: how many complete checkpoints stay. Raises CheckpointError, or OSError.
    """
    iteration = share.iteration
    partial = directory / f"{_PARTIAL}-{iteration:010d}-{attempt}"
    folder = _share(partial, stage, share.number)
    shutil.rmtree(folder, ignore_errors=True)
    _give_up_older(directory, iteration)
    try:
        folder.mkdir(parents=True)
        pieces = {name: piece.to_json() for name, piece in share.pieces.items()}
        _write(folder / _STATE, {"document": share.document, "pieces": pieces})
        model = {name.removeprefix(_OF_MODEL): t for name, t in share.tensors.items() if name.startswith(_OF_MODEL)}
        others = {name: t for name, t in share.tensors.items() if not name.startswith(_OF_MODEL)}
        for file, tensors in ((_MODEL, model), (_OPTIMIZER, others)):
            if tensors:
                write_tensors(folder / file, tensors)
        files = {name: _sha256(folder / name) for name in FILES if (folder / name).exists()}
        _sync(folder.parent)
        _sync(partial)
        # From here on another writer may complete the checkpoint, which renames this directory.
        said = {"files": files, "holds": share.layers, "shares": share.count, "layers": layers}
        _write(folder / _WRITTEN, said)
    except (OSError, ValueError, RuntimeError) as error:
        # Removed, so that a full disk gets its space back.
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"{folder}: can't be written: {reason_of(error)}") from None
    return _make_whole(directory, partial, iteration, identity, keep)


def _said(partial: Path, stage: int) -> list[Any] | None:
    """Returns what the writers of a stage's shares have written into share.json; None if some are missing."""
    out: list[Any] = []
    while not out or len(out) < out[0]["shares"]:
        folder = _share(partial, stage, len(out))
        # On a network file system, a file that was once looked for in vain may stay unseen, but a listing shows it.
        if not folder.is_dir() or folder / _WRITTEN not in folder.iterdir():
            return None
        out.append(json.loads((folder / _WRITTEN).read_text()))
    return out


def _make_whole(directory: Path, partial: Path, iteration: int, identity: Identity, keep: int) -> bool:
    stages = list[list[Any]]()
    try:
        for stage in range(identity.stages):
            if (said := _said(partial, stage)) is None:
                return False  # the writer of the last share will see all of them
            stages.append(said)
    except FileNotFoundError:
        return False  # another writer has just completed it
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": iteration,
        "job": vars(identity),
        "torch": torch.__version__,
        "stages": [[{"files": share["files"], "layers": share["holds"]} for share in said] for said in stages],
        "partition": [said[0]["layers"] for said in stages],
    }
    target = _path(directory, iteration)
    try:
        (partial / ".claimed").touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return False  # another writer saw all shares at the same moment, and was faster
    try:
        _write(partial / "manifest.json", manifest)
        if target.exists():
            # It was written before a death that undid the next step, and has the same bits.
            target.rename(directory / f"{_REPLACED}-{iteration:010d}-{os.getpid()}")
        partial.rename(target)
    except OSError:
        (partial / ".claimed").unlink(missing_ok=True)  # another writer may succeed
        raise
    _sync(directory)
    _tidy(directory, iteration, keep)
    return True


def put_back_replaced(directory: Path) -> None:
    """Gives complete checkpoints their name back, if a run was killed between the two renames of `_make_whole`."""
    for path, target in _replaced(directory):
        if not target.exists():
            with contextlib.suppress(OSError):
                path.rename(target)


def _replaced(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Yields the complete checkpoints that a run has renamed to write them again, and the names that they had."""
    for path in directory.glob(f"{_REPLACED}-*"):
        if match := re.match(r"\.replaced-(\d{10,})-", path.name):
            yield path, directory / f"iteration-{match[1]}"


def remove_leftovers(directory: Path) -> None:
    """Removes what a run that has ended left half written or half removed. Shares of unfinished checkpoints are of its
    seed and data, and must not be put together with those of a new run."""
    kept = {path for path, target in _replaced(directory) if not target.exists()}  # it could not be put back
    for kind in _HIDDEN:
        for path in {*directory.glob(f"{kind}-*")} - kept:
            shutil.rmtree(path, ignore_errors=True)


def _give_up_older(directory: Path, iteration: int) -> None:
    """Removes unfinished checkpoints that lack a worker's share, as when its disk was full: they take the space of the
    next one. It leaves those that are still being written, and the newest, since a stage may be a checkpoint behind."""
    unfinished: dict[int, list[Path]] = {}
    for path in directory.glob(f"{_PARTIAL}-*"):
        match = re.match(r"\.partial-(\d{10,})-", path.name)
        if match and int(match[1]) < iteration:
            unfinished.setdefault(int(match[1]), []).append(path)
    for number in sorted(unfinished)[:-1]:
        for path in unfinished[number]:
            with contextlib.suppress(OSError):  # another writer may remove it at this moment
                if all((share / _WRITTEN).exists() for share in path.glob("stage-*/share-*")):
                    (path / ".claimed").touch(exist_ok=False)  # raises if a writer is completing it now
                    shutil.rmtree(path, ignore_errors=True)


def _tidy(directory: Path, iteration: int, keep: int) -> None:
    """Removes checkpoints beyond the `keep` newest, and older unfinished ones."""
    whole = list[Path]()
    with contextlib.suppress(OSError):  # a manifest can't be read now: they are removed next time
        whole = [c.path for c in whole_checkpoints(directory) if c.iteration <= iteration]
    # Renamed first: a checkpoint that is partly removed must not be taken for a complete one.
    hidden = {path: directory / f"{_REMOVED}-{path.name}" for path in whole[keep:]}
    for path, name in hidden.items():
        with contextlib.suppress(OSError):
            path.rename(name)
    if not all(path.exists() for path in whole[:keep]):
        # A launcher that goes back to one of these has set the newer ones aside meanwhile (`set_aside_later`, which
        # looks in turn whether it was removed).
        for path, name in hidden.items():
            with contextlib.suppress(OSError):
                name.rename(path)
    for path in directory.glob(".*-*"):
        kind, _, rest = path.name.partition("-")
        number = int(m[0]) if (m := re.search(r"\d{10,}", rest)) else iteration + 1
        if kind in (_REMOVED, _REPLACED) or (kind == _PARTIAL and number < iteration):
            shutil.rmtree(path, ignore_errors=True)


def _path(directory: Path, iteration: int) -> Path:
    return directory / f"iteration-{iteration:010d}"


def _share(path: Path, stage: int, number: int) -> Path:
    return path / f"stage-{stage}" / f"share-{number}"


def _write(file: Path, document: Any) -> None:
    """Writes a JSON file, completely or not at all. It is on the disk when this returns."""
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
    """Yields a handle to a directory, which stays valid if the directory is renamed."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    with opened(file) as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


# -- reading ----------------------------------------------------------------------------------


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns errors in the block into CheckpointError if they show that something is not as it was written. Any OSError
    that does not show this is raised as it is."""
    try:
        yield
    except CheckpointError:
        raise
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(StateError, RecursionError, RuntimeError, MemoryError),
    ) as error:
        if _says_nothing(error):
            raise
        raise CheckpointError(f"{path}: can't be read: {reason_of(error)}") from None


def _says_nothing(error: BaseException) -> bool:
    """Does an error say nothing about the contents of the disk? I/O errors, stale handles or too many open files may
    pass. A missing file, or one that is no regular file (`opened`), is damage."""
    gone = isinstance(error, FileNotFoundError | NotADirectoryError)
    return isinstance(error, OSError) and not gone and error.errno not in (errno.EINVAL, errno.ELOOP, errno.ENXIO)


def _written_share(document: Any) -> WrittenShare:
    """Reads a share's entry of a manifest. Raises KeyError, TypeError, ValueError or AttributeError."""
    files = {str(name): str(digest) for name, digest in document["files"].items()}
    if _STATE not in files or not files.keys() <= {*FILES}:
        raise ValueError(f"a share of the files {sorted(files)}")
    return WrittenShare(files, frozenset(map(whole_number, document["layers"])))


def _read(file: Path, most: int) -> Any:
    """Reads a JSON document. Raises ValueError if it has more than `most` bytes, even if it grows during the call."""
    with opened(file) as data:
        text = data.read(most + 1)
    if len(text) > most:
        raise ValueError(f"{file.name} has more than {most:,} bytes")
    return read_json(text)


def reason_of(error: BaseException) -> str:
    """Returns the reason of an error in a line."""
    # The first error of a chain: a full disk raises again when the half-written file is closed.
    while error.__context__ is not None:
        error = error.__context__
    return in_a_line(error)


def _identity(document: Any, stages: int) -> Identity:
    """Reads the job of a manifest. Raises ValueError, KeyError or TypeError if it is wrong, or has another number of
    stages."""
    values = {field.name: document[field.name] for field in fields(Identity)}
    for name in ("layers", "stages", "pipelines", "micro_batches"):
        whole_number(values[name])
    if values["stages"] != stages or isinstance(values["seed"], bool) or not isinstance(values["seed"], int):
        raise ValueError(f"a job of {values['stages']!r} stages and the seed {values['seed']!r} with {stages} stages")
    if not isinstance(values["workload"], str):
        raise ValueError("the job's workload is no text")
    return Identity(**values)


# -- checkpoints beside the training ------------------------------------------------------------

TIMEOUT_SECONDS = 30.0
"""How long training waits, when a checkpoint is to be written, for the one before to be finished."""


class Claim:
    """The right of one launcher to write to a folder of checkpoints, until `close` or the end of its process. Two jobs
    that write there would mix their shares, and take each other's checkpoints for their own.

    Raises BlockingIOError, which names the holder. On a file system without locks everybody gets the claim.
    """

    def __init__(self, directory: Path) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        if self._file is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 300, 0).decode(errors="replace")
            self.close()
            raise BlockingIOError(printable(holder) or "another process") from None
        except OSError:
            self.close()
            return
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # processes forked meanwhile hold the lock, too
            os.close(self._file)
            self._file = None


def claim(options: Checkpoints) -> Claim | None:
    """Claims the job's folder of checkpoints, if it has one. Raises InputError where another job writes there."""
    if options.folder is None:
        return None
    try:
        return Claim(options.folder)
    except BlockingIOError as held:
        raise options.refuse("directory", f"a folder that no other job writes checkpoints to ({held} does)") from None


IF_ANY = "if-any"
"""Resume if there is a checkpoint. For cluster schedulers, which repeat the same command to begin and to go on."""


@dataclass(frozen=True)
class Origin:
    """What a job that writes checkpoints begins with. identity: the job's. resumed: the path of the checkpoint that it
    resumes, if any. resumed_at: how many iterations are in that."""

    identity: Identity
    resumed: str | None = None
    resumed_at: int = 0


def prepare(
    options: Checkpoints,
    identity: Identity,
    iterations: int,
    say: Callable[[str], None],
    check: Callable[[Checkpoint | None], object] = lambda found: None,
) -> Origin:
    """Finds and verifies the checkpoint that a job begins with. say: gets what the user should know about it. check:
    raises InputError for a checkpoint with which the job can't go on; for None, if it can't begin anew.

    Raises InputError, also if the folder has checkpoints and `resume` is not given: those of two runs would be mixed.
    """
    directory = options.folder
    assert directory is not None
    resume = options.resume
    put_back_replaced(directory)
    if resume in (None, IF_ANY):
        try:
            there, others = _by_state(directory)
        except OSError as error:  # not the same as empty: the job would begin anew
            raise options.refuse("directory", f"a folder that can be read ({in_a_line(error)})") from None
        if there and resume is None:
            raise options.refuse(
                "directory",
                f"a folder without checkpoints, or `checkpoints.resume` newest to go on from iteration "
                f"{there[0].iteration}",
            )
        if not there and others:  # nothing is written over them
            why = next(iter(others.values()))
            raise options.refuse("resume", f"a whole checkpoint ({why}); to begin anew, name another folder")
        if not there:
            check(None)
            remove_leftovers(directory)
            return Origin(identity)
        resume = "newest-intact"
    try:
        found = find(directory, str(resume))
        others = _by_state(directory)[1]
    except CheckpointError as error:
        raise options.refuse("resume", f"a whole checkpoint ({error})") from None
    except OSError as error:
        raise options.refuse("directory", f"a folder that can be read ({in_a_line(error)})") from None
    for iteration, why in others.items():
        if iteration > found.iteration:
            say(f"warning: {why}; the job goes on from an earlier one")
    was = found.identity
    layers = "job.stages" if identity.layers == identity.stages else "layers"
    for field, mine, theirs in ((layers, identity.layers, was.layers), ("seed", identity.seed, was.seed)):
        if mine != theirs:
            raise InputError(field, mine, f"{theirs}, as in the checkpoint {found.path}")
    # The same command was repeated after the end of the job, perhaps because its weights are missing.
    done = found.iteration == iterations and options.resume == IF_ANY
    if found.iteration >= iterations and not done:
        raise InputError("iterations", iterations, f"more than the {found.iteration} that {found.path} holds")
    if not done:
        try:
            check(found)
        except (CheckpointError, OSError) as error:
            raise options.refuse("resume", f"a checkpoint that can be read ({in_a_line(error)})") from None
    remove_leftovers(directory)
    if done:
        say(f"all {iterations} iterations are in {found.path}: nothing is left to train")
    else:
        say(f"resumes after {count(found.iteration, 'iteration')} from {found.path}")
    for name in set_aside_later(directory, found.iteration):
        say(f"note: a later checkpoint is now called {name}")
    if (identity.pipelines, identity.micro_batches) != (was.pipelines, was.micro_batches):
        say(
            f"note: {was.pipelines} x {was.micro_batches} micro-batches an iteration until now, {identity.pipelines} x "
            f"{identity.micro_batches} from here: the numbers differ from those of an unbroken run"
        )
    return Origin(identity, str(found.path), found.iteration)


@dataclass(frozen=True)
class _ShareCopy:
    attempt: int
    layers: int
    share: Share


class Checkpointer:
    """Writes the checkpoint shares of one process, in a thread beside the training. A problem of the disk never ends
    the training; a disk that is too slow delays it, by TIMEOUT_SECONDS at most each time.

    said: called, also in the writing thread, with (iteration, None) when this process has completed a checkpoint, and
    with (iteration, text) when its share has not been written. interrupted: asked while this waits: has the training
    something more urgent to do?
    """

    def __init__(
        self,
        options: Checkpoints,
        origin: Origin,
        stage: int,
        layers: int,
        said: Callable[[int, str | None], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._options, self._origin, self._stage = options, origin, stage
        self._layers = layers
        self._said, self._interrupted = said, interrupted
        self._copy: _ShareCopy | None = None
        self._taken: tuple[int, float | None, int] | None = None
        self._thread: threading.Thread | None = None

    def iteration_end(
        self, optimizer: StageOptimizer, attempt: int, writer: Writer | None, *, last: bool = False
    ) -> None:
        """To be called between two iterations. writer: as which this process writes; None: it does not. attempt: the
        generation. last: is there no further iteration?

        A copy that is taken here is written only after the next step was taken: until then the last step may be
        rejected by validation, or undone by a death elsewhere.
        """
        committed = optimizer.committed
        # The same values are copied only once: this end may come again, as the last one.
        values = (*optimizer.version, attempt)
        if values == self._taken:
            return
        self._write_if_final(committed)
        self._copy = None
        if (last or self.due(committed)) and committed > self._origin.resumed_at and writer is not None:
            self._taken = values
            self._copy = _ShareCopy(attempt, self._layers, optimizer.share(writer))

    def rearranged(self, layers: int) -> None:
        """From now on the stage has so many layers."""
        self._layers = layers

    def due(self, committed: int) -> bool:
        """Should there be a checkpoint after so many iterations?"""
        return committed % self._options.every == 0

    def finish(self) -> None:
        """To be called when no iterations are left and the last step is final. Writes what is left, and waits."""
        self._wait(float("inf"))  # without limit, since no training is delayed
        self._write_if_final(math.inf)
        self._wait(float("inf"))

    def _write_if_final(self, committed: float) -> None:
        ready, self._copy = self._copy, None
        if ready is None or ready.share.iteration >= committed:
            return
        # All workers wait in the same way. If one of them left out this checkpoint, and another the next one,
        # none would ever be complete.
        if not self._wait(TIMEOUT_SECONDS):
            if not self._interrupted():
                self._said(
                    ready.share.iteration,
                    "the one before is still being written; more iterations between checkpoints would help",
                )
            return
        self._thread = threading.Thread(target=self._write, args=(ready,), name="checkpoint", daemon=True)
        self._thread.start()

    def _wait(self, seconds: float) -> bool:
        """Waits for the writing thread. Returns whether it is done."""
        until = time.monotonic() + seconds
        while self._thread is not None and self._thread.is_alive():
            if self._interrupted() or time.monotonic() > until:
                return False
            self._thread.join(0.02)
        return True

    def _write(self, copy: _ShareCopy) -> None:
        options, folder = self._options, self._options.folder
        assert folder is not None
        try:
            identity, attempt = self._origin.identity, copy.attempt
            whole = write_share(folder, copy.share, self._stage, copy.layers, identity, attempt, options.keep)
        except (CheckpointError, OSError) as error:
            self._said(copy.share.iteration, str(error))
        else:
            if whole:
                self._said(copy.share.iteration, None)


# -- the trained weights, one file per layer, in the safetensors format -------------------------

_OTHERS = "openrecycle"
"""The metadata entry for what a state dict has beside tensors, which safetensors files have no place for."""


WEIGHTS_SECONDS = 3600.0
"""How long writing the trained weights is tried on a full disk: somebody may make room, and there may be no copy."""
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


class WeightsError(RuntimeError):
    """The weights could not be written. The text says where, and why. passes: may a later try succeed?"""

    def __init__(self, text: str, *, passes: bool = False) -> None:
        super().__init__(text)
        self.passes = passes


def until_written(
    write: Callable[[], None],
    pause: Callable[[float], object],
    say: Callable[[str], None],
    retry_seconds: float = WEIGHTS_SECONDS,
) -> None:
    """Calls `write`, again and again while it raises a WeightsError that may pass, for `retry_seconds` in all.
    pause: waits for so many seconds between two tries. say: gets a sentence after the first failure. Raises
    WeightsError."""
    wait, waited = 0.5, 0.0
    while True:
        try:
            write()
            return
        except WeightsError as error:
            if not error.passes or waited >= retry_seconds:
                raise
            if not waited:
                say(f"{error}; it is tried again for {retry_seconds / 60:.0f} min")
        pause(wait)
        waited, wait = waited + wait, min(2 * wait, 10.0)


def save_weights(folder: str, layer: int, state: Mapping[str, Any], *, averaged: bool = False) -> None:
    """Writes a layer's state dict, completely or not at all. averaged: it has moving averages in place of the
    parameters, and gets a file of its own. Raises WeightsError."""
    file = weights_file(folder, layer, averaged=averaged)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # On the CPU, so that the file can be read where there is no such device.
        tensors = {name: value.cpu() for name, value in state.items() if isinstance(value, Tensor)}
        others = {n: encode(value, n, tensors) for n, value in state.items() if not isinstance(value, Tensor)}
        write_tensors(partial, tensors, {_OTHERS: json.dumps(others)} if others else None)
        partial.replace(file)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        text = f"the weights of layer {layer} could not be written to {file}: {reason_of(error)}"
        raise WeightsError(text, passes=isinstance(error, OSError) and error.errno in _MAY_PASS) from None


def read_weights(folder: str, layer: int, *, averaged: bool = False) -> dict[str, Any]:
    """Returns the state dict of a layer. Raises OSError where there is none; StateError where it is damaged."""
    tensors, metadata = read_tensors(weights_file(folder, layer, averaged=averaged))
    try:
        others = {name: decode(value, tensors) for name, value in json.loads(metadata.get(_OTHERS, "{}")).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{weights_file(folder, layer)}: {type(error).__name__}: {error}") from None
    within = tuple(f"{name}." for name in others)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(within)} | others


class KeptWeights:
    """Keeps the weights of a folder in memory. Returns them as `read_weights` does, even if the folder is gone."""

    def __init__(self, folder: str, layers: int) -> None:
        """Reads all weights. Raises as `read_weights`."""
        self._plain = [read_weights(folder, layer) for layer in range(layers)]
        self._averaged: dict[int, dict[str, Any]] = {}
        for layer in range(layers):
            with contextlib.suppress(FileNotFoundError):
                self._averaged[layer] = read_weights(folder, layer, averaged=True)

    def __call__(self, layer: int, *, averaged: bool = False) -> dict[str, Any]:
        if averaged and not self._averaged:
            raise FileNotFoundError("there are no averages")
        # A layer without trained parameters has no averages.
        return self._averaged.get(layer, self._plain[layer]) if averaged else self._plain[layer]


Loaded = TypeVar("Loaded", bound=nn.Module | Sequence[nn.Module])


def load_weights(model: Loaded, folder: str | Path, *, averaged: bool = False) -> Loaded:
    """Loads the weights of a job into a model, and returns the model.

    folder: of `--weights`, or ResilientTrainer's `weights=`. model: for a job of `ResilientTrainer.from_transformers`,
    a model of transformers, which can then `save_pretrained`; otherwise the job's layers (or stages, if it was given
    stages) in order, as an nn.Sequential or another sequence. averaged: load the moving averages. Raises InputError if
    the weights are not of this model.
    """
    folder = str(folder)
    layers = sum(1 for _ in itertools.takewhile(Path.is_file, map(partial(weights_file, folder), itertools.count())))
    if not layers:
        raise InputError("folder", folder, f"the folder of --weights, with {weights_file('', 0)}")
    try:
        kept = KeptWeights(folder, layers)
        states = [kept(layer, averaged=averaged) for layer in range(layers)]
    except StateError as error:
        raise InputError("folder", folder, f"weights that can be read ({error})") from None
    except FileNotFoundError:
        raise InputError(
            "averaged", True, "the weights of a job with optimizer=ExponentialMovingAverage(...)"
        ) from None
    parts: Sequence[nn.Module] | nn.Module = model
    if isinstance(parts, Sequence | nn.Sequential | nn.ModuleList):
        if len(parts) != layers:
            raise InputError("model", f"{len(parts)} layers", f"the {layers} whose weights are in {folder}")
        given = list(zip(parts, states, strict=True))
    else:  # one module that has the layers' names; what layers share is in several states, with equal values
        given = [(parts, dict(item for state in states for item in state.items()))]
    for part, state in given:
        try:
            part.load_state_dict(state)
        except RuntimeError as error:
            raise InputError("model", type(part).__name__, f"that of the weights in {folder} ({error})") from None
    return model


def weights_file(folder: str, layer: int, *, averaged: bool = False) -> Path:
    return Path(folder) / f"layer{layer}{'.averaged' if averaged else ''}.safetensors"
