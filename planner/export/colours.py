"""The colours of schedules on white, the same as on the console's pages.

The op colours stay apart under full deutan-, protan- and tritanomaly.
"""

from __future__ import annotations

BACKGROUND = "#FFFFFF"
TEXT = "#16222E"
MUTED = "#566573"
LINE = "#DCE3EA"
TRACK = "#E9EDF2"
FAILED = "#D7541F"
OPS = {"F": "#2862B2", "I": "#50BDD6", "W": "#F2AF50", "B": "#666F35", "O": "#652742"}
OPS_TEXT = {"F": "#FFFFFF", "I": "#16222E", "W": "#16222E", "B": "#FFFFFF", "O": "#FFFFFF"}


def blend(over: str, under: str, opacity: float) -> str:
    """`over` at `opacity` on `under`, as one opaque colour: pictures need no transparency then."""
    channels = [(int(over[i : i + 2], 16), int(under[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(o * opacity + u * (1 - opacity)):02X}" for o, u in channels)
