"""A stage's state as plain data, and which part of it each worker copies and writes into a checkpoint.

A state is a JSON document and the tensors that it names. Nothing is pickled. The same form goes to a peer that joins
again (a header, and then one message after the other) and into a checkpoint.

A share is what one of a stage's living workers writes; each finds out its own share without asking its peers. Where all
peers hold the same, the tensors of the layers are put in a row, layer by layer, and cut into as many runs of equal
bytes as there are peers (`deal`). Where the optimizer's state is sharded, the worker that steps a segment writes it,
with its part of the parameter. In a worker with several ranks, each rank writes its own part of what is split over the
ranks, and rank 0 writes the rest. The first share also has what belongs to no layer, and the document that describes
the state. agent.checkpoints writes and reads the shares.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from openrecycle.planner.plans.plan import read_json

# -- a stage's state as plain data --------------------------------------------------------------


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a type, such as `float32`."""
    return str(dtype).removeprefix("torch.")


DTYPES = {
    dtype_name(d): d
    for d in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
        *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2),
    )
}
"""By name, the types that can be sent to a peer and written to a file. A job with others is refused at its start."""


class StateError(RuntimeError):
    """A state is damaged, does not belong to this stage, or holds what can't be sent."""


@dataclass(frozen=True)
class StageState:
    """A stage's state. document: JSON values only; `{"tensor": NAME}` in it stands for `tensors[NAME]`."""

    document: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns `value` as JSON. The tensors in it are put into `tensors`, under names that begin with `name`.

    Raises StateError for anything but numbers, text, None, tensors, and lists, tuples and
    dictionaries of those.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        # Some optimizers keep their step count on the CPU whatever the parameter's device is.
        return {"tensor": name, "on": "cpu" if value.device.type == "cpu" else "device"}
    if isinstance(value, (list, tuple)):
        items = [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(k, name, tensors), encode(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    raise StateError(
        f"{name}: got {type(value).__name__}, expected numbers, text, tensors, and lists and dictionaries of those"
    )


def decode(value: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None, *, own: bool = False) -> Any:
    """Undoes `encode`. Returns copies of the tensors; zeros for a tensor without values (on the device "meta").

    own: return the tensors themselves where they need not move to `device`; nobody else may use them afterwards. Raises
    StateError.
    """
    if isinstance(value, list):
        return [decode(v, tensors, device, own=own) for v in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        if value["tensor"] not in tensors:
            raise StateError(f"{value['tensor']}: missing")
        tensor, where = tensors[value["tensor"]], None if value["on"] == "cpu" else device
        return zeros(tensor, where) if tensor.is_meta else (tensor if own else tensor.clone()).to(where or "cpu")
    if "tuple" in value:
        return tuple(decode(value["tuple"], tensors, device, own=own))
    pairs = value["counter"] if "counter" in value else value["dict"]
    plain = {decode(k, tensors, device): decode(v, tensors, device, own=own) for k, v in pairs}
    return Counter(plain) if "counter" in value else plain


def zeros(like: Tensor, device: torch.device | None = None) -> Tensor:
    """Returns contiguous zeros of this shape and type. On a CPU it takes no time: memory comes when it is written."""
    if (device is not None and device.type != "cpu") or not like.numel():
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    # torch.zeros would write all of it, which takes half a second for a GiB.
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


JOINED_BYTES = 1 << 20
"""Tensors that follow each other are joined into a message of at most so many bytes. A larger one has its own."""


def pack(state: StageState) -> tuple[bytes, list[Tensor]]:
    """Returns (header, messages): a JSON header with a checksum, and the tensors' bytes in order, uint8 on the CPU. A
    large tensor that is contiguous on the CPU is not copied."""
    document = json.dumps(state.document)
    specs = [[n, dtype_name(t.dtype), list(t.shape)] for n, t in state.tensors.items()]
    tensors = list(state.tensors.values())
    messages = []
    for a, b in runs_of([t.nbytes for t in tensors], JOINED_BYTES):
        parts = [_raw(t.detach().cpu()) for t in tensors[a:b]]
        messages.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    header = {"sha256": _checksum(document, messages), "document": document, "tensors": specs}
    return json.dumps(header).encode(), messages


def messages_for(header: bytes) -> list[Tensor]:
    """Returns memory to receive the messages that follow a header. Raises StateError when the header is damaged."""
    try:
        sizes = [dtype.itemsize * prod(shape) for _, dtype, shape in _specs(read_json(header))]
        return [torch.empty(sum(sizes[a:b]), dtype=torch.uint8) for a, b in runs_of(sizes, JOINED_BYTES)]
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StateError(f"unreadable header: {error}") from None


def unpack(header: bytes, messages: Sequence[Tensor]) -> StageState:
    """Undoes `pack`. A tensor with a message of its own is not copied. Raises StateError when anything is damaged."""
    try:
        doc = read_json(header)
        document, specs = doc["document"], _specs(doc)
        intact = doc["sha256"] == _checksum(document, messages)
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"unreadable header: {error}") from None
    sizes = [dtype.itemsize * prod(shape) for _, dtype, shape in specs]
    runs = runs_of(sizes, JOINED_BYTES)
    if not intact or [sum(sizes[a:b]) for a, b in runs] != [m.numel() for m in messages]:
        raise StateError("the checksum does not match")
    tensors = {}
    for (a, b), message in zip(runs, messages, strict=True):
        # Copies start at an aligned address, which a part of a message need not do.
        parts = [message] if b == a + 1 else [part.clone() for part in torch.split(message, sizes[a:b])]
        for (name, dtype, shape), part in zip(specs[a:b], parts, strict=True):
            tensors[name] = part.view(dtype).view(shape)
    return StageState(read_json(document), tensors)


def _specs(header: Any) -> list[tuple[str, torch.dtype, list[int]]]:
    return [(n, DTYPES[d], list(map(whole_number, shape))) for n, d, shape in header["tensors"]]


def runs_of(sizes: Sequence[int], most: int, keys: Sequence[Any] | None = None) -> list[tuple[int, int]]:
    """Cuts entries into runs, and returns where each begins and ends. A run has at most `most` bytes, or one entry.
    With keys, all entries of a run have the same key."""
    out: list[tuple[int, int]] = []
    size = 0
    for i, each in enumerate(sizes):
        if out and size + each <= most and (keys is None or keys[out[-1][0]] == keys[i]):
            out[-1] = (out[-1][0], i + 1)
            size += each
        else:
            out.append((i, i + 1))
            size = each
    return out


def sha256(tensors: Iterable[Tensor]) -> str:
    """Returns the hash of the tensors' bytes, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(memory(tensor.detach().cpu()))
    return digest.hexdigest()


def _checksum(document: str, messages: Iterable[Tensor]) -> str:
    digest = hashlib.sha256(document.encode())
    for message in messages:
        digest.update(memory(message))
    return digest.hexdigest()


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def memory(tensor: Tensor) -> memoryview:
    """Returns a view of the tensor's own memory, without numpy, which the agent does not need."""
    raw = _raw(tensor)
    if not raw.numel():
        return memoryview(b"")
    view = (ctypes.c_ubyte * raw.numel()).from_address(raw.data_ptr())
    view._keep = raw  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(view).cast("B")


# -- states of stages, as agent.stages.optimizer writes them ----------------------------------------

AVERAGE = "average"
"""The key of a parameter's moving average in its optimizer state (agent.stages.optimizer)."""


def of_layers(state: StageState, span: range) -> StageState:
    """Returns the part of a stage's state that belongs to the layers of `span`."""

    def kept(name: str) -> bool:
        return layer_of(name) in span

    document, tensors = dict(state.document), dict[str, Tensor]()
    for part in ("model", "state"):
        document[part] = {name: value for name, value in document[part].items() if kept(name)}
    document["groups"] = [g | {"parameters": list(filter(kept, g["parameters"]))} for g in document["groups"]]
    for name, tensor in state.tensors.items():
        kind, _, rest = name.partition(".")
        if kind not in ("model", "optimizer") or kept(rest):
            tensors[name] = tensor
    return StageState(document, tensors)


def joined(states: Sequence[StageState]) -> StageState:
    """Joins states of several stages, in order and of the same iteration, into one of all their layers. Raises
    StateError."""
    first = states[0]
    document, tensors = {**first.document, "model": {}, "state": {}}, dict[str, Tensor]()
    groups = [{**group, "parameters": []} for group in first.document["groups"]]
    reads: StageState | None = None
    """The first state that says where the data is; all that say it say the same."""
    for state in states:
        doc = state.document
        if any(doc[key] != first.document[key] for key in ("committed", "optimizer")):
            raise StateError("the stages' states are of different iterations or optimizers")
        if len(doc["groups"]) != len(groups):
            raise StateError(f"{len(doc['groups'])} parameter groups in a stage and {len(groups)} in another")
        document["model"].update(doc["model"])
        document["state"].update(doc["state"])
        if reads is None and "data" in doc:
            reads = state
            document["data"] = doc["data"]
        for group, part in zip(groups, doc["groups"], strict=True):
            group["parameters"] += part["parameters"]
        own = {n: t for n, t in state.tensors.items() if state is reads or not n.startswith("data.")}
        tensors.update((name, tensor) for name, tensor in own.items() if name not in tensors)
    return StageState(document | {"groups": groups}, tensors)


# -- tensors in files ------------------------------------------------------------------------------


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a file in the safetensors format. It is on the disk when this returns. Raises OSError."""
    # The format has no complex128, so these are written as pairs of float64.
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    held = {n: t.detach().cpu().resolve_conj().resolve_neg().contiguous() for n, t in tensors.items()}
    held |= {name: torch.view_as_real(held[name]) for name in pairs}
    specs = {
        name: TensorSpec(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in held.items()
    }
    file.touch()
    mode = file.stat().st_mode  # with the umask, which the library ignores
    said = {"format": "pt", **(metadata or {})} | ({_PAIRS: json.dumps(pairs)} if pairs else {})
    failed = None
    try:
        serialize_file(specs, file, said)
    except SafetensorError as error:
        failed = str(error)
    if failed is not None:  # such as a full disk: raised as the system's own error
        number = re.search(r"os error (\d+)", failed)
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(failed)
    file.chmod(mode)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and metadata that `write_tensors` was given. Memory is allocated only once the file's size is
    known to be that of the tensors. Raises StateError and OSError.
    """
    tensors, metadata = mapped_tensors(file)
    # Copies, since a mapped file may change while it is used.
    return {name: tensor.clone() for name, tensor in tensors.items()}, metadata


def mapped_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """As `read_tensors`, but the tensors stay in the file and take no memory. They must be copied before use."""
    opened(file).close()
    try:
        with safe_open(file, framework="pt") as data:
            metadata = data.metadata() or {}
            tensors = {name: data.get_tensor(name) for name in data.keys()}  # noqa: SIM118 -- no mapping
        pairs = json.loads(metadata.pop(_PAIRS, "[]"))
        tensors |= {name: torch.view_as_complex(tensors[name].clone()) for name in pairs}
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StateError(f"{file.name}: {error}") from None
    return tensors, metadata


_PAIRS = "complex128"


def opened(file: Path) -> BufferedReader:
    """Opens a file to read. Raises OSError unless it is a regular file: a pipe or device may block, or never end."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def whole_number(value: Any) -> int:
    """Returns `value`. Raises ValueError unless it is a whole number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"got {value!r}, expected a whole number of at least 0")
    return value


def layer_of(name: str) -> int:
    """Returns the layer number that a parameter's name begins with."""
    return int(name.partition(".")[0])


# -- what each of a stage's living workers copies and writes of its state -----------------------


Block = tuple[tuple[int, int], ...]
"""A block of a tensor: start and end in each of its dimensions."""


def shape_of(block: Block) -> tuple[int, ...]:
    return tuple(end - start for start, end in block)


Split = Mapping[str, tuple[Sequence[int], Block]]
"""Parameters that are split over the ranks of a worker, by name: the shape of the whole, and this rank's block."""


class ElementRun(NamedTuple):
    """Elements `start` to `end` of a tensor. tensor: its index among others."""

    tensor: int
    start: int
    end: int


def deal(sizes: Sequence[tuple[int, int]], peers: int) -> list[list[ElementRun]]:
    """Deals out the elements of tensors to peers, and returns what each peer gets. sizes: for each tensor, the number
    of its elements, and the bytes of one. Every element goes to one peer; the peers' bytes are equal up to less than
    two elements; and at most peers - 1 tensors are cut. A tensor without elements goes to some peer, too."""
    total = sum(elements * each for elements, each in sizes)
    out: list[list[ElementRun]] = [[] for _ in range(peers)]
    peer = done = 0
    for tensor, (elements, each) in enumerate(sizes):
        start = 0
        while start < elements:
            last = peer == peers - 1
            fits = elements - start if last else min(elements - start, ((peer + 1) * total // peers - done) // each)
            if fits:
                out[peer].append(ElementRun(tensor, start, start + fits))
                start, done = start + fits, done + fits * each
            else:
                peer += 1
        if not elements:
            out[peer].append(ElementRun(tensor, 0, 0))
    return out


@dataclass(frozen=True)
class Writer:
    """Says which share a process writes: that of the `peer`-th of `peers`, and of one of its ranks. All peers agree on
    this. primaries: where the optimizer's state is sharded, which peer writes each segment."""

    peer: int = 0
    peers: int = 1
    rank: int = 0
    ranks: int = 1
    primaries: Sequence[int] | None = None

    @property
    def number(self) -> int:
        return self.peer * self.ranks + self.rank

    @property
    def count(self) -> int:
        return self.peers * self.ranks


@dataclass(frozen=True)
class Piece:
    """Describes a part of a tensor that is in several shares: the elements from `start` on, of the whole tensor, or of
    a block of it. shape: the shape of the whole."""

    of: str
    shape: tuple[int, ...]
    start: int
    block: Block | None = None

    def to_json(self) -> dict[str, Any]:
        slabs: dict[str, Any] = {}
        if self.block is not None:  # for each dimension that is cut: its number, the start and the end
            cut = [(d, *run) for d, run in enumerate(self.block) if run != (0, self.shape[d])]
            # If none is cut, the first is written, in the form from before two dimensions could be cut.
            cut = cut or [(0, *run) for run in self.block[:1]]
            slabs = {"slab": [number for slab in cut for number in slab]}
        return {"of": self.of, "shape": list(self.shape), "start": self.start, **slabs}

    @classmethod
    def from_json(cls, document: Any) -> Piece:
        """Undoes `to_json`. Raises KeyError, TypeError or ValueError."""
        shape, slabs = tuple(map(whole_number, document["shape"])), document.get("slab")
        block: Block | None = None
        if slabs is not None:
            numbers, runs = iter(map(whole_number, slabs)), dict[int, tuple[int, int]]()
            for dimension in numbers:
                runs[dimension] = start, end = next(numbers, 1), next(numbers, 0)
                if not dimension < len(shape) or not start <= end <= shape[dimension]:
                    raise ValueError(f"{slabs} of shape {shape}")
            block = tuple(runs.get(dimension, (0, size)) for dimension, size in enumerate(shape))
        if not isinstance(document["of"], str):
            raise ValueError(f"{document['of']!r} is no name")
        return cls(document["of"], shape, whole_number(document["start"]), block)


@dataclass
class Share:
    """What one process writes. tensors: copies, by name; a part of a tensor is a flat one, which `pieces` describes.
    document: in the first share, that of the whole stage, but without the entries of `state` that are in other shares;
    in these, such entries alone."""

    number: int
    count: int
    iteration: int
    document: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        """Returns the layers that some of these tensors belong to."""
        names = {piece.of if (piece := self.pieces.get(name)) else name for name in self.tensors}
        return sorted({layer for name in names if (layer := layer_in(name)) is not None})

    def put(
        self, name: str, parts: Sequence[Tensor], shape: Sequence[int], start: int = 0, block: Block | None = None
    ) -> None:
        """Copies `parts`, consecutive elements from `start` on of a tensor of this shape, or of a block of it."""
        size = sum(part.numel() for part in parts)
        if size == prod(shape) and (block is None or not size):
            self.tensors[name] = _copy(parts).reshape(tuple(shape))
        else:
            self.pieces[f"{name}@{start}"] = Piece(name, tuple(shape), start, block)
            self.tensors[f"{name}@{start}"] = _copy(parts).reshape(-1)


def layer_in(name: str) -> int | None:
    """Returns the layer that a tensor of a stage's state belongs to; None if it belongs to no layer."""
    kind, _, rest = name.partition(".")
    return layer_of(rest) if kind in ("model", "optimizer") else None


def share_of_state(
    state: StageState,
    writer: Writer,
    split: Split | None = None,
    left_out: Collection[str] = (),
) -> Share:
    """Copies this writer's share of a state that all peers hold. left_out: names of tensors that are not in it."""
    share, split, leave = Share(writer.number, writer.count, int(state.document["committed"])), split or {}, {*left_out}
    if writer.number == 0:
        share.document = dict(state.document)
    parts = {f"model.{name}": name for name in split}
    for name in split.keys() & state.document["state"].keys() if split else ():
        parts |= dict.fromkeys(_tensors_in(state.document["state"][name]), name)
    of_layers = list[tuple[int, str, Tensor, Sequence[int], Block | None]]()
    for name, tensor in state.tensors.items():
        if name in leave:
            continue
        shape: Sequence[int] = tensor.shape
        block: Block | None = None
        # Only what has one value per element of the parameter's part is split, and not a count, say.
        if (owner := parts.get(name)) is not None and tuple(tensor.shape) == shape_of(split[owner][1]):
            shape, block = split[owner]
        if writer.rank and (block is None or not tensor.numel()):
            continue
        if (layer := layer_in(name)) is not None:
            of_layers.append((layer, name, tensor, shape, block))
        elif writer.number == 0:
            share.put(name, [tensor], tensor.shape)
    of_layers.sort(key=lambda entry: entry[0])
    dealt = deal([(tensor.numel(), tensor.element_size()) for _, _, tensor, _, _ in of_layers], writer.peers)
    for place, start, end in dealt[writer.peer]:
        _, name, tensor, shape, block = of_layers[place]
        mine = tensor if end - start == tensor.numel() else tensor.detach().reshape(-1)[start:end]
        share.put(name, [mine], shape, start, block)
    return share


def _tensors_in(document: Any) -> list[str]:
    """Returns the names of the tensors in an encoded value."""
    if isinstance(document, list):
        return [name for value in document for name in _tensors_in(value)]
    if not isinstance(document, dict):
        return []
    return [document["tensor"]] if "tensor" in document else _tensors_in(list(document.values()))


def _copy(parts: Sequence[Tensor]) -> Tensor:
    """Copies tensors to the CPU, one after the other into one."""
    if len(parts) == 1:
        return parts[0].detach().to("cpu", copy=True)
    out = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)
    for part, place in zip(parts, torch.split(out, [part.numel() for part in parts]), strict=True):
        place.copy_(part.detach().reshape(-1))
    return out


# -- put together again ----------------------------------------------------------------------------


def put_together(name: str, found: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    """Puts a tensor together from its pieces. Memory is allocated only once these are known to be all of it, and no
    more. Raises StateError."""
    first, values = found[0]
    shape, blocks = first.shape, dict[Block, list[tuple[int, Tensor]]]()
    everything = tuple((0, size) for size in shape)
    for piece, tensor in found:
        if not shape or piece.shape != shape or tensor.dtype != values.dtype or tensor.dim() != 1:
            raise StateError(f"{name}: its pieces are not of one tensor")
        blocks.setdefault(piece.block or everything, []).append((piece.start, tensor))
    # Empty pieces first, so that one which ends where it begins comes before the one that begins there.
    for block, parts in blocks.items():
        parts.sort(key=lambda entry: (entry[0], entry[1].numel()))
        _check_line(name, [(start, start + t.numel()) for start, t in parts], prod(shape_of(block)))
    lines = [sorted({block[dimension] for block in blocks}) for dimension in range(len(shape))]
    for line, size in zip(lines, shape, strict=True):
        _check_line(name, line, size)
    if len(blocks) != prod(map(len, lines)):
        raise StateError(f"{name}: its pieces are not of one tensor")
    out = torch.empty(shape, dtype=values.dtype)
    for block, parts in blocks.items():
        place = out[tuple(slice(*run) for run in block)]
        whole = place if place.is_contiguous() else torch.empty(place.shape, dtype=out.dtype)
        for start, tensor in parts:
            whole.view(-1)[start : start + tensor.numel()].copy_(tensor)
        if whole is not place:
            place.copy_(whole)
    return out


def _check_line(name: str, runs: Sequence[tuple[int, int]], length: int) -> None:
    """Raises StateError unless the runs follow each other from 0 to `length`."""
    end = 0
    for start, after in runs:
        if start != end:
            raise StateError(f"{name}: elements from {min(start, end)} on are missing, or there twice")
        end = after
    if end != length:
        raise StateError(f"{name}: {end} elements or rows, expected {length}")
