"""The folder of this process's temporary files, which is removed when it ends; of one that was killed, by the next
process that makes such a folder.

Whether the owner lives is told by a lock on the folder, which the system lets go when a process ends, however that
happens: pids come again, and mean nothing in another container with the same folder for temporary files.
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

# No longer than multiprocessing's own name: the path of a socket in the folder may have 107 bytes.
_PREFIX, _MARK = "orec-", ".openrecycle"
_NAME = re.compile(_PREFIX + "[a-z0-9_]{8}")
_MAKING = threading.Lock()
_own: tuple[int, str] | None = None
"""The process that made it, and the folder: a process that is forked makes another."""


def scratch() -> str:
    """The folder; the same one each time. Raises OSError."""
    global _own
    with _MAKING:
        if _own is None or _own[0] != os.getpid() or not Path(_own[1]).is_dir():
            _remove_left()
            _own = os.getpid(), _make()
        return _own[1]


def keep_sockets_here() -> None:
    """Has multiprocessing put what it has in files into this folder, where it has none yet. Raises OSError."""
    about = process.current_process()._config  # type: ignore[attr-defined]
    if about.get("tempdir") is None:
        about["tempdir"] = scratch()


def _make() -> str:
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    # When multiprocessing would remove its own: after the children have ended.
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody takes it for left behind, either
        _lock(folder)
        Path(folder, _MARK).touch()  # from now on it is not locked if its owner is gone
    return folder


def _lock(folder: str | Path) -> int:
    """Returns what holds the lock for as long as it is open: here, until the process ends."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise
    return number


def _remove_left() -> None:
    """The folders of this user's processes that have ended without removing them."""
    found = list[Path]()
    with contextlib.suppress(OSError):  # one that can be written need not be one that can be read
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
