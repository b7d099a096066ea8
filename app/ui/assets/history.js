// A page puts into its address what it shows, so that a link shows what its sender saw. Streamlit makes an entry of the
// browser's history of each: from Schedule it took four times Back to Live, or came to one page with the other's address.
// So there is one entry for what somebody does, whatever comes of it; what a page does by itself changes the newest, as
// does what comes long after: a click that changed nothing is not what a page did minutes later.
{
  const LASTS = 1e4;
  let acted = -Infinity;
  for (const kind of ["pointerdown", "click", "keydown", "drop"])
    addEventListener(kind, () => { acted = performance.now(); }, true);
  addEventListener("popstate", () => { acted = -Infinity; }, true);
  const push = history.pushState;
  history.pushState = function (...entry) {
    const make = performance.now() - acted < LASTS ? push : history.replaceState;
    acted = -Infinity;
    make.apply(this, entry);
  };
}
