"""What workers have written lately, in memory: the newest lines of each."""

from __future__ import annotations

import threading
from collections import deque

from openrecycle.agent.protocol import LogLine, LogLines
from openrecycle.app.jobs.live_job import LiveJob

LINES = 200
# Of all workers of a job together; of large jobs each keeps less.
ALL_LINES = 50_000
FEWEST = 20


class LogBook:
    """Of all jobs. Lines of a process that has ended stay until its successor has as many. Thread-safe."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], deque[LogLine]] = {}
        self._lock = threading.Lock()

    def take(self, job: LiveJob, message: LogLines) -> None:
        """Raises ConsoleError for a worker that the job does not have, or a process that does not count."""
        member = job.sender(message.worker, message.incarnation)
        most = max(FEWEST, min(LINES, ALL_LINES // len(job.state.members)))
        with self._lock:
            lines = self._of.setdefault((job.job_id, member.name), deque(maxlen=most))
            if message.skipped and message.lines:
                lines.append(LogLine(at=message.lines[0].at, text=f"… {message.skipped:,} lines left out …"))
            lines.extend(message.lines)

    def lines(self, job_id: str, worker: str) -> tuple[LogLine, ...]:
        """Oldest first."""
        with self._lock:
            return tuple(self._of.get((job_id, worker), ()))
