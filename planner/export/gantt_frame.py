"""Where in the picture the plot lies, and where in it a moment is."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Frame:
    """left, top, width: pixels. end: the tick at the right edge; 0 is at the left."""

    left: float
    top: float
    width: float
    end: int

    @property
    def right(self) -> float:
        return self.left + self.width

    def x(self, tick: float) -> float:
        return self.left + self.width * tick / self.end

    def moved_down_to(self, top: float) -> Frame:
        return replace(self, top=top)
