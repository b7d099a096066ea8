"""The folder of this process's temporary files. It is removed when the process ends. If the process was killed, the
next process that makes such a folder removes it.

A lock on the folder shows whether its owner lives: the system releases it when a process ends, however that happens. A
pid would not do, since pids are used again, and mean nothing in another container with the same temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
from multiprocessing import process, util
from pathlib import Path

# The name is no longer than multiprocessing's own: the path of a socket in the folder may have at most 107 bytes.
_PREFIX, _MARK = "orec-", ".openrecycle"
_NAME = re.compile(_PREFIX + "[a-z0-9_]{8}")
_MAKING = threading.Lock()
_own: tuple[int, str] | None = None
"""The process that made the folder, and the folder. A forked process has another pid, so it makes its own."""


def scratch() -> str:
    """Return the folder, the same one each time. Raises OSError."""
    global _own
    with _MAKING:
        if _own is None or _own[0] != os.getpid() or not Path(_own[1]).is_dir():
            _remove_left()
            _own = os.getpid(), _make()
        return _own[1]


def keep_sockets_here() -> None:
    """Make multiprocessing put its files into this folder, unless it already has one. Raises OSError."""
    about = process.current_process()._config  # type: ignore[attr-defined]
    if about.get("tempdir") is None:
        about["tempdir"] = scratch()


def _make() -> str:
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    # Runs when multiprocessing would remove its own folder: after the children have ended.
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
    with contextlib.suppress(OSError):  # a file system without locks: then no process will take it for left behind
        _lock(folder)
        Path(folder, _MARK).touch()  # from now on, a folder without a lock has lost its owner
    return folder


def _lock(folder: str | Path) -> int:
    """Return the descriptor that holds the lock as long as it is open; callers that keep it hold it until they end."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise
    return number


def _remove_left() -> None:
    """Remove the folders of this user's processes that ended without removing them."""
    found = list[Path]()
    with contextlib.suppress(OSError):  # a folder that can be written may still not be readable
        found = [path for path in Path(tempfile.gettempdir()).iterdir() if _NAME.fullmatch(path.name)]
    for folder in found:
        with contextlib.suppress(OSError):  # its owner lives, or it is somebody else's
            if folder.lstat().st_uid != os.getuid() or not (folder / _MARK).exists():
                continue
            lock = _lock(folder)
            try:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
