"""The tags of messages between workers that are no op's: beyond those of ops (agent.transport.communicator), each kind
with room for its own."""

from __future__ import annotations

SHARDS = 2**26
TIED = 2**27
LAYERS = 2**28
VALIDATION = 2**29
STATE = 2**30
_ITERATIONS = 4
"""Of which messages are told apart: those of the one before may still be under way, since steps are staggered."""


def in_iteration(kind: int, iteration: int, number: int = 0, numbers: int = 1) -> int:
    """number: of the message, of so many of its kind."""
    return kind + iteration % _ITERATIONS * numbers + number
