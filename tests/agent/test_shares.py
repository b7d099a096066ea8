"""What each of a stage's workers writes of a checkpoint: together all of it, whoever they are, and read by anybody."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from openrecycle.agent.checkpoints import CheckpointError, Identity, find, load_layers, whole_checkpoints, write_share
from openrecycle.agent.models.layers import LayerStack
from openrecycle.agent.models.state import (
    Block,
    Piece,
    Share,
    StageState,
    StateError,
    Writer,
    deal,
    of_layers,
    pack,
    put_together,
    share_of_state,
)
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.shards import assign
from openrecycle.planner.jobs.job import Worker
from tests.conftest import at_length, examples

LAYERS = 3
JOB = Identity("tests:job", LAYERS, 1, 1, 1, 0)
sizes_of_tensors = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8, 16])), max_size=30)


@given(sizes_of_tensors, st.integers(1, 12))
@examples(300)
def test_every_element_is_one_peer_s_and_all_have_as_much(sizes: list[tuple[int, int]], peers: int) -> None:
    dealt = deal(sizes, peers)
    assert len(dealt) == peers and deal(sizes, peers) == dealt
    # In order, peer after peer: so each writes layers that are neighbours, and few tensors are cut.
    runs = [run for peer in dealt for run in peer]
    found: dict[int, list[tuple[int, int]]] = {}
    for tensor, start, end in runs:
        found.setdefault(tensor, []).append((start, end))
    assert list(found) == list(range(len(sizes)))
    for (elements, _), cut in zip(sizes, found.values(), strict=True):
        assert cut[0][0] == 0 and cut[-1][1] == elements and all(a[1] == b[0] for a, b in pairwise(cut))
        assert len(cut) == 1 or all(start < end for start, end in cut)
    assert sum(len(cut) - 1 for cut in found.values()) <= peers - 1
    largest = max((each for _, each in sizes), default=0)
    total = sum(elements * each for elements, each in sizes)
    for peer in dealt:
        mine = sum((end - start) * sizes[tensor][1] for tensor, start, end in peer)
        assert abs(mine - total / peers) < largest + 1


# -- from workers that hold the same ---------------------------------------------------------------


class _Layer(nn.Module):
    """Of all kinds of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.short = nn.Parameter(torch.randn(9).to(torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.number = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(8, 3).t(), requires_grad=False)
        self.register_buffer("pairs", torch.randn(11, dtype=torch.complex128))
        self.register_buffer("seen", torch.tensor(3))


def _optimizer(pipelines: int | None = None, steps: int = 2) -> StageOptimizer:
    torch.manual_seed(0)
    module = LayerStack({layer: _Layer() for layer in range(LAYERS)})
    trained = [p for p in module.parameters() if p.requires_grad]
    made = torch.optim.AdamW(trained, lr=torch.tensor(0.01), foreach=False)
    optimizer = StageOptimizer(module, made, GradientSum(trained, terms=1), pipelines=pipelines)
    for _ in range(steps):
        for parameter in trained:
            optimizer.gradients.add(parameter, torch.randn(parameter.shape))
        optimizer.step()
    return optimizer


def _bits(state: StageState) -> bytes:
    """The header of a state in one order has a checksum of everything."""
    return pack(StageState(state.document, {name: state.tensors[name] for name in sorted(state.tensors)}))[0]


def _written(folder: Path, shares: list[Share], attempt: int = 1) -> None:
    for number, share in enumerate(random.Random(len(shares)).sample(shares, len(shares)), start=1):
        assert write_share(folder, share, 0, LAYERS, JOB, attempt, 3) == (number == len(shares))


@pytest.mark.parametrize("peers", [1, 2, 3, 8, at_length(70)])
def test_whoever_wrote_it_the_same_is_read(peers: int, tmp_path: Path) -> None:
    optimizer = _optimizer()
    shares = [optimizer.share(Writer(peer, peers)) for peer in range(peers)]
    sizes = [sum(t.nbytes for t in share.tensors.values()) for share in shares]
    assert sum(sizes) == sum(t.nbytes for t in optimizer.state().tensors.values())
    assert max(sizes) - min(sizes) <= 48, "bytes of an element, and of the learning rate"
    assert any(share.pieces for share in shares) == (peers not in (1, LAYERS))
    _written(tmp_path, shares)
    whole = optimizer.state()
    for span in (range(3), range(1), range(1, 3)):
        assert _bits(load_layers(tmp_path, span)) == _bits(of_layers(whole, span))
    # Of the layers that were asked for, and no more.
    assert all(int(name.split(".")[1]) == 1 for name in load_layers(tmp_path, range(1, 2)).tensors if name[0] in "mo")
    taken = _optimizer(pipelines=2, steps=0)
    taken.load_state(load_layers(tmp_path, range(3)))
    assert taken.parameters_sha256() == optimizer.parameters_sha256()


def test_what_is_copied_is_as_it_was(tmp_path: Path) -> None:
    """Whatever the next step does, which the writing does not wait for."""
    optimizer = _optimizer()
    before = _bits(optimizer.state())
    shares = [optimizer.share(Writer(peer, 3)) for peer in range(3)]
    with torch.no_grad():
        for tensor in optimizer.state().tensors.values():
            tensor.zero_()
    _written(tmp_path, shares)
    assert _bits(load_layers(tmp_path, range(3))) == before


def test_files_of_other_layers_are_not_read(tmp_path: Path) -> None:
    optimizer = _optimizer()
    _written(tmp_path, [optimizer.share(Writer(peer, 9)) for peer in range(9)])
    checkpoint = find(tmp_path)
    expected = {layer: _bits(load_layers(tmp_path, range(layer, layer + 1))) for layer in range(3)}
    for number, share in enumerate(checkpoint.shares[0]):
        assert share.layers and len(share.layers) < 3
        if number and 2 not in share.layers:
            shutil.rmtree(checkpoint.path / "stage-0" / f"share-{number}")
    assert _bits(load_layers(tmp_path, range(2, 3))) == expected[2]
    with pytest.raises(CheckpointError, match="share-1"):
        load_layers(tmp_path, range(1))


def test_a_share_that_never_comes_leaves_that_checkpoint_out_and_no_other(tmp_path: Path) -> None:
    """One of three peers has died with its copy; the two that are left write the next."""
    optimizer = _optimizer()
    for peer in (0, 2):
        assert not write_share(tmp_path, optimizer.share(Writer(peer, 3)), 0, LAYERS, JOB, 1, 3)
    # Those of two, after the death, are not put together with those of three.
    assert not write_share(tmp_path, optimizer.share(Writer(1, 2)), 0, LAYERS, JOB, 2, 3)
    assert not whole_checkpoints(tmp_path)
    later = _optimizer(steps=3)
    _written(tmp_path, [later.share(Writer(peer, 2)) for peer in range(2)], attempt=2)
    assert [c.iteration for c in whole_checkpoints(tmp_path)] == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-0000000003"]


# -- from workers that share the optimizer's state -------------------------------------------------


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_who_shares_the_optimizer_writes_its_own(peers: int, tmp_path: Path) -> None:
    """And nothing is asked of anybody: what the others keep of it is not here."""
    living = [Worker(p, 0) for p in range(peers)]
    shares: list[Share] = []
    whole = _optimizer()
    for peer, me in enumerate(living):
        optimizer = _optimizer(pipelines=peers)
        shards = optimizer.shards
        assert shards is not None and len(shards.sizes) > 2 * peers
        held = dict.fromkeys(living, shards.shards_held)
        ownership = assign(living, held, dict.fromkeys(living, 0), shards.sizes)
        optimizer.release([n for n, s in enumerate(shards.segments) if me not in ownership.owners[s.shard]])
        primaries = [living.index(ownership.primary[segment.shard]) for segment in shards.segments]
        shares.append(optimizer.share(Writer(peer, peers, primaries=primaries)))
        if peers > 2:
            wrong = [(peer + 1) % peers] * len(primaries)
            with pytest.raises(StateError):
                optimizer.share(Writer((peer + 1) % peers, peers, primaries=wrong))
    _written(tmp_path, shares)
    assert _bits(load_layers(tmp_path, range(3))) == _bits(whole.state())
    assert _bits(load_layers(tmp_path, range(1, 2))) == _bits(of_layers(whole.state(), range(1, 2)))


@pytest.mark.parametrize("peers", [1, 3])
def test_segments_of_a_large_parameter_come_back_in_their_places(peers: int, tmp_path: Path) -> None:
    """That of one writer which follow each other are one piece; one that has all has none."""

    def made(pipelines: int | None) -> StageOptimizer:
        torch.manual_seed(1)
        module = LayerStack({layer: nn.Linear(1000, 700) for layer in range(LAYERS)})
        gradients = GradientSum(module.parameters(), terms=1)
        optimizer = StageOptimizer(module, torch.optim.AdamW(module.parameters()), gradients, pipelines=pipelines)
        for parameter in module.parameters():
            gradients.add(parameter, torch.randn(parameter.shape))
        optimizer.step()
        return optimizer

    optimizer = made(2)
    assert optimizer.shards is not None and len(optimizer.shards.segments) > 20
    primaries = [n // 3 % peers for n in range(len(optimizer.shards.segments))]
    shares = [optimizer.share(Writer(peer, peers, primaries=primaries)) for peer in range(peers)]
    pieces = sum(len(share.pieces) for share in shares)
    assert pieces == 0 if peers == 1 else 0 < pieces < 3 * len(primaries) // 2
    _written(tmp_path, shares)
    assert _bits(load_layers(tmp_path, range(3))) == _bits(made(None).state())


# -- from workers of several ranks -----------------------------------------------------------------


@given(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 4)),
    st.integers(0, 2),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.integers(1, 3),
)
@examples(60)
def test_each_rank_writes_its_part_of_what_is_split(
    shape: tuple[int, int, int], dimension: int, mesh: tuple[int, int], peers: int
) -> None:
    """Of one dimension, and of that rows."""
    ranks = mesh[0] * mesh[1]
    whole = {
        "model.0.w": torch.randn(shape),
        "model.0.b": torch.randn(3),
        "optimizer.0.w.step": torch.tensor(2.0),
        "optimizer.0.w.exp_avg": torch.randn(shape),
        "groups.0.lr": torch.tensor(0.1),
    }
    kept = {"dict": [[key, {"tensor": f"optimizer.0.w.{key}", "on": "cpu"}] for key in ("step", "exp_avg")]}
    group = {"parameters": ["0.w", "0.b"], "options": {"dict": []}}
    document: dict[str, Any] = {
        "committed": 3,
        "optimizer": "A",
        "model": {},
        "state": {"0.w": kept},
        "groups": [group],
    }
    shares = []
    for rank in range(ranks):
        block = [(0, size) for size in shape]
        for cut, (number, of) in ((dimension, (rank % mesh[1], mesh[1])), (0, (rank // mesh[1], mesh[0]))):
            start, end = block[cut]
            each = -(-(end - start) // of)
            block[cut] = min(start + number * each, end), min(start + (number + 1) * each, end)
        split = {} if ranks == 1 else {"0.w": (shape, tuple(block))}
        tensors = dict(whole)
        for name in ("model.0.w", "optimizer.0.w.exp_avg") if ranks > 1 else ():
            tensors[name] = whole[name][tuple(slice(*run) for run in block)]
        state = StageState(document, tensors)
        shares += [share_of_state(state, Writer(peer, peers, rank, ranks), split) for peer in range(peers)]
    with tempfile.TemporaryDirectory() as folder:
        _written(Path(folder), shares)
        found = load_layers(Path(folder), range(LAYERS))
    assert found.document == document and found.tensors.keys() == whole.keys()
    assert all(torch.equal(tensor, found.tensors[name]) for name, tensor in whole.items())


# -- what is put together --------------------------------------------------------------------------


def _piece(start: int, size: int, shape: tuple[int, ...] = (4, 3), block: Block | None = None) -> tuple[Piece, Tensor]:
    return Piece("x", shape, start, block), torch.arange(start, start + size)


def _refused() -> Iterator[list[tuple[Piece, Tensor]]]:
    yield [_piece(0, 11)]
    yield [_piece(0, 13)]
    yield [_piece(0, 6), _piece(7, 5)]
    yield [_piece(0, 7), _piece(6, 6)]
    yield [_piece(0, 6), _piece(0, 6), _piece(6, 6)]
    yield [_piece(0, 6), _piece(6, 6, (3, 4))]
    yield [_piece(0, 6), (Piece("x", (4, 3), 6), torch.zeros(6))]
    yield [(Piece("x", (4, 3), 0), torch.zeros(4, 3))]
    yield [(Piece("x", (), 0), torch.zeros(1))]
    yield [_piece(0, 0, (2**40, 2**40))]
    yield [_piece(0, 8, block=((0, 4), (0, 2)))]
    yield [_piece(0, 8, block=((0, 4), (0, 2))), _piece(0, 8, block=((0, 4), (1, 3)))]
    yield [_piece(0, 6, block=((0, 2), (0, 3))), _piece(0, 4, block=((0, 4), (2, 3)))]
    yield [_piece(0, 4, block=((0, 2), (0, 2))), _piece(0, 2, block=((2, 4), (2, 3)))]


@pytest.mark.parametrize("found", list(_refused()))
def test_pieces_that_are_not_all_of_a_tensor_and_no_more(found: list[tuple[Piece, Tensor]]) -> None:
    with pytest.raises(StateError, match="x:"):
        put_together("x", found)


def test_pieces_in_any_order() -> None:
    expected = torch.arange(12).view(4, 3)
    assert torch.equal(put_together("x", [_piece(7, 5), _piece(0, 4), _piece(4, 3)]), expected)
    for blocks in (
        {((0, 4), (2, 3)): [2, 5, 8, 11], ((0, 4), (0, 2)): [0, 1, 3, 4, 6, 7, 9, 10]},
        {
            ((2, 4), (0, 2)): [6, 7, 9, 10],
            ((0, 2), (2, 3)): [2, 5],
            ((0, 2), (0, 2)): [0, 1, 3, 4],
            ((2, 4), (2, 3)): [8, 11],
        },
    ):
        pieces = [Piece("x", (4, 3), 0, block) for block in blocks]
        assert [Piece.from_json(piece.to_json()) for piece in pieces] == pieces
        parts = [(p, torch.tensor(values)) for p, values in zip(pieces, blocks.values(), strict=True)]
        assert torch.equal(put_together("x", parts), expected)


def test_pieces_of_checkpoints_of_any_age() -> None:
    """One dimension was cut."""
    document = {"of": "x", "shape": [4, 3], "start": 2, "slab": [1, 0, 2]}
    piece = Piece("x", (4, 3), 2, ((0, 4), (0, 2)))
    assert Piece.from_json(document) == piece and piece.to_json() == document
    one_row = Piece("x", (1, 3), 0, ((0, 1), (0, 3)))
    assert one_row.to_json()["slab"] == [0, 0, 1] and Piece.from_json(one_row.to_json()) == one_row


@pytest.mark.parametrize(
    "document",
    [
        {"of": "x", "shape": [2], "start": -1},
        {"of": "x", "shape": [2], "start": True},
        {"of": "x", "shape": [-2], "start": 0},
        {"of": "x", "shape": 2, "start": 0},
        {"of": 5, "shape": [2], "start": 0},
        {"of": "x", "shape": [2], "start": 0, "slab": [1, 0, 1]},
        {"of": "x", "shape": [2], "start": 0, "slab": [0, 1, 3]},
        {"of": "x", "shape": [2], "start": 0, "slab": [0, 2, 1]},
        {"of": "x", "shape": [2], "start": 0, "slab": [0, 2]},
        {"of": "x", "shape": [2], "start": 0, "slab": [0]},
        {"of": "x", "shape": [2, 2], "start": 0, "slab": [1, 0, 1, 0]},
        {"of": "x", "shape": [2, 2], "start": 0, "slab": [1, 0, 1, 2, 0, 1]},
        {"of": "x", "shape": [2]},
        [],
    ],
    ids=str,
)
def test_pieces_that_are_none(document: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Piece.from_json(document)
