"""A checkpoint that somebody else made: refused in a sentence, within a moment, whatever it says or is made of."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from openrecycle.agent.checkpoints.checkpoint import CheckpointError, Identity, find, whole_checkpoints, write_part
from openrecycle.agent.state import StageState, StateError, encode, read_tensors
from tests.golden import golden

STATE = StageState({"committed": 3, "x": encode({"a": (1, 2)}, "x", {})}, {"p": torch.arange(6.0).view(2, 3)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_part(tmp_path, STATE, 0, 1, Identity("w", 1, 1, 1, 1, 0, {}), 1, 3)
    assert find(tmp_path).load(range(1)).document == STATE.document
    return tmp_path


def part(folder: Path) -> Path:
    return next(folder.glob("iteration-*")) / "stage-0"


def sign(folder: Path) -> None:
    """Writes the manifest for what is there now."""
    where = part(folder).parent / "manifest.json"
    manifest = json.loads(where.read_text())
    files = ("state.json", "tensors.bin")
    manifest["stages"][0] = {n: hashlib.sha256((part(folder) / n).read_bytes()).hexdigest() for n in files}
    where.write_text(json.dumps(manifest))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["manifest.json", "stage-0/state.json", "stage-0/tensors.bin"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "link to nothing", "itself"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str) -> None:
    """A pipe that nobody writes to never says a word, and a device never ends."""
    file = part(folder).parent / name
    file.unlink()
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(file),
        "endless": lambda: file.symlink_to("/dev/zero"),
        "folder": file.mkdir,
        "link to nothing": lambda: file.symlink_to("nothing"),
        "itself": lambda: file.symlink_to(file.name),
    }
    make[kind]()
    if name == "manifest.json":
        assert whole_checkpoints(folder) == []
    with pytest.raises(CheckpointError):
        find(folder).load(range(1))


TENSORS: list[Any] = [
    [["p", "float32", [0, 2**47, 2**47]]],
    [["p", "float64", [2**32, 2**32, 0]]],
    [["p", "float32", [-1]]],
    [["p", "float32", [1.0]]],
    [["p", ["float32"], [1]]],
    [[["p"], "float32", [1]]],
    [["p", "pickle", [1]]],
    5,
]


@pytest.mark.parametrize("tensors", TENSORS, ids=repr)
def test_sizes_that_are_none(folder: Path, tensors: Any) -> None:
    (part(folder) / "state.json").write_text(json.dumps({"document": STATE.document, "tensors": tensors}))
    (part(folder) / "tensors.bin").write_bytes(b"")
    sign(folder)
    with pytest.raises(CheckpointError):
        find(folder).load(range(1))


def test_a_sparse_file_takes_no_memory(folder: Path) -> None:
    """A terabyte that was never written: its size is not that of the tensors."""
    with (part(folder) / "tensors.bin").open("r+b") as data:
        data.truncate(1 << 40)
    description = json.loads((part(folder) / "state.json").read_text())
    with pytest.raises(StateError, match=golden("bytes-and-its-description-says")):
        read_tensors(description, part(folder) / "tensors.bin")


DOCUMENTS = {
    "deep": '{"document":' + "[" * 5000 + "]" * 5000 + ',"tensors":[]}',
    "twice": '{"document":{},"document":{},"tensors":[]}',
    "digits": '{"document":{"a":' + "9" * 5000 + '},"tensors":[]}',
    "no object": '{"document":[],"tensors":[]}',
    "nothing": "",
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_that_are_none(folder: Path, name: str) -> None:
    (part(folder) / "state.json").write_text(DOCUMENTS[name])
    (part(folder) / "tensors.bin").write_bytes(b"")
    sign(folder)
    with pytest.raises(CheckpointError):
        find(folder).load(range(1))


@pytest.mark.parametrize("name", ["iteration-0000000009\n", "iteration-" + 10 * "\u0661"])
def test_odd_names_are_no_checkpoints(folder: Path, name: str) -> None:
    part(folder).parent.rename(folder / name)
    assert whole_checkpoints(folder) == []
