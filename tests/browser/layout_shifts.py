"""How far a page's parts have been moved by something other than the viewer: Chromium's own measure of it."""

from __future__ import annotations

from dataclasses import dataclass

from playwright.sync_api import Page

# Of 1: as much as a line of text that is moved by its own height at the bottom of a page.
MOST = 0.02
_NOTE = """
window.shifts = [];
new PerformanceObserver(seen => {
  for (const shift of seen.getEntries()) if (!shift.hadRecentInput) window.shifts.push({by: shift.value,
    what: shift.sources.map(({node, previousRect: from, currentRect: to}) => {
      const one = node?.nodeType === 1 ? node : node?.parentElement;
      const key = one?.closest("[class*=st-key]")?.className.match(/st-key-[\\w-]+/)?.[0];
      const place = box => `${box.width} × ${box.height} at ${box.x}, ${box.y}`;
      return `${key ?? ""} ${one?.className ?? "gone"}: ${place(from)}, now ${place(to)}`;
    })});
}).observe({type: "layout-shift", buffered: true});
"""
# A page that waits for its parts shows what it has after some seconds. Busy machines are not what is measured.
_PATIENT = (
    "document.addEventListener('DOMContentLoaded', () => document.head.append(Object.assign("
    "document.createElement('style'), {textContent: '.stApp * { animation: none !important }'})))"
)


@dataclass(frozen=True)
class Shifts:
    """Of what `page` opens from now on."""

    page: Page

    def __post_init__(self) -> None:
        self.page.add_init_script(_NOTE + _PATIENT)

    def forget(self) -> None:
        """Counts from here on."""
        self.page.evaluate("window.shifts = []")

    def assert_few(self, when: str) -> None:
        # What has been drawn is noted with the frame after it.
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shifts = self.page.evaluate("window.shifts")
        told = "\n".join(f"{shift['by']:.4f}: {'; '.join(shift['what'])}" for shift in shifts)
        assert sum(shift["by"] for shift in shifts) < MOST, f"{when}, parts of {self.page.url} were moved:\n{told}"
