"""What the console's process asks of the system and of Python, for thousands of agents at once."""

from __future__ import annotations

import contextlib
import resource
import sys

# How long a thread that computes (a page's script, a large view) keeps the others waiting: the event loop
# waits so long twice or more per request. Python's own 5 ms would be most of a heartbeat's latency.
SWITCH_SECONDS = 0.0003


def prepare() -> None:
    """For the whole process; once, before anything is served."""
    sys.setswitchinterval(SWITCH_SECONDS)
    # A worker has a connection or two, and many systems allow a process 1,024 files unless it asks for more.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
