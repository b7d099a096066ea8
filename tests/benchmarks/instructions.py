"""Instructions that threads execute, as the processor counts them: other programs on the machine do not
change their number, as they change every time. Linux on x86-64, where the kernel lets this user count.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

_PERF_EVENT_OPEN = 298
_ATTRIBUTES = 128
_HARDWARE, _INSTRUCTIONS = 0, 1
_WITHOUT_KERNEL = 1 << 5


def counter(thread: int = 0) -> Callable[[], float] | None:
    """Millions of instructions in user space since now, of one thread (0: the caller's).

    None where they can't be counted.
    """
    attributes = bytearray(_ATTRIBUTES)
    struct.pack_into("<IIQ", attributes, 0, _HARDWARE, _ATTRIBUTES, _INSTRUCTIONS)
    struct.pack_into("<Q", attributes, 40, _WITHOUT_KERNEL)
    library = ctypes.CDLL(None, use_errno=True)
    file = library.syscall(_PERF_EVENT_OPEN, (ctypes.c_char * _ATTRIBUTES).from_buffer(attributes), thread, -1, -1, 0)
    if file < 0 or os.uname().machine != "x86_64":
        return None
    return lambda: float(struct.unpack("<q", os.read(file, 8))[0]) / 1e6


def process_counter(pid: int) -> Callable[[], float]:
    """The same of all threads that the process has now."""
    counters = [counter(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]
    return lambda: sum(read() for read in counters if read is not None)
