"""Messages that wait for a console, oldest first, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """`put` never blocks and may be called from any thread; `take` and `sent` belong to one that sends.

    limit: messages that wait at most; beyond it the oldest goes for which `droppable` holds, or the
    oldest of all. merge: makes one message of the newest waiting and a new one, or None where they
    stay two. The message that is being sent is never dropped or merged.
    """

    def __init__(
        self,
        limit: int,
        *,
        merge: Callable[[T, T], T | None] = lambda _older, _newer: None,
        droppable: Callable[[T], bool] = lambda _message: True,
    ) -> None:
        self._limit, self._merge, self._droppable = limit, merge, droppable
        self._waiting: deque[T] = deque()
        self._in_hand: T | None = None
        self._lock = threading.Lock()
        self.dropped = 0
        """Messages that went because there were too many."""

    def __len__(self) -> int:
        return len(self._waiting) + (self._in_hand is not None)

    @property
    def all(self) -> list[T]:
        """The oldest first, with the one that is being sent."""
        with self._lock:
            return [*([] if self._in_hand is None else [self._in_hand]), *self._waiting]

    def put(self, message: T) -> None:
        with self._lock:
            merged = self._merge(self._waiting[-1], message) if self._waiting else None
            if merged is not None:
                self._waiting[-1] = merged
                return
            self._waiting.append(message)
            if len(self._waiting) > self._limit:
                index = next((i for i, waiting in enumerate(self._waiting) if self._droppable(waiting)), 0)
                del self._waiting[index]
                self.dropped += 1

    def take(self) -> T | None:
        """The oldest; the same again until `sent`. None when there is none."""
        with self._lock:
            if self._in_hand is None and self._waiting:
                self._in_hand = self._waiting.popleft()
            return self._in_hand

    def sent(self) -> None:
        """The message that was taken is done with."""
        self._in_hand = None
