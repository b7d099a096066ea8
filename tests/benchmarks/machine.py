"""What every benchmark prints first: the machine, and how busy it is with other things; and how much of
it a job of several processes has used."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def describe() -> str:
    """One line: cores, load average, Python and system."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, load {load}, Python {platform.python_version()}, {platform.system()}"


def children(pid: int) -> list[int]:
    """Of a process, those that run; Linux only."""
    found = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for some in found for child in some]


def processor_seconds(pid: int) -> float:
    """User and system time so far of a process and of all its descendants that still run; Linux only."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            # The name, in brackets, may hold spaces. Of what follows: state, parent, ..., user, system.
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            used[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(used.get(member, 0.0) for member in family)
