"""Whose connections stay where there is no room for all."""

from __future__ import annotations

import pytest

from openrecycle.app.api.connection import ConnectionLimit


class Visitor:
    def __init__(self, address: str) -> None:
        self.address, self.gone = address, False

    def make_way(self) -> None:
        self.gone = True


class Room:
    """A crowd, and who has come into it."""

    def __init__(self, most: int, share: int | None = None, proxy: str = "") -> None:
        self.limit = ConnectionLimit(most, share=share, exempt=lambda address: address == proxy)
        self.inside: list[Visitor] = []

    def come(self, address: str) -> Visitor | None:
        """None: refused."""
        visitor = Visitor(address)
        # Those that make way are still there for a moment.
        stays = self.limit.enter(visitor, len(self.inside) + 1)
        if stays:
            self.inside.append(visitor)
        else:
            self.limit.leave(visitor)
        for gone in [v for v in self.inside if v.gone]:
            self.inside.remove(gone)
            self.limit.leave(gone)
        return visitor if stays else None


def test_the_one_that_waits_longest_makes_way() -> None:
    room = Room(4, share=4)
    first, second, third, fourth = (room.come("a") for _ in range(4))
    assert first and second and third and fourth
    room.limit.asks(first)
    room.limit.waits(first)  # it was answered: now it has waited least
    newest = room.come("b")
    assert newest is not None
    assert [v.gone for v in (first, second, third, fourth)] == [False, True, False, False]


def test_what_has_been_asked_is_never_cut_off() -> None:
    room = Room(2, share=2)
    busy = [room.come("a"), room.come("a")]
    for visitor in busy:
        assert visitor is not None
        room.limit.asks(visitor)
    assert room.come("b") is None
    assert not any(visitor.gone for visitor in busy if visitor)


def test_an_address_has_its_share_and_makes_room_for_itself() -> None:
    room = Room(100, share=3)
    other = room.come("b")
    flood = [room.come("a") for _ in range(50)]
    assert all(visitor is not None for visitor in flood)
    assert [visitor.gone for visitor in flood if visitor] == [True] * 47 + [False] * 3
    assert other is not None and not other.gone


@pytest.mark.parametrize("proxy", ["a", ""])
def test_a_proxy_has_everybodys_connections(proxy: str) -> None:
    room = Room(100, share=3, proxy=proxy)
    for _ in range(50):
        room.come("a")
    assert len(room.inside) == (50 if proxy else 3)


def test_the_busiest_address_makes_way_for_others() -> None:
    room = Room(10, share=8)
    few = [room.come("b"), room.come("c")]
    for _ in range(8):
        room.come("a")
    assert room.come("d") is not None
    assert not any(visitor.gone for visitor in few if visitor)
    assert len(room.inside) == 10


def test_where_the_busiest_is_busy_those_that_wait_make_way() -> None:
    room = Room(6, share=4)
    for busy in [room.come("a") for _ in range(4)]:
        assert busy is not None
        room.limit.asks(busy)
    idle = [room.come("b"), room.come("c")]
    assert room.come("d") is not None
    assert [visitor.gone for visitor in idle if visitor] == [True, False]


def test_nothing_is_remembered_of_who_has_left() -> None:
    room = Room(10)
    for number in range(500):
        visitor = room.come(f"address {number}")
        assert visitor is not None
        room.limit.leave(visitor)
        room.inside.remove(visitor)
    assert not room.limit.addresses
