"""Reading a file that somebody names on the command line: it may be anything."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# A plan takes about 100 bytes an op; what describes a job, a trace or a token, far less.
PLAN_BYTES, OTHER_BYTES = 1 << 30, 1 << 26


def read_whole(path: str | Path, *, most: int = OTHER_BYTES) -> bytes:
    """All that is in it, `most` bytes at most. A pipe and a terminal are read to their end; no other device is, as it
    has none. Raises OSError."""
    with Path(path).open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not file.isatty()):
            raise OSError(errno.EINVAL, "it is a device")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return data
