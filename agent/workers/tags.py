"""The tags of messages between workers that belong to no op. They lie beyond the tags of ops
(agent.transport.communicator), and each kind has a range of its own."""

from __future__ import annotations

SHARDS = 2**26
TIED = 2**27
LAYERS = 2**28
VALIDATION = 2**29
STATE = 2**30
_ITERATIONS = 4
"""How many iterations' messages have different tags: those of the iteration before may still be under way, since steps
are staggered."""


def in_iteration(kind: int, iteration: int, number: int = 0, numbers: int = 1) -> int:
    """Returns the tag of a message of an iteration. number: which one it is of `numbers` messages of its kind."""
    return kind + iteration % _ITERATIONS * numbers + number
