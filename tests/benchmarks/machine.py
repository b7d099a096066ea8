"""What every benchmark prints first: the machine, and how busy it is with other things."""

from __future__ import annotations

import os
import platform


def describe() -> str:
    """One line: cores, load average, Python and system."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, load {load}, Python {platform.python_version()}, {platform.system()}"
