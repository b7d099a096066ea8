"""A run's record on its way to what may be slow or broken: a callback, a terminal, a disk. No torch here.

The launcher's loop judges its workers by when it hears them, so nothing that may take long runs in it: each target
has a thread and a bounded queue of its own. Beyond the queue's limit the oldest waiting iterations are left out, and
their number is said; failures, checkpoints, warnings and the final line are not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrecycle.agent.messages.outbox import Outbox

log = logging.getLogger("openrecycle")

Line = dict[str, Any]
LIMIT = 10_000
"""Lines that wait for one target."""
SLOW = 1_000
"""So many waiting lines are worth a word."""
RETRY_SECONDS = 2.0
HURRIED_SECONDS = 2.0
"""How long a target is waited for that hangs while somebody wants the program to end."""


class Delivery:
    """Calls `target` with each line, in order, in a thread of its own; a call of this never blocks and never raises.

    what: the target, in words. warn: called, from a thread, with a sentence when the target is far behind. Where
    lines had to be left out, `target` gets a `warning` line in their place.
    """

    def __init__(
        self, target: Callable[[Line], None], what: str, warn: Callable[[str], None], *, limit: int = LIMIT
    ) -> None:
        self._target, self._what, self._warn, self._limit = target, what, warn, limit
        self._lines: Outbox[Line] = Outbox(limit, droppable=lambda line: "loss" in line)
        self._there, self._closing = threading.Event(), threading.Event()
        self._said_slow = False
        self._thread = threading.Thread(target=self._deliver, name=what, daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Lines that `target` did not get."""
        return self._lines.dropped

    def __call__(self, line: Line) -> None:
        self._lines.put(line)
        self._there.set()
        if not self._said_slow and len(self._lines) >= min(SLOW, self._limit):
            self._said_slow = True
            text = (
                f"{self._what} is {len(self._lines)} lines behind; training goes on, "
                f"and beyond {self._limit} the oldest iterations are left out"
            )
            # What takes the warning may be as slow.
            threading.Thread(target=self._warn, args=(text,), daemon=True).start()

    def close(self, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Waits until `target` has had every line, or somebody is in a hurry; returns whether it has."""
        self._closing.set()
        self._there.set()
        left = HURRIED_SECONDS
        while self._thread.is_alive() and left > 0:
            self._thread.join(0.1)
            left -= 0.1 if hurried() else 0.0
        return not self._thread.is_alive()

    def _deliver(self) -> None:
        said = 0
        while True:
            while (line := self._lines.take()) is not None:
                if (dropped := self._lines.dropped) > said:
                    text = f"{dropped - said} iterations are missing here: {self._what} was {self._limit} lines behind"
                    self._hand({"warning": text})
                    said = dropped
                self._hand(line)
                self._lines.sent()
            if self._closing.is_set() and not len(self._lines):
                return
            self._there.wait()
            self._there.clear()

    def _hand(self, line: Line) -> None:
        try:
            self._target(line)
        except Exception:  # it must go on, whatever the target is
            log.exception("%s failed", self._what)


class RecordFile:
    """Writes lines to a JSON-lines file, each at once; runs in a Delivery's thread.

    A disk that is full loses nothing: what can't be written is said through `say` at once, waits in memory, and is
    tried again until it can be written or the job is over. Raises OSError where the file can't be opened.

    It is a new file where that is possible: a launcher that led before, and doesn't know yet that it leads no more,
    goes on with the one that it opened.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(PermissionError):  # of the folder
                path.unlink()
        self._file = path.open("wb", buffering=0)
        self._over = threading.Event()
        self.lost = 0
        """Lines that could not be written before the job was over."""

    def __call__(self, line: Line) -> None:
        if self.lost:
            self.lost += 1  # it ends where it ends, with no gap
            return
        rest, failing = (json.dumps(line) + "\n").encode(), False
        while rest:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                if not failing:
                    failing = True
                    self._say(
                        f"warning: the record {self._path} can't be written ({error.strerror}); "
                        "training goes on, and writing is tried again"
                    )
                if self._over.wait(RETRY_SECONDS):
                    self.lost = 1
                    return
        if failing:
            self._say(f"the record {self._path} is being written again, and lacks nothing")

    def end(self) -> None:
        """The job is over: what can't be written now is given up."""
        self._over.set()
