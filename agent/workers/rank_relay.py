"""Several ranks, one worker: its rank 0 hands on to the others what the launcher says, and says to the launcher what
all of them have said. So launchers, nodes and consoles know workers alone.

The ranks live and die together: one that is gone leaves the others nothing to do (its part of every layer went with
it), so they end, and are room for another worker.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from openrecycle.agent.messages import channel

_ONCE_ALL_HAVE: Mapping[str, tuple[str, ...]] = {
    "ready": (),
    "alive": (),
    "held": (),
    "adopted": ("generation",),
    "formed": ("generation", "iteration"),
    "resumed": ("generation", "iteration"),
    "committed": ("generation", "iteration"),
    "rearranged": ("generation", "iteration"),
    "parameters": ("generation", "iteration"),
    "left": ("generation",),
    "shared": ("generation",),
    "done": ("generation",),
}
"""Kinds of message that the worker says when all ranks have said it, and by what fields it is the same one."""
_ONCE: Mapping[str, tuple[str, ...]] = {
    "raised": ("generation", "iteration", "op", "micro_batch"),
    "broken": ("generation", "peer"),
    "state_lost": ("generation",),
    "unmoved": ("generation",),
    "dying": (),
    "error": (),
    "fatal": (),
}
"""Those that it says as soon as one rank has."""


_HASH = 64
"""Letters of the hash of one layer; those of a stage's layers follow each other."""


def _all_hashes(values: Sequence[str]) -> str:
    """Layer by layer, so that where the model is cut does not show."""
    if not all(values):
        return ""
    of_layers = (tuple(v[at : at + _HASH] for v in values) for at in range(0, len(values[0]), _HASH))
    return "".join(hashlib.sha256("".join(parts).encode()).hexdigest() for parts in of_layers)


def _furthest(said: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of what they are at, what has taken the largest share of its limit: a rank that hangs in an op is seen whichever
    it is, though the others have left the iteration."""
    return max(said, key=lambda current: current["seconds"] / current["limit"] if current["limit"] else 0.0)


_MERGED: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "iteration": max,
    "whole": all,
    "settled": all,
    "sha256": _all_hashes,
    "stall_ms": max,
    "at": max,
    "current": _furthest,
    "op_limit": max,
    "pids": lambda parts: [pid for part in parts for pid in part],
    "skipped": lambda parts: sorted({number for part in parts for number in part}),
}
"""What becomes of a field that ranks may fill differently; of others, rank 0's is taken."""


class MergedMessages:
    """What a worker says, from what each of its `size` ranks says. Pure."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
        self._said = set[tuple[Any, ...]]()

    def take(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """What the worker says now that `rank` has said `message`, if anything."""
        kind = message["kind"]
        if kind in _ONCE:
            fields = _ONCE[kind]
            key = (kind, *map(message.get, fields))
            if fields and key in self._said:
                return None
            self._said.add(key)
            return message
        if kind not in _ONCE_ALL_HAVE:
            return message if rank == 0 else None
        key = (kind, *map(message.get, _ONCE_ALL_HAVE[kind]))
        said = self._waiting.setdefault(key, {})
        said[rank] = message  # of those said again before all have: the newest
        if len(said) < self._size:
            return None
        del self._waiting[key]
        if kind == "adopted":
            self._forget(message["generation"])
        in_order = [said[r] for r in sorted(said)]
        return in_order[0] | {
            name: merge([m[name] for m in in_order]) for name, merge in _MERGED.items() if name in in_order[0]
        }

    def _forget(self, generation: int) -> None:
        """What some ranks have said in an earlier one all won't say any more: they have left it."""
        for known in (self._waiting, self._said):
            for key in [k for k in known if k[0] not in ("ready", "alive", "held") and k[1:2] and k[1] < generation]:
                known.pop(key) if isinstance(known, dict) else known.discard(key)


class RankRelay:
    """Of rank 0: to and from its siblings, in threads. siblings: pipes to ranks 1, 2, ..., in order."""

    def __init__(self, siblings: Sequence[Connection]) -> None:
        self._merged, self._lock = MergedMessages(1 + len(siblings)), threading.Lock()
        self._say: Callable[[dict[str, Any]], None]
        self._outboxes = [queue.SimpleQueue[bytes]() for _ in siblings]
        self._siblings = siblings

    def start(self, say: Callable[[dict[str, Any]], None]) -> None:
        """say: takes what the worker says. Before anything is taken."""
        self._say = say
        for rank, (pipe, outbox) in enumerate(zip(self._siblings, self._outboxes, strict=True), start=1):
            channel.follow(outbox.get, pipe.send_bytes, name=f"to-rank-{rank}")
            heard, orphaned = partial(self.take, rank), partial(os._exit, channel.ORPHANED)
            channel.follow(partial(channel.receive, pipe), heard, orphaned, name=f"from-rank-{rank}")

    def hand_on(self, message: bytes) -> None:
        """To all siblings; returns at once."""
        for outbox in self._outboxes:
            outbox.put(message)

    def take(self, rank: int, message: dict[str, Any]) -> None:
        with self._lock:  # what is said in order must arrive in order
            merged = self._merged.take(rank, message)
            if merged is not None:
                self._say(merged)
