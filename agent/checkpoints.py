"""Checkpoints of a job and the weights it ends with: what is on disk, how it is written beside the training, and read.

A directory per checkpoint, a directory per stage in it, and in that one per share; read bit by bit.

    DIRECTORY/iteration-0000000010/manifest.json
                                   stage-0/share-0/share.json state.json model.safetensors optimizer.safetensors
                                           share-1/...
                                   stage-1/...

Each living worker of a stage (of one with several ranks: each rank) writes a share of the stage's state:
agent.models.state says which. model.safetensors has parameters and buffers, each as LAYER.NAME;
optimizer.safetensors what optimizer and scheduler keep of tensors. A tensor that is in several shares is in pieces, as
NAME@FIRST-ELEMENT, and state.json says how these are put together. That of share 0 also has what is no tensor. Nothing
in a checkpoint is pickled, so reading one runs nothing, whoever wrote it. Older versions (pickled descriptions, no
layers, tensors in a form of our own, one writer) are refused.

A checkpoint exists wholly or not at all. Each writes its share into a hidden directory, with its checksums last
(share.json); whoever sees that all shares of all stages are there writes the manifest, which has the checksum of every
file and the layers of every share, and renames the directory. Everything is on the disk before the rename. The share of
a worker that dies before is missing, and that checkpoint is given up.

State is per layer, and knows no pipelines: it can be taken up with other workers failed, with another number of
pipelines, and by stages that are cut elsewhere, whoever has written which share. Shares without any of the layers that
are asked for are not read. The number of layers, the model, the optimizer's and scheduler's class and the seed must be
the same; a job whose iterations hold other micro-batches goes on training, but not to the same bits.

To read the state of some layers, on any machine and without a running job:
`load_layers(directory, range(first, after)) -> StageState`, where directory is a checkpoint or a folder of them.

Beside the training: a copy is taken at an iteration's boundary, and a thread writes it (`Checkpointer`). The trained
weights are one safetensors file per layer (`save_weights`).
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from openrecycle.agent.config.options import Checkpoints
from openrecycle.agent.models.layers import Partition, Span, build_layer, partition_of, spans, state_names
from openrecycle.agent.models.state import (
    AVERAGE,
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
from openrecycle.agent.models.workload import Workload
from openrecycle.planner.jobs.errors import InputError, in_a_line
from openrecycle.planner.jobs.words import count, printable
from openrecycle.planner.plans.plan import read_json

if TYPE_CHECKING:
    from openrecycle.agent.stages.optimizer import StageOptimizer

FORMAT, VERSION = "openrecycle-checkpoint", 5
# Asked for before a file is read. A state of 100,000 tensors has a description of 20 MB, a job of 16,384
# stages with 8 shares each a manifest of 50 MB; nothing that is larger is one.
MAX_MANIFEST_BYTES, MAX_STATE_BYTES = 2**26, 2**28

# -- checkpoints --------------------------------------------------------------------------------

_STATE, _MODEL, _OPTIMIZER = FILES = "state.json", "model.safetensors", "optimizer.safetensors"
_WRITTEN = "share.json"
_OF_MODEL = "model."
_NAME = re.compile(r"iteration-([0-9]{10,18})")


Part = Callable[[str, Tensor], Tensor]
"""Of a tensor of a state, and its name, what somebody wants of it: a view."""


def whole_tensor(name: str, tensor: Tensor) -> Tensor:
    """A Part."""
    return tensor


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
class WrittenShare:
    """files: the sha256 of each. layers: some of whose tensors are in them."""

    files: Mapping[str, str]
    layers: frozenset[int]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. iteration: how many iterations are in it, so also the next one.

    shares: of each stage. partition: layers per stage.
    """

    path: Path
    iteration: int
    identity: Identity
    shares: tuple[tuple[WrittenShare, ...], ...]
    partition: Partition

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads the manifest. Raises CheckpointError; and OSError, where it can't be read now, whatever is in it."""
        try:
            doc = _read(path / "manifest.json", MAX_MANIFEST_BYTES)
            if doc["format"] == FORMAT and doc["version"] in range(1, VERSION):
                raise OldCheckpointError(
                    f"{path}: a checkpoint of version {doc['version']}, which is not read any more; resume it with the "
                    f"release that wrote it, or take another --checkpoint folder"
                )
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
        """Reads every file. Raises CheckpointError naming the first that is not what was written; and OSError."""
        for stage, shares in enumerate(self.shares):
            for number in range(len(shares)):
                self._verify(stage, number)

    def load(self, span: Span, part: Part = whole_tensor) -> StageState:
        """The state of some layers, verified. Raises CheckpointError; and OSError."""
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

    def _load(self, stage: int, span: Span, part: Part) -> StageState:
        """What a stage has of these layers, and what is no layer's."""
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
                found[whole] = tensor if mine is tensor else mine.clone()  # which would keep all of it
            if len(self.shares[stage]) > 1:
                # In the order in which one optimizer would keep them.
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
    """Newest first. One whose manifest is gone or damaged counts as missing; shares are not read.

    Raises OldCheckpointError; and OSError, where a manifest can't be read now: an older checkpoint must not pass for
    the newest.
    """
    return _by_state(directory)[0]


def _by_state(directory: Path, tries: int = 5) -> tuple[list[Checkpoint], dict[int, str]]:
    """Those of `whole_checkpoints`, and by iteration why others that were finished are none; the newest first. tries:
    how often the folder is read while checkpoints go from it (a shared file system may list what has gone long ago)."""
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
            except OldCheckpointError:
                raise
            except CheckpointError as error:
                if (path / "manifest.json").exists():  # else it was begun, and never finished
                    others[iteration] = str(error)
                gone = gone or not os.path.lexists(path)
    if gone and tries > 1:  # it has made room for a newer one, which may not have been there yet
        return _by_state(directory, tries - 1)
    return sorted(whole, key=lambda c: c.iteration, reverse=True), dict(sorted(others.items(), reverse=True))


def is_there(directory: Path | None, iteration: int) -> bool:
    """Is there a checkpoint of so many iterations? Without a look into it."""
    with contextlib.suppress(OSError):  # it can't be said now
        return directory is not None and _path(directory, iteration).is_dir()
    return False


_WHICH = ("newest", "newest-intact")


def find(directory: Path, which: str = "newest") -> Checkpoint:
    """which: `newest`; `newest-intact`, which passes over damaged ones; or a checkpoint's name or
    iteration. The one found has been read and verified.

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
    # Reading takes long. Of a job that goes back, workers that live may have finished one meanwhile, for which older
    # ones make room.
    if which == "newest-intact" and any(c.iteration > candidates[0].iteration for c in whole_checkpoints(directory)):
        return find(directory, which)
    if found is None:
        raise CheckpointError(f"{directory}: every checkpoint is damaged; the oldest: {last}")
    return found


def set_aside_later(directory: Path, iteration: int) -> list[str]:
    """Renames checkpoints of a future that a resumed run will not have; returns their new names."""
    names = []
    for later in whole_checkpoints(directory):
        if later.iteration > iteration:
            name = f"superseded-{later.path.name}-{later.path.stat().st_mtime_ns}"
            later.path.rename(directory / name)
            names.append(name)
    return names


def load_layers(directory: Path, span: Span, part: Part = whole_tensor) -> StageState:
    """The state of some layers from a checkpoint, or from the newest one in a folder of checkpoints. part: what is
    kept of each tensor, a view of it.

    `StageOptimizer.load_state` takes it up; its `document["committed"]` is the next iteration.
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
    """Writes a share of a stage, which has so many layers, and makes the checkpoint whole when all shares of all stages
    are there; returns whether.

    attempt: tells apart writers of one iteration that did not know of each other (a generation's number).
    keep: how many whole checkpoints stay. Raises CheckpointError, or OSError.
    """
    iteration = share.iteration
    partial = directory / f".partial-{iteration:010d}-{attempt}"
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
        # From here on another writer may make the checkpoint whole, and this directory be renamed.
        said = {"files": files, "holds": share.layers, "shares": share.count, "layers": layers}
        _write(folder / _WRITTEN, said)
    except (OSError, ValueError, RuntimeError) as error:
        # A full disk gets its space back.
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"{folder}: can't be written: {reason_of(error)}") from None
    return _make_whole(directory, partial, iteration, identity, keep)


def _said(partial: Path, stage: int) -> list[Any] | None:
    """By the writers of a stage's shares; None: not by all yet."""
    out: list[Any] = []
    while not out or len(out) < out[0]["shares"]:
        folder = _share(partial, stage, len(out))
        # A file that was looked for in vain may stay unseen on a file system of the network; not in a listing.
        if not folder.is_dir() or folder / _WRITTEN not in folder.iterdir():
            return None
        out.append(json.loads((folder / _WRITTEN).read_text()))
    return out


def _make_whole(directory: Path, partial: Path, iteration: int, identity: Identity, keep: int) -> bool:
    stages = list[list[Any]]()
    try:
        for stage in range(identity.stages):
            if (said := _said(partial, stage)) is None:
                return False  # whoever writes the last share sees them all
            stages.append(said)
    except FileNotFoundError:
        return False  # another writer has made it whole just now
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": iteration,
        "job": {**vars(identity), "recipe": dict(identity.recipe)},
        "torch": torch.__version__,
        "stages": [[{"files": share["files"], "layers": share["holds"]} for share in said] for said in stages],
        "partition": [said[0]["layers"] for said in stages],
    }
    target = _path(directory, iteration)
    try:
        (partial / ".claimed").touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):
        return False  # another writer saw all shares at the same moment, and was quicker
    try:
        _write(partial / "manifest.json", manifest)
        if target.exists():
            # Written before a death that undid the step after it: the same bits again.
            target.rename(directory / f".replaced-{iteration:010d}-{os.getpid()}")
        partial.rename(target)
    except OSError:
        (partial / ".claimed").unlink(missing_ok=True)  # another writer of this share may be luckier
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
    """What a run that has ended began, and nobody will finish: the shares are of its seed and data, and a new run's
    must not be put together with them."""
    for path in directory.glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def _give_up_older(directory: Path, iteration: int) -> None:
    """Removes checkpoints that some worker has left out, as when its disk was full: they take the room of the next. Not
    those that somebody still writes, and not the newest: a stage may be a checkpoint behind."""
    unfinished: dict[int, list[Path]] = {}
    for path in directory.glob(".partial-*"):
        match = re.match(r"\.partial-(\d{10,})-", path.name)
        if match and int(match[1]) < iteration:
            unfinished.setdefault(int(match[1]), []).append(path)
    for number in sorted(unfinished)[:-1]:
        for path in unfinished[number]:
            with contextlib.suppress(OSError):  # another writer may remove it at this moment
                if all((share / _WRITTEN).exists() for share in path.glob("stage-*/share-*")):
                    (path / ".claimed").touch(exist_ok=False)  # else somebody makes it whole at this moment
                    shutil.rmtree(path, ignore_errors=True)


def _tidy(directory: Path, iteration: int, keep: int) -> None:
    """Removes what is older than the `keep` newest, and what others began and never finished."""
    old = list[Path]()
    with contextlib.suppress(OSError):  # of a manifest that can't be read now: next time
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


def _path(directory: Path, iteration: int) -> Path:
    return directory / f"iteration-{iteration:010d}"


def _share(path: Path, stage: int, number: int) -> Path:
    return path / f"stage-{stage}" / f"share-{number}"


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


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Around what reads: CheckpointError for whatever is not as it was written; OSError passes where it says nothing of
    that."""
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
    """Does it say nothing of what is on the disk, as an I/O error, a stale handle or too many open files? What is gone,
    or no regular file (`opened`), is damage; this may pass."""
    gone = isinstance(error, FileNotFoundError | NotADirectoryError)
    return isinstance(error, OSError) and not gone and error.errno not in (errno.EINVAL, errno.ELOOP, errno.ENXIO)


def _written_share(document: Any) -> WrittenShare:
    """Raises KeyError, TypeError, ValueError or AttributeError."""
    files = {str(name): str(digest) for name, digest in document["files"].items()}
    if _STATE not in files or not files.keys() <= {*FILES}:
        raise ValueError(f"a share of the files {sorted(files)}")
    return WrittenShare(files, frozenset(map(whole_number, document["layers"])))


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
        raise ValueError(f"a job of {values['stages']!r} stages and the seed {values['seed']!r} with {stages} stages")
    if not isinstance(values["workload"], str) or not isinstance(values["recipe"], dict):
        raise ValueError("the job's workload is no text, or its recipe no object")
    return Identity(**values)


# -- checkpoints beside the training ------------------------------------------------------------

TIMEOUT_SECONDS = 30.0
"""How long training waits for the checkpoint before to be written, when the next is to begin."""


class Claim:
    """Of a folder of checkpoints, for the launcher of the one job that writes there, until `close`, or its end. Shares
    of two jobs would be put together, and each job would take the other's for its own.

    Raises BlockingIOError, which names who has it. Where the file system knows no locks, everybody gets one.
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
                fcntl.flock(self._file, fcntl.LOCK_UN)  # whoever was forked meanwhile has it, too
            os.close(self._file)
            self._file = None


def claim(options: Checkpoints) -> Claim | None:
    """Raises InputError where another job writes checkpoints there."""
    if options.folder is None:
        return None
    try:
        return Claim(options.folder)
    except BlockingIOError as held:
        raise options.refuse("directory", f"a folder that no other job writes checkpoints to ({held} does)") from None


IF_ANY = "if-any"
"""What to resume from where the same command begins a job and goes on with it, as schedulers of clusters repeat it."""


@dataclass(frozen=True)
class Origin:
    """Of a job that writes checkpoints. identity: of the job. resumed: the checkpoint it begins with, if any,
    and how many iterations are in it."""

    identity: Identity
    resumed: str | None = None
    resumed_at: int = 0


def prepare(options: Checkpoints, identity: Identity, iterations: int, say: Callable[[str], None]) -> Origin:
    """Finds and verifies what the job begins with. say: gets what the person should know of it.

    Raises InputError, also for a folder with checkpoints that nobody asked to resume from: they
    would be mixed with those of another run.
    """
    directory = options.folder
    assert directory is not None
    resume = options.resume
    put_back_replaced(directory)
    if resume in (None, IF_ANY):
        try:
            there, others = _by_state(directory)
        except CheckpointError as error:
            raise options.refuse("directory", f"a folder without old checkpoints ({error})") from None
        except OSError as error:  # not taken for empty: the job would begin anew
            raise options.refuse("directory", f"a folder that can be read ({in_a_line(error)})") from None
        if there and resume is None:
            raise options.refuse(
                "directory",
                f"a folder without checkpoints, or `checkpoints.resume` newest to go on from iteration "
                f"{there[0].iteration}",
            )
        if not there and others and resume == IF_ANY:
            why = next(iter(others.values()))
            raise options.refuse("resume", f"a whole checkpoint ({why}); to begin anew, name another folder")
        if not there:
            remove_unfinished(directory)
            return Origin(identity)
        resume = "newest-intact"
    try:
        found = find(directory, str(resume))
        others = _by_state(directory)[1]
    except CheckpointError as error:
        if resume not in _WHICH and not re.fullmatch(r"(iteration-)?\d+", str(resume)):
            raise options.refuse("resume", f"{', '.join((*_WHICH, IF_ANY))} or an iteration's number") from None
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
    # The same command once more: its weights may be what is missing.
    done = found.iteration == iterations and options.resume == IF_ANY
    if found.iteration >= iterations and not done:
        raise InputError("iterations", iterations, f"more than the {found.iteration} that {found.path} holds")
    remove_unfinished(directory)
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
    for name, value in identity.recipe.items():
        if name in was.recipe and was.recipe[name] != value:
            say(f"note: {name} was {was.recipe[name]} and is {value} from here")
    return Origin(identity, str(found.path), found.iteration)


def learning_rates(groups: Iterable[Mapping[str, Any]]) -> tuple[float | None, ...]:
    """Of an optimizer's parameter groups, as its script has them: without what a scheduler has made of them since.
    None: one has none."""
    found = (group.get("initial_lr", group.get("lr")) for group in groups)
    return tuple(float(rate) if isinstance(rate, float | int | Tensor) else None for rate in found)


def kept_rate(script: Sequence[float | None], kept: Sequence[float | None]) -> str:
    """What is said where a checkpoint has another learning rate than the script that goes on from it; "": nothing."""
    for mine, theirs in zip(script, kept, strict=True):
        if mine != theirs and mine is not None and theirs is not None:
            return (
                f"the job goes on with the checkpoint's learning rate, {theirs:g}; the script's, {mine:g}, counts for "
                "new jobs alone"
            )
    return ""


@dataclass(frozen=True)
class _Copy:
    attempt: int
    layers: int
    share: Share


class Checkpointer:
    """One process's share. Nothing that goes wrong with the disk ends the training; one that is slower
    than checkpoints are wanted holds it up, for TIMEOUT_SECONDS at most.

    said: called, also from the writing thread, with (iteration, None) when a checkpoint has become
    whole by this worker's share, and with (iteration, sentence) when it has not been written.
    interrupted: asked while waiting; training has something more urgent to do then.
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
        self._copy: _Copy | None = None
        self._taken: tuple[int, float | None, int] | None = None
        self._thread: threading.Thread | None = None

    def boundary(self, optimizer: StageOptimizer, attempt: int, writer: Writer | None, *, last: bool = False) -> None:
        """Between two iterations. writer: as which this process writes; None: it does not. attempt: the generation.
        last: will there be no other?

        The copy taken here is written only once the next step has been taken: until then the last
        one may be overturned, or undone by a death elsewhere.
        """
        committed = optimizer.committed
        # Once of the same values: it may be due, and turn out to be the last.
        values = (*optimizer.version, attempt)
        if values == self._taken:
            return
        self._write_if_final(committed)
        self._copy = None
        if (last or self.due(committed)) and committed > self._origin.resumed_at and writer is not None:
            self._taken = values
            self._copy = _Copy(attempt, self._layers, optimizer.share(writer))

    def rearranged(self, layers: int) -> None:
        """The stage has so many from here on."""
        self._layers = layers

    def due(self, committed: int) -> bool:
        """Is there to be a checkpoint of so many iterations?"""
        return committed % self._options.every == 0

    def finish(self) -> None:
        """Of a job without further iterations, its last step settled: writes what there is, and waits."""
        self._wait(float("inf"))  # nobody trains who could be held up
        self._write_if_final(math.inf)
        self._wait(float("inf"))

    def _write_if_final(self, committed: float) -> None:
        ready, self._copy = self._copy, None
        if ready is None or ready.share.iteration >= committed:
            return
        # All workers wait alike: were one to leave out this checkpoint and the next worker the next
        # one, none would ever be whole.
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
        """For the writing thread; returns whether it is done."""
        until = time.monotonic() + seconds
        while self._thread is not None and self._thread.is_alive():
            if self._interrupted() or time.monotonic() > until:
                return False
            self._thread.join(0.02)
        return True

    def _write(self, copy: _Copy) -> None:
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
"""What a state dict has beside tensors, which files of the format have no place for."""


WEIGHTS_SECONDS = 3600.0
"""For a disk that the trained weights find full: somebody may make room, and nothing else may have them."""
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


class WeightsError(RuntimeError):
    """The weights could not be written; the sentence says where and why. passes: may that be otherwise later?"""

    def __init__(self, text: str, *, passes: bool = False) -> None:
        super().__init__(text)
        self.passes = passes


def until_written(
    write: Callable[[], None],
    pause: Callable[[float], object],
    say: Callable[[str], None],
    patience: float = WEIGHTS_SECONDS,
) -> None:
    """Calls `write`, and again as long as it raises a WeightsError that may pass, with `pause` in between for
    `patience` seconds in all. say: gets a sentence at the first time. Raises WeightsError."""
    wait, waited = 0.5, 0.0
    while True:
        try:
            write()
            return
        except WeightsError as error:
            if not error.passes or waited >= patience:
                raise
            if not waited:
                say(f"{error}; it is tried again for {patience / 60:.0f} min")
        pause(wait)
        waited, wait = waited + wait, min(2 * wait, 10.0)


def save_weights(folder: str, layer: int, state: Mapping[str, Any], *, averaged: bool = False) -> None:
    """Writes a layer's state dict, by its names, wholly or not at all. averaged: with moving averages in place of the
    parameters, to a file of its own. Raises WeightsError."""
    file = weights_file(folder, layer, averaged=averaged)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # On the CPU, so that they can be read where there is no such device.
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
    """The state dict of a layer. Raises OSError where there is none; StateError where it is damaged."""
    tensors, metadata = read_tensors(weights_file(folder, layer, averaged=averaged))
    try:
        others = {name: decode(value, tensors) for name, value in json.loads(metadata.get(_OTHERS, "{}")).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{weights_file(folder, layer)}: {type(error).__name__}: {error}") from None
    within = tuple(f"{name}." for name in others)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(within)} | others


class KeptWeights:
    """What a folder holds, in memory: `read_weights` of it, also when it is gone."""

    def __init__(self, folder: str, layers: int) -> None:
        """Raises as `read_weights`."""
        self._plain = [read_weights(folder, layer) for layer in range(layers)]
        self._averaged: dict[int, dict[str, Any]] = {}
        for layer in range(layers):
            with contextlib.suppress(FileNotFoundError):
                self._averaged[layer] = read_weights(folder, layer, averaged=True)

    def __call__(self, layer: int, *, averaged: bool = False) -> dict[str, Any]:
        if averaged and not self._averaged:
            raise FileNotFoundError("there are no averages")
        # A layer without parameters that are trained has none.
        return self._averaged.get(layer, self._plain[layer]) if averaged else self._plain[layer]


class CheckpointWeights:
    """What a checkpoint holds of the weights: `read_weights` of it. Read at each call. It is of the job of that
    workload, which is asked for then, and of that seed, with so many layers."""

    def __init__(
        self, directory: Path, iteration: int, workload: Callable[[], Workload], layers: int, seed: int
    ) -> None:
        self._directory, self._iteration = directory, iteration
        self._workload, self._layers, self._seed = workload, layers, seed

    def __call__(self, layer: int, *, averaged: bool = False) -> dict[str, Any]:
        """Raises CheckpointError, also where it has given way to newer ones; FileNotFoundError where there are no
        averages."""
        if not 0 <= layer < self._layers:
            raise InputError("layer", layer, f"0 to {self._layers - 1}")
        checkpoint = next((c for c in whole_checkpoints(self._directory) if c.iteration == self._iteration), None)
        if checkpoint is None:
            raise CheckpointError(f"{self._directory}: the checkpoint of iteration {self._iteration} is gone")
        state = checkpoint.load(range(layer, layer + 1))
        values = {name: decode(value, state.tensors) for name, value in state.document["model"].items()}
        if averaged:
            kept = {name: decode(value, state.tensors) for name, value in state.document["state"].items()}
            averages = {name: of[AVERAGE] for name, of in kept.items() if AVERAGE in of}
            if kept and not averages:
                raise FileNotFoundError("there are no averages")
            values |= averages
        built = build_layer(self._workload(), layer, self._layers, self._seed)  # says what is in its state dict
        names = state_names(built)
        return {n: values.get(f"{layer}.{names.get(n, n)}", value) for n, value in built.state_dict().items()}


Loaded = TypeVar("Loaded", bound=nn.Module | Sequence[nn.Module])


def load_weights(model: Loaded, folder: str | Path, *, averaged: bool = False) -> Loaded:
    """The model with the weights of a job, from the folder of `--weights` (or ResilientTrainer's `weights=`).

    model: one of transformers, for a job of `ResilientTrainer.from_transformers`, which can then `save_pretrained`; or
    the job's layers in order, an nn.Sequential or another sequence (of a job given as stages, these). averaged: with
    the moving averages. Raises InputError where they are not this model's.
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
    else:  # whose layers have its names; what they share is in several, alike
        given = [(parts, dict(item for state in states for item in state.items()))]
    for part, state in given:
        try:
            part.load_state_dict(state)
        except RuntimeError as error:
            raise InputError("model", type(part).__name__, f"that of the weights in {folder} ({error})") from None
    return model


def weights_file(folder: str, layer: int, *, averaged: bool = False) -> Path:
    return Path(folder) / f"layer{layer}{'.averaged' if averaged else ''}.safetensors"
