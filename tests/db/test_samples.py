from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.db.heartbeats import (
    MAX_SAMPLES,
    METRICS,
    BlockError,
    Samples,
    from_beats,
    joined,
    pack,
    rolled_up,
    unpack,
)
from tests.conftest import examples
from tests.golden import golden

T = 1_700_000_040  # a whole minute

values = st.one_of(st.just(float("nan")), st.floats(0, 1e9, width=32))
beats = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.floats(T, T + 7200),
        st.integers(0, 2**53),
        st.integers(0, 4),
        *(values for _ in METRICS),
    ),
    max_size=40,
)


def rows_of(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.float64).reshape(-1, 4 + len(METRICS))


def beat(
    worker: int, at: float, forward: float = float("nan"), iteration: int = 1, phase: int = 3
) -> tuple[float, ...]:
    return (worker, at, iteration, phase, forward, *[float("nan")] * 6)


def equal(a: Samples, b: Samples) -> bool:
    return all(
        np.array_equal(x := getattr(a, f.name), getattr(b, f.name), equal_nan=x.dtype.kind == "f")
        for f in fields(Samples)
    )


@examples(60)
@given(beats)
def test_a_block_gives_back_what_was_packed(rows: list[tuple[float, ...]]) -> None:
    samples = rolled_up(from_beats(rows_of(*rows)), 1)
    assert equal(unpack(pack(samples)), samples)


@examples(60)
@given(beats, st.integers(1, 39))
def test_hours_out_of_minutes_are_hours_out_of_beats(rows: list[tuple[float, ...]], cut: int) -> None:
    """However the beats were cut into parts; their own order decides what came last."""
    rows = sorted(rows, key=lambda row: row[1])
    all_at_once = rolled_up(from_beats(rows_of(*rows)), 3600)
    parts = [rolled_up(rolled_up(from_beats(rows_of(*part)), 1), 60) for part in (rows[:cut], rows[cut:])]
    by_minutes = rolled_up(joined(parts), 3600)
    for name in ("worker", "at", "beats", "iteration", "phase", "counts", "low", "high"):
        exact = getattr(all_at_once, name)
        assert np.array_equal(exact, getattr(by_minutes, name), equal_nan=exact.dtype.kind == "f"), name
    # Each level rounds its means to 12 bits.
    assert np.allclose(all_at_once.mean, by_minutes.mean, rtol=1e-3, equal_nan=True)
    assert np.all((by_minutes.low <= by_minutes.mean) | (by_minutes.counts == 0))
    assert np.all((by_minutes.mean <= by_minutes.high) | (by_minutes.counts == 0))


def test_a_minute_has_the_least_the_mean_and_the_most() -> None:
    made = rolled_up(from_beats(rows_of(beat(5, T, 10), beat(5, T + 1, 40, 7, 2), beat(5, T + 2), beat(6, T, 3))), 60)
    assert made.worker.tolist() == [5, 6] and made.at.tolist() == [T, T]
    assert made.beats.tolist() == [3, 1] and made.counts[:, 0].tolist() == [2, 1]
    assert (made.low[0, 0], made.mean[0, 0], made.high[0, 0]) == (10, 25, 40)
    assert (made.iteration.tolist(), made.phase.tolist()) == ([1, 1], [3, 3])
    assert np.isnan(made.mean[0, 1]) and made.counts[0, 1] == 0


def test_values_are_kept_to_twelve_bits() -> None:
    wanted = np.geomspace(1e-3, 1e9, 500)
    got = from_beats(rows_of(*(beat(0, T + i, v) for i, v in enumerate(wanted)))).mean[:, 0]
    assert np.max(np.abs(got / wanted - 1)) <= 2**-13 * 1.01


def block(n: int, body: bytes) -> bytes:
    return struct.pack("<BI", 1, n) + zlib.compress(body)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ends early"),
        (struct.pack("<BI", 9, 0), "format 9, expected 1"),
        (block(MAX_SAMPLES + 1, b""), golden("expected-at-most-200-000")),
        (block(1, b"\0" * 10), golden("has-not-the-173-bytes-that")),
        (block(1, b"\0" * 50_000_000), golden("has-not-the-173-bytes")),
        (block(0, b"") + b"more", golden("has-not-the-0-bytes")),
        (struct.pack("<BI", 1, 1) + b"not deflated", "damaged"),
        (block(1, b"\0" * 173), "can't be"),
    ],
)
def test_bytes_that_are_no_block(data: bytes, words: str) -> None:
    with pytest.raises(BlockError, match=words):
        unpack(data)


@examples(100)
@given(st.binary(max_size=400), st.integers(0, 300))
def test_damage_is_noticed_or_harmless(noise: bytes, place: int) -> None:
    good = pack(rolled_up(from_beats(rows_of(*(beat(i % 3, T + i, i) for i in range(20)))), 1))
    for data in (noise, good[:place] + noise + good[place + len(noise) :]):
        with suppress(BlockError):
            unpack(data)
