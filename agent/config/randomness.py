"""Randomness that belongs to the micro-batch, never to the worker that happens to run it."""

from __future__ import annotations

import hashlib


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else.

    Typical parts: purpose, job seed, iteration, pipeline, micro-batch, stage. Equal parts give the
    equal seed in every process, on every machine.
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
