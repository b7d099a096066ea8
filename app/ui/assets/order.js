// What has not been seen yet is shown from the top down: a row in which something is still to come, and what is below it,
// would be moved by that. It is marked, and console.css keeps it out of sight.
{
  // These come late, and have their height from the beginning.
  const LATE = ["-chart", "-table", "-gantt", "-map", "-progress-throughput", "-progress-loss", "st-key-gantt", "st-key-detail",
    "st-key-stages", "-overview-pad", "-simulation-time", "-simulation-mtbf", "-planner-migrations", "-planner-workers"]
    .map(part => `[class*="${part}"]`).join();
  // A row that is there before what is in it has not been seen: it grows.
  const DRAWN = '[data-testid="stElementContainer"]:not(:has(> [data-testid="stEmpty"]))';
  const seen = new WeakSet();
  let waits = null;
  const look = () => {
    const block = document.querySelector(".stMainBlockContainer > .stVerticalBlock");
    if (!block) return;
    let next = null;
    for (const box of block.querySelectorAll('[data-testid="stSkeleton"]')) {
      if (box.closest(LATE)) continue;
      let row = box;
      while (row.parentElement !== block) row = row.parentElement;
      if (!seen.has(row)) { next = row; break; }
    }
    if (next !== waits) {
      waits?.removeAttribute("data-or-waits");
      next?.setAttribute("data-or-waits", "");
      waits = next;
    }
    for (const row of block.children) {
      if (row === waits) break;
      if (!seen.has(row) && (row.matches(DRAWN) || row.querySelector(DRAWN))) seen.add(row);
    }
  };
  new MutationObserver(look).observe(document, {childList: true, subtree: true});
}
