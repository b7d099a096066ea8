"""How numbers are written in sentences that the command line and the console share. ASCII alone."""

from __future__ import annotations


def percent(fraction: float, digits: int = 0) -> str:
    """`7 %`; with a digit `7.4 %`."""
    return f"{100 * fraction:.{digits}f} %"


def milliseconds(value: float, digits: int = 3) -> str:
    """`0 ms`, `0.4 ms`, `283 ms`, `1.08 s`, `2 min 5 s`, `3 h 20 min`, `12 days 4 h`.

    digits: of what is under a minute, where more than three are of use.
    """
    if 0 < value < 9.95 and digits == 3:
        return f"{value:.1f} ms"
    if value < 999.5:
        return f"{value:.0f} ms" if digits == 3 else f"{value:.{digits}g} ms"
    if value < 59_950:
        return f"{value / 1000:.{digits}g} s"
    whole = round(value / 1000)
    if whole < 3600:
        return _both(whole, 60, "min", "s")
    minutes = round(whole / 60)
    if minutes < 48 * 60:
        return _both(minutes, 60, "h", "min")
    return _both(round(minutes / 60), 24, "days", "h")


def _both(value: int, per: int, large: str, small: str) -> str:
    return f"{value // per} {large}" + (f" {value % per} {small}" if value % per else "")
