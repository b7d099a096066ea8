"""Who keeps which shard of the optimizer's state: whatever dies, moves or returns, none is without an owner."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.stages.shards import (
    SHARDS_PER_PIPELINE,
    Ownership,
    ShardLostError,
    assign,
    lost_together,
    segments_of,
)
from openrecycle.agent.workers.recovery import from_words, to_words
from openrecycle.planner.jobs.job import Worker
from tests.conftest import examples

PEERS = [Worker(p, 1) for p in range(9)]
sizes_of_shards = st.lists(st.integers(1, 1000), min_size=1, max_size=80)


def sure(ownership: Ownership, peers: list[Worker], sizes: list[int]) -> None:
    """What must be true of every assignment."""
    wanted = min(2, len(peers))
    for k, owners in enumerate(ownership.owners):
        assert len(set(owners)) == len(owners) == wanted and set(owners) <= set(peers)
        assert ownership.primary[k] in owners and ownership.primary[k] in ownership.holders[k]
    for peer in peers:
        kept = {k for k, held in enumerate(ownership.holders) if peer in held}
        owned = (kept - ownership.surplus(peer)) | ownership.lacking(peer)
        assert owned == {k for k, owners in enumerate(ownership.owners) if peer in owners}
    for k, (owners, held) in enumerate(zip(ownership.owners, ownership.holders, strict=True)):
        # Whoever may have a shard's state at a step, and so takes it, has its sums.
        early, late = (ownership.steppers(k, shared=shared) for shared in (False, True))
        assert early[0] == late[0] == ownership.primary[k]
        assert sorted(early) == sorted({*owners, *held})
        assert set(late) == {p for p in peers if p in early and k not in ownership.surplus(p)} and len(late) <= 3


@given(sizes_of_shards, st.integers(1, 9), st.randoms(use_true_random=False))
def test_at_first_all_hold_all_and_keep_their_share(sizes: list[int], n: int, chance: random.Random) -> None:
    peers, everything = PEERS[:n], frozenset(range(len(sizes)))
    hosts = dict.fromkeys(peers, 0)
    ownership = assign(peers, dict.fromkeys(peers, everything), hosts, sizes)
    sure(ownership, peers, sizes)
    assert ownership.complete
    kept = [sum(sizes[k] for k, owners in enumerate(ownership.owners) if p in owners) for p in peers]
    assert max(kept) <= min(2, n) * sum(sizes) / n + sum(sizes) / (8 * n) + 2 * max(sizes)
    shuffled = chance.sample(peers, n)
    assert assign(shuffled, dict.fromkeys(shuffled, everything), hosts, sizes) == ownership


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, int, bool]]]:
    """(peers, hosts, events): who dies, returns or leaves, or that layers move: then so many percent of the shards are
    this stage's from there on. And whether all that lacked something had got it before."""
    n = draw(st.integers(2, 9))
    goes = st.tuples(st.sampled_from(["die", "return", "leave"]), st.integers(0, n - 1), st.booleans())
    moves = st.tuples(st.just("move"), st.integers(1, 100), st.booleans())
    events = draw(st.lists(st.one_of(goes, goes, moves), max_size=24))
    return n, draw(st.integers(1, n)), events


@given(histories(), sizes_of_shards)
@examples(300)
def test_no_history_leaves_a_shard_without_an_owner(
    history: tuple[int, int, list[tuple[str, int, bool]]], every: list[int]
) -> None:
    """As long as whoever dies is not the only one that has got some shard yet."""
    n, machines, events = history
    hosts = {p: i % machines for i, p in enumerate(PEERS)}
    living, sizes = PEERS[:n], every
    held = {p: frozenset(range(len(sizes))) for p in living}
    for kind, number, filled in events:
        ownership = assign(living, held, hosts, sizes)
        sure(ownership, living, sizes)
        if filled:
            held = _owned(ownership, living)
            again = assign(living, held, hosts, sizes)
            assert again.complete and not any(again.surplus(p) for p in living)  # nothing moves for nothing
            if machines > 1 and len({hosts[p] for p in living}) > 1:
                assert all(len({hosts[p] for p in owners}) == 2 for owners in again.owners)
        if kind == "move":
            before, sizes = len(sizes), every[: -(-len(every) * number // 100)]
            # Whoever takes layers gets all of them (agent.workers.relayout).
            held = {p: frozenset(k for k in range(len(sizes)) if k >= before or k in held[p]) for p in living}
            continue
        peer = PEERS[number]
        if kind == "return" and peer not in living:
            living, held = sorted([*living, peer]), held | {peer: frozenset()}
        elif kind == "leave" and peer in living and len(living) > 1:
            held = _owned(assign(living, held, hosts, sizes, [peer]), living)  # it goes once the others have that
            living = [p for p in living if p != peer]
            assert not held.pop(peer)
        elif kind == "die" and peer in living and len(living) > 1:
            alone = any(holders == [peer] for holders in _held_by(held, sizes))
            living = [p for p in living if p != peer]
            held = {p: shards for p, shards in held.items() if p != peer}
            if alone:
                with pytest.raises(ShardLostError):
                    assign(living, held, hosts, sizes)
                return


@given(histories(), sizes_of_shards, st.sets(st.integers(0, 8)))
def test_those_that_leave_take_nothing_with_them(
    history: tuple[int, int, list[tuple[str, int, bool]]], sizes: list[int], going: set[int]
) -> None:
    """However many of a stage leave at once: those that stay have all of it before."""
    n, machines, _ = history
    hosts = {p: i % machines for i, p in enumerate(PEERS)}
    peers, everything = PEERS[:n], frozenset(range(len(sizes)))
    owned = assign(peers, dict.fromkeys(peers, everything), hosts, sizes).owners
    held = {p: frozenset(k for k, owners in enumerate(owned) if p in owners) for p in peers}
    leaving = [p for p in peers if p.pipeline in going]
    staying = [p for p in peers if p not in leaving]
    ownership = assign(peers, held, hosts, sizes, leaving)
    if not staying:
        assert ownership == assign(peers, held, hosts, sizes)
        return
    assert all({*owners} <= {*staying} and len(owners) == min(2, len(staying)) for owners in ownership.owners)
    assert all(ownership.primary[k] in holders for k, holders in enumerate(ownership.holders))
    assert all(k not in ownership.surplus(first) for k, first in enumerate(ownership.primary)), (
        "it steps them until it goes"
    )
    assert ownership.complete == all(not ownership.lacking(p) for p in staying)
    filled = {p: (held[p] | ownership.lacking(p)) - ownership.surplus(p) for p in staying}
    after = assign(staying, filled, hosts, sizes)
    assert after.complete and after.owners == ownership.owners  # nothing moves once more


def test_peers_are_lost_together_with_their_machine_and_on_one_with_their_node() -> None:
    a, b, c = (Worker(p, 0) for p in range(3))
    of_nodes = lost_together({a: (7, 0), b: (7, 1), c: (7, 1)})
    assert of_nodes[a] != of_nodes[b] == of_nodes[c]
    of_machines = lost_together({a: (7, 0), b: (7, 1), c: (8, 2)})
    assert of_machines[a] == of_machines[b] != of_machines[c]
    owners = assign([a, b, c], dict.fromkeys((a, b, c), range(8)), of_machines, [5] * 8).owners
    assert all(c in pair for pair in owners), "two nodes of a machine are no two machines"


def _owned(ownership: Ownership, living: list[Worker]) -> dict[Worker, frozenset[int]]:
    return {p: frozenset(k for k, owners in enumerate(ownership.owners) if p in owners) for p in living}


def _held_by(held: dict[Worker, frozenset[int]], sizes: list[int]) -> list[list[Worker]]:
    return [[p for p, shards in held.items() if k in shards] for k in range(len(sizes))]


def test_one_that_returns_is_given_its_share_and_no_more() -> None:
    sizes, hosts = [100] * 48, dict.fromkeys(PEERS, 0)
    everything = frozenset(range(48))
    held = {PEERS[0]: everything, PEERS[1]: everything, PEERS[2]: frozenset[int]()}
    ownership = assign(PEERS[:3], held, hosts, sizes)
    lacking = [len(ownership.lacking(p)) for p in PEERS[:3]]
    assert lacking[:2] == [0, 0] and 30 <= lacking[2] <= 34
    assert not ownership.complete and len(ownership.surplus(PEERS[0])) == len(ownership.surplus(PEERS[1])) == 16


@given(
    st.lists(st.integers(0, 5_000_000), max_size=12),
    st.sets(st.integers(0, 11)),
    st.lists(st.integers(0, 3), min_size=12, max_size=12).map(sorted),
    st.sampled_from([1 << 15, 1 << 20]),
    st.integers(1, 20),
)
def test_segments_cover_each_parameter_once(
    sizes: list[int], whole: set[int], layers: list[int], align: int, pipelines: int
) -> None:
    segments = segments_of(sizes, layers[: len(sizes)], whole, align, pipelines)
    for place, size in enumerate(sizes):
        own = [s for s in segments if s.parameter == place]
        assert [s.start for s in own] == [0, *(s.end for s in own)][: len(own)] and sum(s.elements for s in own) == size
        assert all(s.start % align == 0 for s in own) and (place not in whole or len(own) <= 1)
    numbers = [s.shard for s in segments]
    assert numbers == sorted(numbers) and set(numbers) == set(range(len(set(numbers))))
    assert len(set(numbers)) <= SHARDS_PER_PIPELINE * pipelines * len(set(layers))
    for layer in set(layers[: len(sizes)]):  # as if it were alone in a stage: where the model is cut does not matter
        places = [p for p in range(len(sizes)) if layers[p] == layer]
        alone = segments_of(
            [sizes[p] for p in places],
            [layer] * len(places),
            {places.index(p) for p in whole & {*places}},
            align,
            pipelines,
        )
        among = [s for s in segments if layers[s.parameter] == layer]
        assert [(s.start, s.end, s.shard) for s in alone] == [(s.start, s.end, s.shard - among[0].shard) for s in among]


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_what_peers_tell_each_other(said: tuple[int, set[int]]) -> None:
    shards, held = said
    row = to_words(held, shards)
    assert from_words(row) == held and all(0 <= word < 2**62 for word in row)
    assert len(row) == len(to_words((), shards))
