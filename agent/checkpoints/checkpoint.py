"""Checkpoints: a directory per checkpoint, a directory per stage in it, and in that one per share; read bit by bit.

    DIRECTORY/iteration-0000000010/manifest.json
                                   stage-0/share-0/share.json state.json model.safetensors optimizer.safetensors
                                           share-1/...
                                   stage-1/...

Each living worker of a stage (of one with several ranks: each rank) writes a share of the stage's state:
agent.models.shares says which. model.safetensors has parameters and buffers, each as LAYER.NAME;
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
"""

from __future__ import annotations

import contextlib
import errno
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
from torch import Tensor

from openrecycle.agent.models.layers import Partition, Span, partition_of, spans
from openrecycle.agent.models.shares import Piece, Share, layer_in, put_together
from openrecycle.agent.models.state import (
    StageState,
    StateError,
    joined,
    mapped_tensors,
    of_layers,
    opened,
    whole_number,
    write_tensors,
)
from openrecycle.planner.jobs.errors import in_a_line
from openrecycle.planner.plans.plan import read_json

FORMAT, VERSION = "openrecycle-checkpoint", 5
# Asked for before a file is read. A state of 100,000 tensors has a description of 20 MB, a job of 16,384
# stages with 8 shares each a manifest of 50 MB; nothing that is larger is one.
MAX_MANIFEST_BYTES, MAX_STATE_BYTES = 2**26, 2**28
_STATE, _MODEL, _OPTIMIZER = FILES = "state.json", "model.safetensors", "optimizer.safetensors"
_WRITTEN = "share.json"
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

    def load(self, span: Span) -> StageState:
        """The state of some layers, verified. Raises CheckpointError; and OSError."""
        if not span or not 0 <= span[0] <= span[-1] < sum(self.partition):
            raise CheckpointError(f"{self.path}: has layers 0 to {sum(self.partition) - 1}, not {span}")
        of_stages = [
            self._load(stage, span)
            for stage, own in enumerate(spans(self.partition))
            if own[0] <= span[-1] and span[0] <= own[-1]
        ]
        if span in spans(self.partition):
            return of_stages[0]
        with _readable(self.path):
            return joined([of_layers(state, span) for state in of_stages])

    def _load(self, stage: int, span: Span) -> StageState:
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
                            found[whole] = tensor.clone()
        with _readable(self.path / f"stage-{stage}"):
            if document.get("committed") != self.iteration:
                raise StateError(f"it is not of iteration {self.iteration}")
            for whole, of_it in pieces.items():
                if whole in found:
                    raise StateError(f"{whole}: there twice")
                found[whole] = put_together(whole, of_it)
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

    Raises CheckpointError; and OSError.
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
    Raises CheckpointError; and OSError.
    """
    if (directory / "manifest.json").exists():
        return Checkpoint.open(directory).load(span)
    candidates = whole_checkpoints(directory)
    if not candidates:
        raise CheckpointError(f"{directory}: no whole checkpoint in it")
    return candidates[0].load(span)


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
    target = directory / f"iteration-{iteration:010d}"
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
            if all((share / _WRITTEN).exists() for share in path.glob("stage-*/share-*")):
                with contextlib.suppress(OSError):
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
