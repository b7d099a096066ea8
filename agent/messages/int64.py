"""What workers tell each other in rows of whole numbers of 64 bits, which are gathered, or summed with zeros."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_BITS = 62
"""Of a word: it stays above zero."""


def to_words(members: Collection[int], of: int) -> tuple[int, ...]:
    """Which numbers below `of` these are; equally many words whichever they are."""
    out = [0] * -(-of // _BITS)
    for number in members:
        out[number // _BITS] |= 1 << number % _BITS
    return tuple(out)


def from_words(words: Sequence[int]) -> frozenset[int]:
    return frozenset(i * _BITS + bit for i, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1)
