"""The newest lines that a worker process has written, kept for the console. No torch here."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from pydantic import ValidationError

from openrecycle.agent.messages.protocol import LATEST, LOG_LINE, LOG_LINES, LogLine


class LogTail:
    """Holds what has not been taken yet, up to a bound; the oldest lines give way. Thread-safe."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._added = 0
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Whole lines; those that are too long are cut."""
        at = min(max(time.time(), 0.0), LATEST)  # a clock may be set to anything
        for line in text.splitlines():
            if line := line.rstrip():
                clean = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line)
                with self._lock:
                    self._lines.append(LogLine(at=at, text=clean[:LOG_LINE]))
                    self._added += 1

    def extend(self, lines: Iterable[tuple[float, str]], skipped: int) -> None:
        """Lines that another tail had taken, with their POSIX seconds, and how many it had dropped before them."""
        with self._lock:
            for at, text in lines:
                self._added += 1
                with suppress(ValidationError):  # no console takes it
                    self._lines.append(LogLine(at=at, text=text))
            self._added += skipped

    def take(self) -> tuple[tuple[LogLine, ...], int]:
        """The lines since the last call, and how many before them were dropped."""
        with self._lock:
            lines, skipped = tuple(self._lines), self._added - len(self._lines)
            self._lines.clear()
            self._added = 0
        return lines, skipped


class Followed:
    """A text stream, such as sys.stdout, whose lines go into a LogTail as well."""

    def __init__(self, stream: TextIO, tail: LogTail) -> None:
        self._stream, self._tail, self._part = stream, tail, ""

    def write(self, text: str) -> int:
        self._part += text
        if "\n" in self._part:
            whole, _, self._part = self._part.rpartition("\n")
            self._tail.add(whole)
        elif len(self._part) > LOG_LINE:
            self._tail.add(self._part)
            self._part = ""
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
