"""A wall clock that is wrong by as many seconds as the file named by OPENRECYCLE_TEST_CLOCK says, at any time.

Python imports this by itself at its start where the folder is on PYTHONPATH.
"""

import os
import time
from pathlib import Path

_true = time.time
_file = Path(os.environ["OPENRECYCLE_TEST_CLOCK"])


def _wrong() -> float:
    return _true() + float(_file.read_text() or 0)


time.time = _wrong
