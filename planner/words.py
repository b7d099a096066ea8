"""How numbers are written in sentences that the command line and the console share. ASCII alone."""

from __future__ import annotations


def percent(fraction: float, digits: int = 0) -> str:
    """`7 %`; with a digit `7.4 %`."""
    return f"{100 * fraction:.{digits}f} %"
