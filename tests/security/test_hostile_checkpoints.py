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

from openrecycle.agent.checkpoints import CheckpointError, Identity, find, whole_checkpoints, write_share
from openrecycle.agent.models.state import StageState, StateError, Writer, encode, read_tensors, share_of_state

STATE = StageState({"committed": 3, "x": encode({"a": (1, 2)}, "x", {})}, {"model.0.p": torch.arange(6.0).view(2, 3)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_share(tmp_path, share_of_state(STATE, Writer()), 0, 1, Identity("w", 1, 1, 1, 1, 0), 1, 3)
    assert find(tmp_path).load(range(1)).document == STATE.document
    return tmp_path


def part(folder: Path) -> Path:
    return next(folder.glob("iteration-*")) / "stage-0" / "share-0"


def sign(folder: Path) -> None:
    """Writes the manifest for what is there now."""
    where = part(folder).parents[1] / "manifest.json"
    manifest = json.loads(where.read_text())
    files = ("state.json", "model.safetensors")
    digests = {n: hashlib.sha256((part(folder) / n).read_bytes()).hexdigest() for n in files}
    manifest["stages"][0][0]["files"] = digests
    where.write_text(json.dumps(manifest))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["manifest.json", "stage-0/share-0/state.json", "stage-0/share-0/model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "link to nothing", "itself"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str) -> None:
    """A pipe that nobody writes to never says a word, and a device never ends."""
    file = part(folder).parents[1] / name
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


HEADERS: list[Any] = [
    {"p": {"dtype": "F64", "shape": [2**32, 2**32, 0], "data_offsets": [0, 2**62]}},
    {"p": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}},
    {"p": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
    {"p": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
    {"p": {"dtype": "pickle", "shape": [1], "data_offsets": [0, 4]}},
    {"p": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
    {"__metadata__": {"complex128": '["none"]'}},
    {"__metadata__": {"complex128": "{"}},
    5,
]


@pytest.mark.parametrize("header", HEADERS, ids=repr)
def test_headers_that_are_none(folder: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (part(folder) / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    sign(folder)
    with pytest.raises(CheckpointError):
        find(folder).load(range(1))
        raise AssertionError("it was read")


def test_a_sparse_file_takes_no_memory(folder: Path) -> None:
    """A terabyte that was never written: its size is not that of the tensors."""
    with (part(folder) / "model.safetensors").open("r+b") as data:
        data.truncate(1 << 40)
    with pytest.raises(StateError, match=r"model\.safetensors"):
        read_tensors(part(folder) / "model.safetensors")


@pytest.mark.parametrize("length", [2**27, 2**63 - 1, 2**64 - 1])
def test_a_header_without_end_takes_no_memory(folder: Path, length: int) -> None:
    with (part(folder) / "model.safetensors").open("wb") as data:
        data.write(length.to_bytes(8, "little"))
        data.truncate(1 << 40)
    with pytest.raises(StateError, match=r"model\.safetensors"):
        read_tensors(part(folder) / "model.safetensors")


DOCUMENTS = {
    "deep": '{"a":' + "[" * 5000 + "]" * 5000 + "}",
    "twice": '{"a":{},"a":{}}',
    "digits": '{"a":' + "9" * 5000 + "}",
    "no object": "[]",
    "nothing": "",
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_that_are_none(folder: Path, name: str) -> None:
    (part(folder) / "state.json").write_text(DOCUMENTS[name])
    sign(folder)
    with pytest.raises(CheckpointError):
        find(folder).load(range(1))


@pytest.mark.parametrize("name", ["iteration-0000000009\n", "iteration-" + 10 * "\u0661"])
def test_odd_names_are_no_checkpoints(folder: Path, name: str) -> None:
    part(folder).parents[1].rename(folder / name)
    assert whole_checkpoints(folder) == []
