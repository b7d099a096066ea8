// A page puts into its address what it shows, so that a link shows what its sender saw. Streamlit makes an entry of the
// browser's history of each: from Schedule it took four times Back to Live, or came to one page with the other's address.
// So there is one entry for what somebody does, whatever comes of it; what a page does by itself changes the newest, as
// does what comes long after: a click that changed nothing is not what a page did minutes later. A run that began soon
// after it may take as long as it does. The key that colours.js presses is nobody's.
{
  const LASTS = 1e4, RUNS = '[data-test-script-state="running"]';
  let acted = -Infinity, began = Infinity;
  for (const kind of ["pointerdown", "click", "keydown", "drop"])
    addEventListener(kind, event => { if (event.isTrusted) acted = performance.now(); }, true);
  const look = () => { began = document.querySelector(RUNS) ? Math.min(began, performance.now()) : Infinity; };
  new MutationObserver(look).observe(document, {subtree: true, attributeFilter: ["data-test-script-state"]});
  addEventListener("popstate", () => { acted = -Infinity; }, true);
  const push = history.pushState;
  history.pushState = function (...entry) {
    const make = Math.min(began, performance.now()) - acted < LASTS ? push : history.replaceState;
    acted = -Infinity;
    make.apply(this, entry);
  };
}
