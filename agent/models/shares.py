"""What each of a stage's living workers copies and writes of its state: a share, without a word to its peers.

Where all peers hold the same, what belongs to layers is laid out in one line, layer by layer, and cut into as many runs
of equal bytes as there are peers (`deal`): each knows its own. Where the optimizer's state is sharded, who steps a
segment writes it, with its part of the parameter. Of workers of several ranks, each rank writes its own part of what is
split over them, and rank 0 the rest. What is no layer's, and the description of it all, is in the first share.
agent.checkpoints writes and reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrecycle.agent.models.state import StageState, StateError, layer_of, whole_number


class Slab(NamedTuple):
    """Of a tensor, what is from `start` to `end` in one of its dimensions, and everything in the others."""

    dimension: int
    start: int
    end: int

    def shape_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[: self.dimension], self.end - self.start, *shape[self.dimension + 1 :])


Split = Mapping[str, tuple[Sequence[int], Slab]]
"""Of parameters that are split over the ranks of a worker, by name: the shape of the whole, and this rank's part."""


class Run(NamedTuple):
    """Elements `start` to `end` of a tensor, by its place among others."""

    tensor: int
    start: int
    end: int


def deal(sizes: Sequence[tuple[int, int]], peers: int) -> list[list[Run]]:
    """sizes: of each tensor, how many elements it has, and the bytes of one. Returns what each peer gets: every element
    is one peer's, all have equally many bytes up to less than two elements, and no more than peers - 1 tensors are
    cut. One without elements is somebody's, too."""
    total = sum(elements * each for elements, each in sizes)
    out: list[list[Run]] = [[] for _ in range(peers)]
    peer = done = 0
    for tensor, (elements, each) in enumerate(sizes):
        start = 0
        while start < elements:
            last = peer == peers - 1
            fits = elements - start if last else min(elements - start, ((peer + 1) * total // peers - done) // each)
            if fits:
                out[peer].append(Run(tensor, start, start + fits))
                start, done = start + fits, done + fits * each
            else:
                peer += 1
        if not elements:
            out[peer].append(Run(tensor, 0, 0))
    return out


@dataclass(frozen=True)
class Writer:
    """Who writes a share: the `peer`-th of `peers`, and of a worker with several ranks, one of them. All peers agree on
    it. primaries: of each segment, where the optimizer's state is sharded, which peer writes it."""

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
    """Of a tensor that is in several shares: the elements from `start` on, of all of it or of a slab. shape: that of
    all of it."""

    of: str
    shape: tuple[int, ...]
    start: int
    slab: Slab | None = None

    def to_json(self) -> dict[str, Any]:
        slab = {} if self.slab is None else {"slab": list(self.slab)}
        return {"of": self.of, "shape": list(self.shape), "start": self.start, **slab}

    @classmethod
    def from_json(cls, document: Any) -> Piece:
        """Raises KeyError, TypeError or ValueError."""
        shape, slab = tuple(map(whole_number, document["shape"])), document.get("slab")
        if slab is not None:
            slab = Slab(*map(whole_number, slab))
            if not slab.dimension < len(shape) or not slab.start <= slab.end <= shape[slab.dimension]:
                raise ValueError(f"{slab} of shape {shape}")
        if not isinstance(document["of"], str):
            raise ValueError(f"{document['of']!r} is no name")
        return cls(document["of"], shape, whole_number(document["start"]), slab)


@dataclass
class Share:
    """tensors: copies, by name; one that is in several shares is here as a piece, of one dimension. document: of the
    first share, of the whole stage, but for what others' `state` has."""

    number: int
    count: int
    iteration: int
    document: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        """Some of whose tensors are here."""
        names = {piece.of if (piece := self.pieces.get(name)) else name for name in self.tensors}
        return sorted({layer for name in names if (layer := layer_in(name)) is not None})

    def put(
        self, name: str, parts: Sequence[Tensor], shape: Sequence[int], start: int = 0, slab: Slab | None = None
    ) -> None:
        """Takes a copy of elements that follow each other, of a tensor of that shape."""
        size = sum(part.numel() for part in parts)
        if size == prod(shape) and (slab is None or not size):
            self.tensors[name] = _copy(parts).reshape(tuple(shape))
        else:
            self.pieces[f"{name}@{start}"] = Piece(name, tuple(shape), start, slab)
            self.tensors[f"{name}@{start}"] = _copy(parts).reshape(-1)


def layer_in(name: str) -> int | None:
    """The layer that a tensor of a stage's state belongs to."""
    kind, _, rest = name.partition(".")
    return layer_of(rest) if kind in ("model", "optimizer") else None


def share_of_state(
    state: StageState,
    writer: Writer,
    split: Split | None = None,
    left_out: Collection[str] = (),
) -> Share:
    """A copy, of what all peers hold. left_out: names of tensors that are not in it."""
    share, split, leave = Share(writer.number, writer.count, int(state.document["committed"])), split or {}, {*left_out}
    if writer.number == 0:
        share.document = dict(state.document)
    parts = {f"model.{name}": name for name in split}
    for name in split.keys() & state.document["state"].keys() if split else ():
        parts |= dict.fromkeys(_tensors_in(state.document["state"][name]), name)
    of_layers = list[tuple[int, str, Tensor, Sequence[int], Slab | None]]()
    for name, tensor in state.tensors.items():
        if name in leave:
            continue
        shape: Sequence[int] = tensor.shape
        slab: Slab | None = None
        if (owner := parts.get(name)) is not None and _is_part(tensor, *split[owner]):
            shape, slab = split[owner]
        if writer.rank and (slab is None or not tensor.numel()):
            continue
        if (layer := layer_in(name)) is not None:
            of_layers.append((layer, name, tensor, shape, slab))
        elif writer.number == 0:
            share.put(name, [tensor], tensor.shape)
    of_layers.sort(key=lambda entry: entry[0])
    dealt = deal([(tensor.numel(), tensor.element_size()) for _, _, tensor, _, _ in of_layers], writer.peers)
    for place, start, end in dealt[writer.peer]:
        _, name, tensor, shape, slab = of_layers[place]
        mine = tensor if end - start == tensor.numel() else tensor.detach().reshape(-1)[start:end]
        share.put(name, [mine], shape, start, slab)
    return share


def _tensors_in(document: Any) -> list[str]:
    """Names of those that an encoded value has."""
    if isinstance(document, list):
        return [name for value in document for name in _tensors_in(value)]
    if not isinstance(document, dict):
        return []
    return [document["tensor"]] if "tensor" in document else _tensors_in(list(document.values()))


def _is_part(tensor: Tensor, shape: Sequence[int], slab: Slab) -> bool:
    """Is it of each element of a parameter's part? Not a count, say."""
    return tuple(tensor.shape) == slab.shape_in(shape)


def _copy(parts: Sequence[Tensor]) -> Tensor:
    """On the CPU, one after the other."""
    if len(parts) == 1:
        return parts[0].detach().to("cpu", copy=True)
    out = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)
    for part, place in zip(parts, torch.split(out, [part.numel() for part in parts]), strict=True):
        place.copy_(part.detach().reshape(-1))
    return out


# -- put together again ----------------------------------------------------------------------------


def put_together(name: str, found: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    """A tensor from its pieces. Nothing is allocated before they are known to be all of it, and no more. Raises
    StateError."""
    first, values = found[0]
    shape, slabs = first.shape, dict[Slab, list[tuple[int, Tensor]]]()
    everything = Slab(0, 0, shape[0]) if shape else None
    for piece, tensor in found:
        slab = piece.slab or everything
        if slab is None or piece.shape != shape or tensor.dtype != values.dtype or tensor.dim() != 1:
            raise StateError(f"{name}: its pieces are not of one tensor")
        slabs.setdefault(slab, []).append((piece.start, tensor))
    # The empty ones first: what ends where it begins comes before what begins there.
    in_order = sorted(slabs)
    for slab in in_order:
        slabs[slab].sort(key=lambda entry: (entry[0], entry[1].numel()))
        _check_line(name, [(start, start + t.numel()) for start, t in slabs[slab]], prod(slab.shape_in(shape)))
    if len({slab.dimension for slab in in_order}) > 1:
        raise StateError(f"{name}: its pieces are not of one tensor")
    _check_line(name, [(slab.start, slab.end) for slab in in_order], shape[in_order[0].dimension])
    out = torch.empty(shape, dtype=values.dtype)
    for slab, parts in slabs.items():
        place = out.narrow(slab.dimension, slab.start, slab.end - slab.start)
        whole = place if place.is_contiguous() else torch.empty(place.shape, dtype=out.dtype)
        for start, tensor in parts:
            whole.view(-1)[start : start + tensor.numel()].copy_(tensor)
        if whole is not place:
            place.copy_(whole)
    return out


def _check_line(name: str, runs: Sequence[tuple[int, int]], length: int) -> None:
    """Do they follow each other from 0 to the length?"""
    end = 0
    for start, after in runs:
        if start != end:
            raise StateError(f"{name}: elements from {min(start, end)} on are missing, or there twice")
        end = after
    if end != length:
        raise StateError(f"{name}: {end} elements or rows, expected {length}")
